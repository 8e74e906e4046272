"""Suggest a declaration to an implementation that refuses a shape, or fails a claim that it need not make.

The text of an exception is not interpreted: the smallest failing case is run again with one thing changed. If it passes
then, the capability that restricts the suite to such cases is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.shapes import fitted
from ringverify.implementation import Capabilities

DIMS = (8, 16, 32, 64, 128, 256)
"""Head dimensions that kernels commonly support."""
LENGTHS = (2, 4, 8, 16, 32, 64, 128)
"""Block lengths that kernels commonly need a rank's shard to be a multiple of."""


def suggested(case: Case, c: Capabilities, passes: Callable[[Case], bool], *, refused: bool) -> str | None:
    """Return what to declare so that cases like this one are not drawn; `None` if no change tried lets it pass.

    Args:
        case: the failing case.
        c: what is declared.
        passes: runs another case, and says whether the same property holds on it.
        refused: whether the case fails because a rank raised or returned a shape, which an unsupported shape may cause.
    """
    if refused:
        for name, value, other in _shaped(case, c):
            if passes(other):
                if name in ("head_dims", "value_dims"):
                    value = tuple(dim for dim in DIMS if dim >= value[0] and passes(_with(case, c, name, (dim,))))
                said = f'"{value}"' if isinstance(value, str) else value
                passed = f"The case passes with {_told(case, other)}"
                return f"{passed}. If your implementation requires this, declare {name}={said}"
    scale = case.problem.scale
    if scale is not None and scale < 0 and passes(other := case.replace(scale=-scale)):
        return (
            f"The case passes with {_told(case, other)}. Negative scales are tested only because negative_scale=True "
            "is declared: remove it if they are not supported"
        )
    if case.values == "poisoned_skips" and passes(case.replace(values="poisoned")):
        return (
            "The case passes if skipped keys hold ordinary numbers. They are NaN only because poison_safe=True is "
            "declared: remove it if that is not supported"
        )
    return None


def _shaped(case: Case, c: Capabilities) -> Iterator[tuple[str, Any, Case]]:
    """Yield each undeclared shape requirement with a value, and the case adapted to it, the likeliest first."""
    wished: list[tuple[str, Any]] = [("heads_multiple", "world_size"), ("key_heads_multiple", "world_size")]
    wished += [("head_dims", (dim,)) for dim in DIMS]
    wished += [("value_dims", (dim,)) for dim in DIMS if c.value_dim]
    wished += [("length_multiple", length) for length in LENGTHS if not c.uneven]
    for name, value in wished:
        if getattr(c, name) is None:
            other = _with(case, c, name, value)
            if other != case and why_unsupported(other, c) is None:
                yield name, value, other


def _with(case: Case, c: Capabilities, name: str, value: Any) -> Case:
    return fitted(case, dataclasses.replace(c, **{name: value}))


def _told(case: Case, other: Case) -> str:
    """Return how the shapes and scale of the second case differ, as `name=value`."""
    p, q = case.problem, other.problem
    names = {"hk": "key_heads", "dv": "value_dim", "nq": "n"}
    implied = {"hk"} if q.hk == q.heads else set()
    implied |= {"dv"} if q.dv == q.head_dim else set()
    return " and ".join(
        f"{names.get(name, name)}={getattr(q, name)}"
        for name in ("heads", "hk", "head_dim", "dv", "nq", "scale")
        if getattr(p, name) != getattr(q, name) and name not in implied
    )
