"""A run on the terminal: a line a property as it ends, and for a failure what to look at first."""

from __future__ import annotations

import io

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from ringverify.reports.jsonl import Event, presentable, replay_line
from ringverify.reports.results import where_text
from ringverify.words import legible

STYLES = {
    "pass": "green",
    "fail": "bold red",
    "unsupported": "dim",
    "inconclusive": "yellow",
    "conformant": "bold green",
    "violations": "bold red",
}
AXES = {
    "out": ("batch", "query", "head", "dim"),
    "lse": ("batch", "head", "query"),
    "dq": ("batch", "query", "head", "dim"),
    "dk": ("batch", "key", "head", "dim"),
    "dv": ("batch", "key", "head", "dim"),
}
TRACEBACK_LINES = 14
PRINTED = 4000
"""Letters of a rank's output that a report keeps: the last ones."""
CUT = f", its last {PRINTED} letters"
FAR_BEYOND = 1e12
"""A ratio of error to allowed error past which its digits tell nobody anything."""


class Terminal:
    """Tells events as text. Colour and progress appear only where the console is a terminal.

    Args:
        console: where to print.
        verbose: print whole tracebacks, every failure in full, and what ranks printed.
        printed: print what ranks printed, in any case.
        quiet: print only what did not pass, or was cut short, and the verdicts.
    """

    def __init__(self, console: Console, *, verbose: bool = False, printed: bool = False, quiet: bool = False) -> None:
        self.console = console
        self.verbose = verbose
        self.quiet = quiet
        self._with_printed = printed or verbose
        self._named = ""

    def tell(self, event: Event) -> None:
        """Print what one event says."""
        event = presentable(event)
        match event["event"]:
            case "header" if not self.quiet:
                self._line(
                    f"ringverify {event['ringverify']}, torch {event['torch']}, python {event['python']}, "
                    f"{event['device']}, suite {event['suite']}, seed {event['seed']}"
                )
            case "property":
                self._property(event)
            case "counterexample":
                self.counterexample(event)
            case "implementation":
                self._implementation(event)
            case "exchange":
                self._exchange(event)
            case "footer":
                for line in event.get("unexpected", ()):
                    self._line(f"\n{line}", "bold red")
                if "elsewhere" in event:
                    self._line(f"\nnot in this run, though in the baseline: {', '.join(event['elsewhere'])}", "dim")

    def counterexample(self, event: Event) -> None:
        """Print a violation: what, the case, the worst element, how to see it again."""
        event = presentable(event)
        if event.get("same_as") is not None and not self.verbose:
            self._print(("        the same as ", "dim"), repeated(event))
            return
        for label, text in story(event):
            self._print((f"        {label:<8}", "dim"), text)
        for one in event.get("printed", ()) if self._with_printed else ():
            whose = "the ranks' process" if one["rank"] is None else f"rank {one['rank']}"
            self._line(f"        printed by {whose}{CUT if len(one['text']) >= PRINTED else ''}", "dim")
            for line in one["text"].rstrip("\n").splitlines():
                self._line(f"        | {line}")
        if event.get("detail"):
            lines = event["detail"].rstrip().splitlines()
            shown = lines if self.verbose else lines[-TRACEBACK_LINES:]
            if len(shown) < len(lines):
                self._line(f"        … {len(lines) - len(shown)} more lines with -v", "dim")
            for line in shown:
                self._line(f"        | {line}", "dim")

    def _property(self, event: Event) -> None:
        unremarkable = event["verdict"] == "unsupported" or (event["verdict"] == "pass" and "reason" not in event)
        if self.quiet and unremarkable and "unexpected" not in event:
            return
        if event["implementation"] != self._named:
            self._named = event["implementation"]
            self._line(f"\n{self._named}", "bold")
        verdict = event["verdict"]
        if verdict in ("unsupported", "inconclusive"):
            numbers = event.get("reason", "")
        else:
            numbers = (
                f"{event['examples']:>6} examples {event['seconds']:>7.1f} s   margin {margin_text(event['margin'])}"
            )
            if "remembered" in event:
                numbers += f"   {event['remembered']} of an earlier run"
            if "reason" in event:
                numbers += f"   ({event['reason']})"
            if "world" in event:
                numbers += f"   in the {event['world']} world"
        shown, style = ("known fail", "yellow") if "known" in event else (verdict, STYLES[verdict])
        self._print("  ", (f"{shown:<13}", style), f"{event['property']:<23}{numbers}")
        for line in event.get("traceback", "").splitlines() if self.verbose else ():
            self._line(f"        | {line}", "dim")
        for line in event.get("passed_over", ()):
            self._print(("        note    ", "dim"), line)
        if "known" in event:
            self._print(("        known   ", "dim"), f"{event['known']['reason']} ({event['known']['link']})")
        if "unexpected" in event:
            self._print(("        known   ", "dim"), "as violated, but it passes: the baseline is out of date")

    def _implementation(self, event: Event) -> None:
        seconds = max(event["seconds"], 1e-9)
        kinds = {**dict.fromkeys(STYLES, ""), "fail": f" ({event['known']} known)" if event.get("known") else ""}
        counts = ", ".join(f"{count} {kind}{kinds[kind]}" for kind, count in event["properties"].items() if count)
        if event["not_run"]:
            counts += f", {event['not_run']} not run (-x)"
        where, elsewhere = where_text(event)
        before = f"{event['implementation']}: " if self.quiet else "  "
        self._print(before, (event["verdict"], STYLES[event["verdict"]]), f"{where}: {counts}{elsewhere}")
        for finding in event.get("gloo_refuses", ()):
            self._print(("  works here, gloo refuses it: ", "yellow"), finding)
        if self.quiet:
            return
        if event["examples"]:
            inside = 100 * event["seconds_inside"] / seconds
            beside = f" and {event['simulated_runs']} of the simulated one" if "simulated_runs" in event else ""
            self._line(
                f"  {event['examples']} examples in {event['runs']} runs of the {event['world']} world{beside}, "
                f"{seconds:.1f} s: {event['examples'] / seconds:.0f} examples a second; "
                f"{inside:.0f} % of the time inside the implementation",
                "dim",
            )
        if event["undeclared"]:
            self._line(f"  not declared, so not tested: {', '.join(event['undeclared'])}", "dim")

    def _exchange(self, event: Event) -> None:
        self._line(f"  exchanged on {event['case_text']}", "dim")
        for line in [*event["traffic"], *event["memory"]]:
            self._line(f"    {line}", "dim")

    def _line(self, text: str, style: str = "") -> None:
        self._print((text, style))

    def _print(self, *pieces: str | tuple[str, str]) -> None:
        """A line of text and styled text, as it is: what an implementation says is no markup."""
        self.console.print(Text.assemble(*pieces), soft_wrap=True)


def counterexample_text(event: Event, *, verbose: bool = False) -> str:
    """What the terminal says of a violation, as plain text."""
    told = io.StringIO()
    Terminal(Console(file=told, color_system=None, width=120), verbose=verbose).counterexample(event)
    return told.getvalue()


def story(event: Event) -> list[tuple[str, str]]:
    """A counterexample in words: lines with a label each, "" where a line goes on with the one before."""
    rows = [("same", f"as {event['same_as']}")] if event.get("same_as") is not None else []
    rows += [(label, event[name]) for label, name in (("", "summary"), ("case", "case_text")) if name in event]
    if event["tensor"] is not None and {"index", "position", "actual", "expected", "allowed"} <= event.keys():
        rows.append(("worst", worst_element(event)))
        rows.append(("", worst_numbers(event)))
    if event.get("where") is not None:
        rows += zip(("where", ""), event["where"]["text"], strict=False)
    if event.get("refused") is not None:
        rows.append(("also", f"{event['refused']['summary']}, on {event['refused']['case_text']}"))
    if event["diagnosis"] is not None:
        rows.append(("cause", event["diagnosis"]))
    if "declare" in event:
        rows.append(("declare", event["declare"]))
    hints = [
        f"{hint['property']}: {hint['text']}" if hint["property"] else hint["text"] for hint in event.get("hints", ())
    ]
    rows += zip(["beside", *[""] * len(hints)], hints, strict=False)
    unexplained = event["diagnosis"] is None and event["tensor"] is not None and not hints and "declare" not in event
    if unexplained and event.get("takes") is not None:
        rows.append(("next", unknown(event)))
    if event.get("tried"):
        margins = ""
        if "first_margin" in event and event["tensor"] is not None:
            there, here = margin_text(event["first_margin"]), margin_text(event["margin"])
            margins = f"; margin {there} there, {here} in the smallest case"
        rows.append(("shrunk", f"from {event.get('shrunk_from', 'another')}, {event['tried']} cases tried{margins}"))
    for earlier in event.get("after", ()):
        rows.append(("after", f"{earlier}, in the same process: alone it does not fail"))
    if not event.get("repeats", True):
        rows.append(("note", "not repeatable: the same case gave other bits when it was run again"))
    if "note" in event:
        rows.append(("note", event["note"]))
    if again := replay_line(event):
        rows.append(("replay", again))
    return rows


def repeated(event: Event) -> str:
    """In one line, a failure that is another one once more."""
    return f"{event['same_as']}: {event.get('summary', '')}; {replay_line(event)}"


def unknown(event: Event) -> str:
    """What to do about a failure that nothing explains, and what it takes."""
    takes = event["takes"]
    told = "Cause unknown. "
    if takes:
        listed = takes[0] if len(takes) == 1 else f"{', '.join(takes[:-1])} and {takes[-1]}"
        told += f"It takes {listed}. "
    return told + "Print in your function and replay: what each rank prints is shown"


def worst_element(event: Event) -> str:
    """Where the worst element is, by axis."""
    axes = AXES[event["tensor"]]
    places = [f"{axis} {place}" for axis, place in zip(axes, event["index"], strict=True)]
    row = axes.index("key" if "key" in axes else "query")
    places[row] += f" (position {event['position']})"
    return f"{event['tensor']}[{', '.join(places)}] on rank {event['rank']}"


def worst_numbers(event: Event) -> str:
    """The worst element's value beside what it should be."""
    if float(event["actual"]) != float(event["actual"]) and float(event["expected"]) != float(event["expected"]):
        return "is no number, and neither is what it is compared with"
    text = f"is {float(event['actual']):.6g}, should be {float(event['expected']):.6g}: "
    error, allowed = float(event["error"]), float(event["allowed"])
    if error != error:
        return text + f"no number, allowed error {allowed:.2g}"
    if error > FAR_BEYOND * allowed:  # where the right answer is 0, hardly any error is allowed
        return text + f"error {error:.3g} where {f'{allowed:.2g}' if allowed else 'none'} is allowed"
    return text + f"error {error:.3g}, {error / allowed:.3g} times the allowed {allowed:.2g}"


def margin_text(margin: float | str | None) -> str:
    """A margin for a table."""
    if margin is None:
        return "-"
    number = float(margin)
    return f"{number:.2f}" if number < 100 else f"{number:.1e}"


class ProgressBar:
    """A bar for the property under way; nothing at all where the console is not a terminal.

    Args:
        console: where.
        live: keep it moving between steps, which takes a little of the processors' time all the while.
    """

    def __init__(self, console: Console, *, live: bool = True) -> None:
        self._live = live
        self._progress = Progress(
            TextColumn("  {task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            auto_refresh=live,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._title = ""

    def start(self, implementation: str, property: str, examples: int) -> None:
        """Show a bar."""
        if self._progress.disable:
            return  # older versions of rich end even a bar that they never showed with an empty line
        self._progress.start()
        self._title = legible(f"{implementation} {property}")
        self._task = self._progress.add_task(self._title, total=examples)

    def step(self, done: int) -> None:
        """Move it."""
        if self._task is not None:
            self._progress.update(self._task, completed=done, refresh=not self._live)

    def loading(self, what: str | None) -> None:
        """Say what is being loaded, while it is."""
        if self._task is not None:
            title = self._title if what is None else f"loading {what}"
            self._progress.update(self._task, description=title, refresh=not self._live)

    def stop(self) -> None:
        """Take it away."""
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None
            self._progress.stop()
