"""`memory`: the peak memory of a rank, for implementations that declare how it grows.

"sharded": at a fixed number of positions per rank, the peak does not grow with the world size. "streaming": in
addition, twice the positions per rank take at most twice the memory, so nothing of the size of a score matrix is held.
"""

from __future__ import annotations

import math

from ringref.problem import Problem
from ringverify.cases.case import SEEDS, Case, why_unsupported
from ringverify.cases.choices import Choices, Maker
from ringverify.cases.running import Observation, Runner
from ringverify.cases.shapes import fitted
from ringverify.cases.strategies import declared_world_sizes
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.property import CAUSALS, Judgement, Property, Violation, failed

POSITIONS = 64
"""Positions per rank; enough for the tensors of a shard to outweigh everything else that is held."""

FEWEST_RANKS = 3
"""Smallest world size that is compared: two ranks make a single hop, with one buffer less than on larger worlds."""

WIDTH = 32
"""Heads times head_dim; as large as it is for the same reason as `POSITIONS`."""

BESIDE = 1.05
"""Factor allowed on a peak for what is held beside the tensors and grows with the world, such as positions."""


def _judge(case: Case, runner: Runner) -> Judgement:
    """Compare the largest peak of a rank with that on twice the ranks and, if "streaming", with twice the positions."""
    c = runner.capabilities
    size = case.world_size
    wider = case.replace(query_length=2 * case.problem.nq, world_size=2 * size)
    longer = case.replace(query_length=2 * case.problem.nq)
    each = case.problem.nq // size
    compared = [(wider, 1.0, f"on {2 * size} ranks", f"on {size}, at {each} positions per rank")]
    if c.memory == "streaming":
        compared.append((longer, 2.0, f"at {2 * each} positions per rank", f"at {each}"))
    observed = runner.run(case, gradients=c.gradients, watch="memory")
    if (judgement := failed(observed)) is not None:
        return judgement
    margin = 0.0
    for other, times, here, there in compared:
        if why_unsupported(other, c) is not None:
            continue
        seen = runner.run(other, gradients=c.gradients, watch="memory")
        if (judgement := failed(seen)) is not None:
            return judgement
        before, after = _peak(observed), _peak(seen)
        allowed = before * times * BESIDE
        margin = max(margin, after / allowed if allowed else math.inf if after else 0.0)
        if after > allowed:
            rank = max(range(other.world_size), key=lambda one: _peaks(seen)[one])
            grown = f"{after / before:.4g} times the largest peak {there}" if before else f"and 0 bytes {there}"
            summary = (
                f"the peak memory of rank {rank} {here} is {after} bytes, {grown}; at most {times * BESIDE:g} times is "
                "allowed"
            )
            detail = "" if seen.watched is None else "\n".join(seen.watched.memory[rank].describe())
            return Judgement(margin, Violation(("grows",), rank, summary, detail), observed.digest)
    return Judgement(margin, None, observed.digest, applies=margin > 0)


def _peaks(observation: Observation) -> list[int]:
    return [] if observation.watched is None else [rank.peak_bytes for rank in observation.watched.memory]


def _peak(observation: Observation) -> int:
    return max(_peaks(observation), default=0)


def _cases(c: Capabilities) -> Maker[Case]:
    dtype = "float32" if "float32" in c.dtypes else c.dtypes[0]
    size = max(_sizes(c))
    names = [sharding_name(sharding) for sharding in c.shardings]
    # Under replicated_query each rank holds all queries, and nothing is claimed: used only if nothing else is declared.
    sharded = [name for name in names if name != "replicated_query"] or names

    def make(choices: Choices) -> Case:
        sharding, causal = choices.among(sharded), choices.among(CAUSALS[c.causal])
        problem = Problem(query_length=size * POSITIONS, heads=2, head_dim=WIDTH // 2, dtype=dtype, causal=causal)
        case = Case(problem=problem, sharding=sharding, world_size=size, seed=choices.integer(0, SEEDS - 1))
        return fitted(case, c, worlds=[2 * size])

    return make


def _outweighs(case: Case, c: Capabilities) -> bool:
    """Return whether a case is large enough for its tensors to outweigh everything else that is held."""
    size, p = case.world_size, case.problem
    return size >= FEWEST_RANKS and p.nq >= size * POSITIONS and p.heads * p.head_dim >= WIDTH


def _sizes(c: Capabilities) -> list[int]:
    """World sizes that can be compared with twice as many ranks."""
    declared = declared_world_sizes(c, tuple(range(1, 9)))
    return [size for size in declared if FEWEST_RANKS <= size <= 4 and 2 * size in declared]


def _not_claimed(c: Capabilities) -> str | None:
    if c.memory is None:
        return 'neither memory="sharded" nor memory="streaming" is declared'
    if _sizes(c):
        return None
    declared = ", ".join(map(str, c.world_sizes or ()))
    return f"needs two declared world sizes, 3 and 6 or 4 and 8; declared: {declared}"


MEMORY = Property(
    id="memory",
    meaning="where claimed: a rank's peak does not grow with the world, and is linear in its positions",
    examples=6,
    cases=_cases,
    judge=_judge,
    unsupported=_not_claimed,
    simulated_only=True,
    applies=_outweighs,
    results=(),
)
