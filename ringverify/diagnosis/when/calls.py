"""How a function has to be called in order to fail: under which mode of autograd, and with which gradients."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

from ringverify.cases.running import GradMode

WAYS: tuple[tuple[GradMode, str], ...] = (
    ("no_grad", ""),
    ("inference_mode", ""),
    *(("enable_grad", some) for some in ("q", "k", "v", "qk", "qv", "kv", "qkv")),
)
"""Modes of autograd, and which of q, k and v require gradients: a training step is last."""


def how_it_is_called(fails: Callable[[GradMode, str], bool | None]) -> str | None:
    """Say in the fewest words which calls fail, of a case that does not in a training step.

    Args:
        fails: whether a call fails in this way; `None` if it returns nothing that may be wrong.

    Returns:
        what it takes, to follow "needs"; `None` if no words hold of all calls that fail and of no other.
    """
    known = {way: failed for way in WAYS if (failed := fails(*way)) is not None}
    return next((text for text, holds in _words() if all(holds(*way) == known[way] for way in known)), None)


def _words() -> Iterator[tuple[str, Callable[[GradMode, str], bool]]]:
    yield "torch.no_grad or torch.inference_mode", lambda mode, some: not some
    for one in ("no_grad", "inference_mode"):
        yield f"torch.{one}", functools.partial(lambda one, mode, some: mode == one, one)
    for x in "qkv":
        yield f"{x} that requires no gradient", functools.partial(_lacks, x)
    yield "an input that requires no gradient", lambda mode, some: 0 < len(some) < 3
    yield "a call that is no training step", lambda mode, some: some != "qkv"
    for x in "qkv":
        yield f"{x} that requires no gradient, whether or not others do", functools.partial(_lacks_or_all_do, x)
    for x, y in itertools.permutations("qkv", 2):
        yield f"{x} that requires a gradient, and {y} that requires none", functools.partial(_has_and_lacks, x, y)
    for some in ("q", "k", "v", "qk", "qv", "kv"):
        how = "requires" if len(some) == 1 else "require"
        yield f"a call where only {' and '.join(some)} {how} gradients", functools.partial(_are, some)


def _lacks(x: str, mode: GradMode, some: str) -> bool:
    return bool(some) and x not in some


def _lacks_or_all_do(x: str, mode: GradMode, some: str) -> bool:
    return x not in some


def _has_and_lacks(x: str, y: str, mode: GradMode, some: str) -> bool:
    return x in some and y not in some


def _are(those: str, mode: GradMode, some: str) -> bool:
    return some == those
