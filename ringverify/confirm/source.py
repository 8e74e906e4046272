"""Python source of values: literals for the scripts, which come from numbers and never are text of a file unquoted."""

from __future__ import annotations

import base64
import dataclasses
import re
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringref.problem import Problem
from ringverify import targets

READABLE = 400
"""Most elements of an array that is written out as numbers; larger arrays are compressed and base64-encoded."""


@dataclasses.dataclass(frozen=True)
class Script:
    """A failing case as a script.

    Attributes:
        text: the source of the script.
        program: the source without its title (ABOUT); scripts that would do the same have equal programs.
    """

    text: str
    program: str

    @classmethod
    def of(cls, template: str, values: dict[str, str], about: dict[str, str]) -> Script:
        """Fill a template in."""
        title = {**values, "about": dictionary(about)}
        return cls(filled(template, title), filled(template, {**values, "about": "None"}))


def filled(template: str, values: dict[str, str]) -> str:
    """Return a template with `<<names>>` replaced by values; placeholders inside values are not replaced."""
    return re.sub(r"<<(\w+)>>", lambda found: values[found[1]], template)


class SourceText(str):
    """Python source to be inserted unquoted: made here from numbers, never from text of a file."""


def literal(value: Any) -> str:
    """Return the ASCII repr of a value: whatever a text holds, it cannot end its quotes or the line."""
    return value if isinstance(value, SourceText) else ascii(value)


def dictionary(values: dict[str, Any]) -> str:
    """Return the source of a dictionary, one entry a line."""
    return "{\n" + "".join(f"    {name!r}: {literal(value)},\n" for name, value in values.items()) + "}"


def array_source(array: NDArray[Any]) -> str:
    """Return an expression for an array: its numbers, or its compressed bytes if there are many."""
    if array.size <= READABLE:
        values = np.array(array).tolist()
        shaped = "" if array.size else f".reshape({array.shape})"
        return f"np.array({values!r}, dtype={str(array.dtype)!r}){shaped}"
    packed = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes())).decode()
    return f"unpacked({packed!r}, {str(array.dtype)!r}, {array.shape})"


def fields_of(p: Problem) -> dict[str, Any]:
    """Return the fields of a problem, and the properties of it that an implementation may read."""
    fields: dict[str, Any] = {field.name: getattr(p, field.name) for field in dataclasses.fields(p)}
    if p.dilation is not None:
        d = p.dilation
        arguments = f"branches={d.branches!r}, heads={d.heads!r}, head_offset={d.head_offset!r}"
        fields["dilation"] = SourceText(f"Fields({arguments})")
    fields |= {name: getattr(p, name) for name in ("nq", "nk", "hk", "dv", "group_size", "scale_value", "diagonal")}
    return fields


def place_of(target: str) -> dict[str, str | None]:
    """Return where the script finds a target: its file or module, and its attribute there."""
    place, _, attribute = targets.location_of(target).rpartition(":")
    is_file = place.endswith(".py")
    return {"file": place if is_file else None, "module": None if is_file else place, "attribute": attribute}
