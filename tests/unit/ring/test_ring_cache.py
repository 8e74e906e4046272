"""Few queries and long keys that lie otherwise: decoding and chunked prefill over keys in stripes and in pages."""

from __future__ import annotations

import contextlib
import itertools
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from by_tile import inputs_of, worst_margin
from covering import mismatch
from growing import chunks, grown, page_table, sinks_of, whole_problem
from on_ranks import WORLD, run_on_ranks, whole
from test_ring_agreement import said, tensors
from test_ring_planning_cost import counted

from ringref.attention import attention
from ringref.problem import Problem
from ringref.rounding import Pipeline, allowed_error, margins
from ringref.sharding import QUERY_SHARDINGS, PageTable, QueryKeySharding
from ringverify.ring import attention as attention_module
from ringverify.ring import compute, position_ids, ring_attention, shard, unshard_from
from ringverify.ring import method as method_module
from ringverify.ring.aligned import LARGE, where_it_lies
from ringverify.ring.method import METHODS, method_of
from ringverify.ring.passes import KVRing
from ringverify.ring.plan import plan as plan_module
from ringverify.ring.plan.plan import KEPT, Plan, make_plan
from ringverify.ring.plan.runs import MOST_RUNS
from ringverify.ring.visiting import QueryRing
from ringverify.worlds.processes.gloo import GlooWorld

pytestmark = pytest.mark.timeout(120)


def random_sharding(rng, length, world_size):
    """Any of queries, and of keys any or pages twice as often."""
    keys = rng.choice(("contiguous", "zigzag", "striped", None, None, None))
    return QueryKeySharding(rng.choice(QUERY_SHARDINGS), keys or page_table(rng, length, world_size))


def random_problem(rng):
    """Lengths of which either may be the longer one, or nothing."""
    batch, keys = rng.choice((1, 2)), rng.randint(0, 70)
    return Problem(
        batch=batch,
        query_length=rng.choice((0, 1, 1, 2, rng.randint(0, 20), rng.randint(0, 90))),
        key_length=keys,
        heads=4,
        key_heads=rng.choice((1, 2, 4)),
        head_dim=4,
        value_dim=rng.choice((None, 3, 6)),
        causal=rng.random() < 0.7,
        window=rng.choice((None, None, (5, 0), (20, 3), (None, 2), (0, 0), (3, None))),
        softcap=rng.choice((None, None, 2.0)),
        key_lengths=tuple(rng.randint(0, keys) for _ in range(batch)) if rng.random() < 0.3 else None,
        dtype=rng.choice(("float32", "float32", "float64", "bfloat16")),
    )


@pytest.mark.parametrize("seed", range(3))
def test_every_pair_meets_as_the_pattern_says(seed):
    """Rectangles and masks of queries and keys that lie apart, and of page tables for both, pair by pair."""
    rng = random.Random(seed)
    for _ in range(80):
        problem, world_size = random_problem(rng), rng.randint(1, 8)
        apart = random_sharding(rng, problem.nk, world_size)
        alike = page_table(rng, max(problem.nq, problem.nk), world_size)
        for sharding in (apart, alike):
            why = mismatch(problem, sharding, world_size, rng.choice(((4, 4), (64, 64), (3, 7))))
            assert why is None, (problem, sharding, world_size, why)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.by_day(2)
def test_results_and_gradients_are_the_oracle_s(seed):
    """Out, lse and all gradients, on one to eight ranks, by every method and transport, watched."""
    rng = random.Random(seed)
    for method, transport in itertools.product(METHODS * 3, ("p2p", "blocking")):
        problem, world_size = random_problem(rng), rng.randint(1, 8)
        sharding, given = random_sharding(rng, problem.nk, world_size), inputs_of(problem)
        run = run_on_ranks(problem, given, sharding, world_size, watch=True, method=method, transport=transport)
        assert [hazard.message for hazard in run.hazards] == []
        assert run.unreceived == ()
        margin = worst_margin(problem, given, whole(problem, run, sharding, world_size))
        assert margin <= 1, (problem, sharding, world_size, method)


def beside_one_call(world, seed, world_size, **how):
    """The largest margin of out and lse of a cache that grew, row by row, beside one call for the whole sequence."""
    rng = random.Random(seed)
    length = rng.randint(1, 60)
    problem, sizes = whole_problem(seed, length), chunks(rng, length)
    sharding = random_sharding(rng, length, world_size)
    run = world.run(grown, (problem, sharding, sizes, how), world_size=world_size, seed=0, deadline=60)
    assert run.failure is None, f"{run.failure.message}\n{run.failure.detail}"
    out = np.full((problem.batch, length, problem.heads, problem.dv), np.nan, dtype=np.float32)
    lse = np.full((problem.batch, problem.heads, length), np.nan, dtype=np.float32)
    for at, some, of in itertools.chain.from_iterable(run.results):
        out[:, at], lse[:, :, at] = some, of
    given, sinks = inputs_of(problem).arrays(), sinks_of(problem)
    with_sinks = {} if sinks is None else {"sinks": sinks.double().numpy()}
    answer = attention(problem, *given, **with_sinks)
    pipeline = Pipeline("float32", "float32", probabilities="input", lse_dtype="float32", blocks=8)
    allowed = allowed_error(problem, answer, *given, pipeline)
    found = {"out": out, "lse": lse}
    return max(
        float(margins(of.astype(np.float64), getattr(answer, name), getattr(allowed, name), "float32").max())
        for name, of in found.items()
    )


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.by_day(12)
def test_a_cache_that_grows_gives_row_by_row_what_one_call_gives(seed):
    """A prompt in chunks of any size, then tokens; stripes or pages, windows, sinks, grouped heads; 1 to 8 ranks."""
    assert beside_one_call(WORLD, seed, 1 + seed % 8, method=METHODS[seed % 2]) <= 1


def test_a_cache_that_forgets_its_prefix_is_seen(monkeypatch):
    """The comparison above, of a chunk that is aligned with the first key instead of the last."""
    monkeypatch.setattr(Problem, "diagonal", property(lambda problem: 0))
    assert not beside_one_call(WORLD, 3, 2) <= 1


def test_a_cache_grows_between_processes():
    """Over gloo, on three ranks, with queries on every rank and with queries that travel."""
    with contextlib.closing(GlooWorld()) as world:
        assert max(beside_one_call(world, seed, 3) for seed in (0, 1, 2)) <= 1


CHUNK = Problem(query_length=12, key_length=300, heads=4, key_heads=2, head_dim=4, causal=True)
LONG = Problem(query_length=64, heads=2, head_dim=4, causal=True)


@pytest.mark.parametrize(
    ("problem", "queries", "kind"),
    [
        (CHUNK, "contiguous", QueryRing),
        (CHUNK.replace(query_length=1), "striped", QueryRing),
        (CHUNK.replace(query_length=150), "zigzag", KVRing),
        (LONG, "contiguous", KVRing),
        (CHUNK.replace(query_length=60, key_heads=1, window=(3, 0)), "contiguous", KVRing),
    ],
)
def test_what_is_fewer_bytes_travels_and_all_ranks_choose_alike(problem, queries, kind):
    """By lengths alone; under a short window most keys stay where they are, whole blocks of which would be more."""
    sharding = QueryKeySharding(queries, "contiguous")
    methods = [method_of("ring", make_plan(problem, sharding, 3, rank)) for rank in range(3)]
    assert {type(one) for one, _ in methods} == {kind}
    assert len({words for _, words in methods}) == 1
    assert methods[0][1].startswith("pass Q: " if kind is QueryRing else "pass KV: ")


@pytest.mark.parametrize("problem", [CHUNK, CHUNK.replace(window=(200, 0)), CHUNK.replace(key_lengths=(120,))])
@pytest.mark.parametrize("passes", [True, False])
@pytest.mark.parametrize(
    "keys", ["contiguous", "striped", PageTable(8, tuple(tuple(range(r, 40, 3)) for r in range(3)))]
)
def test_what_is_said_to_be_sent_is_sent(monkeypatch, problem, passes, keys):
    """Either way, by the rank that sends the most, to the byte; and only neighbours exchange."""
    monkeypatch.setattr(method_module, "passes_queries", lambda plan: passes)
    sharding, given = QueryKeySharding("contiguous", keys), inputs_of(problem)

    def program(_):
        rank = dist.get_rank()
        q = shard(given.q, sharding=sharding)
        k, v = (shard(x, sharding=sharding, of="keys") for x in (given.k, given.v))
        fields = {name: getattr(problem, name) for name in ("causal", "window", "key_lengths")}
        lengths = {"query_length": problem.nq, "key_length": problem.nk}
        ring_attention(q, k, v, sharding=sharding, check_shards=False, **lengths, **fields)
        return make_plan(problem, sharding, 3, rank).sent

    run = WORLD.run(program, None, world_size=3, seed=0, deadline=30, watch=True)
    assert run.failure is None, run.failure.detail
    said_sent = {one.queries if passes else one.keys for one in run.results}
    assert said_sent == {max(run.traffic.sent(rank) for rank in range(3))}
    assert all(run.traffic.peers(rank) <= {(rank - 1) % 3, (rank + 1) % 3} for rank in range(3))


def dealt(length, world_size, size=16):
    """Pages in turn, with room to grow."""
    pages = -(-length // size) + 8
    return PageTable(size, tuple(tuple(range(rank, pages, world_size)) for rank in range(world_size)))


def shuffled(length, world_size):
    """Pages in no order."""
    pages = [page for held in dealt(length, world_size).pages for page in held]
    random.Random(0).shuffle(pages)
    return PageTable(16, tuple(tuple(pages[rank::world_size]) for rank in range(world_size)))


@pytest.mark.parametrize("window", [None, (700, 0)])
@pytest.mark.parametrize("keys", ["contiguous", "striped", "zigzag", dealt(4096, 4), shuffled(4096, 4)])
def test_a_token_needs_no_mask_and_few_rectangles(monkeypatch, keys, window):
    """Whatever lies where: what it attends on a rank is read as it lies, and nothing is looked up by position."""
    problem = Problem(query_length=1, key_length=4001, causal=True, window=window)
    for rank in range(4):
        found = list(Plan(problem, QueryKeySharding("replicated", keys), 4, rank).regions(rank))
        assert len(found) <= (1 if window is None else MOST_RUNS)
        if window is None or keys != shuffled(4096, 4):
            assert not any(region.by_position or (region.low, region.high) != (None, None) for region in found)


@pytest.mark.parametrize("window", [None, (700, 0)])
@pytest.mark.parametrize("make", [lambda length, size: "striped", dealt, shuffled])
def test_a_longer_cache_takes_no_more_steps_to_plan(make, window):
    """A token against 4,096 keys and against 131,072: as many functions and runs, whatever the number of pages."""
    found = []
    for length in (4096, 131_072):
        sharding = QueryKeySharding("replicated", make(length, 2))
        Plan(Problem(query_length=1, key_length=length, causal=True, window=window), sharding, 2, 0)
        problem = Problem(query_length=1, key_length=length + 1, causal=True, window=window)
        found.append(counted(lambda problem=problem, sharding=sharding: Plan(problem, sharding, 2, 0).regions(0)))
        assert sum(map(len, Plan(problem, sharding, 2, 0).keys)) <= 3 * 700 // 16
    assert found[1] <= 1.5 * found[0] <= 3000


def test_the_count_sees_a_plan_made_page_by_page(monkeypatch):
    """As if no key of a cache were settled."""
    monkeypatch.setattr(plan_module, "settled", lambda problem: 0)
    with pytest.raises(AssertionError):
        test_a_longer_cache_takes_no_more_steps_to_plan(dealt, (700, 0))


def test_plans_of_a_cache_that_grows_are_not_kept_for_ever():
    """A length a token, and at most so many plans."""
    make_plan.cache_clear()
    for length in range(1, 3 * KEPT):
        make_plan(
            Problem(query_length=1, key_length=length, causal=True), QueryKeySharding("replicated", "striped"), 2, 0
        )
    assert len(make_plan._kept) == KEPT
    make_plan.cache_clear()


def test_a_cache_is_read_where_it_lies(monkeypatch):
    """Part of a tensor with room to grow, in either layout; copied where small, at odd places, or differentiated."""
    cache = torch.zeros(2, 4, LARGE // 128, 64)
    part = cache[:, :, :-3]
    for lying in (part, part.transpose(1, 2)):
        assert where_it_lies(lying) is lying
    for other in (cache[:, :, :3], cache.view(2, 4, -1, 8).transpose(2, 3), cache.flatten()[1:-63].view(2, 4, -1, 8)):
        assert where_it_lies(other) is not other
        assert where_it_lies(other).is_contiguous()
    seen = []
    attend = compute.Job.own
    monkeypatch.setattr(compute.Job, "own", lambda job, k, v: (seen.append(k.data_ptr()), attend(job, k, v))[1])
    monkeypatch.setattr(
        attention_module.Attention, "apply", lambda *args: (seen.append(args[1].data_ptr()), args[:2])[1]
    )
    q = torch.zeros(2, 4, 1, 64)
    for rows, wants, read in ((1, False, True), (1, True, False), (65, False, False)):
        seen.clear()
        given = q.expand(2, 4, rows, 64).clone().requires_grad_(wants)
        ring_attention(given, part, part, layout="bhsd", causal=True)
        assert (seen == [cache.data_ptr()]) == read


def test_shards_of_a_cache_are_cut_and_put_together():
    """Queries and keys of a page table and of one that differs for both; positions too."""
    table = PageTable(3, ((2, 0), (1, 3)))
    x = torch.arange(10.0)[None]
    assert shard(x, sharding=table, rank=0, world_size=2).tolist() == [[6, 7, 8, 0, 1, 2]]
    apart = QueryKeySharding("replicated", table)
    assert torch.equal(shard(x, sharding=apart, rank=1, world_size=2), x)
    parts = [shard(x, sharding=apart, rank=rank, world_size=2, of="keys") for rank in range(2)]
    assert parts[1].tolist() == [[3, 4, 5, 9]]
    assert torch.equal(unshard_from(parts, sharding=apart, of="keys"), x)
    assert position_ids(10, sharding=apart, rank=1, world_size=2, of="keys").tolist() == [3, 4, 5, 9]
    with pytest.raises(ValueError, match="under replicated/pages the ranks hold"):
        unshard_from(parts[::-1], sharding=apart, of="keys")


def decode(rank, table, **how):
    """A token against ten keys in pages."""
    held = table.positions(10, 2)[rank] if len(table.pages) == 2 else range(5)
    given = tensors(1, len(held))
    sharding = QueryKeySharding("replicated", table)
    return ring_attention(*given, sharding=sharding, query_length=1, key_length=10, causal=True, **how)


def test_tables_that_differ_between_ranks_are_named():
    """One has its pages in another order, which no length and no shape shows."""
    tables = PageTable(3, ((2, 0), (1, 3))), PageTable(3, ((0, 2), (1, 3)))
    message = said(lambda rank: decode(rank, tables[rank]))
    assert "sharding is queries replicated, keys pages of 3 (" in message
    grown = tables[0], PageTable(3, ((2, 0), (1, 3, 4)))
    assert ") on rank 0 and queries" in said(lambda rank: decode(rank, grown[rank]))


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        (((0, 1), (2,)), "page 3 (positions 9 to 9) is held by no rank: expected by one"),
        (((0, 1, 2, 3),), "a page table of 1 ranks on a world of 2: expected one a rank"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_in_one_line(pages, message):
    """Before anything is sent, for a token and for a chunk under a window."""
    for fields in ({"query_length": 1}, {"query_length": 5, "window": (3, 0)}):
        problem = Problem(key_length=10, causal=True, **fields)
        with pytest.raises(ValueError, match="page") as refused:
            make_plan(problem, QueryKeySharding("replicated", PageTable(3, pages)), 2, 0)
        assert str(refused.value) == message
