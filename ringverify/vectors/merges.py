"""Golden vectors of merges: partial results, and what attention over all of their keys gives.

A merge is attention of each row over its partials: scores are their log-sum-exps, values their outs. So the answer is
that of `ringref.attention_decimal`, which has the same bits on every machine and shares nothing with `ringref.merge`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ringref import attention_decimal
from ringref.problem import DtypeName, Problem
from ringref.rounding import UNIT_ROUNDOFF
from ringverify.errors import UsageError
from ringverify.merge_contract import MergeCapabilities
from ringverify.merging.case import MergeCase, Partials
from ringverify.merging.properties import right_merge
from ringverify.vectors import sealed
from ringverify.vectors.inputs import SIGNIFICANT, bell
from ringverify.vectors.making import upwards

Array = NDArray[np.float64]

NAME = "merges.json"
ABOUT = "golden vectors of merges of partial results: docs/vectors.md of ringverify says how to read them"
ID = re.compile(r"M(\d{3})")
INPUTS = ("out", "lse", "cotangent_out", "cotangent_lse")
RESULTS = {"out": "out", "lse": "lse", "grad_out": "dout", "grad_lse": "dlse"}
"""Results in the file, and their names in `Merged`."""
FAR = 8192.0
LSE_BITS = 10
"""Bits of a log-sum-exp before 8,192 is added, so that float32 holds the sum."""
FIRST_SEED = 8192
"""The seed of an input is this, and 8 times the vector's number, and the place of the input among `INPUTS`."""
Values = Literal["near", "equal", "far", "large", "some_empty", "first_empty", "all_empty"]
"""Log-sum-exps of partials: a few apart; equal; 8,192 apart; all near 8,192 or −8,192; partials that are empty in some
rows; the first empty in all; rows in which all are empty."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeVector:
    """The description of a vector.

    Attributes:
        id: `M` and three digits; never used again for anything else.
        title: a few words.
        note: the mistake that makes a merge fail it.
        values: kind of log-sum-exps.
        dtype: of out, of its cotangent and of the merged out; lse is float32, or float64 where this is.
        partials: how many are merged.
        tokens: number of queries.
        heads: number of query heads.
        dim: value_dim.
    """

    topic: ClassVar[str] = "merge"
    id: str
    title: str
    note: str
    values: Values = "near"
    dtype: DtypeName = "float32"
    partials: int = 2
    tokens: int = 4
    heads: int = 2
    dim: int = 2

    @property
    def shape(self) -> dict[str, int]:
        """Its sizes by name."""
        return {name: getattr(self, name) for name in ("partials", "tokens", "heads", "dim")}

    @property
    def flags(self) -> tuple[str, ...]:
        """What a merge has to be capable of."""
        wanted = {"empty": "empty" in self.values, "n_way": self.partials > 2}
        return tuple(name for name, needed in wanted.items() if needed)

    def described(self) -> dict[str, Any]:
        """Return the fields of its entry that are not numbers of tensors."""
        fields = {name: getattr(self, name) for name in ("id", "title", "note", "values", "dtype")}
        return {**fields, "flags": list(self.flags), "shape": self.shape}

    def case(self, given: Partials) -> MergeCase:
        """Return the case of its numbers."""
        partials, tokens, heads, dim = self.shape.values()
        return MergeCase(partials=partials, tokens=tokens, heads=heads, dim=dim, dtype=self.dtype, given=given)


VECTORS = {
    vector.id: vector
    for vector in (
        MergeVector(
            id="M001",
            title="two partials",
            note="The weights are exp(lse_i − lse), and the cotangent of lse counts.",
        ),
        MergeVector(
            id="M002",
            title="equal log-sum-exps",
            note="Partials of equal lse have equal weights, and lse grows by log 2.",
            values="equal",
        ),
        MergeVector(
            id="M003",
            title="log-sum-exps far apart",
            note="Without a shift the weights overflow, or both vanish; the nearer partial has all the weight.",
            values="far",
        ),
        MergeVector(
            id="M004",
            title="large log-sum-exps",
            note="All near 8,192 or −8,192: exp(lse) is infinite or 0, and the weights are ordinary.",
            values="large",
        ),
        MergeVector(
            id="M005",
            title="partials that are empty in some rows",
            note="On either side an empty one changes nothing: −inf is not subtracted from −inf, gradients are finite.",
            values="some_empty",
        ),
        MergeVector(
            id="M006",
            title="a first partial that is empty in all rows",
            note="A ring begins so whose own block has no visible key; it is the identity of the merge.",
            values="first_empty",
        ),
        MergeVector(
            id="M007",
            title="rows that are empty in both",
            note="Out is 0 and lse −inf there, never NaN and not 0, and rows beside them are right.",
            values="all_empty",
        ),
        MergeVector(
            id="M008",
            title="five partials",
            note="One after another, from either end, or all at once: the same.",
            partials=5,
        ),
        MergeVector(
            id="M009",
            title="four partials, some empty",
            note="An empty one between others, and rows in which only one is not.",
            values="some_empty",
            partials=4,
        ),
        MergeVector(
            id="M010",
            title="bfloat16",
            note="Out in 16 bits, lse and weights in float32.",
            dtype="bfloat16",
            dim=8,
        ),
        MergeVector(
            id="M011",
            title="float16, log-sum-exps far apart",
            note="What float16 cannot hold stays in float32.",
            values="far",
            dtype="float16",
            dim=8,
        ),
        MergeVector(
            id="M012",
            title="float64, three partials",
            note="Nothing is rounded to float32 on the way.",
            dtype="float64",
            partials=3,
        ),
    )
}


def given(vector: MergeVector) -> Partials:
    """Make the inputs of a vector: whole numbers times powers of two, the same bits on every machine."""
    partials, tokens, heads, dim = vector.shape.values()
    rows, first = (partials, 1, heads, tokens), FIRST_SEED + 8 * int(vector.id[1:])
    bits = SIGNIFICANT[vector.dtype]
    out = bell(first, (partials, 1, tokens, heads, dim), bits)
    lse = bell(first + 1, rows, LSE_BITS)
    cotangent, lse_cotangent = bell(first + 2, (1, tokens, heads, dim), bits), bell(first + 3, rows[1:], LSE_BITS)
    number, empty = np.arange(lse.size).reshape(rows), np.zeros(rows, dtype=bool)
    match vector.values:
        case "near":
            pass
        case "equal":
            lse = np.broadcast_to(lse[:1], rows)
        case "far":
            lse = lse + FAR * (number % 3 - 1)
        case "large":
            lse = lse + FAR * (1 - 2 * (number[0] % 2))
        case "some_empty":
            empty = number % 3 == 0
        case "first_empty":
            empty[0] = True
        case "all_empty":
            empty[..., 1::2] = True
    lse = np.where(empty, -np.inf, lse)
    return Partials(np.where(empty.swapaxes(-1, -2)[..., None], 0.0, out), lse, lse, cotangent, lse_cotangent)


def answer(x: Partials) -> dict[str, Array]:
    """Merge in decimal arithmetic, and return the results by name: each row is attention over its partials.

    The score of a partial is its lse, so the gradient of that is the one of a key, for a query of 1 and a scale of 1.
    """
    count, dim = len(x.out), x.out.shape[-1]
    lse = x.natural.reshape(count, -1).T  # (rows, P)
    order = np.argsort(np.isneginf(lse), axis=1, kind="stable")  # empty ones last, as padding
    back, rows, some = np.argsort(order, axis=1), len(lse), np.isfinite(lse).sum(axis=1).tolist()
    k = np.take_along_axis(np.where(np.isneginf(lse), 0.0, lse), order, 1)[:, :, None, None]
    v = np.take_along_axis(x.out.swapaxes(2, 3).reshape(count, rows, dim).swapaxes(0, 1), order[..., None], 1)
    problem = Problem(
        batch=rows, query_length=1, key_length=count, key_lengths=tuple(some), head_dim=1, value_dim=dim, scale=1.0
    )  # fmt: skip
    cotangents = x.cotangent.swapaxes(1, 2).reshape(rows, 1, 1, dim), x.lse_cotangent.reshape(rows, 1, 1)
    out, total, _, dk, dv = attention_decimal.attention(
        problem, np.ones((rows, 1, 1, 1)), k, v[:, :, None], *cotangents
    )
    douts, dlse = (np.take_along_axis(one[:, :, 0], back[..., None], 1).swapaxes(0, 1) for one in (dv, dk))
    per_row = x.natural.shape[1:]
    return {
        "out": out.reshape(*per_row, dim).swapaxes(1, 2),
        "lse": total.reshape(per_row),
        "grad_out": douts.reshape(count, *per_row, dim).swapaxes(2, 3),
        "grad_lse": dlse.reshape(x.natural.shape),
    }


def entry(vector: MergeVector) -> dict[str, Any]:
    """Compute the entry of a vector."""
    x = given(vector)
    results, limits = (
        answer(x),
        right_merge(vector.case(x), MergeCapabilities(dtypes=(vector.dtype,)), gradients=True)[1],
    )
    return {
        **vector.described(),
        "inputs": {name: _written(values) for name, values in _inputs(x).items()},
        "results": {
            name: {"expected": _written(results[name]), "allowed": _written(_upwards(getattr(limits, field)))}
            for name, field in RESULTS.items()
        },
    }


def _whole(described: dict[str, Any]) -> dict[str, Any]:
    """Return an entry, if it is whole."""
    vector = of(described)
    there = {name: value for name, value in described.items() if name not in ("inputs", "results")}
    if vector.described() != there:
        raise ValueError(f"{vector.id} has other fields than its values and its shape")
    x = given(vector)
    wanted = [(name, described["inputs"][name], like) for name, like in _inputs(x).items()]
    for name, like in zip(RESULTS, (x.cotangent, x.lse_cotangent, x.out, x.lse), strict=True):
        wanted += [(name, described["results"][name][which], like) for which in ("expected", "allowed")]
    for name, numbers, like in wanted:
        if _read(numbers).shape != like.shape:
            raise ValueError(f"{vector.id} has numbers of another shape for {name}")
    return described


_FILE = sealed.SealedFile(NAME, ABOUT, entry, _whole)
text, read = _FILE.text, _FILE.read


def of(described: Mapping[str, Any]) -> MergeVector:
    """Return the description in an entry.

    Raises:
        ValueError: it describes no vector.
    """
    if ID.fullmatch(described["id"]) is None or described["values"] not in get_args(Values):
        raise ValueError(f"id={described['id']!r}, values={described['values']!r}")
    texts = {name: described[name] for name in ("id", "title", "note", "values", "dtype")}
    return MergeVector(**texts, **described["shape"])


def _inputs(x: Partials) -> dict[str, Array]:
    return dict(zip(INPUTS, (x.out, x.lse, x.cotangent, x.lse_cotangent), strict=True))


def golden_inputs(described: Mapping[str, Any]) -> Partials:
    """Return the inputs of an entry."""
    out, lse, cotangent, lse_cotangent = (_read(described["inputs"][name]) for name in INPUTS)
    return Partials(out, lse, lse, cotangent, lse_cotangent)


def golden_results(described: Mapping[str, Any]) -> dict[str, Array]:
    """Return the results of an entry, by their names in `Merged`."""
    return {field: _read(described["results"][name]["expected"]) for name, field in RESULTS.items()}


def answer_again(folder: Path, described: Mapping[str, Any]) -> None:
    """Compute an entry again: inputs and results bit for bit, and errors allowed within a step of their eight bits.

    Raises:
        UsageError: one of them differs.
    """
    made, where = entry(of(described)), f"{folder / NAME}, {described['id']}"
    for name in INPUTS:
        if made["inputs"][name] != described["inputs"][name]:
            raise UsageError(f"{where}: {name} is not what is made for this id; {sealed.again(folder)}")
    for name in RESULTS:
        there, found = described["results"][name], made["results"][name]
        if there["expected"] != found["expected"]:
            raise UsageError(f"{where}: {name} is not what the oracle gives; {sealed.again(folder)}")
        allowed, bound = _read(there["allowed"]), _read(found["allowed"])
        some = np.isfinite(bound)
        step = 2 * UNIT_ROUNDOFF["bfloat16"] * bound[some]  # a bound may lie on the edge of rounding up
        if (np.isfinite(allowed) != some).any() or (np.abs(allowed[some] - bound[some]) > step).any():
            raise UsageError(f"{where}: the error allowed in {name} is not what follows; {sealed.again(folder)}")


def _written(values: Array) -> Any:
    """Return numbers as JSON has them: infinite ones as text, "inf" or "-inf"."""
    if values.ndim:
        return [_written(one) for one in values]
    return float(values) if np.isfinite(values) else str(float(values))


def _read(numbers: Any) -> Array:
    return np.array(numbers, dtype=np.float64)


def _upwards(bound: Array) -> Array:
    """Round a bound up; where nothing is said of a number but that it is finite, it is infinite."""
    return np.where(np.isinf(bound), bound, upwards(np.where(np.isinf(bound), 0.0, bound)))
