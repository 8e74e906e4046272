"""The plain ring: correct, slow, and made of named steps, so that a mutant is `replace(STEPS, merge=...)`.

Keys and values travel round the ring, partial results are merged by their log-sum-exps; in backward they travel once
more, and the gradients of a block travel with it until they are home. With replicated queries nothing travels: every
rank attends its own block, partials are gathered and merged in rank order, and dq is summed.

It claims everything that the semantics define, and the suite has to find it conformant: a mutant of it is then wrong
for one reason only.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from ringref.problem import DTYPES, Problem
from ringref.sharding import SHARDINGS
from ringverify.faults import arithmetic, pattern, wire
from ringverify.faults.arithmetic import narrow
from ringverify.faults.place import Block, Here, Partial, like
from ringverify.faults.wire import Posted
from ringverify.implementation import AttentionCall, Capabilities, Implementation

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Tensor = torch.Tensor
Positional = Callable[[Problem, Tensor, Tensor], Tensor]
Times = Callable[[Here, int, int], int]
"""How often a block counts, or what it adds to a gradient, by rank, hop and owner."""

# -- loops, made of the steps below ------------------------------------------------------------------------------------


def multiplicity(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    """Return how often each query of this rank attends each key of a block, `(B, H, S, T)` int64."""
    problem = here.problem
    i, j = steps.queries(here)[:, None], steps.keys(here, hop, owner)[None, :]
    m = torch.ones((problem.batch, problem.heads, len(i), j.size(1)), dtype=torch.int64, device=i.device)
    if problem.causal:
        m *= steps.causal(problem, i, j)
    if problem.window is not None:
        m *= steps.window(problem, i, j)
    if problem.documents is not None:
        m *= steps.documents(problem, i, j)
    if problem.key_lengths is not None:
        m *= steps.key_lengths(problem, j)
    if problem.dilation is not None:
        m *= steps.dilation(steps, problem, i, j)
    return m


def dilation(steps: Steps, problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    """Return how many branches let each query attend each key, `(H, S, T)`."""
    table = torch.tensor(steps.branches(problem), device=i.device).transpose(0, 1)[..., None, None]
    w, r, offset = table.unbind(dim=2)  # each (R, H, 1, 1)
    one_segment = steps.segment(i, w) == steps.segment(j, w)
    return (steps.covers(i, w, r, offset) & steps.covers(j, w, r, offset) & one_segment).sum(dim=0)


def capped_scores(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    """Return the scores of a block, softcap included."""
    s = steps.scores(q, k, steps.scale(here))
    return s if here.problem.softcap is None else steps.cap(s, here.problem.softcap)


def attend(steps: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Any:
    """Return attention of this rank's queries over the keys of one block."""
    k, v = (steps.per_query_head(here, steps.widen(here, x)) for x in block)
    m = steps.pattern(steps, here, hop, owner)
    if steps.skip(here, hop, owner, m):
        return steps.nothing(here, q, v.size(-1))
    return steps.partial(steps.capped(steps, here, q, k), m, v)


def gradients(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    """Return what a block adds to dq, and what this rank adds to the dk and dv of that block."""
    q, dout, delta, lse = rows
    k, v = (steps.per_query_head(here, steps.widen(here, x)) for x in block)
    m = steps.pattern(steps, here, hop, owner)
    if steps.skip(here, hop, owner, m):
        return torch.zeros_like(q), Block(*(x.new_zeros(x.shape, dtype=here.wide) for x in block))
    s = steps.capped(steps, here, q, k)
    p = steps.probabilities(s, m, lse)
    ds = steps.ds(p, steps.dp(dout, v), delta)
    if here.problem.softcap is not None:
        ds = ds * steps.cap_slope(s, here.problem.softcap)
    attended, scale = m > 0, steps.scale(here)
    ds = ds.masked_fill(~attended, 0.0)
    parts = steps.dk(ds, q, scale, attended), steps.dv(p, dout, attended)
    dk, dv = (steps.per_key_head(here, x).transpose(1, 2).contiguous() for x in parts)
    return steps.dq(ds, k, scale, attended), Block(dk, dv)


Visit = tuple[int, int, Block]
"""Hop, owner and KV block."""


def visit(steps: Steps, here: Here, block: Block) -> Iterator[Visit]:
    """Yield hop, owner and KV block, the own block first; the next one is in flight while the caller works."""
    arriving = arrivals(steps, here, block)
    return mixed(steps, here, list(arriving)) if "hop_of" in steps.changed else arriving


def mixed(steps: Steps, here: Here, every: list[Visit]) -> Iterator[Visit]:
    """Yield the blocks of all hops with keys or values of others, cut to the lengths of those that they replace."""
    here.notes["blocks"] = every
    for hop, owner, _ in every:
        k, v = (like(every[steps.hop_of(name, hop, here.size) % len(every)][2], here, owner) for name in "kv")
        yield hop, owner, Block(k.k, v.v)


def arrivals(steps: Steps, here: Here, block: Block) -> Iterator[Visit]:
    """Yield hop, owner and KV block as they arrive."""
    hops = 1 if here.replicated else steps.hops(here)
    for hop in range(hops):
        posted = None
        if hop + 1 < hops:
            posted = steps.move(steps, here, block, steps.owner(here, hop + 1))
        yield hop, steps.owner(here, hop), block
        if posted is not None:
            block = steps.arrive(posted)


def move(steps: Steps, here: Here, leaving: Block, expected: int) -> Posted:
    """Post one hop: send this block to the right, receive the block of rank `expected` from the left."""
    to, source = (steps.peer(here, rank) for rank in (steps.right(here), steps.left(here)))
    arriving = steps.buffers(here, leaving, expected)
    return steps.post(here, to, source, steps.group(here), leaving, arriving)


def travel(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Add to the dk and dv of a block and send them on with it; after the last hop they are at their owner."""
    total = part if carried is None else steps.add_part(hop, carried, part)
    if here.size == 1 or here.replicated:
        return total
    return steps.arrive_gradients(steps.move(steps, here, total, steps.owner(here, hop + 1)))


def together(steps: Steps, here: Here, partial: Partial, ranks: slice = slice(None)) -> Partial:
    """Merge the partials of all ranks in rank order (replicated queries), so that all ranks have the same bits."""
    if not here.replicated or here.size == 1:
        return partial
    outs, lses = (steps.gather(here, x.contiguous()) for x in partial)
    everyone = [Partial(out, lse) for out, lse in zip(outs[ranks], lses[ranks], strict=True)]
    merged = everyone[0]
    for other in everyone[1:]:
        merged = steps.merge(merged, other)
    return merged


def sum_queries(steps: Steps, here: Here, dq: Tensor) -> Tensor:
    """Sum dq over all ranks (replicated queries)."""
    return steps.add_up(here, dq) if here.replicated and here.size > 1 else dq


def forward(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    """Return attention of this rank's queries to all keys, in the wide dtype."""
    q, k, v = (steps.given(here, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    wide_q = steps.widen(here, q)
    running: Any = None
    for hop, owner, block in steps.order(here, steps.visit(steps, here, steps.outgoing(k, v))):
        new = steps.attend(steps, here, hop, owner, wide_q, block)
        running = steps.between(here, steps.accumulate(steps, here, hop, running, new))
    if running is None:
        running = steps.nothing(here, wide_q, v.size(-1))
    found = steps.together(steps, here, steps.normalise(running))
    return steps.sink(here, found) if here.problem.sinks else found


def backward(steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    """Return dq, dk and dv of this rank's shards."""
    q, k, v, out, lse = saved
    q, k, v = (steps.given(here, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    dout, dlse = (steps.cotangent(here, name, x) for name, x in (("dout", dout), ("dlse", dlse)))
    wide_q, wide_dout = steps.widen(here, q), steps.widen(here, dout)
    rows = wide_q, wide_dout, steps.delta(wide_dout, out, dlse.to(here.wide)), lse
    dq = torch.zeros_like(wide_q)
    carried: Block | None = None
    for hop, owner, block in steps.visit(steps, here, steps.outgoing(k, v)):
        dq_part, part = steps.gradients(steps, here, hop, owner, rows, block)
        of_dk, of_dv = steps.times_in_part(here, hop, owner)
        dq = steps.add_dq(here, hop, dq, steps.times_in_dq(here, hop, owner) * dq_part)
        part = Block(of_dk * part.k, of_dv * part.v)
        carried = steps.travel(steps, here, hop, owner, carried, part)
    assert carried is not None
    dq = steps.sum_queries(steps, here, dq)
    return steps.returned_gradients(here, steps.narrow(here, dq), *(x.to(here.dtype) for x in carried))


def sinks_backward(steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> Tensor | None:
    """Return the gradient of the sinks, summed over all ranks' queries; `None` where the problem has none."""
    if not here.problem.sinks:
        return None
    *_, out, lse = saved
    delta = steps.delta(steps.widen(here, dout), out, dlse.to(here.wide))
    part = steps.sink_gradient(here, lse, delta)
    return part if here.replicated or here.size == 1 else steps.sum_sinks(here, part)


# -- the steps ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """The steps that the plain ring is made of. A field that takes `steps` is a loop over other steps."""

    @functools.cached_property
    def changed(self) -> frozenset[str]:
        """Names of the steps that are not those of the right ring."""
        fields = dataclasses.fields(self)
        return frozenset(field.name for field in fields if getattr(self, field.name) is not field.default)

    # who is who
    owner: Callable[[Here, int], int] = wire.owner
    right: Callable[[Here], int] = wire.right
    left: Callable[[Here], int] = wire.left
    peer: Callable[[Here, int], int] = wire.peer
    group: Callable[[Here], ProcessGroup] = wire.group
    hops: Callable[[Here], int] = lambda here: here.size

    # who attends whom
    queries: Callable[[Here], Tensor] = lambda here: here.call.positions
    keys: Callable[[Here, int, int], Tensor] = lambda here, hop, owner: here.shards[owner]
    causal: Positional = pattern.causal
    window: Positional = pattern.window
    documents: Positional = pattern.documents
    key_lengths: Callable[[Problem, Tensor], Tensor] = pattern.key_lengths
    branches: Callable[[Problem], list[list[pattern.Branch]]] = pattern.branches
    covers: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] = pattern.covers
    segment: Callable[[Tensor, Tensor], Tensor] = pattern.segment
    dilation: Callable[[Steps, Problem, Tensor, Tensor], Tensor] = dilation
    pattern: Callable[[Steps, Here, int, int], Tensor] = multiplicity
    skip: Callable[[Here, int, int, Tensor], bool] = lambda here, hop, owner, m: not bool(m.any())

    # arithmetic, forward
    widen: Callable[[Here, Tensor], Tensor] = arithmetic.widen
    narrow: Callable[[Here, Tensor], Tensor] = arithmetic.narrow
    per_query_head: Callable[[Here, Tensor], Tensor] = arithmetic.per_query_head
    per_key_head: Callable[[Here, Tensor], Tensor] = arithmetic.per_key_head
    scale: Callable[[Here], float] = arithmetic.scale
    scores: Callable[[Tensor, Tensor, float], Tensor] = arithmetic.scores
    cap: Callable[[Tensor, float], Tensor] = arithmetic.cap
    capped: Callable[[Steps, Here, Tensor, Tensor], Tensor] = capped_scores
    nothing: Callable[[Here, Tensor, int], Any] = lambda here, q, dim: Partial(
        q.new_zeros((*q.shape[:3], dim)), q.new_full(q.shape[:3], -torch.inf)
    )
    partial: Callable[[Tensor, Tensor, Tensor], Any] = arithmetic.partial
    merge: Callable[[Any, Any], Any] = arithmetic.merge
    attend: Callable[[Steps, Here, int, int, Tensor, Block], Any] = attend
    accumulate: Callable[[Steps, Here, int, Any, Any], Any] = lambda steps, here, hop, running, new: (
        new if running is None else steps.merge(running, new)
    )
    sink: Callable[[Here, Partial], Partial] = arithmetic.with_sink
    between: Callable[[Here, Any], Any] = lambda here, running: running
    normalise: Callable[[Any], Partial] = lambda running: running

    # arithmetic, backward
    times_in_dq: Callable[[Here, int, int], float] = lambda here, hop, owner: 1
    times_in_part: Callable[[Here, int, int], tuple[float, float]] = lambda here, hop, owner: (1, 1)
    delta: Callable[[Tensor, Tensor, Tensor], Tensor] = arithmetic.delta
    probabilities: Callable[[Tensor, Tensor, Tensor], Tensor] = arithmetic.probabilities
    dp: Callable[[Tensor, Tensor], Tensor] = arithmetic.dp
    ds: Callable[[Tensor, Tensor, Tensor], Tensor] = arithmetic.ds
    cap_slope: Callable[[Tensor, float], Tensor] = arithmetic.cap_slope
    dq: Callable[[Tensor, Tensor, float, Tensor], Tensor] = arithmetic.dq
    dk: Callable[[Tensor, Tensor, float, Tensor], Tensor] = arithmetic.dk
    dv: Callable[[Tensor, Tensor, Tensor], Tensor] = arithmetic.dv
    sink_gradient: Callable[[Here, Tensor, Tensor], Tensor] = arithmetic.sink_gradient
    gradients: Callable[[Steps, Here, int, int, tuple[Tensor, ...], Block], tuple[Tensor, Block]] = gradients
    add_dq: Callable[[Here, int, Tensor, Tensor], Tensor] = lambda here, hop, total, part: total + part
    add_part: Callable[[int, Block, Block], Block] = lambda hop, carried, part: Block(
        carried.k + part.k, carried.v + part.v
    )

    # what travels
    outgoing: Callable[[Tensor, Tensor], Block] = wire.outgoing
    buffers: Callable[[Here, Block, int], Block] = wire.buffers
    post: Callable[[Here, int, int, ProcessGroup, Block, Block], Posted] = wire.post
    arrive: Callable[[Posted], Block] = wire.arrive
    arrive_gradients: Callable[[Posted], Block] = wire.arrive
    move: Callable[[Steps, Here, Block, int], Posted] = move
    hop_of: Callable[[str, int, int], int] = lambda name, hop, size: hop
    visit: Callable[[Steps, Here, Block], Iterator[Visit]] = visit
    order: Callable[[Here, Iterator[Visit]], Iterable[Visit]] = lambda here, every: every
    travel: Callable[[Steps, Here, int, int, Block | None, Block], Block] = travel
    gather: Callable[[Here, Tensor], list[Tensor]] = wire.gather_partials
    add_up: Callable[[Here, Tensor], Tensor] = wire.add_up
    together: Callable[[Steps, Here, Partial], Partial] = together
    sum_queries: Callable[[Steps, Here, Tensor], Tensor] = sum_queries
    sum_sinks: Callable[[Here, Tensor], Tensor] = wire.add_up

    # from end to end
    given: Callable[[Here, str, Tensor], Tensor] = lambda here, name, x: x
    cotangent: Callable[[Here, str, Tensor], Tensor] = lambda here, name, x: x
    wide: Callable[[torch.dtype], torch.dtype] = lambda dtype: torch.promote_types(dtype, torch.float32)
    forward: Callable[[Steps, Here, Tensor, Tensor, Tensor], Partial] = forward
    kept: Callable[[Here, tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda here, saved: saved
    returned: Callable[[Here, Partial], tuple[Tensor, Tensor]] = lambda here, whole: (
        narrow(here, whole.out), whole.lse
    )  # fmt: skip
    backward: Callable[[Steps, Here, tuple[Tensor, ...], Tensor, Tensor], tuple[Tensor, ...]] = backward
    returned_gradients: Callable[[Here, Tensor, Tensor, Tensor], tuple[Tensor, ...]] = lambda here, dq, dk, dv: (
        dq, dk, dv
    )  # fmt: skip
    sinks_backward: Callable[[Steps, Here, tuple[Tensor, ...], Tensor, Tensor], Tensor | None] = sinks_backward


STEPS = Steps()
"""The right ring: every step as it should be."""

FORWARD = frozenset({
    "nothing", "partial", "merge", "attend", "accumulate", "between", "normalise", "gather", "together", "forward",
    "returned", "kept", "order", "sink",
})  # fmt: skip
"""Steps that only the forward runs."""

BACKWARD = frozenset({
    "delta", "probabilities", "dp", "ds", "cap_slope", "dq", "dk", "dv", "gradients", "add_dq", "add_part", "travel",
    "arrive_gradients", "returned_gradients", "sum_queries", "add_up", "backward", "per_key_head", "narrow",
    "times_in_dq", "times_in_part", "cotangent", "sink_gradient", "sum_sinks", "sinks_backward",
})  # fmt: skip
"""Steps that only the backward runs."""


def returning(change: Callable[[Here, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Steps:
    """What is returned changed, `(B, S, H, E)` and `(B, H, S)`, in the forward alone."""
    return dataclasses.replace(STEPS, returned=lambda here, whole: change(here, *STEPS.returned(here, whole)))


def whole(change: Callable[[Here, Partial], Partial]) -> Steps:
    """What is returned changed before it is narrowed."""
    return dataclasses.replace(STEPS, returned=lambda here, found: STEPS.returned(here, change(here, found)))


class _RingOfSteps(torch.autograd.Function):
    """The autograd function whose forward and backward are made of steps."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, here: Here, steps: Steps, again: Steps
    ) -> tuple[Tensor, Tensor]:
        del sinks  # `here` has them; they are an input to have a gradient
        whole = steps.forward(steps, here, q, k, v)
        ctx.save_for_backward(*steps.kept(here, (q, k, v, whole.out, whole.lse)))
        ctx.here, ctx.steps = here, again
        out, lse = steps.returned(here, whole)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = ctx.steps.backward(ctx.steps, ctx.here, ctx.saved_tensors, dout, dlse)
        dsinks = ctx.steps.sinks_backward(ctx.steps, ctx.here, ctx.saved_tensors, dout, dlse)
        return dq, dk, dv, None if dsinks is None else dsinks.float(), None, None, None


def ring_of(
    steps: Steps, again: Steps | None = None
) -> Callable[[Tensor, Tensor, Tensor, AttentionCall], tuple[Tensor, Tensor]]:
    """Return the ring made of `steps` as a plug-in function; its backward is made of `again`, if given."""
    backwards = steps if again is None else again

    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        wanted = "".join(name for name, x in zip("qkv", (q, k, v), strict=True) if x.requires_grad)
        here = Here(call, q.dtype, steps.wide(q.dtype), wanted=wanted if torch.is_grad_enabled() else None)
        out, lse = _RingOfSteps.apply(q, k, v, call.sinks, here, steps, backwards)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
        return out, lse

    return attend


EVERYTHING = Capabilities(
    sharding=SHARDINGS,
    dtypes=DTYPES,
    lse=True,
    lse_gradient=True,
    gqa=True,
    value_dim=True,
    scale=True,
    negative_scale=True,
    window=True,
    documents=True,
    key_lengths=True,
    cross_lengths=True,
    softcap=True,
    dilation=("split", "shared"),
    uneven=True,
    empty_shards=True,
    subgroups=True,
    deterministic=True,
    poison_safe=True,
)
"""What the plain ring claims, and what its mutants claim: all that the semantics define."""

PLAIN = Implementation(ring_of(STEPS), "plain ring", EVERYTHING)
