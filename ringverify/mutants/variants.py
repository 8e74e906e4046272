"""Correct, and they look wrong: other directions, orders, stabilisers, tiles and transports. None may be rejected."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringref.sharding import SHARDINGS
from ringverify.implementation import AttentionCall, Capabilities, Implementation
from ringverify.mutants import arithmetic, gathered, wire
from ringverify.mutants.accumulation import tiles
from ringverify.mutants.operators_of_dtype import to_the_owner
from ringverify.mutants.place import Block, Here, Partial
from ringverify.mutants.plain import EVERYTHING, STEPS, Steps, attend, gradients, ring_of
from ringverify.mutants.reports import all_blocks
from ringverify.mutants.wire import Posted

Tensor = torch.Tensor


@dataclasses.dataclass(frozen=True)
class Variant:
    """A correct implementation that looks wrong.

    Attributes:
        id: a name.
        story: what is unusual about it, and why it is right.
        implementation: it.
    """

    id: str
    story: str
    implementation: Implementation


VARIANTS: dict[str, Variant] = {}
"""By id."""

DISPUTED: dict[str, Variant] = {}
"""As accurate as what is in wide use, and less accurate than the error allowed assumes: not held to it."""


def _put(
    id: str,
    story: str,
    ring: Steps | Callable[..., Any],
    claims: Capabilities = EVERYTHING,
    among: dict[str, Variant] = VARIANTS,
) -> Implementation:
    function = ring_of(ring) if isinstance(ring, Steps) else ring
    implementation = Implementation(function, f"variant:{id}", claims)
    among[id] = Variant(id, story, implementation)
    return implementation


# -- direction and order -----------------------------------------------------------------------------------------------

reversed_ring = _put(
    "reversed_ring",
    "Blocks travel to the left; whose they are is counted the other way too.",
    replace(
        STEPS,
        owner=lambda here, hop: (here.rank + hop) % here.size,
        right=lambda here: (here.rank - 1) % here.size,
        left=lambda here: (here.rank + 1) % here.size,
    ),
)


def _scattered(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Parts are kept until all are there, and added by one reduce-scatter."""
    parts = here.notes.setdefault("parts", {})
    parts[owner] = part
    if here.size == 1 or here.replicated or hop + 1 < here.size:
        return part
    sizes = [sum(x.numel() for x in parts[rank]) for rank in range(here.size)]
    flat = [torch.cat([x.reshape(-1) for x in parts[rank]]) for rank in range(here.size)]
    own = parts[here.rank]
    here.notes.pop("parts")
    if not max(sizes):
        return Block(*own)
    total = own.k.new_empty(max(sizes))
    dist.reduce_scatter(total, [F.pad(x, (0, max(sizes) - x.numel())) for x in flat], group=here.group)
    count = own.k.numel()
    return Block(total[:count].view_as(own.k), total[count : count + own.v.numel()].view_as(own.v))


allgather = _put(
    "allgather",
    "All blocks by one all-gather, their gradients home by one reduce-scatter: no neighbours at all.",
    replace(STEPS, visit=all_blocks, travel=_scattered),
)
new_first = _put(
    "new_first",
    "Partials are merged in the opposite order: newest on the left.",
    replace(
        STEPS,
        accumulate=lambda steps, here, hop, running, new: new if running is None else steps.merge(new, running),
        add_part=lambda hop, carried, part: Block(part.k + carried.k, part.v + carried.v),
    ),
)


def _pairwise(steps: Steps, here: Here, hop: int, running: object, new: Partial) -> object:
    partials = [*here.notes.pop("partials", []), new]
    if hop + 1 < (1 if here.replicated else here.size):
        here.notes["partials"] = partials
        return new
    while len(partials) > 1:
        merged = [steps.merge(a, b) for a, b in zip(partials[::2], partials[1::2], strict=False)]
        partials = merged + partials[len(merged) * 2 :]
    return partials[0]


tree_merge = _put(
    "tree_merge",
    "Partials are kept and merged two by two, so that rounding grows with the logarithm of the world.",
    replace(STEPS, accumulate=_pairwise),
)


def _flipped(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    turned = replace(steps, pattern=lambda *_: steps.pattern(steps, here, hop, owner).flip(-1))
    return attend(turned, here, hop, owner, q, Block(*(x.flip(1) for x in block)))


keys_flipped = _put(
    "keys_flipped", "Every block is summed from its last key to its first.", replace(STEPS, attend=_flipped)
)


def _tiled(size: int) -> Steps:
    def attend_tiles(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
        if not block.k.size(1) or not q.numel():
            return attend(steps, here, hop, owner, q, block)
        found = tiles(steps, here, hop, owner, q, block, tile=size)
        running = found[0]
        for other in found[1:]:
            running = steps.merge(running, other)
        return running

    return replace(STEPS, attend=attend_tiles)


tiles_of_three = _put("tiles_of_three", "Blocks in tiles of three keys, merged like blocks.", _tiled(3))
direct_gradients = _put(
    "direct_gradients",
    "A part of dk and dv goes straight to the owner of its block instead of travelling with it.",
    replace(
        STEPS,
        travel=lambda steps, here, hop, owner, carried, part: (
            part if here.replicated else to_the_owner(steps, here, hop, owner, carried, part)
        ),
    ),
)

# -- forms of softmax --------------------------------------------------------------------------------------------------


class Sums(NamedTuple):
    """Not normalised: a shift `(B, H, S, 1)`, and sums of `exp(s − shift)`, plain and weighted with values."""

    shift: Tensor
    total: Tensor
    acc: Tensor


def _finite(shift: Tensor) -> Tensor:
    return torch.where(shift == -math.inf, 0.0, shift)


def _sums(s: Tensor, m: Tensor, v: Tensor, at_least: Tensor | None = None) -> Sums:
    attended = m > 0
    s = s.masked_fill(~attended, -math.inf)
    shift = s.amax(dim=-1, keepdim=True)
    if at_least is not None:
        shift = torch.maximum(shift, at_least)
    w = m * torch.exp(s - _finite(shift))
    return Sums(shift, w.sum(dim=-1, keepdim=True), arithmetic.weighted_sum(w, v, attended))


def _merge_sums(a: Sums, b: Sums) -> Sums:
    shift = torch.maximum(a.shift, b.shift)
    of_a, of_b = (torch.exp(part.shift - _finite(shift)) for part in (a, b))
    return Sums(shift, a.total * of_a + b.total * of_b, a.acc * of_a + b.acc * of_b)


def _no_sums(here: Here, q: Tensor, dim: int) -> Sums:
    shape = q.shape[:3]
    return Sums(q.new_full((*shape, 1), -math.inf), q.new_zeros((*shape, 1)), q.new_zeros((*shape, dim)))


def _divided(whole: Sums) -> Partial:
    out = whole.acc / torch.where(whole.total == 0, 1.0, whole.total)
    return Partial(out, (_finite(whole.shift) + whole.total.log())[..., 0])


RUNNING = replace(
    STEPS,
    partial=_sums,
    merge=_merge_sums,
    nothing=_no_sums,
    normalise=_divided,
    together=lambda steps, here, whole: STEPS.together(STEPS, here, whole),
)
running_max = _put(
    "running_max", "A running maximum, a sum and an accumulator that is divided once, at the end.", RUNNING
)


def _known_lse(steps: Steps, here: Here, hop: int, running: Sums | None, new: Sums) -> Sums:
    whole = new if running is None else _merge_sums(running, new)
    here.notes["lse"] = _finite(whole.shift) + whole.total.log()
    return whole


def _at_least_lse(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    known = here.notes.get("lse") if hop else None
    return attend(replace(steps, partial=lambda s, m, v: _sums(s, m, v, known)), here, hop, owner, q, block)


lse_stabiliser = _put(
    "lse_stabiliser",
    "Scores are shifted by max(m, lse so far) instead of max(m, m so far): larger than need be, and as good "
    "(lucidrains/ring-attention-pytorch 373f75b).",
    replace(RUNNING, accumulate=_known_lse, attend=_at_least_lse),
)


def _two_sigmoids(a: Partial, b: Partial) -> Partial:
    gap = torch.where(a.lse == b.lse, 0.0, a.lse - b.lse)  # −inf − (−inf) is NaN
    top = torch.maximum(a.lse, b.lse)
    lse = top + torch.log1p(torch.exp(-gap.abs()))
    out = torch.sigmoid(gap)[..., None] * a.out + torch.sigmoid(-gap)[..., None] * b.out
    return Partial(out, torch.where(top == -math.inf, -math.inf, lse))


sigmoid_merge = _put(
    "sigmoid_merge",
    "Weights of the merge are sigmoids of the difference, guarded.",
    replace(STEPS, merge=_two_sigmoids),
)


def _subtracted(a: Partial, b: Partial) -> Partial:
    whole = _two_sigmoids(a, b)
    share = torch.sigmoid(torch.where(a.lse == b.lse, 0.0, b.lse - a.lse))[..., None]
    return whole._replace(out=a.out - share * (a.out - b.out))


def _plain_log(a: Partial, b: Partial) -> Partial:
    whole = _two_sigmoids(a, b)
    top = _finite(torch.maximum(a.lse, b.lse))
    return whole._replace(lse=top + torch.log(torch.exp(a.lse - top) + torch.exp(b.lse - top)))


plain_log = _put(
    "plain_log",
    "log(1 + x) for log1p(x): loses digits of a sum that is close to 1, where they do not matter (TE#1546).",
    replace(STEPS, merge=_plain_log),
)


subtracted_sigmoid = _put(
    "subtracted_sigmoid",
    "o − σ(bl − l) · (o − bo), the merge of zhuzilin/ring-flash-attention, guarded: where the weight of o is tiny it "
    "leaves a rounding error of u · |o|, more than the error that a sum of weighted terms has.",
    replace(STEPS, merge=_subtracted),
    among=DISPUTED,
)


def _base2(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    attended = m > 0
    s = (s / math.log(2)).masked_fill(~attended, -math.inf)
    top = _finite(s.amax(dim=-1, keepdim=True))
    w = m * torch.exp2(s - top)
    total = w.sum(dim=-1, keepdim=True)
    out = arithmetic.weighted_sum(w, v, attended) / torch.where(total == 0, 1.0, total)
    return Partial(out, ((top + total.log2()) * math.log(2)).squeeze(-1))


base_two = _put("base_two", "exp2 and log2 within a block, as kernels do.", replace(STEPS, partial=_base2))


def _repaired(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    attended = m > 0
    s = torch.where(attended, s, torch.finfo(s.dtype).min)
    w = torch.where(attended, m, 1) * torch.exp(s - s.amax(dim=-1, keepdim=True))
    total = w.sum(dim=-1, keepdim=True)
    seen = attended.any(dim=-1, keepdim=True)
    out = arithmetic.weighted_sum(torch.where(attended, w / total, 0.0), v, attended)
    lse = s.amax(dim=-1, keepdim=True) + total.log()
    return Partial(torch.where(seen, out, 0.0), torch.where(seen, lse, -math.inf)[..., 0])


repaired_sentinel = _put(
    "repaired_sentinel",
    "The mask fills in the smallest finite number; rows of nothing else are repaired afterwards.",
    replace(STEPS, partial=_repaired),
)

# -- scales and dtypes -------------------------------------------------------------------------------------------------


def _scaled_first(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    return STEPS.capped(replace(steps, scale=lambda here: 1.0), here, q * steps.scale(here), k)


scaled_queries = _put(
    "scaled_queries", "The scale is on q before it meets the keys.", replace(STEPS, capped=_scaled_first)
)


def _scaled_both(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    scale = steps.scale(here)
    root = math.sqrt(abs(scale))
    return STEPS.capped(replace(steps, scale=lambda here: 1.0), here, q * root, k * math.copysign(root, scale))


scaled_both = _put("scaled_both", "Its root on q and on k.", replace(STEPS, capped=_scaled_both))
wide_sums = _put(
    "wide_sums",
    "Everything in float64, for every input dtype; lse comes back in float32.",
    replace(
        STEPS,
        wide=lambda dtype: torch.float64,
        returned=lambda here, whole: (
            arithmetic.narrow(here, whole.out),
            whole.lse.to(torch.promote_types(here.dtype, torch.float32)),
        ),
    ),
    dataclasses.replace(EVERYTHING, accumulates="float64"),
)
wide_lse = _put(
    "wide_lse",
    "Everything in float64, lse too as it is returned, though float32 sums are all that is claimed.",
    replace(STEPS, wide=lambda dtype: torch.float64),
)


def _rounded(here: Here, x: Tensor) -> Tensor:
    return x.to(here.dtype).to(here.wide)


def _rounded_attend(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> object:
    """Weights relative to the block's maximum are rounded before they meet the values; their sum is not."""

    def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
        sums = _sums(s, m, v)
        w = m * torch.exp(s.masked_fill(m == 0, -math.inf) - _finite(sums.shift))
        return _divided(sums._replace(acc=arithmetic.weighted_sum(_rounded(here, w), v, m > 0)))

    return attend(replace(steps, partial=partial), here, hop, owner, q, block)


def _rounded_gradients(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    rounding = replace(
        steps,
        ds=lambda p, dp, delta: _rounded(here, arithmetic.ds(p, dp, delta)),
        dv=lambda p, dout, attended: arithmetic.dv(_rounded(here, p), dout, attended),
    )
    return gradients(rounding, here, hop, owner, rows, block)


rounded_probabilities = _put(
    "rounded_probabilities",
    "P and ds are rounded to the input dtype before they are multiplied, as flash kernels do, and it is declared.",
    replace(STEPS, attend=_rounded_attend, gradients=_rounded_gradients),
    dataclasses.replace(EVERYTHING, probabilities="input"),
)
delta_of_rounded_out = _put(
    "delta_of_rounded_out",
    "The backward starts from out as it was returned, rounded.",
    replace(STEPS, kept=lambda here, saved: (*saved[:3], _rounded(here, saved[3]), saved[4])),
)
wide_wire = _put(
    "wide_wire",
    "Keys and values travel in float32: twice the bytes, the same numbers.",
    replace(
        STEPS,
        outgoing=lambda k, v: Block(*(x.to(torch.promote_types(x.dtype, torch.float32)) for x in wire.outgoing(k, v))),
    ),
)

# -- transport and layout ----------------------------------------------------------------------------------------------


def _in_turns(here: Here, to: int, source: int, group: Any, leaving: Block, arriving: Block) -> Posted:
    """Even ranks send first, odd ones receive first; in an odd ring the last and the first still take turns."""

    def send() -> None:
        for x in leaving:
            if x.numel():
                dist.send(x, to, group=group)

    def receive() -> None:
        for x in arriving:
            if x.numel():
                dist.recv(x, source, group=group)

    for turn in (send, receive) if here.rank % 2 == 0 else (receive, send):
        turn()
    return Posted([], arriving)


blocking = _put("blocking", "Blocking send and recv in an order that cannot deadlock.", replace(STEPS, post=_in_turns))


def _one_message(here: Here, to: int, source: int, group: Any, leaving: Block, arriving: Block) -> Posted:
    flat = torch.cat([x.reshape(-1) for x in leaving])
    room = flat.new_empty(sum(x.numel() for x in arriving))
    messages = [dist.P2POp(dist.isend, flat, to, group)] if flat.numel() else []
    messages += [dist.P2POp(dist.irecv, room, source, group)] if room.numel() else []
    works = dist.batch_isend_irecv(messages) if messages else []
    k, v = torch.split(room, [x.numel() for x in arriving])
    return Posted(works, Block(k.view_as(arriving.k), v.view_as(arriving.v)))


one_message = _put(
    "one_message", "Keys and values packed in one message, and unpacked as views.", replace(STEPS, post=_one_message)
)


def _padded_keys(steps: Steps, here: Here) -> Steps:
    def padded(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = STEPS.pattern(steps, here, hop, owner)
        return F.pad(m, (0, _longest(here) - m.size(-1)))

    return replace(steps, pattern=padded, pattern_again=padded)


def _longest(here: Here) -> int:
    return max(len(shard) for shard in here.shards) + 1


def _pad(here: Here, block: Block) -> Block:
    return Block(*(F.pad(x, (0, 0, 0, 0, 0, _longest(here) - x.size(1))) for x in block))


def _padded_gradients(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    dq, part = gradients(_padded_keys(steps, here), here, hop, owner, rows, _pad(here, block))
    return dq, Block(*(x[:, : block.k.size(1)].contiguous() for x in part))


overestimated = _put(
    "overestimated",
    "Every block is padded past the longest one, the padding masked: a length that is an over-estimate "
    "(zhuzilin/ring-flash-attention#78).",
    replace(
        STEPS,
        attend=lambda steps, here, hop, owner, q, block: attend(
            _padded_keys(steps, here), here, hop, owner, q, _pad(here, block)
        ),
        gradients=_padded_gradients,
    ),
)


def _by_head_first(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    out, lse = ring_of(STEPS)(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), call)
    return out.transpose(1, 2), lse


heads_first = _put(
    "heads_first",
    "Tensors are (batch, heads, sequence, dim), and come back as views.",
    _by_head_first,
    dataclasses.replace(EVERYTHING, tensor_layout="bhsd"),
)
differentiable_gather = _put(
    "differentiable_gather",
    "No backward of its own: autograd through an all-gather whose adjoint is written.",
    gathered.by_allgather,
)
ulysses = _put(
    "ulysses",
    "Sequence to heads and back by all-to-all, uneven where heads do not divide; autograd does the rest.",
    gathered.by_heads,
    dataclasses.replace(EVERYTHING, sharding=tuple(s for s in SHARDINGS if s != "replicated_query")),
)
