"""`ring_sdpa`: attention inside a model that is already written becomes a ring, and nothing else changes."""

from __future__ import annotations

import itertools
import re
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention as bound_early
from torch.utils.checkpoint import checkpoint

from ringref.rounding import scaled_bound
from ringverify.ring import position_ids, ring_attention, ring_sdpa, shard, unshard
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)

LENGTH, HEADS, KEY_HEADS, WIDTH = 11, 4, 2, 6


def on_ranks(program, world_size=2):
    """What `program()` returns on each rank of a simulated world."""
    run = SimulatedWorld().run(lambda _: program(), None, world_size=world_size, seed=0, deadline=20)
    assert run.failure is None, run.failure.detail
    return run.results


def tensors(length=LENGTH, heads=(HEADS, KEY_HEADS, KEY_HEADS), dtype=torch.float64):
    """q, k and v of the whole sequence, heads before positions: `(2, heads, length, 6)`."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, h, length, WIDTH, dtype=torch.float64, generator=generator).to(dtype) for h in heads]


def sdpa(q, k, v, call=functional.scaled_dot_product_attention, **how):
    """A call and its gradients, under the same cotangent everywhere."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = call(*leaves, **how)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach().cos())]


def off(found, expected):
    """The largest relative difference, in the norm."""
    return max(
        ((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in zip(found, expected, strict=True)
    )


def allowed(dtype="float64", **how):
    """How far apart rounding leads two computations: what torch's own is off by in float32, or in this dtype."""
    measured = "float32" if dtype == "float64" else dtype
    rounded = tensors(dtype=getattr(torch, measured))
    exact = sdpa(*(x.double() for x in rounded), **how)
    return scaled_bound(off(sdpa(*rounded, **how), exact), measured, dtype)


def whole(shards, sharding):
    """Shards of all ranks together, on every rank."""
    return [unshard(x, length=LENGTH, sharding=sharding, dim=2) for x in shards]


CALLS = {
    "as torch has it": functional.scaled_dot_product_attention,
    "bound before the context": bound_early,
    "by its C++ name": torch._C._nn.scaled_dot_product_attention,
    "as an operator": torch.ops.aten.scaled_dot_product_attention,
    "as an overload": torch.ops.aten.scaled_dot_product_attention.default,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_under_any_name_is_ring_attention(name):
    """Forward and backward, backward outside the context; not as it would be within the shard."""
    how = {"is_causal": True, "enable_gqa": True}

    def program():
        shards = [shard(x, sharding="zigzag", dim=2) for x in tensors()]
        with ring_sdpa(sharding="zigzag", length=LENGTH) as ring:
            found = sdpa(*shards, call=CALLS[name], **how)
        assert ring.calls == 1
        assert found[0].shape == shards[0].shape
        assert off(found[:1], sdpa(*shards, **how)[:1]) > allowed(**how)
        return off(whole(found, "zigzag"), sdpa(*tensors(), **how))

    assert max(on_ranks(program, 3)) <= allowed(**how)


@pytest.mark.parametrize(
    ("settings", "how"),
    [
        ({}, {"enable_gqa": True}),
        ({"causal": True}, {"enable_gqa": True}),
        ({}, {"enable_gqa": True, "is_causal": True, "scale": 0.7}),
        ({"causal": False}, {"enable_gqa": True, "is_causal": True}),
        ({"method": "allgather"}, {"enable_gqa": True, "attn_mask": None, "dropout_p": 0.0}),
    ],
)
@pytest.mark.parametrize("sharding", ["contiguous", "striped"])
def test_what_a_call_says_is_what_the_ring_computes(settings, how, sharding):
    """Causal, scale, grouped heads; `causal=` of the context overrules the call."""
    expected = dict(how) | {"is_causal": settings.get("causal", how.get("is_causal", False))}

    def program():
        shards = [shard(x, sharding=sharding, dim=2) for x in tensors()]
        with ring_sdpa(sharding=sharding, length=LENGTH, **settings):
            found = sdpa(*shards, **how)
        return off(whole(found, sharding), sdpa(*tensors(), **expected))

    assert max(on_ranks(program)) <= allowed(**expected)


def test_documents_and_padding_are_the_context_s_to_say():
    """In place of masks, of which a rank's shard could only make a part."""

    def program():
        q, k, v = (shard(x, dim=2) for x in tensors())
        constraints = {"documents": (0, 4, LENGTH), "key_lengths": (LENGTH, 6)}
        with ring_sdpa(length=LENGTH, window=(3, 0), softcap=2.0, **constraints):
            found = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        lengths = {"query_length": LENGTH, "key_length": LENGTH}
        asked = ring_attention(q, k, v, layout="bhsd", window=(3, 0), softcap=2.0, **lengths, **constraints)
        return torch.equal(found, asked)

    assert all(on_ranks(program))


def mask(n):
    """The causal mask of a shard."""
    return torch.ones(n, n, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda n: {"attn_mask": mask(n)}, "attn_mask of shape (6, 6) within ring_sdpa: a mask made from one rank's"),
        (lambda n: {"attn_mask": mask(n)}, "attention_mask=torch.ones_like(input_ids)"),
        (lambda n: {"dropout_p": 0.1}, "dropout_p=0.1: ring attention has no dropout"),
        (lambda n: {"enable_gqa": False}, "4 query heads and 2 key heads without enable_gqa=True"),
    ],
)
@pytest.mark.parametrize("only_on", [None, 0, 1])
def test_what_the_ring_cannot_compute_is_refused_on_every_rank(how, words, only_on):
    """In one line; also if a single rank makes such a call, for which the others would wait."""

    def program():
        q, k, v = (shard(x, dim=2) for x in tensors(12))
        odd = only_on in (None, dist.get_rank())
        with pytest.raises(ValueError, match=re.escape(words)) as raised, ring_sdpa(length=12):
            functional.scaled_dot_product_attention(q, k, v, **{"enable_gqa": True} | (how(q.size(2)) if odd else {}))
        assert "\n" not in str(raised.value)
        return True

    assert all(on_ranks(program))


def test_causal_of_unequal_lengths_is_refused():
    """Torch aligns top left, the ring bottom right."""

    def program():
        q, k, v = (shard(x, dim=2) for x in tensors())
        with pytest.raises(ValueError, match="torch aligns the first query"), ring_sdpa():
            functional.scaled_dot_product_attention(q[:, :, :2], k, v, is_causal=True, enable_gqa=True)
        return True

    assert all(on_ranks(program))


def test_ranks_of_one_token_do_not_lose_their_mask():
    """Models leave `is_causal` out for one token, which is the last one only without a ring."""

    def program(length, **settings):
        shards = [shard(x, dim=2) for x in tensors(length)]
        with ring_sdpa(length=length, **settings):
            return functional.scaled_dot_product_attention(
                *shards, is_causal=shards[0].size(2) > 1, enable_gqa=True
            ).norm()

    def refused():
        for length in (2, 3):  # one token on both ranks, and on one
            with pytest.raises(ValueError, match="say causal=True or causal=False"):
                program(length)
        return True

    assert all(on_ranks(refused))
    assert all(on_ranks(lambda: program(3, causal=True)))


def test_ranks_that_do_not_make_the_same_call_hear_of_it():
    """Compared by default; the length is what one rank has otherwise than the other."""

    def program():
        shards = [shard(x, dim=2) for x in tensors()]
        with pytest.raises(ValueError, match="causal is True on rank 0 and False on rank 1"), ring_sdpa(length=LENGTH):
            functional.scaled_dot_product_attention(*shards, is_causal=dist.get_rank() == 0, enable_gqa=True)
        with pytest.raises(ValueError, match="query_length is 12 on rank 0 and 10 on rank 1"), ring_sdpa():
            functional.scaled_dot_product_attention(*shards, enable_gqa=True)
        return True

    assert all(on_ranks(program))


def test_the_context_is_of_its_thread_alone_and_ends_with_an_error():
    """Ranks of a simulated world are threads; a thread that is not in the context computes as before."""
    q, k, v = tensors(heads=(2, 2, 2))
    plain = functional.scaled_dot_product_attention(q, k, v)
    elsewhere = []

    def program():
        shards = [shard(x, dim=2) for x in (q, k, v)]
        with pytest.raises(RuntimeError, match="mine"), ring_sdpa(length=LENGTH):  # noqa: PT012
            functional.scaled_dot_product_attention(*shards)
            beside = threading.Thread(target=lambda: elsewhere.append(functional.scaled_dot_product_attention(q, k, v)))
            beside.start()
            beside.join()
            raise RuntimeError("mine")
        return torch.equal(functional.scaled_dot_product_attention(q, k, v), plain)

    assert all(on_ranks(program))
    assert all(torch.equal(found, plain) for found in elsewhere)
    assert len(elsewhere) == 2


def test_the_inner_of_two_contexts_counts():
    """And the outer one again when it has ended."""

    def program():
        shards = [shard(x, dim=2) for x in tensors()]
        with ring_sdpa(length=LENGTH) as outer:
            first = functional.scaled_dot_product_attention(*shards, enable_gqa=True)
            with ring_sdpa(length=LENGTH, causal=True) as inner:
                causal = functional.scaled_dot_product_attention(*shards, enable_gqa=True)
            last = functional.scaled_dot_product_attention(*shards, enable_gqa=True)
        assert (outer.calls, inner.calls) == (2, 1)
        assert torch.equal(first, last)
        assert not torch.equal(first, causal)
        return True

    assert all(on_ranks(program))


def by_method(out, leaves):
    """Gradients by `out.backward`."""
    out.backward(out.detach().cos())
    return [x.grad for x in leaves]


def by_function(out, leaves):
    """Gradients by `torch.autograd.backward`."""
    torch.autograd.backward([out], [out.detach().cos()])
    return [x.grad for x in leaves]


def returned(out, leaves):
    """Gradients by `torch.autograd.grad`."""
    return torch.autograd.grad(out, leaves, out.detach().cos())


@pytest.mark.parametrize(
    ("reentrant", "gradients"),
    [(True, by_method), (True, by_function), (False, by_method), (False, by_function), (False, returned)],
)
def test_checkpointed_attention_is_computed_again_by_the_ring(reentrant, gradients):
    """With backward inside the context, however it is asked for."""

    def attention(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).sin()

    def program():
        shards = [shard(x, dim=2) for x in tensors()]
        results = []
        for checkpointed in (False, True):
            leaves = [x.clone().requires_grad_() for x in shards]
            with ring_sdpa(length=LENGTH, causal=True) as ring:
                out = checkpoint(attention, *leaves, use_reentrant=reentrant) if checkpointed else attention(*leaves)
                results.append([out, *gradients(out, leaves)])
            assert ring.calls == 1 + checkpointed
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    assert all(on_ranks(program))


def test_a_compiled_model_follows_the_context():
    """Compiled before it, within it and after it, each call is what it is there."""

    def model(x):
        return functional.scaled_dot_product_attention(x.sin(), x, x, is_causal=True).cos()

    torch._dynamo.reset()
    compute, (x, *_) = torch.compile(model, backend="eager"), tensors()
    before = compute(x)
    with ring_sdpa() as ring:
        causal = compute(x)
    with ring_sdpa(causal=False) as other:
        everything = compute(x)
    assert (ring.calls, other.calls) == (1, 1)
    assert off([causal], [before]) <= allowed(is_causal=True, enable_gqa=True)
    assert off([everything], [before]) > allowed(is_causal=True, enable_gqa=True)
    assert torch.equal(compute(x), before)


def test_attention_that_is_out_of_sight_is_said():
    """`nn.MultiheadAttention` is refused; a context in which nothing attends warns, unless an error ended it."""

    def program():
        x = torch.zeros(1, 3, 8)
        attend = nn.MultiheadAttention(8, 2, batch_first=True)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"nn\.MultiheadAttention within ring_sdpa"), ring_sdpa():
                attend(x, x, x, need_weights=False)
            attend.eval()
        return True

    assert all(on_ranks(program))
    with pytest.warns(UserWarning, match="no scaled_dot_product_attention was called within ring_sdpa"), ring_sdpa():
        torch.zeros(3).softmax(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError), ring_sdpa():
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"scale": 1.0}, TypeError, "scale: each call of scaled_dot_product_attention says it; leave it out"),
        ({"layout": "bhsd"}, TypeError, "layout: each call"),
        ({"colour": 1}, TypeError, "colour"),
        ({"sharding": "zickzack"}, ValueError, "sharding='zickzack': expected one of contiguous"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(settings, error, words):
    """Before anything is computed."""
    with pytest.raises(error, match=words):
        ring_sdpa(**settings)


def test_positions_are_those_of_the_whole_sequence():
    """What a model with rotary or learned positions is given, and the context around it: one process's numbers."""
    table = torch.randn(LENGTH, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def model(x, positions):
        x = x + table[positions]
        return functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = tensors()[0]
    expected = model(x, torch.arange(LENGTH))

    def program():
        for sharding in ("contiguous", "zigzag"):
            with ring_sdpa(sharding=sharding, length=LENGTH):
                out = model(shard(x, sharding=sharding, dim=2), position_ids(LENGTH, sharding=sharding))
            yield off(whole([out], sharding), [expected])

    assert max(itertools.chain(*on_ranks(lambda: list(program())))) <= allowed(is_causal=True, enable_gqa=True)
