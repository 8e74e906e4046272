"""What the documents say is what the code does: their code runs, their commands end as promised, their links lead."""

from __future__ import annotations

import dataclasses
import re
import shlex

import pytest
import yaml
from documents import DOCUMENTS, GENERATED, INLINE, NOT_RUN, ROOT, Block, Command, blocks, commands, left_out, text_of
from documents import reader as reader  # a fixture

from ringverify.cli.main import _parser
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import BUILT_IN

README = text_of("README.md")
PLACEHOLDERS = ("FILE", "mine.py", "my_package")


def console_commands() -> list[tuple[str, Command]]:
    """Every command of every console block."""
    return [(name, c) for name in DOCUMENTS for b in blocks(name) if b.language == "console" for c in commands(b)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in GENERATED])
@pytest.mark.by_day(2)
def test_who_follows_a_document_sees_what_it_says(document, reader):
    """From top to bottom in an empty folder: Python runs, commands end with the exit code and the lines shown."""
    reader.follow(document)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("ringverify list peers  # exits with 1", "ended with 0"),
        ("ringverify list mutant", "ended with 2"),
        ("ringverify list peers\npeer:flash", "does not show"),
        ("ringverify plan --length 24 --ranks 3 --dilation 8:1\nrank  own\n   1  ███", "shows\n   0  ███\nbefore"),
        ('python -c "raise SystemExit(4)"', "ended with 4"),
    ],
)
def test_a_document_that_is_wrong_is_noticed(line, message, reader):
    """The gate can close: an exit code, a command, a line."""
    for command in commands(Block("", "console", None, f"$ {line}\n")):
        with pytest.raises(AssertionError, match=message):
            reader.run(command)


def test_what_is_not_run_has_a_reason_and_is_still_there():
    """No reason without its command; and most commands are run."""
    found = [command for name, command in console_commands() if name not in GENERATED]
    for words in NOT_RUN:
        assert any(" ".join(command.words).startswith(words) for command in found), words
    assert sum(left_out(command) is None for command in found) > 20


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_are_shown_as_they_are(document):
    """A block that says which file of the project it is has the same text."""
    for block in blocks(document):
        if block.name is not None and block.name.startswith("docs/"):
            assert block.text == (ROOT / block.name).read_text(encoding="utf-8")


def test_the_first_verdict_takes_fifteen_lines_at_most():
    """Of code: what is neither blank nor a text that explains."""
    code = re.sub(r'^ *""".*"""$', "", (ROOT / "docs/examples/my_ring.py").read_text(encoding="utf-8"), flags=re.M)
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    assert "docs/examples/my_ring.py" in [block.name for block in blocks("README.md")]


def mentioned() -> list[str]:
    """Every `ringverify` command that stands in a sentence or a table, and those of what the tool wrote."""
    inline = [found for name in DOCUMENTS if name not in GENERATED for found in INLINE.findall(text_of(name))]
    generated = [shlex.join(command.words) for name, command in console_commands() if name in GENERATED]
    return sorted({*inline, *(words for words in generated if words.startswith("ringverify"))})


@pytest.mark.parametrize("command", mentioned())
def test_every_command_that_is_mentioned_is_one(command):
    """Options and commands exist, and named targets and properties are known."""
    words = [word for word in shlex.split(command)[1:] if word != "…"]
    if len(words) == 1:
        words.append("--help")  # what is spoken of in general
        with pytest.raises(SystemExit, match="0"):
            _parser().parse_args(words)
        return
    options = _parser().parse_args(words)
    for target in getattr(options, "targets", ()):
        name = target.split(":")[0]
        assert target in BUILT_IN or (ROOT / name).is_file() or name.startswith(PLACEHOLDERS)
    for name in getattr(options, "only", None) or ():
        assert name in PROPERTIES


def test_the_readme_lists_every_capability_and_every_property():
    """The tables are complete: nothing can be declared or judged that they do not name, and each once."""
    declared = README.split("## What do I declare?")[1].split("\n## ")[0]
    for field in dataclasses.fields(Capabilities):
        assert f"`{field.name}`" in declared, field.name
    rows = re.findall(r"^\| (`[^|]+`) \|", declared, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(set(named))
    judged = README.split("## What must hold")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", judged, re.MULTILINE) == list(PROPERTIES)


def test_every_property_has_its_lens():
    """In the table of the page on tolerances, or it is one of those that measure no values."""
    lenses = text_of("docs/tolerances.md").split("## Four lenses")[1].split("\n## ")[0]
    without = {"inputs_untouched", "hazards", "progress", "traffic", "memory", "balance"}
    assert set(re.findall(r"`(\w+)`", lenses)) == set(PROPERTIES) - without


def test_the_action_is_shown_with_inputs_that_it_has():
    """In every YAML block; and its table of inputs is complete."""
    inputs = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"]
    shown = [yaml.safe_load(b.text) for name in DOCUMENTS for b in blocks(name) if b.language == "yaml"]
    steps = [step for content in shown for job in content["jobs"].values() for step in job["steps"]]
    uses = [step["with"] for step in steps if "ringverify" in step.get("uses", "")]
    assert len(uses) >= 3
    for given in uses:
        assert set(given) <= set(inputs)
        assert given["target"]
    table = text_of("docs/ci.md").split("| input |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([\w-]+)`", row)} == set(inputs)


def missing_from(text):
    """The files of a map that are not there; it names them from ringverify/ or from the top."""
    named = re.findall(r"`([\w/]+\.py)`", text)
    assert len(named) == len(set(named)), "a file is named where its room is described, and nowhere else"
    return [name for name in named if not ((ROOT / name).is_file() or (ROOT / "ringverify" / name).is_file())]


def test_the_map_of_the_house_names_files_that_exist():
    """In CONTRIBUTING.md, in the order in which a case meets them; and a file that is gone is noticed."""
    text = text_of("CONTRIBUTING.md").split("## From the command line to the verdict")[1].split("\n## ")[0]
    assert missing_from(text) == []
    assert missing_from("first `check/run.py`, then `check/gone.py`") == ["check/gone.py"]


@pytest.mark.parametrize("document", [*DOCUMENTS, "CONTRIBUTING.md", "SECURITY.md"])
def test_links_and_paths_lead_somewhere(document):
    """Links from where the document is, to headings too; paths in backticks from the top of the project."""
    text = text_of(document)
    for path in re.findall(r"`((?:ringref|ringverify|tests|docs|fixtures|\.github)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = link.partition("#")
        if "://" in path:
            continue
        target = (ROOT / document).parent / path if path else ROOT / document
        assert target.exists(), link
        assert not heading or heading in headings(target.read_text(encoding="utf-8")), link


def headings(text: str) -> set[str]:
    """The headings of a document, as GitHub makes anchors of them, and the anchors that it sets itself."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.MULTILINE)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}
    return made | set(re.findall(r'<a id="([^"]+)">', text))


def test_every_page_is_linked():
    """From the README, or from another page."""
    linked = {link for name in DOCUMENTS for link in re.findall(r"\]\((?:docs/)?([\w-]+\.md)", text_of(name))}
    assert {name.removeprefix("docs/") for name in DOCUMENTS if name.startswith("docs/")} <= linked
