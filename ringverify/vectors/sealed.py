"""Files of vectors beside the index: JSON of a schema number and a list of vectors, sealed by its SHA-256."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ringverify
from ringverify.errors import UsageError
from ringverify.files import laid_out, read_json, refusing

SCHEMA = 1


def seal(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of some fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def text(about: str, entries: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a file with these entries."""
    content = {"schema": SCHEMA, "about": about, "vectors": list(entries)}
    return laid_out({**content, "seal": seal(content)}) + "\n"


def read(path: Path, whole: Callable[[dict[str, Any]], dict[str, Any]], mend: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a file by id, none if there is no such file.

    Args:
        path: the file.
        whole: returns an entry if it is whole, else raises a `KeyError`, `ValueError` or `TypeError`.
        mend: how to repair the folder.

    Raises:
        UsageError: the file is cut off, edited, of another schema, or an entry is not whole.
    """
    if not path.exists():
        return {}
    try:
        with refusing(f"read {path}", mend):
            content = read_json(path)
    except ValueError:  # not UTF-8, or not JSON
        raise UsageError(f"{path} is truncated or not JSON: {mend}") from None
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise UsageError(f"{path} is not of schema {SCHEMA}, which ringverify {ringverify.__version__} reads: {mend}")
    if content.pop("seal", None) != seal(content):
        raise UsageError(f"{path} was edited after it was generated: {mend}")
    try:
        return {described["id"]: whole(described) for described in content["vectors"]}
    except (KeyError, ValueError, TypeError) as error:
        raise UsageError(f"{path} does not describe vectors: {error!r}; {mend}") from None
