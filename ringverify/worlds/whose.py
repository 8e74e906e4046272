"""Whose code is running: ours, or the implementation's. What ends a run in code of ours is no violation.

A world takes all of a program for the implementation's. A program of ours says what is not: `ours` is round all of it,
and `theirs`, inside, round each call of the implementation and round whatever touches what it left or returned. A
process also keeps the answer in a file, where it can be read when the process is no more. Importing this module does
not import torch.
"""

from __future__ import annotations

import mmap
import os
import threading
from types import TracebackType
from typing import Any

from ringverify.worlds.limits import limit_of
from ringverify.worlds.raising import Charge
from ringverify.worlds.world import OurError

_OURS, _THEIRS = b"o", b"t"


class _Threads:
    """Whose code each thread is running, and in a file of one letter whether any runs the implementation's."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._theirs: set[int] = set()
        self._file: mmap.mmap | None = None

    def write_to(self, path: str) -> None:
        with open(path, "w+b") as file:
            file.write(_OURS)
            file.flush()  # a hole in a file of a full disk could not be filled later
            self._file = mmap.mmap(file.fileno(), 1)
        os.register_at_fork(after_in_child=self._let_go)

    def _let_go(self) -> None:
        """A child that the implementation forks keeps no file of its parent's."""
        self._file = None

    def is_theirs(self, thread: int) -> bool:
        return thread in self._theirs

    def put(self, theirs: bool) -> bool:
        """Say whose code the calling thread runs from now on, and give back whose it was before."""
        thread = threading.get_ident()
        with self._lock:
            before = thread in self._theirs
            (self._theirs.add if theirs else self._theirs.discard)(thread)
            if self._file is not None:
                self._file[0:1] = _THEIRS if self._theirs else _OURS
        return before


_THREADS = _Threads()
_RAISED = threading.local()


def write_to(path: str) -> None:
    """Keep in a file, from now on, whether any thread of this process runs the implementation's code.

    Raises:
        OSError: the file cannot be written.
    """
    _THREADS.write_to(path)


def was_ours(path: str) -> bool:
    """Whether the process that kept this file ran, at its end or now, no code of the implementation's."""
    try:
        with open(path, "rb") as file:
            return file.read(1) != _THEIRS
    except OSError:
        return True


def is_theirs(thread: int) -> bool:
    """Whether a thread of this process runs the implementation's code."""
    return _THREADS.is_theirs(thread)


class _CodeOf:
    """A stretch of code of one side; a class, so that tracebacks have no lines of it."""

    _is_theirs: bool

    def __enter__(self) -> None:
        self._before = _THREADS.put(self._is_theirs)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _THREADS.put(self._before)


class theirs(_CodeOf):
    """The implementation's code runs here, or code that touches what it left: what it raises is its own."""

    _is_theirs = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _RAISED.error = error
        super().__exit__(kind, error, trace)


class ours(_CodeOf):
    """Code of ours runs here.

    Raises:
        OurError: in place of an exception that came neither out of `theirs` nor is a charge.
    """

    _is_theirs = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        raised, _RAISED.error = getattr(_RAISED, "error", None), None
        super().__exit__(kind, error, trace)
        if error is not raised and isinstance(error, Exception) and not isinstance(error, (Charge, OurError)):
            raise OurError.of(error, limit_of(error)) from error
