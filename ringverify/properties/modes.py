"""`modes`: what a training step computes is what inference computes.

After a training step on other inputs of the same shapes, a case is run under `torch.no_grad`, under
`torch.inference_mode`, and with only some of q, k and v requiring gradients, as frozen weights have it: two of
`SUBSETS`, by the seed of the case. Then it is run as in training, as activation checkpointing does after `no_grad`. All
have the same out and lse, and the gradients that are asked for, to the bound; no others appear. A program has a plain
call and a call with gradients, which are compared.

Runs are compared with each other, so what is wrong in all of them is left to other properties, NaN in the same places
included.
"""

from __future__ import annotations

import dataclasses

from ringverify.cases.case import Case
from ringverify.cases.comparing import (
    GRADIENTS,
    allowed,
    allowed_between,
    answer,
    gathered,
    other_run,
    pipeline_of,
    worst,
)
from ringverify.cases.reentering import second_of
from ringverify.cases.running import GradMode, Observation, Runner
from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.events import TensorName
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, Violation, all_tensors, always, failed, undefined

SUBSETS = (("q", "kv"), ("k", "qv"), ("v", "qk"))
"""What may require gradients where not everything does: one of q, k and v, and then the two others."""


def ways(case: Case, capabilities: Capabilities) -> tuple[tuple[GradMode, str], ...]:
    """Return of each call its mode of autograd, and which of q, k and v require gradients; a training step is last."""
    inference: tuple[tuple[GradMode, str], ...] = (("no_grad", ""), ("inference_mode", ""))
    if not capabilities.gradients:
        return (*inference, ("enable_grad", ""))
    one, others = SUBSETS[case.seed % len(SUBSETS)]
    return (*inference, ("enable_grad", one), ("enable_grad", others), ("enable_grad", "qkv"))


def _how(mode: GradMode, requiring: str) -> str:
    """Say how a call is made that is no training step."""
    if mode != "enable_grad":
        return f"under torch.{mode}"
    if not requiring:
        return "without gradients"
    return f"where only {' and '.join(requiring)} {'requires' if len(requiring) == 1 else 'require'} gradients"


def _judge(case: Case, runner: Runner) -> Judgement:
    c = runner.capabilities
    if (judgement := failed(runner.run(second_of(case), gradients=c.gradients))) is not None:
        return judgement
    others = (("enable_grad", ""),) if runner.world.name == "external" else ways(case, c)[:-1]
    calls = [((mode, some), runner.run(case, gradients=bool(some), mode=mode, requiring=some)) for mode, some in others]
    for way, seen in calls:
        if (judgement := failed(seen)) is not None and judgement.violation is not None:
            told = dataclasses.replace(judgement.violation, summary=f"{_how(*way)}, {judgement.violation.summary}")
            return dataclasses.replace(judgement, violation=told)
    training = runner.run(case, gradients=c.gradients)
    if (judgement := failed(training)) is not None:
        return judgement
    pipeline = pipeline_of(case, c, training)
    bound = allowed(case, pipeline)
    whole = {name: gathered(case, c, training, name) for name in all_tensors(c)}
    largest = 0.0
    for way, seen in calls:
        how, some = _how(*way), way[1]
        if some and (violation := _unasked(how, some, seen)) is not None:
            return Judgement(largest, violation, training.digest)
        names = (*all_tensors(c, gradients=False), *(name for name in GRADIENTS if input_of(name) in some))
        results = {name: gathered(case, c, seen, name) for name in names}
        right = other_run(results, whole, answer(case), allowed_between(bound, bound), pipeline)
        margin, finding = worst(case, c, seen, names, right)
        largest = max(largest, margin)
        if finding is not None:
            summary = (
                f"{finding.tensor} {how} differs from that of a training step, which is shown as the expected value"
            )
            here, there = (undefined(run, finding.tensor) for run in (seen, training))
            if here or there:
                summary += f": it has {here or 'numbers alone'}, that of training {there or 'numbers alone'}"
            also = tuple(("differs", tensor) for tensor in finding.tensors)
            reason = ("differs", finding.tensor)
            violation = Violation(reason, finding.rank, summary, "", finding, also, way=way)
            return Judgement(largest, violation, training.digest)
    return Judgement(largest, None, training.digest)


def input_of(name: TensorName) -> str:
    """Return which of q, k and v a gradient is of; sinks require one where q does."""
    return "q" if name == "dsinks" else name[1]


def _unasked(how: str, some: str, seen: Observation) -> Violation | None:
    """Return a violation if an input that requires no gradient has one."""
    unasked: tuple[TensorName, ...] = tuple(name for name in GRADIENTS if input_of(name) not in some)
    for rank, result in enumerate(seen.ranks):
        for name in unasked:
            if getattr(result, name) is not None:
                return Violation(("unasked", name), rank, f"{name} appears on rank {rank}, {how}")
    return None


def _scope(c: Capabilities) -> Scope:
    return Scope(
        dtypes=widest(c),
        world_sizes=(1, 2, 3, 4),
        cotangents=("out", "both", "lse") if c.lse_gradient else ("out",),
        longest=12,
    )


MODES = Property(
    id="modes",
    meaning="no_grad, inference_mode and frozen inputs give the results of a training step (no oracle involved)",
    examples=36,
    cases=lambda c: cases(c, _scope(c)),
    judge=_judge,
    unsupported=always,
    applies=lambda case, c: within(case, c, _scope(c)),
)
