"""Implementations that need certain shapes: never asked for others if they say so, told what to say if they do not."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import re
from pathlib import Path

import needs
import pytest
from hunts import hunted

from ringverify.cases.case import why_unsupported
from ringverify.cases.running import Runner
from ringverify.cases.shapes import few_lengths
from ringverify.check.drawing import drawn
from ringverify.check.hunting import hunt
from ringverify.check.outside import UNSEEN
from ringverify.check.run import undeclared
from ringverify.check.tried import Tried
from ringverify.cli.worker import FOLDER
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.property import Property
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(240)

MINIATURES = Path(needs.__file__).parent
DECLARED_COMPILED = '@implementation(name="right", world_sizes=(1, 2), shapes="compiled")'
DECLARED = (needs.declared_ulysses, needs.declared_narrow, needs.declared_blocks)


@pytest.mark.parametrize("attend", DECLARED, ids=lambda one: one.name)
@pytest.mark.by_day(1)
def test_who_declares_what_it_needs_is_conformant(attend):
    """Every property that applies is put to the test, and no case is drawn that it refuses: it would raise."""
    examples = 3 if attend is needs.declared_blocks else 4
    for id, property in PROPERTIES.items():
        if property.unsupported(attend.capabilities) is None:
            found = hunted(attend, id, examples)
            assert found.counterexample is None, found.counterexample
            assert found.examples, id


def test_sdpa_under_a_causal_mask_is_right_for_every_scale_that_it_is_asked_for():
    """`scale=True` is of positive scales; under a negative one, a claim of its own, torch's `is_causal` has NaN."""
    assert hunted(needs.declared_ulysses, "overflow", 40).counterexample is None
    shown = hunted(needs.boasting_ulysses, "forward", 40, explain=True).counterexample
    assert shown is not None
    assert (shown.case.problem.causal, shown.case.problem.scale) == (True, -0.7)
    assert shown.hints[0].text == (
        "The case passes with scale=0.7. Negative scales are tested only because negative_scale=True is declared: "
        "remove it if they are not supported"
    )


@pytest.mark.parametrize(
    ("attend", "hint"),
    [
        (needs.silent_ulysses, r'heads=\d+. If your implementation requires this, declare heads_multiple="world_size"'),
        (needs.silent_narrow, r"head_dim=64. If your implementation requires this, declare head_dims=\(64, 128\)"),
        (needs.silent_blocks, r"n=\d+. If your implementation requires this, declare length_multiple=128"),
    ],
    ids=lambda one: one.name if isinstance(one, Implementation) else "",
)
def test_who_does_not_is_told_which_capability_says_it(attend, hint):
    """It fails, for what is declared is all shapes; the smallest case passes once it has a shape that fits."""
    shown = hunted(attend, "forward", 20, explain=True).counterexample
    assert shown is not None
    assert shown.violation.reason[0] == "raised"
    assert re.fullmatch(f"The case passes with {hint}", shown.hints[0].text)


class Recorder(Runner):
    """A runner that keeps how runs ended."""

    def run(self, case, **how):
        """One case, as ever."""
        seen = super().run(case, **how)
        self.ended = [*getattr(self, "ended", []), seen.failure]
        return seen


@pytest.mark.nightly
def test_hints_are_looked_for_where_a_failing_run_costs_no_processes():
    """In the simulated world, where the case fails there in the same way; and not at all for what no shape explains."""

    def runs_for_hints(attend: Implementation) -> tuple[int, int]:
        with contextlib.ExitStack() as stack:
            target = f"{needs.__file__}:{attend.function.__name__}"
            apart, beside = (Recorder(attend, world, target=target) for world in (GlooWorld(), SimulatedWorld()))
            for runner in (apart, beside):
                stack.callback(runner.world.close)
            ends = {"examples": 1, "seed": 0, "progress": lambda done: None}
            hunt(PROPERTIES["forward"], apart, watched=lambda: beside, **ends)
        return len(apart.ended), len(getattr(beside, "ended", []))

    processes, threads = runs_for_hints(needs.nothing_helps)
    assert threads > 10
    assert processes <= 15
    assert runs_for_hints(needs.returns_nothing)[1] <= 5


@pytest.mark.parametrize("property", ["forward", "gradients", "subgroups", "world_size_invariance"])
@pytest.mark.by_day(1)
def test_no_case_that_is_refused_is_tried_on_the_way_to_a_cause(property):
    """Drawing, shrinking and the diagnosis keep to the shapes: a run on any other would raise."""
    runner = Recorder(needs.declared_wrong, SimulatedWorld())
    shown = hunt(PROPERTIES[property], runner, examples=30, seed=0, progress=lambda done: None).counterexample
    assert shown is not None
    assert shown.case.world_size <= 2
    assert max(shown.case.problem.nq, shown.case.problem.head_dim) <= 64
    assert len(runner.ended) > 10
    assert not any(runner.ended)


COMPILED = Capabilities(
    dtypes=("float32", "bfloat16"), lse=True, gqa=True, value_dim=True, documents=True, key_lengths=True,
    cross_lengths=True, world_sizes=(1, 2, 4, 8), shapes="compiled",
)  # fmt: skip


def _shapes(property: Property, c: Capabilities) -> set[str]:
    tried = Tried()
    for case in drawn(property, c, property.examples):
        assert why_unsupported(case, c) is None
        tried.add(case)
    return tried.shapes


@pytest.mark.parametrize(
    ("c", "most"),
    [
        (COMPILED, 10),
        (dataclasses.replace(COMPILED, world_sizes=(1, 2, 4), length_multiple=128, head_dims=(64, 128)), 16),
        (dataclasses.replace(COMPILED, uneven=True, empty_shards=True, world_sizes=None), 20),
    ],
)
def test_where_every_new_shape_is_compiled_the_quick_suite_has_few(c, most):
    """Of several lengths, with and without fewer key heads, in each dtype; other features vary within each."""
    seen = {id: _shapes(one, c) for id, one in PROPERTIES.items() if one.unsupported(c) is None}
    assert max(map(len, seen.values())) <= most
    cases = drawn(PROPERTIES["forward"], c, 120)
    in_first = [case for case in cases if case.problem.nq == cases[0].problem.nq]
    for name in ("values", "world_size"):
        assert len({getattr(case, name) for case in in_first}) > 1
    assert len({(case.problem.documents, case.problem.key_lengths) for case in in_first}) > 2
    assert len({case.problem.nq for case in cases}) > 1
    assert {case.problem.hk == case.problem.heads for case in cases} == {True, False}
    assert {case.problem.head_dim for case in cases} == set(c.head_dims or (16, 32))


def test_the_written_jax_worker_is_asked_for_few_functions():
    """Each costs XLA seconds: problems on a number of devices, in the whole quick suite."""
    declared = {}
    for node in ast.parse((FOLDER / "jax_worker.py").read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name("CAPABILITIES")]) | ast.AugAssign(target=ast.Name("CAPABILITIES")):
                declared |= ast.literal_eval(node.value)
    few = Capabilities(**{name: tuple(value) if isinstance(value, list) else value for name, value in declared.items()})

    def functions(c):
        tried = [one for id, one in PROPERTIES.items() if id not in UNSEEN and one.unsupported(c) is None]
        cases = [case for one in tried for case in drawn(one, c, one.examples)]
        return {(case.problem, case.world_size) for case in cases}

    assert len(functions(few)) <= 60
    assert len(functions(dataclasses.replace(few, shapes="any"))) > 1000


def test_a_rank_may_hold_two_required_blocks_where_shapes_are_compiled():
    """Both in the sweep and in drawn cases; a window then ends inside a shard that has a block out of its reach."""
    c = dataclasses.replace(COMPILED, world_sizes=(1, 2, 4), length_multiple=128, window=True)
    assert few_lengths(c, "contiguous", 2) == (256, 512)
    assert few_lengths(c, "contiguous", 4) == (512,)
    swept = drawn(PROPERTIES["chunk_boundaries"], c, 60)
    assert any(case.world_size == 2 and case.problem.nq == 512 and case.problem.window for case in swept)


def test_the_verdict_says_how_many_shapes_were_tried(ringverify, tmp_path):
    """And that no other was; nothing is said of it where shapes cost nothing."""
    code = (MINIATURES / "right.py").read_text().replace('@implementation(name="right")', DECLARED_COMPILED)
    (tmp_path / "compiled.py").write_text(code)
    outcome = ringverify.check(f"{tmp_path / 'compiled.py'}:attend", "--only", "forward", "--max-examples", 12)
    assert outcome.code == 0, outcome.out
    (told,) = outcome.told("implementation")
    assert 1 < told["shapes"] <= 3
    assert f"  in {told['shapes']} shapes: every new one is compiled\n" in outcome.out
    assert "shapes other than a few" in told["undeclared"]


@pytest.mark.parametrize(
    ("attend", "words"),
    [
        (needs.declared_ulysses, ["negative_scale", "heads not divisible by the world size"]),
        (needs.declared_narrow, ["head_dim other than 64 or 128"]),
        (needs.declared_blocks, ["shard lengths not divisible by 128"]),
    ],
    ids=lambda one: one.name if isinstance(one, Implementation) else "",
)
def test_what_is_narrowed_is_listed_as_not_tested(attend, words):
    """Beside the features that are not declared."""
    listed = undeclared(attend.capabilities)
    assert set(words) <= set(listed)
    assert "poison_safe" not in listed  # without a window or a dilation nothing is skipped
