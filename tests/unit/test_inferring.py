"""What keys that are left out or attended wrongly have in common is said as comparisons, and chance is not."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_reading_results import case_of, masked, named

from ringref.problem import Dilation
from ringref.sharding import pieces
from ringverify.diagnosis.inferring import inferred
from ringverify.diagnosis.pairs import Pairs
from ringverify.diagnosis.quantities import COMPARED_IN_PIECES, DOCUMENT_ENDS
from ringverify.diagnosis.scene import Scene
from ringverify.faults.ring import EVERYTHING, STEPS

pytestmark = pytest.mark.timeout(60)


def from_own_queries(m, here, hop, owner):
    """Keys only from the one before the first of the rank's own queries on."""
    return m * (STEPS.keys(here, hop, owner) >= min(STEPS.queries(here).tolist(), default=0) - 1)


def past_own_half(m, here, hop, owner):
    """Of a block as many rows as half of the rank's own queries."""
    return m * (torch.arange(m.size(3)) < len(here.call.positions) // 2)


def after_the_early_piece(m, here, hop, owner):
    """Queries of the late piece attend nothing before the end of the early one."""
    end = int(pieces(here.problem.nk, 2 * here.size)[here.rank][-1]) + 1
    i, j = here.call.positions[:, None], here.shards[owner][None]
    return m * ((i < end) | (j >= end))


WORDS = {
    "keys are left out where the query's row in its shard ≥ half of the rows of the query's shard, rounded up and the "
    "first position of the key's piece < the end of the early piece of the query's shard": (
        masked(after_the_early_piece), case_of(size=3, sharding="zigzag")
    ),
    "keys are left out where the key's position < the first position of the query's shard − 1": (
        masked(from_own_queries), case_of(size=3)
    ),
    "keys are left out where the key's row in its shard ≥ half of the rows of the query's shard, rounded down": (
        masked(past_own_half), case_of(size=3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", WORDS)
def test_what_pairs_have_in_common_is_said(words):
    """No mask that is known gives them."""
    steps, case = WORDS[words]
    only = replace(EVERYTHING, sharding=(case.sharding,))
    assert named(steps, case, gradients=False, capabilities=only) == words


def pairs_of(case):
    """The pairs of a case that nobody has run."""
    return Pairs(Scene(case, EVERYTHING, None))


@pytest.mark.parametrize("documents", [(0, 3, 8, 12), (1, 3, 8, 11), (0, 5, 12), None])
def test_what_a_rank_fetches_may_end_with_documents_of_its_first_and_last_query(documents):
    """Of the last query that is in a document; an offset ends the document before it, and begins one."""
    pairs = pairs_of(case_of(size=3, query_length=12, documents=documents))
    offsets = documents or (0, 12)
    ends = {one.text: one.of(pairs) for one in DOCUMENT_ENDS}
    for rank, held in enumerate(pairs.queries.shards):
        last = min(held[-1], offsets[-1] - 1)
        here = (pairs.queries.rank == rank)[:, 0]
        expected = {
            "the end of the document of the last query of the query's shard": min(x for x in offsets if x > last),
            "the start of the document of the first query of the query's shard": max(
                x for x in offsets if x <= max(held[0], offsets[0])
            ),
            "the first offset that is not before the last query of the query's shard": min(
                x for x in offsets if x >= last
            ),
        }
        for text, number in expected.items():
            assert set(ends[text][here].ravel().tolist()) == {number}


CASES = [pairs_of(case_of(size=size, query_length=n)) for size, n in ((3, 11), (2, 9), (4, 10), (3, 7))]


def test_the_simplest_rule_comes_first_and_holds_of_what_was_read():
    """It gives the counts of every case; one that needs less is found before one that needs more."""
    seen = [pairs.true * ~((pairs.hop == 1) & (pairs.keys.place == 0)) for pairs in CASES]
    rules = list(inferred(CASES, seen))
    assert rules[0].text == "keys are left out where the key's row in its shard < 1 and the hop = 1"
    for rule in rules:
        assert all(np.array_equal(rule.counts(pairs), counts) for pairs, counts in zip(CASES, seen, strict=True))


@pytest.mark.parametrize("times", [0, 2])
def test_chance_is_no_rule(times):
    """Keys that a coin chose have nothing in common."""
    coin = np.random.default_rng(3)
    seen = [pairs.true * np.where(coin.random(pairs.true.shape) < 0.3, times, 1) for pairs in CASES]
    assert list(inferred(CASES, seen)) == []


def test_a_single_pair_is_no_rule():
    """What one pair is like, others are not known to be."""
    seen = [pairs.true.copy() for pairs in CASES]
    seen[0][0, 0, 5, 5] = 0
    assert list(inferred(CASES, seen)) == []


def test_nothing_right_gives_a_rule():
    """Where every key counts as it should."""
    assert list(inferred(CASES, [pairs.true for pairs in CASES])) == []


def test_a_rule_of_one_branch_holds_in_each():
    """It is read where there is one, and counts of several are those of each, added up."""
    one, two = ([pairs_of(case_of(size=3, query_length=n, dilation=Dilation(of, heads="shared"))) for n in (12, 14, 16)]
                for of in (((5, 1),), ((5, 1), (8, 2))))  # fmt: skip
    seen = [pairs.true * (pairs.keys.p % 5 < 4) for pairs in one]
    rule = next(inferred(one, seen))
    assert rule.text == "keys are left out where the place in its segment of the key ≥ the length of a segment − 1"
    for pairs in two:
        first, second = (branch.true for branch in pairs.of_branches)
        assert np.array_equal(first + second, pairs.true)
        kept = first * (pairs.keys.p % 5 < 4) + second * (pairs.keys.p % 8 < 7)
        assert np.array_equal(rule.counts(pairs), kept)


def test_quantities_have_values_in_every_case():
    """Also with no keys, with more ranks than positions, and with every constraint."""
    full = {"causal": True, "window": (2, 1), "documents": (1, 3, 8), "key_lengths": (4,)}
    for case in (case_of(query_length=0), case_of(size=5, query_length=3), case_of(size=3, query_length=9, **full)):
        pairs = pairs_of(case)
        for quantity in {one.text: one for both in COMPARED_IN_PIECES for one in both}.values():
            assert np.broadcast_shapes(np.shape(quantity.of(pairs)), pairs.true.shape) == pairs.true.shape, (
                quantity.text
            )
