"""What must hold of a merge: the catalogue, and how one case is judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ringref.merge import Merged, merged
from ringref.problem import DtypeName
from ringref.rounding import MergeAllowed, Pipeline, margins, merge_allowed
from ringverify.cases.case import Memory
from ringverify.errors import UsageError, instead
from ringverify.merge_contract import LARGEST_LSE, MergeCapabilities
from ringverify.merging.case import EMPTY, LN2, MEMORY, Array, MergeCase, PartialValues, lse_dtype_of, partials_of
from ringverify.merging.running import Grouping, MergeResult, name_of_partial

LOW: tuple[DtypeName, ...] = ("bfloat16", "float16")
WIDE: tuple[DtypeName, ...] = ("float64", "float32", "float16", "bfloat16")
AXES = {
    "out": ("batch", "query", "head", "dim"),
    "lse": ("batch", "head", "query"),
    "dout": ("partial", "batch", "query", "head", "dim"),
    "dlse": ("partial", "batch", "head", "query"),
}
TITLES = {"out": "out", "lse": "lse", "dout": "the gradient of out", "dlse": "the gradient of lse"}


@dataclasses.dataclass(frozen=True)
class WrongElement:
    """The element with the largest margin.

    Attributes:
        tensor: out, lse, dout or dlse.
        index: its index, in the axes of `AXES`.
        margin: error over the error allowed.
        wrong: how many elements of the tensor are wrong.
        of: how many it has.
    """

    tensor: str
    index: tuple[int, ...]
    actual: float
    expected: float
    error: float
    allowed: float
    margin: float
    wrong: int
    of: int


@dataclasses.dataclass(frozen=True)
class MergeProperty:
    """One thing that must hold of a merge.

    Attributes:
        id: its name on the command line and in reports.
        meaning: what must hold, in a sentence.
        lacks: what a merge has to declare for it and does not, or `None`.
        values: kinds of log-sum-exps that are tried.
        tensors: results that are compared.
        others: further ways of merging the partials of a case, each to be compared with the first way rather than with
            the oracle; without any, the first way is compared with the oracle.
        low: whether it is tried in 16-bit dtypes rather than in the widest one.
        memory: layouts in memory that are tried.
        buffers: whether it is about which inputs are changed rather than about values.
        partials: most partials of a case that are merged two by two.
        examples: cases that the quick suite tries.
        told: what is said of a result that breaks it.
    """

    id: str
    meaning: str
    lacks: Callable[[MergeCapabilities], str | None]
    values: tuple[PartialValues, ...] = ("normal",)
    tensors: tuple[str, ...] = ("out", "lse")
    others: Callable[[MergeCase, MergeCapabilities], list[Grouping]] = lambda case, c: []
    low: bool = False
    memory: tuple[Memory, ...] = ("contiguous",)
    buffers: bool = False
    partials: int = 3
    examples: int = 60
    told: str = "is wrong"

    def most_partials(self, c: MergeCapabilities) -> int:
        """Return the most partials of a case: without lse, a result cannot be merged once more."""
        return 5 if c.stacked else self.partials if c.lse else 2

    def values_for(self, c: MergeCapabilities) -> tuple[PartialValues, ...]:
        """Return the kinds of log-sum-exps that are tried: none is empty where the merge meets no empty partial."""
        return tuple(one for one in self.values if c.empty is not None or one not in EMPTY)

    def dtypes(self, c: MergeCapabilities) -> tuple[DtypeName, ...]:
        """Return the dtypes that are tried: the widest one that is declared, or those of 16 bits."""
        if self.low:
            return tuple(one for one in c.dtypes if one in LOW)
        return (next(one for one in WIDE if one in c.dtypes),)

    @property
    def gradients(self) -> bool:
        """Whether gradients are compared."""
        return "dout" in self.tensors


def _always(c: MergeCapabilities) -> str | None:
    return None


def _empty(c: MergeCapabilities) -> str | None:
    return "empty=None is declared" if c.empty is None else None


def _returned_lse(c: MergeCapabilities) -> str | None:
    return None if c.lse else "lse=False is declared"


def _declared(name: str) -> Callable[[MergeCapabilities], str | None]:
    return lambda c: None if getattr(c, name) else f"{name}=True is not declared"


def _first(*reasons: Callable[[MergeCapabilities], str | None]) -> Callable[[MergeCapabilities], str | None]:
    return lambda c: next((found for one in reasons if (found := one(c)) is not None), None)


def in_order(case: MergeCase, c: MergeCapabilities) -> Grouping:
    """Return the ordinary way to merge: all at once if stacked, else one after another."""
    return tuple(range(case.partials)) if c.stacked else _one_by_one(range(case.partials))


def _one_by_one(numbers: Iterable[int]) -> Grouping:
    found: Grouping | None = None
    for number in numbers:
        found = number if found is None else (found, number)
    assert found is not None
    return found


def _reversed(case: MergeCase, c: MergeCapabilities) -> list[Grouping]:
    numbers = range(case.partials - 1, -1, -1)
    return [tuple(numbers) if c.stacked else _one_by_one(numbers)]


def _from_the_end(case: MergeCase, c: MergeCapabilities) -> list[Grouping]:
    found: Grouping = case.partials - 1
    for number in range(case.partials - 2, -1, -1):
        found = (number, found)
    return [found]


def _pairs(case: MergeCase, c: MergeCapabilities) -> list[Grouping]:
    return [_one_by_one(range(case.partials))]


PROPERTIES: dict[str, MergeProperty] = {
    one.id: one
    for one in (
        MergeProperty("merged_out", "out is the attention over the keys of all partials", _always, tensors=("out",)),
        MergeProperty("merged_lse", "lse is that of all partials", _returned_lse, tensors=("lse",)),
        MergeProperty("equal_lse", "partials of equal lse have equal weights", _always, ("equal",), examples=20),
        MergeProperty(
            "far_apart", "log-sum-exps 20,000 apart, or all near 10,000, do not overflow", _always, ("far", "large")
        ),
        MergeProperty(
            "empty_partial", "an empty partial, on either side, changes nothing", _empty, ("empty_rows", "empty_side")
        ),
        MergeProperty("all_empty", "empty partials alone give an empty one: out 0, never NaN", _empty, ("all_empty",)),
        MergeProperty(
            "order",
            "the order of the partials does not matter",
            _always,
            ("normal", "far"),
            others=_reversed,
            told="depends on the order of the partials",
        ),
        MergeProperty(
            "grouping",
            "what is merged first does not matter",
            _first(_returned_lse, lambda c: "stacked=True is declared, see n_way" if c.stacked else None),
            ("normal", "far", "empty_rows"),
            others=_from_the_end,
            told="depends on what is merged first",
            partials=4,
        ),
        MergeProperty(
            "n_way",
            "n partials at once give what two at a time give",
            _first(_declared("stacked"), _returned_lse),
            ("normal", "far", "empty_rows"),
            others=_pairs,
            told="of n at once is not that of two at a time",
        ),
        MergeProperty(
            "low_precision",
            "in bfloat16 and float16, out and lse are as exact as what accumulates allows",
            lambda c: None if set(c.dtypes) & set(LOW) else "no dtype of 16 bits is declared",
            ("normal", "far", "equal"),
            low=True,
        ),
        MergeProperty(
            "nan_seen", "NaN in a partial is seen in its row of the result, and in no other", _declared("nan"), ("nan",)
        ),
        MergeProperty(
            "gradients",
            "gradients through out and lse reach out and lse of every partial",
            _declared("gradients"),
            ("normal", "far", "equal"),
            ("dout", "dlse"),
        ),
        MergeProperty(
            "empty_gradients",
            "gradients are finite where partials are empty, and 0 in those",
            _first(_declared("gradients"), _empty),
            EMPTY,
            ("dout", "dlse"),
        ),
        MergeProperty(
            "inputs_untouched",
            "no input is changed; in place, none but the first partial",
            _always,
            ("normal", "far"),
            buffers=True,
            memory=("contiguous", *MEMORY),
            examples=20,
        ),
        MergeProperty(
            "strided_inputs", "layouts in memory do not matter", _declared("strided"), memory=MEMORY, examples=30
        ),
    )
}
"""In the order in which they are checked and reported."""

ANY_RESULT = MergeProperty("any_result", "every result is right", _always)
"""What golden vectors hold a merge to; no property by itself."""


def select_merge(only: Iterable[str] | None, skip: Iterable[str]) -> list[MergeProperty]:
    """Return the properties named by `only` (all, if `None`) without those named by `skip`.

    Raises:
        UsageError: a name is unknown, or nothing is left.
    """
    skipped = set(skip)
    asked = set(PROPERTIES if only is None else only)
    for name in sorted(asked | skipped):
        if name not in PROPERTIES:
            raise UsageError(f"unknown property {name!r} of a merge{instead(name, PROPERTIES)}")
    chosen = [one for name, one in PROPERTIES.items() if name in asked - skipped]
    if not chosen:
        raise UsageError("no property is left to check: --skip names all that are selected; remove a name from --skip")
    return chosen


def right_merge(case: MergeCase, c: MergeCapabilities, *, gradients: bool) -> tuple[Merged, MergeAllowed]:
    """Return the oracle's answer to a case, and the error allowed in it."""
    x = partials_of(case, c)
    dout: Array | None = None
    dlse: Array | None = None
    if gradients:
        # The cotangent of an lse in base 2 belongs to lse / ln 2.
        dout, dlse = x.cotangent, (x.lse_cotangent if c.base == "e" else x.lse_cotangent / LN2) * c.lse
    exact = merged(x.out, x.natural, dout, dlse)
    pipeline = Pipeline(
        c.out_dtype if c.out_dtype in LOW else case.dtype,
        accumulates=c.accumulates,
        lse_dtype=lse_dtype_of(case, c),
        blocks=case.partials,
    )
    natural = c.base == "e"
    limits = merge_allowed(x.out, x.natural, exact, pipeline, natural=natural, cotangent=dout, lse_cotangent=dlse)
    return exact, limits


def result_named(result: MergeResult, name: str, case: MergeCase, c: MergeCapabilities) -> Array | None:
    """Return one result; lse with −inf where all partials are empty, and the result is marked as empty too.

    −inf is such a mark whatever is declared, and so is a number below all that ordinary partials have, if the declared
    mark is a number.
    """
    found: Array | None = getattr(result, name)
    if name == "lse" and found is not None and c.empty is not None:
        marked = found < -LARGEST_LSE if np.isfinite(c.empty) else found == c.empty
        found = np.where(partials_of(case, c).empty & marked, -np.inf, found)
    return found


def compared(
    case: MergeCase,
    c: MergeCapabilities,
    names: Sequence[str],
    results: Sequence[MergeResult],
    right: tuple[Merged, MergeAllowed] | None = None,
) -> tuple[float, WrongElement | None]:
    """Compare the first of several results with what is right, or if there are two, the second with the first.

    What is right, and the error allowed, is the oracle's answer unless it is given.

    Returns:
        the largest margin, and its element if the margin is above 1.
    """
    exact, limits = right or right_merge(case, c, gradients="dout" in names)
    largest, found = 0.0, None
    for name in names:
        actual = result_named(results[-1], name, case, c)
        if actual is None:
            continue
        allowed: Array = getattr(limits, name)
        expected: Array = getattr(exact, name)
        if len(results) > 1:
            first = result_named(results[0], name, case, c)
            assert first is not None
            # What is NaN or overflows is for other properties to say: here it is only the same or not.
            said = np.isnan(first) | np.isnan(actual) | np.isposinf(first) | np.isposinf(actual)
            expected, allowed, actual = np.where(said, 0.0, first), 2 * allowed, np.where(said, 0.0, actual)
        dtype = lse_dtype_of(case, c) if name in ("lse", "dlse") else case.dtype
        margin = margins_with_nan(actual, expected, allowed, dtype)
        top = float(margin.max(initial=0.0))
        if top <= largest:
            continue
        largest = top
        index = tuple(int(i) for i in np.unravel_index(int(margin.argmax()), margin.shape))
        with np.errstate(invalid="ignore"):
            error = float(np.abs(actual[index] - expected[index]))
        wrong = int((margin > 1).sum())
        found = WrongElement(
            name,
            index,
            float(actual[index]),
            float(expected[index]),
            error,
            float(allowed[index]),
            top,
            wrong,
            margin.size,
        )
    return largest, found if largest > 1 else None


def margins_with_nan(actual: Array, expected: Array, allowed: Array, dtype: DtypeName) -> Array:
    """Return errors over errors allowed; 0 where both are NaN, inf where only one is or where a number is missing."""
    both, one = np.isnan(actual) & np.isnan(expected), np.isnan(actual) ^ np.isnan(expected)
    limits = np.where(np.isnan(allowed), 0.0, allowed)
    found: Array = np.where(
        both, 0.0, margins(np.where(both, 0.0, actual), np.where(both, 0.0, expected), limits, dtype)
    )
    return np.where(one | (np.isposinf(limits) & ~np.isfinite(actual) & ~both), np.inf, found)


def element_named(wrong: WrongElement, case: MergeCase) -> str:
    """Name an element: its tensor, its index by axis, and the partial that a gradient belongs to."""
    axes, index = AXES[wrong.tensor], wrong.index
    title = TITLES[wrong.tensor]
    if axes[0] == "partial":
        title += f"_{name_of_partial(index[0], case.partials)}" if case.partials == 2 else f" of partial {index[0]}"
        axes, index = axes[1:], index[1:]
    return f"{title}[{', '.join(f'{axis} {place}' for axis, place in zip(axes, index, strict=True))}]"
