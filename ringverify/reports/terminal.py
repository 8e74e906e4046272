"""A run on the terminal: one line for each property when it ends, and for a failure what to look at first."""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from ringverify.events import (
    CounterexampleEvent,
    Event,
    ExchangeEvent,
    FooterEvent,
    HeaderEvent,
    ImplementationEvent,
    PropertyEvent,
    TriedEvent,
)
from ringverify.reports.features import NAMED, Table, short_tables, untried_line
from ringverify.reports.story import DETAIL_LINES, detail_lines, later_cause, margin_text, repeated, shown, story
from ringverify.words import PRINTED, cut, legible, plural

STYLES = {
    "pass": "green",
    "fail": "bold red",
    "unsupported": "dim",
    "inconclusive": "yellow",
    "conformant": "bold green",
    "violations": "bold red",
}
CUT = f", its last {PRINTED:,} characters"
"""Follows the name of a rank whose output may have been cut."""


class Terminal:
    """Prints events as text, in colour where the console is a terminal.

    Args:
        console: where to print.
        verbose: print full tracebacks, every failure in full, what was tried, and what ranks printed.
        printed: print what ranks printed, also where `verbose` is false.
        quiet: print only the verdicts, and the properties that did not pass or were cut short.
    """

    def __init__(self, console: Console, *, verbose: bool = False, printed: bool = False, quiet: bool = False) -> None:
        self.console = console
        self.verbose = verbose
        self.quiet = quiet
        self._with_printed = printed or verbose
        self._named = ""
        self._worked = 0.0
        self._counted = "example"
        self._stories: dict[str, CounterexampleEvent] = {}

    def tell(self, event: Event) -> None:
        """Print an event."""
        event = shown(event)
        if isinstance(event, HeaderEvent):
            self._counted = "row" if event.suite == "scale" else "example"
        match event:
            case HeaderEvent() if not self.quiet:
                self._line(
                    f"ringverify {event.ringverify}, torch {event.torch}, python {event.python}, {event.device}, "
                    f"suite {event.suite}, seed {event.seed}"
                )
            case PropertyEvent():
                self._property(event)
            case CounterexampleEvent():
                self._counterexample(event)
            case TriedEvent() if self.verbose:
                for one in short_tables(event):
                    self._table(one)
            case ImplementationEvent():
                self._implementation(event)
            case ExchangeEvent():
                self._exchange(event)
            case FooterEvent():
                for line in event.unexpected or ():
                    self._line(f"\n{line}", "bold red")
                if event.elsewhere is not None:
                    self._line(f"\nin the baseline, but not checked in this run: {', '.join(event.elsewhere)}", "dim")

    def _counterexample(self, event: CounterexampleEvent) -> None:
        """Print a violation: what is wrong, the case, the worst element, and how to see it again."""
        if event.same_as is not None and not self.verbose:
            self._print(("        the same as ", "dim"), repeated(event))
            if (cause := later_cause(event, self._stories.get(event.same_as))) is not None:
                self._print(("        cause   ", "dim"), cause)
            return
        self._stories[event.property] = event
        for label, text in story(event):
            self._print((f"        {label:<8}", "dim"), text)
        for one in event.printed or () if self._with_printed else ():
            whose = "the ranks' process" if one.rank is None else f"rank {one.rank}"
            self._line(f"        printed by {whose}{CUT if len(one.text) >= PRINTED else ''}", "dim")
            for line in one.text.rstrip("\n").splitlines():
                self._line(f"        | {line}")
        left_out, lines = detail_lines(event, None if self.verbose else DETAIL_LINES)
        if left_out:
            self._line(f"        … {left_out} more lines with -v", "dim")
        for line in lines:
            self._line(f"        | {line}", "dim")

    def _property(self, event: PropertyEvent) -> None:
        verdict = event.verdict
        self._worked += event.seconds
        unremarkable = verdict == "unsupported" or (verdict == "pass" and event.reason is None)
        if self.quiet and unremarkable and event.unexpected is None:
            return
        if event.implementation != self._named:
            self._named = event.implementation
            self._line(f"\n{self._named}", "bold")
        if verdict in ("unsupported", "inconclusive"):
            numbers = event.reason or ""
        else:
            counted = f"{event.examples:>6} {plural(self._counted, event.examples)}" if event.examples else ""
            numbers = f"{counted:<15} {event.seconds:>7.1f} s"
            numbers += f"   margin {margin_text(event.margin)}"
            if event.remembered is not None:
                numbers += f"   {event.remembered} of them failed in an earlier run"
            if event.reason is not None:
                numbers += f"   ({event.reason})"
            if event.world is not None:
                numbers += f"   in the {event.world} world"
        named, style = (verdict, STYLES[verdict]) if event.known is None else ("known fail", "yellow")
        self._print("  ", (f"{named:<13}", style), f"{event.property:<23}{numbers}")
        for line in (event.traceback or "").splitlines() if self.verbose else ():
            self._line(f"        | {line}", "dim")
        for line in event.figures or ():
            self._print(("        figures ", "dim"), line)
        for line in event.passed_over or ():
            self._print(("        note    ", "dim"), line)
        if event.known is not None:
            self._print(("        known   ", "dim"), f"{event.known.reason} ({event.known.link})")
        if event.unexpected is not None:
            self._print(("        known   ", "dim"), "listed in the baseline, but it passes: remove the entry")

    def _implementation(self, event: ImplementationEvent) -> None:
        self._stories.clear()
        seconds = max(event.seconds or 0.0, 1e-9)
        worked, self._worked = max(self._worked, seconds), 0.0  # longer, if properties were tried side by side
        kinds = {**dict.fromkeys(STYLES, ""), "fail": f" ({event.known} known)" if event.known else ""}
        counts = ", ".join(
            f"{count} {kind}{kinds.get(kind, '')}" for kind, count in (event.properties or {}).items() if count
        )
        if event.not_run:
            counts += f", {event.not_run} not run (-x)"
        before = f"{event.implementation}: " if self.quiet else "  "
        verdict = (event.verdict, STYLES[event.verdict])
        self._print(before, verdict, f"{event.reached}: {counts}{event.not_reached}")
        for finding in event.gloo_refuses or ():
            self._print(("  works here, gloo refuses it: ", "yellow"), finding)
        if self.quiet:
            return
        if event.examples:
            inside = min(100, 100 * (event.seconds_inside or 0.0) / worked)  # a program may use several cores
            beside = "" if event.simulated_runs is None else f" and {event.simulated_runs} of the simulated one"
            world = "" if event.world is None else f" of the {event.world} world{beside}"
            known = event.world is not None and event.seconds_inside  # a program need not say how long it took
            share = f"; {inside:.0f} % of the time inside the implementation" if known else ""
            rate = event.examples / seconds
            self._line(
                f"  {event.examples} {plural(self._counted, event.examples)} in {event.runs} "
                f"{plural('run', event.runs or 0)}{world}, "
                f"{seconds:.1f} s: {rate:{'.0f' if rate >= 1 else '.1g'}} {self._counted}s a second{share}",
                "dim",
            )
        if event.shapes is not None:
            self._line(f"  in {event.shapes} {plural('shape', event.shapes)}: every new one is compiled", "dim")
        if event.versions:
            self._line(f"  it runs on {', '.join(' '.join(one) for one in event.versions.items())}", "dim")
        if (untried := untried_line(event, most=None if self.verbose else NAMED)) is not None:
            more = len(event.untried or ()) > NAMED and not self.verbose
            self._line(f"  {untried}{' with -v' if more else ''}", "dim")
        if event.undeclared:
            self._line(f"  not declared, so not tested: {', '.join(event.undeclared)}", "dim")

    def _table(self, table: Table) -> None:
        """Print how many examples had features together: values of columns below their dimensions."""
        first = max((len(row.line.label) for row in table.rows), default=0)
        heads, values, widths = f"  {'tried':{first}}     all", " " * (first + 10), []
        for place, column in enumerate(table.columns):
            head = "" if place and table.columns[place - 1].dimension == column.dimension else column.dimension
            value = column.value or ""
            widths.append(max(len(head), len(value), 3) + 2)
            heads, values = heads + head.rjust(widths[-1]), values + value.rjust(widths[-1])
        for line in (heads, values):
            if line.strip():
                self._line(line.rstrip(), "dim")
        for row in table.rows:
            cells = zip(row.cells, widths, strict=True)
            counts = [("" if cell is None else str(cell)).rjust(width) for cell, width in cells]
            while counts and not counts[-1].strip():
                counts.pop()
            styles = ("yellow" if count.strip() == "0" else "dim" for count in counts)
            self._print((f"  {row.line.label:{first}}{row.examples:>8}", "dim"), *zip(counts, styles, strict=True))

    def _exchange(self, event: ExchangeEvent) -> None:
        self._line(f"  exchanged on {event.case_text}", "dim")
        for line in (*event.traffic, *event.memory):
            self._line(f"    {line}", "dim")

    def _line(self, text: str, style: str = "") -> None:
        self._print((text, style))

    def _print(self, *pieces: str | tuple[str, str]) -> None:
        """Print a line of plain and styled text, none of which is taken for markup."""
        self.console.print(Text.assemble(*pieces), soft_wrap=True)


def counterexample_text(event: CounterexampleEvent, *, verbose: bool = False) -> str:
    """Return what `Terminal` prints for a violation, as plain text."""
    told = io.StringIO()
    Terminal(Console(file=told, color_system=None, width=120), verbose=verbose).tell(event)
    return told.getvalue()


class ProgressBar:
    """A progress bar for the property under way. A log has none of it but a line for the first violation.

    Args:
        console: where to draw it.
        live: redraw it between steps too, which takes a little processor time throughout.
        quiet: a log is told nothing at all.
    """

    def __init__(self, console: Console, *, live: bool = True, quiet: bool = False) -> None:
        self._live = live
        self._log = None if quiet or console.is_terminal else console
        self._implementation = self._told_of = ""
        self._progress = Progress(
            TextColumn("  {task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            auto_refresh=live,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._title = ""

    def start(self, implementation: str, property: str, examples: int) -> None:
        """Show a bar of so many examples."""
        self._implementation = implementation
        if self._progress.disable:
            return  # older versions of rich end even a bar that they never showed with an empty line
        self._progress.start()
        self._title = legible(f"{implementation} {property}")
        self._task = self._progress.add_task(self._title, total=examples)

    def step(self, done: int) -> None:
        """Move the bar."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, refresh=not self._live)

    def loading(self, what: str | None) -> None:
        """Show what is being loaded in place of the title; `None` brings the title back."""
        self._describe(self._title if what is None else f"loading {what}")

    def found(self, violation: str) -> None:
        """Show from now on that there is a violation, before all is known about it: in a log, of the first one."""
        title = legible(f"{cut(violation, 100)}: making it smaller")
        if self._task is not None:
            self._title = title
            self._describe(title)
        elif self._log is not None and self._told_of != self._implementation:
            self._told_of = self._implementation
            self._log.print(Text(f"  {title}", "dim"), soft_wrap=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
            self._progress.stop()

    def _describe(self, title: str) -> None:
        if self._task is not None:
            self._progress.update(self._task, description=title, refresh=not self._live)
