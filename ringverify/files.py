"""Files that people name: read with limits, and written whole. What is in them is for others to know.

No file is trusted: what is no regular file is not read, and neither is more than a stated size, depth or number of
values. What is no regular file is written to, and never replaced; a link stays a link.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import secrets
import select
import socket
import stat
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST = 8 << 20
"""Bytes of a file that is read, at most."""

VALUES = 500_000
"""Values in a JSON document, at most: an object of eight signs takes 200 bytes."""

DEPTH = 64
"""Lists and objects within one another, at most."""

DIGITS = 40
"""Digits of a whole number, at most."""

TOML = 1 << 19
"""Bytes of a TOML file, at most. No line of it has more signs than `TOML_LINE`, nor more than `DEPTH` dots outside of
quotes: its reader takes time and memory that grow with the square of a dotted key."""

TOML_LINE = 4_000
_QUOTED = re.compile(r""" "[^"]*" | '[^']*' """, re.VERBOSE)
LINKS = 40
_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
_STREAMS = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Taken(OSError):
    """Somebody else is writing the file."""


# -- reading -----------------------------------------------------------------------------------------------------------


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: it cannot be read, is no regular file or has more bytes; `strerror` says which.
    """
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        status = os.fstat(opened)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, f"it is {_kind(status.st_mode)}, and no regular file")
        with os.fdopen(os.dup(opened), "rb") as file:
            data = file.read(most + 1) if status.st_size <= most else b""
    finally:
        os.close(opened)
    if (size := max(status.st_size, len(data))) > most:
        raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read")
    return data


def read_text(path: Path, most: int = MOST) -> str:
    """The text of a regular file, in UTF-8, whatever its lines end with.

    Raises:
        OSError: as of `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    text = read_bytes(path, most).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: Path, most: int = MOST) -> Any:
    """What a JSON file says.

    Raises:
        OSError: as of `read_bytes`.
        ValueError: it is not UTF-8, not JSON, or beyond the limits of `parsed`.
    """
    return parsed(read_text(path, most))


def parsed(text: str) -> Any:
    """What a JSON text says.

    Raises:
        ValueError: it is not JSON, has too many values, too deep ones, or a number of too many digits or none at all.
    """
    look_at_values(text)
    try:
        content = json.loads(text, parse_int=_whole, parse_float=_fraction, parse_constant=_fraction)
    except RecursionError:
        raise ValueError(f"lists within lists, deeper than {DEPTH}") from None
    if text.count("[") + text.count("{") > DEPTH:
        _look_down(content)
    return content


def look_at_values(text: str, most: int = VALUES) -> None:
    """Refuse JSON of more values than are read, before it is.

    Raises:
        ValueError: there are more.
    """
    if (values := text.count("[") + text.count("{") + text.count(",")) > most:
        raise ValueError(f"it has about {values:,} values, and at most {most:,} are read")


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says.

    Raises:
        OSError: as of `read_bytes`.
        ValueError: it is not UTF-8, not TOML, or has too long lines or too deep values.
    """
    text = read_text(path, TOML)
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > TOML_LINE:
            raise ValueError(f"line {number} has {len(line):,} signs, and at most {TOML_LINE:,} are read")
        if line.count(".") > DEPTH and (dots := _QUOTED.sub("", line).count(".")) > DEPTH:
            raise ValueError(f"line {number} has {dots} dots outside of quotes, and at most {DEPTH} are read")
    try:
        content = tomllib.loads(text)
        _look_down(content)
    except RecursionError:
        raise ValueError(f"lists within lists, deeper than {DEPTH}") from None
    return content


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits, and at most {DIGITS} are read")
    return int(digits)


def _fraction(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text[:DIGITS]}, which JSON has not")
    return number


def _look_down(content: Any) -> None:
    """Refuse what is deeper than anything that we write, before something that calls itself meets it."""
    level = [content]
    for _ in range(DEPTH):
        level = [inner for outer in level for inner in _within(outer) if isinstance(inner, (dict, list))]
        if not level:
            return
    raise ValueError(f"lists within lists, deeper than {DEPTH}")


def _within(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


# -- writing -----------------------------------------------------------------------------------------------------------


def look_at_place(path: Path) -> str | None:
    """Why a file could not be written, in words that follow its name, or `None` if nothing speaks against it."""
    if _descriptor(path) is not None:
        return None
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            return f": {error.strerror}; name another file"
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        return " is a folder: name a file"
    if stat.S_ISBLK(mode):
        return " is a disk: name a file"
    if not stat.S_ISREG(mode):
        return None if os.access(path, os.W_OK) else ": no permission to write to it; name another file"
    parent = destination(path).parent
    if not parent.is_dir():
        named = path.parent if path.absolute().parent == parent else parent
        return f": there is no folder {named}; make it first, or name another place"
    if not os.access(parent, os.W_OK | os.X_OK):
        return f": no permission to write in {parent}; name another place"
    return None


def is_stream(path: Path) -> bool:
    """Whether a path is something that is written to rather than replaced: a device, a FIFO, a socket, a descriptor."""
    return _descriptor(path) is not None or (path.exists() and not path.is_file() and not path.is_dir())


def destination(path: Path) -> Path:
    """Where a file is in the end, past all links."""
    return Path(os.path.realpath(path))


def open_stream(path: Path) -> int | None:
    """A descriptor of what is written to rather than replaced; `None` for a regular file, or one that is to be made.

    Raises:
        OSError: it is a folder or a disk, nobody listens, or it may not be written to.
    """
    if (number := _descriptor(path)) is not None:
        return os.dup(number)
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode) or stat.S_ISBLK(mode):
        raise OSError(errno.EISDIR, "it is a folder" if stat.S_ISDIR(mode) else "it is a disk")
    if stat.S_ISSOCK(mode):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as wire:
            wire.connect(os.fspath(path))
            return os.dup(wire.fileno())
    # Not to wait for a reader who never comes: without one, this is an error.
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_blocking(opened, True)
    return opened


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that it is seen whole or not at all; what is no regular file is written to.

    Raises:
        OSError: it cannot be written; a file that was there is as it was.
    """
    data = content if isinstance(content, bytes) else content.encode(errors="backslashreplace")
    if (stream := open_stream(path)) is not None:
        try:
            write_all(stream, data)
        finally:
            os.close(stream)
        return
    place = destination(path)
    partial = place.with_name(f".{place.name[:80]}.{secrets.token_hex(8)}.partial")
    opened = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            with contextlib.suppress(OSError):
                os.fchmod(opened, stat.S_IMODE(os.stat(place).st_mode))
            write_all(opened, data)
        finally:
            os.close(opened)
        os.replace(partial, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise


def write_all(opened: int, data: bytes) -> None:
    """Write all of it to a descriptor.

    Raises:
        OSError: no more could be written.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(opened, left) :]
        except BlockingIOError:
            select.select([], [opened], [])


def claim(partial: Path) -> int:
    """A descriptor of a file to be written bit by bit, ours alone until it is closed; what is in it stays there.

    Raises:
        Taken: another process has it.
        OSError: it cannot be written, is a link, or is somebody else's.
    """
    while True:
        opened = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666
        )
        try:
            status = os.fstat(opened)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1 or status.st_uid != os.geteuid():
                raise OSError(errno.EEXIST, f"{partial} is there, and no plain file of yours: take it away")
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Taken(errno.EBUSY, "another run is writing it") from None
            except OSError:
                pass  # a file system without locks
            # Meanwhile the other run may have ended, and given the file its name.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(partial), os.fstat(opened)):
                    return opened
        except BaseException:
            os.close(opened)
            raise
        os.close(opened)


def _descriptor(path: Path) -> int | None:
    """Which descriptor of this process a path stands for, as /dev/stdout does, wherever that leads."""
    place = os.path.abspath(path)
    for _ in range(LINKS):
        if (found := _DESCRIPTOR.fullmatch(place)) is not None or place in _STREAMS:
            return _STREAMS[place] if found is None else int(found[1])
        try:
            place = os.path.normpath(os.path.join(os.path.dirname(place), os.readlink(place)))
        except OSError:
            return None
    return None
