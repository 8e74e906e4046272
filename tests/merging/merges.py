"""Merges for tests: right ones, written in the ways in which people write them, and wrong ones made of the faults."""

import math

import torch
import torch.nn.functional as F

from ringverify import merge
from ringverify.merging.faults import FAULTS
from ringverify.merging.judging import search
from ringverify.merging.properties import PROPERTIES
from ringverify.merging.running import MergeTask, run_merge

INF = math.inf
ALL = ("float64", "float32", "bfloat16", "float16")


def inside(merge):
    """Call a merge in this process, in the form that the judge takes."""

    torch.set_num_threads(1)

    def calls(case, grouping, *, gradients):
        return run_merge(MergeTask(merge, case, grouping, gradients))

    return calls


def violated(merge, *, examples=None, seed=0, only=PROPERTIES):
    """What is found wrong with a merge: pairs of a property and the search that found it."""
    for property in (PROPERTIES[name] for name in only):
        if property.lacks(merge.capabilities) is None:
            found = search(
                property, merge.capabilities, inside(merge), examples=examples or property.examples, seed=seed
            )
            if found.case is not None:
                yield property, found


# -- right ones --------------------------------------------------------------------------------------------------------


@merge(dtypes=ALL, gradients=True, nan=True)
def by_maximum(out_a, lse_a, out_b, lse_b):
    """Shifted by the larger lse, normalised at the end."""
    top = torch.maximum(lse_a, lse_b).detach()
    top = torch.where(top == -INF, 0.0, top)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = a + b
    empty = total == 0
    some = torch.where(empty, 1.0, total)
    wa, wb = ((x / some).transpose(1, 2)[..., None] for x in (a, b))
    return (wa * out_a + wb * out_b).to(out_a.dtype), torch.where(empty, -INF, some.log() + top)


@merge(out_layout="bhsd", lse_layout="bhs1", dtypes=("float32", "bfloat16"), nan=True)
def by_logaddexp(out_a, lse_a, out_b, lse_b):
    """The lse first, the weights from it."""
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -INF, 0.0, lse)
    return (torch.exp(lse_a - shift) * out_a + torch.exp(lse_b - shift) * out_b).to(out_a.dtype), lse


@merge(out_layout="thd", lse_layout="ht", dtypes=("float32", "float16"), gradients=True)
def by_sigmoid(out_a, lse_a, out_b, lse_b):
    """out_a − w (out_a − out_b), guarded where either is empty, so that the gradient is finite too."""
    none_a, none_b = lse_a == -INF, lse_b == -INF
    difference = torch.where(none_a | none_b, 0.0, lse_b) - torch.where(none_a | none_b, 0.0, lse_a)
    share = torch.where(none_b, 0.0, torch.where(none_a, 1.0, torch.sigmoid(difference)))
    w = share.T[..., None]
    both = torch.where(none_a | none_b, 0.0, lse_a) - F.logsigmoid(-difference)
    lse = torch.where(none_b, lse_a, torch.where(none_a, lse_b, both))
    return (out_a - w * (out_a.float() - out_b.float())).to(out_a.dtype), lse


@merge(stacked=True, out_layout="thd", lse_layout="th", dtypes=("float32", "bfloat16"))
def by_softmax(out, lse):
    """All at once."""
    empty = (lse == -INF).all(0)
    safe = torch.where(empty, 0.0, lse)
    w = torch.where(empty, 0.0, torch.softmax(safe, 0))
    return (w[..., None] * out).sum(0).to(out.dtype), torch.where(empty, -INF, torch.logsumexp(safe, 0))


@merge(out_layout="bhsd", dtypes=("float32", "bfloat16"), in_place=True)
def in_place(out_a, lse_a, out_b, lse_b):
    """Into the first."""
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -INF, 0.0, lse)
    out_a.copy_(torch.exp(lse_a - shift)[..., None] * out_a + torch.exp(lse_b - shift)[..., None] * out_b)
    lse_a.copy_(lse)


@merge(base=2, empty=INF, out_layout="thd", lse_layout="ht", dtypes=("float32", "float16"), head_dims=(4, 8))
def in_base_2(out_a, lse_a, out_b, lse_b):
    """As in kernels that use exp2, with the mark that FlashAttention-2 has for a row without keys."""
    a, b = (torch.where(x == INF, -INF, x) for x in (lse_a, lse_b))
    top = torch.maximum(a, b)
    top = torch.where(top == -INF, 0.0, top)
    wa, wb = torch.exp2(a - top), torch.exp2(b - top)
    total = wa + wb
    some = torch.where(total == 0, 1.0, total)
    out = ((wa / some).T[..., None] * out_a + (wb / some).T[..., None] * out_b).to(out_a.dtype)
    return out, torch.where(total == 0, INF, some.log2() + top)


@merge(empty=-1e10, lse=False, out_dtype="float32", dtypes=("bfloat16",))
def out_alone(out_a, lse_a, out_b, lse_b):
    """A finite mark, no lse, a result in float32."""
    w = torch.sigmoid(lse_b - lse_a).transpose(1, 2)[..., None]
    return out_a.float() - w * (out_a.float() - out_b.float())


@merge(dtypes=("bfloat16",), accumulates="bfloat16", strided=False)
def in_sixteen_bits(out_a, lse_a, out_b, lse_b):
    """Weights and sums in bfloat16, and declared so."""
    lse = torch.logaddexp(lse_a, lse_b)
    shift = torch.where(lse == -INF, 0.0, lse)
    wa, wb = (torch.exp(x - shift).to(out_a.dtype).transpose(1, 2)[..., None] for x in (lse_a, lse_b))
    return wa * out_a + wb * out_b, lse


RIGHT = (by_maximum, by_logaddexp, by_sigmoid, by_softmax, in_place, in_base_2, out_alone, in_sixteen_bits)


# -- wrong ones --------------------------------------------------------------------------------------------------------


def broken(fault, **declared):
    """The merge of two, or of n, that has a fault."""
    claims = {"gradients": True, "nan": fault.id == "nan_hidden", **declared}

    if claims.get("stacked"):

        @merge(name=fault.id, **claims)
        def of_several(out, lse):
            return fault.function(out, lse, "e")

        return of_several

    @merge(name=fault.id, **claims)
    def of_two(out_a, lse_a, out_b, lse_b):
        out, lse = fault.function(torch.stack([out_a, out_b]), torch.stack([lse_a, lse_b]), claims.get("base", "e"))
        return out, lse

    return of_two


BROKEN = {id: broken(fault) for id, fault in FAULTS.items()}


def right(out_a, lse_a, out_b, lse_b):
    """The undecorated right one, for mutants to spoil."""
    return by_maximum.function(out_a, lse_a, out_b, lse_b)


@merge()
def changes_b(out_a, lse_a, out_b, lse_b):
    """Masks what it was given."""
    found = right(out_a, lse_a, out_b, lse_b)
    lse_b.clamp_(min=-1.0)
    return found


@merge(in_place=True, out_layout="bhsd")
def into_the_second(out_a, lse_a, out_b, lse_b):
    """In place, but in the wrong one."""
    in_place.function(out_b, lse_b, out_a, lse_a)
    return out_a, lse_a


@merge(in_place=True)
def not_in_place(out_a, lse_a, out_b, lse_b):
    """Declared in place, and returns new memory."""
    return right(out_a, lse_a, out_b, lse_b)


@merge()
def needs_contiguous(out_a, lse_a, out_b, lse_b):
    """Reads the memory of out_b as if it were contiguous."""
    flat = torch.as_strided(out_b, out_b.shape, torch.empty(out_b.shape).stride())
    return right(out_a, lse_a, flat, lse_b)


@merge(dtypes=("bfloat16",))
def in_float32(out_a, lse_a, out_b, lse_b):
    """Returns what it computed in."""
    out, lse = right(out_a, lse_a, out_b, lse_b)
    return out.float(), lse


@merge(dtypes=("float32", "bfloat16"))
def rounds_weights(out_a, lse_a, out_b, lse_b):
    """Weights and sums in the dtype of out, undeclared: in bfloat16 that costs digits."""
    return in_sixteen_bits.function(out_a, lse_a, out_b, lse_b)


@merge(lse_layout="bsh")
def transposed_lse(out_a, lse_a, out_b, lse_b):
    """Returns lse in another layout than it declares."""
    out, lse = right(out_a, lse_a.transpose(1, 2), out_b, lse_b.transpose(1, 2))
    return out, lse


@merge()
def out_only(out_a, lse_a, out_b, lse_b):
    """Declares that it returns lse."""
    return right(out_a, lse_a, out_b, lse_b)[0]


@merge()
def three_values(out_a, lse_a, out_b, lse_b):
    """One too many."""
    return (*right(out_a, lse_a, out_b, lse_b), None)


@merge(gradients=True)
def lse_detached(out_a, lse_a, out_b, lse_b):
    """Its lse has no gradient."""
    out, lse = right(out_a, lse_a, out_b, lse_b)
    return out, lse.detach()


@merge()
def raises(out_a, lse_a, out_b, lse_b):
    """Raises for a row that is empty in both."""
    if ((lse_a == -INF) & (lse_b == -INF)).any():
        raise ValueError("nothing to merge")
    return right(out_a, lse_a, out_b, lse_b)


@merge()
def ends_its_process(out_a, lse_a, out_b, lse_b):
    """Not to be called in a test's own process."""
    import os

    os._exit(3)


@merge()
def never_returns(out_a, lse_a, out_b, lse_b):
    """Waits for ever."""
    import time

    time.sleep(1000)


OTHERWISE = (
    changes_b,
    into_the_second,
    not_in_place,
    needs_contiguous,
    in_float32,
    rounds_weights,
    transposed_lse,
    out_only,
    three_values,
    lse_detached,
    raises,
)
"""Wrong in ways that are not those of numbers."""
