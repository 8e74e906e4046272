"""What presenters share: a failure described in lines of text, margins, axes, and texts made safe to show."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from ringverify import words
from ringverify.events import AXES, CounterexampleEvent, Event, as_json, from_json

DETAIL_LINES = 14
"""How many lines of a traceback are shown, from its end."""

FAR_BEYOND = 1e12
"""Ratio of error to allowed error above which both are shown instead of the ratio."""

LINES = ("detail", "printed")
"""Fields whose texts may have several lines; every other text is made one line."""

UNKNOWN = "Cause unknown. Add print() to your function and run the replay line below: it shows what each rank prints"
"""What to do about a failure of unknown cause."""

Shown = TypeVar("Shown", bound=Event)


def presentable(value: Any, *, lines: bool = False) -> Any:
    """Return JSON values with all texts escaped and cut, as by `ringverify.words`."""
    if isinstance(value, str):
        return (words.legible_lines if lines else words.legible)(words.cut(value, words.TEXT))
    if isinstance(value, Mapping):
        return {
            words.legible(words.cut(key)): presentable(item, lines=lines or key in LINES) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [presentable(item, lines=lines) for item in value]
    return value


def shown(event: Shown) -> Shown:
    """Return an event with all its texts escaped and cut; presenters show no other."""
    return from_json(type(event), presentable(as_json(event)))


def replay_line(
    *,
    file: str | None,
    vectors: Sequence[str] | None = None,
    scale: Sequence[str] | None = None,
    merge: Sequence[str] | None = None,
) -> str:
    """Return the command that shows a failure again; "" if there is none.

    It is built here from the name of the case file, or from the arguments for golden vectors, the suite scale or a
    merge: a command line that a report holds is never shown as something to type.
    """
    if file is not None:
        return shlex.join(["ringverify", "replay", f"./{file}" if file.startswith("-") else file])
    if scale or merge:
        return shlex.join(["ringverify", "check", *(scale or merge or ())])
    return shlex.join(["ringverify", "vectors", "check", *vectors]) if vectors else ""


def replay_of(event: CounterexampleEvent) -> str:
    """Return the command that shows a counterexample again; "" if there is none."""
    return replay_line(file=event.file, vectors=event.vectors, scale=event.scale, merge=event.merge)


def story(event: CounterexampleEvent) -> list[tuple[str, str]]:
    """Describe a counterexample in lines, each with a label; the label "" continues the line before."""
    rows = [("same", f"as {event.same_as}")] if event.same_as is not None else []
    rows += [(label, text) for label, text in (("", event.summary), ("case", event.case_text)) if text is not None]
    if (numbers := worst_numbers(event)) is not None:
        rows += [("worst", worst_element(event)), ("", numbers)]
    if event.where is not None:
        rows += zip(("where", ""), event.where.text, strict=False)
    if event.refused is not None:
        rows.append(("also", f"{event.refused.summary}, on {event.refused.case_text}"))
    if event.needs is not None and (event.needs.complete or event.needs.requires or event.needs.irrelevant):
        rows.append(("needs", str(event.needs)))
    if event.diagnosis is not None:
        rows.append(("cause", event.diagnosis))
    if event.declare is not None:
        rows.append(("declare", event.declare))
    hints = [f"{hint.property}: {hint.text}" if hint.property else hint.text for hint in event.hints or ()]
    rows += zip(["beside", *[""] * len(hints)], hints, strict=False)
    unexplained = event.diagnosis is None and event.tensor is not None and not hints and event.declare is None
    if unexplained and event.needs is not None:
        rows.append(("next", UNKNOWN))
    if event.tried:
        margins = ""
        if event.first_margin is not None and (event.tensor is not None or event.element is not None):
            there, here = margin_text(event.first_margin), margin_text(event.margin)
            margins = f"; margin {there} there, {here} in the smallest case"
        tried = f"{event.tried} {words.plural('case', event.tried)} tried"
        rows.append(("shrunk", f"from {event.shrunk_from or 'another'}, {tried}{margins}"))
    for earlier in event.after or ():
        rows.append(("after", f"{earlier} has run in the same process; without that, this case does not fail"))
    if event.repeats is False:
        rows.append(("note", "not repeatable: the same case gave other bits when it was run again"))
    if event.note is not None:
        rows.append(("note", event.note))
    if again := replay_of(event):
        rows.append(("replay", again))
    return rows


def repeated(event: CounterexampleEvent) -> str:
    """Describe in one line a failure that is the same as another property's."""
    return f"{event.same_as}: {event.summary or ''}; {replay_of(event)}"


def later_cause(event: CounterexampleEvent, earlier: CounterexampleEvent | None) -> str | None:
    """Return the cause of a failure that is the same as an earlier one, if only this one has a cause."""
    return event.diagnosis if earlier is not None and earlier.diagnosis is None else None


def worst_element(event: CounterexampleEvent) -> str:
    """Return where the worst element is: its index by axis, its global position and its rank."""
    if event.element is not None:
        return event.element
    assert event.tensor is not None
    assert event.index is not None
    axes = AXES[event.tensor]
    places = [f"{axis} {place}" for axis, place in zip(axes, event.index, strict=True)]
    if event.position is not None:
        places[axes.index("key" if "key" in axes else "query")] += f" (position {event.position})"
    return f"{event.tensor}[{', '.join(places)}] on rank {event.rank}"


def worst_numbers(event: CounterexampleEvent) -> str | None:
    """Return the worst element's value, expected value and error, or `None` where no element is known to be wrong."""
    actual, expected, error, allowed = event.actual, event.expected, event.error, event.allowed
    if event.element is None and (event.tensor is None or event.index is None):
        return None
    if actual is None or expected is None or allowed is None or error is None:
        return None
    if actual != actual and expected != expected:
        return "is NaN, and so is the value it is compared with"
    if actual != actual and math.isinf(allowed):  # the right value is one of many
        return "is NaN, should be any finite number"
    text = f"is {actual:.6g}, should be {expected:.6g}: "
    if error != error or error > FAR_BEYOND * allowed:  # where the right answer is 0, hardly any error is allowed
        return text + f"error {error:.3g} where {f'{allowed:.2g}' if allowed else 'none'} is allowed"
    return text + f"error {error:.3g}, {error / allowed:.3g} times the allowed {allowed:.2g}"


def detail_lines(event: CounterexampleEvent, most: int | None = DETAIL_LINES) -> tuple[int, list[str]]:
    """Return how many lines of a failure's detail are left out, and its last lines, which say what happened."""
    lines = (event.detail or "").rstrip().splitlines()
    shown = lines if most is None else lines[-most:]
    return len(lines) - len(shown), shown


def story_lines(event: CounterexampleEvent, most: int | None = DETAIL_LINES) -> list[str]:
    """Describe a counterexample in lines of text, the end of its detail last.

    Args:
        event: the counterexample.
        most: largest number of lines of its detail; `None` for all of them.
    """
    lines = [f"{label:<8}{text}" for label, text in story(event)]
    left_out, detail = detail_lines(event, most)
    if detail:
        lines += ["", *([f"… {left_out} more lines in the report"] if left_out else ()), *detail]
    return lines


def margin_text(margin: float | None) -> str:
    """Format a margin for a table; "-" where there is none."""
    if margin is None:
        return "-"
    return f"{margin:.2f}" if margin < 100 else f"{margin:.1e}"
