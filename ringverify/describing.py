"""Describe a target given by name without importing it here: a disposable subprocess imports it.

Whatever an import does to its process (end it, crash it, never return), the tool says so in a line and goes on. What
comes back is text that this module made there and reads here: the name, the capabilities, the source location, or why
there are none. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from ringverify import targets
from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Capabilities, Implementation, sharding_name
from ringverify.merge_contract import MergeCapabilities, MergeImplementation
from ringverify.programs import describe_program
from ringverify.worlds.exceptions import one_line
from ringverify.worlds.processes.contained import OF_A_RANK
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.rank import start_fork_server
from ringverify.worlds.processes.wire import signal_name
from ringverify.worlds.world import LOAD_SECONDS, Failure, TooEarly, WorldUnavailable

ShardingPart = Literal["sharding", "inverse"]
Asked = tuple[int, ShardingPart, int | tuple[int, ...], int]
"""A call of a declared sharding: its index, which function of it, and the arguments: length or documents, and ranks."""
SHARDING_SECONDS = 10.0
"""Seconds that one call of a declared sharding function may take, in a process that has imported it already."""


@dataclasses.dataclass(frozen=True)
class FunctionElsewhere:
    """Placeholder for the function of an implementation that only other processes import; it cannot be called.

    Placeholders are equal if they stand for the same function, whatever target names it.

    Attributes:
        target: the target that names the function.
        file: its source file, if it is written in Python.
        line: its first line there.
        name: its qualified name.
    """

    target: str = dataclasses.field(compare=False)
    file: str | None
    line: int | None
    name: str

    def __call__(self, *arguments: Any) -> Any:
        """Refuse the call.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{self.target} was given by name, so it is called in ranks' own processes only")


class ShardingElsewhere:
    """Placeholder for a function of a declared sharding: calls it in another process, once for each pair of arguments.

    In a `Balancer`, it is given documents in place of a length.

    Args:
        place: the other process.
        number: the sharding's index among those declared.
        name: the sharding's name in cases and reports.
        part: which function it is: what deals out positions, or the inverse of a `Balancer`.
    """

    def __init__(self, place: _Place, number: int, name: str, part: ShardingPart = "sharding") -> None:
        self.__qualname__ = name
        self._place = place
        self._number = number
        self._part = part

    def __call__(self, of: int | tuple[int, ...], world_size: int) -> list[Any]:
        """Return the global positions of each rank, or the rows of an inverse.

        Raises:
            ValueError: the function raised, ended its process or did not return in time; the message says which.
            Inconclusive: the other process could not be started.
        """
        return self._place.returned((self._number, self._part, of, world_size))


def describe(target: str, *, seconds: float | None = None) -> Implementation:
    """Return the implementation that `target` names, as `describe_any` does, which also takes merges."""
    found = describe_any(target, seconds=seconds)
    if isinstance(found, MergeImplementation):
        raise UsageError(f"target {target!r} is a merge, not an implementation of attention: {targets.ONLY_CHECK}")
    return found


def describe_any(target: str, *, seconds: float | None = None) -> Implementation | MergeImplementation:
    """Return the implementation or merge that `target` names, with a `FunctionElsewhere` in place of its function.

    The tool's own implementations (`ring`, `allgather`, mutants) are imported here, and come with their function.

    Args:
        target: a built-in name, `module:attribute`, `path/to/file.py:attribute` or `program: COMMAND`.
        seconds: how long its import may take; `LOAD_SECONDS` by default.

    Raises:
        UsageError: the target has no such form, cannot be imported, ends its process, or is not an implementation.
        Inconclusive: a peer's package is not installed, the import takes too long or is killed, or no process starts.
    """
    if targets.is_program(target):
        return describe_program(target, seconds=seconds)
    module, _ = targets.located(target)
    # A target that is being imported is in a disposable process already.
    if targets.being_loaded() is not None:
        return targets.load_any(target)
    if targets.is_ours(module):
        start_fork_server("ringverify.worlds.processes.contained")  # it imports torch while this process does
        return targets.load_any(target)
    place = _Place(target, LOAD_SECONDS if seconds is None else seconds)
    try:
        return place.described()
    finally:
        place.rest()


def lacking(names: Sequence[str]) -> dict[str, str]:
    """Return the built-in names that cannot be checked on this machine, with reasons; one process imports them all.

    Raises:
        Inconclusive: importing them ends the process, or takes too long, or no process can be started.
    """
    place = _Place("a built-in implementation", LOAD_SECONDS)
    try:
        told = place.ask(_reasons, tuple(names), LOAD_SECONDS)
    finally:
        place.rest()
    if isinstance(told, Failure):
        raise Inconclusive(f"a built-in implementation could not be inspected: {told.message}")
    return {name: reason for name, reason in zip(names, told, strict=True) if reason is not None}


class _Place:
    """A disposable process in which a target is imported."""

    def __init__(self, target: str, seconds: float) -> None:
        self._target = target
        self._seconds = seconds
        self._world = GlooWorld()
        self._kept = False
        self._loaded = False
        self._returned: dict[Asked, list[Any] | str] = {}

    def __reduce__(self) -> tuple[type[_Place], tuple[str, float]]:
        """Pickle as another process for the same target: one of the tool's processes sends it to another."""
        return _Place, (self._target, self._seconds)

    def described(self) -> Implementation | MergeImplementation:
        """Import the target in the process, and return what it is."""
        told = self.ask(_tell, self._target, self._seconds)
        if isinstance(told, Failure):
            raise self._not_imported(told)
        self._loaded = True
        match told:
            case {"wrong": str(message)}:
                raise UsageError(message)
            case {"inconclusive": str(message)}:
                raise Inconclusive(message)
        try:
            return self._read(told)
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{self._target} is no implementation that can be checked: {error}") from None

    def rest(self) -> None:
        """End the process, unless declared sharding functions are to be called in it later."""
        if not self._kept:
            self._world.close()

    def returned(self, asked: Asked) -> list[Any]:
        """Return what one of the declared sharding functions returns; each result is kept."""
        if asked not in self._returned:
            self._returned[asked] = self._asked(asked)
        found = self._returned[asked]
        if isinstance(found, str):
            raise ValueError(found)
        return found

    def _asked(self, asked: Asked) -> list[Any] | str:
        if not self._loaded:  # so that importing it is not part of the call's time
            self.described()
        told = self.ask(_shard, (self._target, asked), SHARDING_SECONDS)
        _, part, of, world_size = asked
        what = f"the {part} of {self._target}, called with ({of}, {world_size}),"
        if isinstance(told, Failure):
            self._loaded = False
            if told.kind == "deadline":
                return f"{what} has not returned after {SHARDING_SECONDS:g} s"
            return f"{what} {_ends(told)}{_code(told)}" if told.kind == "died" else f"{what} {told.message}"
        return f"{what} {told}" if isinstance(told, str) else list(told)

    def ask(self, program: Callable[[Any], str], argument: Any, seconds: float) -> Any:
        """Run a function of this module in the process; return the JSON value it gave, or how the run failed."""
        try:
            run = self._world.run(program, argument, world_size=1, seed=0, deadline=seconds)
        except TooEarly as error:  # in the middle of an import
            return Failure("deadline", 0, str(error), error.detail, places=error.places)
        except WorldUnavailable as error:
            raise Inconclusive(f"{self._target} could not be inspected: {error}") from None
        return json.loads(run.results[0]) if run.failure is None else run.failure

    def _not_imported(self, failure: Failure) -> UsageError | Inconclusive:
        match failure.kind:
            case "died" if failure.exit_code == -signal.SIGKILL:
                why = "was ended by signal SIGKILL while it was imported, as the kernel does when memory runs out"
                return Inconclusive(f"{self._target} {why}")
            case "died":
                return UsageError(f"{self._target} {_ends(failure)} while it is imported{_code(failure)}")
            case "deadline":
                where = dict(failure.places).get(0, "at an unknown place")
                why = f"was not imported within {self._seconds:g} s: {where}; allow more with --load-deadline"
                return Inconclusive(f"{self._target} {why}")
        return Inconclusive(f"{self._target} could not be inspected: {failure.message}")

    def _read(self, told: dict[str, Any]) -> Implementation | MergeImplementation:
        """Build what the target is from what `_tell` returned, and check it: the target's code ran in that process."""
        fields: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in told["declared"].items()
        }
        function = FunctionElsewhere(self._target, told["file"], told["line"], told["function"])
        if "shardings" not in told:
            return MergeImplementation(function, str(told["name"]), MergeCapabilities(**fields))
        if not isinstance(told["name"], str):
            raise TypeError(f"its name is {told['name']!r}")
        self._kept = any(isinstance(one, dict) for one in told["shardings"])
        made = [self._sharding(number, one) for number, one in enumerate(told["shardings"])]
        sharding = tuple(made) if told["several"] else made[0]
        return Implementation(function, told["name"], Capabilities(sharding=sharding, **fields))

    def _sharding(self, number: int, told: Any) -> Any:
        """The name of a sharding, or one whose functions are called in the process."""
        if not isinstance(told, dict):
            return told
        from ringref.sharding import balancer  # it imports numpy

        function, inverse = (ShardingElsewhere(self, number, told["function"], part) for part in get_args(ShardingPart))
        return balancer(function, inverse=inverse if told["inverse"] else None) if told["by_documents"] else function


def place_of(implementation: Implementation | MergeImplementation) -> tuple[str | None, int | None]:
    """Return the file and the first line of an implementation's function, each `None` where unknown."""
    function = inspect.unwrap(implementation.function)
    if isinstance(function, FunctionElsewhere):
        return function.file, function.line
    code = getattr(function, "__code__", None)
    return getattr(code, "co_filename", None), getattr(code, "co_firstlineno", None)


def _ends(failure: Failure) -> str:
    """Say how code ended its process, with the signal if there was one."""
    if failure.exit_code is None or failure.exit_code >= 0:
        return "ends its process"
    return f"ends its process by signal {signal_name(-failure.exit_code)}"


def _code(failure: Failure) -> str:
    """Return the exit code of a process in parentheses, or "" if it has none."""
    return "" if failure.exit_code is None or failure.exit_code < 0 else f" (exit code {failure.exit_code})"


# -- in the other process ----------------------------------------------------------------------------------------------


def _tell(target: str) -> str:
    """Return as JSON what a target is, or why it is not an implementation."""
    return json.dumps(_looked_at(target))


def _reasons(names: Sequence[str]) -> str:
    """Return as JSON the reason why each target cannot be checked, null for those that can."""
    told = map(_looked_at, names)
    return json.dumps([one.get("wrong", one.get("inconclusive")) for one in told])


def _looked_at(target: str) -> dict[str, Any]:
    for name in OF_A_RANK:  # of this process, which is no rank of the target's
        os.environ.pop(name, None)
    try:
        return _told(targets.load_any(target))
    except Inconclusive as error:
        return {"inconclusive": str(error)}
    except UsageError as error:
        return {"wrong": str(error)}
    except KeyboardInterrupt:  # raised by the target itself: a terminal's Ctrl-C does not reach this process
        return {"wrong": f"{target} does not import: KeyboardInterrupt"}
    except BaseException as error:  # anything else that the target may raise
        return {"wrong": f"{target} could not be inspected: {one_line(error)}"}


def _told(found: Implementation | MergeImplementation) -> dict[str, Any]:
    """Return what JSON can hold of an implementation or a merge."""
    declared = {field.name: getattr(found.capabilities, field.name) for field in dataclasses.fields(found.capabilities)}
    function, (file, line) = inspect.unwrap(found.function), place_of(found)
    told: dict[str, Any] = {
        "name": found.name,
        "declared": declared,
        "file": file,
        "line": line,
        "function": getattr(function, "__qualname__", repr(function)),
    }
    if isinstance(found, MergeImplementation):
        return told
    from ringref.sharding import Balancer, by_documents

    shardings = found.capabilities.shardings
    return told | {
        "several": isinstance(declared.pop("sharding"), tuple),
        "shardings": [
            one
            if isinstance(one, str)
            else {
                "function": sharding_name(one),
                "by_documents": by_documents(one),
                "inverse": isinstance(one, Balancer) and one.inverse is not None,
            }
            for one in shardings
        ],
    }


def _shard(asked: tuple[str, Asked]) -> str:
    """Call a declared sharding function; return as JSON what it returned, or a text on what it raised."""
    import numpy as np

    from ringref.sharding import Balancer, by_documents

    target, (number, part, of, world_size) = asked
    try:
        sharding = targets.load(target).capabilities.shardings[number]
        if part == "inverse":
            assert isinstance(sharding, Balancer)
            assert sharding.inverse is not None
            assert isinstance(of, tuple)
            return json.dumps(np.asarray(sharding.inverse(of, world_size)).reshape(-1).tolist())
        assert callable(sharding)
        call: Callable[..., Any] = sharding
        told, again = (
            json.dumps([np.asarray(shard).reshape(-1).tolist() for shard in call(of, world_size)]) for _ in range(2)
        )
        if told != again and by_documents(sharding):
            told = json.dumps("returned other positions when it was called again: ranks would not agree")
    except BaseException as error:  # anything that the target may raise
        told = json.dumps(f"raised {one_line(error)}")
    return told
