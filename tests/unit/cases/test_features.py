"""The features by which a run is described: one value a dimension, true of the case, and quick to find."""

from __future__ import annotations

import dataclasses
import time

import pytest

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.cases.features import features_of, leaves_rows_empty
from ringverify.check.drawing import drawn
from ringverify.events import ABSENT, PRESENT
from ringverify.properties.catalogue import PROPERTIES
from ringverify.ring.declared import ring

DRAWN = [case for id in ("forward", "masked_rows") for case in drawn(PROPERTIES[id], ring.capabilities, 150)]


def of(world_size=2, **fields):
    """The features of a case that has these fields of a problem."""
    return features_of(Case(problem=Problem(**{"query_length": 8} | fields), world_size=world_size))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"world size": "2", "causal": ABSENT, "window": ABSENT, "documents": ABSENT, "lengths": "even"}),
        ({"world_size": 4, "causal": True}, {"world size": "3-4", "causal": PRESENT}),
        ({"world_size": 9}, {"world size": "more than 8", "lengths": "empty shards"}),
        ({"query_length": 9}, {"lengths": "uneven", "keys on a rank": "2-8"}),
        ({"query_length": 99, "head_dim": 40}, {"keys on a rank": "more than 32", "head_dim": "more than 32"}),
        ({"window": (2, None)}, {"window": "left"}),
        ({"window": (None, 0)}, {"window": "right"}),
        ({"window": (1, 1)}, {"window": "both sides"}),
        ({"window": (None, None)}, {"window": "unbounded"}),
        ({"documents": (0, 3, 8)}, {"documents": "everywhere", "empty rows": ABSENT}),
        ({"documents": (0, 3, 7)}, {"documents": "with padding", "empty rows": PRESENT}),
        ({"dilation": Dilation(((4, 2),))}, {"dilation": "split", "empty rows": PRESENT}),
        ({"dilation": Dilation(((4, 2), (4, 1)), "shared")}, {"dilation": "shared", "empty rows": ABSENT}),
        ({"key_length": 9}, {"cross_lengths": "more keys", "empty rows": ABSENT}),
        ({"key_length": 7, "causal": True}, {"cross_lengths": "more queries", "empty rows": PRESENT}),
        ({"heads": 4, "key_heads": 2, "value_dim": 3}, {"gqa": PRESENT, "value_dim": PRESENT}),
        ({"scale": -1.0, "softcap": 2.0}, {"scale": "negative", "softcap": PRESENT}),
        ({"batch": 4, "heads": 4, "head_dim": 4}, {"dimensions": "all equal"}),
        ({"batch": 1, "heads": 2, "head_dim": 3}, {"dimensions": "all different"}),
    ],
)
def test_a_case_has_the_features_that_its_fields_say(fields, expected):
    """Each dimension by itself, and at its limits."""
    found = of(**fields)
    assert {name: found[name] for name in expected} == expected


def test_every_case_has_a_value_in_every_dimension():
    """The same dimensions in the same order, so that counts of one dimension add up to the number of cases."""
    names = list(features_of(DRAWN[0]))
    assert all(list(features_of(case)) == names for case in DRAWN)
    assert all(isinstance(value, str) and value for case in DRAWN for value in features_of(case).values())


def test_empty_rows_are_found_without_making_the_pattern():
    """As the pattern has them; under a dilation with key_lengths some may be missed, and none is made up."""
    missed = 0
    for case in DRAWN:
        p = case.problem
        found, real = leaves_rows_empty(p), bool((multiplicity(p).sum(axis=3) == 0).any())
        both = p.dilation is not None and p.key_lengths is not None
        assert found == real or (both and real), case.describe()
        missed += found != real
    assert missed <= len(DRAWN) // 50


def test_features_are_found_quickly():
    """In less than 30 microseconds of a processor a case: they are counted for every example of a run."""
    assert 1_000_000 * min(_seconds() for _ in range(5)) < 30 * len(DRAWN)


def _seconds() -> float:
    fresh = [dataclasses.replace(case, seed=case.seed + 1) for case in DRAWN]
    started = time.process_time()
    for case in fresh:
        features_of(case)
    return time.process_time() - started
