"""Options and capabilities have one table each: what is typed, called, declared and documented comes from it."""

import argparse
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from tables import capabilities_table, options_table, properties_table, written

import ringverify
from ringverify.check.configuration import KEYS, TARGETS, WRITTEN
from ringverify.check.option_table import ARGUMENTS, OPTIONS, Option
from ringverify.check.options import CheckRequest
from ringverify.check.run import DEADLINES
from ringverify.cli.check import add_options
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.world import LOAD_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
OF_A_SESSION = {"time_budget", "baseline"}
"""Arguments of `run_conformance` that one decorated test does not have."""


def arguments_of(function):
    """The keywords of a function, each with nothing as its default."""
    parameters = inspect.signature(function).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.default is None}


def test_the_command_line_has_the_options_of_the_table_and_no_others():
    """In their order, with "not said" as the default of each."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    flags = [tuple(action.option_strings) for action in parser._actions if action.dest not in ("help", TARGETS)]
    assert flags == [
        tuple(flag for flag in (option.short, f"--{option.key}") if flag is not None) for option in OPTIONS
    ]
    assert all(value in (None, False, []) for value in vars(parser.parse_args([])).values())


def test_calls_take_the_arguments_of_the_table():
    """`run_conformance` all of them, a decorated test those that are not of a whole session."""
    assert arguments_of(ringverify.run_conformance) == {*ARGUMENTS}
    assert arguments_of(ringverify.conformance) == {*ARGUMENTS} - OF_A_SESSION
    assert {field.name for field in dataclasses.fields(CheckRequest)} == {*ARGUMENTS}


def test_pytest_has_the_options_of_the_table(pytestconfig):
    """As options and as settings; the names are looked up in the very pytest that runs this."""
    for option in OPTIONS:
        assert hasattr(pytestconfig.option, f"ringverify_{option.name}") == option.pytest, option.name
        if option.argument:
            assert pytestconfig.getini(f"ringverify_{option.name}") == ""


def test_a_project_file_has_the_options_of_the_table():
    """And the targets."""
    assert [*KEYS] == [TARGETS, *(option.key for option in OPTIONS)]
    assert {option.read for option in OPTIONS} - {None, str, Path} == {*WRITTEN}


def test_defaults_that_the_table_names_are_those_of_the_code():
    """In words there, as numbers here."""
    options = {option.name: option for option in OPTIONS}
    assert options[
        "deadline"
    ].default == "{simulated:g}, gloo {gloo:g}, on cuda {nccl:g}, a program {external:g}".format(**DEADLINES)
    assert options["load_deadline"].default == f"{LOAD_SECONDS:g}"
    options = CheckRequest().options()
    assert (options.suite, options.device, options.seed, str(options.cases)) == ("quick", "cpu", 0, ".ringverify")


@pytest.mark.parametrize("table", [options_table, capabilities_table])
def test_the_documented_table_is_the_one_that_is_made_of_the_code(table):
    """Whoever changes an option or a capability pastes the new table."""
    assert table() in PAGE, f"docs/options.md needs this table:\n{table()}"


def test_a_change_of_an_option_or_a_capability_changes_the_documented_table():
    """The proof that the test above can fail."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class More(Capabilities):
        ring_size: int | None = dataclasses.field(default=None, metadata={"meaning": "ranks of a ring"})

    assert options_table((*OPTIONS, Option(name="colour", meaning="draw in colour"))) not in PAGE
    assert options_table((dataclasses.replace(OPTIONS[0], default="gloo"), *OPTIONS[1:])) not in PAGE
    assert capabilities_table(More) not in PAGE


def readme_defaults(text):
    """The default of each capability in the README's table, as it is written there; several in a row have one each."""
    declared = text.split("## What do I declare?")[1].split("\n## ")[0]
    found = {}
    for names, defaults in re.findall(r"^\| (`[^|]+`) \| ([^|]+) \|", declared, re.MULTILINE):
        names, defaults = re.findall(r"`(\w+)`", names), re.findall(r"`([^`]+)`", defaults) or [defaults]
        found |= dict(zip(names, defaults * len(names) if len(defaults) == 1 else defaults, strict=True))
    return found


def test_the_readme_says_the_defaults_of_the_code():
    """Its table has rows of several capabilities, and more words on each; names and defaults are the code's."""
    declared = {field.name: written(field.default) for field in dataclasses.fields(Capabilities)}
    assert readme_defaults(README) == {"name": "its dotted name", **declared, "world_sizes": "any"}


def test_a_default_that_the_readme_gets_wrong_is_noticed():
    """The proof that the test above can fail."""
    wrong = README.replace('`("cpu",)`, `"both"`', '`("cpu",)`, `"never"`')
    assert readme_defaults(wrong) != readme_defaults(README)


def test_the_readme_says_what_the_properties_say():
    """As `ringverify list properties` does. Whoever changes a meaning pastes the new table."""
    assert f"{properties_table()}\n\n" in README, f"README.md needs this table:\n{properties_table()}"


def test_another_meaning_or_another_property_changes_the_table_of_the_readme():
    """The proof that the test above can fail: another text, another order, one more and one less."""
    first, *others = PROPERTIES.values()
    for changed in (
        [dataclasses.replace(first, meaning="out is right"), *others],
        [*others, first],
        [first, *others, dataclasses.replace(first, id="further")],
        [first, *others[:-1]],
        others,
    ):
        assert f"{properties_table(changed)}\n\n" not in README
