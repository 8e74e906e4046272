"""Implementations that misbehave: violations told in words, by a process that stays fit to judge others."""

import functools
from pathlib import Path

import pytest
from command_line import miniature

from ringverify.check import finishing

pytestmark = pytest.mark.timeout(60)

INCONCLUSIVE = 3

JUDGED = ("forward", "gradients", "inputs_untouched")

# Which properties fail, on which rank (None: not one rank's doing), and what the summary of each says.
MISBEHAVING = {
    "wrong_shape": (JUDGED, {0, 1}, "returned out of shape (1, 0, 1, 1): (1, 1, 1, 1) is expected"),
    "wrong_dtype": (JUDGED, {0, 1}, "returned out in float64: float32 is expected"),
    "wrong_device": (JUDGED, {0, 1}, "returned out on device meta: cpu is expected"),
    "returns_none": (JUDGED, {0, 1}, "returned None for out: a tensor is expected"),
    "returns_a_tuple": (JUDGED, {0, 1}, "returned a tuple of 2 for out: a tensor is expected"),
    "returns_only_out": (JUDGED, {0, 1}, "returned a Tensor: with lse=True declared, (out, lse) is expected"),
    "raises_on_one_rank": (JUDGED, {1}, "rank 1 raised ValueError: rank 1 cannot go on"),
    "raises_backward": (JUDGED[1:], {1}, "rank 1 raised RuntimeError: no way back"),
    "exits_on_one_rank": (JUDGED, {1}, "rank 1 called sys.exit(5)"),
    "ends_its_process_on_one_rank": (JUDGED, {1}, "rank 1 called os._exit(7)"),
    "loops_for_ever": (JUDGED, {1}, "rank 1 had not returned"),
    "sleeps": (JUDGED, {1}, "rank 1 had not returned"),
    "leaves_a_rank_waiting": (JUDGED, {None}, "deadlock: rank 0 waits for a receive from rank 1"),
    "returns_nan": (JUDGED[:1], {1}, "wrong on rank 1"),
    "detaches": (JUDGED[1:], {0, 1}, "not attached to q, k and v by autograd: make it differentiable, or declare"),
    "changes_its_input": (JUDGED[2:], {1}, "rank 1 changed its input q during forward"),
}


@pytest.fixture
def impatient(monkeypatch):
    """Little time for shrinking what hangs: every attempt costs its deadline."""
    monkeypatch.setattr(finishing, "HUNG_DEADLINE", 0.2)
    monkeypatch.setattr(finishing, "HUNG_SHRINKING", 0.2)


@pytest.mark.parametrize("name", MISBEHAVING)
@pytest.mark.by_day(4)
def test_misbehaviour_is_a_violation_with_its_rank_in_words(name, ringverify, impatient):
    """Every property is still judged, and the process stays fit to judge others."""
    properties, ranks, words = MISBEHAVING[name]
    options = ("--only", ",".join(JUDGED), "--max-examples", "4")
    deadline = ("--deadline", "0.4") if name in ("loops_for_ever", "sleeps") else ()
    outcome = ringverify.check(miniature(f"misbehaving:{name}"), *options, *deadline)
    assert outcome.code == 1
    assert outcome.err == ""
    assert set(outcome.verdicts()) == set(JUDGED)
    assert set(outcome.verdicts().values()) <= {"pass", "fail"}
    for property in properties:
        (counterexample,) = outcome.told("counterexample", property=property)
        assert counterexample["rank"] in ranks
        assert words in counterexample["summary"]
        assert words in outcome.out
        assert Path(counterexample["file"]).is_file()
    assert_right_is_conformant(ringverify)


@pytest.mark.usefixtures("unexplained")
def test_a_breach_of_the_contract_is_told_without_our_own_traceback(ringverify):
    """The message says all; lines of the harness would send the reader the wrong way."""
    outcome = ringverify.check(miniature("misbehaving:wrong_dtype"), "--only", "forward")
    assert outcome.told("counterexample")[0]["detail"] == ""


@pytest.mark.usefixtures("unexplained")
def test_an_exception_is_told_with_the_line_that_raised_it(ringverify):
    """The implementation's own traceback is what its author needs."""
    outcome = ringverify.check(miniature("misbehaving:raises_on_one_rank"), "--only", "forward")
    assert "in raises_on_one_rank" in outcome.told("counterexample")[0]["detail"]
    assert "| ValueError: rank 1 cannot go on" in outcome.out
    assert outcome.told("property")[0]["margin"] is None


@pytest.mark.usefixtures("unexplained")
def test_a_message_is_told_as_it_is(ringverify):
    """Neither markup, emoji codes, half a surrogate pair nor a backslash at its end disturbs the verdict."""
    outcome = ringverify.check(miniature("misbehaving:raises_odd_text"), "--only", "forward")
    said = "rank 1 raised ValueError: [bold]no[/bold] :ring: \N{GREEK CAPITAL LETTER SIGMA} \udc80 [/] \\"
    assert outcome.code == 1
    (counterexample,) = outcome.told("counterexample")
    assert counterexample["summary"] == said
    assert said.replace("\udc80", r"\udc80") in outcome.out
    assert "odd [bold]name[/] :ring:" in outcome.out.splitlines()


def test_an_implementation_that_prints_is_judged_like_any_other(ringverify):
    """Its output stays with its process, the verdict and the report are not disturbed."""
    outcome = ringverify.check(
        miniature("misbehaving:prints_a_lot"), "--only", "forward,gradients", "--max-examples", 2
    )
    assert outcome.code == 0
    assert set(outcome.verdicts().values()) == {"pass"}
    assert "says line" not in outcome.out


IN_PROCESSES = {
    "raises_on_one_rank": ({1}, "rank 1 raised ValueError: rank 1 cannot go on"),
    "exits_on_one_rank": ({1}, "rank 1 called sys.exit(5)"),
    "ends_its_process_on_one_rank": ({1}, "rank 1's process ended with exit code 7"),
    "loops_for_ever": ({None, 1}, "in loops_for_ever"),
    "leaves_a_rank_waiting": ({None, 0}, "in leaves_a_rank_waiting (recv)"),
    "wrong_shape": ({0, 1}, "returned out of shape"),
    "prints_a_lot": (set(), ""),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", IN_PROCESSES)
@pytest.mark.by_day(1)
@pytest.mark.usefixtures("unexplained")
def test_misbehaviour_in_processes_is_told_alike(name, ringverify, monkeypatch):
    """A rank's process may end; the harness stays, and so do the worlds after it."""
    ranks, words = IN_PROCESSES[name]
    monkeypatch.setattr(finishing, "shrink", functools.partial(finishing.shrink, budget=1))
    hangs = name in ("loops_for_ever", "leaves_a_rank_waiting")
    options = ("--world", "gloo", "--world-sizes", "2", "--only", "forward", "--max-examples", "2")
    deadline = ("--deadline", "1") if hangs else ()
    outcome = ringverify.check(miniature(f"misbehaving:{name}"), *options, *deadline)
    assert outcome.err == ""
    assert outcome.told("implementation")[0]["world"] == "gloo"
    if ranks:
        (counterexample,) = outcome.told("counterexample")
        assert counterexample["rank"] in ranks
        assert words in counterexample["summary"]
    assert outcome.code == (1 if ranks else 0)
    assert ringverify.check(miniature("right:attend"), *options).code == 0


def test_out_of_memory_is_inconclusive(ringverify):
    """The machine gave up, not the implementation."""
    Path("hungry.py").write_text(
        "from ringverify import implementation\n"
        "@implementation(world_sizes=(2,))\n"
        "def attend(q, k, v, call):\n"
        "    raise MemoryError('no more')\n"
    )
    outcome = ringverify.check("hungry.py:attend", "--only", "forward")
    assert outcome.code == INCONCLUSIVE
    assert "out of memory" in outcome.told("property")[0]["reason"]
    assert outcome.told("implementation")[0]["implementation"] == "hungry.attend"


def assert_right_is_conformant(ringverify):
    """The process has not suffered."""
    outcome = ringverify.check(miniature("right:attend"), "--only", ",".join(JUDGED), "--max-examples", 3)
    assert outcome.code == 0, outcome.out
    assert outcome.told("implementation")[0]["verdict"] == "conformant"
