"""Stacks and tracebacks that show the user's own frames, and none of the world that runs them."""

from __future__ import annotations

import functools
import importlib.util
import os
import threading
import traceback
from types import FrameType
from typing import Literal, NamedTuple

from ringverify.words import TEXT, cut
from ringverify.worlds.exceptions import one_line, trace_of

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PACKAGE = os.path.dirname(_HERE.rstrip(os.sep)) + os.sep
_RING = os.path.join(_PACKAGE, "ring") + os.sep
_FOUND = importlib.util.find_spec("torch")
_TORCH = os.path.dirname(_FOUND.origin if _FOUND and _FOUND.origin else "no torch is here/") + os.sep
_AUTOGRAD = os.path.join(_TORCH, "autograd") + os.sep
_THREADING = os.path.abspath(threading.__file__)


def frames_of_user(frame: FrameType | None) -> list[str]:
    """Return a running frame's stack as lines `file:line in function`, outermost first.

    Frames of worlds and of threads are left out, and so are those of torch, unless there are no others.
    """
    stack = [entry for entry in traceback.extract_stack(frame) if not _ours(entry.filename)] if frame else []
    shown = [entry for entry in stack if not entry.filename.startswith(_TORCH)] or stack
    return [f"{entry.filename}:{entry.lineno} in {entry.name}" for entry in shown]


class UserLine(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def short(self) -> str:
        """The file's base name and the line."""
        return f"{os.path.basename(self.file)}:{self.line}"


NOWHERE = UserLine("a place without a Python stack", 0, "?")


def place_of_user(frame: FrameType | None) -> UserLine:
    """Return the innermost line of a running frame's stack that is neither in a world nor in torch."""
    while frame is not None and whose_file(frame.f_code.co_filename) != "user":
        frame = frame.f_back
    return _place(frame)


def place_of_caller(frame: FrameType | None) -> UserLine | None:
    """Return the innermost line that is not in torch, or `None` if that line is in a world."""
    whose = "torch"
    while frame is not None:
        whose = whose_file(frame.f_code.co_filename)
        if whose != "torch":
            break
        frame = frame.f_back
    return _place(frame) if whose == "user" else None


def traceback_of_user(error: BaseException) -> str:
    """Format a traceback and its chained causes without frames of worlds or threads; cut it if it is too long.

    For an exception whose text or causes cannot be read, return its frames and its type.
    """
    try:
        return _with_causes(error)
    except BaseException:  # the exception's class computes its attributes, and that fails
        frames = [frame for frame in traceback.extract_tb(trace_of(error)) if not _ours(frame.filename)]
        return "".join(["Traceback (most recent call last):\n", *traceback.format_list(frames), one_line(error)])


def _with_causes(error: BaseException) -> str:
    summary = traceback.TracebackException.from_exception(error)
    pending: list[traceback.TracebackException | None] = [summary]
    while pending:
        entry = pending.pop()
        if entry is not None:
            entry.stack[:] = [frame for frame in entry.stack if not _ours(frame.filename)]
            pending += [entry.__cause__, entry.__context__]
    return cut("".join(summary.format()).rstrip(), TEXT)


def line_of_user(error: BaseException) -> str | None:
    """Say at which line of the user's an error was raised, and what the line says; `None` if it was at no such line.

    Where it was in none of the user's functions, autograd may have raised it, of what a backward had returned.
    """
    every = traceback.extract_tb(trace_of(error))
    others = [one for one in every if not one.filename.startswith(_PACKAGE) or one.filename.startswith(_RING)]
    frames = [one for one in others if whose_file(one.filename) == "user"]
    if not frames:
        # What calls a user's function there is called `apply`.
        by_autograd = others and others[-1].filename.startswith(_AUTOGRAD) and others[-1].name != "apply"
        return "by autograd, of what a backward has returned" if by_autograd else None
    last = frames[-1]
    said = f", by `{cut(last.line)}`" if last.line else ""
    return f"at {os.path.basename(last.filename)}:{last.lineno} in {last.name}{said}"


def _ours(filename: str) -> bool:
    return filename.startswith(_HERE) or filename == _THREADING


def _place(frame: FrameType | None) -> UserLine:
    if frame is None:
        return NOWHERE
    return UserLine(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


@functools.cache
def whose_file(filename: str) -> Literal["user", "world", "torch"]:
    """Return whose code a file holds; "user" is everybody else's, Python's library included."""
    return "world" if _ours(filename) else "torch" if filename.startswith(_TORCH) else "user"
