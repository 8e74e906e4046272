"""`ringverify vectors check --target`: implementations held to the vectors; verdicts and exit codes are check's."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from ringverify.cases.case import Undeclared
from ringverify.cases.running import Runner
from ringverify.check import planning
from ringverify.cli.main import main
from ringverify.implementation import Implementation
from ringverify.targets import load
from ringverify.vectors import checking, index, running
from ringverify.vectors.story import trial_name
from ringverify.vectors.trying import Trial, trial, tried
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.world import WorldUnavailable

ROOT = Path(__file__).resolve().parents[2]
MINIATURES = ROOT / "tests" / "miniatures"

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def check(fixtures, capsys, monkeypatch, tmp_path):
    """Exit code and output of a check of implementations against the committed vectors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*arguments: object) -> tuple[int, str]:
        code = main(["vectors", "check", str(fixtures), *map(str, arguments)])
        printed = capsys.readouterr()
        assert printed.err == ""
        return code, printed.out

    return run


def lines(out: str, verdict: str) -> list[str]:
    """Topics with that verdict."""
    return [line.split()[1] for line in out.splitlines() if line.startswith(f"  {verdict} ")]


def test_our_ring_is_conformant(check) -> None:
    """On a vector of each kind, in a process of its own."""
    ids = "V001,V016,V024,V027,V035,V046,V052,V061,V066,V078,V085,V090,V106,V114,V119,V124,V131,V140,V146"
    code, out = check("--target", "ring", "--only", ids)
    assert code == 0
    assert "conformant in the simulated world: " in out
    assert "fail" not in out
    assert len(lines(out, "pass")) >= 15


def test_our_rings_return_what_every_vector_says(fixtures) -> None:
    """Each vector on one of its layouts, by the ring and by the all-gather on different ones."""
    found = index.read(fixtures)
    for turn, name in enumerate(("ring", "allgather")):
        runner = Runner(load(name), SimulatedWorld())
        for story in found.stories.values():
            layout = story.layouts[(story.number + turn) % len(story.layouts)]
            wanted = trial(story, layout, runner.capabilities)
            assert isinstance(wanted, Trial), f"{story.id}: {wanted}"
            judgement = tried(wanted, checking.load(found, story), runner)
            assert judgement.violation is None, (
                f"{trial_name(wanted.story.id, wanted.layout)}: {judgement.violation.summary}"
            )


def test_a_wrong_ring_is_told_with_the_story_of_the_vector(check, fixtures) -> None:
    """What, where, why that vector is there, and how to see it again."""
    target = f"{ROOT / 'docs' / 'examples' / 'wrong_ring.py'}:attend"
    code, out = check("--target", target, "--only", "V001,V013,V037")
    assert code == 1
    assert lines(out, "pass") == ["shapes"]
    assert lines(out, "fail") == ["causal"]
    assert lines(out, "unsupported") == ["window"]
    assert "(wrong: V013; not declared: uneven)" not in out
    assert "case    V013, contiguous on 3 ranks: causal on three ranks and on four" in out
    assert "note    With two ranks left and right are the same neighbour" in out
    assert f"replay  ringverify vectors check {fixtures} --target {target} --only V013" in out
    assert "violations: 1 pass, 1 fail, 1 unsupported" in out


def test_what_is_not_declared_is_not_asked(check) -> None:
    """Nor does it pass: where nothing applies there is no verdict."""
    target = f"{ROOT / 'docs' / 'examples' / 'my_ring.py'}:attend"
    code, out = check("--target", target, "--only", "V001,V036")
    assert code == 0
    assert "unsupported  window                 not declared: window" in out
    code, out = check("--target", target, "--only", "V036")
    assert code == 3
    assert "inconclusive: 1 unsupported" in out


def test_two_implementations_are_told_one_after_the_other(check) -> None:
    """One that is wrong makes the whole a violation."""
    code, out = check("--target", "ring", "--target", "mutant:B1", "--only", "V013")
    assert code == 1
    assert out.index("ring\n") < out.index("mutant:B1\n")
    assert "conformant in the simulated world: 1 pass; not run on gloo" in out
    assert "violations: 1 fail" in out


@pytest.mark.parametrize(
    ("id", "vector", "result"),
    [
        ("B1", "V013", "out"),
        ("O17", "V131", "dk"),
        ("O16", "V131", "dq"),
        ("A8b", "V001", "lse"),
        ("O33", "V013", "dv"),
    ],
)
def test_each_result_is_held_to_the_vector(id: str, vector: str, result: str, fixtures) -> None:
    """Out, lse, and every gradient."""
    found = index.read(fixtures)
    story, implementation = found.stories[vector], load(f"mutant:{id}")
    runner = Runner(implementation, SimulatedWorld(), deadline=5.0)
    wanted = trial(story, story.layouts[1], implementation.capabilities)
    violation = tried(wanted, checking.load(found, story), runner).violation
    assert violation is not None
    assert result in violation.finding.tensors
    assert violation.also == tuple(("value", tensor) for tensor in violation.finding.tensors)


def test_what_raises_or_never_ends_is_a_violation(fixtures) -> None:
    """As in check: it was declared."""
    found = index.read(fixtures)
    story, implementation = found.stories["V013"], load("mutant:D4")
    runner = Runner(implementation, SimulatedWorld(), deadline=5.0)
    wanted = trial(story, story.layouts[2], implementation.capabilities)
    violation = tried(wanted, checking.load(found, story), runner).violation
    assert violation is not None
    assert violation.finding is None
    assert "deadlock" in violation.summary


def test_exact_vectors_allow_no_error(fixtures) -> None:
    """An answer that is one unit in the last place off is wrong there, and right elsewhere."""
    found, ring = index.read(fixtures), load("ring")

    def nudged(q, k, v, call):
        out, lse = ring.function(q, k, v, call)
        return out * (1 + 2**-22), lse

    runner = Runner(Implementation(nudged, "nudged", ring.capabilities), SimulatedWorld())
    verdicts = {}
    for id in ("V123", "V001"):
        story = found.stories[id]
        wanted = trial(story, story.layouts[0], runner.capabilities)
        verdicts[id] = tried(wanted, checking.load(found, story), runner).violation is None
    assert verdicts == {"V123": False, "V001": True}


def test_without_a_gradient_of_lse_the_forward_is_still_asked() -> None:
    """Out and lse need no cotangent."""
    ring = load("ring").capabilities
    story = index.read(ROOT / "fixtures").stories["V130"]
    whole = trial(story, story.layouts[0], ring)
    assert (whole.case.cotangent, whole.gradients, len(whole.tensors)) == ("lse", True, 5)
    less = trial(story, story.layouts[0], dataclasses.replace(ring, lse_gradient=False))
    assert (less.case.cotangent, less.gradients, less.tensors) == ("out", False, ("out", "lse"))
    least = trial(story, story.layouts[0], dataclasses.replace(ring, lse=False, lse_gradient=False))
    assert least.tensors == ("out",)
    lacking = trial(story, story.layouts[1], dataclasses.replace(ring, sharding="striped", balance=None))
    assert isinstance(lacking, Undeclared)
    assert (lacking.keyword, str(lacking)) == ("sharding", "sharding zigzag is not declared")


def test_a_world_that_cannot_be_set_up_is_inconclusive(check, monkeypatch) -> None:
    """Nothing was learned of the implementation."""

    class Nowhere:
        name = "simulated"

        def run(self, *arguments: object, **options: object) -> None:
            raise WorldUnavailable("no process can be started")

        def close(self) -> None:
            pass

    monkeypatch.setattr(running, "open_world", lambda name: Nowhere())
    code, out = check("--target", "ring", "--only", "V001")
    assert code == 3
    assert "inconclusive shapes                 no process can be started" in out


def test_many_failures_are_named_and_a_few_shown(check) -> None:
    """Five whole, all by id."""
    code, out = check(
        "--target", f"{MINIATURES / 'faulty_rings.py'}:wrong_scale", "--only", "V001,V002,V004,V006,V008,V010,V012,V013"
    )
    assert code == 1
    assert out.count("  case    V") == running.SHOWN


def test_real_processes_can_be_asked_for(check) -> None:
    """The gloo world, with a process a rank."""
    code, out = check("--target", "ring", "--world", "gloo", "--only", "V020")
    assert code == 0
    assert "runs of the gloo world" in out
    assert planning.PROCESS_WORLD_SIZES == (1, 2, 3, 4)
