"""Write a failure of the suite `scale` as one Python file: the same inputs at the same length, rows computed again.

The script runs the implementation over gloo as a whole, and recomputes some rows in float64 by the formulas of
attention, those that were wrong among them; cotangents of all others are zero, so that dk and dv are sums over these
rows. Where sums over all rows were wrong, it adds up both sides. It makes inputs by the same counter as the suite; what
those rows attend, and the errors allowed in them, stand in it as literals.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringref.intervals import parts
from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.rounding import UNIT_ROUNDOFF, LongBounds
from ringverify.cases.case import Case
from ringverify.cases.comparing import sinks_in_parts
from ringverify.cases.running import shards
from ringverify.check.casefile import CaseFile
from ringverify.confirm.long_template import TEMPLATE
from ringverify.confirm.source import Script, SourceText, array_source, dictionary, fields_of, literal, place_of
from ringverify.events import CounterexampleEvent, TensorName
from ringverify.implementation import Capabilities
from ringverify.properties.precision import LOW
from ringverify.scale.checksums import RESULTS
from ringverify.scale.comparison import RankResults
from ringverify.scale.every_row import bounds_of_classes
from ringverify.scale.long_run import LongRun
from ringverify.scale.numbers import Numbers, Positions
from ringverify.scale.precision import Probabilities, mean_limits
from ringverify.scale.sampled_rows import sampled_rows
from ringverify.scale.sampling import rows_to_sample, sampled_count
from ringverify.scale.task import LongTask

Float = NDArray[np.float64]

FEW = 32
"""Rows of a script, about, where the rows of the suite were all; and keys whose dk and dv are computed again."""
MEAN = 512
"""Keys where their mean error is computed again."""
OF_A_RANK = 6
"""Queries of each rank among them that attend a key whose dk or dv was wrong."""


def long_script(recorded: CaseFile, event: CounterexampleEvent, capabilities: Capabilities) -> Script:
    """Return the script of a failure.

    Args:
        recorded: its case file.
        event: what a report says of it: the wrong element, or the sum that is off.
        capabilities: what the target declares.
    """
    case = recorded.case
    p, sharded = case.problem, shards(case, capabilities)
    classes = recorded.property == "every_row"
    numbers = Numbers(p, case.seed, "classes" if classes else "free")
    about = {"target": recorded.target, "property": recorded.property, "case": case.describe()}
    about |= {"wrong": recorded.summary, "recorded by": recorded.made_with}
    at = _position(p, event)
    rows, beside = _rows(case, recorded.property, event.tensor, at, capabilities)
    chosen = _keys(case, event.tensor, at, MEAN if recorded.property == "sampled_rows" and p.dtype in LOW else FEW)
    values = {
        "implementation": dictionary(place_of(recorded.target)),
        "world": literal(case.world_size),
        "sharding": literal(case.sharding),
        "layout": literal(capabilities.tensor_layout),
        "dtype": literal(p.dtype),
        "lse_dtype": literal(p.lse_dtype),
        "returns_lse": literal(capabilities.lse),
        "cotangent": literal(case.cotangent),
        "ways": literal((("enable_grad", "qkv" if capabilities.gradients else ""),)),
        "problem": dictionary(fields_of(p)),
        "queries": f"[{', '.join(map(array_source, sharded[0]))}]",
        "keys": f"[{', '.join(map(array_source, sharded[1]))}]",
        "seed": literal(case.seed),
        "sinks": "None" if numbers.sinks is None else array_source(numbers.sinks),
        "sinks_in_parts": literal(sinks_in_parts(case, capabilities)),
        "books": _books(numbers) if classes else "None",
        "beside": array_source(beside),
        "chosen": array_source(chosen),
        **dict.fromkeys(("rows", "multiplicity", "sum", "with_keys"), "None"),
        "allowed": "{}",
        "rms": "{}",
        "unit": literal(UNIT_ROUNDOFF[p.dtype]),
    }
    if event.sum is not None and all(0 <= one < most for one, most in zip(event.sum, _most(p), strict=True)):
        values |= {"sum": literal((*event.sum, event.allowed)), "with_keys": array_source(_with_keys(p, event.sum[1]))}
    else:
        kept = _allowed(case, rows, chosen, capabilities, classes=classes)
        values |= {
            "rows": array_source(rows),
            "multiplicity": array_source(_attended(p, rows)),
            "allowed": dictionary({name: SourceText(array_source(x)) for name, x in kept.allowed.items()}),
            "rms": dictionary(dict(kept.means(capabilities.probabilities))),
        }
    return Script.of(TEMPLATE, values, about)


def _position(p: Problem, event: CounterexampleEvent) -> int | None:
    """Return the position of the row that was wrong, if a report says one that there is."""
    length = p.nk if event.tensor in ("dk", "dv") else p.nq
    return event.position if event.position is not None and 0 <= event.position < length else None


def _most(p: Problem) -> tuple[int, int, int, int]:
    """Return how many identities, elements, key heads and dimensions, or query heads, there are."""
    return 4 + p.sinks, p.batch, p.hk, max(p.head_dim, p.dv, p.heads)


def _rows(
    case: Case, method: str, tensor: TensorName | None, at: int | None, capabilities: Capabilities
) -> tuple[Positions, Positions]:
    """Return the rows that are computed again, and rows beside them whose dq has to be zero."""
    none = np.zeros(0, dtype=np.int64)
    if method == "sampled_rows":
        rows = np.array(rows_to_sample(case, capabilities, sampled_count(case)), dtype=np.int64)
        if tensor == "dq" and at is not None and at not in rows:
            return rows, np.array([at])
        return rows, none
    chosen = [np.array(rows_to_sample(case, capabilities, FEW), dtype=np.int64)]
    if at is not None and tensor in ("dk", "dv"):
        attend = multiplicity(case.problem, np.arange(case.problem.nq), np.array([at])).sum(axis=(0, 1, 3)) > 0
        rng = np.random.default_rng(case.seed)
        for own in shards(case, capabilities)[0]:
            found = own[attend[own]]
            chosen.append(rng.choice(found, min(OF_A_RANK, len(found)), replace=False))
    elif at is not None:
        chosen.append(np.array([at]))
    return np.unique(np.concatenate(chosen)), none


def _keys(case: Case, tensor: TensorName | None, at: int | None, count: int) -> Positions:
    """Return the keys whose dk and dv are computed again."""
    nk = case.problem.nk
    wrong = [at] if at is not None and tensor in ("dk", "dv") else []
    found: Positions = np.unique([*np.random.default_rng(case.seed).integers(0, max(nk, 1), count), *wrong])
    return found[found < nk].astype(np.int64)


def _books(numbers: Numbers) -> str:
    """Return the source of what queries and keys of classes are made of."""
    (queries, keys), (shares, seekers) = numbers.codebooks, numbers.shares
    arrays = {"queries": queries, "keys": keys, "limits": np.cumsum(shares)[:-1]}
    return dictionary({**{name: SourceText(array_source(x)) for name, x in arrays.items()}, "seekers": seekers})


def _attended(p: Problem, rows: Positions) -> NDArray[np.uint8]:
    pieces = np.array_split(np.arange(p.nk), max(1, p.nk >> 12))
    found: list[Any] = [multiplicity(p, rows, piece).astype(np.uint8) for piece in pieces]
    return np.concatenate(found, axis=-1)


def _with_keys(p: Problem, b: int) -> NDArray[np.bool_]:
    found = np.zeros((p.heads, p.nq), dtype=bool)
    for h in range(p.heads):
        for part in parts(p, b, h):
            found[h, part.queries] |= part.last > part.first
    return found


def _allowed(
    case: Case, rows: Positions, chosen: Positions, capabilities: Capabilities, *, classes: bool
) -> _AllowedErrors:
    """Return the errors allowed in results of the rows and of the chosen keys, as the suite has them."""
    run = _Alone(LongTask("ring", case, "sampled_rows", "cpu", tuple(rows.tolist())), 0)
    run.queries, run.keys = rows, np.arange(case.problem.nk)
    run.of_classes, run.capabilities = classes, capabilities
    if classes:
        run.numbers = Numbers(case.problem, case.seed, "classes")
    run.compared = kept = _AllowedErrors(case, run, chosen)
    sampled_rows(run)
    return kept


class _Alone(LongRun):
    """One rank that holds everything, and no others to ask."""

    of_classes = False

    def free_bounds(self, products: float) -> LongBounds:
        """Return what may be wrong on the inputs that it has."""
        return bounds_of_classes(self) if self.of_classes else super().free_bounds(products)

    def blocks(self) -> list[Positions]:
        """Return the keys of each rank."""
        return [np.sort(keys) for keys in self.shards[1]]

    def summed(self, x: Float) -> Float:
        """Return what it has."""
        return x

    def gathered(self, x: Float) -> list[Float]:
        """Return what it has."""
        return [x]


class _AllowedErrors(RankResults):
    """Keeps the errors allowed, instead of comparing."""

    def __init__(self, case: Case, run: LongRun, chosen: Positions) -> None:
        super().__init__(case, 0, run.shards, run.numbers)
        p = case.problem
        self.returned = dict.fromkeys(RESULTS)  # type: ignore[assignment]  # that there are such results is what counts
        self._rows: dict[TensorName, Positions] = dict.fromkeys(("out", "lse", "dq"), run.queries)
        self._rows |= {"dk": chosen, "dv": chosen}
        shapes = {"out": (p.heads, p.dv), "lse": (p.heads, 1), "dq": (p.heads, p.head_dim)}
        shapes |= {"dk": (p.hk, p.head_dim), "dv": (p.hk, p.dv)}
        self.dsinks = np.zeros(p.heads) if p.sinks else None
        self.allowed = {name: np.zeros((p.batch, len(at), *shapes[name])) for name, at in self._rows.items()}
        self._averaged = {name: np.zeros(x.shape[:3], dtype=bool) for name, x in self.allowed.items()}

    def compare(
        self,
        name: TensorName,
        b: int,
        h: int,
        rows: Positions,
        at: Positions,
        expected: Float,
        allowed: Float,
        variance: Sequence[Float] | None = None,
    ) -> None:
        """Keep the errors allowed in rows of a result, and in the mean of those that are judged."""
        wanted = self._rows[name]
        here = np.flatnonzero(np.isin(at, wanted))
        place = np.searchsorted(wanted, at[here])
        self.allowed[name][b, place, h] = allowed[here]
        if variance is not None:
            self._averaged[name][b, place, h] = self.averaged(
                name, expected[here], allowed[here], [x[here] for x in variance]
            )

    def means(self, probabilities: Probabilities) -> Iterator[tuple[str, SourceText]]:
        """Yield the largest root mean square error of each result that is judged, and its rows."""
        for name, (_, limit) in mean_limits([self.squares], probabilities).items():
            yield name, SourceText(f"({limit!r}, {array_source(self._averaged[name])})")

    def compare_sums(
        self,
        name: TensorName,
        actual: Float,
        expected: Float,
        allowed: Float,
        says: Sequence[str],
        identity: tuple[int, int, int] | None = None,
    ) -> None:
        """Keep the errors allowed in the gradient of sinks."""
        self.allowed[name] = allowed
