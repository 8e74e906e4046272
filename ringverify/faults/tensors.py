"""Faults of tensors as they are read and returned: strides, layouts, shapes, rows (C4, G, I, K in the reports)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import permuted, reread, scrambled
from ringverify.faults.fault import Faults
from ringverify.faults.merging import taken
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, forward, returning, whole

Tensor = torch.Tensor
FAULTS = Faults()


# -- inputs ------------------------------------------------------------------------------------------------------------


Read = Callable[[Here, Tensor], Tensor]
"""What is read in place of an input."""


def as_dense(here: Here, x: Tensor) -> Tensor:
    """What lies in memory from the tensor's first element on, as far as the memory goes, in the order of its axes."""
    swapped = here.layout == "bhsd" and x.ndim == 4
    x = (x.transpose(1, 2) if swapped else x).detach()
    dense = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
    read = memory[: dense.numel()]
    dense.view(-1)[: len(read)] = read
    dense.view(-1)[len(read) :] = 0
    return dense.transpose(1, 2) if swapped else dense


def from_start(here: Here, x: Tensor) -> Tensor:
    """Read with the right strides, but from the start of the storage."""
    return x.detach().as_strided(x.shape, x.stride(), 0) if x.numel() else x


def first_head(here: Here, x: Tensor) -> Tensor:
    """Read head 0 for every head, where the tensor is not dense."""
    b, s, h, _ = x.shape
    lies = b * s * h > 1 and x.is_contiguous()
    return x if lies or not x.numel() else x[:, :, :1].expand(x.shape)


def given(names: str, read: Read) -> Steps:
    """Read the inputs or cotangents of these names in another way."""
    chosen = set(names.split())

    def changed(here: Here, name: str, x: Tensor) -> Tensor:
        return read(here, x) if name in chosen else x

    steps = replace(STEPS, given=changed) if chosen & {"q", "k", "v"} else STEPS
    return replace(steps, cotangent=changed) if chosen & {"dout", "dlse"} else steps


FAULTS.add("I1a", "strides of q ignored: its elements are read as they lie in memory", given("q", as_dense))
FAULTS.add("D9b", "strides of k and v ignored: their elements are read as they lie in memory", given("k v", as_dense))
FAULTS.cause("strides of k ignored: its elements are read as they lie in memory", given("k", as_dense))
FAULTS.cause("strides of v ignored: its elements are read as they lie in memory", given("v", as_dense))
FAULTS.cause("strides of q, k and v ignored: elements are read as they lie in memory", given("q k v", as_dense))
FAULTS.add(
    "I1b",
    "storage offset taken for 0: q, k and v are read from the start of their memory",
    given("q k v", from_start),
    when="forward",
)
FAULTS.add(
    "I1c", "strides of the cotangent of out ignored: elements are read as they lie in memory", given("dout", as_dense)
)
FAULTS.add("I1d", "all heads of k and v read head 0, where their memory is not dense", given("k v", first_head))
FAULTS.add(
    "I1e", "strides of the cotangent of lse ignored: elements are read as they lie in memory", given("dlse", as_dense)
)
FAULTS.add(
    "C4a",
    "elements permuted: heads and tokens of the inputs are exchanged by a reshape",
    replace(STEPS, widen=lambda here, x: scrambled(x.to(here.wide))),
)


# -- what is returned --------------------------------------------------------------------------------------------------


def _lse(change: Callable[[Tensor], Tensor]) -> Steps:
    return whole(lambda here, found: found._replace(lse=change(found.lse)))


FAULTS.add("A8b", "lse is in base 2", _lse(lambda lse: lse / math.log(2)))
FAULTS.add(
    "G5a",
    "lse of a rank with one query is not written: it is 0",
    returning(lambda here, out, lse: (out, torch.zeros_like(lse) if lse.size(-1) == 1 else lse)),
)


def _one_row_saved(here: Here, saved: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    *others, lse = saved
    return (*others, torch.zeros_like(lse) if lse.size(-1) == 1 else lse)


FAULTS.add(
    "G5b", "the backward of a rank with one query has no lse: it counts as 0", replace(STEPS, kept=_one_row_saved)
)
FAULTS.add(
    "I2b",
    "lse is returned as (tokens, heads)",
    returning(lambda here, out, lse: (out, lse.transpose(1, 2).contiguous() if lse.size(1) == lse.size(2) else lse)),
)
FAULTS.cause("lse is 0 on rows without keys", _lse(taken(-math.inf, 0.0)))
FAULTS.cause("lse is +inf on rows without keys", _lse(taken(-math.inf, math.inf)))
FAULTS.cause("lse is -1e8 on rows without keys", _lse(taken(-math.inf, -1e8)))
FAULTS.cause("lse is NaN on rows without keys", _lse(taken(-math.inf, math.nan)))
FAULTS.cause("lse is not written: it is 0", _lse(torch.zeros_like))
for sign, larger in ((1, "larger"), (-1, "smaller")):
    for of, number in {"ranks": lambda here: here.size, "keys": lambda here: here.problem.nk}.items():
        FAULTS.cause(
            f"lse is {larger} by the logarithm of the number of {of}",
            whole(
                lambda here, found, sign=sign, number=number: found._replace(  # type: ignore[misc]
                    lse=found.lse + sign * math.log(max(1, number(here)))
                )
            ),
        )
FAULTS.cause("lse has the wrong sign", _lse(lambda lse: -lse))
for by, which in ((1, "before"), (-1, "after")):
    FAULTS.cause(f"lse of a head is that of the head {which}", _lse(lambda lse, by=by: lse.roll(by, dims=1)))  # type: ignore[misc]
    FAULTS.cause(
        f"out of a head is that of the head {which}",
        whole(lambda here, found, by=by: found._replace(out=found.out.roll(by, dims=1))),  # type: ignore[misc]
    )


def _by_tokens(first: Partial, second: Partial) -> Partial:
    whole = arithmetic.merge(first, second)
    if first.lse.size(1) != first.lse.size(2):
        return whole
    turned = arithmetic.merge(*(part._replace(lse=part.lse.transpose(1, 2)) for part in (first, second)))
    return Partial(turned.out, whole.lse)


FAULTS.add(
    "I2a",
    "the merge's weights are transposed: lse (tokens, heads) taken for (heads, tokens)",
    replace(STEPS, merge=_by_tokens),
)
FAULTS.add(
    "C4b",
    "dq's elements are permuted: heads and tokens are exchanged by a reshape",
    replace(STEPS, narrow=lambda here, x: scrambled(x.to(here.dtype))),
)
for change in (permuted, reread):
    FAULTS.cause("elements of lse permuted: heads and tokens are exchanged by a reshape", _lse(change))
    FAULTS.cause(
        "elements of the lse saved for the backward permuted: heads and tokens are exchanged by a reshape",
        replace(STEPS, kept=lambda here, saved, change=change: (*saved[:-1], change(saved[-1]))),  # type: ignore[misc]
    )
    for name, which in (("dlse", "lse"), ("dout", "out")):
        FAULTS.cause(
            f"elements of the cotangent of {which} permuted: heads and tokens are exchanged by a reshape",
            given(name, lambda here, x, change=change: change(x)),  # type: ignore[misc]
        )


def _dead_rank(here: Here, found: Partial) -> Partial:
    dead = found.lse.numel() and bool((found.lse == -torch.inf).all())
    return found._replace(out=found.out / 0.0) if dead else found


FAULTS.add("G2", "out is NaN on a rank on which no query attends a key", whole(_dead_rank))
FAULTS.add(
    "G3b",
    "out is NaN where there are no keys at all",
    whole(lambda here, found: found._replace(out=found.out / 0.0) if here.problem.nk == 0 else found),
)


def _nan_rows(here: Here, whole: Partial) -> Partial:
    return whole._replace(out=torch.where((whole.lse == -math.inf)[..., None], math.nan, whole.out))


def _nan_rows_and_lse(here: Here, whole: Partial) -> Partial:
    return Partial(_nan_rows(here, whole).out, taken(-math.inf, math.nan)(whole.lse))


FAULTS.cause("out is NaN on rows without keys: 0 / 0, or -inf - (-inf), is not guarded", whole(_nan_rows))
FAULTS.cause("out is NaN on rows without keys, and so is lse: -inf - (-inf) is not guarded", whole(_nan_rows_and_lse))
FAULTS.cause("out is 0", whole(lambda here, found: found._replace(out=torch.zeros_like(found.out))))
FAULTS.cause(
    "elements of out permuted: heads and tokens are exchanged by a reshape",
    returning(lambda here, out, lse: (permuted(out), lse)),
)
FAULTS.add(
    "K1c",
    "out has the heads of v where value_dim is not head_dim",
    returning(
        lambda here, out, lse: (out[:, :, : here.problem.hk] if here.problem.dv != here.problem.head_dim else out, lse)
    ),
    kind="failure",
)


def _not_written(here: Here, found: Partial) -> Partial:
    seen = (found.lse != -torch.inf)[..., None]
    return found._replace(out=torch.where(seen, found.out, torch.empty_like(found.out)))


FAULTS.add(
    "I3a", "out is not written on rows without keys: it is whatever was in memory", whole(_not_written), kind="state"
)


def _not_written_back(here: Here, x: Tensor) -> Tensor:
    written = STEPS.narrow(here, x)
    padded = (written == 0).all(dim=-1, keepdim=True)
    return torch.where(padded, torch.empty_like(written), written)


FAULTS.add(
    "I3b",
    "dq is not written on rows without keys: it is whatever was in memory",
    replace(STEPS, narrow=_not_written_back),
    kind="state",
)


# -- legal inputs that raise -------------------------------------------------------------------------------------------


def _needs_a_chunk(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    chunks = [shard for shard in here.shards if len(shard)]
    chunks[here.rank]  # as an index into what a split returned
    return forward(steps, here, q, k, v)


FAULTS.add(
    "G1",
    "a rank without tokens looks up a chunk that is not there",
    replace(STEPS, forward=_needs_a_chunk),
    kind="failure",
)
FAULTS.add(
    "G3a",
    "a block without keys raises: the maximum is taken over an empty axis",
    replace(STEPS, skip=lambda here, hop, owner, m: False),
    kind="failure",
)


def _refuse(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    if here.problem.nk % here.size:
        raise ValueError(f"length {here.problem.nk} is not divisible by {here.size}")
    return STEPS.forward(steps, here, q, k, v)


FAULTS.add(
    "C5b",
    "a length that the number of ranks does not divide is refused",
    replace(STEPS, forward=_refuse),
    kind="failure",
)


def _wants_contiguous(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    for x in (q, k, v):
        if not x.is_contiguous():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return STEPS.forward(steps, here, q, k, v)


FAULTS.add("R8", "inputs that are not contiguous raise", replace(STEPS, forward=_wants_contiguous), kind="failure")


def _sentinel(here: Here, q: Tensor, dim: int) -> object:
    torch.full_like(q.to(here.dtype), -1e10)
    return STEPS.nothing(here, q, dim)


FAULTS.add(
    "R2b",
    "the sentinel -1e10 is made in the input dtype, and float16 does not hold it",
    replace(STEPS, nothing=_sentinel),
    kind="failure",
)
