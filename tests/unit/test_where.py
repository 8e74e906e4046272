"""The diagnosis says where: which rows of which ranks and heads, and between which queries and keys."""

import dataclasses

import numpy as np
import pytest
from diagnosed import diagnosed

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.diagnosis import probing
from ringverify.diagnosis.probing import Asked
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import ranges, wrong_elements
from ringverify.events import WrongPair
from ringverify.faults.ring import PLAIN
from ringverify.worlds.simulated import SimulatedWorld


def test_a_block_that_is_not_merged_is_named_on_every_rank():
    """The last of three hops."""
    diagnosis = diagnosed("O65", tensor="out")
    found = diagnosis.where
    keys = {0: (0, 1, 2), 1: (3, 4, 5), 2: (6, 7, 8)}
    assert [pair for pair in found.pairs if pair.what == "missing"] == [
        WrongPair(rank, (rank + 1) % 3, 2, keys[(rank + 1) % 3], "missing") for rank in range(3)
    ]
    assert (found.hop, diagnosis.hop) == (2, 2)
    assert found.rows == keys
    assert found.text[1].startswith("rank 0 does not attend keys 3–5 of rank 1 (hop 2); rank 1 does not attend")


def test_a_fault_of_all_blocks_is_of_no_hop():
    """A wrong scale."""
    assert diagnosed("O14", tensor="out").hop is None


def test_a_block_that_is_merged_twice_is_told_from_the_others():
    """Rank 0's, on the other ranks, and its own rows are right."""
    found = diagnosed("O69", tensor="out").where
    assert {(pair.rank, pair.owner, pair.what) for pair in found.pairs} == {(1, 0, "repeated"), (2, 0, "repeated")}
    assert found.text[0] == "out, rank 1 queries 0–2 (positions 3–5); rank 2 queries 0–2 (positions 6–8), all heads"


def test_keys_that_the_mask_excludes_are_named_one_by_one():
    """The causal mask lets one key too many through on blocks from other ranks, so only from the next one."""
    found = diagnosed("O42", tensor="out", causal=True).where
    assert [(pair.rank, pair.keys) for pair in found.pairs] == [(0, (3,)), (1, (6,))]
    assert {pair.what for pair in found.pairs} == {"forbidden"}
    assert found.rows == {0: (2,), 1: (5,)}


@pytest.mark.nightly
def test_the_rank_whose_queries_add_nothing_to_dk_is_named():
    """dk and dv come from the own queries only."""
    for tensor in ("dk", "dv"):
        found = diagnosed("F1b", tensor=tensor).where
        assert {(pair.rank, pair.owner) for pair in found.pairs} == {
            (rank, owner) for rank in range(3) for owner in range(3) if rank != owner
        }
        assert {pair.what for pair in found.pairs} == {"missing"}


@pytest.mark.nightly
def test_the_block_that_dq_lacks_is_named():
    """dq comes from the own block only, and without a mask that is wrong on every rank."""
    found = diagnosed("F1a", tensor="dq", causal=True).where
    assert {(pair.rank, pair.owner, pair.what) for pair in found.pairs} == {
        (1, 0, "missing"), (2, 0, "missing"), (2, 1, "missing")
    }  # fmt: skip
    assert set(found.rows) == {1, 2}


def test_what_lse_leaves_out_is_named():
    """Merged lse is the earlier one, that of the own block; with two ranks the weights are right."""
    for size in (2, 3):
        found = diagnosed("O07", tensor="lse", size=size).where
        assert {(pair.rank, pair.hop, pair.what) for pair in found.pairs} == {
            (rank, hop, "missing") for rank in range(size) for hop in range(1, size)
        }
        assert found.text[1].startswith("rank 0 leaves keys")


def test_a_block_that_a_row_does_not_attend_is_not_missing_from_it():
    """Rank 0 attends nothing of rank 1 under a causal mask, however little of its dq is wrong."""
    case = Case(
        problem=Problem(query_length=8, heads=2, head_dim=3, causal=True), world_size=2, values="normal", seed=1
    )
    world = SimulatedWorld()
    try:
        right = Runner(PLAIN, world).run(case, gradients=True)
    finally:
        world.close()
    scene = Scene(case, PLAIN.capabilities, right)
    relative = np.abs(scene.true("dq", 0)) / scene.limit("dq", 0)
    place = np.unravel_index(relative.argmax(), relative.shape)
    dq = np.array(right.ranks[0].dq)
    dq[place] = scene.true("dq", 0)[place] + 1.01 * scene.limit("dq", 0)[place]
    ranks = (dataclasses.replace(right.ranks[0], dq=dq), *right.ranks[1:])
    spoilt = Scene(case, PLAIN.capabilities, dataclasses.replace(right, ranks=ranks))
    assert wrong_elements(spoilt, "dq", 0).sum() == 1
    assert not [pair for pair in Asked(spoilt, None).pairs("dq") if (pair.rank, pair.owner) == (0, 1)]


@pytest.mark.parametrize(("mutant", "tensor", "field"), [("O65", "out", "out"), ("F1b", "dk", "dk")])
@pytest.mark.by_day(1)
def test_an_implementation_that_is_not_linear_is_not_believed(mutant, tensor, field):
    """What probes say has to add up to what was seen; if not, rows are named and no keys."""

    def twice(result):
        return dataclasses.replace(result, **{field: 2 * getattr(result, field)})

    found = diagnosed(mutant, tensor=tensor, spoilt=twice).where
    assert found.rows
    assert (found.pairs, len(found.text)) == ((), 1)


def test_one_head_is_named():
    """Query head h reads key head h % Hk: the first and the last read the right one."""
    found = diagnosed("O28", tensor="out", heads=4, key_heads=2).where
    assert found.heads == (1, 2)
    assert found.text[0] == "out, all queries of every rank, heads 1–2 of 4"


def test_long_lists_are_cut():
    """Runs are joined, and what follows the fourth is counted."""
    assert ranges([3, 1, 2, 7]) == "1–3, 7"
    assert ranges(np.arange(0, 20, 2).tolist()) == "0, 2, 4, 6 and 6 more"


@pytest.mark.parametrize(
    ("w", "m", "told"),
    [
        ([1e-12, 1e-12, 1.0], [1, 1, 0], {"forbidden": [2]}),  # nothing can be said of what is left of the others
        ([0.25, 1e-12, 0.75], [1, 1, 0], {"missing": [1], "forbidden": [2]}),
        ([1.0, 0.0, 0.0], [1, 1, 1], {"missing": [1, 2]}),
        ([0.0, 0.0, 0.0], [1, 1, 1], {"missing": [0, 1, 2]}),
    ],
)
def test_a_key_is_missing_only_where_its_weight_would_be_seen(w, m, told):
    """Forbidden keys may take so much of a row that nothing is left of those that it attends."""
    m = np.array(m)
    p = m / m.sum()
    assert dict(probing._told(np.array(w), p, m, np.full(3, 1e-8))) == told
