"""`run_conformance` and `@conformance`: the suite from somebody's own test file."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from ringverify import targets
from ringverify.check.option_table import ARGUMENTS
from ringverify.check.options import CheckRequest, Subject
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import Event
from ringverify.implementation import Implementation
from ringverify.testing import calls
from ringverify.testing.results import ConformanceError, ConformanceResult
from ringverify.testing.unwatched import Unwatched

Names = str | Iterable[str]
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

MARK = "ringverify_conformance"
"""Attribute of a decorated test: its `Conformance`."""
PROPERTY = "ringverify_property"
"""The fixture that tries one property; a decorated test gets it in place of its `result`."""
RESULT = "result"
"""The argument by which a decorated test may ask for the result."""


@dataclasses.dataclass(frozen=True)
class Conformance:
    """What a decorated test is about.

    Attributes:
        implementation: the implementation, or why its target is none here.
        request: what was asked for.
    """

    implementation: Implementation | UsageError | Inconclusive
    request: CheckRequest


def run_conformance(
    attend: Implementation | str,
    *,
    only: Names | None = None,
    skip: Names | None = None,
    suite: str | None = None,
    world: str | None = None,
    world_sizes: Iterable[int] | None = None,
    device: str | None = None,
    seed: int | None = None,
    max_examples: int | None = None,
    time_budget: float | None = None,
    deadline: float | None = None,
    load_deadline: float | None = None,
    cases: str | Path | None = None,
    baseline: str | Path | None = None,
) -> ConformanceResult:
    """Run the suite on one implementation: what `ringverify check` does, as one call.

    Args:
        attend: a function decorated with `@ringverify.implementation`, at the top level of a file, or a target.
        only: ids of the properties to try; all by default.
        skip: ids of those to leave out.
        suite: smoke, quick, full or nightly.
        world: simulated, gloo or nccl; by default what the implementation declares.
        world_sizes: numbers of ranks.
        device: of the tensors.
        seed: decides which cases are tried; 0 by default, drawn in the nightly suite.
        max_examples: of each property, at most.
        time_budget: seconds for the whole run.
        deadline: seconds for one run of a case.
        load_deadline: seconds that a process may take to import the function's file.
        cases: folder for counterexamples, `.ringverify` by default.
        baseline: TOML file of the violations that are known and do not count.

    Returns:
        The verdict, and what came of each property.

    Raises:
        ConformanceError: a property is violated; an `AssertionError` with the counterexample and its replay line.
        Inconclusive: nothing was learned: infrastructure failed, or nothing applicable ran.
        UsageError: an argument is wrong, or the baseline is out of date.
    """
    __tracebackhide__ = True
    said = {name: value for name, value in locals().items() if name in ARGUMENTS}
    try:
        return _result(attend, said)
    except (ConformanceError, Inconclusive, UsageError) as error:
        raise error.with_traceback(None) from None  # the message says it all, and our frames nothing


def _result(attend: Implementation | str, said: dict[str, Any]) -> ConformanceResult:
    """What `run_conformance` returns, and raises.

    Args:
        attend: a function or a target.
        said: its other arguments, by name.
    """
    request = CheckRequest.of(said, _argument)
    implementation = _implementation(attend, request.load_deadline)
    if (file := targets.being_loaded()) is not None:
        raise UsageError(
            f"run_conformance is called as {file} is imported, which every rank does: call it in a test, or under "
            'if __name__ == "__main__"'
        )
    from ringverify.check.interrupts import interrupts
    from ringverify.check.run import check
    from ringverify.testing.undisturbed import undisturbed

    target = attend if isinstance(attend, str) else reached(implementation, request.load_deadline)
    events: list[Event] = []
    try:
        with undisturbed(Path.cwd()), interrupts() as look:
            check(
                [Subject(target, implementation)],
                request.properties(),
                request.options(),
                events.append,
                Unwatched(look),
            )
    finally:
        calls.tell(events)
    result = ConformanceResult.of(events)
    if any(one.is_new_violation() for one in result.properties.values()):
        raise ConformanceError(result)
    unexpected = [one.unexpected for one in result.properties.values() if one.unexpected is not None]
    if unexpected:
        raise UsageError(unexpected[0])
    if result.verdict == "inconclusive":
        raise Inconclusive(result.describe())
    return result


def conformance(
    attend: Implementation | str,
    *,
    only: Names | None = None,
    skip: Names | None = None,
    suite: str | None = None,
    world: str | None = None,
    world_sizes: Iterable[int] | None = None,
    device: str | None = None,
    seed: int | None = None,
    max_examples: int | None = None,
    deadline: float | None = None,
    load_deadline: float | None = None,
    cases: str | Path | None = None,
) -> Callable[[Decorated], Decorated]:
    """Make one test a property of a function in a test file.

    The function is called after its property held; if it has an argument `result`, it is handed what came of the
    property. What is not said here, the options `--ringverify-…` of pytest say; the baseline and the report named there
    are of these tests too.

    Args:
        attend: a function decorated with `@ringverify.implementation`, at the top level of a file, or a target.
        only: ids of the properties to try; all by default.
        skip: ids of those to leave out.
        suite: smoke, quick, full or nightly.
        world: simulated, gloo or nccl; by default what the implementation declares.
        world_sizes: numbers of ranks.
        device: of the tensors.
        seed: decides which cases are tried.
        max_examples: of each property, at most.
        deadline: seconds for one run of a case.
        load_deadline: seconds that a process may take to import the function's file.
        cases: folder for counterexamples.

    Raises:
        UsageError: an argument is wrong. A target that is wrong, or cannot be checked here, is an error of the test.
    """
    said = {name: value for name, value in locals().items() if name in ARGUMENTS}
    request = CheckRequest.of(said, _argument)
    about = Conformance(_or_why_not(attend, request.load_deadline), request)

    def decorate(function: Decorated) -> Decorated:
        parameters = inspect.signature(function).parameters
        if PROPERTY in parameters or not inspect.isfunction(function):
            raise UsageError(f"@conformance decorates a test function once, and {function!r} is not one")

        @functools.wraps(function)
        def test(*arguments: Any, **fixtures: Any) -> Any:
            __tracebackhide__ = True
            if PROPERTY not in fixtures:
                raise UsageError(
                    f"{function.__qualname__} is decorated with @conformance, which makes tests for pytest: elsewhere, "
                    "and in a unittest.TestCase, call ringverify.run_conformance"
                )
            result = fixtures.pop(PROPERTY)()
            if RESULT in parameters:
                fixtures[RESULT] = result
            return function(*arguments, **fixtures)

        handed = [one for name, one in parameters.items() if name != RESULT]
        ours = inspect.Parameter(PROPERTY, inspect.Parameter.KEYWORD_ONLY)
        setattr(test, "__signature__", inspect.Signature(sorted([*handed, ours], key=lambda one: one.kind)))  # noqa: B010 - mypy knows no such attribute
        setattr(test, MARK, about)
        return test  # type: ignore[return-value]  # its arguments are pytest's affair

    return decorate


def _argument(name: str) -> str:
    """How a message names an argument."""
    return f"{name}:"


def _or_why_not(attend: Implementation | str, seconds: float | None) -> Implementation | UsageError | Inconclusive:
    """The implementation; of a target that is none here, what is to be said of that in its own test.

    Raises:
        UsageError: it is neither an implementation nor a target.
    """
    try:
        return _implementation(attend, seconds)
    except (UsageError, Inconclusive) as error:
        if not isinstance(attend, str):
            raise
        return error


def _implementation(attend: Implementation | str, seconds: float | None) -> Implementation:
    """The implementation that an argument is.

    Raises:
        UsageError: it is none.
        Inconclusive: the target cannot be checked here.
    """
    if isinstance(attend, str):
        from ringverify.describing import describe

        attend = describe(attend, seconds=seconds)
    if not isinstance(attend, Implementation):
        raise UsageError(
            f"{attend!r} is a {type(attend).__name__}, not an implementation: decorate the function with "
            "@ringverify.implementation(...)"
        )
    return attend


def reached(implementation: Implementation, seconds: float | None) -> str:
    """The target under which other processes find an implementation.

    One that is at hand is looked at there first: a file that does not import would look like its own failure.

    Raises:
        UsageError: no process could find it.
        Inconclusive: none could be asked.
    """
    from ringverify.describing import FunctionElsewhere, describe

    if isinstance(implementation.function, FunctionElsewhere):
        return implementation.function.target
    target = targets.address_of(implementation)
    describe(target, seconds=seconds)
    return target
