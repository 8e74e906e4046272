"""The contract of a merge: what a function that merges partial results of attention declares.

A partial is the attention of some queries over some of the keys: out, and lse, the log of its sum of exponentials.
Merged partials are the attention over all of their keys. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

from ringref.problem import DTYPES, DtypeName
from ringverify.implementation import FROM_FILE

Base = Literal["e", 2]
"""Base of the logarithm and of the exponentials in lse."""
LARGEST_FLOAT16 = 65504.0


class AxisOrder(NamedTuple):
    """A layout in words that code can use.

    Attributes:
        axes: the order of its axes as letters of "bshd", "t" written as "s".
        ends_in_one: whether an axis of length 1 follows.
    """

    axes: str
    ends_in_one: bool

    @property
    def batched(self) -> bool:
        """Whether it has an axis of the batch."""
        return "b" in self.axes


def layout_of(name: str) -> AxisOrder:
    """Read a layout: letters for its axes, and perhaps a "1" at the end."""
    return AxisOrder(name.removesuffix("1").replace("t", "s"), name.endswith("1"))


def _declared(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclasses.dataclass(frozen=True, kw_only=True)
class MergeCapabilities:
    """What a merge declares. Nothing but this table decides which cases are drawn.

    Raises:
        ValueError: a field has an impossible value, or two contradict one another.
    """

    out_layout: str = _declared("bshd", "order of the axes of out: b batch, s or t tokens, h heads, d; b may be absent")
    lse_layout: str = _declared("bhs", 'order of the axes of lse, without d; a "1" at the end is an axis of length 1')
    dtypes: tuple[DtypeName, ...] = _declared(("float32",), "of out: float64, float32, bfloat16, float16")
    lse_dtype: DtypeName = _declared("float32", "dtype of lse; float64 where out is")
    out_dtype: DtypeName | None = _declared(None, "dtype in which out comes back; None is that of the partials")
    base: Base = _declared("e", 'base of the logarithm in lse, "e" or 2')
    empty: float | None = _declared(
        -math.inf, "lse of a partial without keys, such as -inf, inf or -1e10; None if it never meets one"
    )
    stacked: bool = _declared(False, "merge(out, lse) of n partials, stacked along a new first axis")
    lse: bool = _declared(True, "returns (out, lse), not out alone")
    in_place: bool = _declared(False, "writes into the first partial, and returns that or None")
    gradients: bool = _declared(False, "differentiable in out and lse of every partial")
    nan: bool = _declared(False, "NaN of a partial stays seen, and stays in its row")
    strided: bool = _declared(True, "takes partials that are not contiguous")
    accumulates: DtypeName = _declared("float32", "dtype of weights and sums, for partials no wider than it")
    devices: tuple[str, ...] = _declared(("cpu",), "devices that it runs on")
    head_dims: tuple[int, ...] | None = _declared(None, "needs one of these head dimensions; None is any")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ValueError(f"{field.name}={value!r}: expected True or False")
        self._layouts()
        self._one_of("lse_dtype", DTYPES)
        self._one_of("out_dtype", (None, *DTYPES))
        self._one_of("accumulates", DTYPES)
        self._one_of("base", get_args(Base))
        self._several("dtypes", "dtypes", lambda one: one in DTYPES, ", ".join(DTYPES))
        self._several("devices", "names of devices", lambda one: isinstance(one, str), "names of devices")
        if self.head_dims is not None:
            self._several(
                "head_dims", "positive integers", lambda one: type(one) is int and one > 0, "positive integers"
            )
        self._empty()
        if self.in_place and self.gradients:
            raise ValueError("in_place=True contradicts gradients=True: autograd refuses to write into its own inputs")
        if self.in_place and self.stacked:
            raise ValueError(
                "in_place=True contradicts stacked=True: the result has no axis of partials to be put into"
            )
        if self.in_place and self.out_dtype is not None and set(self.dtypes) != {self.out_dtype}:
            raise ValueError(
                f"in_place=True contradicts out_dtype={self.out_dtype!r}: what is written into keeps the dtype it has"
            )

    def _layouts(self) -> None:
        for name, letters, example in (("out_layout", "shd", "bshd, bhsd or thd"), ("lse_layout", "sh", "bhs or th1")):
            value = getattr(self, name)
            axes = layout_of(value).axes if isinstance(value, str) else ""
            ends = isinstance(value, str) and value.endswith("1") and name == "out_layout"
            if ends or sorted(axes) not in (sorted(letters), sorted(f"b{letters}")):
                raise ValueError(f"{name}={value!r}: expected the order of axes, such as {example}")
        if layout_of(self.out_layout).batched != layout_of(self.lse_layout).batched:
            raise ValueError(
                f"lse_layout={self.lse_layout!r} contradicts out_layout={self.out_layout!r}: one has a batch axis"
            )

    def _empty(self) -> None:
        value = self.empty
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
            raise ValueError(
                f"empty={value!r}: expected a number, such as -inf, or None if it never meets an empty one"
            )
        if math.isfinite(value) and value > -LARGEST_LSE:
            raise ValueError(
                f"empty={value!r}: lse of ordinary partials comes near it, so it cannot mark an empty one; expected "
                f"-inf, inf, or less than {-LARGEST_LSE:g}"
            )
        if self.lse_dtype == "float16" and LARGEST_FLOAT16 < abs(value) < math.inf:
            raise ValueError(f"empty={value!r} contradicts lse_dtype='float16', whose largest number is 65504")

    def _one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        if (value := getattr(self, name)) not in allowed:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, allowed))}")

    def _several(self, name: str, of: str, right: Callable[[Any], bool], expected: str) -> None:
        values = getattr(self, name)
        if isinstance(values, str) or not isinstance(values, (tuple, list, set, frozenset)) or not values:
            raise ValueError(f"{name}={values!r}: expected a tuple of {of}")
        for value in values:
            if not right(value):
                raise ValueError(f"{name} contains {value!r}: expected {expected}")
        object.__setattr__(self, name, tuple(values))


LARGEST_LSE = 3e4
"""Sizes of the log-sum-exps of ordinary partials in cases stay below this."""


@dataclasses.dataclass(frozen=True)
class MergeImplementation:
    """A merge under test, with what it declares.

    Attributes:
        function: `merge(out_a, lse_a, out_b, lse_b)`, or `merge(out, lse)` if it declares stacked; returns
            `(out, lse)`, or out if it declares `lse=False`.
        name: its name in reports.
        capabilities: what it declares.
    """

    function: Callable[..., Any]
    name: str
    capabilities: MergeCapabilities

    def __call__(self, *partials: Any) -> Any:
        """Call the function, so that the decorated name can still be called."""
        return self.function(*partials)


def merge(
    *bare: Any, name: str | None = None, **capabilities: Any
) -> Callable[[Callable[..., Any]], MergeImplementation]:
    """Declare a function as a merge of partial results of attention.

    Args:
        *bare: none; it is here to be refused where the parentheses were forgotten.
        name: its name in reports; by default the function's dotted name.
        **capabilities: the fields of `MergeCapabilities`.

    Raises:
        TypeError: an unknown capability, or a function that cannot be called as a merge.
        ValueError: a capability has an impossible value, or two contradict one another.
    """
    if bare:
        raise TypeError("@merge without parentheses: write @merge(), or declare what it supports")
    known = [field.name for field in dataclasses.fields(MergeCapabilities)]
    if unknown := sorted(set(capabilities) - set(known)):
        raise TypeError(f"unknown capability {unknown[0]!r} of a merge; known: {', '.join(known)}")
    declared = MergeCapabilities(**capabilities)

    def declare(function: Callable[..., Any]) -> MergeImplementation:
        dotted = f"{FROM_FILE.sub('', function.__module__)}.{function.__qualname__}"
        forms = (("out_a", "lse_a", "out_b", "lse_b"), ("out", "lse"))
        call, other = reversed(forms) if declared.stacked else forms
        if refused := _refused(function, call):
            hint = "" if _refused(function, other) else f"; merge({', '.join(other)}) is stacked={not declared.stacked}"
            raise TypeError(
                f"{dotted}{inspect.signature(function)} cannot be called as merge({', '.join(call)}): {refused}{hint}"
            )
        return MergeImplementation(function, name or dotted, declared)

    return declare


def _refused(function: Callable[..., Any], call: tuple[str, ...]) -> TypeError | None:
    """Return why a function cannot be called with so many arguments."""
    try:
        inspect.signature(function).bind(*call)
    except TypeError as error:
        return error
    return None
