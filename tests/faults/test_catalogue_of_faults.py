"""The library of faults: mutants have a sentence, every row of the reports is covered, nothing right is rejected."""

import re
from dataclasses import replace

import pytest
from hunts import hunted

from ringverify.faults import catalogue, fault
from ringverify.faults.catalogue import MUTANTS
from ringverify.faults.masking import everything
from ringverify.faults.reports import OUT_OF_SCOPE, TOLD_AS
from ringverify.faults.ring import PLAIN, STEPS
from ringverify.lab.variants import VARIANTS
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import load

ROWS = [
    *["A1", "A2", "A3", "A4", "A6", "A8", "A9", "A10", "A11", "A12"],
    *["B1", "B2", "B3", "B4", "B6", "B7", "B8", "B9", "B10", "B11", "B12", "B13", "B14"],
    *["C1", "C4", "C5", "D1", "D2", "D3", "D4", "D5", "D6", "D9", "D10", "D11", "E2", "E3"],
    *["F1", "F2", "F3", "F4", "F6", "F7", "F9", "F11", "F12", "G1", "G2", "G3", "G5", "G6"],
    *["H1", "H2", "H3", "H5", "I1", "I2", "I3", "J1", "J2", "K1", "K2"],
]
"""The rows of bugs in public code, as the field's reports number them."""

REPORTS = [f"R{number}" for number in range(1, 17)]
"""The reports that the project started from."""

RIGHT = {"plain": PLAIN} | {name: variant.implementation for name, variant in VARIANTS.items()}


def row(id):
    """A1 of A1b."""
    return re.match(r"[A-Z]\d+", id)[0]


def test_every_mutant_says_what_is_wrong_and_where_that_was_seen():
    """Ids and sentences are unique, sources are there."""
    for id, one in MUTANTS.items():
        assert one.id == id
        assert one.implementation.name == f"mutant:{id}"
        assert re.fullmatch(r"[A-Z]\d+[a-e]?", id)
        assert re.fullmatch(r"\S.*[^.\s]", one.sentence)
        assert one.source
        assert one.kind in fault.FaultKind.__args__
    sentences = [one.sentence for one in MUTANTS.values()]
    assert sorted(sentences) == sorted(set(sentences))


def test_a_mutant_is_an_attribute_of_the_catalogue_by_its_id():
    """So that `module:attribute` names it where a process has to be told; what is no id is refused."""
    for id, one in MUTANTS.items():
        assert getattr(catalogue, id) is one.implementation
    assert load("ringverify.faults.catalogue:A1") is MUTANTS["A1"].implementation
    with pytest.raises(AttributeError, match="no mutant 'A99'"):
        catalogue.A99  # noqa: B018


def test_every_row_of_the_reports_has_a_mutant_or_a_reason_for_none():
    """Rows of bugs, and the first reports; nothing is in both lists, nothing invented."""
    told = {row(id) for id in MUTANTS if not id.startswith("O")} | set(TOLD_AS)
    assert told | set(OUT_OF_SCOPE) == {*ROWS, *REPORTS}
    assert not told & set(OUT_OF_SCOPE)
    assert all(OUT_OF_SCOPE.values())
    assert set(TOLD_AS.values()) <= set(MUTANTS)
    assert not set(TOLD_AS) & set(MUTANTS)


def test_two_mutants_of_one_id_are_refused():
    """In one group; the catalogue refuses them across groups."""
    faults = fault.Faults()
    faults.add("O1", "one", STEPS)
    with pytest.raises(ValueError, match="two mutants are called 'O1'"):
        faults.add("O1", "other", STEPS)


def test_a_mutant_by_the_name_of_a_cause_needs_one_cause_of_that_name():
    """None, or two that share a sentence, do not say which fault is meant."""
    faults = fault.Faults()
    faults.cause("lse is merged wrongly", replace(STEPS, merge=lambda a, b: a))
    faults.mutant("O1", "lse is merged wrongly")
    faults.cause("lse is merged wrongly", replace(STEPS, merge=lambda a, b: b))
    for says, count in (("lse is merged wrongly", 2), ("lse is forgotten", 0)):
        with pytest.raises(ValueError, match=f"mutant 'O2' needs one cause, and {count} are called '{says}'"):
            faults.mutant("O2", says)


def test_a_fault_is_recognised_in_every_direction_in_which_it_is_another():
    """What one direction runs alone has no direction; a fault of the mask may be on some blocks only."""
    faults = fault.Faults()
    faults.add("O1", "lse is merged wrongly", replace(STEPS, merge=lambda a, b: a))
    faults.add("O2", "all keys are attended", replace(STEPS, causal=everything), when="forward", masks=True)
    faults.add("O3", "a caller's tensor is changed", STEPS, kind="state")
    masked = [
        f"all keys are attended{blocks}{direction}"
        for blocks in ("", " on blocks from other ranks", " on the own block")
        for direction in ("", ", in the backward only", ", in the forward only")
    ]
    assert [one.sentence() for one in faults.causes] == ["lse is merged wrongly", *masked]
    faults.mutant("O4", masked[3])
    assert {id: one.sentence for id, one in faults.mutants.items()} == {
        "O1": "lse is merged wrongly",
        "O2": "all keys are attended, in the forward only",
        "O3": "a caller's tensor is changed",
        "O4": "all keys are attended on blocks from other ranks",
    }


@pytest.mark.parametrize("property", ["lse_gradient", "masked_rows", "overflow", "strided_inputs"])
@pytest.mark.parametrize("name", ["plain", *(pytest.param(name, marks=pytest.mark.nightly) for name in VARIANTS)])
def test_what_is_right_is_not_rejected(name, property):
    """The plain ring, of which every mutant is made, and every variant that looks wrong."""
    found = hunted(RIGHT[name], property, examples=4, seed=sum(map(ord, name)))
    assert found.counterexample is None, found.counterexample.case.describe()
    assert found.examples


@pytest.mark.parametrize(
    ("id", "property"),
    [
        ("A3", "forward"),
        ("A6", "forward"),
        ("A8b", "lse"),
        ("B2", "forward"),
        ("B9b", "forward"),
        ("C5", "forward"),
        ("D5b", "gradients"),
        ("D10", "forward"),
        ("F2", "gradients"),
        ("F4a", "gradients"),
        ("H3", "chunk_boundaries"),
        ("I1a", "strided_inputs"),
        ("O25", "lse_gradient"),
        ("O90", "inputs_untouched"),
    ],
)
@pytest.mark.by_day(2)
def test_a_mutant_is_killed_by_the_property_that_is_for_it(id, property):
    """Within the quick suite; the shrunk case is small."""
    found = hunted(MUTANTS[id].implementation, property, PROPERTIES[property].examples)
    assert found.counterexample is not None
    shown = found.counterexample.case
    assert shown.world_size <= 3
    assert max(shown.problem.nq, shown.problem.nk) <= 6
