"""Programs as implementations: what a worker says of itself in its `hello`, and the published schema of its messages.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

from ringverify.errors import Inconclusive, UsageError, instead
from ringverify.events import Json, schema_of
from ringverify.implementation import SHARDING_NAMES, Capabilities, Implementation
from ringverify.words import legible
from ringverify.worlds.external.messages import FROM_WORKER, MOST_SECONDS, PROTOCOL, TO_WORKER, Breach, Hello
from ringverify.worlds.external.process import Ended, ProgramProcess, TooLong, command_of
from ringverify.worlds.world import LOAD_SECONDS

NOT_FOR_PROGRAMS = ("devices", "processes", "subgroups", "memory", "traffic")
"""Capabilities that a worker does not declare: one has a field of its own, and the others speak of ranks that are seen.
"""


@dataclasses.dataclass(frozen=True)
class ProgramElsewhere:
    """Placeholder for the function of a program; it cannot be called.

    Attributes:
        target: the target that names the program.
        hello: what its worker said.
    """

    target: str
    hello: Hello

    def __call__(self, *arguments: Any) -> Any:
        """Refuse the call.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{self.target} is a program, so it runs in a process of its own only")


def describe_program(target: str, *, seconds: float | None = None) -> Implementation:
    """Start a program, read its `hello`, end it, and return the implementation that it says it is.

    Args:
        target: `program: COMMAND`.
        seconds: how long its `hello` may take; `LOAD_SECONDS` by default.

    Raises:
        UsageError: it cannot be executed, ends, breaks the protocol, or declares what cannot be.
        Inconclusive: it says nothing in time, is killed, or no process can be started.
    """
    longest = LOAD_SECONDS if seconds is None else seconds
    try:
        worker = ProgramProcess(command_of(target))
    except ValueError as error:
        raise UsageError(f"target {target!r}: {error}") from None
    except OSError as error:
        raise Inconclusive(f"{target} could not be started: {error}") from None
    try:
        hello = worker.hello(longest)
    except Breach as error:
        raise UsageError(f"{target}: the program {error}") from None
    except TooLong:
        raise Inconclusive(
            f"{target} did not say hello within {longest:g} s; allow more with --load-deadline"
        ) from None
    except Ended as error:
        lines = worker.printed.strip().splitlines()
        said = f": {legible(lines[-1].strip())}" if lines else ""
        kind = Inconclusive if error.exit_code == -signal.SIGKILL else UsageError
        raise kind(f"{target}: the program {error} before it said hello{said}") from None
    finally:
        worker.end(kindly=True)
    try:
        return Implementation(ProgramElsewhere(target, hello), hello.name, capabilities_of(hello))
    except (TypeError, ValueError) as error:
        raise UsageError(f"{target}: its hello declares {error}") from None


def capabilities_of(hello: Hello) -> Capabilities:
    """Return the declared capabilities, which have the names and values of the decorator's keywords.

    Raises:
        TypeError: a value is of a type that the keyword cannot have.
        ValueError: a keyword is unknown, not for programs, or has an impossible value.
    """
    if not hello.name.strip():
        raise ValueError(f"name={hello.name!r}: expected the name of the implementation in reports")
    known = [field.name for field in dataclasses.fields(Capabilities) if field.name not in NOT_FOR_PROGRAMS]
    for name in hello.capabilities:
        if name in NOT_FOR_PROGRAMS:
            why = "the field devices says it" if name == "devices" else "a program's ranks are not seen"
            raise ValueError(f"{name!r}, which is not for programs: {why}")
        if name not in known:
            raise ValueError(f"the unknown capability {name!r}{instead(name, known)}")
    sharding = hello.capabilities.get("sharding", "contiguous")
    for one in sharding if isinstance(sharding, tuple) else (sharding,):
        if one not in SHARDING_NAMES:
            raise ValueError(f"sharding={one!r}: expected one of {', '.join(SHARDING_NAMES)}")
    if hello.capabilities.get("sinks") == "partial":
        raise ValueError("sinks='partial': expected true, since a program returns whole gradients, or false")
    return Capabilities(**hello.capabilities, devices=hello.devices)


def schema() -> Json:
    """Return the published schema of the messages, derived from their classes."""
    kinds = {name: schema_of(kind) for name, kind in {**FROM_WORKER, **TO_WORKER}.items()}
    definitions: dict[str, Json] = {}
    for one in kinds.values():
        definitions |= one["$defs"]
    definitions["number"] = {"type": "number", "minimum": 0, "maximum": MOST_SECONDS}  # those of reports differ
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"RingVerify worker protocol, version {PROTOCOL}: one message, one line of JSON",
        "description": "A worker writes hello, and then one of result, unsupported and error for each case that it "
        "reads, until bye. Readers ignore fields that they do not know.",
        "oneOf": [{"$ref": one["$ref"]} for one in kinds.values()],
        "$defs": definitions,
    }
