"""The suites: quick and full repeat; nightly sees other cases each time, and tries first what failed before."""

import json
from pathlib import Path

import hypothesis
import pytest
from command_line import miniature
from hypothesis import Phase, Verbosity

from ringverify.check.options import MOST_DRAWN, seed_for
from ringverify.check.profiles import NAME, home_of_our_own, profile
from ringverify.properties.property import SUITES

pytestmark = pytest.mark.timeout(60)

WRONG = (miniature("faulty_rings:dropped_key"), "--only", "forward")


def test_only_the_nightly_suite_draws_its_seed():
    """And only where none is asked for."""
    assert seed_for("quick", None) == seed_for("full", None) == 0
    assert seed_for("nightly", 5) == seed_for("quick", 5) == 5
    assert seed_for("nightly", None, 77) == 77
    assert len({seed_for("nightly", None) for _ in range(20)}) > 1
    assert 0 <= seed_for("nightly", None) < MOST_DRAWN


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_is_a_profile_that_nothing_in_the_process_changes(suite):
    """Neither a profile that a project has under the same name nor one that is in force."""
    hypothesis.settings.register_profile(suite, derandomize=True, max_examples=1)
    before = hypothesis.settings.get_current_profile_name()
    try:
        hypothesis.settings.load_profile(suite)
        assert hypothesis.settings.get_profile(NAME.format(suite)) is profile(suite)
        assert profile(suite).derandomize is False
        assert profile(suite).database is None
        assert profile(suite).phases == (Phase.generate,)
        assert profile(suite).verbosity == Verbosity.quiet
    finally:
        hypothesis.settings.load_profile(before)


def test_a_home_that_a_project_gave_hypothesis_is_given_back(tmp_path):
    """Its tests go on using it."""
    configuration = hypothesis.configuration
    configuration.set_hypothesis_home_dir(tmp_path / "theirs")
    try:
        with home_of_our_own():
            assert home(configuration) != tmp_path / "theirs"
        assert home(configuration) == tmp_path / "theirs"
    finally:
        configuration.set_hypothesis_home_dir(None)


def home(configuration):
    """The folder in which Hypothesis keeps what it keeps."""
    found = configuration.storage_directory("x", intent_to_write=False)
    return Path(getattr(found, "path", found)).parent


def test_a_nightly_run_says_its_seed_and_is_repeated_by_it(ringverify):
    """In the header, for people and in the report."""
    drawn = ringverify.check(*WRONG, "--suite", "nightly", "--max-examples", 2)
    seed = drawn.events[0]["seed"]
    assert f"suite nightly, seed {seed}" in drawn.out
    for case in Path(".ringverify").glob("*.json"):
        case.unlink()  # or it would begin with this
    again = ringverify.check(*WRONG, "--suite", "nightly", "--max-examples", 2, "--seed", seed)
    assert drawn.told("counterexample")[0]["shrunk_from"] == again.told("counterexample")[0]["shrunk_from"]


def test_a_nightly_run_begins_with_what_failed_before(ringverify):
    """Quick and full runs do not: they are the same wherever they run."""
    (first,) = ringverify.check(*WRONG, "--max-examples", 4).told("counterexample")
    nightly = ringverify.check(*WRONG, "--max-examples", 4, "--suite", "nightly")
    (again,) = nightly.told("counterexample")
    assert nightly.told("property")[0]["examples"] == 1
    assert again["shrunk_from"] == first["case_text"]
    (quick,) = ringverify.check(*WRONG, "--max-examples", 4).told("counterexample")
    assert quick["shrunk_from"] == first["shrunk_from"] != first["case_text"]


def test_what_an_earlier_run_left_is_tried_on_its_own_target_only_and_damage_is_passed_over(ringverify):
    """Cases of others, of other properties, damaged and edited ones."""
    (first,) = ringverify.check(*WRONG, "--max-examples", 4).told("counterexample")
    found = Path(first["file"])
    content = json.loads(found.read_text())
    found.write_text(json.dumps({**content, "summary": "edited"}))
    found.with_name(found.stem + "0.json").write_text("{")
    nightly = ringverify.check(*WRONG, "--max-examples", 4, "--suite", "nightly", "--seed", 0)
    assert nightly.told("counterexample")[0]["shrunk_from"] == first["shrunk_from"]
