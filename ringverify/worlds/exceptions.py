"""Name, text and traceback of an exception whose class is the user's code.

The `__str__`, `__class__` or `args` of such a class may raise, exit, or return something that is not text. The
functions here return in any case. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

UNPRINTABLE = "(its text cannot be read: __str__ fails)"
"""Replaces the text of an exception whose `__str__` raises or does not return a string."""


def name_of(error: BaseException) -> str:
    """Name of an exception's type."""
    name: str = type.__dict__["__name__"].__get__(type(error))  # past a metaclass that has another one
    return name


def text_of(error: BaseException) -> str | None:
    """Return `str(error)`, or `None` if that raises or is not a string."""
    return _text(lambda: str(error))


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of its text."""
    name, text = name_of(error), text_of(error)
    if text is None:
        return f"{name} {UNPRINTABLE}"
    lines = text.strip().splitlines()
    return f"{name}: {lines[0]}" if lines else name


def exit_call(error: SystemExit) -> str:
    """Return the `sys.exit` call that raises this exception, with an ellipsis for a code that cannot be printed."""
    code = _text(lambda: "" if error.code is None else repr(error.code))
    return f"sys.exit({'…' if code is None else code})"


def trace_of(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback, past any `__traceback__` that its class defines."""
    trace: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    return trace


def _text(ask: Callable[[], str]) -> str | None:
    try:
        return str.__str__(ask())  # a plain `str`, also of a subclass
    except BaseException:  # `__str__` may call sys.exit
        return None
