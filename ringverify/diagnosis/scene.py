"""What is known of a case before anything is suspected: inputs, the right answer, who holds what.

Shape letters of this room: B batch, H query heads, K key heads, S queries of a rank, T keys of a block, D head_dim,
E value_dim, P ranks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.attention import Answer, attention
from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.rounding import Allowed, Pipeline, allowed_error
from ringref.sharding import Positions
from ringverify.cases.case import Case
from ringverify.cases.comparing import TensorName, pipeline_of
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.cases.running import Observation, shards
from ringverify.implementation import Capabilities

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
Results = dict[TensorName, Array]
"""What one rank returns, canonical layout, its own rows."""


@dataclasses.dataclass(frozen=True, eq=False)
class Scene:
    """A case, and what was observed of it.

    Attributes:
        case: it.
        capabilities: what the implementation declares.
        observation: what came back; it did not fail.
        shared: what hypotheses have computed of it that others need too.
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
        return self.case.sharding == "replicated_query"

    @functools.cached_property
    def patterns(self) -> dict[tuple[int, int], Counts]:
        """How often a rank's queries attend the keys of a block, `(B, H, S, T)`, by rank and owner."""
        queries, keys = self.shards
        m = multiplicity(self.problem)
        found = {}
        for rank, i in enumerate(queries):
            for owner, j in enumerate(keys):
                found[rank, owner] = m[:, :, i][..., j]
                found[rank, owner].setflags(write=False)
        return found

    @functools.cached_property
    def counts(self) -> dict[tuple[int, int], torch.Tensor]:
        """The same as tensors."""
        return {pair: torch.from_numpy(np.array(m)) for pair, m in self.patterns.items()}

    @functools.cached_property
    def inputs(self) -> Inputs:
        """Global inputs."""
        return make_inputs(self.case)

    @functools.cached_property
    def shards(self) -> tuple[list[Positions], list[Positions]]:
        """Positions of every rank's queries, and of its keys."""
        return shards(self.case, self.capabilities)

    @functools.cached_property
    def truth(self) -> Answer:
        """The oracle's answer."""
        x = self.inputs
        return attention(self.problem, x.q, x.k, x.v, x.dout, x.dlse)

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        """How the implementation says that it computes."""
        return pipeline_of(self.case, self.capabilities, self.observation)

    @functools.cached_property
    def allowed(self) -> Allowed:
        """What error is allowed."""
        x = self.inputs
        return allowed_error(self.problem, self.truth, x.q, x.k, x.v, x.dout, x.dlse, self.pipeline)

    @functools.cached_property
    def tensors(self) -> tuple[TensorName, ...]:
        """The results that came back."""
        if not self.observation.ranks:
            return ()
        first = self.observation.ranks[0]
        names: tuple[TensorName, ...] = ("out", "lse", "dq", "dk", "dv")
        return tuple(name for name in names if getattr(first, name) is not None)

    def local(self, name: TensorName, whole: Array, rank: int) -> Array:
        """A rank's rows of a global tensor."""
        rows = self.shards[1 if name in ("dk", "dv") else 0][rank]
        return whole[:, :, rows] if name == "lse" else whole[:, rows]

    def true(self, name: TensorName, rank: int) -> Array:
        """What a rank should have returned."""
        key = "true", name, rank
        if key not in self.shared:
            self.shared[key] = self.local(name, getattr(self.truth, name), rank)
        found: Array = self.shared[key]
        return found

    def limit(self, name: TensorName, rank: int) -> Array:
        """How much error it is allowed."""
        key = "limit", name, rank
        if key not in self.shared:
            self.shared[key] = self.local(name, getattr(self.allowed, name), rank)
        found: Array = self.shared[key]
        return found

    def seen(self, name: TensorName, rank: int) -> Array:
        """What it did return."""
        found: Array = getattr(self.observation.ranks[rank], name)
        return found
