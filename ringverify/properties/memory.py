"""`memory`: the peak memory of a rank, for implementations that declare how it grows.

"sharded": at a fixed number of positions per rank, the peak does not grow with the world size. "streaming": in
addition, twice the positions per rank take at most twice the memory, so nothing of the size of a score matrix is held.

A tile may have a fixed size, and while there are fewer positions than it has room for it grows with them on both sides,
as a score matrix does. So linear means linear from some length on: what takes more than twice the memory at few
positions is judged again at `FULL` positions per rank, on the fewest ranks, and where that cannot be run there is no
verdict.
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

FULL = 1024
"""Positions per rank at which a tile of a fixed size is taken to be full, so that it no longer grows with them."""

FEWEST_RANKS = 3
"""Smallest world size that is compared: two ranks make a single hop, with one buffer less than on larger worlds."""

WIDTH = 32
"""Heads times head_dim; as large as it is for the same reason as `POSITIONS`."""

BESIDE = 1.05
"""Factor allowed on a peak for what is held beside the tensors and grows with the world, such as positions."""


def _judge(case: Case, runner: Runner) -> Judgement:
    """Compare the largest peak of a rank with that on twice the ranks and, if "streaming", with twice the positions."""
    c = runner.capabilities
    observed = runner.run(case, gradients=c.gradients, watch="memory")
    if (judgement := failed(observed)) is not None:
        return judgement
    wider = case.replace(query_length=2 * case.problem.nq, world_size=2 * case.world_size)
    longer = wider.replace(world_size=case.world_size)
    margin = 0.0
    for other in (wider, longer) if c.memory == "streaming" else (wider,):
        if why_unsupported(other, c) is not None:
            continue
        seen = runner.run(other, gradients=c.gradients, watch="memory")
        if (judgement := failed(seen)) is not None:
            return judgement
        compared = _compared((case, observed), (other, seen))
        if other is longer and compared.violation is not None and case.problem.nq < FULL * case.world_size:
            compared = _when_full(case, runner)
            if not compared.applies:
                return compared
        margin = max(margin, compared.margin)
        if compared.violation is not None:
            return Judgement(margin, compared.violation, observed.digest)
    return Judgement(margin, None, observed.digest, applies=margin > 0)


def _when_full(case: Case, runner: Runner) -> Judgement:
    """Compare a case of `FULL` positions per rank with one of twice as many."""
    c = runner.capabilities
    size = min(declared_world_sizes(c, tuple(range(2, 9))))
    full = fitted(case.replace(query_length=FULL * size, world_size=size), c)
    both = [full, full.replace(query_length=2 * full.problem.nq)]
    observed = list[Observation]()
    for one in both:
        if why_unsupported(one, c) is None:
            observed.append(runner.run(one, gradients=c.gradients, watch="memory"))
    if len(observed) < len(both) or any(failed(one) is not None for one in observed):
        return Judgement(0.0, None, applies=False)
    return _compared(*zip(both, observed, strict=True))


def _compared(one: tuple[Case, Observation], other: tuple[Case, Observation]) -> Judgement:
    """Compare the peak of a case with that of another, of more ranks, or of more positions per rank."""
    (case, observed), (changed, seen) = one, other
    each, size = case.problem.nq // case.world_size, changed.world_size
    if size > case.world_size:
        times, here, there = 1.0, f"on {size} ranks", f"on {case.world_size}, at {each} positions per rank"
    else:
        times, here, there = 2.0, f"of {size} at {changed.problem.nq // size} positions per rank", f"at {each}"
    before, after = _peak(observed), _peak(seen)
    allowed = before * times * BESIDE
    margin = after / allowed if allowed else math.inf if after else 0.0
    if after <= allowed:
        return Judgement(margin, None)
    rank = max(range(size), key=lambda one: _peaks(seen)[one])
    grown = f"{after / before:.4g} times the largest peak {there}" if before else f"and 0 bytes {there}"
    summary = (
        f"the peak memory of rank {rank} {here} is {after} bytes, {grown}; at most {times * BESIDE:g} times is allowed"
    )
    detail = "" if seen.watched is None else "\n".join(seen.watched.memory[rank].describe())
    return Judgement(margin, Violation(("grows",), rank, summary, detail))


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
