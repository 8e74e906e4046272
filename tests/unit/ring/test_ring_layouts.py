"""Heads before positions, as in `scaled_dot_product_attention`: the same numbers, and mix-ups that shapes tell."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from on_ranks import WORLD

from ringverify.ring import DilatedRingAttention, RingAttention, ring_attention, shard

pytestmark = pytest.mark.timeout(60)

SHARDINGS = ("contiguous", "zigzag", "striped", "replicated_query")


def tensors(length=9, heads=(4, 2, 2), batch=2):
    """q, k and v in "bshd"."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(batch, length, h, 6, generator=generator) for h in heads]


def on_ranks(program, world_size=2):
    """What `program()` returns on each rank."""
    run = WORLD.run(lambda _: program(), None, world_size=world_size, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    return run.results


def with_gradients(attend, inputs):
    """out, lse, and the gradients of the inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = attend(*leaves)
    return [out, lse, *torch.autograd.grad([out, lse], leaves, [out.detach().cos(), lse.detach().cos()])]


@pytest.mark.parametrize("made", ["a view", "contiguous"])
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_heads_before_positions_give_the_same_bits(sharding, made):
    """out and every gradient lie as the inputs do, lse is what it is; as a function and as modules, also dilated."""

    def program():
        cut = {"sharding": sharding}
        shards = [shard(x, of=of, **cut) for x, of in zip(tensors(), ("queries", "keys", "keys"), strict=True)]
        by_head = [x.transpose(1, 2) for x in shards]
        if made == "contiguous":
            by_head = [x.contiguous() for x in by_head]
        lengths = {"query_length": 9, "key_length": 9}
        how = {**cut, "causal": True, "return_lse": True}
        dilation = ((4, 8), (1, 2))
        pairs = [
            (functools.partial(ring_attention, **how), functools.partial(ring_attention, layout="bhsd", **how)),
            (RingAttention(**how), RingAttention(layout="bhsd", **how)),
            (DilatedRingAttention(*dilation, **how), DilatedRingAttention(*dilation, layout="bhsd", **how)),
        ]
        for plain, other in pairs:
            out, lse, *gradients = with_gradients(functools.partial(plain, **lengths), shards)
            their_out, their_lse, *theirs = with_gradients(functools.partial(other, **lengths), by_head)
            assert torch.equal(lse, their_lse)
            for ours, found in zip((out, *gradients), (their_out, *theirs), strict=True):
                assert torch.equal(ours, found.transpose(1, 2))
        return True

    assert all(on_ranks(program, 3))


def test_a_view_by_heads_is_not_copied():
    """What a model makes by `transpose(1, 2)` is saved for backward as it is, and out is such a view again."""
    q, k, v = (x.requires_grad_() for x in tensors())
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        out = ring_attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd")
    assert {x.data_ptr() for x in (q, k, v)} <= set(saved)
    assert out.transpose(1, 2).is_contiguous()


def refused(call, world_size=1):
    """What is said on every rank, in one line."""

    def program():
        with pytest.raises(ValueError, match=r"\w") as raised:
            call()
        return str(raised.value)

    said = on_ranks(program, world_size)
    assert len(set(said)) == 1
    assert "\n" not in said[0]
    return said[0]


GROUPED = tensors(64, heads=(8, 2, 2), batch=1)
"""A shard of grouped-query attention: 64 positions, 8 query heads, 2 key heads."""


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_grouped_heads_given_as_positions_are_refused(layout, world_size):
    """Eight queries and two keys of 64 heads: with either layout declared and the other given, where no length is."""
    right = GROUPED if layout == "bshd" else [x.transpose(1, 2) for x in GROUPED]
    wrong = [x.transpose(1, 2) for x in right]
    said = refused(lambda: ring_attention(*wrong, layout=layout), world_size)
    other = {"bshd": "bhsd", "bhsd": "bshd"}[layout]
    assert f"with layout='{layout}' are 8 queries and 2 keys of 64 heads on this rank" in said
    assert said.endswith(f"give query_length= and key_length=; these shapes fit layout='{other}'")
    assert ring_attention(*right, layout=layout).shape == right[0].shape
    asked = ring_attention(*wrong, layout=layout, query_length=8, key_length=2)  # if it is what one means
    assert asked.shape == wrong[0].shape


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"query_length": 18, "key_length": 18}, "q has shape (2, 4, 9, 6) on rank 0 of 1: expected (2, 18, 9, 6)"),
        ({"query_length": 9, "key_length": 9}, "q has shape (2, 4, 9, 6) on rank 0 of 1: expected (2, 9, 9, 6)"),
        ({"documents": (0, 5, 9)}, "documents=(0, 5, 9)"),
        ({"key_lengths": (9, 3)}, "expected lengths of at most key_length=4"),
    ],
)
def test_what_fits_the_other_layout_is_said(how, words):
    """Lengths, documents and padding; only where everything fits there."""
    given = [x.transpose(1, 2) for x in tensors(heads=(4, 4, 4))]
    said = refused(lambda: ring_attention(*given, **how))
    assert words in said
    assert said.endswith("; these shapes fit layout='bhsd'") == (how.get("query_length") != 18)


def test_heads_that_do_not_divide_are_refused_with_the_layout_that_they_fit():
    """Nine queries and six keys of four heads, given by heads: as "bshd" they would be nine heads over six."""
    q, _, _ = tensors(heads=(4, 4, 4))
    k, v = tensors(6, heads=(4, 4))
    said = refused(lambda: ring_attention(*(x.transpose(1, 2) for x in (q, k, v))))
    assert said == (
        "heads=9, key_heads=6: key_heads must divide heads (grouped-query attention); these shapes fit layout='bhsd'"
    )


def test_a_rank_whose_shard_fits_both_layouts_hears_of_the_one_whose_does_not():
    """Four positions and four heads on rank 0, three positions on rank 1: compared, all refuse; nobody waits."""
    inputs = tensors(7, heads=(4, 4, 4))

    def program():
        shards = [shard(x).transpose(1, 2) for x in inputs]
        with pytest.raises(ValueError, match=r"rank 1 refuses: q has shape \(2, 4, 3, 6\).*fit layout='bhsd'"):
            RingAttention(check_shards=True)(*shards, query_length=7, key_length=7)
        return dist.get_rank()

    assert on_ranks(program) == (0, 1)


@pytest.mark.parametrize("make", [RingAttention, lambda **how: ring_attention(*tensors(), **how)])
def test_an_unknown_layout_is_refused(make):
    """At once."""
    with pytest.raises(ValueError, match="layout='hsbd': expected bshd or bhsd"):
        make(layout="hsbd")


def test_shapes_are_said_in_the_layout_that_was_given():
    """And the axes named in that order."""
    q, k, v = (x.transpose(1, 2) for x in tensors())
    said = refused(lambda: ring_attention(q, k, v[:, :, 1:], layout="bhsd"))
    assert "v has shape (2, 2, 8, 6) on rank 0 of 1: expected (2, 2, 9, 6), that is (batch, heads, positions of" in said
    said = refused(lambda: ring_attention(q[0], k, v, layout="bhsd"))
    assert said == "q has shape (4, 9, 6): expected (batch, heads, sequence, head_dim)"
