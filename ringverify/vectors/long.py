"""Golden vectors at lengths of which no file can hold the answer: seeds, and checksums of what has to come back.

Inputs are made by counting, `ringverify.scale.numbers` says how, and results are known by sums of rows and of blocks of
rows, `ringverify.scale.checksums`. The oracle is that of classes, `ringref.classes`, in float64. Its last bits depend
on the machine, so a file is right if what is made again agrees with it within what float64 allows.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ringref.problem import DtypeName, Problem
from ringref.rounding import FLOAT64_SHARE, UNIT_ROUNDOFF, margins
from ringref.sharding import ShardingName
from ringverify.cases.case import COTANGENTS, Case, Cotangent
from ringverify.errors import UsageError
from ringverify.events import TensorName
from ringverify.scale.checksums import BLOCK, RESULTS, Float, GoldenSums
from ringverify.scale.golden import expected_checksums
from ringverify.vectors import sealed
from ringverify.vectors.making import upwards
from ringverify.vectors.story import Layout, flags, written_out

NAME = "long.json"
ABOUT = "golden vectors at length: docs/vectors.md of ringverify says how to make their inputs and sums"
ID = re.compile(r"L(\d{3})")
LENGTH = 65_536
DTYPES: tuple[DtypeName, ...] = ("float64", "float32")
"""Dtypes that may be asked for, the better first; both hold the inputs."""
MOST_RANKS = 16
"""The most ranks that the errors allowed are for."""
RANKS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongVector:
    """The description of a long vector.

    Attributes:
        id: `L` and three digits; never used again for anything else. The number is the seed.
        title: a few words.
        note: what it is for.
        problem: what to compute.
        cotangent: which results have a cotangent.
    """

    topic: ClassVar[str] = "length"
    id: str
    title: str
    note: str
    problem: Problem
    cotangent: Cotangent

    @property
    def rows(self) -> tuple[int, ...]:
        """Positions of the rows that are summed on their own: the first and last, powers of two, and others between."""
        n = self.problem.nq
        powers = [2**power - less for power in range(n.bit_length()) for less in (0, 1)]
        return tuple(sorted({row for row in (*powers, *(n * part // 11 for part in range(11)), n - 1) if row < n}))

    def case(self, layout: Layout, dtype: DtypeName = "float32") -> Case:
        """Return the case of a sharding and a number of ranks."""
        return Case(
            problem=self.problem.replace(dtype=dtype),
            sharding=layout.sharding,
            world_size=layout.world_size,
            cotangent=self.cotangent,
            seed=int(self.id[1:]),
        )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The shardings to try it on, of which the first that is declared is taken."""
        names: tuple[ShardingName, ...] = ("zigzag", "striped", "contiguous")
        return tuple(Layout(name, RANKS) for name in names)

    def described(self) -> dict[str, Any]:
        """Return the fields of its entry that are not computed."""
        problem = {name: value for name, value in written_out(self.problem).items() if name != "dtype"}
        return {
            "id": self.id,
            "title": self.title,
            "note": self.note,
            "seed": int(self.id[1:]),
            "flags": list(flags(self.problem, self.cotangent)),
            "problem": problem,
            "cotangent": self.cotangent,
            "rows": list(self.rows),
            "block": BLOCK,
        }


def _vectors(length: int) -> tuple[LongVector, ...]:
    causal = Problem(query_length=length, head_dim=64, causal=True)
    return (
        LongVector(
            id="L001",
            title="causal, every key before",
            note="Offsets that overflow, positions that a format cannot tell apart, and blocks lost far down the ring.",
            problem=causal,
            cotangent="out",
        ),
        LongVector(
            id="L002",
            title="causal, a window of a sixteenth",
            note="A window that forgets, or remembers, across a boundary of tiles or of shards, far from the start.",
            problem=causal.replace(window=(length // 16 - 1, 0)),
            cotangent="both",
        ),
    )


VECTORS = {vector.id: vector for vector in _vectors(LENGTH)}


def entry(vector: LongVector) -> dict[str, Any]:
    """Compute the entry of a vector."""
    made = expected_checksums(vector.case(Layout("contiguous", MOST_RANKS)), vector.rows)
    results = {
        name: {"expected": made.values[name].tolist(), "allowed": upwards(made.allowed(name)).tolist()}
        for name in RESULTS
    }
    return {**vector.described(), "results": results}


def _whole(described: dict[str, Any]) -> dict[str, Any]:
    """Return an entry, if it is whole."""
    vector = of(described)
    if vector.described() != {name: value for name, value in described.items() if name != "results"}:
        raise ValueError(f"{vector.id} has other fields than its problem")
    sums = len(vector.rows) + -(-vector.problem.nq // BLOCK)
    for name in RESULTS:
        for numbers in (described["results"][name][one] for one in ("expected", "allowed")):
            if len(numbers) != sums or not np.isfinite(np.array(numbers, dtype=np.float64)).all():
                raise ValueError(f"{vector.id} has other numbers for {name} than {sums} sums")
    return described


_FILE = sealed.SealedFile(NAME, ABOUT, entry, _whole)
text, read = _FILE.text, _FILE.read


def of(described: Mapping[str, Any]) -> LongVector:
    """Return the description in an entry.

    Raises:
        ValueError: it describes no vector.
    """
    if ID.fullmatch(described["id"]) is None or described["cotangent"] not in COTANGENTS:
        raise ValueError(f"id={described['id']!r}, cotangent={described['cotangent']!r}")
    texts = {name: str(described[name]) for name in ("id", "title", "note")}
    problem = Problem.from_json(described["problem"])
    return LongVector(**texts, problem=problem, cotangent=described["cotangent"])


def golden(described: Mapping[str, Any], dtype: DtypeName) -> GoldenSums:
    """Return the sums of an entry, and the errors allowed in a dtype."""

    def by_name(which: str) -> dict[TensorName, Float]:
        return {name: np.array(described["results"][name][which], dtype=np.float64) for name in RESULTS}

    share = FLOAT64_SHARE if dtype == "float64" else 1.0
    allowed = {name: share * bound for name, bound in by_name("allowed").items()}
    return GoldenSums(tuple(described["rows"]), by_name("expected"), allowed)


def answer_again(folder: Path, described: Mapping[str, Any]) -> None:
    """Compute the sums of an entry again, and what is allowed: within the rounding of float64, and of eight bits.

    Raises:
        UsageError: one of them differs.
    """
    made, path, mend = entry(of(described)), folder / NAME, sealed.again(folder)
    for name in RESULTS:
        there, found = described["results"][name], made["results"][name]
        exact, bound = (np.array(found[which]) for which in ("expected", "allowed"))
        if margins(np.array(there["expected"]), exact, FLOAT64_SHARE * bound, "float64").max() > 1:
            raise UsageError(f"{path}, {described['id']}: {name} is not what the float64 oracle gives; {mend}")
        step = 2 * UNIT_ROUNDOFF["bfloat16"] * bound  # a bound may lie on the edge of rounding up
        if (np.abs(np.array(there["allowed"]) - bound) > step).any():
            raise UsageError(f"{path}, {described['id']}: the error allowed in {name} is not what follows; {mend}")
