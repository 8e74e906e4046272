"""The messages between the tool and a worker: a line of JSON each, whose field `kind` says which one it is.

The published schema (`worker-1.json` in `schema`) is derived from these classes, so the protocol is changed here and
nowhere else. Readers ignore fields that they do not know. Importing this module imports only the standard library.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union

PROTOCOL = 1
"""Version of the protocol."""

MOST_SECONDS = 1e6
"""Largest number that a message may hold: the only one is a time."""


class Breach(Exception):
    """A worker broke the protocol; the message says how, to follow "the program"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """The worker's first message: what it is, and what it declares. Nothing is sent to it before."""

    kind: Literal["hello"]
    protocol: Annotated[int, "version of the protocol that the worker speaks"]
    name: Annotated[str, "name of the implementation in reports"]
    capabilities: Annotated[Mapping[str, Any], "keywords of ringverify.implementation, but for name and devices"]
    versions: Annotated[Mapping[str, str] | None, "what else a report should name, such as the version of jax"] = None
    devices: Annotated[tuple[str, ...], "devices that it runs on"] = ("cpu",)
    reports_changes: Annotated[bool, "whether its results say which inputs a call has changed"] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaseMessage:
    """The tool asks for the results of one case. Tensors are global; the worker shards them as `sharding` says."""

    kind: Literal["case"]
    case: Annotated[int, "number of the case, which the answer repeats"]
    problem: Annotated[Mapping[str, Any], "what to compute: every field has a value, null for an absent constraint"]
    sharding: Annotated[str, "which rank holds which positions"]
    world_size: Annotated[int, "number of ranks"]
    positions: Annotated[tuple[tuple[int, ...], ...], "the same in numbers: query positions of each rank"]
    key_positions: Annotated[tuple[tuple[int, ...], ...], "key positions of each rank"]
    gradients: Annotated[
        bool,
        "whether dq, dk, dv, and dsinks of a problem with sinks, are asked for too, for the cotangents dout and dlse; "
        "if not, the call is inference's",
    ]
    cotangent: Annotated[Literal["out", "lse", "both"], "which results have a cotangent; that of the other is zero"]
    device: Annotated[str, "device to run on"]
    inputs: Annotated[
        str, "path of a safetensors file with q, k and v, sinks if any, and dout and dlse if gradients are asked for"
    ]
    outputs: Annotated[str, "path of the safetensors file to write: out, lse if declared, and gradients if asked for"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """The worker has written the results of a case."""

    kind: Literal["result"]
    case: int
    seconds: Annotated[float | None, "CPU or wall-clock time of the calls"] = None
    changed: Annotated[tuple[str, ...], "names of the inputs that the call has changed, as in the file of inputs"] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unsupported:
    """The worker does not run such a case. It then counts as not tested."""

    kind: Literal["unsupported"]
    case: int
    reason: Annotated[str, "why, in one line"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Error:
    """The implementation raised. This counts as a violation."""

    kind: Literal["error"]
    case: int
    exception: Annotated[str, "type of the exception"]
    text: Annotated[str, "its text"] = ""
    traceback: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bye:
    """The tool is done, and the worker ends. The end of its standard input means the same."""

    kind: Literal["bye"]


Answer = Result | Unsupported | Error
FROM_WORKER: Mapping[str, type] = {"hello": Hello, "result": Result, "unsupported": Unsupported, "error": Error}
TO_WORKER: Mapping[str, type] = {"case": CaseMessage, "bye": Bye}


def line_of(message: CaseMessage | Bye) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(vars(message), separators=(",", ":")).encode() + b"\n"


def read(line: bytes) -> Hello | Answer:
    """Return the message that a worker has written as a line.

    Raises:
        Breach: the line is no message of a worker; the message of the exception says why.
    """
    try:
        content = _frozen(json.loads(line))
        named = content["kind"]
        kind = FROM_WORKER[named]
    except (ValueError, TypeError, KeyError, RecursionError):
        why = "standard output is for messages alone: see docs/worker.md"
        raise Breach(f"wrote a line that is no message: {_shown(line)}; {why}") from None
    fields = _fields(kind)
    for name, hint in fields.items():
        if name not in content:
            if name in _required(kind):
                raise Breach(f"sent {named} without {name!r}")
        elif not _fits(content[name], hint):
            raise Breach(f"sent {named} with {name}={_shown(json.dumps(content[name]).encode())}")
    made: Hello | Answer = kind(**{name: content[name] for name in fields if name in content})
    return made


def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _required(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of the type that a field is annotated with, and a number in its range."""
    arguments = typing.get_args(hint)
    match typing.get_origin(hint):
        case origin if origin in (Union, types.UnionType):
            return any(_fits(value, one) for one in arguments)
        case origin if origin is Literal:
            return value in arguments
        case origin if origin is tuple:
            return isinstance(value, tuple) and all(_fits(one, arguments[0]) for one in value)
        case origin if origin is not None:
            return isinstance(value, dict) and all(_fits(one, arguments[1]) for one in value.values())
    if hint is Any:
        return True
    if hint is float:
        return type(value) in (int, float) and 0 <= value <= MOST_SECONDS
    return type(value) is hint and (hint is not int or value >= 0)


def _frozen(value: Any) -> Any:
    """Return a JSON value with tuples in place of arrays, and surrogates escaped, which no file can hold."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_frozen(name): _frozen(one) for name, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


SHOWN = 80
"""Number of bytes of a line that a message shows."""


def _shown(text: bytes) -> str:
    """Return the beginning of a line, as a Python literal."""
    return repr(text[:SHOWN].decode(errors="replace")) + ("…" if len(text) > SHOWN else "")
