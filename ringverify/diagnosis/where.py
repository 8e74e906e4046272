"""Where a case is wrong: ranks, rows and heads; and between which queries and which keys, as far as that can be told.

The queries and keys are found by running the implementation again (`probing`): out is linear in v, and dk and dv are
linear in the cotangents. They are named only if what is found adds up to what was seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ringverify.cases.case import Case
from ringverify.cases.inputs import Inputs
from ringverify.cases.running import Observation
from ringverify.diagnosis.scene import Scene
from ringverify.events import AXES, TensorName, What, Where, WrongPair

Mask = NDArray[np.bool_]
Probe = Callable[[Case, Inputs], Observation]

SHOWN = 2
"""Ranks, or pairs of ranks, that a line names before it says how many more there are."""


def wrong_elements(scene: Scene, name: TensorName, rank: int) -> Mask:
    """Return which elements of a result are wrong on a rank, as a mask of its shape."""
    found: Mask = scene.margins(name, rank) > 1
    return found


def wrong_tensors(scene: Scene) -> tuple[TensorName, ...]:
    """Return the names of the results that are wrong on at least one rank."""
    ranks = range(scene.size)
    return tuple(name for name in scene.tensors if any(wrong_elements(scene, name, rank).any() for rank in ranks))


def of_other_code(scene: Scene, failing: Case) -> bool:
    """Whether a case of another sharding is right: another branch of the code may have run, so it rules out nothing."""
    shardings = {scene.case.sharding, failing.sharding}
    return len(shardings) > 1 and "replicated_query" not in shardings and not wrong_tensors(scene)


def locate(scene: Scene, tensor: TensorName, pairs: Sequence[WrongPair]) -> Where | None:
    """Return where a result is wrong; `None` if it is right.

    Args:
        scene: the case, and what was seen of it.
        tensor: the result.
        pairs: the queries and keys concerned, as far as they are known.
    """
    axes = AXES[tensor]
    row, head = axes.index("key" if tensor in ("dk", "dv") else "query"), axes.index("head")
    rows: dict[int, tuple[int, ...]] = {}
    heads: set[int] = set()
    count = 0
    for rank in range(scene.size):
        wrong = wrong_elements(scene, tensor, rank)
        if wrong.any():
            local = np.flatnonzero(wrong.any(axis=tuple(axis for axis in range(wrong.ndim) if axis != row)))
            rows[rank] = tuple(int(p) for p in scene.shards[tensor in ("dk", "dv")][rank][local])
            both: Mask = np.any(wrong, axis=tuple(axis for axis in range(wrong.ndim) if axis not in (row, head)))
            count += int(both.sum())
            heads |= {int(h) for h in np.flatnonzero(both.any(axis=0 if row < head else 1))}
    if not rows:
        return None
    found = tuple(pairs)
    text = [_rows_told(scene, tensor, rows, tuple(sorted(heads)))]
    if count < (whole := len(heads) * sum(map(len, rows.values()))):
        text[0] += f", {count} of {whole} of these"
    if found:
        text.append(_pairs_told(tensor, found))
    return Where(tensor, rows, tuple(sorted(heads)), found, tuple(text))


def _rows_told(scene: Scene, tensor: TensorName, rows: dict[int, tuple[int, ...]], heads: tuple[int, ...]) -> str:
    of_keys = tensor in ("dk", "dv")
    shards = scene.shards[of_keys]
    word, count = ("key", scene.problem.hk) if of_keys else ("query", scene.problem.heads)
    words = {"key": "keys", "query": "queries"}[word]
    if all(len(rows.get(rank, ())) == len(shards[rank]) for rank in range(scene.size)):
        text = f"{tensor}, all {words} of every rank" if scene.size > 1 else f"{tensor}, all {words}"
    else:
        told = []
        for rank, wrong in list(rows.items())[:SHOWN]:
            local = np.flatnonzero(np.isin(shards[rank], wrong)).tolist()
            many = words if len(wrong) > 1 else word
            told.append(f"rank {rank} {many} {ranges(local)} (position{'s'[: len(wrong) > 1]} {ranges(wrong)})")
        text = f"{tensor}, " + "; ".join(told)
        if len(rows) > SHOWN:
            text += f"; and on {len(rows) - SHOWN} more rank{'s'[: len(rows) - SHOWN > 1]}"
    if len(heads) == count:
        return text + (", all heads" if count > 1 else "")
    return text + f", head{'s'[: len(heads) > 1]} {ranges(heads)} of {count}"


def _pairs_told(tensor: TensorName, pairs: tuple[WrongPair, ...]) -> str:
    """Describe the first few pairs of ranks with the most informative kind of error."""
    kinds: tuple[What, ...] = ("missing", "forbidden", "repeated", "wrong", "scaled")
    what = next(kind for kind in kinds if any(pair.what == kind for pair in pairs))
    here = [pair for pair in pairs if pair.what == what]
    if what == "scaled":
        return "each row weighs its keys rightly but for one factor, as keys and values of 0 beside them would make it"
    told = [
        _weight_told(tensor, pair) if tensor in ("out", "lse") else _part_told(tensor, pair) for pair in here[:SHOWN]
    ]
    if len(here) > SHOWN:
        told.append(f"{len(here)} pairs of ranks in all")
    return "; ".join(told)


def _weight_told(tensor: TensorName, pair: WrongPair) -> str:
    """Describe wrong weights: a rank and the keys that it attends wrongly."""
    keys = f"key{'s'[: len(pair.keys) > 1]} {ranges(pair.keys)} of rank {pair.owner}{_hop(pair)}"
    if pair.rank == pair.owner:
        keys = f"its own key{'s'[: len(pair.keys) > 1]} {ranges(pair.keys)}"
    match pair.what:
        case "missing":
            return (
                f"rank {pair.rank} leaves {keys} out of lse"
                if tensor == "lse"
                else f"rank {pair.rank} does not attend {keys}"
            )
        case "forbidden":
            return f"rank {pair.rank} attends {keys}, though the mask excludes {'them' if len(pair.keys) > 1 else 'it'}"
        case "repeated":
            return (
                f"rank {pair.rank} weighs {keys} as if {'they' if len(pair.keys) > 1 else 'it'} counted more than once"
            )
        case _:
            return f"rank {pair.rank} gives {keys} a wrong weight"


def _part_told(tensor: TensorName, pair: WrongPair) -> str:
    """Describe a wrong part of a rank's gradient: that of another rank's queries or keys."""
    here, other, kind = (pair.rank, pair.owner, "keys") if tensor == "dq" else (pair.owner, pair.rank, "queries")
    whose = f"its own {kind}" if here == other else f"rank {other}'s {kind}{_hop(pair)}"
    said = {"missing": "is missing", "forbidden": "is not 0 as it should be", "repeated": "is twice what it should be"}
    return f"on rank {here} the part of {whose} {said.get(pair.what, 'is wrong')}"


def _hop(pair: WrongPair) -> str:
    return "" if pair.hop is None else f" (hop {pair.hop})"


def ranges(numbers: Iterable[int]) -> str:
    """Format numbers in ascending order, runs as `first–last`; after four runs, how many numbers are left."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(first) if first == last else f"{first}–{last}" for first, last in runs[:4]]
    left = sum(last - first + 1 for first, last in runs[4:])
    return ", ".join(texts) + (f" and {left} more" if left else "")
