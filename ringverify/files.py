"""Read and write files that users name: reads have limits, writes are atomic.

No file is trusted: only regular files are read, and only up to a stated size, depth and number of values. Anything but
a regular file is written to, never replaced; a symbolic link stays one.
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ringverify.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST = 8 << 20
"""Largest size in bytes of a file that is read."""

VALUES = 500_000
"""Largest number of values in a JSON document: an object of eight characters takes 200 bytes of memory."""

DEPTH = 64
"""Largest depth of nested lists and objects."""

DIGITS = 40
"""Largest number of digits of a whole number."""

TOML = 1 << 19
"""Largest size in bytes of a TOML file.

A line may have `TOML_LINE` characters, and `DEPTH` dots outside of quotes: the time and memory of the TOML parser grow
with the square of the length of a dotted key.
"""

TOML_LINE = 4_000
_QUOTED = re.compile(r""" "[^"]*" | '[^']*' """, re.VERBOSE)
WIDTH = 118
"""Number of characters up to which `laid_out` puts a JSON value on one line."""
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
    """Another process is writing the file."""


@contextlib.contextmanager
def refusing(what: str, way_out: str) -> Iterator[None]:
    """Turn an `OSError` into a `UsageError` that says what cannot be done, why, and what to do instead.

    Raises:
        UsageError: an `OSError` was raised inside.
    """
    try:
        yield
    except OSError as error:
        raise UsageError(f"cannot {what}: {error.strerror}; {way_out}") from None


# -- reading -----------------------------------------------------------------------------------------------------------


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """Return the bytes of a regular file.

    Raises:
        OSError: it cannot be read, is not a regular file or has more than `most` bytes; `strerror` says which.
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
    """Return the text of a regular UTF-8 file, with line feeds as its only line ends.

    Raises:
        OSError: see `read_bytes`.
        UnicodeDecodeError: it is not UTF-8.
    """
    text = read_bytes(path, most).decode("utf-8-sig")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def read_json(path: Path, most: int = MOST) -> Any:
    """Return the content of a JSON file.

    Raises:
        OSError: see `read_bytes`.
        ValueError: it is not UTF-8, not JSON, or beyond the limits of `parsed`.
    """
    return parsed(read_text(path, most))


def parsed(text: str) -> Any:
    """Return the content of a JSON text.

    Raises:
        ValueError: it is not JSON, has too many or too deep values, or a number that is too long or not finite.
    """
    look_at_values(text)
    try:
        content = json.loads(text, parse_int=_whole, parse_float=_fraction, parse_constant=_fraction)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None
    if text.count("[") + text.count("{") > DEPTH:
        _look_down(content)
    return content


def look_at_values(text: str, most: int = VALUES) -> None:
    """Refuse JSON text of more than `most` values, before it is parsed.

    Raises:
        ValueError: there are more, as counted by brackets and commas.
    """
    if (values := text.count("[") + text.count("{") + text.count(",")) > most:
        raise ValueError(f"it has about {values:,} values, and at most {most:,} are read")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        OSError: see `read_bytes`.
        ValueError: it is not UTF-8, not TOML, or has too long lines, too long dotted keys or too deep values.
    """
    text = read_text(path, TOML)
    for number, line in enumerate(text.split("\n"), 1):
        if len(line) > TOML_LINE:
            raise ValueError(f"line {number} has {len(line):,} characters, and at most {TOML_LINE:,} are read")
        if line.count(".") > DEPTH and (dots := _QUOTED.sub("", line).count(".")) > DEPTH:
            raise ValueError(f"line {number} has {dots} dots outside of quotes, and at most {DEPTH} are read")
    try:
        content = tomllib.loads(text)
        _look_down(content)
    except RecursionError:
        raise ValueError(f"nested deeper than {DEPTH} levels") from None
    return content


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits, and at most {DIGITS} are read")
    return int(digits)


def _fraction(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:DIGITS]} is not a finite number")
    return number


def _look_down(content: Any) -> None:
    """Refuse content nested deeper than `DEPTH`, before a recursive function meets it."""
    level = [content]
    for _ in range(DEPTH):
        level = [inner for outer in level for inner in _within(outer) if isinstance(inner, (dict, list))]
        if not level:
            return
    raise ValueError(f"nested deeper than {DEPTH} levels")


def _within(content: Any) -> Iterable[Any]:
    return content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()


def _kind(mode: int) -> str:
    return _KINDS.get(stat.S_IFMT(mode), "something else")


# -- writing -----------------------------------------------------------------------------------------------------------


def look_at_place(path: Path) -> str | None:
    """Return why a file could not be written, in words that follow its name, or `None` if no reason is found."""
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


def moved(path: str, home: Path, here: Path) -> str:
    """Rewrite a path that is relative to one folder, `home`, as relative to another, `here`."""
    if os.path.isabs(path) or home.resolve() == here.resolve():
        return path
    return Path(os.path.relpath(home / path, here)).as_posix()


def is_stream(path: Path) -> bool:
    """Whether a path is written to rather than replaced: a device, a FIFO, a socket or a file descriptor."""
    return _descriptor(path) is not None or (path.exists() and not path.is_file() and not path.is_dir())


def destination(path: Path) -> Path:
    """Return a path with all symbolic links resolved."""
    return Path(os.path.realpath(path))


def open_stream(path: Path) -> int | None:
    """Open a path that is written to rather than replaced; return `None` for a regular or a missing file.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        OSError: it is a folder or a disk, a FIFO or socket without a reader, or it may not be written to.
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
    # Non-blocking: a FIFO without a reader is then an error, and not a wait without end.
    opened = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    os.set_blocking(opened, True)
    return opened


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a regular file atomically; write to anything else as it is.

    Raises:
        OSError: it cannot be written; a regular file that was there is unchanged.
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


def write_named(path: Path, content: str | bytes) -> None:
    """Write a file that the user named, as `write_whole` does.

    Raises:
        UsageError: it cannot be written; a regular file that was there is unchanged.
    """
    with refusing(f"write {path}", "name another file"):
        write_whole(path, content)


def laid_out(value: Any, indent: int = 0) -> str:
    """Return JSON for people and for `diff`: a value on one line if it fits `WIDTH`, else one line for each part."""
    compact = json.dumps(value, ensure_ascii=False)
    parts = list(value.values() if isinstance(value, dict) else value) if isinstance(value, (dict, list)) else []
    if len(compact) + indent <= WIDTH or not any(isinstance(part, (dict, list)) for part in parts):
        return compact
    inner = [laid_out(part, indent + 1) for part in parts]
    if isinstance(value, dict):
        inner = [f"{json.dumps(name)}: {text}" for name, text in zip(value, inner, strict=True)]
        return "{\n" + ",\n".join(" " * (indent + 1) + line for line in inner) + "\n" + " " * indent + "}"
    return "[\n" + ",\n".join(" " * (indent + 1) + line for line in inner) + "\n" + " " * indent + "]"


def write_all(opened: int, data: bytes) -> None:
    """Write all of `data` to a file descriptor.

    Raises:
        OSError: not all of it could be written.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(opened, left) :]
        except BlockingIOError:
            select.select([], [opened], [])


def claim(partial: Path) -> int:
    """Open a file to append to, locked against other processes until it is closed; its content stays.

    Returns:
        A file descriptor, which the caller closes.

    Raises:
        Taken: another process has locked it.
        OSError: it cannot be written, is a link, or belongs to another user.
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
            # Before the lock was ours, the other run may have ended and renamed the file; then open it anew.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(partial), os.fstat(opened)):
                    return opened
        except BaseException:
            os.close(opened)
            raise
        os.close(opened)


def _descriptor(path: Path) -> int | None:
    """Return the file descriptor of this process that a path stands for, as /dev/stdout does; follows links."""
    place = os.path.abspath(path)
    for _ in range(LINKS):
        if (found := _DESCRIPTOR.fullmatch(place)) is not None or place in _STREAMS:
            return _STREAMS[place] if found is None else int(found[1])
        try:
            place = os.path.normpath(os.path.join(os.path.dirname(place), os.readlink(place)))
        except OSError:
            return None
    return None
