"""The plugin of a pytest session: collects, tries, reports, counts. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import ringverify
from ringverify.check.options import MOST_DRAWN, CheckRequest, Options, Subject
from ringverify.check.outcome import LOADS, unavailable
from ringverify.errors import Inconclusive, UsageError
from ringverify.events import Event, HeaderEvent, ImplementationEvent
from ringverify.implementation import Implementation
from ringverify.testing import asked
from ringverify.testing.calls import listening, tried_in
from ringverify.testing.conformance import MARK, PROPERTY, Conformance
from ringverify.testing.items import CannotBeChecked, Implementations, PropertyItem, RequestedTarget
from ringverify.testing.results import ConformanceError, PropertyResult
from ringverify.testing.tally import UNLEARNED, Tally, TestedProperty, name_with
from ringverify.words import legible

if TYPE_CHECKING:
    from ringverify.check.baseline import Baseline
    from ringverify.properties.property import Property
    from ringverify.testing.checks import Checks, PlannedChecks

TOLD = "ringverify_told"
"""Attribute of a test's report: the outcomes of properties in it, each as text."""
DRAWN = "ringverify_drawn"
"""Key under which xdist hands its workers the seed that was drawn for nightly runs."""
TESTED = pytest.StashKey[TestedProperty]()
"""Where a test of this plugin keeps the outcome of its property."""


class RingVerifySession:
    """The plugin in one process of pytest; under xdist, in the main process and in each worker.

    Args:
        config: configuration of the session.

    Raises:
        UsageError: an option, a target or a file is wrong.
        ReportError: the report cannot be written.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        workerinput = getattr(config, "workerinput", None)
        self._drawn: int = secrets.randbelow(MOST_DRAWN) if workerinput is None else workerinput[DRAWN]
        self._request = asked.request(config)
        names, self._chosen = asked.take_targets(config)
        self._baseline: Baseline | None = None
        self._mistake: UsageError | None = None
        if names or config.getoption("ringverify_baseline") is not None:
            self._read_baseline()
        self._implementations: list[str] = []
        self._prepared = self._prepare(names) if names else []
        self._shared: set[str] = set()
        report = None if config.option.collectonly else config.getoption("ringverify_report")
        self._tally: Tally | None = None
        if workerinput is None:
            settings = self._request.settings(self._drawn)
            self._tally = Tally(report and Path(report), settings=settings, baseline=self._baseline is not None)
        self._checks: Checks | None = None
        self._calls: list[TestedProperty] = []
        self._expected = 0

    def _prepare(self, names: list[str]) -> list[RequestedTarget]:
        """Describe the targets and plan their checks, as far as possible before anything runs."""
        # Before torch is imported, which takes seconds: a target is easily mistyped.
        loaded = [(name, _described(name, self._request.load_deadline)) for name in names]

        from ringverify.check.run import named_apart
        from ringverify.testing.checks import PlannedChecks, plan_for
        from ringverify.worlds.processes.torchrun import placement

        if (here := placement()) is not None and here.world_size > 1:
            raise UsageError(
                "under torchrun each process would run every test: there, run torchrun … -m ringverify check TARGET"
            )
        subjects = [Subject(name, one) for name, one in loaded if not isinstance(one, Inconclusive)]
        self._implementations = named_apart(subject.implementation for subject in subjects)
        options = self._options(self._request)
        prepared = []
        for name, one in loaded:
            chosen = None if self._chosen is None else self._chosen.get(name)
            properties = CheckRequest(only=chosen).over(self._request).properties()
            checked: PlannedChecks | Inconclusive
            try:
                if isinstance(one, Inconclusive):
                    checked = one
                else:
                    checked = PlannedChecks(name, plan_for(Subject(name, one), options), options, len(properties))
            except Inconclusive as error:
                checked = Inconclusive(f"{name} cannot be checked here: {asked.in_our_words(str(error))}")
            prepared.append(RequestedTarget(name, checked, properties))
        return prepared

    def _read_baseline(self) -> None:
        """Read the baseline once; called only if this session tests an implementation."""
        from ringverify.check.baseline import read_baseline

        if self._baseline is None and self._request.baseline is not None:
            self._baseline = read_baseline(self._request.baseline)

    def _options(self, request: CheckRequest) -> Options:
        """Return the options of a run, with the baseline of this session."""
        options = dataclasses.replace(request, baseline=None).options(drawn=self._drawn)
        return dataclasses.replace(options, baseline=self._baseline)

    # -- what is collected ---------------------------------------------------------------------------------------------

    def pytest_report_header(self, config: pytest.Config) -> list[str]:
        """Say what is checked, where, and with which seed."""
        lines = []
        for one in self._prepared:
            if isinstance(one.checked, Inconclusive):
                lines.append(f"ringverify: {one.checked}")
                continue
            plan, options = one.checked.plan, one.checked.options
            lines.append(
                f"ringverify {ringverify.__version__}: {plan.implementation.name}, {plan.world} world, "
                f"{options.device}, suite {options.suite}, seed {options.seed}"
            )
        return lines

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, session: pytest.Session, items: list[pytest.Item]) -> None:
        """Add the tests of targets before any are deselected, and find implementations that several tests check."""
        decorated = [(item, about.implementation) for item in items if (about := _about(item))]
        functions = {_function_of(item): one.name for item, one in decorated if isinstance(one, Implementation)}
        names = Counter([*self._implementations, *functions.values()])
        self._shared = {function for function, name in functions.items() if names[name] > 1}
        try:
            if functions:
                self._read_baseline()
        except UsageError as error:
            if self._tally is None:  # in a worker of xdist, where a usage error would not end pytest
                self._mistake = error
            else:
                raise pytest.UsageError(f"ringverify: {error}") from None
        if self._prepared:
            ours = list(session.genitems(Implementations.under(session, self._prepared, self._try_target)))
            for item in ours:
                if isinstance(item, CannotBeChecked):
                    item.stash[TESTED] = self._unchecked(item)
            items.extend(ours)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests of this process that take time: the time budget is shared among them."""
        workers = getattr(self._config, "workerinput", {}).get("workercount", 1)
        self._expected = -(-sum(map(_takes_time, session.items)) // workers)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test for each property of a decorated function."""
        about = _about(metafunc.definition)
        if about is None:
            return
        if not isinstance(about.implementation, Implementation):
            metafunc.parametrize(PROPERTY, [None], indirect=True, ids=[LOADS])
            return
        try:
            properties = about.request.over(self._request).properties()
        except UsageError as error:
            raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from None
        metafunc.parametrize(PROPERTY, properties, indirect=True, ids=[property.id for property in properties])

    @pytest.fixture
    def ringverify_property(self, request: pytest.FixtureRequest) -> Callable[[], PropertyResult]:
        """Return a function that tries the property of a test decorated with `@ringverify.conformance`."""

        def attempt() -> PropertyResult:
            __tracebackhide__ = True
            return self._try_decorated(request.node, getattr(request.function, MARK), request.param)

        return attempt

    # -- what is tried -------------------------------------------------------------------------------------------------

    def _try_target(self, item: pytest.Item, checked: PlannedChecks, property: Property) -> PropertyResult:
        __tracebackhide__ = True
        return self._try(item, checked, property, name=checked.plan.implementation.name)

    def _unchecked(self, item: CannotBeChecked) -> TestedProperty:
        """Return what the report says of a target that cannot be checked here."""
        from ringverify.check.run import header

        tried = unavailable(item.target, str(item.reason))
        return TestedProperty(item.target, item.target, 1, header(self._options(self._request)), tried)

    def _try_decorated(self, item: pytest.Item, about: Conformance, property: Property) -> PropertyResult:
        __tracebackhide__ = True
        if not isinstance(about.implementation, Implementation):
            raise about.implementation.with_traceback(None)
        request = about.request.over(self._request)
        function, name = _function_of(item), about.implementation.name
        checked = self._checks_here().of(
            function, about.implementation, self._options(request), asked=len(request.properties())
        )
        return self._try(item, checked, property, name=name_with(name, function) if function in self._shared else name)

    def _checks_here(self) -> Checks:
        """Return the object that tries properties; torch is imported when that is first needed."""
        if self._checks is None:
            from ringverify.testing.checks import Checks

            self._checks = Checks(self._config.invocation_params.dir, self._expected)
        return self._checks

    def _try(self, item: pytest.Item, checked: PlannedChecks, property: Property, *, name: str) -> PropertyResult:
        """Try a property for a test, and end the test as the verdict requires.

        Raises:
            ConformanceError: it is violated, or passes although the baseline has it violated.
            Inconclusive: nothing was learned.
            UsageError: the baseline is wrong.
        """
        __tracebackhide__ = True
        if self._mistake is not None:
            raise self._mistake
        from ringverify.check.run import header

        tried = self._checks_here().try_property(checked, property)
        item.stash[TESTED] = TestedProperty(checked.key, name, checked.asked, header(checked.options), tried)
        result = PropertyResult.of(tried.outcome)
        item.user_properties += _for_junit(result, tried.verdict.world or tried.world, checked)
        match result.verdict:
            case "unsupported":
                pytest.skip(legible(result.reason))
            case "inconclusive":
                raise Inconclusive(result.describe())
            case "fail" if result.known is not None:
                pytest.xfail(legible(f"{result.known.reason} ({result.known.link})"))
        if result.verdict == "fail" or result.unexpected is not None:
            raise ConformanceError(result, verbose=self._config.get_verbosity() > 0)
        return result

    # -- what is told --------------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Record the calls of `run_conformance` that a test and its fixtures make."""
        made = Counter[str]()

        def hear(events: Sequence[Event]) -> None:
            header = events[0] if events else None
            if isinstance(header, HeaderEvent) and (tried := tried_in(events)):
                item.user_properties.append(("ringverify_seed", header.seed))
                implementation = tried[0].verdict.implementation
                made[implementation] += 1
                call = item.nodeid if made[implementation] == 1 else f"{item.nodeid}, call {made[implementation]}"
                whole = [event for event in events if isinstance(event, ImplementationEvent)]
                asked = len(tried) + sum(event.not_run or 0 for event in whole)
                name = name_with(implementation, call)
                self._calls += [TestedProperty(name, name, asked, header, one, called=True) for one in tried]

        with listening(hear):
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Show a failure as `check` does, and make an inconclusive test an error rather than a failure."""
        report = yield
        tested = item.stash.get(TESTED, None) if call.when == "call" else None
        told = [*self._take_calls(), *([] if tested is None else [tested])]
        if told:
            setattr(report, TOLD, [one.to_text() for one in told])
        if call.when != "call":
            return report
        error = None if call.excinfo is None else call.excinfo.value
        file, line, _ = item.reportinfo()
        if tested is not None and report.skipped and tested.tried.verdict.verdict == "unsupported":
            report.longrepr = (str(file), (line or 0) + 1, legible(f"Skipped: {tested.tried.verdict.reason}"))
        ours = isinstance(item, (PropertyItem, CannotBeChecked)) or _about(item) is not None
        if call.excinfo is not None and ours and isinstance(error, (ConformanceError, Inconclusive, UsageError)):
            shown: Any = call.excinfo.getrepr(style="value")
            if shown.reprcrash is not None:  # what the short summary says
                shown.reprcrash.path, shown.reprcrash.lineno = str(file), (line or 0) + 1
                shown.reprcrash.message = str(error)
            report.longrepr = shown
        if report.failed and (isinstance(error, Inconclusive) or (ours and isinstance(error, UsageError))):
            report.when = "setup"  # pytest has "error" for what fails before the test itself
            setattr(report, UNLEARNED, isinstance(error, Inconclusive))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's report to the tally."""
        if self._tally is not None:
            self._tally.add(report, getattr(report, TOLD, ()))

    def pytest_keyboard_interrupt(self) -> None:
        """Keep what the calls of an interrupted test found, since that test gets no report."""
        for tested in self._take_calls():
            if self._tally is not None:
                self._tally.note(tested)

    def _take_calls(self) -> list[TestedProperty]:
        taken, self._calls = self._calls, []
        return taken

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """End the worlds and the report, and set an exit status in which inconclusive is neither pass nor violation."""
        if self._checks is not None:
            self._checks.close()
        if self._tally is not None:
            self._tally.close(whole=exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED))
            session.exitstatus = self._tally.exit_status(int(exitstatus), session.testsfailed)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the verdicts, which `-q` leaves out, and remarks that are always shown."""
        if self._tally is None:
            return
        lines = list(self._tally.lines()) if self._config.get_verbosity() >= 0 else []
        lines += [("inconclusive", remark) for remark in self._tally.remarks()]
        if lines:
            terminalreporter.write_sep("=", "ringverify")
            for verdict, line in lines:
                terminalreporter.write_line(legible(line), **_COLOURS.get(verdict, {}))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Hand a worker of xdist the seed that all workers have to share."""
        node.workerinput[DRAWN] = self._drawn


_COLOURS: dict[str, dict[str, bool]] = {
    "conformant": {"green": True},
    "violations": {"red": True},
    "inconclusive": {"yellow": True},
}


def _about(item: object) -> Conformance | None:
    """Return what a decorated test checks; `None` for any other test."""
    about: Conformance | None = getattr(getattr(item, "function", None), MARK, None)
    return about


def _takes_time(item: pytest.Item) -> bool:
    """Whether a test tries a property that applies to its implementation, so that it takes time."""
    if isinstance(item, PropertyItem):
        return item.property.unsupported(item.checked.plan.implementation.capabilities) is None
    about = _about(item)
    if about is None or not isinstance(about.implementation, Implementation):
        return False
    callspec = getattr(item, "callspec", None)  # which a method of a unittest.TestCase lacks
    property: Property | None = None if callspec is None else callspec.params.get(PROPERTY)
    return property is not None and property.unsupported(about.implementation.capabilities) is None


def _function_of(item: pytest.Item) -> str:
    """Return the id that the tests of a decorated function share: its own parameters, without the property."""
    function, _, ids = item.nodeid.partition("[")
    callspec = getattr(item, "callspec", None)
    if callspec is None:  # a method of a unittest.TestCase; its test will say that it cannot be decorated
        return function
    property: Property = callspec.params[PROPERTY]
    own = re.sub(rf"(^|-){property.id}(-|$)", lambda found: "-" if found[1] and found[2] else "", ids[:-1], count=1)
    return f"{function}[{own}]" if own else function


def _described(target: str, seconds: float | None) -> Implementation | Inconclusive:
    from ringverify.describing import describe

    try:
        return describe(target, seconds=seconds)
    except Inconclusive as error:
        return error


def _for_junit(result: PropertyResult, world: str, checked: PlannedChecks) -> list[tuple[str, object]]:
    """Return the user properties of a test, for JUnit files and other readers of its report."""
    said = {
        "implementation": result.implementation,
        "property": result.property,
        "world": world,
        "device": checked.options.device,
        "suite": checked.options.suite,
        "seed": checked.options.seed,
        "examples": result.examples,
        "margin": None if result.margin is None else float(result.margin),
        "reason": result.reason,
    }
    return [(f"ringverify_{name}", value) for name, value in said.items() if value is not None]
