"""Read back what the lab stores as JSON: dataclasses, held to the schema that `ringverify.events` derives from them."""

from __future__ import annotations

from typing import Any, TypeVar

from jsonschema import Draft202012Validator

from ringverify.events import from_json, schema_of
from ringverify.words import cut, legible

Stored = TypeVar("Stored")


def read_back(kind: type[Stored], content: Any) -> Stored:
    """Return the dataclass of which `ringverify.events.as_json` made this content.

    Raises:
        ValueError: a field is missing or of another type; the message is its place.
    """
    error = next(Draft202012Validator(schema_of(kind)).iter_errors(content), None)
    if error is not None:
        raise ValueError(legible(cut(error.json_path)))
    return from_json(kind, content)
