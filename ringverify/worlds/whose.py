"""Tracks whose code is running: ringverify's own ("ours") or the implementation's ("theirs").

What ends a run in our own code is no violation. A world takes all of a program for the implementation's code. A program
of ringverify therefore runs within `ours`, and inside that within `theirs` whenever it calls the implementation or
touches what that left or returned. A process also keeps the answer in a file, which can be read after the process has
ended. Importing this module does not import torch.
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
    """The threads that run the implementation's code; a file of one byte says whether there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._theirs: set[int] = set()
        self._file: mmap.mmap | None = None

    def write_to(self, path: str) -> None:
        """Keep in a file, from now on, whether any thread of this process runs the implementation's code.

        Raises:
            OSError: the file cannot be written.
        """
        with open(path, "w+b") as file:
            file.write(_OURS)
            file.flush()  # takes the space now: on a full disk, a later write to the mapping could not
            self._file = mmap.mmap(file.fileno(), 1)
        os.register_at_fork(after_in_child=self._let_go)

    def _let_go(self) -> None:
        """Stop writing to the parent's file, in a child that the implementation has forked."""
        self._file = None

    def is_theirs(self, thread: int) -> bool:
        """Whether a thread of this process runs the implementation's code."""
        return thread in self._theirs

    def put(self, theirs: bool) -> bool:
        """Note whose code the calling thread runs from now on; return whether it was the implementation's before."""
        thread = threading.get_ident()
        with self._lock:
            before = thread in self._theirs
            (self._theirs.add if theirs else self._theirs.discard)(thread)
            if self._file is not None:
                self._file[0:1] = _THEIRS if self._theirs else _OURS
        return before


_THREADS = _Threads()
write_to, is_theirs = _THREADS.write_to, _THREADS.is_theirs
_RAISED = threading.local()


def was_ours(path: str) -> bool:
    """Whether the process that keeps this file runs none of the implementation's code, or ran none when it ended.

    True also if the file cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return file.read(1) != _THEIRS
    except OSError:
        return True


class _CodeOf:
    """Marks a block as one side's code; a class, so that it adds no frames to tracebacks."""

    _is_theirs: bool

    def __enter__(self) -> None:
        self._before = _THREADS.put(self._is_theirs)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        _THREADS.put(self._before)


class theirs(_CodeOf):
    """Marks the implementation's code, or code that touches what it left: what the block raises is its doing."""

    _is_theirs = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _RAISED.error = error
        super().__exit__(kind, error, trace)


class ours(_CodeOf):
    """Marks ringverify's own code.

    Raises:
        OurError: in place of an exception that neither came out of `theirs` nor is a `Charge`.
    """

    _is_theirs = False

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        raised, _RAISED.error = getattr(_RAISED, "error", None), None
        super().__exit__(kind, error, trace)
        if error is not raised and isinstance(error, Exception) and not isinstance(error, (Charge, OurError)):
            raise OurError.of(error, limit_of(error)) from error
