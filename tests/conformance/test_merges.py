"""`ringverify check` of a merge: its lines, its report and its exit codes are those of an implementation."""

from pathlib import Path

import pytest
from command_line import assert_one_line, miniature

from ringverify import run_conformance
from ringverify.merging.properties import PROPERTIES
from ringverify.targets import MERGES

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLES = ROOT / "docs" / "examples"
RIGHT, WRONG = f"{EXAMPLES / 'my_merge.py'}:merge_partials", f"{EXAMPLES / 'wrong_merge.py'}:merge_partials"
MERGES_OF_TESTS = ROOT / "tests" / "merging" / "merges.py"

SCALED = """import torch, ringverify

@ringverify.merge()
def merge_partials(out_a, lse_a, out_b, lse_b):
    lse = torch.logaddexp(lse_a, lse_b)
    weights = (torch.exp(x - lse).transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    return sum(weight * out * factor for weight, out, factor in zip(weights, (out_a, out_b), (1, 1.001))), lse
"""


def test_a_right_merge_is_conformant(ringverify):
    """Every property has a line, and what is not declared is said."""
    outcome = ringverify.check(RIGHT, "--max-examples", "2")
    assert outcome.code == 0, outcome.out
    assert list(outcome.verdicts()) == list(PROPERTIES)
    assert set(outcome.verdicts().values()) == {"pass", "unsupported"}
    assert "  conformant: 13 pass, 2 unsupported\n" in outcome.out
    assert "not declared, so not tested: nan, float16" in outcome.out
    (verdict,) = outcome.told("implementation")
    assert "world" not in verdict
    assert outcome.told("footer")[0]["exit_code"] == 0


def test_a_wrong_merge_is_shown_with_its_smallest_case_and_cause(ringverify):
    """In the terminal, the report, JUnit and on the page alike; the replay line shows it again."""
    outcome = ringverify.check(
        WRONG, "--only", "far_apart,all_empty,merged_out", "--junit", "j.xml", "--html", "p.html", "--max-examples", "5"
    )
    assert outcome.code == 1
    assert outcome.verdicts() == {"merged_out": "pass", "far_apart": "fail", "all_empty": "fail"}
    far, empty = outcome.told("counterexample")
    assert far["case"] is None
    assert far["merge_case"]["values"] in ("far", "large")
    assert (far["merge_case"]["partials"], far["merge_case"]["tokens"], far["merge_case"]["dim"]) == (2, 1, 1)
    assert far["diagnosis"] == "the weights are exp(lse), without a shift: they overflow or vanish"
    assert empty["diagnosis"] == far["diagnosis"]  # 0 / 0: the same mistake, and nothing is subtracted
    lines = outcome.out.splitlines()
    (first,) = (place for place, line in enumerate(lines) if line.startswith("  fail         far_apart"))
    assert lines[first + 1].strip() == "out is wrong: 1 of 1 elements"
    assert lines[first + 2].startswith("        case    2 partials batch=1 tokens=1 heads=1 dim=1 float32 values=")
    for text in (Path("j.xml").read_text(), Path("p.html").read_text()):
        assert "without a shift: they overflow or vanish" in text
        assert "--only far_apart --seed 0" in text
    again = ringverify.check(*far["merge"])
    assert again.code == 1
    assert again.told("counterexample")[0]["merge_case"] == far["merge_case"]
    confirmed = ringverify("confirm", "report-1.jsonl")
    assert "this violation has no case file" in confirmed.out


def test_a_wrong_merge_is_told_once(ringverify):
    """Where several properties see it; of two partials, nothing can be grouped otherwise: the first case has three."""
    Path("scaled.py").write_text(SCALED)
    outcome = ringverify.check("scaled.py:merge_partials", "--only", "merged_out,order,grouping,all_empty")
    told = outcome.told("counterexample")
    assert {event["property"]: event["same_as"] for event in told} == {
        "merged_out": None,
        "all_empty": "merged_out",
        "order": "merged_out",
        "grouping": "merged_out",
    }
    assert outcome.out.count("        worst ") == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ends_its_process", "the process of the merge ended with exit code 3"),
        ("never_returns", "after 1 s the merge had not returned: at "),
        ("raises", "the merge raised ValueError: nothing to merge"),
    ],
)
def test_a_merge_that_gives_no_result_is_a_violation(ringverify, name, words):
    """Whatever it does to its process, which is not the tool's."""
    only = "all_empty" if name == "raises" else "merged_out"
    outcome = ringverify.check(f"{MERGES_OF_TESTS}:{name}", "--only", only, "--deadline", "1", "--max-examples", "1")
    assert outcome.code == 1, outcome.out
    (told,) = outcome.told("counterexample")
    assert words in told["summary"]
    if name == "raises":
        assert "merges.py" in told["detail"]


@pytest.mark.parametrize("target", MERGES)
def test_a_built_in_merge_has_a_verdict(ringverify, target):
    """Ours, and those of the published packages that are installed."""
    outcome = ringverify.check(target, "--max-examples", "3")
    assert outcome.code in (0, 3), outcome.out
    assert outcome.code == 0 or "needs the package" in outcome.err


def test_sixteen_bits_are_a_matter_of_declaration(ringverify):
    """The line `declare` says with what the error would be allowed."""
    outcome = ringverify.check(f"{MERGES_OF_TESTS}:rounds_weights", "--only", "low_precision")
    (told,) = outcome.told("counterexample")
    assert told["declare"].startswith('accumulates="bfloat16", with which this error is allowed; u = 2^-8')


def test_what_a_merge_cannot_be_asked_is_refused(ringverify):
    """Ranks, properties of attention, a run together with an implementation, other commands."""
    for arguments, words in (
        (
            (RIGHT, "--world", "gloo"),
            ("--world is for implementations of attention, and this is a merge; leave it out",),
        ),
        ((RIGHT, "--suite", "scale"), ("--suite scale is for implementations of attention",)),
        ((RIGHT, "--baseline", "known.toml"), ("--baseline is for implementations of attention",)),
        ((RIGHT, "--only", "forward"), ("unknown property 'forward' of a merge; known: merged_out",)),
        ((RIGHT, miniature("right:attend")), ("is a merge and", "check them in two runs")),
    ):
        outcome = ringverify.check(*arguments)
        assert outcome.code == 2
        assert_one_line(outcome.err, words)


def test_a_function_that_nobody_decorated_is_told_of_both_contracts(ringverify):
    """A file of a serving stack holds a merge, not attention."""
    Path("plain.py").write_text("def merge(out_a, lse_a, out_b, lse_b):\n    return out_a, lse_a\n")
    outcome = ringverify.check("plain.py:merge")
    assert outcome.code == 2
    assert_one_line(outcome.err, ("is a function", "or with @ringverify.merge(...) if it merges partial results"))


def test_a_test_that_takes_a_merge_for_attention_is_told_so():
    """By `run_conformance` and by all that loads targets of attention."""
    with pytest.raises(Exception, match="is a merge, not an implementation of attention: ringverify check"):
        run_conformance(RIGHT)


def test_the_time_budget_is_kept(ringverify):
    """And what it cut short is said."""
    outcome = ringverify.check(RIGHT, "--only", "merged_out", "--suite", "full", "--time-budget", "0.5")
    assert outcome.code == 0
    (told,) = outcome.told("property")
    assert told["reason"].startswith("the time budget ended after ")


def test_list_shows_merges_and_their_properties(ringverify):
    """One a line."""
    lines = ringverify("list", "merge-properties").out.splitlines()
    assert [line.split()[0] for line in lines] == list(PROPERTIES)
    assert set(MERGES) < set(ringverify("list", "implementations").out.split())
