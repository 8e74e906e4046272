"""How the ranks of a group compute a call together: the interface of methods, and which one does."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import torch

from ringverify.ring.accumulate import PartialResult
from ringverify.ring.allgather import AllGather
from ringverify.ring.compute import Job, Rows
from ringverify.ring.one_process import OneProcess
from ringverify.ring.passes import KVRing
from ringverify.ring.plan.plan import Plan
from ringverify.ring.replicated import ReplicatedQueries
from ringverify.ring.visiting import QueryRing

MethodName = Literal["ring", "allgather"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)


class Method(Protocol):
    """A forward and a backward pass. All ranks of the group call the same one together.

    Shape letters: B batch, S this rank's queries, T its keys, H query heads, K key heads, D head_dim, E value_dim.
    """

    def forward(self, job: Job, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> PartialResult:
        """Attention of this rank's queries to the keys of all ranks.

        Args:
            job: the call on this rank.
            q: `(B, S, H, D)`.
            k: this rank's keys `(B, T, K, D)`.
            v: this rank's values `(B, T, K, E)`.

        Returns:
            out `(B, S, H, E)` in the dtype of q, contiguous, and lse `(B, H, S)` in the accumulation dtype.
        """

    def backward(
        self, job: Job, rows: Rows, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of this rank's queries, keys and values, each summed over all ranks.

        Args:
            job: as in `forward`.
            rows: this rank's queries, their results, and the cotangents of these.
            k: as in `forward`.
            v: as in `forward`.

        Returns:
            dq `(B, S, H, D)`, dk `(B, T, K, D)` and dv `(B, T, K, E)`, in the dtype of q or wider.
        """


def method_of(name: MethodName, plan: Plan) -> tuple[Method, str]:
    """The method of a call, what was asked for as far as the plan leaves anything to exchange, and what is exchanged.

    Both are the same on every rank.
    """
    collectives = name == "allgather"
    if plan.world_size == 1:
        return OneProcess(), "nothing is sent, there is one rank"
    if plan.replicated:
        return ReplicatedQueries(collectives=collectives), "queries are replicated, and partial results are combined"
    if plan.schedule.steps == 1:
        return OneProcess(), "nothing is sent, no query needs a key of another rank"
    if collectives:
        return AllGather(), "every KV block is gathered on every rank"
    return (QueryRing(), _of_queries(plan)) if passes_queries(plan) else (KVRing(), _of_keys(plan))


def passes_queries(plan: Plan) -> bool:
    """Whether queries and their partial results are fewer bytes than the KV blocks, on the rank that sends the most."""
    return plan.sent.exact and plan.sent.queries < plan.sent.keys


def _of_queries(plan: Plan) -> str:
    return (
        f"pass Q: queries travel at most {plan.visits.steps - 1} of {plan.world_size - 1} hops, and partial results "
        f"home, {plan.sent.queries:,} bytes on the rank that sends the most; of KV blocks {plan.sent.keys:,}"
    )


def _of_keys(plan: Plan) -> str:
    sent = plan.sent
    where = "on the rank that sends the most" if sent.exact else "in a hop of all ranks"
    return (
        f"pass KV: KV blocks travel at most {plan.schedule.steps - 1} of {plan.world_size - 1} hops, {sent.keys:,} "
        f"bytes {where}; of queries and partial results {sent.queries:,}"
    )
