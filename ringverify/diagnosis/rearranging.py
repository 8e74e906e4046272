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

from ringref.attention import attention
from ringref.rounding import allowed_error
from ringverify.diagnosis.hypothesis import Hypothesis, agree_but_for, agree_with
from ringverify.diagnosis.pairs import Ints
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import STEPS

Rearranged = Callable[[Scene, Array, int], Array]
"""A tensor of all ranks `(B, N, H, D)` in another order, by case and whether it is of queries (0) or keys (1)."""


def _batch_for_rank(scene: Scene, x: Array, of_keys: int) -> Array:
    """Read `(P, B, n)` as `(B, P · n)`."""
    shards = scene.shards[of_keys]
    if len({len(rows) for rows in shards}) > 1:
        return x
    found = np.empty_like(x)
    found[:, np.concatenate(shards)] = np.stack([x[:, rows] for rows in shards]).reshape(x.shape)
    return found


def _heads_by_turns(of: Callable[[Scene], int], scene: Scene, x: Array, of_keys: int) -> Array:
    """Read heads `(n, H / n)` as `(H / n, n)`, for a number n."""
    heads, n = x.shape[2], of(scene)
    return x if heads % n else x[:, :, np.arange(heads).reshape(n, -1).T.ravel()]


def _turns_of_heads(of: Callable[[Scene], int], scene: Scene, x: Array, of_keys: int) -> Array:
    """Read heads `(H / n, n)` as `(n, H / n)`, for a number n."""
    heads, n = x.shape[2], of(scene)
    return x if heads % n else x[:, :, np.arange(heads).reshape(-1, n).T.ravel()]


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


def _judge(change: Rearranged, names: str, *, of_ranks: bool = True) -> Callable[[Scene], float | None]:
    """Return the judge of tensors in another order, which may be one of what the ranks have."""

    def judge(scene: Scene) -> float | None:
        if of_ranks and (scene.replicated or scene.size == 1):
            return None if wrong_tensors(scene) else 0.0

        def back(of_keys: int, x: Array) -> Array:
            """Put back what is rearranged: so do gradients."""
            found = np.empty(x.shape)
            found.ravel()[change(scene, np.arange(float(x.size)).reshape(x.shape), of_keys).astype(int)] = x
            return found

        def of_lse(change: Callable[[Array], Array], lse: Array) -> Array:
            return change(lse.swapaxes(1, 2)[..., None])[..., 0].swapaxes(1, 2)

        x = scene.inputs
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
            results["lse"] = of_lse(lambda x: change(scene, x, 0), answer.lse)
        answer = dataclasses.replace(answer, **results)
        return agree_with(scene, answer, y)

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

REARRANGED: list[Hypothesis] = [
    Hypothesis(f"{what} are read in the wrong order: {how}", STEPS, judge=_judge(change, names))
    for how, change in (PIECES | BY_RANK).items()
    for what, names in (("results", "o"), ("q, k and v", "qkv"), ("k and v", "kv"), ("q", "q"), ("k", "k"), ("v", "v"))
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
for how, change in (BY_RANK | BY_DIVISOR | BY_GROUP).items():
    says = f"lse is read in the wrong order: {how}"
    REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(change, "l", of_ranks=how not in BY_GROUP)))
for how, change in BY_GROUP.items():
    says = f"results are read in the wrong order: {how}"
    REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(change, "o", of_ranks=False)))
for text, number in {
    "are not put in order": 1,
    "are put in order by the inverse of the permutation that does": 2,
}.items():
    for what, names in (("q, k and v", "qkv"), ("k and v", "kv"), ("q", "q")):
        says = f"the rows of {what}, which come shard by shard, {text}"
        REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(_times(number, back=False), names)))
    says = f"the rows of results, which go back shard by shard, {text}"
    REARRANGED.append(Hypothesis(says, STEPS, judge=_judge(_times(number, back=True), "o")))
