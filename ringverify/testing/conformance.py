"""`run_conformance` and `@conformance`: the suite called from a user's own test file."""

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

Names = str | Iterable[str]
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

MARK = "ringverify_conformance"
"""Attribute of a decorated test function: its `Conformance`."""
PROPERTY = "ringverify_property"
"""Name of the fixture that tries one property; a decorated test requests it in place of `result`."""
RESULT = "result"
"""Name of the argument by which a decorated test may ask for the result of its property."""


@dataclasses.dataclass(frozen=True)
class Conformance:
    """What a decorated test checks.

    Attributes:
        implementation: the implementation, or the error if its target cannot be used here.
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
    jobs: int | str | None = None,
    cases: str | Path | None = None,
    baseline: str | Path | None = None,
) -> ConformanceResult:
    """Run the suite on one implementation: what `ringverify check` does, as one call.

    Args:
        attend: a function decorated with `@ringverify.implementation`, at the top level of a file, or a target.
        only: ids of the properties to try; all by default.
        skip: ids of the properties to leave out.
        suite: smoke, quick, full or nightly.
        world: simulated, gloo or nccl; by default what the implementation declares.
        world_sizes: numbers of ranks.
        device: device of the tensors.
        seed: decides which cases are tried; 0 by default, in the nightly suite a random one.
        max_examples: largest number of examples of each property.
        time_budget: seconds for the whole run.
        deadline: seconds for one run of a case.
        load_deadline: seconds that a process may take to import the function's file.
        jobs: processes that try cases side by side; by default, or as "auto", one for each core.
        cases: folder for counterexamples, `.ringverify` by default.
        baseline: TOML file of known violations, which do not count.

    Returns:
        The verdict, and the result of each property.

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
        raise error.with_traceback(None) from None  # the message says it all; ringverify's frames add nothing


def _result(attend: Implementation | str, said: dict[str, Any]) -> ConformanceResult:
    """Do the work of `run_conformance`, which returns and raises the same.

    Args:
        attend: an implementation or a target.
        said: the other arguments of `run_conformance`, by name.
    """
    request = CheckRequest.of(said, _argument)
    implementation = _implementation(attend, request.load_deadline)
    if (file := targets.being_loaded()) is not None:
        raise UsageError(
            f"run_conformance was called while {file} was being imported, and every rank imports it: call it inside a "
            'test function, or under if __name__ == "__main__"'
        )
    from ringverify.check.run import check
    from ringverify.interrupts import interrupts
    from ringverify.reports.progress import HIDDEN
    from ringverify.testing.undisturbed import undisturbed

    target = attend if isinstance(attend, str) else reached(implementation, request.load_deadline)
    events: list[Event] = []
    try:
        with undisturbed(Path.cwd()), interrupts():
            check(
                [Subject(target, implementation)],
                request.properties(),
                request.options(),
                events.append,
                HIDDEN,
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
    jobs: int | str | None = None,
    cases: str | Path | None = None,
) -> Callable[[Decorated], Decorated]:
    """Decorate a test function: pytest then collects one test for each property.

    The function is called after the property was found to hold; an argument named `result` receives its
    `PropertyResult`. Arguments that are not given here come from pytest's options `--ringverify-…`; a baseline and a
    report that these name are for these tests too.

    Args:
        attend: a function decorated with `@ringverify.implementation`, at the top level of a file, or a target.
        only: ids of the properties to try; all by default.
        skip: ids of the properties to leave out.
        suite: smoke, quick, full or nightly.
        world: simulated, gloo or nccl; by default what the implementation declares.
        world_sizes: numbers of ranks.
        device: device of the tensors.
        seed: decides which cases are tried.
        max_examples: largest number of examples of each property.
        deadline: seconds for one run of a case.
        load_deadline: seconds that a process may take to import the function's file.
        jobs: processes that try cases side by side; by default, or as "auto", one for each core.
        cases: folder for counterexamples.

    Raises:
        UsageError: an argument is wrong. A target that is wrong, or cannot be checked here, is an error of its test.
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
    """Return how a message names an argument."""
    return f"{name}:"


def _or_why_not(attend: Implementation | str, seconds: float | None) -> Implementation | UsageError | Inconclusive:
    """Return the implementation; for a target that cannot be used here, the error to raise in its own test.

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
    """Return the implementation that an argument is or names.

    Raises:
        UsageError: it is neither an implementation nor the target of one.
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
    """Return the target under which other processes find an implementation.

    The target is imported once in another process here: a file that cannot be imported would later look like a failure
    of the implementation.

    Raises:
        UsageError: no other process could import it.
        Inconclusive: no other process could be started.
    """
    from ringverify.describing import FunctionElsewhere, describe

    if isinstance(implementation.function, FunctionElsewhere):
        return implementation.function.target
    target = targets.address_of(implementation)
    describe(target, seconds=seconds)
    return target
