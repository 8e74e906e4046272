"""Why NaN in keys and values that no query attends reaches the results, where all is right without it."""

from __future__ import annotations

import dataclasses

from ringverify.cases.case import POISONED, Case
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.diagnosis.reading import finite
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import Probe, wrong_tensors
from ringverify.implementation import Capabilities

PRODUCT = "{what} that no query attends are multiplied by a weight of 0, not left out: 0 times NaN is NaN"
"""A product with what should not count; the values in out and dq, the keys in dq."""

REPLACED = (
    "{what} that no query attends are left out by arithmetic (times 0, plus -inf), not replaced: NaN in them stays NaN"
)
"""Keys whose scores are changed, or that are multiplied by 0 themselves, and perhaps values."""


def of_poison(case: Case, capabilities: Capabilities, probe: Probe) -> str | None:
    """Return how NaN gets from keys and values that no query attends to results; `None` if that is not what is wrong.

    Args:
        case: a case that fails.
        capabilities: what the implementation declares.
        probe: runs it on the case with other inputs.
    """
    if case.values not in POISONED:
        return None
    given = make_inputs(case)
    plain = finite(given)

    def wrong(inputs: Inputs) -> set[str] | None:
        seen = probe(case, inputs)
        return None if seen.failure is not None else set(wrong_tensors(Scene(case, capabilities, seen)))

    if wrong(plain) != set():
        return None
    by_keys, by_values = wrong(dataclasses.replace(plain, k=given.k)), wrong(dataclasses.replace(plain, v=given.v))
    if by_keys is None or by_values is None or not by_keys | by_values:
        return None
    told = REPLACED if {"out", "lse"} & by_keys else PRODUCT
    return told.format(what=" and ".join(n for n, one in (("keys", by_keys), ("values", by_values)) if one))
