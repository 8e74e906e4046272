"""`ringverify mutants --merges`: which properties kill each wrong merge, and whether a correct one is accused."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from ringverify.lab import kill_report
from ringverify.lab.false_alarms import Alarm
from ringverify.lab.killing import Effort, side_by_side
from ringverify.lab.variants_of_merges import CORRECT, WRONG
from ringverify.merge_contract import MergeImplementation
from ringverify.merging.case import MergeCase
from ringverify.merging.judging import Calls, MergeSearch, search
from ringverify.merging.properties import PROPERTIES, MergeProperty
from ringverify.merging.running import Grouping, MergeResult, MergeTask, run_merge
from ringverify.worlds.world import Failure


def calls_of(merge: MergeImplementation) -> Calls:
    """Return what calls a merge of our own, in this process."""

    def calls(case: MergeCase, grouping: Grouping, *, gradients: bool) -> MergeResult | Failure:
        return run_merge(MergeTask(merge, case, grouping, gradients))

    return calls


def tried(merge: MergeImplementation, property: MergeProperty, effort: Effort) -> MergeSearch | None:
    """Try a property on a merge; `None` if it does not apply."""
    if property.lacks(merge.capabilities) is not None:
        return None
    examples = property.examples if effort.most is None else effort.most
    return search(property, merge.capabilities, calls_of(merge), examples=examples, seed=effort.seed)


def _kills(effort: Effort, id: str) -> dict[str, int]:
    """Return by property the examples until a fault is found, in a merge of two or in one of n, whichever is fewer."""
    found: dict[str, int] = {}
    for merge in WRONG[id]:
        for name in effort.properties:
            one = tried(merge, PROPERTIES[name], effort)
            if one is not None and one.violation is not None:
                found[name] = min(one.examples, found.get(name, one.examples))
    return {name: found[name] for name in PROPERTIES if name in found}


def _acquittal(effort: Effort, name: str) -> tuple[int, tuple[Alarm, ...]]:
    """Return the examples of all properties on a correct merge, and the false alarms."""
    examples, alarms = 0, []
    for id in effort.properties:
        one = tried(CORRECT[name], PROPERTIES[id], effort)
        examples += 0 if one is None else one.examples
        if one is not None and one.violation is not None and one.case is not None:
            alarms.append(Alarm(name, id, one.case.describe(), one.violation.summary))
    return examples, tuple(alarms)


def run(ids: Sequence[str], effort: Effort, say: Callable[[str], None]) -> kill_report.MergeKills:
    """Try wrong and correct merges, and say a line on each.

    Args:
        ids: faults, and names of correct merges.
        effort: examples of each property at most, and the seed; its properties are those of merges.
        say: is called with each line.
    """
    started = time.monotonic()
    wrong, correct = [id for id in ids if id in WRONG], [id for id in ids if id in CORRECT]
    kills, each = {}, {}
    alarms: list[Alarm] = []
    for id, found in zip(wrong, side_by_side(functools.partial(_kills, effort), wrong, effort.jobs), strict=True):
        kills[id] = found
        say(f"  {id:<18}" + (", ".join(f"{property} {count}" for property, count in found.items()) or "survived"))
    for name, (examples, seen) in zip(
        correct, side_by_side(functools.partial(_acquittal, effort), correct, effort.jobs), strict=True
    ):
        each[name] = examples
        alarms += seen
        say(f"  {name:<18}{examples:>6} examples, {len(seen)} false alarms")
        for alarm in seen:
            say(f"    {alarm.property}: {alarm.summary}\n      {alarm.case}")
    return kill_report.merges_section(kills, each, alarms, effort, time.monotonic() - started)
