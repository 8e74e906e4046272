"""Tell the case files that a run in this folder wrote from others, and ask before importing what the others name.

A case file names code: its target is imported and run. So a run signs the cases that it writes (HMAC-SHA-256), with a
key in the folder `.ringverify` of the working directory that only its owner can read. A file that came from elsewhere,
or was changed, has no valid signature. The key is bound to the inode of its file: if a folder is copied with its key
and its cases, their signatures are not valid in the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringverify import targets
from ringverify.errors import UsageError
from ringverify.files import write_whole

if TYPE_CHECKING:
    from ringverify.check.casefile import CaseFile

OURS = ".ringverify"
"""The default folder of cases. It belongs to the tool: a .gitignore in it excludes everything."""

OWN = "own"
"""The folder in it for the key; it has a .gitignore of its own, in case the cases beside it are kept in git."""

KEY = Path(OURS) / OWN / "key"
BYTES = 32


def signature(content: Mapping[str, Any], *, make_key: bool = False) -> str | None:
    """Return the signature of a case file's fields by the key of this folder; `None` if there is no key.

    Args:
        content: the fields, without seal and signature.
        make_key: make a key if there is none; if that fails, cases are not signed and replay will ask about them.
    """
    key = _key()
    if key is None and make_key:
        with contextlib.suppress(OSError):
            _make_key()
        key = _key()
    if key is None:
        return None
    return hmac.new(key, json.dumps(content, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def is_signed(content: Mapping[str, Any], signed: object) -> bool:
    """Return whether a signature is that of a run in this folder for exactly these fields."""
    ours = signature(content)
    return ours is not None and isinstance(signed, str) and secrets.compare_digest(ours.encode(), signed.encode())


def _key() -> bytes | None:
    """Read this folder's key, extended by its inode; `None` if it is no regular file that only its owner can read."""
    try:
        opened = os.open(KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(opened, "rb") as file:
        about = os.fstat(opened)
        others = about.st_uid != os.getuid() or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if others or not stat.S_ISREG(about.st_mode) or about.st_size != BYTES:
            return None
        return file.read(BYTES) + str(about.st_ino).encode()  # so a copy of the file is another key


def _make_key() -> None:
    """Make a key, unless another run has just made one.

    Raises:
        OSError: no key can be written here.
    """
    for folder in (KEY.parent.parent, KEY.parent):
        make_folder(folder)
    ours = KEY.with_name(f"{KEY.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(ours, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(BYTES))
        try:
            os.link(ours, KEY)
        except OSError:
            if _key() is None:  # the file there is not a valid key, or the file system has no hard links
                os.replace(ours, KEY)
    finally:
        ours.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder if there is none; the tool's own folders get a .gitignore that excludes everything in them.

    Raises:
        OSError: the folder cannot be made.
    """
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if folder.name in (OURS, OWN):
        what = "cases that failed, for ringverify replay" if folder.name == OURS else "a key, of use only where it is"
        write_whole(folder / ".gitignore", f"# Made by ringverify: {what}.\n*\n")


def agree(files: Iterable[tuple[Path, CaseFile]], *, trust: bool, say: Callable[[str], None]) -> None:
    """Print what will be imported for case files, and ask about files that no run in this folder wrote.

    Built-in targets are the tool's own code: they need no agreement.

    Args:
        files: the case files, with their paths.
        trust: do not ask.
        say: prints a line of text.

    Raises:
        UsageError: the user declined, or there is no terminal to ask at.
    """
    asked: dict[str, Path] = {}
    named: dict[str, str] = {}
    for path, file in files:
        if file.target not in named:
            named[file.target] = shown(targets.whence(file.target))
            say(f"imports {named[file.target]}")
        if not (trust or file.ours or targets.is_built_in(file.target)):
            asked.setdefault(file.target, path)
    for target, path in asked.items():
        foreign = f"case {shown(str(path))} was not written by a run in this folder, or was changed since"
        if not _somebody_is_there():
            raise UsageError(f"{foreign}: pass --trust to import and run {named[target]}")
        answer = input(f"{foreign}. It imports and runs {named[target]}. Continue? [y/N] ")
        if answer.strip().lower() not in ("y", "yes"):
            raise UsageError(f"case {shown(str(path))} is not run: nothing was imported")


def shown(text: str) -> str:
    """Return a text in one line: as it is if all of it is printable, otherwise as an ASCII Python literal."""
    return text if text.isprintable() else ascii(text)


def _somebody_is_there() -> bool:
    """Return whether standard input and output are terminals, so that a user can be asked."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
