"""Which rows of a result are wrong, and what those that are have in common.

A row is what one query of one head gets (of out and lse together, or of dq), or one key of one key head (of dk and dv
together). Rows are computed apart, so a fault may be there in some of them only: of one rank, of one head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ringref.rounding import margins
from ringverify.diagnosis.scene import Array, Results, Scene
from ringverify.events import TensorName

Mask = NDArray[np.bool_]
Group = tuple[TensorName, ...]

GROUPS: tuple[Group, ...] = (("out", "lse"), ("dq",), ("dk", "dv"))
"""Results that have the same rows."""


def by_row(name: TensorName, elements: Mask) -> Mask:
    """Return the rows `(B, S, H)` of a result in which any element is set."""
    found: Mask = elements.swapaxes(1, 2) if name == "lse" else np.any(elements, axis=-1)
    return found


def wrong_rows(scene: Scene, rank: int, group: Group) -> Mask:
    """Return which rows of a rank's results are wrong, `(B, S, H)`."""

    def found() -> Mask:
        names = [name for name in group if name in scene.tensors]
        every: Mask = np.any([by_row(name, scene.margins(name, rank) > 1) for name in names], axis=0)
        return every

    return scene.once(("wrong rows", rank, group), found)


def all_wrong(scene: Scene) -> bool:
    """Whether of results that have the same rows either all rows are wrong or none."""
    every = []
    for group in GROUPS:
        if any(name in scene.tensors for name in group):
            rows = np.concatenate([wrong_rows(scene, rank, group).ravel() for rank in range(scene.size)])
            every.append(bool(rows.all() or not rows.any()))
    return all(every)


def on_wrong_rows(scene: Scene, rank: int, results: Results) -> Results:
    """Return predicted results with the right answer in every row in which what was seen is right."""
    found: Results = {}
    for group in GROUPS:
        for name in group:
            if name not in results or name not in scene.tensors:
                continue
            predicted, true = results[name], scene.true(name, rank)
            if predicted.shape != true.shape:
                found[name] = predicted
                continue
            wrong = wrong_rows(scene, rank, group)
            found[name] = np.where(wrong.swapaxes(1, 2) if name == "lse" else wrong[..., None], predicted, true)
    return found


Rule = Callable[["FaultyRows"], Mask]
"""Which rows have something in common."""


class FaultyRows:
    """Rows that a fault would make wrong, of many cases; which of them are wrong; and what is known of each.

    Args:
        told: a case with its ranks' results as the fault would have them.
    """

    def __init__(self, told: Iterable[tuple[Scene, list[Results]]]) -> None:
        found: dict[str, list[Array]] = {name: [] for name in ("wrong", *_FEATURES)}
        self.digits = 0
        for scene, every in told:
            for rank, results in enumerate(every):
                for group in GROUPS:
                    names = [name for name in group if name in results and name in scene.tensors]
                    if names:
                        self._add(found, scene, rank, group, {name: results[name] for name in names})
        self.of = {name: np.concatenate(parts) if parts else np.zeros(0) for name, parts in found.items()}
        self.wrong: Mask = self.of["wrong"].astype(bool)

    def _add(self, found: dict[str, list[Array]], scene: Scene, rank: int, group: Group, results: Results) -> None:
        wrong = wrong_rows(scene, rank, group)
        changed = np.zeros_like(wrong)
        for name, predicted in results.items():
            off = margins(predicted, scene.true(name, rank), 2 * scene.limit(name, rank), scene.dtype_of(name)) > 1
            changed |= by_row(name, off)
            self.digits += int((by_row(name, np.isfinite(predicted) & off) & wrong).sum())
        kept = changed | wrong
        batch, row, head = np.indices(wrong.shape)
        size = np.full(wrong.shape, wrong.shape[1])
        values = {
            "wrong": wrong,
            "rank": np.full(wrong.shape, rank),
            "ranks": np.full(wrong.shape, scene.size),
            "batch": batch,
            "batches": np.full(wrong.shape, wrong.shape[0]),
            "row": row,
            "rows": size,
            "head": head,
            "heads": np.full(wrong.shape, wrong.shape[2]),
        }
        for feature, each in values.items():
            found[feature].append(np.asarray(each)[kept].astype(np.float64))

    def alike(self) -> Iterator[tuple[str, Rule]]:
        """Yield what all rows that are wrong have and no other row has, in words; the plainest first."""
        if not self.wrong.all():
            for text, rule in _rules(self):
                if bool((rule(self) == self.wrong).all()):
                    yield text, rule


_FEATURES = ("rank", "ranks", "batch", "batches", "row", "rows", "head", "heads")
_AXES: tuple[tuple[str, str, str, str, str], ...] = (
    ("rank", "ranks", "on rank {}", "on the last rank", "on {} ranks"),
    ("head", "heads", "in head {}", "in the last head", "in {} heads"),
    ("batch", "batches", "in batch element {}", "in the last batch element", "in {} batch elements"),
    ("row", "rows", "in row {} of a shard", "in the last row of a shard", "in {} rows of a shard"),
)
"""An axis, its length, and how one place on it, the last one, and even or odd ones are named."""


def _rules(rows: FaultyRows) -> Iterator[tuple[str, Rule]]:
    """Yield what rows may have in common, in words, and which rows of a case have it; the plainest first."""

    def numbered(axis: str, length: str, one: str, last: str, some: str) -> Iterator[tuple[str, Rule]]:
        least, most = int(rows.of[axis][rows.wrong].min()), int(rows.of[axis][rows.wrong].max())
        yield f"{one.format(least)} only", lambda rows: rows.of[axis] == least
        yield f"{last} only", lambda rows: rows.of[axis] == rows.of[length] - 1
        yield f"{one.format(least)} and later only", lambda rows: rows.of[axis] >= least
        yield f"{one.format(most)} and earlier only", lambda rows: rows.of[axis] <= most
        yield f"but not {last}", lambda rows: rows.of[axis] < rows.of[length] - 1
        yield f"{some.format('even')} only", lambda rows: rows.of[axis] % 2 == 0
        yield f"{some.format('even')} but the first only", lambda rows: (rows.of[axis] % 2 == 0) & (rows.of[axis] > 0)
        yield f"{some.format('odd')} only", lambda rows: rows.of[axis] % 2 == 1

    for axis in _AXES:
        yield from numbered(*axis)
    for parity, rest in (("an even", 0), ("an odd", 1)):
        text = f"on ranks with {parity} number of rows only"
        yield text, lambda rows, rest=rest: rows.of["rows"] % 2 == rest  # type: ignore[misc]
