"""`traffic`: which ranks exchange data, and how many bytes, where "neighbours" is declared."""

from __future__ import annotations

from ringverify.cases.case import Case
from ringverify.cases.inputs import DTYPE
from ringverify.cases.running import Runner, shards
from ringverify.cases.strategies import Scope, cases, widest, within
from ringverify.implementation import Capabilities
from ringverify.properties.property import Judgement, Property, Violation, failed, needs
from ringverify.worlds.watch.traffic import Traffic


def _judge(case: Case, runner: Runner) -> Judgement:
    observation = runner.run(case, gradients=runner.capabilities.gradients, watch=True)
    if (judgement := failed(observation)) is not None:
        return judgement
    traffic = None if observation.watched is None else observation.watched.traffic
    if traffic is None:
        return Judgement(0.0, None, observation.digest, applies=False)
    violation = _strangers(case, traffic) or _too_much(case, runner.capabilities, traffic)
    return Judgement(0.0, violation, observation.digest)


def _strangers(case: Case, traffic: Traffic) -> Violation | None:
    """Return a violation if a rank exchanges with one that is no neighbour, or uses a collective but a barrier."""
    ring = case.ring_ranks
    for place, rank in enumerate(ring):
        beside = {ring[place - 1], ring[(place + 1) % len(ring)]}
        if found := traffic.collectives(rank) - {"barrier"}:
            return Violation(("collective",), place, f"rank {place} takes part in {', '.join(sorted(found))}")
        if others := traffic.peers(rank) - beside:
            *some, last = map(str, sorted(ring.index(other) for other in others))
            named = f"rank {last}, which is not its neighbour in the ring"
            if some:
                named = f"ranks {', '.join(some)} and {last}, which are not its neighbours in the ring"
            return Violation(("stranger",), place, f"rank {place} exchanges with {named}")
    return None


def _too_much(case: Case, c: Capabilities, traffic: Traffic) -> Violation | None:
    """Return a violation if a rank sends more bytes than a ring of P ranks needs.

    The forward takes P - 1 hops of a KV block; the backward takes P - 1 of it again, and P of its dK and dV. Every
    block counts as the largest. Under `replicated_query` KV blocks stay where they are: a rank sends at most twice the
    partial results, Dv + 2 numbers for each query and head, and twice the dq of all queries.
    """
    p, size = case.problem, case.world_size
    width = DTYPE[p.dtype].itemsize
    sums = max(width, DTYPE[c.accumulates].itemsize)  # dtype of gradients and partial results: that of the sums
    queries, keys = shards(case, c)
    largest = max(len(rows) for rows in keys)
    block = p.batch * largest * p.hk * (p.head_dim + p.dv)
    allowed, what = (size - 1) * block * width, "all KV blocks"
    if c.gradients:
        allowed += (size - 1) * block * width + size * block * sums
        what = "all KV blocks and their dK and dV"
    if case.replicated:
        rows = p.batch * max(len(rows) for rows in queries) * p.heads
        allowed = 2 * rows * (p.dv + 2) * sums + 2 * rows * p.head_dim * sums
        what = "partial results and dQ"
    for place, rank in enumerate(case.ring_ranks):
        if (sent := traffic.sent(rank)) > allowed:
            summary = f"rank {place} sends {sent} bytes; passing {what} round the ring takes at most {allowed}"
            return Violation(("bytes",), place, summary)
    return None


def _scope(c: Capabilities) -> Scope:
    """Worlds of at least two ranks: a rank alone has no neighbours."""
    return Scope(dtypes=widest(c), world_sizes=(2, 3, 4, 5))


TRAFFIC = Property(
    id="traffic",
    meaning="where claimed: only ring neighbours exchange, and no rank sends more than its hops need",
    examples=40,
    cases=lambda c: cases(c, _scope(c)),
    judge=_judge,
    unsupported=needs("traffic", "neighbours"),
    simulated_only=True,
    applies=lambda case, c: within(case, c, _scope(c)),
    results=(),
)
