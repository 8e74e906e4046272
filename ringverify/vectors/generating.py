"""`ringverify vectors generate`: make a folder of vectors, without changing what an existing id stands for."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import ringverify
from ringverify.cases import tensorfile
from ringverify.errors import UsageError
from ringverify.files import read_bytes, refusing, write_whole
from ringverify.vectors import index, long, making, merges
from ringverify.vectors.catalogue import STORIES, bugs
from ringverify.vectors.story import Story, written_out

README_NAME = "README.md"


def generate(
    folder: Path, *, force: bool, say: Callable[[str], None], stories: Mapping[str, Story] | None = None
) -> int:
    """Make every vector, and write those that the folder lacks; those at length too, if it is the whole catalogue.

    Args:
        folder: where to; made if it is not there.
        force: also overwrite a vector that differs, and delete the file of one that this version does not have.
        say: is called with each line of text to print.
        stories: vectors to make instead of the catalogue's, by id.

    Returns:
        0.

    Raises:
        UsageError: the folder cannot be written, or holds other vectors than these under their ids.
    """
    wanted = dict(STORIES if stories is None else stories)
    _look_at(folder)
    files = contents(wanted)
    with refusing(f"read a file in {folder}", "name another folder"):
        there = _present(folder)
    known = {index.file_name(id) for id in wanted}
    if not force:
        _refuse_changes(folder, files, there, known)
    if there and all(there.get(name) == data for name, data in files.items()) and not set(_vectors(there)) - known:
        say(f"{len(wanted)} vectors in {folder}: unchanged, bit for bit")
        if stories is None:
            _beside(folder, force=force, say=say)
        return 0
    with refusing(f"write vectors to {folder}", "name another folder"):
        _write(folder, files, _vectors(there))
    new = len(known - set(there))
    changed = sum(name in there and there[name] != files[name] for name in known)
    size = sum(map(len, files.values()))
    say(f"{len(wanted)} vectors in {folder}, {size / 1e6:.2f} MB: {new} new, {changed} overwritten")
    if stories is None:
        _beside(folder, force=force, say=say)
    return 0


def _beside(folder: Path, *, force: bool, say: Callable[[str], None]) -> None:
    """Make the files of merges and of long vectors, or compute again what they hold, and say a line on each.

    Raises:
        UsageError: a file is damaged, or holds something else, and is not to be overwritten; or cannot be written.
    """
    _look_again("vectors of merges", merges.VECTORS, merges, folder, force=force, say=say)
    _look_again("vectors at length", long.VECTORS, long, folder, force=force, say=say)


def _look_again(
    what: str, vectors: Mapping[str, Any], file: ModuleType, folder: Path, *, force: bool, say: Callable[[str], None]
) -> None:
    path, done = folder / file.NAME, "written"
    if path.exists() and not force:
        there, done = file.read(folder), "unchanged"
        for described in there.values():
            file.answer_again(folder, described)
        if unlike := sorted(set(vectors) ^ set(there)):
            raise UsageError(f"{path} has {', '.join(there) or 'no vector'}, and not just those that are generated: "
                             f"{unlike[0]} differs; pass --force to overwrite it")  # fmt: skip
    else:
        with refusing(f"write {path}", "name another folder"):
            write_whole(path, file.text(vectors))
    say(f"{len(vectors)} {what} in {path}: {done}")


def contents(stories: Mapping[str, Story]) -> dict[str, bytes]:
    """Return the bytes of every file of a folder of vectors, by name; the index comes last."""
    files = {}
    entries = []
    for story in stories.values():
        data = encoded(story, making.make(story))
        files[index.file_name(story.id)] = data
        entries.append(index.entry(story, data))
    named = bugs(dict(stories))
    files[index.SCHEMA_NAME] = index.SCHEMA_FILE.read_bytes()
    files[README_NAME] = _readme(stories).encode()
    files[index.NAME] = index.write(entries, named).encode()
    return files


def encoded(story: Story, tensors: Mapping[str, tensorfile.Tensor]) -> bytes:
    """Return the bytes of a vector's file."""
    problem = json.dumps(written_out(story.problem), separators=(",", ":"))
    metadata = {"id": story.id, "schema": str(index.SCHEMA), "problem": problem}
    return tensorfile.encode(tensors, metadata)


def _readme(stories: Mapping[str, Story]) -> str:
    """Return the text of the folder's README.md, with a table row for each vector."""
    lines = [
        "# Golden vectors",
        "",
        f"{len(stories)} problems of attention with inputs, right answers and gradients, and which positions each rank "
        "holds. How to read",
        "them: `docs/vectors.md`. Written by `ringverify vectors generate`; do not edit. Bugs are those of "
        "`ringverify list mutants`.",
        "",
        "| id | topic | | what it tells | bugs |",
        "|---|---|---|---|---|",
    ]
    for story in stories.values():
        lines.append(f"| {story.id} | {story.topic} | {story.title} | {story.note} | {' '.join(story.bugs)} |")
    return "\n".join(lines) + "\n"


def _look_at(folder: Path) -> None:
    """Check, before any work is done, that the folder can be written."""
    nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise UsageError(f"cannot write vectors to {folder}: {nearest} is not a folder; name another")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write vectors to {folder}: no permission in {nearest}; name another folder")


def _present(folder: Path) -> dict[str, bytes]:
    """Return the bytes of the files in a folder, by name; a folder that does not exist has none."""
    if not folder.is_dir():
        return {}
    return {path.name: read_bytes(path) for path in sorted(folder.iterdir()) if path.is_file()}


def _vectors(there: Mapping[str, bytes]) -> list[str]:
    """Return the names that belong to files of vectors."""
    return [name for name in there if name.endswith(".safetensors")]


def _refuse_changes(folder: Path, files: Mapping[str, bytes], there: Mapping[str, bytes], known: set[str]) -> None:
    if there and index.NAME not in there and not _vectors(there):
        raise UsageError(f"{folder} holds other files and no vectors: name a new folder, or pass --force")
    for name in _vectors(there):
        if name not in known:
            raise UsageError(
                f"{folder / name}: ringverify {ringverify.__version__} has no vector of this id; pass --force to "
                "delete the file"
            )
        if there[name] != files[name]:
            raise UsageError(
                f"{folder / name} differs from the vector that is generated for this id: restore the file, or pass "
                "--force to overwrite it"
            )
    if index.NAME in there:
        # An index that cannot be read, or describes these ids differently, is not overwritten without --force either.
        before = index.read(folder).entries
        after = {entry["id"]: entry for entry in json.loads(files[index.NAME])["vectors"]}
        for id, entry in before.items():
            if after.get(id) != entry:
                raise UsageError(
                    f"{folder / index.NAME}: the entry of {id} differs from the generated one; pass --force to "
                    "overwrite it"
                )


def _write(folder: Path, files: Mapping[str, bytes], vectors: list[str]) -> None:
    """Write all files into a temporary folder beside the target, then move them into place, the index last."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for name, data in files.items():
            (partial / name).write_bytes(data)
        partial.chmod(0o755)
        with contextlib.suppress(OSError):  # the folder exists already
            os.rename(partial, folder)
            return
        for name in files:
            os.replace(partial / name, folder / name)
        for name in vectors:
            if name not in files:
                (folder / name).unlink()
    finally:
        shutil.rmtree(partial, ignore_errors=True)
