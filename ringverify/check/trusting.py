"""Which case files a run in this folder wrote; and what any other one names is imported only if somebody agrees.

A case file names code: its target is imported and run. A run signs the cases that it writes, with a key that it keeps
in the folder `.ringverify` of the working directory, for its owner's eyes only. So a file that came from elsewhere, or
that was changed, is told apart wherever it lies. The key counts only where it was made: a folder that is sent with its
key and its cases is a foreign one still.
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
"""The folder of cases where none is named. It is the tool's own: git is told to leave it out."""

OWN = "own"
"""The folder in it of what is nobody else's, which git is told to leave out even where the cases are kept in it."""

KEY = Path(OURS) / OWN / "key"
BYTES = 32


def signature(content: Mapping[str, Any], *, make_key: bool = False) -> str | None:
    """What a run in this folder signs the fields of a case file with; `None` where there is no key.

    Args:
        content: the fields.
        make_key: make a key if there is none; where none can be made, cases go unsigned, and are asked about.
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
    """Whether the fields of a case file are as a run in this folder wrote and signed them."""
    ours = signature(content)
    return ours is not None and isinstance(signed, str) and secrets.compare_digest(ours.encode(), signed.encode())


def _key() -> bytes | None:
    """This folder's key: a file of ours that nobody else can read, bound to where it was made."""
    try:
        opened = os.open(KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(opened, "rb") as file:
        about = os.fstat(opened)
        others = about.st_uid != os.getuid() or about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        if others or not stat.S_ISREG(about.st_mode) or about.st_size != BYTES:
            return None
        return file.read(BYTES) + str(about.st_ino).encode()  # a copy is another file, whatever its mode and owner


def _make_key() -> None:
    """Make a key, unless another run has just made one.

    Raises:
        OSError: it cannot be made here.
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
            if _key() is None:  # what is there is no key, or this file system has no links
                os.replace(ours, KEY)
    finally:
        ours.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder if it is not there; git ignores it where it is the tool's own, not one that was named for cases.

    Raises:
        OSError: it cannot be made.
    """
    if folder.is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if folder.name in (OURS, OWN):
        what = "cases that failed, for ringverify replay" if folder.name == OURS else "a key, of use only where it is"
        write_whole(folder / ".gitignore", f"# Made by ringverify: {what}.\n*\n")


def agree(files: Iterable[tuple[Path, CaseFile]], *, trust: bool, say: Callable[[str], None]) -> None:
    """Say what case files name to be imported, and from where; ask about those that no run in this folder wrote.

    What is built in is the tool's own, whoever names it.

    Args:
        files: the case files.
        trust: ask about nothing.
        say: takes a line of text.

    Raises:
        UsageError: nobody agrees, or nobody can be asked.
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
        foreign = f"no run in this folder wrote case {shown(str(path))} as it is now, and it names {named[target]}"
        if not _somebody_is_there():
            raise UsageError(f"{foreign}: pass --trust to import and run that")
        if input(f"{foreign}: import and run that? [y/N] ").strip().lower() not in ("y", "yes"):
            raise UsageError(f"case {shown(str(path))} is not run: nothing was imported")


def shown(text: str) -> str:
    """A text in one line, as it is where that shows all of it, and as a literal of Python where it does not."""
    return text if text.isprintable() else ascii(text)


def _somebody_is_there() -> bool:
    """Whether there is somebody to ask."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))
