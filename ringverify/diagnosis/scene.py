"""What is known of a case without any hypothesis: inputs, the right answer, and which rank holds what.

Shape letters of this package: B batch, H query heads, K key heads, S queries of a rank, T keys of a block, D head_dim,
E value_dim, P ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.attention import Answer, attention
from ringref.pattern import multiplicity
from ringref.problem import DtypeName, Problem
from ringref.rounding import Allowed, Pipeline, allowed_error, margins
from ringref.sharding import Positions, Sharding
from ringverify.cases.case import Case, sharding_of
from ringverify.cases.comparing import pipeline_of
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.cases.running import Observation, shards
from ringverify.events import TensorName
from ringverify.implementation import Capabilities

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
T = TypeVar("T")
Results = dict[TensorName, Array]
"""Results of one rank by name: its own rows, canonical layout."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """A case, and what was observed of it.

    Attributes:
        case: the case.
        capabilities: what the implementation declares.
        observation: what came back of a run that did not fail.
        shared: what one hypothesis has computed and others need too.
    """

    case: Case
    capabilities: Capabilities
    observation: Observation
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @property
    def problem(self) -> Problem:
        """What all ranks compute together."""
        return self.case.problem

    @property
    def size(self) -> int:
        """P, ranks in the ring."""
        return self.case.world_size

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all queries."""
        return self.case.replicated

    @functools.cached_property
    def counts(self) -> dict[tuple[int, int], torch.Tensor]:
        """Multiplicities of a rank's queries and a block's keys, `(B, H, S, T)` int64, by rank and owner."""
        queries, keys = self.shards
        m = torch.from_numpy(multiplicity(self.problem))
        return {(rank, owner): m[:, :, i][..., j] for rank, i in enumerate(queries) for owner, j in enumerate(keys)}

    @functools.cached_property
    def inputs(self) -> Inputs:
        """Inputs and cotangents of all ranks together."""
        return make_inputs(self.case)

    @functools.cached_property
    def sharding(self) -> Sharding:
        """Which rank holds which positions, as calls are told."""
        return sharding_of(self.case, self.capabilities)

    @functools.cached_property
    def shards(self) -> tuple[list[Positions], list[Positions]]:
        """Positions of every rank's queries, and of its keys."""
        return shards(self.case, self.capabilities)

    @functools.cached_property
    def truth(self) -> Answer:
        """The oracle's answer."""
        x = self.inputs
        return attention(self.problem, x.q, x.k, x.v, x.dout, x.dlse, x.sinks)

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """How the implementation declares that it computes."""
        return pipeline_of(self.case, self.capabilities, self.observation)

    @functools.cached_property
    def allowed(self) -> Allowed:
        """The error allowed in every element of every result."""
        x = self.inputs
        return allowed_error(self.problem, self.truth, x.q, x.k, x.v, x.dout, x.dlse, self.pipeline)

    @functools.cached_property
    def tensors(self) -> tuple[TensorName, ...]:
        """Names of the results that came back."""
        if not self.observation.ranks:
            return ()
        first = self.observation.ranks[0]
        names: tuple[TensorName, ...] = ("out", "lse", "dq", "dk", "dv")
        return tuple(name for name in names if getattr(first, name) is not None)

    def local(self, name: TensorName, whole: Array, rank: int) -> Array:
        """Return a rank's rows of a result of all ranks."""
        rows = self.shards[1 if name in ("dk", "dv") else 0][rank]
        return whole[:, :, rows] if name == "lse" else whole[:, rows]

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return what was computed of the case under this key before, by whichever hypothesis."""
        if key not in self.shared:
            self.shared[key] = compute()
        found: T = self.shared[key]
        return found

    def true(self, name: TensorName, rank: int) -> Array:
        """Return what a rank should have returned."""
        return self.once(("true", name, rank), lambda: self.local(name, getattr(self.truth, name), rank))

    def limit(self, name: TensorName, rank: int) -> Array:
        """Return the error allowed in what a rank returned."""
        return self.once(("limit", name, rank), lambda: self.local(name, getattr(self.allowed, name), rank))

    def dtype_of(self, name: TensorName) -> DtypeName:
        """Return the dtype whose range bounds a result."""
        return "float32" if name == "lse" and self.problem.dtype != "float64" else self.problem.dtype

    def margins(self, name: TensorName, rank: int) -> Array:
        """Return the error over the error allowed, of every element of what a rank returned."""
        return margins(self.seen(name, rank), self.true(name, rank), self.limit(name, rank), self.dtype_of(name))

    @functools.cached_property
    def worst_first(self) -> list[int]:
        """The ranks, those that are furthest from right first: a wrong prediction is soonest refuted there."""
        margins = [[self.margins(name, rank).max(initial=0) for name in self.tensors] for rank in range(self.size)]
        return sorted(range(self.size), key=lambda rank: max(margins[rank], default=0), reverse=True)

    def seen(self, name: TensorName, rank: int) -> Array:
        """Return what a rank did return."""
        found: Array = getattr(self.observation.ranks[rank], name)
        return found


def slope_of_cap(problem: Problem, raw_scores: Array) -> Array:
    """Return the derivative of the softcap, 1 without one: sech² has digits where 1 − tanh² has none."""
    if problem.softcap is None:
        return np.ones_like(raw_scores)
    with np.errstate(over="ignore"):  # far beyond the cap it is 0
        found: Array = np.cosh(raw_scores / problem.softcap) ** -2
    return found
