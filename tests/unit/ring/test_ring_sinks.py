"""Learned sinks in `ring_attention`: what their gradient covers, what they cost when absent, and what is refused."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from on_ranks import WORLD

from ringref.rounding import witness_bound
from ringverify import QueryKeySharding
from ringverify.ring import RingAttention, accumulate, autograd, one_process, ring_attention
from ringverify.ring.accumulate import PartialResult, join_sinks
from ringverify.ring.method import METHODS

pytestmark = pytest.mark.timeout(60)

HEADS = 4
SINKS = torch.tensor([0.5, -3.0, 40.0, -torch.inf])


def tensors(rank, length=3):
    """q, k and v of a rank, drawn for it."""
    drawn = torch.Generator().manual_seed(rank)
    return [torch.randn(2, length, heads, 5, generator=drawn) for heads in (HEADS, 2, 2)]


def on_ranks(program, world_size=2):
    """What `program(rank)` returns on every rank."""
    run = WORLD.run(lambda _: program(dist.get_rank()), None, world_size=world_size, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    return run.results


def gradient(sink_gradient, method, sharding="contiguous"):
    """The gradient of the sinks on each of three ranks; with replicated queries all ranks hold those of rank 0."""

    def program(rank):
        sinks = SINKS.clone().requires_grad_()
        q, k, v = tensors(rank)
        if sharding == "replicated_query":
            q = tensors(0)[0]
        out, lse = ring_attention(
            q, k, v, sinks=sinks, sink_gradient=sink_gradient, method=method, sharding=sharding, return_lse=True
        )
        torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
        return sinks.grad

    return on_ranks(program, 3)


def near(one, other):
    """Whether two float32 sums over all rows agree, which may cancel."""
    return bool(((one - other).abs() <= witness_bound("float32", 1000) * (1 + other.abs())).all())


@pytest.mark.parametrize("method", METHODS)
def test_the_parts_of_the_ranks_add_up_to_the_whole_that_each_may_ask_for(method):
    """Only the sinks require a gradient, which is enough for every rank to take part in the backward."""
    parts, wholes = gradient("partial", method), gradient("whole", method)
    assert len({tuple(whole.tolist()) for whole in wholes}) == 1
    assert near(torch.stack(parts).sum(dim=0), wholes[0])
    assert all(part.abs().sum() > 0 for part in parts)
    assert not torch.equal(parts[0], wholes[0])
    assert wholes[0][3] == 0  # a sink of -inf is none


@pytest.mark.parametrize("sink_gradient", ["partial", "whole"])
def test_with_replicated_queries_every_rank_has_the_whole_gradient(sink_gradient):
    """Its own queries are all queries, and the loss counts once."""
    found = gradient(sink_gradient, "ring", "replicated_query")
    assert all(torch.equal(one, found[0]) for one in found)
    assert near(found[0], gradient("partial", "allgather", "replicated_query")[0])


def test_sinks_of_minus_infinity_give_the_bits_of_no_sinks():
    """Out and lse, where one tile does all the work and where blocks are merged."""

    def program(rank):
        none = torch.full((HEADS,), -torch.inf)
        plain, found = (ring_attention(*tensors(rank), sinks=sinks, return_lse=True) for sinks in (None, none))
        return all(torch.equal(a, b) for a, b in zip(plain, found, strict=True))

    assert all(on_ranks(program, 1))
    assert all(on_ranks(program))


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_without_sinks_nothing_of_theirs_is_computed(monkeypatch, method, world_size):
    """Neither in the forward nor in the backward."""

    def never(*arguments):
        raise AssertionError("computed for sinks")

    for module, name in ((accumulate, "join_sinks"), (one_process, "join_sinks"), (autograd, "sink_gradient")):
        monkeypatch.setattr(module, name, never)

    def program(sinks):
        q, k, v = (x.requires_grad_() for x in tensors(dist.get_rank()))
        ring_attention(q, k, v, sinks=sinks, method=method).sum().backward()

    def failure(sinks):
        run = WORLD.run(program, sinks, world_size=world_size, seed=0, deadline=20)
        return None if run.failure is None else run.failure.message

    assert failure(None) is None
    assert "computed for sinks" in failure(SINKS)


def test_an_empty_row_takes_its_sink_and_a_nan_stays_seen():
    """A sink of -inf leaves an empty row empty."""
    lse = torch.tensor([[[-torch.inf, 1.0]], [[-torch.inf, torch.nan]]]).transpose(0, 1)
    out = torch.ones(1, 2, 2, 1) * torch.tensor([0.0, 1.0])[None, :, None, None]
    joined = join_sinks(PartialResult(out.clone(), lse.contiguous()), torch.tensor([2.0, -torch.inf]))
    assert joined.lse[0, :, 0].tolist() == [2.0, -torch.inf]
    assert joined.out[0, 0].tolist() == [[0.0], [0.0]]
    assert joined.lse[0, 1, 1].isnan()
    assert joined.out[0, 1, 1].isnan()


def test_a_module_takes_the_sinks_of_each_call():
    """They are a parameter of the model around it."""

    def program(rank):
        inputs = tensors(rank)
        return torch.equal(RingAttention()(*inputs, sinks=SINKS), ring_attention(*inputs, sinks=SINKS))

    assert all(on_ranks(program))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"sinks": torch.zeros(2)}, "sinks has shape (2,) on rank 0 of 1: expected (4,), one for each query head"),
        ({"sinks": torch.zeros(1, 4)}, "sinks has shape (1, 4) on rank 0 of 1: expected (4,)"),
        (
            {"sinks": torch.zeros(4).half()},
            "sinks is torch.float16 on rank 0 of 1: expected float32; sinks.float() has",
        ),
        ({"sinks": [0.0] * 4}, "sinks is of type list on rank 0 of 1: expected a tensor"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta and q on cpu: expected one device"),
        (
            {"sinks": torch.tensor([0.0, -torch.inf, torch.nan, torch.inf])},
            "sinks[2] is nan on rank 0 of 1: expected finite numbers, or -inf for a head without a sink",
        ),
        ({"sinks": torch.full((4,), torch.inf)}, "sinks[0] is inf on rank 0 of 1: expected finite numbers, or -inf"),
        ({"sink_gradient": "sum"}, "sink_gradient='sum': expected partial or whole"),
    ],
)
def test_sinks_that_do_not_fit_are_refused_in_one_line(how, message):
    """Before anything is sent; nothing here has a process group."""
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        ring_attention(*tensors(0), **how)
    assert "\n" not in str(raised.value)


def differing(sinks_of, **how):
    """What every rank raises, the same on each, where ranks have other sinks."""

    def program(rank):
        with pytest.raises(ValueError, match="the ranks do not make the same call") as raised:
            ring_attention(*tensors(rank), sinks=sinks_of(rank), **how)
        return str(raised.value)

    (said,) = set(on_ranks(program))
    return said


def test_sinks_that_differ_between_ranks_are_named_by_head_and_value():
    """The first of them."""
    said = differing(lambda rank: SINKS + torch.tensor([0.0, rank, rank, 0.0]))
    assert said == (
        "the ranks do not make the same call: sinks[1] is -3.0 on rank 0 and -2.0 on rank 1; give every rank the same"
    )


def test_sinks_on_some_ranks_only_are_named():
    """The others would compute another softmax."""
    assert "sinks is None on rank 0 and given on rank 1" in differing(lambda rank: SINKS if rank else None)
    assert "rank 1 refuses: sinks has shape (3,)" in differing(lambda rank: SINKS[: HEADS - rank])


def test_sinks_that_no_rank_can_use_are_no_difference_between_ranks():
    """Each rank says what it expects."""

    def program(rank):
        with pytest.raises(ValueError, match="no rank can make its call: rank 0 refuses: sinks has shape") as raised:
            ring_attention(*tensors(rank), sinks=SINKS[1:])
        return str(raised.value)

    (said,) = set(on_ranks(program))
    assert "expected (4,), one for each query head" in said
    assert "give every rank the same" not in said


def test_sinks_are_compared_while_decoding_too_where_both_lengths_are_given():
    """Ranks that differ would return other results from one call; what one rank refuses is heard by all."""
    decoding = {
        "sharding": QueryKeySharding("replicated", "contiguous"),
        "query_length": 3,
        "key_length": 6,
        "causal": True,
    }
    assert "sinks[0] is 0.5 on rank 0 and 1.5 on rank 1" in differing(lambda rank: SINKS + rank, **decoding)
    said = "sinks is given on rank 0 and None on rank 1"
    assert said in differing(lambda rank: None if rank else SINKS, **decoding)
    assert "rank 1 refuses: sinks[0] is nan" in differing(lambda rank: SINKS * (1, torch.nan)[rank], **decoding)


def test_gradients_of_sinks_that_differ_between_ranks_are_named():
    """In backward one rank would wait for a sum in which the other takes no part."""

    def program(rank):
        with pytest.raises(ValueError, match="sink_gradient is partial on rank 0 and whole on rank 1"):
            ring_attention(*tensors(rank), sinks=SINKS, sink_gradient=("partial", "whole")[rank])

    on_ranks(program)
