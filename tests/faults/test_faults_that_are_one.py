"""Two faults that behave alike in everything the suite can see are one: a pair of the library with the same numbers.

Each fault of a value is run by the ring of faults in this process on small cases, of which every fault but those of
`UNSEEN` shows in one. Faults are parted by what they return; the right ring is among them, so that a fault that is not
seen is found as well.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from ringref.problem import Dilation, Problem
from ringref.rounding import witness_bound
from ringverify.cases.case import Case
from ringverify.cases.running import Observation
from ringverify.diagnosis import reproducing
from ringverify.diagnosis.scene import Scene
from ringverify.faults.catalogue import MUTANTS
from ringverify.faults.ring import EVERYTHING, STEPS

RIGHT = "right"
TERMS = 1000
"""More than any sum of these cases has, one sum made of another included."""

UNSEEN = {
    "O81": "a narrower dtype of sums, which the ring in this process chooses itself",
    **dict.fromkeys(
        ("O161", "O162", "O163", "O164", "O165", "O166"),
        "a gradient of sinks, which the ring in this process does not return",
    ),
    "R2a": "a dtype of scores in float16, and the ring in this process computes in float64",
}
"""Faults that are no different from the right ring here, and why."""


def case(size=3, sharding="contiguous", values="normal", memory="contiguous", **problem):
    """Every gradient is asked for."""
    plain = {"query_length": 9, "heads": 2, "head_dim": 3, "dtype": "float64"}
    return Case(
        problem=Problem(**plain | problem),
        world_size=size,
        sharding=sharding,
        values=values,
        memory=memory,
        cotangent="both",
        seed=1,
    )


CASES = [
    case(
        query_length=13, heads=4, key_heads=2, causal=True, window=(4, 0), softcap=2.0, scale=-0.4, value_dim=2,
        sharding="zigzag", memory="strided",
    ),
    case(batch=2, query_length=11, key_lengths=(7, 0), documents=(2, 4, 4, 9), window=(3, 1), memory="transposed"),
    case(query_length=7, key_length=12, heads=6, key_heads=2, causal=True, window=(4, 2)),
    case(query_length=13, heads=4, causal=True, dilation=Dilation(branches=((8, 2), (13, 3)), heads="shared")),
    case(query_length=13, heads=6, dilation=Dilation(branches=((7, 3), (6, 2), (5, 1), (4, 2)), heads="split")),
    case(
        query_length=13, heads=5, dilation=Dilation(branches=((7, 3),), heads="shared", head_offset="block")
    ),
    case(size=2, query_length=12, heads=6, key_heads=2, causal=True, sharding="replicated_query"),
    case(batch=2, query_length=12, causal=True, key_lengths=(7, 0), sharding="zigzag", values="zero_queries"),
    case(query_length=10, window=(3, 1), sharding="zigzag", memory="offset"),
    case(size=2, query_length=1, key_length=1),
    case(size=2, query_length=70, heads=1, head_dim=40, values="falling_blocks"),
    case(size=7, query_length=8, heads=3, causal=True),
    case(size=2, query_length=4, key_length=0),
    case(documents=(0, 4)),
    case(causal=True, sharding="striped"),
    case(size=2, heads=4, causal=True, scale=0.3, sinks=True),
    case(query_length=7, key_length=12, causal=True, sharding="striped"),
    case(query_length=8, heads=6, causal=True, scale=-2.0, values="large_scores", dtype="float32", sinks=True),
    case(query_length=8, heads=6, causal=True, scale=-2.0, values="large_scores", dtype="float32"),
]  # fmt: skip
"""The last one in float32, where numbers are too large for it."""


@functools.cache
def scene_of(case):
    """Nothing is observed: these are predictions."""
    return Scene(case, EVERYTHING, Observation(ranks=(), failure=None))


def numbers(case, steps, when):
    """All that the ranks return; nothing if one fails."""
    scene, wide = scene_of(case), getattr(torch, case.problem.dtype)
    try:
        with np.errstate(all="ignore"):
            forwards = reproducing.forward(scene, lambda rank: STEPS if when == "backward" else steps, wide=wide)
            gradients = reproducing.backward(scene, lambda rank: STEPS if when == "forward" else steps, forwards)
    except reproducing.NoPrediction:
        return np.zeros(0)
    return np.concatenate(
        [
            x.ravel()
            for of, more in zip(forwards, gradients, strict=True)
            for x in (*of.results.values(), *more.values())
        ]
    )


def same(one, other, dtype):
    """Whether they agree but for rounding."""
    if one.shape != other.shape:
        return False
    with np.errstate(all="ignore"):
        near = np.abs(one - other) <= witness_bound(dtype, TERMS) * (1 + np.abs(other))
        near &= np.isfinite(one) & np.isfinite(other)
    return bool((near | (one == other) | (np.isnan(one) & np.isnan(other))).all())


def alike(faults):
    """Runs of faults that return the same in every case; those of one case are parted by the next."""
    left = [list(faults)]
    for case in CASES:
        parted = []
        for together in left:
            runs = []
            for id in together:
                found = numbers(case, *faults[id])
                run = next((ids for first, ids in runs if same(found, first, case.problem.dtype)), None)
                if run is None:
                    runs.append((found, [id]))
                else:
                    run.append(id)
            parted += [ids for _, ids in runs if len(ids) > 1]
        left = parted
    return left


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_no_two_faults_of_the_library_return_the_same_numbers():
    """Faults of values; others are told apart by what else goes wrong."""
    values = {id: (one.fault.steps, one.fault.when) for id, one in MUTANTS.items() if one.kind == "value"}
    unseen = [RIGHT, *(id for id in values if id in UNSEEN)]
    assert alike({RIGHT: (STEPS, "always"), **values}) == [unseen]


def test_a_fault_that_is_written_twice_is_found():
    """So that the test above can fail: a scale of 1 as the scale, and in the scores; and one that changes nothing."""
    faults = {
        RIGHT: (STEPS, "always"),
        "scale": (replace(STEPS, scale=lambda here: 1.0), "always"),
        "scores": (replace(STEPS, scores=lambda q, k, scale: q @ k.transpose(2, 3)), "forward"),
        "scores and gradients": (
            replace(
                STEPS,
                scores=lambda q, k, scale: q @ k.transpose(2, 3),
                dq=lambda ds, k, scale, attended: STEPS.dq(ds, k, 1.0, attended),
                dk=lambda ds, q, scale, attended: STEPS.dk(ds, q, 1.0, attended),
            ),
            "always",
        ),
        "nothing": (replace(STEPS, hops=lambda here: here.size), "always"),
    }
    assert alike(faults) == [["right", "nothing"], ["scale", "scores and gradients"]]
