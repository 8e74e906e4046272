"""Try merges on the golden vectors of merges, with the verdicts and exit codes of `ringverify check`."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ringverify.check.mishap import Mishap, with_mishaps
from ringverify.check.options import Options
from ringverify.check.outcome import ImplementationOutcome, TriedProperty, footer_event, implementation_event
from ringverify.check.planning import find_device
from ringverify.errors import UsageError
from ringverify.events import CounterexampleEvent, PropertyOutcome
from ringverify.merge_contract import MergeCapabilities
from ringverify.merging.case import MergeCase, lse_dtype_of
from ringverify.merging.judging import MergeSearch, MergeViolation, cause_of, value_violation
from ringverify.merging.properties import ANY_RESULT, MergeProperty, compared, in_order, right_merge
from ringverify.merging.run import MergeCalls, MergeSubject, counterexample, undeclared_of
from ringverify.reports.progress import Progress
from ringverify.reports.story import replay_line
from ringverify.vectors import merges
from ringverify.vectors.index import Index
from ringverify.vectors.merges import MergeVector
from ringverify.vectors.recording import Tell, begun, property_event, sentence
from ringverify.worlds.world import Failure


def try_merges(
    found: Index,
    subjects: Sequence[MergeSubject],
    *,
    ids: Sequence[str] | None,
    device: str,
    tell: Tell,
    progress: Progress,
    record: Tell,
) -> int:
    """Try the vectors of merges on merges, report the results, and return the exit code.

    Args:
        found: the vectors.
        subjects: the merges.
        ids: these vectors only; `None` means all of merges.
        device: device of the tensors.
        tell: receives the events for the terminal.
        progress: shows how far the run has come.
        record: receives the events of the report.

    Raises:
        UsageError: the file is damaged, or there is no vector of an id for merges.
        Inconclusive: the device does not exist here.
    """
    there = merges.read(found.folder)
    for id in ids or ():
        if id not in there:
            raise UsageError(f"no vector {id!r} of merges in {found.folder}: it has {', '.join(there) or 'none'}")
    chosen = [described for id, described in there.items() if ids is None or id in ids]
    find_device(device)
    record(begun(device))
    outcomes = []
    for subject in subjects:
        began, tried = time.monotonic(), []
        calls = MergeCalls(subject, Options(device=device), progress.loading)
        with contextlib.closing(calls.world):
            for described in chosen:
                tried.append(_tried(found, described, subject, calls, progress))
                for event in tried[-1].outcome.events:
                    tell(event)
                    record(event)
        seconds = time.monotonic() - began
        verdict = implementation_event(tried, implementation=subject.merge.name, asked=len(chosen), seconds=seconds)
        verdict = dataclasses.replace(verdict, world=None, not_run_in=None, seconds_inside=None)
        tell(verdict)
        record(verdict)
        outcomes.append(ImplementationOutcome.of([one.verdict for one in tried]))
    footer = footer_event(outcomes, baseline=False)
    record(footer)
    return footer.exit_code


def lacking(vector: MergeVector, c: MergeCapabilities, device: str) -> str | None:
    """Return why a merge cannot be held to a vector, or `None`."""
    lse_dtype = lse_dtype_of(MergeCase(dtype=vector.dtype), c)
    if device.partition(":")[0] not in c.devices:
        return f"device {device.partition(':')[0]} is not declared"
    if vector.dtype not in c.dtypes:
        return f"not declared: {vector.dtype}"
    if "empty" in vector.flags and c.empty is None:
        return "empty=None is declared"
    if "n_way" in vector.flags and not (c.lse or c.stacked):
        return "lse=False is declared, so a result cannot be merged once more"
    if c.base != "e":
        return f"base={c.base} is declared: log-sum-exps of vectors are natural, and rounded once they are others"
    if lse_dtype in ("bfloat16", "float16"):
        return f'lse_dtype="{lse_dtype}" is declared, which cannot hold log-sum-exps of vectors'
    if c.head_dims is not None and vector.dim not in c.head_dims:
        return f"head_dims={c.head_dims} is declared, and this has {vector.dim}"
    return None


def _tried(
    found: Index, described: Mapping[str, Any], subject: MergeSubject, calls: MergeCalls, progress: Progress
) -> TriedProperty:
    vector, c, name = merges.of(described), subject.merge.capabilities, subject.merge.name
    began, runs = time.monotonic(), calls.runs
    told: CounterexampleEvent | None = None
    reason = lacking(vector, c, calls.device)
    event = property_event(name, vector.id, "unsupported", meaning=sentence(vector), reason=reason)
    if reason is None:
        progress.start(name, vector.id, 1)
        try:
            margin, violation, search = _judged(described, c, calls)
            verdict = dataclasses.replace(event, examples=1, margin=margin)
            event = dataclasses.replace(verdict, verdict="pass" if violation is None else "fail")
            if violation is not None:
                again = [str(found.folder), "--target", subject.target, "--only", vector.id]
                cause = cause_of(_property(c), search, c, calls)
                told = dataclasses.replace(
                    counterexample(name, vector.id, search, cause),
                    merge_case=None,
                    case_text=f"{vector.id}: {vector.title}",
                    shrunk_from=None,
                    tried=None,
                    note=vector.note,
                    vectors=tuple(again),
                    replay=replay_line(file=None, vectors=again),
                )
        except Exception as error:
            event, told = with_mishaps(event, [Mishap.of(error, f"trying {vector.id}")]), None
        finally:
            progress.stop()
        event = dataclasses.replace(event, seconds=round(time.monotonic() - began, 3))
    return TriedProperty(
        outcome=PropertyOutcome(event, told), world="none", undeclared=undeclared_of(c), runs=calls.runs - runs
    )


def _property(c: MergeCapabilities) -> MergeProperty:
    tensors = ("out", "lse", "dout", "dlse") if c.gradients else ("out", "lse")
    return dataclasses.replace(ANY_RESULT, tensors=tensors)


def _judged(
    described: Mapping[str, Any], c: MergeCapabilities, calls: MergeCalls
) -> tuple[float, MergeViolation | None, MergeSearch]:
    """Merge the inputs of a vector, and compare with its results; errors are allowed by what is declared."""
    property, case = _property(c), merges.of(described).case(merges.golden_inputs(described))
    result = calls(case, in_order(case, c), gradients=c.gradients)
    if isinstance(result, Failure):
        violation: MergeViolation | None = MergeViolation(result.manner, result.message, result.detail, failure=result)
        margin = 0.0
    else:
        exact, limits = right_merge(case, c, gradients=c.gradients)
        golden = dataclasses.replace(exact, **merges.golden_results(described))
        margin, wrong = compared(case, c, property.tensors, [result], (golden, limits))
        violation = None if wrong is None else value_violation(property, wrong)
    return margin, violation, MergeSearch(1, margin, case, case, violation)
