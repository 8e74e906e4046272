"""A baseline: what is known does not fail a run, what is new does, and so does what is known no more."""

import json
from pathlib import Path

import pytest
from command_line import assert_one_line, miniature
from report_lines import VALIDATOR

from ringverify.check.baseline import read_baseline
from ringverify.check.outcome import ImplementationOutcome
from ringverify.events import Known, PropertyEvent

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("unexplained")]

KNOWN = {
    "implementation": "swapped gradients",
    "property": "gradients",
    "reason": "dK and dV change places on the way back",
    "link": "https://example.org/issues/12",
}
SWAPPED = (miniature("faulty_rings:swapped_gradients"), "--only", "forward,gradients", "--max-examples", 6)
RIGHT = (miniature("right:attend"), "--only", "forward", "--max-examples", 2)


def written(folder, *entries, name="baseline.toml"):
    """A baseline file with these entries."""
    tables = (
        "[[violation]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in e.items()) for e in entries
    )
    (folder / name).write_text("\n".join(tables), encoding="utf-8")
    return name


def assert_as_the_schema_has_it(events):
    """Every event is one of the published schema; the footer's seal, which is its file's, was read already."""
    for event in events:
        VALIDATOR.validate({**event, "seal": "its file's"} if event["event"] == "footer" else event)


def test_a_known_violation_is_shown_as_known_and_does_not_fail_the_run(ringverify):
    """Its verdict stays what it is; only the exit code is another."""
    outcome = ringverify.check(*SWAPPED, "--baseline", written(ringverify.folder, KNOWN))
    assert outcome.code == 0
    assert outcome.verdicts() == {"forward": "pass", "gradients": "fail"}
    assert outcome.told("property", verdict="fail")[0]["known"] == {"reason": KNOWN["reason"], "link": KNOWN["link"]}
    (counterexample,) = outcome.told("counterexample")
    assert Path(counterexample["file"]).is_file()
    assert "\n  known fail   gradients" in outcome.out
    assert f"{KNOWN['reason']} ({KNOWN['link']})" in outcome.out
    assert "violations: 1 pass, 1 fail (1 known)" in outcome.out
    footer = {"event": "footer", "verdict": "violations", "exit_code": 0, "known": 1, "unexpected": []}
    assert outcome.events[-1] == footer
    assert_as_the_schema_has_it(outcome.events)


def test_a_reason_of_several_lines_is_shown_as_one_and_a_mark_of_byte_order_is_no_mistake(ringverify):
    """What TOML and editors make of a text is not what people meant."""
    path = ringverify.folder / written(ringverify.folder, {**KNOWN, "reason": "dK and dV\n  change places\n"})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert read_baseline(path).known("swapped gradients", "gradients").reason == "dK and dV change places"


def test_a_violation_that_is_not_in_the_baseline_fails_the_run(ringverify):
    """Another property of the same implementation, and the same property of another one."""
    swapped = {**KNOWN, "implementation": "wrong scale"}
    targets = [miniature(f"faulty_rings:{name}") for name in ("swapped_gradients", "wrong_scale")]
    baseline = written(ringverify.folder, KNOWN, swapped)
    outcome = ringverify.check(*targets, "--only", "forward,gradients", "--max-examples", 6, "--baseline", baseline)
    assert outcome.code == 1
    new = [event for event in outcome.told("property", verdict="fail") if "known" not in event]
    assert [(event["implementation"], event["property"]) for event in new] == [("wrong scale", "forward")]
    assert (outcome.events[-1]["exit_code"], outcome.events[-1]["known"]) == (1, 2)


def test_a_pass_that_was_to_fail_ends_with_2_and_says_which_entry_to_take_out(ringverify):
    """The implementation is right; the file is wrong."""
    baseline = written(ringverify.folder, {**KNOWN, "implementation": "right", "property": "forward"})
    outcome = ringverify.check(*RIGHT, "--baseline", baseline)
    assert outcome.code == 2
    line = "baseline baseline.toml: forward of right passes, but is listed as violated"
    assert line in outcome.out
    assert "remove the entry" in outcome.out
    assert outcome.events[-1]["verdict"] == "conformant"
    assert outcome.events[-1]["exit_code"] == 2
    assert outcome.events[-1]["unexpected"][0].startswith(line)
    assert_as_the_schema_has_it(outcome.events)


@pytest.mark.nightly
def test_what_not_every_run_finds_may_pass(ringverify):
    """`found = "sometimes"` is for rare cases: random seeds, smaller suites, other worlds."""
    baseline = written(
        ringverify.folder, {**KNOWN, "implementation": "right", "property": "forward", "found": "sometimes"}
    )
    assert ringverify.check(*RIGHT, "--baseline", baseline).code == 0
    baseline = written(ringverify.folder, {**KNOWN, "found": "sometimes"})
    assert ringverify.check(*SWAPPED, "--baseline", baseline).code == 0


def test_a_known_property_that_is_not_tried_is_no_surprise(ringverify):
    """Nor is an entry of a built-in implementation that is not in this run."""
    entries = [{**KNOWN, "implementation": "right"}, {**KNOWN, "implementation": "peer:ring-attention-pytorch"}]
    assert ringverify.check(*RIGHT, "--baseline", written(ringverify.folder, *entries)).code == 0


@pytest.mark.nightly
def test_a_baseline_may_name_implementations_that_this_run_does_not_check(ringverify):
    """One file serves several jobs; the run says whom it passed over, so that a mistyped name is seen."""
    entries = [{**KNOWN, "implementation": "another team's ring"}, KNOWN]
    outcome = ringverify.check(*RIGHT, "--baseline", written(ringverify.folder, *entries))
    assert outcome.code == 0, outcome.err
    assert "in the baseline, but not checked in this run: another team's ring, swapped gradients" in outcome.out
    assert outcome.events[-1]["elsewhere"] == ["another team's ring", "swapped gradients"]
    assert_as_the_schema_has_it(outcome.events)
    alone = ringverify.check(*SWAPPED, "--baseline", written(ringverify.folder, KNOWN))
    assert "not checked in this run" not in alone.out


def test_stopping_at_the_first_violation_goes_past_known_ones(ringverify):
    """With -x the property after a known violation is tried."""
    baseline = written(ringverify.folder, KNOWN)
    outcome = ringverify.check(*SWAPPED[:2], "gradients,inputs_untouched", *SWAPPED[3:], "-x", "--baseline", baseline)
    assert outcome.code == 0
    assert outcome.verdicts() == {"gradients": "fail", "inputs_untouched": "pass"}


def test_the_exit_code_is_that_of_the_worst_that_is_not_known():
    """A new violation, then a baseline that is out of date, then what could not be learned."""

    def code(*properties):
        numbers = {"examples": 1, "seconds": 0.0, "margin": None}
        events = [
            PropertyEvent(implementation="a", property=str(number), verdict=verdict, **numbers, **fields)
            for number, (verdict, fields) in enumerate(properties)
        ]
        return ImplementationOutcome.of(events).exit_code

    known, gone = (
        ("fail", {"known": Known(reason="it is", link="https://example.org")}),
        ("pass", {"unexpected": "it passes"}),
    )
    new, unknown, passed, unsupported = ((verdict, {}) for verdict in ("fail", "inconclusive", "pass", "unsupported"))
    assert code(known) == code(passed) == code(passed, known, unsupported) == 0
    assert code(new, gone, unknown, known) == 1
    assert code(gone, unknown, known) == 2
    assert code(unknown, known) == code(unsupported) == code() == 3


# What the file says, and what the line has to name.
ENTRY = "".join(f"{key} = {json.dumps(value)}\n" for key, value in {**KNOWN, "implementation": "right"}.items())
TABLE = f"[[violation]]\n{ENTRY}"
WRONG_FILES = {
    "not TOML": ("[[violation]\n", ["is not TOML", "line 1"]),
    "unknown key of the file": (f"version = 1\n{TABLE}", ["unknown key 'version'", "[[violation]]"]),
    "misspelt table": (TABLE.replace("violation", "violations"), ["unknown key 'violations'", "[[violation]]"]),
    "one table, not a list": (TABLE.replace("[[violation]]", "[violation]"), ["not a list of tables", "[[violation]]"]),
    "a list of texts": ('violation = ["forward"]\n', ["not a list of tables", "[[violation]]"]),
    "unknown key": (TABLE + 'because = "of me"\n', ["violation 1", "unknown key 'because'", "reason"]),
    "misspelt key": (TABLE.replace("reason", "reasons"), ["unknown key 'reasons'", "did you mean 'reason'?"]),
    "no reason": (TABLE.replace("reason = ", "# "), ["violation 1", "reason is missing", "link"]),
    "no link": (TABLE.replace("link = ", "# "), ["violation 1", "link is missing"]),
    "blank reason": (TABLE.replace(KNOWN["reason"], "  "), ["reason is '  '", "expected a text"]),
    "reason of another type": (TABLE.replace(f'"{KNOWN["reason"]}"', "12"), ["reason is 12", "expected a text"]),
    "link that is none": (TABLE.replace("https://", ""), ["link is 'example.org/issues/12'", "https"]),
    "found that is none": (TABLE + 'found = "never"\n', ["found is 'never'", "'always' or 'sometimes'"]),
    "unknown property": (TABLE.replace("gradients", "gradient"), ["'gradient'", "did you mean 'gradients'?"]),
    "one id twice": (f"{TABLE}\n{TABLE}", ["violations 1 and 2", "gradients of right"]),
}


@pytest.mark.parametrize("mistake", WRONG_FILES)
def test_a_wrong_baseline_is_one_line_and_exit_code_2(mistake, ringverify):
    """Before anything runs; the report is not begun."""
    content, words = WRONG_FILES[mistake]
    (ringverify.folder / "known.toml").write_text(content, encoding="utf-8")
    outcome = ringverify("check", *RIGHT, "--baseline", "known.toml", "--report", "report.jsonl")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["baseline known.toml", *words])
    assert outcome.out == ""
    assert [path.name for path in ringverify.folder.iterdir()] == ["known.toml"]


def test_a_baseline_that_cannot_be_read_is_one_line_and_exit_code_2(ringverify):
    """No file, a folder, and bytes that are no text."""
    (ringverify.folder / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    for name, words in (("none.toml", "No such file"), (".", "directory"), ("bytes.toml", "not UTF-8")):
        outcome = ringverify("check", *RIGHT, "--baseline", name)
        assert outcome.code == 2
        assert_one_line(outcome.err, [f"baseline {name}", words])


def test_the_untouched_file_is_accepted(tmp_path):
    """What the wrong files are made of is right; so is a file without entries."""
    (tmp_path / "known.toml").write_text(TABLE, encoding="utf-8")
    known = read_baseline(tmp_path / "known.toml").known("right", "gradients")
    assert (known.reason, known.link, known.found) == (KNOWN["reason"], KNOWN["link"], "always")
    (tmp_path / "empty.toml").write_text("# nothing is known\n", encoding="utf-8")
    assert read_baseline(tmp_path / "empty.toml").violations == {}
