"""Try one vector on one implementation: give each rank its shards and compare its results with the file's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from ringref.rounding import Allowed
from ringverify.cases.case import Case, Undeclared, why_unsupported
from ringverify.cases.comparing import Right, allowed_on, pipeline_of
from ringverify.cases.running import Runner
from ringverify.cases.tensorfile import Tensor
from ringverify.events import TensorName
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, all_tensors, judge_observation
from ringverify.vectors.making import EXACT, given_in, results_of
from ringverify.vectors.story import Layout, Story


@dataclasses.dataclass(frozen=True)
class Trial:
    """One vector on one of its layouts, as an implementation is run on it.

    Attributes:
        story: the vector.
        layout: the sharding and the number of ranks.
        case: the case that describes both to the ranks.
        gradients: whether gradients are computed.
        tensors: names of the results that are compared.
    """

    story: Story
    layout: Layout
    case: Case
    gradients: bool
    tensors: tuple[TensorName, ...]


def trial(story: Story, layout: Layout, capabilities: Capabilities) -> Trial | Undeclared:
    """Return the trial that these capabilities allow, or what it needs that is not declared.

    If the vector has a cotangent of lse and the implementation is not differentiable through lse, only results of the
    forward pass are compared.
    """
    case = story.case(layout)
    gradients = capabilities.gradients and case.apart is None  # a cache has none
    if case.cotangent != "out" and not (capabilities.lse_gradient and gradients):
        case, gradients = case.replace(cotangent="out"), False
    if (lacking := why_unsupported(case, capabilities)) is not None:
        return lacking
    there = results_of(case.problem)
    tensors = tuple(name for name in all_tensors(capabilities, gradients=gradients) if name in there)
    return Trial(story, layout, case, gradients, tensors)


def tried(wanted: Trial, tensors: Mapping[str, Tensor], runner: Runner) -> Judgement:
    """Run a trial, and compare every rank's results with the vector's at the rank's positions.

    The error allowed follows from the arithmetic that the implementation declares and from the number of ranks; in an
    exact vector none is allowed in `EXACT`.

    Raises:
        WorldUnavailable: the world could not be set up; nothing was learned.
    """
    given, capabilities = given_in(tensors), runner.capabilities
    observation = runner.run(wanted.case, gradients=wanted.gradients, inputs=given)
    bound = allowed_on(wanted.case, given, pipeline_of(wanted.case, capabilities, observation))
    if wanted.story.exact:
        bound = _exactly(bound)
    results = {name: tensors[name].values for name in results_of(wanted.case.problem)}
    if "dsinks" in results:
        results["dsinks"] = results["dsinks"][:, None]  # the sum over all queries
    right = Right(**results, allowed=bound)
    return judge_observation(wanted.case, capabilities, observation, wanted.tensors, right)


def _exactly(bound: Allowed) -> Allowed:
    """Return the bound with no error allowed in the results that have to be exact."""
    nothing = {name: np.zeros_like(getattr(bound, name)) for name in EXACT}
    return dataclasses.replace(bound, **nothing)
