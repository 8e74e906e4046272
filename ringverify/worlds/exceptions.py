"""What an exception of a user's says of itself, whatever its class does when it is asked.

Its `__str__`, its `__class__`, its `args` are the user's code: they may raise, exit, or return what is no text. Nothing
here does. Importing this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

UNPRINTABLE = "(which cannot be printed)"
"""Stands for the text of an exception that has none to give."""


def name_of(error: BaseException) -> str:
    """Name of an exception's type."""
    name: str = type.__dict__["__name__"].__get__(type(error))  # past a metaclass that has another one
    return name


def text_of(error: BaseException) -> str | None:
    """What an exception says, or `None` if its class does not let it."""
    return _text(lambda: str(error))


def one_line(error: BaseException) -> str:
    """An exception's type and the first line of its text."""
    name, text = name_of(error), text_of(error)
    if text is None:
        return f"{name} {UNPRINTABLE}"
    lines = text.strip().splitlines()
    return f"{name}: {lines[0]}" if lines else name


def exit_call(error: SystemExit) -> str:
    """The call that raised it, as far as its code can be shown."""
    code = _text(lambda: "" if error.code is None else repr(error.code))
    return f"sys.exit({'…' if code is None else code})"


def trace_of(error: BaseException) -> TracebackType | None:
    """Where an exception was raised."""
    trace: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    return trace


def _text(ask: Callable[[], str]) -> str | None:
    try:
        return str.__str__(ask())  # a plain one, also of a subclass
    except BaseException:  # `__str__` may call sys.exit
        return None
