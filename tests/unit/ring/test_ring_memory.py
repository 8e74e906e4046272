"""The most that a rank holds: what the call is made of, two blocks and two gradients on their way, and one tile."""

import math

import pytest
import torch
from peaks import DIM, Call, peak

from ringverify.ring import compute
from ringverify.ring import sides as sides_module
from ringverify.ring.calls import ACCUMULATES
from ringverify.ring.kernels.choose import KERNELS
from ringverify.ring.kernels.kernel import Setting

pytestmark = pytest.mark.timeout(120)

MOST = 1.15
"""What the ring promises: its peak over the sum of what has to be there."""
SLACK = 0.03
"""What the ring promises: how far the exponent of its peak in the positions of a rank may lie from 1."""


def bucket_of(call):
    """The side of a tile: the kernel's, or what fits the budget."""
    if call.memory_budget is not None:
        return call.memory_budget // (3 * DIM * 4)
    return KERNELS[0].bucket(setting_of(call), call.positions)


def setting_of(call):
    """What kernels know of a call."""
    return Setting("cpu", call.dtype, ACCUMULATES[call.dtype], DIM, DIM, scale=1.0, softcap=None)


def needed(call):
    """Bytes that have to be there at the peak."""
    narrow, wide = call.dtype.itemsize, ACCUMULATES[call.dtype].itemsize
    row, tile = call.positions * DIM, min(bucket_of(call), call.positions) * DIM
    lse = call.positions * wide
    travels = call.ranks > 1
    blocks = 2 * 2 * row * narrow * travels
    if not call.backward:  # q and out, as large as the sum that it is made of, and a tile's out
        all_rows = narrow < wide and KERNELS[0].at_once(setting_of(call), backward=False)
        return row * narrow + row * wide + lse + blocks + (row * narrow if all_rows else tile * wide)
    rows = 3 * row * narrow + row * wide + 2 * lse  # q, out, dout; dq as a sum; lse, and as the backward wants it
    gradients = (2 * 2 if travels else 2) * row * wide
    return rows + blocks + gradients + 3 * tile * narrow * travels


BOUNDED = [
    Call(n, ranks, causal, sharding)
    for n in (1024, 4096)
    for ranks in (1, 2, 4, 8)
    for causal, sharding in ((False, "contiguous"), (True, "zigzag"), (True, "striped"))
]


def test_peak_is_linear_and_bounded():
    """For every world size, and in narrow dtypes, peak ≤ 1.15 × (q, out, dq, dout and their lse + two blocks + two
    gradients + one tile), and its exponent in the positions of a rank is 1.

    k and v, as they were given, belong to the caller: they are neither measured nor allowed for. All else that a
    forward and its backward have alive together counts, gradients that are returned included. dk and dv are one of the
    two gradients in flight; on one rank nothing is in flight, and they stand for themselves. Gradients in flight and dq
    are in the dtype of sums. A tile is what one kernel call returns: dq, dk and dv of so many rows, out in forward, in
    bfloat16 of all rows.
    """
    by_kind = {}
    for call in [
        *BOUNDED,
        Call(16384, 2),
        *(Call(4096, p, p > 2, ("contiguous", "zigzag")[p > 2], dtype=torch.bfloat16) for p in (2, 4)),
        *(Call(4096, p, sharding="zigzag", dtype=torch.bfloat16, backward=False) for p in (2, 4)),
        *(call._replace(backward=False) for call in BOUNDED),
    ]:
        found, parts = peak(call)
        assert found <= MOST * needed(call), (call, found / needed(call), parts)
        by_kind.setdefault(call._replace(n=0), []).append((call.positions, found))
    for kind, points in by_kind.items():
        if len(points) == 2:  # tiles are no longer than the positions of a rank
            (short, less), (long, more) = points
            assert abs(math.log(more / less) / math.log(long / short) - 1) <= SLACK, kind


SMALL_TILES = Call(2048, 4, memory_budget=128 * 3 * DIM * 4)
"""Tiles of 128 rows, a quarter of what a rank holds."""


def test_small_tiles_leave_little_beside_what_has_to_be_there():
    """With a memory budget a tile is a small part of the shard: the bound hardly counts it, and still holds."""
    found, parts = peak(SMALL_TILES)
    assert found <= MOST * needed(SMALL_TILES), parts
    assert found < peak(SMALL_TILES._replace(memory_budget=None))[0]


def test_a_wider_world_costs_a_rank_nothing():
    """At a fixed number of positions a rank, from four ranks to eight."""
    for causal, sharding in ((False, "contiguous"), (True, "zigzag"), (True, "striped")):
        assert peak(Call(2048, 8, causal, sharding))[0] == peak(Call(1024, 4, causal, sharding))[0]


def test_a_full_size_buffer_a_tile_is_seen(monkeypatch):
    """A mutant that has gradients of the size of the block for every tile that it works on."""
    differentiate = compute.Job.differentiate

    def in_full(self, rows, tile, dq):
        full = [torch.zeros_like(rows.q) for _ in "qkv"]  # as long as a block
        gradient = differentiate(self, rows, tile, dq)
        full.clear()
        return gradient

    monkeypatch.setattr(compute.Job, "differentiate", in_full)
    assert peak(SMALL_TILES)[0] > MOST * needed(SMALL_TILES)
    assert peak(Call(16384, 2))[0] > MOST * needed(Call(16384, 2))


def test_a_score_matrix_is_seen(monkeypatch):
    """A mutant that has the scores of a whole block once, in forward alone: neither bounded nor linear."""
    attend = compute.Job.attend

    def with_scores(self, partial, q, *others):
        scores = torch.zeros(q.size(1), q.size(1))
        attend(self, partial, q, *others)
        return scores

    monkeypatch.setattr(compute.Job, "attend", with_scores)
    for ranks in (2, 4, 8):
        short, long = (Call(n, ranks, backward=False) for n in (1024, 4096))
        (less, _), (more, _) = peak(short), peak(long)
        assert more > MOST * needed(long)
        assert abs(math.log(more / less) / math.log(4) - 1) > SLACK


def test_gathering_all_keys_is_seen():
    """The all-gather holds every rank's keys, and their gradients: past the bound from four ranks on."""
    for ranks in (4, 8):
        call = Call(512 * ranks, ranks, method="allgather")
        assert peak(call)[0] > MOST * needed(call)


def dealt(length, world_size):
    """Blocks of 16 dealt out in turn: too many runs, so that masks are looked up."""
    return [[p for p in range(length) if p // 16 % world_size == rank] for rank in range(world_size)]


MASKED = {
    "a wide window": lambda n, ranks: Call(n, ranks, causal=True, window=(n // 2, 0)),
    "a wide window, both sides": lambda n, ranks: Call(n, ranks, window=(n // 4, n // 4)),
    "masks by position": lambda n, ranks: Call(n, ranks, causal=True, sharding=dealt),
    "positions that need no mask": lambda n, ranks: Call(n, ranks, sharding=dealt),
}


def exponent(kind, ranks, short, long):
    """Of the peak in the length, between two of them."""
    (less, _), (more, _) = (peak(MASKED[kind](n, ranks)) for n in (short, long))
    return math.log(more / less) / math.log(long / short)


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.nightly] * (kind == "masks by position")) for kind in MASKED]
)
@pytest.mark.by_day(1)
def test_masks_are_a_small_part_of_the_peak(kind):
    """Their peak has the same bound as that of the dense problem, and grows no faster."""
    for ranks in (2, 4):
        assert exponent(kind, ranks, 2048, 8192) <= 1 + SLACK
        call = MASKED[kind](8192, ranks)
        found, parts = peak(call)
        assert found <= MOST * needed(call), parts


@pytest.mark.parametrize("kind", ["a wide window", "masks by position"])
def test_a_mask_of_a_whole_tile_is_seen(monkeypatch, kind):
    """A mutant whose masks are as large as tiles without one."""
    monkeypatch.setattr(sides_module, "NARROWEST", 1 << 30)
    monkeypatch.setattr(sides_module, "WIDEST_MASK", 1 << 30)
    assert exponent(kind, 2, 2048, 4096) > 1 + SLACK
    assert peak(MASKED[kind](4096, 2))[0] > MOST * needed(MASKED[kind](4096, 2))


def test_positions_that_need_no_mask_are_one_tile():
    """Dense, a sharding that falls into many runs is computed like any other."""
    assert peak(Call(4096, 4, sharding=dealt))[0] == peak(Call(4096, 4))[0]
