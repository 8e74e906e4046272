"""The ring on ranks: no buffer is read too early or written too late, no schedule changes a bit, nothing travels twice.

The simulated world watches every message from post to wait: what waits for a message is poisoned, and whoever reads or
writes it meanwhile is reported. Messages are held back and overtaken, and a send may wait for its receive.
"""

import itertools

import numpy as np
import pytest
from by_address import OFFSETS, ByAddress, shifted
from by_tile import inputs_of, worst_margin
from on_ranks import run_on_ranks, same, whole

from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringref.sharding import SHARDINGS, key_positions, query_positions
from ringverify.ring.compute import TileGradients
from ringverify.ring.plan.plan import SLIGHT, make_plan
from ringverify.ring.transport import Transport
from ringverify.worlds.world import Conditions

pytestmark = pytest.mark.timeout(120)

CONDITIONS = [
    Conditions(transport, delayed) for transport, delayed in itertools.product(("buffered", "rendezvous"), ((), "some"))
]


def dealt(length, world_size):
    """Blocks of two dealt out in turn, and so more runs than rectangles are worth."""
    return [[p for p in range(length) if p // 2 % world_size == rank] for rank in range(world_size)]


def shuffled(length, world_size):
    """Masks have to be looked up."""
    return np.array_split(np.random.default_rng(length).permutation(length), world_size)


PROBLEMS = [
    Problem(query_length=11, heads=2, head_dim=4),
    Problem(query_length=11, heads=2, key_heads=1, head_dim=3, value_dim=5, causal=True),
    Problem(query_length=3, heads=1, head_dim=4, causal=True),
    Problem(query_length=20, heads=2, head_dim=4, causal=True, window=(3, 0)),
    Problem(query_length=13, key_length=6, heads=2, head_dim=4, causal=True),
    Problem(batch=2, query_length=12, heads=2, head_dim=4, key_lengths=(12, 5), documents=(0, 2, 9, 9, 12)),
    Problem(query_length=12, heads=4, key_heads=2, head_dim=4, dilation=Dilation(((4, 1), (12, 3)), heads="shared")),
    Problem(query_length=12, heads=3, head_dim=4, dilation=Dilation(((6, 2), (12, 3))), causal=True),
]


@pytest.mark.parametrize("world_size", [3, 2, 1, *(pytest.param(size, marks=pytest.mark.nightly) for size in (4, 5))])
@pytest.mark.by_day(2)
def test_messages_in_flight_are_left_alone_and_no_schedule_changes_a_bit(world_size):
    """Every sharding and problem, forward and backward, against the oracle; then unfriendly, by both transports."""
    turns = itertools.cycle(itertools.product(CONDITIONS, range(1, 6)))
    for problem, sharding in itertools.product(PROBLEMS, (*SHARDINGS, dealt, shuffled)):
        given = inputs_of(problem)
        friendly = run_on_ranks(problem, given, sharding, world_size)
        assert worst_margin(problem, given, whole(problem, friendly, sharding, world_size)) <= 1, (problem, sharding)
        for transport in ("p2p", "blocking"):
            conditions, seed = next(turns)
            how = {"seed": seed, "conditions": conditions, "watch": True, "transport": transport}
            watched = run_on_ranks(problem, given, sharding, world_size, **how)
            assert [hazard.message for hazard in watched.hazards] == []
            assert watched.unreceived == ()
            assert same(friendly, watched), (problem, sharding, how)


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.by_day(1)
def test_no_address_changes_a_bit_where_products_depend_on_addresses(dtype, method):
    """Shards and cotangents at odd addresses, another one in every run and on every rank, and another schedule."""
    offsets, how = itertools.cycle(OFFSETS), {"products": ByAddress, "method": method}
    for problem, sharding in zip(PROBLEMS, itertools.cycle((*SHARDINGS, shuffled)), strict=False):
        problem = problem.replace(dtype=dtype)
        given = inputs_of(problem)
        usual = run_on_ranks(problem, given, sharding, 3, **how)
        moved = run_on_ranks(problem, given, sharding, 3, seed=1, lay=lambda x: shifted(x, next(offsets)), **how)
        assert same(usual, moved), (problem, sharding)


def test_gathering_gives_attention_too():
    """The same problems by collectives; sums are formed in another order, so that bits may differ."""
    for problem, sharding in itertools.product(PROBLEMS, SHARDINGS):
        given = inputs_of(problem)
        gathered = run_on_ranks(problem, given, sharding, 4, method="allgather")
        assert worst_margin(problem, given, whole(problem, gathered, sharding, 4)) <= 1


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.by_day(1)
def test_other_dtypes_travel_as_well(dtype):
    """Gradients in the dtype of sums; small tiles, so that many are added to a gradient on its way."""
    for problem, sharding in itertools.product(PROBLEMS[:4], SHARDINGS):
        problem = problem.replace(dtype=dtype)
        given = inputs_of(problem)
        run = run_on_ranks(problem, given, sharding, 3, memory_budget=1)
        assert worst_margin(problem, given, whole(problem, run, sharding, 3)) <= 1


def test_the_watch_sees_a_ring_that_does_not_leave_its_buffers_alone(monkeypatch):
    """The proof that it looks: a ring that clears what it is sending, and what it is receiving."""
    start = Transport.start

    def start_and_clear(self, sends, receives):
        wait = start(self, sends, receives)
        for buffer, _ in (*sends, *receives):
            buffer.zero_()
        return wait

    monkeypatch.setattr(Transport, "start", start_and_clear)
    run = run_on_ranks(PROBLEMS[0], inputs_of(PROBLEMS[0]), "contiguous", 3, watch=True)
    assert {"send_changed", "receive_changed"} <= {hazard.kind for hazard in run.hazards}


def test_the_comparison_sees_a_sum_that_depends_on_the_schedule(monkeypatch):
    """The proof that bits are compared: a gradient that is added to in the order in which ranks come to run."""
    turns = itertools.count()
    add_to = TileGradients.add_to

    def add_in_turn(self, gradients):
        for gradient in (*self.computed,):
            gradient.dk.mul_(1 + next(turns))
        add_to(self, gradients)

    monkeypatch.setattr(TileGradients, "add_to", add_in_turn)
    given = inputs_of(PROBLEMS[0])
    runs = [run_on_ranks(PROBLEMS[0], given, "contiguous", 3, seed=seed) for seed in range(2)]
    assert not same(*runs)


# -- traffic -----------------------------------------------------------------------------------------------------------


def sent(problem, sharding, world_size, **how):
    """Bytes that every rank sent."""
    run = run_on_ranks(problem, inputs_of(problem), sharding, world_size, watch=True, **how)
    for rank in range(world_size):
        assert run.traffic.peers(rank) <= {(rank - 1) % world_size, (rank + 1) % world_size}
        assert run.traffic.collectives(rank) <= {"barrier"}
    return [run.traffic.sent(rank) for rank in range(world_size)], run.traffic


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_contiguous_causal_blocks_stop_at_the_last_rank(world_size):
    """Rank r's block visits the ranks after it and no other, once forward and once backward; its gradient goes home."""
    problem = Problem(query_length=8 * world_size, heads=2, head_dim=4, causal=True)
    block = 8 * 2 * 2 * 4 * 4
    found, traffic = sent(problem, "contiguous", world_size)
    visits = sum(world_size - 1 - owner for owner in range(world_size))
    # A gradient starts one rank after its owner and goes on round the ring; nobody adds to the last rank's.
    home = (world_size - 1) * (world_size - 1)
    assert sum(found) == block * (2 * visits + home)
    assert all(traffic.messages(rank) <= 3 * (world_size - 1) for rank in range(world_size))
    dense, _ = sent(problem.replace(causal=False), "contiguous", world_size)
    assert sum(dense) == block * world_size * 3 * (world_size - 1)


@pytest.mark.parametrize("world_size", [3, 4, 5])
def test_a_window_sends_what_it_reaches_and_no_more_hops(world_size):
    """Keys of the last three positions of a rank to the next one, their gradient back: one hop, not W − 1."""
    problem = Problem(query_length=8 * world_size, heads=2, head_dim=4, causal=True, window=(3, 0))
    row = 2 * 2 * 4 * 4
    found, traffic = sent(problem, "contiguous", world_size)
    assert found == [row * 3 * (2 * (rank + 1 < world_size) + (rank > 0)) for rank in range(world_size)]
    assert max(traffic.messages(rank) for rank in range(world_size)) == 3 < 3 * (world_size - 1)


def test_documents_within_a_rank_send_nothing():
    """Not one message."""
    problem = Problem(query_length=16, heads=2, head_dim=4, documents=(0, 3, 8, 12, 16))
    found, traffic = sent(problem, "contiguous", 2)
    assert found == [0, 0]
    assert traffic.flows == ()


def rows_needed(m, problem, queries, keys, owner, hops, world_size):
    """Elements of a block that ranks at some distances need: rows of each key head, keys and values."""
    attended = np.zeros((problem.hk, len(keys[owner])), dtype=bool)
    for hop in hops:
        part = m[:, :, queries[(owner + hop) % world_size]][..., keys[owner]].any(axis=(0, 2))
        attended |= part.reshape(problem.hk, problem.group_size, -1).any(axis=1)
    return int(attended.sum()) * problem.batch * (problem.head_dim + problem.dv)


def least_traffic(problem, sharding, world_size):
    """Bytes of float32 that have to be sent, from the pattern and from when gradients move."""
    m = multiplicity(problem)
    queries = query_positions(sharding, problem.nq, world_size)
    keys = key_positions(sharding, problem.nk, world_size)
    moves = [make_plan(problem, sharding, world_size, rank).schedule for rank in range(world_size)]
    reach = moves[0].reach

    def needed(owner, hops):
        return rows_needed(m, problem, queries, keys, owner, hops, world_size)

    sent_keys = sum(
        needed(owner, range(boundary + 1, reach[owner] + 1))
        for owner in range(world_size)
        for boundary in range(reach[owner])
    )
    sent_gradients = sum(
        needed(owner, range(1, min(boundary, reach[owner]) + 1))
        for one in moves
        for boundary, those in enumerate(one.gradients)
        for owner, _ in those.sends
    )
    return 4 * (2 * sent_keys + sent_gradients)


LONG_WINDOW = Problem(query_length=64, heads=2, head_dim=4, causal=True, window=(3, 0))


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "striped"])
@pytest.mark.by_day(1)
def test_traffic_is_what_ranks_need_counted_pair_by_pair(sharding):
    """At every hop the rows that a rank ahead still needs, and gradients of those that ranks behind have added to.

    One part in thirty-two may travel for nothing, where cutting it off would cost a copy.
    """
    for problem, world_size in itertools.product((*PROBLEMS, LONG_WINDOW), (2, 3, 5)):
        least = least_traffic(problem, sharding, world_size)
        found, _ = sent(problem, sharding, world_size)
        assert least <= sum(found) <= least * SLIGHT / (SLIGHT - 1), (problem, world_size)


def test_whole_blocks_are_seen(monkeypatch):
    """The proof that traffic is counted: a ring that never cuts what it sends on."""
    monkeypatch.setattr("ringverify.ring.plan.plan._worth_cutting", lambda part, of: False)
    make_plan.cache_clear()
    found, _ = sent(LONG_WINDOW, "contiguous", 3)
    make_plan.cache_clear()
    assert sum(found) > least_traffic(LONG_WINDOW, "contiguous", 3) * SLIGHT / (SLIGHT - 1)
