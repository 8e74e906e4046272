"""In sixteen bits: what another declaration would have let pass is said, what is wrong is not excused by one."""

from __future__ import annotations

import dataclasses

import pytest
import undeclared

from ringverify.cases.running import Runner
from ringverify.check import accounting, declaring
from ringverify.check.hunting import hunt
from ringverify.check.run import counterexample_event
from ringverify.check.searching import Counterexample
from ringverify.faults.catalogue import MUTANTS
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.reports.story import story
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def in_time(monkeypatch):
    """What is said does not depend on how busy this machine is."""
    monkeypatch.setattr(declaring, "SECONDS", float("inf"))


@pytest.fixture
def undiagnosed(monkeypatch):
    """Looking for a declaration needs neither a cause nor what a failure needs, which take longer."""
    for name in ("when_it_fails", "explained"):
        monkeypatch.setattr(accounting, name, lambda *_, **__: None)


def found(attend: Implementation, property: str, examples: int = 20, **declared) -> Counterexample | None:
    """The counterexample of a property that a hunt ends with, in which nothing of ours goes wrong."""
    capabilities = dataclasses.replace(attend.capabilities, **declared)
    runner = Runner(dataclasses.replace(attend, capabilities=capabilities), SimulatedWorld())
    ended = hunt(PROPERTIES[property], runner, examples=examples, seed=0, progress=lambda done: None)
    assert ended.mishaps == []
    return ended.counterexample


RIGHT = [
    (undeclared.EAGER, {"accumulates": "bfloat16"}),
    (undeclared.FUSED, {"probabilities": "input"}),
    (undeclared.WIDENED, {"reduces": "input"}),
]


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16",)], ids=["with float32", "alone"])
@pytest.mark.parametrize(("attend", "declaration"), RIGHT, ids=lambda one: getattr(one, "name", ""))
@pytest.mark.parametrize("property", ["dtypes", "precision"])
@pytest.mark.by_day(1)
@pytest.mark.usefixtures("undiagnosed")
def test_what_would_pass_under_another_declaration_is_told_so(attend, declaration, property, dtypes):
    """The least permissive one; and with it, the property passes."""
    shown = found(attend, property, dtypes=dtypes)
    assert shown is not None
    assert shown.declaration == declaration
    ((name, value),) = declaration.items()
    event = counterexample_event(shown, implementation=attend.name, property=property)
    (line,) = [text for label, text in story(event) if label == "declare"]
    assert line == (
        f'would pass with {name}="{value}": declare it if that is what your kernel does '
        "(u = 2^-8, half the distance from 1 to the next bfloat16)"
    )
    assert found(attend, property, dtypes=dtypes, **declaration) is None


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param(("float32", "bfloat16"), id="with float32", marks=pytest.mark.nightly),
        pytest.param(("bfloat16",), id="alone"),
    ],
)
@pytest.mark.parametrize(
    "attend",
    [undeclared.WRONG_SCALE, undeclared.ALWAYS_WRONG_SCALE, undeclared.LAST_KEY_UNSEEN],
    ids=lambda one: one.name,
)
@pytest.mark.parametrize("property", ["dtypes", "overflow", "precision"])
@pytest.mark.by_day(3)
@pytest.mark.usefixtures("undiagnosed")
def test_no_declaration_excuses_a_fault(attend, property, dtypes):
    """Not even that of sums in bfloat16, whose bound may exceed the values."""
    shown = found(attend, property, dtypes=dtypes)
    assert shown is not None
    assert shown.declaration is None


@pytest.mark.parametrize(
    "mutant", ["A9", "E3b", *(pytest.param(id, marks=pytest.mark.nightly) for id in ("A2a", "B9a", "D3a", "O10"))]
)
@pytest.mark.nightly
@pytest.mark.usefixtures("undiagnosed")
def test_no_declaration_excuses_a_mutant_in_bfloat16_alone(mutant):
    """A merge, a mask, a layout, a scale, a formula: none is a matter of rounding."""
    attend = MUTANTS[mutant].implementation
    for property in ("forward", "gradients"):
        shown = found(attend, property, 40, dtypes=("bfloat16",))
        assert shown is None or shown.declaration is None


def test_other_declarations_are_tried_from_the_least_permissive_on():
    """Those of a gradient before those of every weight, narrower sums last, and none that is declared already."""
    plain = Capabilities(dtypes=("bfloat16",))
    sums = {"accumulates": "bfloat16"}
    reduces, probabilities = {"reduces": "input"}, {"probabilities": "input"}
    both = {**reduces, **probabilities}
    tried = list(declaring.alternatives(plain, "bfloat16"))
    assert tried == [
        reduces,
        probabilities,
        both,
        sums,
        {**sums, **reduces},
        {**sums, **probabilities},
        {**sums, **both},
    ]
    forward = dataclasses.replace(plain, gradients=False, probabilities="input", accumulates="bfloat16")
    assert list(declaring.alternatives(forward, "bfloat16")) == []


@pytest.mark.nightly
def test_gradients_summed_over_ranks_in_the_input_dtype_are_named_as_the_cause():
    """With the numbers that rounding each rank's part gives; declared, they are no fault."""
    shown = found(undeclared.WIDENED, "dtypes")
    assert shown.diagnosis.text.startswith(
        "dk and dv are summed over ranks in bfloat16, as the backward of an all-gather does"
    )


KINDS = ["A1", "A10", "A2a", "A9", "B9a", "E3b", "O10", "R6b"]
"""Mutants of the merge, of blocks left out, of masks, of scale, of gradients."""
QUICK = [("A10", "bfloat16"), ("E3b", "bfloat16"), ("O10", "float16")]
NIGHTLY = [
    pytest.param(mutant, dtype, marks=pytest.mark.nightly)
    for mutant in KINDS for dtype in ("bfloat16", "float16") if (mutant, dtype) not in QUICK
]  # fmt: skip


@pytest.mark.parametrize(("mutant", "dtype"), [*QUICK, *NIGHTLY])
@pytest.mark.nightly
def test_a_fault_declared_in_sixteen_bits_alone_never_breaks_the_diagnosis(mutant, dtype, monkeypatch):
    """Under every declaration of sums and probabilities, whatever the case was shrunk to."""
    monkeypatch.setattr("ringverify.diagnosis.diagnose.SECONDS", 1.0)
    failed = 0
    for accumulates in (dtype, "float32"):
        for probabilities in ("accumulates", "input"):
            narrow = {"dtypes": (dtype,), "accumulates": accumulates, "probabilities": probabilities}
            for property in ("gradients", "overflow"):
                shown = found(MUTANTS[mutant].implementation, property, 12, **narrow)
                failed += shown is not None
    assert failed
