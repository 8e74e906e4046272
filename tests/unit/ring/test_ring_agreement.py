"""Ranks that would not compute one attention say so, all in the same words, before a key has been sent.

And they hear of one another whether gradients are wanted.
"""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from on_ranks import WORLD

from ringverify.ring import DilatedRingAttention, RingAttention, ring_attention, shard
from ringverify.ring.agreement import check_agreement, disagreement
from ringverify.ring.group import Ring
from ringverify.ring.method import METHODS
from ringverify.worlds.processes.gloo import GlooWorld

pytestmark = pytest.mark.timeout(60)


def tensors(queries, keys=None):
    """q, k and v of a rank that holds so many."""
    return [torch.zeros(1, length, 2, 4) for length in (queries, queries if keys is None else keys, keys or queries)]


def said(call, world_size=2):
    """What `call(rank)` raises, which has to be the same ValueError on every rank, with no rank's message left over."""

    def program(_):
        with pytest.raises(ValueError, match="the ranks do not make the same call") as raised:
            call(dist.get_rank())
        return str(raised.value)

    run = WORLD.run(program, None, world_size=world_size, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    assert len(set(run.results)) == 1
    assert "\n" not in run.results[0]
    return run.results[0]


@pytest.fixture
def gathers(monkeypatch):
    """Runs a call on ranks, and returns what it returned there, and how often each rank took part in an all-gather."""
    gather, ranks = dist.all_gather, []

    def noted(*arguments, **how):
        ranks.append(dist.get_rank())
        return gather(*arguments, **how)

    monkeypatch.setattr(dist, "all_gather", noted)

    def run(call, world_size=2):
        ranks.clear()
        run = WORLD.run(lambda _: call(dist.get_rank()), None, world_size=world_size, seed=0, deadline=20)
        assert run.failure is None, run.failure.detail
        return run.results, [ranks.count(rank) for rank in range(world_size)]

    return run


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [False, True])
def test_shards_of_unequal_length_need_the_lengths(method, causal):
    """Four and five tokens: each rank would take its own shard times two for the whole."""
    message = said(lambda rank: ring_attention(*tensors(4 + rank), method=method, causal=causal))
    for words in (
        "query_length is 8 on rank 0 and 10 on rank 1",
        "key_length is 8 on rank 0 and 10 on rank 1",
        "need query_length= and key_length=, the lengths over all ranks, on every rank",
    ):
        assert words in message


def test_one_length_that_is_given_does_not_hide_the_other():
    """Keys of one and two tokens, and all of five queries on every rank."""
    message = said(
        lambda rank: ring_attention(*tensors(5, 1 + rank // 2), sharding="replicated_query", query_length=5), 3
    )
    assert "key_length is 3 on ranks 0, 1 and 6 on rank 2" in message
    assert "query_length is" not in message


@pytest.mark.parametrize(
    "module", [RingAttention, functools.partial(DilatedRingAttention, (4,), (2,))], ids=["ring", "dilated"]
)
def test_modules_compare_as_well_on_every_call(module):
    """Nothing is remembered: a call that was right does not vouch for the next one."""

    def calls(rank):
        attend = module()
        attend(*tensors(4))
        attend(*tensors(4))
        attend(*tensors(4 + rank))

    assert "query_length is 8 on rank 0 and 10 on rank 1" in said(calls)


def test_what_only_one_rank_refuses_is_heard_by_all():
    """Eight tokens are inferred on rank 0, which is too short for these documents, and ten on rank 1."""
    message = said(lambda rank: ring_attention(*tensors(4 + rank), documents=(0, 9)))
    assert "query_length is 8 on rank 0 and 10 on rank 1" in message
    assert "rank 0 refuses: documents=(0, 9): expected non-decreasing cumulative lengths" in message
    message = said(lambda rank: ring_attention(*(x[0] if rank else x for x in tensors(4))))
    assert "call: rank 1 refuses: q has shape (4, 2, 4): expected (batch, sequence, heads, head_dim); give" in message


def no_such_shard(length, world_size):
    """A sharding function with a fault of its own."""
    raise IndexError(f"no shard\nof {length}")


@pytest.mark.parametrize(
    ("change", "how", "words"),
    [
        (lambda q, k, v: (q, k, v[:, 1:]), {}, "v has shape (1, 3, 2, 4) on rank 1 of 2: expected (1, 4, 2, 4)"),
        (lambda q, k, v: (q, k, v.double()), {}, "v is torch.float64 on rank 1: expected float32"),
        (lambda q, k, v: (q, k, v.repeat(2, 1, 1, 1)), {}, "v has shape (2, 4, 2, 4) on rank 1 of 2"),
        (lambda q, k, v: (None, k, v), {}, "q is of type NoneType: expected a tensor"),
        (lambda q, k, v: (q, [1.0], v), {}, "k is of type list: expected a tensor"),
        (lambda q, k, v: (q, k.to_sparse(), v), {}, "k is torch.sparse_coo: expected a dense tensor"),
        (None, {"kernel": "flash"}, "kernel='flash': expected auto, fused_cpu,"),
        (None, {"kernel": "flash_cuda"}, "kernel='flash_cuda' runs on cuda, not on cpu"),
        (None, {"memory_budget": -1}, "memory_budget=-1: expected a positive number of bytes"),
        (None, {"memory_budget": "1"}, "memory_budget='1': expected a positive number of bytes"),
        (None, {"transport": "mpi"}, "transport='mpi': expected p2p or blocking"),
        (None, {"method": "auto"}, "method='auto': expected ring or allgather"),
        (None, {"dropout_p": 0.5}, "dropout_p=0.5: ring attention has no dropout"),
        (None, {"layout": "sbhd"}, "layout='sbhd': expected bshd or bhsd"),
        (None, {"sharding": no_such_shard}, "IndexError: no shard of 8"),
    ],
)
def test_whatever_one_rank_refuses_all_do(change, how, words):
    """Its tensors, its settings, and errors of code that it calls: nobody is left waiting for it."""

    def call(rank):
        q, k, v = tensors(4)
        odd = rank == 1
        if odd and change is not None:
            q, k, v = change(q, k, v)
        given = {"query_length": 8, "key_length": 8, "check_shards": True}
        return ring_attention(q, k, v, **given, **(how if odd else {}))

    assert f"rank 1 refuses: {words}" in said(call)


@pytest.mark.filterwarnings("error")
def test_a_warning_that_is_an_error_is_raised_on_all():
    """Rank 0 alone warns of positions outside all documents, before the ranks are compared."""
    message = said(lambda _: ring_attention(*tensors(4), documents=(0, 4)))
    assert "rank 0 refuses: UserWarning: documents end at 4 and the sequence at 8" in message


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"causal": (False, True)}, "causal is False on rank 0 and True on rank 1"),
        ({"documents": ((0, 8), (0, 4, 8))}, "documents is (0, 8) on rank 0 and (0, 4, 8) on rank 1"),
        ({"sharding": ("zigzag", "striped")}, "sharding is zigzag on rank 0 and striped on rank 1"),
        ({"method": ("ring", "allgather")}, "method is ring on rank 0 and allgather on rank 1"),
        ({"scale": (0.5, 0.25)}, "scale is 0.5 on rank 0 and 0.25 on rank 1"),
    ],
)
def test_every_rank_is_given_the_same(how, words):
    """What differs is named, with each rank's value."""
    message = said(lambda rank: ring_attention(*tensors(4), **{name: values[rank] for name, values in how.items()}))
    assert message == f"the ranks do not make the same call: {words}; give every rank the same"


def test_what_every_rank_refuses_alike_is_said_as_it_is():
    """The same line on all of them, compared or not."""

    def program(check_shards):
        with pytest.raises(ValueError, match=r"^method='local': expected ring or allgather$"):
            ring_attention(*tensors(4), method="local", check_shards=check_shards)

    for check_shards in (True, False):
        run = WORLD.run(program, check_shards, world_size=2, seed=0, deadline=20)
        assert run.failure is None, run.failure.detail


@pytest.mark.parametrize("method", METHODS)
def test_each_rank_may_have_a_memory_budget_of_its_own(method, gathers):
    """It decides how large tiles are, and nothing that is sent."""
    budgets = 1, 10**12
    results, _ = gathers(lambda rank: ring_attention(*tensors(80), method=method, memory_budget=budgets[rank]).shape)
    assert results == ((1, 80, 2, 4), (1, 80, 2, 4))


def test_a_call_that_is_the_same_costs_one_gather(gathers):
    """Whatever is given: a rank cannot know what others are given. And none where a comparison is declined."""
    lengths = {"query_length": 8, "key_length": 8}
    for how, expected in (
        ({}, 1),
        ({"query_length": 8}, 1),
        ({"key_length": 8}, 1),
        (lengths, 1),
        ({"sinks": torch.zeros(2), **lengths}, 1),
        ({"sinks": torch.zeros(2), "check_shards": False, **lengths}, 0),
        ({"check_shards": False}, 0),
        ({"check_shards": True, **lengths}, 1),
    ):
        _, found = gathers(lambda rank, how=how: ring_attention(*tensors(4), **how))
        assert found == [expected, expected], how


def test_a_call_without_gradients_compares_where_something_is_inferred_or_there_are_sinks(gathers):
    """As while decoding, where a gather would be a part of the time: only the first call of a group costs one."""
    lengths = {"query_length": 8, "key_length": 8}
    with_sinks = {"sinks": torch.zeros(2), **lengths}

    def quietly(*calls):
        with torch.no_grad():
            return [ring_attention(*tensors(4), **how) for how in calls]

    for calls, expected in (
        ([lengths], 1),
        ([lengths, lengths, lengths], 1),
        ([lengths, {"query_length": 8}, lengths], 2),
        ([lengths, with_sinks, lengths], 3),  # some layers have sinks: of each, all ranks or none
        ([lengths, {"check_shards": True, **lengths}], 2),
        ([{"check_shards": False, **lengths}, lengths], 1),
    ):
        _, found = gathers(lambda rank, calls=calls: quietly(*calls))
        assert found == [expected, expected], calls


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharding", ["contiguous", "replicated_query"])
@pytest.mark.parametrize("keys", [8, 20])
@pytest.mark.parametrize("enabled", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("given", ["both lengths", "nothing"])
@pytest.mark.parametrize("odd", [0, 2])
def test_sinks_on_some_ranks_only_are_refused_on_all(method, sharding, keys, enabled, given, odd):
    """In the first call of a group, and where a call before had sinks: none waits for the others."""
    lengths = {"query_length": 9, "key_length": 3 * keys} if given == "both lengths" else {}
    queries = 9 if sharding == "replicated_query" else 3
    how = {"method": method, "sharding": sharding, **lengths}
    sinks = torch.zeros(2)

    def call(rank, before):
        with torch.set_grad_enabled(enabled):
            for all_have_some in before:
                ring_attention(*tensors(queries, keys), sinks=sinks if all_have_some else None, **how)
            ring_attention(*tensors(queries, keys), sinks=sinks if rank == odd else None, **how)

    without = "0, 1" if odd else "1, 2"
    parts = [f"given on rank {odd}", f"None on ranks {without}"]
    words = " and ".join(parts if odd == 0 else parts[::-1])
    for before in ((), (True,), (False, True)):
        message = said(lambda rank, before=before: call(rank, before), 3)
        assert message == f"the ranks do not make the same call: sinks is {words}; give every rank the same"


def decode_with_sinks_on_rank_1(method):
    """What a rank raises."""
    how = {"sharding": "replicated_query", "query_length": 1, "key_length": 8, "method": method}
    with torch.no_grad(), pytest.raises(ValueError, match="sinks is None on rank 0 and given on rank 1") as raised:
        ring_attention(*tensors(1, 4), sinks=torch.zeros(2) if dist.get_rank() else None, **how)
    return str(raised.value)


def test_processes_refuse_sinks_on_some_of_them_only():
    """Over gloo, where one would wait for half an hour."""
    with contextlib.closing(GlooWorld()) as world:
        for method in METHODS:
            run = world.run(decode_with_sinks_on_rank_1, method, world_size=2, seed=0, deadline=20)
            assert run.failure is None, run.failure.detail
            assert len(set(run.results)) == 1


def test_a_rank_alone_has_nobody_to_ask(gathers):
    """In a world of one, and where there is none."""
    _, found = gathers(lambda rank: ring_attention(*tensors(4), check_shards=True), 1)
    assert found == [0]
    assert ring_attention(*tensors(4), check_shards=True).shape == (1, 4, 2, 4)
    with torch.no_grad():
        assert ring_attention(*tensors(4), query_length=4, key_length=4).shape == (1, 4, 2, 4)


def every(step):
    """A sharding function, each time another object: blocks of so many positions, dealt out in turn."""
    return lambda length, world_size: [
        [p for p in range(length) if p // step % world_size == rank] for rank in range(world_size)
    ]


def test_functions_are_compared_by_the_positions_they_deal_out():
    """Their text holds an address, another one in each process, and two lambdas of one name may differ."""

    class Cut:
        def __call__(self, length, world_size):
            return every(1)(length, world_size)

    def program(_):
        alike = (Cut(), every(1))[dist.get_rank()]
        return ring_attention(*tensors(4), sharding=alike).shape

    run = WORLD.run(program, None, world_size=2, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    message = said(lambda rank: ring_attention(*tensors(4), sharding=every(1 + rank), causal=True))
    assert "sharding is a function whose positions have the digest " in message
    assert " on rank 0 and a function whose positions have the digest " in message


def test_functions_that_differ_for_keys_alone_are_refused():
    """Queries are dealt out alike, and keys, of which there are more, are not."""

    def dealt(rank):
        return lambda length, world_size: every(1 + rank * (length == 16))(length, world_size)

    message = said(lambda rank: ring_attention(*tensors(4, 8), sharding=dealt(rank)))
    assert "the ranks do not make the same call: sharding is a function" in message


def test_groups_within_a_world_compare_among_themselves():
    """Two rings of two, of other lengths than one another: neither hears of the other."""

    def program(_):
        rank = dist.get_rank()
        group = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        out = ring_attention(*(shard(x, group=group) for x in tensors(6 + 2 * (rank % 2))), group=group)
        check_agreement(Ring.of(group), {"ring": str(rank % 2)}, torch.device("cpu"))
        with pytest.raises(ValueError, match=r"place is 0 on rank 0 and 1 on rank 1"):
            check_agreement(Ring.of(group), {"place": str(rank // 2)}, torch.device("cpu"))
        return out.size(1)

    run = WORLD.run(program, None, world_size=4, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    assert run.results == (3, 4, 3, 4)


def test_a_long_value_is_cut_short():
    """Cumulative lengths of thousands of documents are no line of an error."""
    message = disagreement([{"documents": str(tuple(range(1000)))}, {"documents": "None"}])
    assert "documents is (0, 1, 2," in message
    assert "… on rank 0 and None on rank 1" in message
    assert len(message) < 200


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients(wanting, world_size, sharding, method, **how):
    """Of each rank, whether its out requires a gradient, and the gradients of what it gave; `wanting` ranks want some.

    Every rank that can runs backward.
    """

    def program(_):
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(1, 5, heads, 4, generator=generator) for heads in (4, 2, 2)]
        whole = zip(drawn, ("queries", "keys", "keys"), strict=True)
        inputs = [shard(x, sharding=sharding, of=of).requires_grad_(rank in wanting) for x, of in whole]
        how_long = {"query_length": 5, "key_length": 5, "check_shards": True}
        out = ring_attention(*inputs, sharding=sharding, method=method, causal=True, **how_long, **how)
        if out.requires_grad:
            out.square().sum().backward()
        return out.requires_grad, [x.grad for x in inputs]

    run = WORLD.run(program, None, world_size=world_size, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    assert run.unreceived == ()
    return run.results


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharding", ["contiguous", "zigzag", "replicated_query"])
@pytest.mark.parametrize("world_size", [2, 3, 6])
def test_a_rank_that_wants_no_gradient_takes_part_where_another_does(world_size, sharding, method):
    """The gradients of those that want some are what they are where all want some; with six ranks one holds nothing."""
    everyone = gradients(range(world_size), world_size, sharding, method)
    for wanting in ({0}, {world_size - 1}):
        found = gradients(wanting, world_size, sharding, method)
        assert all(required for required, _ in found)
        for rank, (_, mine) in enumerate(found):
            if rank in wanting:
                assert all(torch.equal(a, b) for a, b in zip(mine, everyone[rank][1], strict=True))
            else:
                assert mine == [None, None, None]


def test_where_no_rank_wants_a_gradient_none_is_required():
    """Nor under `no_grad`, whatever the inputs are."""
    assert [required for required, _ in gradients((), 2, "contiguous", "ring")] == [False, False]

    def program(_):
        with torch.no_grad():
            return ring_attention(*(x.requires_grad_() for x in tensors(4))).requires_grad

    run = WORLD.run(program, None, world_size=2, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    assert run.results == (False, False)
