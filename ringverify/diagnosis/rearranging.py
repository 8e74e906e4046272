"""Hypotheses of collectives that are read in the wrong order: the right attention of rearranged inputs.

An all-to-all or an all-gather brings one piece from every rank. If it is read with its axes in another order, batch
elements or heads are mixed, and the oracle of the mixed inputs says what comes out.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ringref.attention import Answer, attention
from ringref.rounding import Allowed, allowed_error
from ringverify.diagnosis.hypothesis import Hypothesis, agree_but_for, agree_with
from ringverify.diagnosis.pairs import Ints, Mask, pairs_of
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults.ring import STEPS

Rearranged = Callable[[Scene, Array, int], Array]
"""A tensor of all ranks `(B, N, H, D)` in another order, by case and whether it is of queries (0) or keys (1)."""


def _batch_for_rank(scene: Scene, x: Array, of_keys: int) -> Array:
    """Read what comes shard by shard, `(B, n)` of each rank, as `(B, N)`."""
    shards = scene.shards[of_keys]
    if sum(map(len, shards)) != x.shape[1]:
        return x
    found = np.empty_like(x)
    found[:, np.concatenate(shards)] = np.concatenate(
        [x[:, rows].reshape(-1, *x.shape[2:]) for rows in shards]
    ).reshape(x.shape)
    return found


def _heads_by_turns(of: Callable[[Scene], int], scene: Scene, x: Array, of_keys: int) -> Array:
    """Read heads `(n, H / n)` as `(H / n, n)`, for a number n; they are padded with zeros so that it divides them."""
    heads, n = x.shape[2], of(scene)
    each = -(-heads // n)
    return _padded(x, n * each)[:, :, np.arange(n * each).reshape(n, -1).T.ravel()[:heads]]


def _turns_of_heads(of: Callable[[Scene], int], scene: Scene, x: Array, of_keys: int) -> Array:
    """Read heads `(H / n, n)` as `(n, H / n)`, for a number n; they are padded with zeros so that it divides them."""
    heads, n = x.shape[2], of(scene)
    each = -(-heads // n)
    return _padded(x, n * each)[:, :, np.arange(n * each).reshape(-1, n).T.ravel()[:heads]]


def _shifted_heads(up: bool, scene: Scene, x: Array, of_keys: int) -> Array:
    """Read heads so many places on, or back, as it takes for the ranks to divide their number; the others are of 0."""
    fill = -x.shape[2] % scene.size
    more = np.zeros((*x.shape[:2], fill, x.shape[3]))
    return (
        np.concatenate([more, x], axis=2)[:, :, : x.shape[2]] if up else np.concatenate([x, more], axis=2)[:, :, fill:]
    )


def _padded(x: Array, heads: int) -> Array:
    return np.pad(x, ((0, 0), (0, 0), (0, heads - x.shape[2]), (0, 0)))


def _ranks(scene: Scene) -> int:
    return scene.size


def _divisor(scene: Scene) -> int:
    return math.gcd(scene.size, scene.problem.hk)


def _order(scene: Scene, x: Array, of_keys: int) -> Ints:
    """The positions of rows in the order in which the shards of all ranks come."""
    found = np.concatenate(scene.shards[of_keys])
    return found if len(found) == x.shape[1] else np.arange(x.shape[1])


def _times(number: int, *, back: bool) -> Rearranged:
    """Permute rows so many times by the order of shards, or back."""

    def change(scene: Scene, x: Array, of_keys: int) -> Array:
        order = _order(scene, x, of_keys)
        for _ in range(number):
            x = x[:, np.argsort(order) if back else order]
        return x

    return change


Order = Callable[[int], Ints]
"""Places in which so many things are read."""


def _within_shards(order: Order, scene: Scene, x: Array, of_keys: int) -> Array:
    """Read the rows of every shard in another order."""
    found = x.copy()
    for held in scene.shards[of_keys]:
        found[:, held] = x[:, held[order(len(held))]]
    return found


def _between_ranks(order: Order, scene: Scene, x: Array, of_keys: int) -> Array:
    """Read the shards of other ranks, where all are of one length."""
    shards = scene.shards[of_keys]
    if len({len(held) for held in shards}) > 1:
        return x
    found = np.empty_like(x)
    for held, rank in zip(shards, order(len(shards)), strict=True):
        found[:, held] = x[:, shards[rank]]
    return found


def _from_equal_shards(scene: Scene, x: Array, of_keys: int) -> Array:
    """Read a shard from the row `rank · its own length` on, as if all before it were as long."""
    found, joined = np.zeros_like(x), _order(scene, x, of_keys)
    for rank, held in enumerate(scene.shards[of_keys]):
        rows = rank * len(held) + np.arange(len(held))
        found[:, held] = np.where(
            (rows < len(joined))[:, None, None], x[:, joined[np.minimum(rows, len(joined) - 1)]], 0.0
        )
    return found


def _along(axis: int, order: Order, scene: Scene, x: Array, of_keys: int) -> Array:
    """Read batch elements (0) or heads (2) in another order."""
    return x.take(order(x.shape[axis]), axis)


def _halves_swapped(n: int) -> Ints:
    return np.roll(np.arange(n), -(-n // 2))


def _interleaved(n: int) -> Ints:
    """Even places first, then odd ones."""
    return np.concatenate([np.arange(0, n, 2), np.arange(1, n, 2)])


ORDERS: dict[str, Order] = {
    "backwards": lambda n: np.arange(n)[::-1],
    "one place on": lambda n: np.roll(np.arange(n), 1),
    "one place back": lambda n: np.roll(np.arange(n), -1),
}
IN_SHARDS: dict[str, Order] = ORDERS | {
    "with their halves swapped": _halves_swapped,
    "even ones first, then odd ones": _interleaved,
    "in halves by turns": lambda n: np.argsort(_interleaved(n)),
}
ROWS: dict[str, Rearranged] = {
    **{f"the rows of each shard, {how}": functools.partial(_within_shards, of) for how, of in IN_SHARDS.items()},
    "each shard from row rank · its own length on, as if all were as long": _from_equal_shards,
}


WHOLE: dict[str, Rearranged] = {
    **{f"whole shards, {how}": functools.partial(_between_ranks, of) for how, of in ORDERS.items()},
    **{f"heads, {how}": functools.partial(_along, 2, of) for how, of in ORDERS.items()},
    **{f"batch elements, {how}": functools.partial(_along, 0, of) for how, of in ORDERS.items()},
}
"""Which rows, shards, heads or batch elements stand where others should; rows of results are moved in `adding`."""


def _judge_returned(
    change: Rearranged, names: tuple[TensorName, ...], copies_of: Callable[[Scene], int] = lambda scene: 1
) -> Callable[[Scene], float | None]:
    """Return the judge of right results of which some come back in another order.

    Args:
        change: the order.
        names: the results.
        copies_of: how many copies of each key head come back, whose gradients are then summed.
    """

    def judge(scene: Scene) -> float | None:
        if scene.replicated or not set(names) < set(scene.tensors):  # all of them together are results
            return None if wrong_tensors(scene) else 0.0

        def moved(name: TensorName, x: Array) -> Array:
            if name == "lse":
                return change(scene, x.swapaxes(1, 2)[..., None], 0)[..., 0].swapaxes(1, 2)
            found = change(scene, x, int(name in ("dk", "dv")))
            copies = x.shape[2] // scene.problem.hk if name in ("dk", "dv") else 1
            summed: Array = found.reshape(*x.shape[:2], -1, copies, x.shape[3]).sum(axis=3)
            return summed

        truth, allowed = _with_copies(scene, copies_of(scene))
        whole = {name: moved(name, getattr(truth, name)) for name in names}
        return agree_but_for(
            scene,
            whole,
            lambda: dataclasses.replace(scene.allowed, **{name: moved(name, getattr(allowed, name)) for name in names}),
        )

    return judge


COPIES: dict[str, Callable[[Scene], int]] = {
    "copies that the ranks divide": lambda scene: scene.size // _divisor(scene),
    "a copy for each query head, where the ranks do not divide them": lambda scene: (
        scene.problem.group_size if scene.problem.hk % scene.size else 1
    ),
}
"""How many copies a key head may have, in words."""


def _with_copies(scene: Scene, copies: int) -> tuple[Answer, Allowed]:
    """Return the right answer, and what is allowed, if each key head has so many copies.

    Query heads belong to the copies in turn, as many to each.
    """
    p, x = scene.problem, scene.inputs
    if copies == 1 or p.group_size % copies:
        return scene.truth, scene.allowed
    single, k, v = p.replace(key_heads=p.hk * copies), x.k.repeat(copies, axis=2), x.v.repeat(copies, axis=2)
    answer = attention(single, x.q, k, v, x.dout, x.dlse, x.sinks)
    return answer, allowed_error(single, answer, x.q, k, v, x.dout, x.dlse, scene.pipeline)


def _judge(change: Rearranged, names: str, *, of_ranks: bool = True) -> Callable[[Scene], float | None]:
    """Return the judge of tensors in another order, which may be one of what the ranks have.

    Keys and values that are padding may be attended then: as they are, or as 0 if they are cleared before.
    """

    def agreeing(scene: Scene, padding: Mask | bool) -> float | None:
        """Return the residual where what `padding` says, `(B, Nk, 1, 1)`, is cleared."""

        def back(of_keys: int, x: Array) -> Array:
            """Put back what is rearranged: so do gradients."""
            found = np.zeros(x.shape)
            places = change(scene, np.arange(1.0, x.size + 1).reshape(x.shape), of_keys).astype(int) - 1
            found.ravel()[places[places >= 0]] = x[places >= 0]
            return found

        def of_lse(change: Callable[[Array], Array], lse: Array) -> Array:
            return change(lse.swapaxes(1, 2)[..., None])[..., 0].swapaxes(1, 2)

        x = scene.inputs
        x = dataclasses.replace(x, k=np.where(padding, 0.0, x.k), v=np.where(padding, 0.0, x.v))
        mixed = {name: change(scene, getattr(x, name), name != "q") for name in "qkv" if name in names}
        if "o" in names:
            mixed["dout"] = back(0, x.dout)
        if "o" in names or "l" in names:
            mixed["dlse"] = of_lse(functools.partial(back, 0), x.dlse)
        y = dataclasses.replace(x, **mixed)
        answer = attention(scene.problem, y.q, y.k, y.v, y.dout, y.dlse, y.sinks)
        results: dict[str, Any] = {
            f"d{name}": back(name != "q", getattr(answer, f"d{name}")) for name in "qkv" if name in names
        }
        if "o" in names:
            results["out"] = change(scene, answer.out, 0)
        if "o" in names or "l" in names:
            there = of_lse(lambda x: change(scene, x, 0), np.ones_like(answer.lse)) > 0
            count = answer.intermediates.m.sum(axis=-1)  # of keys, in a head that pads others, all scores are 0
            of_zeros = np.log(np.where(count > 0, count, 1))
            results["lse"] = np.where(there, of_lse(lambda x: change(scene, x, 0), answer.lse), of_zeros)
        answer = dataclasses.replace(answer, **results)
        cleared: dict[str, Any] = {
            n: np.where(padding, 0.0, getattr(answer, n)) for n in ("dk", "dv") if n in scene.tensors
        }
        return agree_with(scene, dataclasses.replace(answer, **cleared), y)

    def judge(scene: Scene) -> float | None:
        if of_ranks and (scene.replicated or scene.size == 1):
            return None if wrong_tensors(scene) else 0.0
        padding = pairs_of(scene).padding[:, 0, 0, :, None, None]
        found = agreeing(scene, False)
        return agreeing(scene, padding) if found is None and padding.any() and not {*"kv"}.isdisjoint(names) else found

    return judge


def _judge_joined(scene: Scene) -> float | None:
    """Shards padded to the longest are joined and cut at N: zeros stay between them, and the last rows are lost."""
    x, shards = scene.inputs, scene.shards[1]
    longest = max(map(len, shards))
    padded = [position for held in shards for position in [*held, *[-1] * (longest - len(held))]]
    rows = np.array(padded[: scene.problem.nk], dtype=np.int64)
    if scene.replicated or scene.case.sharding != "contiguous" or scene.problem.nq != scene.problem.nk:
        return None if wrong_tensors(scene) else 0.0
    if (rows == np.arange(len(rows))).all():
        return None if wrong_tensors(scene) else 0.0
    if any(name not in ("out", "lse") for name in scene.tensors):
        return None
    joined = {name: np.where((rows >= 0)[:, None, None], getattr(x, name)[:, rows], 0.0) for name in "qkv"}
    y = dataclasses.replace(x, **joined)
    return agree_with(scene, attention(scene.problem, y.q, y.k, y.v, y.dout, y.dlse, y.sinks), y)


def _judge_padded_heads(scene: Scene) -> float | None:
    """Heads and key heads are padded to multiples of the ranks, so that a head has another number of the key head."""
    p, x, ranks = scene.problem, scene.inputs, scene.size
    heads, key_heads = (-(-n // ranks) * ranks for n in (p.heads, p.hk))
    if p.heads == p.hk or heads % key_heads or heads // key_heads == p.group_size or scene.replicated:
        return None if wrong_tensors(scene) else 0.0
    of = np.arange(p.heads) // (heads // key_heads)

    def read(y: Array) -> Array:
        return np.pad(y, ((0, 0), (0, 0), (0, key_heads - p.hk), (0, 0)))[:, :, of]

    def summed(y: Array) -> Array:
        found = np.zeros((*y.shape[:2], key_heads, y.shape[3]))
        for head, key_head in enumerate(of):
            found[:, :, key_head] += y[:, :, head]
        return found[:, :, : p.hk]

    single = p.replace(key_heads=p.heads)
    answer = attention(single, x.q, read(x.k), read(x.v), x.dout, x.dlse, x.sinks)
    bound = allowed_error(single, answer, x.q, read(x.k), read(x.v), x.dout, x.dlse, scene.pipeline)
    whole = {name: getattr(answer, name) for name in scene.tensors}
    limits = {name: getattr(bound, name) for name in scene.tensors}
    for name in ("dk", "dv"):
        if name in whole:
            whole[name], limits[name] = summed(whole[name]), summed(limits[name])
    return agree_but_for(scene, whole, lambda: dataclasses.replace(bound, **limits))


BY_RANK: dict[str, Rearranged] = {
    "heads (rank, head) as (head, rank)": functools.partial(_heads_by_turns, _ranks),
    "heads (head, rank) as (rank, head)": functools.partial(_turns_of_heads, _ranks),
}
BY_DIVISOR: dict[str, Rearranged] = {
    f"{text}, of the greatest common divisor of ranks and key heads": functools.partial(change, _divisor)
    for text, change in (
        ("heads (rank, head) as (head, rank)", _heads_by_turns),
        ("heads (head, rank) as (rank, head)", _turns_of_heads),
    )
}
BY_GROUP: dict[str, Rearranged] = {
    "heads (key head, head of the group) as (head of the group, key head)": functools.partial(
        _heads_by_turns, lambda scene: scene.problem.hk
    ),
    "heads (head of the group, key head) as (key head, head of the group)": functools.partial(
        _turns_of_heads, lambda scene: scene.problem.hk
    ),
}
PIECES: dict[str, Rearranged] = {
    "pieces (rank, batch, tokens) as (batch, rank, tokens), so that batch elements are mixed": _batch_for_rank,
}

WHOSE = (("results", "o"), ("q, k and v", "qkv"), ("k and v", "kv"), ("q", "q"), ("k", "k"), ("v", "v"))

REARRANGED: list[Hypothesis] = [
    Hypothesis(f"{what} are read in the wrong order: {how}", STEPS, judge=_judge(change, names))
    for how, change in (PIECES | BY_RANK).items()
    for what, names in WHOSE
]
REARRANGED.append(
    Hypothesis(
        "q, k and v of shards padded to the longest are joined and cut at their length: zeros stay between the shards, "
        "and the last rows are lost",
        STEPS,
        judge=_judge_joined,
    )
)
REARRANGED.append(
    Hypothesis(
        "heads and key heads are each padded with zeros to a multiple of the ranks, so that heads belong to other key "
        "heads, or to one of zeros",
        STEPS,
        judge=_judge_padded_heads,
    )
)
for up, (front, end) in {True: ("in front", "at the end"), False: ("at the end", "in front")}.items():
    says = f"heads are filled up to a multiple of the ranks {front}, and those of results are left out {end}"
    REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(functools.partial(_shifted_heads, up), "o")))
for how, change in (BY_RANK | BY_DIVISOR | BY_GROUP).items():
    says = f"lse is read in the wrong order: {how}"
    REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(change, "l", of_ranks=how not in BY_GROUP)))
for how, change in (BY_DIVISOR | BY_GROUP).items():
    says = f"results are read in the wrong order: {how}"
    REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(change, "o", of_ranks=how not in BY_GROUP)))
for text, number in {
    "are not put in order": 1,
    "are put in order by the inverse of the permutation that does": 2,
}.items():
    for what, names in (("q, k and v", "qkv"), ("k and v", "kv"), ("q", "q")):
        says = f"the rows of {what}, which come shard by shard, {text}"
        REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(_times(number, back=False), names)))
    for what, names in (("results", "o"), ("lse", "l")):
        says = f"the rows of {what}, which go back shard by shard, {text}"
        REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(_times(number, back=True), names)))
for how, change in (ROWS | WHOLE).items():
    for what, names in WHOSE:
        REARRANGED.append(Hypothesis(f"{what} are taken from another place: {how}", STEPS, judge=_judge(change, names)))
COME_BACK: dict[str, tuple[TensorName, ...]] = {
    "gradients": ("dq", "dk", "dv"),
    "out and lse": ("out", "lse"),
    "out": ("out",),
    "lse": ("lse",),
    "dq": ("dq",),
    "dk and dv": ("dk", "dv"),
    "dk": ("dk",),
    "dv": ("dv",),
}
for how, change in (WHOLE | BY_RANK | BY_DIVISOR | BY_GROUP).items():
    for what, results in COME_BACK.items():
        if what != "lse" or how in WHOLE:  # other orders of its heads are above
            says, judged = f"{what} that are right come back in another place: {how}", _judge_returned
            REARRANGED.append(Hypothesis(says, STEPS, judge=judged(change, results)))
            if how in BY_RANK and "dk" in results:
                for which, copies in COPIES.items():
                    of_copies = f"{says}, of key heads with {which}, before these are summed"
                    REARRANGED.append(Hypothesis(of_copies, STEPS, judge=judged(change, results, copies)))
