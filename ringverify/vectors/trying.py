"""One vector on one implementation: its shards handed out, its results held to the file's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ringref.rounding import Allowed
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.comparing import Right, TensorName, allowed_on, pipeline_of, worst
from ringverify.cases.running import Runner
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Violation, violation_of, where
from ringverify.vectors.making import EXACT, RESULTS, given_in
from ringverify.vectors.story import Layout, Story, trial_name
from ringverify.vectors.tensorfile import Tensor


@dataclasses.dataclass(frozen=True)
class Trial:
    """What is asked of an implementation on one sharding of a vector.

    Attributes:
        story: the vector.
        layout: the sharding and the number of ranks.
        case: both, as what a rank is told.
        gradients: whether gradients are taken.
        tensors: the results that are compared.
    """

    story: Story
    layout: Layout
    case: Case
    gradients: bool
    tensors: tuple[TensorName, ...]

    @property
    def name(self) -> str:
        """It in words."""
        return trial_name(self.story, self.layout)


def trial(story: Story, layout: Layout, capabilities: Capabilities) -> Trial | str:
    """What can be asked of an implementation that declares so much, or why nothing can.

    A vector with a cotangent of lse still asks for out and lse of one that is not differentiable through lse.
    """
    case, gradients = story.case(layout), capabilities.gradients
    if case.cotangent != "out" and not (capabilities.lse_gradient and gradients):
        case, gradients = case.replace(cotangent="out"), False
    if (reason := why_unsupported(case, capabilities)) is not None:
        return reason
    tensors: tuple[TensorName, ...] = ("out", "lse") if capabilities.lse else ("out",)
    return Trial(story, layout, case, gradients, (*tensors, "dq", "dk", "dv") if gradients else tensors)


def tried(wanted: Trial, tensors: Mapping[str, Tensor], runner: Runner) -> Judgement:
    """Run it, and hold every rank to what the vector says of its positions.

    The error allowed is that of the arithmetic which the implementation declares, on as many ranks.

    Raises:
        WorldUnavailable: the world could not be set up; nothing was learned.
    """
    given, capabilities = given_in(tensors), runner.capabilities
    observation = runner.run(wanted.case, gradients=wanted.gradients, inputs=given)
    if observation.failure is not None:
        return Judgement(0.0, violation_of(observation), observation.digest)
    bound = allowed_on(wanted.case, given, pipeline_of(wanted.case, capabilities, observation))
    if wanted.story.exact:
        bound = _exactly(bound)
    right = Right(**{name: tensors[name].values for name in RESULTS}, allowed=bound)
    margin, finding = worst(wanted.case, capabilities, observation, wanted.tensors, right)
    violation = None
    if finding is not None:
        violation = Violation(("value", finding.tensor), finding.rank, where(finding), "", finding)
    return Judgement(margin, violation, observation.digest)


def _exactly(bound: Allowed) -> Allowed:
    """No error at all where the answer is exact."""
    nothing = {name: np.zeros_like(getattr(bound, name)) for name in EXACT}
    return dataclasses.replace(bound, **nothing)
