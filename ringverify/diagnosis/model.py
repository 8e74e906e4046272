"""Ring attention once more, in float64 and in steps that a suspicion replaces: what would come back if...?

With no step replaced it gives the oracle's answer; a test holds it to that. Per-head arrays are `(B, H, S, …)`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from ringverify.diagnosis.scene import Array, Counts, Part, Partial, Results, Scene, Visit, visits

Block = tuple[Array, Array]


def weighted_sum(weights: Array, values: Array, attended: Counts) -> Array:
    """`Σ_c weights[a, c] · values[c, e]` over attended pairs; weights are 0 elsewhere, but 0 · NaN is not."""
    if np.isfinite(values).all() and np.isfinite(weights).all():
        product: Array = weights @ values
        return product
    terms = weights[..., :, :, None] * values[..., None, :, :]
    total: Array = np.where((attended > 0)[..., None], terms, 0.0).sum(axis=-2)
    return total


def partial(at: Visit, s: Array, m: Counts, v: Array) -> Partial:
    """Attention over one block."""
    top = np.max(s, axis=-1, keepdims=True, where=m > 0, initial=-np.inf)
    shift = np.where(top == -np.inf, 0.0, top)
    w = np.where(m > 0, m * np.exp(s - shift), 0.0)
    total = w.sum(axis=-1, keepdims=True)
    out = weighted_sum(w, v, m) / np.where(total == 0, 1.0, total)
    return Partial(out, (shift + np.log(total))[..., 0])


def share(part: Array, whole: Array) -> Array:
    """`exp(part − whole)` as a factor on out; 0 of nothing."""
    return np.exp(part - np.where(whole == -np.inf, 0.0, whole))[..., None]


def merge(scene: Scene, first: Partial, second: Partial) -> Partial:
    """Attention over the keys of both."""
    lse = np.logaddexp(first.lse, second.lse)
    return Partial(share(first.lse, lse) * first.out + share(second.lse, lse) * second.out, lse)


def probabilities(at: Visit, s: Array, m: Counts, lse: Array) -> Array:
    """Weights of the whole row."""
    return np.where(m > 0, m * np.exp(s - lse[..., None]), 0.0)


def per_key_head(at: Visit, x: Array) -> Array:
    """`(B, H, T, D)` to `(B, K, T, D)`: the sum over the query heads that read a key head."""
    b, _, t, d = x.shape
    summed: Array = x.reshape(b, at.problem.hk, at.problem.group_size, t, d).sum(axis=2)
    return summed


def collect(scene: Scene, parts: dict[tuple[int, int], Part]) -> list[Part]:
    """The gradient of every rank's block: the sum of all ranks' parts in it."""
    found = []
    for owner in range(scene.size):
        of_block = [part for (_, whose), part in parts.items() if whose == owner]
        found.append(Part(sum_of([p.dk for p in of_block]), sum_of([p.dv for p in of_block])))
    return found


def sum_of(arrays: list[Array]) -> Array:
    """Of at least one array."""
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total


def sum_dq(scene: Scene, dq: list[Array]) -> list[Array]:
    """With replicated queries, dq is the sum over ranks."""
    return [sum_of(dq)] * scene.size if scene.replicated else dq


@dataclasses.dataclass(frozen=True, kw_only=True)
class Steps:
    """What the ring is made of."""

    # inputs
    q: Callable[[Scene, int], Array] = lambda scene, rank: scene.inputs.q[:, scene.shards[0][rank]]
    block: Callable[[Visit], Block] = lambda at: (at.scene.inputs.k[:, at.j], at.scene.inputs.v[:, at.j])
    dout: Callable[[Scene, int], Array] = lambda scene, rank: scene.inputs.dout[:, scene.shards[0][rank]]
    dlse: Callable[[Scene, int], Array] = lambda scene, rank: scene.inputs.dlse[:, :, scene.shards[0][rank]]
    widen: Callable[[Array], Array] = lambda x: x.swapaxes(1, 2)

    # scores
    products: Callable[[Visit, Array, Array], Array] = lambda at, q, k: q @ k.swapaxes(2, 3)
    pattern: Callable[[Visit], Counts] = lambda at: at.scene.patterns[at.rank, at.owner]
    scale: Callable[[Visit], float] = lambda at: at.problem.scale_value
    heads: Callable[[Visit], Counts] = lambda at: np.arange(at.problem.heads) // at.problem.group_size
    cap: Callable[[Array, float], Array] = lambda s, c: c * np.tanh(s / c)
    cap_slope: Callable[[Array, float], Array] = lambda s, c: 1 - (s / c) ** 2

    # forward
    partial: Callable[[Visit, Array, Counts, Array], Partial] = partial
    times: Callable[[Visit], int] = lambda at: 1
    arrived: Callable[[Scene, int, list[Partial]], list[Partial]] = lambda scene, rank, found: found
    merge: Callable[[Scene, Partial, Partial], Partial] = merge
    everyone: Callable[[Scene, int, list[Partial]], list[Partial]] = lambda scene, rank, found: found
    whole: Callable[[Scene, int, Partial], Partial] = lambda scene, rank, found: found
    returned: Callable[[Scene, int, Array, Array], tuple[Array, Array]] = lambda scene, rank, out, lse: (out, lse)

    # backward
    saved: Callable[[Scene, Array], Array] = lambda scene, lse: lse
    delta: Callable[[Array, Array, Array], Array] = lambda dout, out, dlse: (dout * out).sum(axis=-1) - dlse
    probabilities: Callable[[Visit, Array, Counts, Array], Array] = probabilities
    own: Callable[[Visit, Partial, Partial], Partial] = lambda at, whole, block: whole
    ds: Callable[[Array, Array, Array], Array] = lambda p, dp, delta: p * (dp - delta)
    factors: Callable[[Visit, float], tuple[float, float]] = lambda at, scale: (scale, scale)
    dv_weights: Callable[[Array], Array] = lambda p: p.swapaxes(2, 3)
    per_key_head: Callable[[Visit, Array], Array] = per_key_head
    dq_times: Callable[[Visit], float] = lambda at: 1
    part_times: Callable[[Visit], float] = lambda at: 1
    sum_dq: Callable[[Scene, list[Array]], list[Array]] = sum_dq
    collect: Callable[[Scene, dict[tuple[int, int], Part]], list[Part]] = collect
    home: Callable[[Scene, int, Results], Results] = lambda scene, rank, results: results


STEPS = Steps()
"""As it should be."""

ByRank = Callable[[int], Steps]


def forward(scene: Scene, steps_of: ByRank) -> list[Partial]:
    """What every rank has after its last merge, per head."""
    found = [_attended(scene, rank, steps_of(rank)) for rank in range(scene.size)]
    if not scene.replicated:
        return [_merged(scene, rank, steps_of(rank), found[rank]) for rank in range(scene.size)]
    mine = [of_rank[0] for of_rank in found]
    every = [steps_of(rank).everyone(scene, rank, mine) for rank in range(scene.size)]
    return [_merged(scene, rank, steps_of(rank), every[rank]) for rank in range(scene.size)]


def backward(scene: Scene, steps_of: ByRank, whole: list[Partial]) -> list[Results]:
    """dq, dk and dv of every rank, from what the forward has kept, canonical layout."""
    parts: dict[tuple[int, int], Part] = {}
    dq: list[Array] = []
    for rank in range(scene.size):
        mine, steps = Partial(whole[rank].out, steps_of(rank).saved(scene, whole[rank].lse)), steps_of(rank)
        dout, dlse = steps.widen(steps.dout(scene, rank)), steps.dlse(scene, rank)
        total = np.zeros_like(steps.widen(steps.q(scene, rank)))
        for at in visits(scene, rank):
            dq_part, part = _pulled_back(at, steps, mine, dout, dlse)
            total = total + steps.dq_times(at) * dq_part
            times = steps.part_times(at)
            parts[rank, at.owner] = Part(times * part.dk, times * part.dv)
        dq.append(total)
    first = steps_of(0)
    dq, blocks = first.sum_dq(scene, dq), first.collect(scene, parts)
    return [
        steps_of(rank).home(
            scene,
            rank,
            {"dq": dq[rank].swapaxes(1, 2), "dk": blocks[rank].dk.swapaxes(1, 2), "dv": blocks[rank].dv.swapaxes(1, 2)},
        )
        for rank in range(scene.size)
    ]


def returned(scene: Scene, steps_of: ByRank, whole: list[Partial]) -> list[Results]:
    """out and lse of every rank, canonical layout."""
    found: list[Results] = []
    for rank, (out, lse) in enumerate(whole):
        out, lse = steps_of(rank).returned(scene, rank, out.swapaxes(1, 2), lse)
        found.append({"out": out, "lse": lse})
    return found


def scored(at: Visit, steps: Steps) -> tuple[Array, Counts, Array, Array, Array]:
    """Scores after the cap, multiplicities, and q, k, v per query head."""
    q = steps.widen(steps.q(at.scene, at.rank))
    heads = steps.heads(at)
    k, v = (steps.widen(x)[:, heads] for x in steps.block(at))
    m = steps.pattern(at)
    raw = steps.products(at, q, k) * steps.scale(at)
    s = raw if at.problem.softcap is None else steps.cap(raw, at.problem.softcap)
    return s, m, q, k, v


def _attended(scene: Scene, rank: int, steps: Steps) -> list[Partial]:
    found: list[Partial] = []
    for at in visits(scene, rank):
        s, m, _, _, v = scored(at, steps)
        found += [steps.partial(at, s, m, v)] * steps.times(at)
    return found


def _merged(scene: Scene, rank: int, steps: Steps, found: list[Partial]) -> Partial:
    found = steps.arrived(scene, rank, found)
    if not found:
        p, count = scene.problem, len(scene.shards[0][rank])
        shape = (p.batch, p.heads, count)
        found = [Partial(np.zeros((*shape, p.dv)), np.full(shape, -np.inf))]
    running = found[0]
    for other in found[1:]:
        running = steps.merge(scene, running, other)
    return steps.whole(scene, rank, running)


def _pulled_back(at: Visit, steps: Steps, whole: Partial, dout: Array, dlse: Array) -> tuple[Array, Part]:
    s, m, q, k, v = scored(at, steps)
    if steps.own is not STEPS.own:
        whole = steps.own(at, whole, partial(at, s, m, v))
    delta = steps.delta(dout, whole.out, dlse)[..., None]
    p = steps.probabilities(at, s, m, whole.lse)
    dp = np.where(m > 0, dout @ v.swapaxes(2, 3), 0.0)
    ds = steps.ds(p, dp, delta)
    if at.problem.softcap is not None:
        ds = ds * steps.cap_slope(s, at.problem.softcap)
    ds = np.where(m > 0, ds, 0.0)
    of_q, of_k = steps.factors(at, steps.scale(at))
    turned = m.swapaxes(2, 3)
    dk = weighted_sum(ds.swapaxes(2, 3), q, turned) * of_k
    dv = weighted_sum(steps.dv_weights(p), dout, turned)
    return weighted_sum(ds, k, m) * of_q, Part(steps.per_key_head(at, dk), steps.per_key_head(at, dv))
