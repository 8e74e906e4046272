"""One example of a merge as data, and its partials: numbers that a merge of given capabilities can be given exactly."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.problem import DtypeName
from ringverify.cases.case import Memory
from ringverify.cases.inputs import DTYPE
from ringverify.events import RecordedMerge
from ringverify.merge_contract import MergeCapabilities

Array = NDArray[np.float64]

PartialValues = Literal["normal", "equal", "far", "large", "empty_rows", "empty_side", "all_empty", "nan"]
"""Log-sum-exps of partials: a few apart; equal; up to 2e4 apart; all near 1e4 or −1e4; one partial empty in some rows,
or in all; all partials empty in some rows; NaN in a row of one partial, in its lse or in its out."""
EMPTY: tuple[PartialValues, ...] = ("empty_rows", "empty_side", "all_empty")
FAR = 1e4
MEMORY: tuple[Memory, ...] = ("transposed", "strided", "offset", "packed")
LN2 = math.log(2.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeCase:
    """One example: shapes, dtype, kind of values, and the seed of the numbers.

    Attributes:
        partials: how many are merged.
        batch: 1 where the layout has no batch.
        tokens: number of queries.
        heads: number of query heads.
        dim: value_dim.
        dtype: of out.
        values: kind of log-sum-exps.
        memory: layout of the partials in memory.
        seed: of the numbers.
        given: the numbers themselves, in base e and with −inf for an empty partial; `None` draws them.
    """

    partials: int = 2
    batch: int = 1
    tokens: int = 1
    heads: int = 1
    dim: int = 1
    dtype: DtypeName = "float32"
    values: PartialValues = "normal"
    memory: Memory = "contiguous"
    seed: int = 0
    given: Partials | None = None

    def describe(self) -> str:
        """Describe it in a line."""
        return (
            f"{self.partials} partials batch={self.batch} tokens={self.tokens} heads={self.heads} dim={self.dim} "
            f"{self.dtype} values={self.values} memory={self.memory} seed={self.seed}"
        )

    def recorded(self) -> RecordedMerge:
        """Return it in the form that events have."""
        return RecordedMerge(**{field.name: getattr(self, field.name) for field in dataclasses.fields(RecordedMerge)})


def simpler(case: MergeCase, capabilities: MergeCapabilities) -> Iterator[MergeCase]:
    """Yield cases that are simpler by one field, the greatest simplification first."""
    sizes = {"partials": 2, "batch": 1, "tokens": 1, "heads": 1, "dim": 1}
    for name, least in sizes.items():
        value: int = getattr(case, name)
        of_dim = capabilities.head_dims if name == "dim" else None
        for smaller in sorted({least, value // 2, value - 1}) if of_dim is None else sorted(of_dim):
            if least <= smaller < value:
                change: dict[str, Any] = {name: smaller}
                yield dataclasses.replace(case, **change)
    for seed in range(min(case.seed, 4)):
        yield dataclasses.replace(case, seed=seed)


@dataclasses.dataclass(frozen=True, eq=False)
class Partials:
    """The partials of a case, and cotangents of their merge: float64 values of the numbers that a merge is given.

    Attributes:
        out: `(P, B, S, H, D)`.
        lse: `(P, B, H, S)` as declared: in its base, with its mark of an empty partial.
        natural: lse in base e, −inf for an empty partial, however it is marked.
        cotangent: of the merged out `(B, S, H, D)`.
        lse_cotangent: of the merged lse as declared `(B, H, S)`.
    """

    out: Array
    lse: Array
    natural: Array
    cotangent: Array
    lse_cotangent: Array

    @property
    def empty(self) -> NDArray[np.bool_]:
        """Rows that are empty in all partials `(B, H, S)`."""
        found: NDArray[np.bool_] = (self.out == 0).all(axis=(0, -1)).swapaxes(-1, -2)
        return found


def lse_dtype_of(case: MergeCase, capabilities: MergeCapabilities) -> DtypeName:
    """Return the dtype of lse: the declared one, and float64 where out is float64."""
    return "float64" if case.dtype == "float64" else capabilities.lse_dtype


def partials_of(case: MergeCase, capabilities: MergeCapabilities) -> Partials:
    """Return the numbers of a case: those that it is given, or drawn."""
    if case.given is not None:
        mark = -math.inf if capabilities.empty is None else capabilities.empty
        return dataclasses.replace(case.given, lse=np.where(np.isneginf(case.given.natural), mark, case.given.natural))
    draw = np.random.default_rng(case.seed)
    rows = (case.partials, case.batch, case.heads, case.tokens)
    lse = 2.0 * draw.standard_normal(rows)
    out = draw.standard_normal((case.partials, case.batch, case.tokens, case.heads, case.dim))
    out += np.where(np.abs(out) < 0.5, np.sign(out) + (out == 0), 0.0)  # so that no ordinary out is 0, nor rounds to it
    chosen = draw.random(rows[1:]) < 0.5
    one = int(draw.integers(case.partials))
    chosen.flat[int(draw.integers(chosen.size))] = True  # at least one row
    empty = np.zeros(rows, dtype=bool)
    match case.values:
        case "equal":
            lse = np.broadcast_to(lse[:1], rows).copy()
        case "far":
            lse += FAR * draw.choice([-1.0, 0.0, 1.0], rows)
            lse[one][chosen] = FAR * draw.choice([-1.0, 1.0])
        case "large":
            lse += FAR * draw.choice([-1.0, 1.0], rows[1:])
        case "empty_rows":
            empty[one] = chosen
        case "empty_side":
            empty[one] = True
        case "all_empty":
            empty[:, chosen] = True
        case "nan":
            for row in np.argwhere(chosen):
                b, h, s = row
                if draw.random() < 0.5:
                    lse[one, b, h, s] = np.nan
                else:
                    out[one, b, s, h, int(draw.integers(case.dim))] = np.nan
        case "normal":
            pass
    natural = capabilities.base == "e"
    told = rounded(lse if natural else lse / LN2, lse_dtype_of(case, capabilities))
    mark = -math.inf if capabilities.empty is None else capabilities.empty
    told = np.where(empty, rounded(np.array(mark), lse_dtype_of(case, capabilities)), told)
    out = np.where(empty.swapaxes(-1, -2)[..., None], 0.0, out)
    in_base_e = told if natural else told * LN2
    return Partials(
        rounded(out, case.dtype),
        told,
        np.where(empty, -np.inf, in_base_e),
        rounded(draw.standard_normal(out.shape[1:]), case.dtype),
        rounded(draw.standard_normal(rows[1:]), lse_dtype_of(case, capabilities)),
    )


def rounded(values: Array, dtype: DtypeName) -> Array:
    """Round values to a dtype."""
    found: Array = torch.from_numpy(np.ascontiguousarray(values)).to(DTYPE[dtype]).to(torch.float64).numpy()
    return found
