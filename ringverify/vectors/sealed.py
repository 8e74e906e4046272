"""Files of vectors beside the index: JSON of a schema number and a list of vectors, sealed by its SHA-256."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import ringverify
from ringverify.errors import UsageError
from ringverify.files import laid_out, read_json, refusing

SCHEMA = 1
V = TypeVar("V")


def again(folder: Path) -> str:
    """Return how to repair a damaged folder of vectors, as the end of an error message."""
    return f"restore the folder, or regenerate it: ringverify vectors generate {shlex.quote(str(folder))} --force"


def seal(content: Mapping[str, Any]) -> str:
    """Return the SHA-256 of some fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True)
class SealedFile(Generic[V]):
    """A file of vectors of one kind.

    Attributes:
        name: of the file.
        about: what it is, for who opens it.
        entry: returns a vector with its results.
        whole: returns an entry if it is whole, else raises a `KeyError`, `ValueError` or `TypeError`.
    """

    name: str
    about: str
    entry: Callable[[V], dict[str, Any]]
    whole: Callable[[dict[str, Any]], dict[str, Any]]

    def text(self, vectors: Mapping[str, V]) -> str:
        """Return the text of the file of some vectors."""
        content = {"schema": SCHEMA, "about": self.about, "vectors": list(map(self.entry, vectors.values()))}
        return laid_out({**content, "seal": seal(content)}) + "\n"

    def read(self, folder: Path) -> dict[str, dict[str, Any]]:
        """Return the entries of the file in a folder by id, none if it has no such file.

        Raises:
            UsageError: it is cut off, edited, of another schema, or does not hold what its descriptions say.
        """
        path, mend = folder / self.name, again(folder)
        if not path.exists():
            return {}
        try:
            with refusing(f"read {path}", mend):
                content = read_json(path)
        except ValueError:  # not UTF-8, or not JSON
            raise UsageError(f"{path} is truncated or not JSON: {mend}") from None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise UsageError(
                f"{path} is not of schema {SCHEMA}, which ringverify {ringverify.__version__} reads: {mend}"
            )
        if content.pop("seal", None) != seal(content):
            raise UsageError(f"{path} was edited after it was generated: {mend}")
        try:
            return {described["id"]: self.whole(described) for described in content["vectors"]}
        except (KeyError, ValueError, TypeError) as error:
            raise UsageError(f"{path} does not describe vectors: {error!r}; {mend}") from None
