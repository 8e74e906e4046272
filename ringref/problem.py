"""The problem as data: what to compute, without tensors and without ranks, validated on construction.

Shape letters used throughout: B batch, Nq queries, Nk keys, Hq query heads, Hk key heads, D head_dim, Dv value_dim.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
HeadMode = Literal["split", "shared"]
HeadOffset = Literal["cyclic", "block"]

DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)


@dataclasses.dataclass(frozen=True)
class Dilation:
    """Dilated attention: several branches, each letting through every r-th position of every segment of w positions.

    Position `p` lies in segment `p // w` at place `t = p % w`; a branch covers it in a head iff `t % r == offset`.
    The definition is LongNet's (Ding et al. 2023, arXiv:2307.02486, section 2.2), freed of divisibility.

    Attributes:
        branches: `(segment_length w, dilation_rate r)` of each branch, in positions; both at least 1.
        heads: "split": each head runs one branch; "shared": each head runs every branch and multiplicities add up.
        head_offset: "shared" only. Offset of head `h`: "cyclic" `h % r`, "block" `h // ceil(H / r)`.

    Raises:
        ValueError: a branch is not a pair of positive integers, or a name is unknown.
    """

    branches: tuple[tuple[int, int], ...]
    heads: HeadMode = "split"
    head_offset: HeadOffset = "cyclic"

    def __post_init__(self) -> None:
        if not isinstance(self.branches, Sequence) or isinstance(self.branches, str) or not self.branches:
            raise ValueError(
                f"dilation branches={self.branches!r}: expected at least one (segment_length, dilation_rate)"
            )
        branches = []
        for branch in self.branches:
            if not isinstance(branch, Sequence) or len(branch) != 2:
                raise ValueError(f"dilation branch {branch!r}: expected a pair (segment_length, dilation_rate)")
            branches.append(
                (_integer("segment_length", branch[0], minimum=1), _integer("dilation_rate", branch[1], minimum=1))
            )
        object.__setattr__(self, "branches", tuple(branches))
        _one_of("dilation heads", self.heads, get_args(HeadMode))
        _one_of("dilation head_offset", self.head_offset, get_args(HeadOffset))
        if self.heads == "split" and self.head_offset != "cyclic":
            raise ValueError(
                f'dilation head_offset={self.head_offset!r} has no meaning with heads="split", where the offset is '
                'that of the branch; use heads="shared" or leave head_offset out'
            )

    def to_json(self) -> dict[str, Any]:
        """The dilation as JSON values."""
        return {
            "branches": [list(branch) for branch in self.branches],
            "heads": self.heads,
            "head_offset": self.head_offset,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What to compute. Tensors are `q (B, Nq, Hq, D)`, `k (B, Nk, Hk, D)`, `v (B, Nk, Hk, Dv)`.

    Lengths may be zero. `None` leaves a constraint out; constraints given together multiply.

    Attributes:
        batch: B, at least 1.
        query_length: Nq, the number of query positions over all ranks.
        key_length: Nk; `None` means Nq.
        heads: Hq, at least 1.
        key_heads: Hk, which must divide Hq; query head `h` reads key head `h // (Hq // Hk)`. `None` means Hq.
        head_dim: D, at least 1.
        value_dim: Dv, at least 1; `None` means D.
        dtype: dtype of q, k, v and of the cotangent of out.
        causal: query i attends key j only if `j <= i + (Nk - Nq)`.
        window: `(left, right)`: only if `-left <= j - (i + Nk - Nq) <= right`; `None` on a side is unbounded.
        documents: cumulative lengths `cu_seqlens`, non-decreasing within [0, N]: only if i and j lie in the same
            document. Zero-length documents are legal. Positions before the first or after the last lie in none.
        key_lengths: one length per batch element: only if `j < key_lengths[b]`.
        dilation: how many branches let (head, i, j) through; see `Dilation`.
        scale: factor on `q.k`; `None` means `D ** -0.5`.
        softcap: c > 0 turns a score s into `c * tanh(s / c)`.
        sinks: a tensor `(Hq,)` of learned sinks comes with the inputs: a logit per query head, which joins the
            denominator of every row once and carries no value. No scale and no softcap changes it.

    Raises:
        ValueError: a value is out of range, or a combination has no agreed meaning.
    """

    batch: int = 1
    query_length: int
    key_length: int | None = None
    heads: int = 1
    key_heads: int | None = None
    head_dim: int = 8
    value_dim: int | None = None
    dtype: DtypeName = "float32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] | None = None
    key_lengths: tuple[int, ...] | None = None
    dilation: Dilation | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("batch", _integer("batch", self.batch, minimum=1))
        put("query_length", _integer("query_length", self.query_length, minimum=0))
        put("heads", _integer("heads", self.heads, minimum=1))
        put("head_dim", _integer("head_dim", self.head_dim, minimum=1))
        if self.key_length is not None:
            put("key_length", _integer("key_length", self.key_length, minimum=0))
        if self.key_heads is not None:
            put("key_heads", _integer("key_heads", self.key_heads, minimum=1))
        if self.value_dim is not None:
            put("value_dim", _integer("value_dim", self.value_dim, minimum=1))
        if self.heads % self.hk:
            raise ValueError(
                f"heads={self.heads}, key_heads={self.hk}: key_heads must divide heads (grouped-query attention)"
            )
        _one_of("dtype", self.dtype, DTYPES)
        for name in ("causal", "sinks"):
            if not isinstance(value := getattr(self, name), bool):
                raise ValueError(f"{name}={value!r}: expected True or False")
        put("window", _window(self.window))
        put("documents", _documents(self.documents, self.nq, self.nk))
        put("key_lengths", _key_lengths(self.key_lengths, self.batch, self.nk))
        if self.dilation is not None:
            if not isinstance(self.dilation, Dilation):
                raise ValueError(f"dilation={self.dilation!r}: expected ringref.Dilation(branches=((w, r), ...))")
            if self.documents is not None:
                raise ValueError(
                    "dilation with documents has no agreed meaning: segments could start at the document or at the "
                    "sequence; leave one of them out"
                )
            if self.nq != self.nk:
                raise ValueError(
                    f"dilation with query_length={self.nq} and key_length={self.nk} has no agreed meaning: "
                    "segments of queries and keys would not line up; use equal lengths"
                )
        if self.scale is not None:
            put("scale", _finite("scale", self.scale))
        if self.softcap is not None:
            put("softcap", _finite("softcap", self.softcap))
            if self.softcap <= 0:
                raise ValueError(f"softcap={self.softcap!r}: expected a positive number, or None for no softcap")

    @property
    def nq(self) -> int:
        """Nq, the number of queries."""
        return self.query_length

    @property
    def nk(self) -> int:
        """Nk, the number of keys."""
        return self.query_length if self.key_length is None else self.key_length

    @property
    def hk(self) -> int:
        """Hk, the number of key heads."""
        return self.heads if self.key_heads is None else self.key_heads

    @property
    def dv(self) -> int:
        """Dv, the value dimension."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def group_size(self) -> int:
        """Hq // Hk: how many query heads read one key head."""
        return self.heads // self.hk

    @property
    def scale_value(self) -> float:
        """The factor on q.k: `scale`, or `D ** -0.5`."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def lse_dtype(self) -> Literal["float64", "float32"]:
        """The dtype of lse and its cotangent, at the least: float64 for float64 inputs, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def diagonal(self) -> int:
        """Nk - Nq: query i is aligned with key `i + diagonal` (bottom-right alignment)."""
        return self.nk - self.nq

    def without_sinks(self, what: str) -> None:
        """Refuse a problem with learned sinks, for `what` knows none.

        Raises:
            ValueError: it has.
        """
        if self.sinks:
            raise ValueError(f"sinks=True: {what} has no learned sinks; ringref.attention has")

    def replace(self, **changes: Any) -> Problem:
        """Return a copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """The problem as JSON values; fields at their default are left out."""
        out: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, Dilation):
                value = value.to_json()
            elif isinstance(value, tuple):
                value = list(value)
            out[field.name] = value
        return out

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Problem:
        """Build the problem that `to_json` wrote.

        Raises:
            ValueError: a field is unknown, missing or out of range.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"problem={data!r}: expected an object")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ValueError(f"unknown field {unknown[0]!r} of a problem; known: {', '.join(sorted(known))}")
        if "query_length" not in data:
            raise ValueError("a problem needs query_length")
        values = dict(data)
        for name in ("window", "documents", "key_lengths"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        if (dilation := values.get("dilation")) is not None:
            if not isinstance(dilation, Mapping) or not set(dilation) <= {"branches", "heads", "head_offset"}:
                raise ValueError(f"dilation={dilation!r}: expected an object with branches, heads, head_offset")
            values["dilation"] = Dilation(**{"branches": (), **dilation})
        return cls(**values)


def _integer(name: str, value: Any, *, minimum: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = minimum - 1
    if isinstance(value, bool) or number < minimum:
        raise ValueError(f"{name}={value!r}: expected an integer of at least {minimum}")
    return number


def _sequence(value: Any) -> list[Any] | None:
    """The entries of a sequence, an array or a tensor; `None` if it is none of these."""
    listed = value.tolist() if hasattr(value, "tolist") else value
    return list(listed) if isinstance(listed, Sequence) and not isinstance(listed, str) else None


def _finite(name: str, value: Any) -> float:
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: expected a finite number")
    return float(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")


def _window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    sides = _sequence(window)
    if sides is None or len(sides) != 2:
        raise ValueError(f"window={window!r}: expected (left, right), each an integer of at least 0 or None")
    try:
        left, right = (None if side is None else _integer("side", side, minimum=0) for side in sides)
    except ValueError:
        raise ValueError(
            f"window={window!r}: each side is an integer of at least 0, both ends inclusive; None (not -1) is unbounded"
        ) from None
    return left, right


def _documents(documents: Any, nq: int, nk: int) -> tuple[int, ...] | None:
    if documents is None:
        return None
    if nq != nk:
        raise ValueError(
            f"documents with query_length={nq} and key_length={nk} has no agreed meaning: one list of cumulative "
            "lengths cannot cut two sequences; use equal lengths"
        )
    entries = _sequence(documents)
    if not entries:
        raise ValueError(f"documents={documents!r}: expected cumulative lengths such as (0, 3, 7)")
    offsets = tuple(_integer("documents entry", entry, minimum=0) for entry in entries)
    if any(a > b for a, b in pairwise(offsets)) or offsets[-1] > nq:
        raise ValueError(
            f"documents={offsets!r}: expected non-decreasing cumulative lengths of at most {nq}, the sequence length"
        )
    return offsets


def _key_lengths(key_lengths: Any, batch: int, nk: int) -> tuple[int, ...] | None:
    if key_lengths is None:
        return None
    entries = _sequence(key_lengths)
    if entries is None or len(entries) != batch:
        raise ValueError(f"key_lengths={key_lengths!r}: expected one length for each of {batch} batch elements")
    lengths = tuple(_integer("key_lengths entry", entry, minimum=0) for entry in entries)
    if any(length > nk for length in lengths):
        raise ValueError(f"key_lengths={lengths!r}: expected lengths of at most key_length={nk}")
    return lengths
