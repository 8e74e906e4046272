"""What programs of others say only in words, turned into fields: the one file in which wording decides something.

Torch and gloo raise a plain `RuntimeError` for anything, `faulthandler` writes stacks as text, and a rank in another
process has no frames to look at. Whoever needs to know what happened asks here. Importing this module does not import
torch.
"""

from __future__ import annotations

import errno
import os
import re
from typing import NamedTuple

_PEER_IS_GONE = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")
"""How an error of gloo's reads that a rank meets because another one has gone (lower case)."""

_NO_MEMORY = ("can't allocate memory", "failed to map segment")
"""How torch's CPU allocator, and the loader of its libraries, say that memory has run out."""

_NO_THREAD = "can't start new thread"
"""How Python says that the system has no more threads."""

_NO_SECOND_BACKWARD = re.compile(r"second time|twice|retain_graph|freed|once|more than one backward|double backward")
"""What a clear refusal of a second backward speaks of."""

_FATAL = "Fatal Python error: "
"""How `faulthandler` begins."""

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


class Frame(NamedTuple):
    """A frame of a stack. The line is text: `faulthandler` writes ??? for one that it does not know."""

    file: str
    line: str
    function: str

    def __str__(self) -> str:
        return f'  File "{self.file}", line {self.line} in {self.function}'


def tells_of_lost_peer(text: str) -> bool:
    """Whether an error is what a rank meets when another rank has gone."""
    said = text.lower()
    return any(words in said for words in _PEER_IS_GONE)


def system_error_in(text: str, numbers: tuple[int, ...]) -> int | None:
    """The error of the system, of these, of which torch has made a `RuntimeError`: only its words are left of it."""
    said = text.lower()
    if errno.ENOMEM in numbers and any(words in said for words in _NO_MEMORY):
        return errno.ENOMEM
    if errno.EAGAIN in numbers and _NO_THREAD in said:
        return errno.EAGAIN
    return next((number for number in numbers if os.strerror(number).lower() in said), None)


def refuses_second_backward(text: str) -> bool:
    """Whether an error says that a graph cannot be gone through twice."""
    return _NO_SECOND_BACKWARD.search(text) is not None


def last_words(text: str) -> str:
    """The last line that a process printed before its end, without what `faulthandler` then said of it."""
    return "".join(text.partition(_FATAL)[0].strip().splitlines()[-1:])


def stacks_of(dump: str) -> list[tuple[Frame, ...]]:
    """The stacks that `faulthandler` wrote, one a thread, each with its innermost frame first."""
    blocks = [map(_FRAME.match, block.splitlines()) for block in dump.split("\n\n")]
    return [tuple(Frame(one["file"], one["line"], one["function"]) for one in block if one) for block in blocks]
