"""Judge a merge: draw cases, compare, make the first failing one smaller, and name the fault that gives its numbers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch

from ringref.rounding import allowed_by_a_cause
from ringverify.cases.choices import SeededChoices
from ringverify.cases.inputs import DTYPE
from ringverify.check.budget import ENDLESS, Share
from ringverify.merge_contract import MergeCapabilities, layout_of
from ringverify.merging.case import LN2, MergeCase, lse_dtype_of, partials_of, simpler
from ringverify.merging.faults import FAULTS, MergeFault
from ringverify.merging.properties import (
    TITLES,
    MergeProperty,
    WrongElement,
    compared,
    in_order,
    margins_with_nan,
    result_named,
    right_merge,
)
from ringverify.merging.running import Grouping, MergeResult, name_of_partial
from ringverify.worlds.world import Failure

SHRINKING, SHRINKING_SECONDS = 200, 20.0
"""Most cases that are tried to make a counterexample smaller, and most time; none after a deadline, which costs one."""
LIKE_IT = 3
"""Cases like a counterexample on which a cause has to give the numbers too."""

Calls = Callable[..., MergeResult | Failure]
"""`calls(case, grouping, gradients=…)` merges the partials of a case, in a process of its own or in this one."""


@dataclasses.dataclass(frozen=True)
class MergeViolation:
    """How a case breaks a property.

    Attributes:
        reason: equal for cases that fail alike.
        summary: what is wrong, in a line.
        detail: further lines, such as a traceback.
        wrong: the worst element, where values are wrong.
        failure: how the call ended, where it gave no result.
    """

    reason: tuple[str, ...]
    summary: str
    detail: str = ""
    wrong: WrongElement | None = None
    failure: Failure | None = None


def judge_merge(
    property: MergeProperty, case: MergeCase, c: MergeCapabilities, calls: Calls
) -> tuple[float, MergeViolation | None]:
    """Judge one case by one property; return the largest margin, and how the property is broken, if it is.

    Raises:
        WorldUnavailable: nothing was learned.
    """
    results: list[MergeResult] = []
    for grouping in (in_order(case, c), *property.others(case, c)):
        found = calls(case, grouping, gradients=property.gradients)
        if isinstance(found, Failure):
            return 0.0, MergeViolation(found.manner, found.message, found.detail, failure=found)
        results.append(found)
    if property.buffers:
        first = name_of_partial(0, case.partials)
        allowed = {f"out_{first}", f"lse_{first}"} if c.in_place else set()
        if changed := [name for name in results[0].changed if name not in allowed]:
            return 0.0, MergeViolation(("changed", *changed), f"the merge changed its input {', '.join(changed)}")
        return 0.0, None
    margin, wrong = compared(case, c, property.tensors, results)
    if wrong is None:
        return margin, None
    unlike = dataclasses.replace(case, memory="contiguous")
    of_memory = unlike != case and judge_merge(property, unlike, c, calls)[1] is None
    where = f", where the partials are {case.memory} in memory, not contiguous" if of_memory else ""
    return margin, value_violation(property, wrong, where)


def value_violation(property: MergeProperty, wrong: WrongElement, where: str = "") -> MergeViolation:
    """Return the violation of a wrong result."""
    summary = f"{TITLES[wrong.tensor]} {property.told}: {wrong.wrong} of {wrong.of} elements{where}"
    return MergeViolation(("value", wrong.tensor), summary, wrong=wrong)


def draws(property: MergeProperty, c: MergeCapabilities, examples: int, seed: int) -> Iterator[MergeCase]:
    """Yield the cases of a property: the same ones for the same seed."""
    choices = SeededChoices(f"{seed}:merge:{property.id}")
    for _ in range(examples):
        yield MergeCase(
            partials=choices.integer(2, property.most_partials(c)),
            batch=choices.integer(1, 2) if layout_of(c.out_layout).batched else 1,
            tokens=choices.integer(1, 6),
            heads=choices.integer(1, 3),
            dim=choices.integer(1, 8) if c.head_dims is None else choices.among(c.head_dims),
            dtype=choices.among(property.dtypes(c)),
            values=choices.among(property.values_for(c)),
            memory=choices.among(property.memory if c.strided else property.memory[:1]),
            seed=choices.integer(0, 2**31 - 1),
        )


@dataclasses.dataclass
class MergeSearch:
    """What trying a property on a merge found.

    Attributes:
        examples: how many cases were tried before one failed, that one included.
        margin: the largest margin.
        first: the case that failed first.
        case: the smallest one that fails alike.
        violation: how it fails.
        tried: cases tried to make it smaller.
        cut_short: whether the time budget ended first.
    """

    examples: int = 0
    margin: float = 0.0
    first: MergeCase | None = None
    case: MergeCase | None = None
    violation: MergeViolation | None = None
    tried: int = 0
    cut_short: bool = False


def search(
    property: MergeProperty,
    c: MergeCapabilities,
    calls: Calls,
    *,
    examples: int,
    seed: int,
    share: Share = ENDLESS,
    step: Callable[[int], None] = lambda done: None,
) -> MergeSearch:
    """Try a property on drawn cases, up to the first that violates it, which is then made smaller.

    Raises:
        WorldUnavailable: nothing was learned.
    """
    found = MergeSearch()
    for case in draws(property, c, examples, seed):
        if found.examples and time.monotonic() > share.until:
            found.cut_short = True
            return found
        margin, violation = judge_merge(property, case, c, calls)
        found.examples += 1
        found.margin = max(found.margin, margin)
        step(found.examples)
        if violation is not None:
            if violation.wrong is not None:
                case, violation = _layout_first(property, case, c, calls, violation)
            found.first, found.case, found.violation = case, case, violation
            _shrink(found, property, c, calls)
            return found
    return found


def _layout_first(
    property: MergeProperty, case: MergeCase, c: MergeCapabilities, calls: Calls, violation: MergeViolation
) -> tuple[MergeCase, MergeViolation]:
    """Return a case like one of wrong values that shows a wrong layout by its shape, if one does; else the case itself.

    Where axes have the same length, a result whose axes are exchanged has the shape that is expected.
    """
    batch, heads, tokens = [length for length in (2, 3, 4, 5) if length != case.dim][:3]
    batch = batch if layout_of(c.out_layout).batched else 1
    unlike = dataclasses.replace(case, batch=batch, heads=heads, tokens=tokens)
    _, found = judge_merge(property, unlike, c, calls)
    of_shape = found is not None and found.failure is not None and found.failure.rule == "shape"
    return (unlike, found) if found is not None and of_shape else (case, violation)


def _shrink(found: MergeSearch, property: MergeProperty, c: MergeCapabilities, calls: Calls) -> None:
    """Make the failing case smaller: take the first simpler one that fails alike, until there is none."""
    assert found.case is not None
    assert found.violation is not None
    seen, until = {found.case}, time.monotonic() + SHRINKING_SECONDS
    moved = found.violation.reason[0] != "deadline"
    while moved:
        moved = False
        for case in simpler(found.case, c):
            if case in seen or len(seen) > SHRINKING or time.monotonic() > until:
                continue
            seen.add(case)
            _, violation = judge_merge(property, case, c, calls)
            if violation is not None and violation.reason == found.violation.reason:
                found.case, found.violation, moved = case, violation, True
                break
    found.tried = len(seen) - 1


def cause_of(property: MergeProperty, found: MergeSearch, c: MergeCapabilities, calls: Calls) -> MergeFault | None:
    """Return the fault that gives the numbers of a counterexample and of others like it.

    Raises:
        WorldUnavailable: nothing was learned.
    """
    if found.case is None or found.first is None or found.violation is None or found.violation.wrong is None:
        return None
    cases = [found.first, found.case]
    cases += [dataclasses.replace(found.first, seed=seed) for seed in range(LIKE_IT)]
    seen: list[tuple[MergeCase, MergeResult]] = []
    for case in dict.fromkeys(cases):
        result = calls(case, in_order(case, c), gradients=property.gradients)
        if isinstance(result, MergeResult):
            seen.append((case, result))
    # A fault that gives a wrong gradient gives the same out. One that gives all that is looked at comes first.
    out = ("out",) if property.gradients else ()
    for tensors in ((*property.tensors, *out), (found.violation.wrong.tensor, *out)):
        for fault in FAULTS.values():
            wrong = [_wrong_alike(fault, tensors, case, result, c, property.gradients) for case, result in seen]
            if None not in wrong and any(wrong):
                return fault
    return None


@dataclasses.dataclass(frozen=True)
class ToldMerge:
    """A violation of a property by a merge, and the fault that gives its numbers, if one does."""

    property: MergeProperty
    found: MergeSearch
    cause: MergeFault | None


def same_failure(earlier: ToldMerge, new: ToldMerge, c: MergeCapabilities, calls: Calls) -> bool:
    """Return whether two violations are one: by their cause, or the case of each violates the other's property alike.

    Raises:
        WorldUnavailable: nothing was learned.
    """
    if earlier.cause is not None and new.cause is not None:
        return earlier.cause == new.cause
    reasons = [one.found.violation and one.found.violation.reason for one in (earlier, new)]
    if None in reasons or "deadline" in (reason[0] for reason in reasons if reason):
        return reasons[0] == reasons[1]
    return _breaks(new, earlier.found, c, calls) and _breaks(earlier, new.found, c, calls)


def _breaks(told: ToldMerge, other: MergeSearch, c: MergeCapabilities, calls: Calls) -> bool:
    """Return whether a case of another violation, the smallest or the first one, violates a property as it was told."""
    for case in (other.case, other.first):
        violation = None if case is None else judge_merge(told.property, case, c, calls)[1]
        if violation is not None and told.found.violation and violation.reason == told.found.violation.reason:
            return True
    return False


def _wrong_alike(
    fault: MergeFault,
    tensors: tuple[str, ...],
    case: MergeCase,
    result: MergeResult,
    c: MergeCapabilities,
    gradients: bool,
) -> bool | None:
    """Return whether the numbers that came back are wrong, if a fault gives the same ones; else `None`."""
    wrong = False
    like = faulty_result(fault, case, c, gradients=gradients)
    right, limits = right_merge(case, c, gradients=gradients)
    for tensor in tensors:
        actual, numbers = result_named(result, tensor, case, c), result_named(like, tensor, case, c)
        if actual is None or numbers is None:
            return None
        # A fault may give larger numbers than are right, with rounding errors in proportion.
        allowed, exact = getattr(limits, tensor), getattr(right, tensor)
        near = allowed_by_a_cause(allowed, exact, numbers)
        dtype = lse_dtype_of(case, c) if "lse" in tensor else case.dtype
        if (margins_with_nan(actual, numbers, near, dtype) > 1).any():
            return None
        wrong |= bool((margins_with_nan(actual, exact, allowed, dtype) > 1).any())
    return wrong


def faulty_result(fault: MergeFault, case: MergeCase, c: MergeCapabilities, *, gradients: bool) -> MergeResult:
    """Merge the partials of a case by a fault, in the dtype in which the merge accumulates."""
    x = partials_of(case, c)
    wide = DTYPE["float64" if case.dtype == "float64" else c.accumulates]
    out, lse = (torch.from_numpy(one.copy()).to(wide).requires_grad_(gradients) for one in (x.out, x.natural))

    def merged_by(grouping: Grouping) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(grouping, int):
            return out[grouping], lse[grouping]
        outs, lses = zip(*map(merged_by, grouping), strict=True)
        whole, total = fault.function(torch.stack(outs), torch.stack(lses), c.base)
        return whole.to(DTYPE[case.dtype]).to(wide), total

    whole, total = merged_by(in_order(case, c))
    dout = dlse = None
    if gradients:
        factor = 1.0 if c.base == "e" else 1 / LN2
        pairs = [(whole, torch.from_numpy(x.cotangent.copy()).to(wide))]
        if c.lse:
            pairs.append((total, torch.from_numpy(x.lse_cotangent * factor).to(wide)))
        attached = [(one, of) for one, of in pairs if one.requires_grad]
        found = torch.autograd.grad([a for a, _ in attached], [out, lse], [b for _, b in attached], allow_unused=True)
        dout, dlse = (
            (torch.zeros_like(leaf) if one is None else one).double().numpy()
            for one, leaf in zip(found, (out, lse), strict=True)
        )
    values = (whole.detach().double().numpy(), total.detach().double().numpy())
    return MergeResult(*values, dout, dlse, ())
