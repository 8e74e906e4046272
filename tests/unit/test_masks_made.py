"""Ways to make a mask, as functions of any case."""

import numpy as np
import pytest
from mechanisms import case_of

from ringverify.cases.running import Observation
from ringverify.check.drawing import drawn
from ringverify.diagnosis.masks.made import MADE
from ringverify.diagnosis.pairs import pairs_of
from ringverify.diagnosis.scene import Scene
from ringverify.faults.ring import EVERYTHING
from ringverify.properties.values import FORWARD

DRAWN = [case for case in drawn(FORWARD, EVERYTHING, 24, seed=3) if not case.chunks]
CORNERS = [
    case_of(causal=True, query_length=nq, key_length=nk, size=2, sharding=sharding)
    for nq, nk in ((3, 0), (0, 3), (0, 0), (1, 2))
    for sharding in ("contiguous", "zigzag", "striped", "replicated_query")
]
PARTS = 8


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.by_day(2)
def test_every_way_to_make_a_mask_has_an_answer_for_every_case(part):
    """Counts of the pairs, or none where it is the same mask; without keys or queries too."""
    for case in (*CORNERS, *DRAWN)[part::PARTS]:
        pairs = pairs_of(Scene(case, EVERYTHING, Observation((), None)))
        for made in MADE:
            counts = made.counts(pairs)
            assert counts is None or np.broadcast_to(counts, pairs.true.shape).min(initial=0) >= 0, made.text
            assert made.zeros is None or np.broadcast_to(made.zeros(pairs), pairs.true.shape[:3]).min(initial=0) >= 0
