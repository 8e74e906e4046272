"""`inputs_untouched`, `strided_inputs`: inputs may lie in memory in any layout, and a call does not change them.

After a call the input tensors, the memory around them, the fields of the call, and torch's settings, those of the
process and of the thread (`ringverify.worlds.torch_settings`), are as before it. A setting may be changed during the
call if it is restored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ringverify.cases.case import Case
from ringverify.cases.local import ROUNDED
from ringverify.cases.running import Runner
from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, Violation, always, failed, judge_everything


def _judge_untouched(case: Case, runner: Runner) -> Judgement:
    """Run without gradients first: autograd refuses some in-place changes of tensors it tracks, which hides others."""
    for gradients in (False, True) if runner.capabilities.gradients else (False,):
        observation = runner.run(case, gradients=gradients)
        if (judgement := failed(observation)) is not None:
            return judgement
        during = "forward and backward" if gradients else "forward"
        for rank, result in enumerate(observation.ranks):
            if result.left:
                settings = "; ".join(f"{name} is {values}" for name, values in result.left.items())
                summary = f"rank {rank} did not put back torch's settings after {during}: {settings}"
                return Judgement(0.0, Violation(("left", *result.left), rank, summary), observation.digest)
            if result.changed:
                summary = f"rank {rank} changed its input {', '.join(result.changed)} during {during}"
                reason, cause = ("changed", *result.changed), _in_place(case, result.factors)
                return Judgement(0.0, Violation(reason, rank, summary, cause=cause), observation.digest)
    return Judgement(0.0, None, observation.digest)


def _in_place(case: Case, factors: Mapping[str, float]) -> str | None:
    """Say by what an implementation multiplied its inputs; `None` if it did something else with them.

    Args:
        case: the case.
        factors: the factor, by name of the input.
    """
    scale, told = case.problem.scale_value, []
    words = {"the scale": scale, "1 / scale": 1 / scale, "scale · log2(e)": scale * math.log2(math.e)}
    for name, factor in factors.items():
        if not factor:  # of all that a small case has; a larger one may keep some
            told.append(f"zeros are written into {name} in place")
            continue
        word = next((word for word, value in words.items() if math.isclose(value, factor, rel_tol=ROUNDED)), None)
        number = f"{factor:.6g}"
        told.append(f"{name} is multiplied by {number if word is None else f'{word} ({number})'} in place")
    return ", ".join(told) or None


def _untouched(c: Capabilities) -> Scope:
    return Scope(dtypes=widest(c), memory=("contiguous", "offset", "packed", "strided"))


def _strided(c: Capabilities) -> Scope:
    """All memory layouts but "contiguous": a case that fails in that one too belongs to another property."""
    return Scope(
        dtypes=widest(c),
        memory=("transposed", "strided", "offset", "packed", "expanded"),
        cotangents=("out", "both", "lse") if c.lse_gradient else ("out",),
    )


INPUTS_UNTOUCHED = Property(
    id="inputs_untouched",
    meaning="a call leaves its inputs, the memory around them, the call object and torch's settings unchanged",
    examples=80,
    cases=lambda c: cases(c, _untouched(c)),
    judge=_judge_untouched,
    unsupported=always,
    applies=lambda case, c: within(case, c, _untouched(c)),
    results=(),
)
STRIDED_INPUTS = Property(
    id="strided_inputs",
    meaning="transposed, strided, offset, packed and expanded inputs and cotangents give the same answer",
    examples=80,
    cases=lambda c: cases(c, _strided(c)),
    judge=judge_everything,
    unsupported=always,
    applies=lambda case, c: within(case, c, _strided(c)),
)
