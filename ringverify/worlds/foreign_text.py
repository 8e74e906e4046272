"""Turns messages of torch, gloo, Python and `faulthandler` into fields: the one file in which wording decides.

Torch and gloo raise a plain `RuntimeError` for anything, `faulthandler` writes stacks as text, and the frames of a rank
in another process cannot be inspected. Importing this module does not import torch.
"""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

_PEER_IS_GONE = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")
"""Phrases of gloo's errors when the connection to another rank is lost (lower case)."""

_NO_MEMORY = ("can't allocate memory", "failed to map segment")
"""Phrases by which torch's CPU allocator and the loader of its libraries say that memory has run out (lower case)."""

_NO_THREAD = "can't start new thread"
"""Python's message when the system has no more threads."""

_NO_SECOND_BACKWARD = re.compile(r"second time|twice|retain_graph|freed|once|more than one backward|double backward")
"""Words of which a clear refusal of a second backward contains at least one."""

_FATAL = "Fatal Python error: "
"""The first words of a `faulthandler` dump."""

_SIZE = re.compile(r"(?<![\w.])\d+(?![\w.])")

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


class Frame(NamedTuple):
    """A stack frame. The line number is text: `faulthandler` writes ??? for an unknown one."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line} in {self.function}'


def tells_of_lost_peer(text: str) -> bool:
    """Whether an error's text says that the connection to another rank was lost."""
    said = text.lower()
    return any(words in said for words in _PEER_IS_GONE)


def system_error_in(text: str, numbers: tuple[int, ...]) -> int | None:
    """Return which of some `errno` values a text names, or `None`.

    Torch turns system errors into a plain `RuntimeError`: only their wording is left.
    """
    said = text.lower()
    if errno.ENOMEM in numbers and any(words in said for words in _NO_MEMORY):
        return errno.ENOMEM
    if errno.EAGAIN in numbers and _NO_THREAD in said:
        return errno.EAGAIN
    return next((number for number in numbers if os.strerror(number).lower() in said), None)


def refuses_second_backward(text: str) -> bool:
    """Whether an error's text says that backward cannot run through a graph twice."""
    return _NO_SECOND_BACKWARD.search(text) is not None


def last_words(text: str) -> str:
    """Return the last line that a process printed before it ended, not counting a dump of `faulthandler`."""
    return "".join(text.partition(_FATAL)[0].strip().splitlines()[-1:])


def stacks_of(dump: str) -> list[tuple[Frame, ...]]:
    """Return the stacks in a `faulthandler` dump, one per thread, innermost frame first."""
    blocks = [map(_FRAME.match, block.splitlines()) for block in dump.split("\n\n")]
    return [tuple(Frame(one["file"], one["line"], one["function"]) for one in block if one) for block in blocks]


def sizes_in(text: str) -> tuple[str, tuple[int, ...]]:
    """Return an error's text without the whole numbers that stand alone in it, such as sizes, and these."""
    return _SIZE.sub("#", text), tuple(int(found) for found in _SIZE.findall(text))
