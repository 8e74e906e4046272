"""Our two implementations in worlds of several ranks, against the oracle: a dense sweep, the same on every run.

The suite finds more; this says within seconds whether something is badly wrong, without drawing anything.
"""

import collections
import dataclasses
import functools
import inspect
import itertools
import math
import re

import pytest
import torch
import torch.distributed as dist

from ringref.problem import DTYPES, Dilation, Problem
from ringref.rounding import witness_bound
from ringref.sharding import SHARDINGS, key_positions, query_positions
from ringverify.cases.case import COTANGENTS, MEMORY, Case
from ringverify.cases.comparing import worst
from ringverify.cases.inputs import lay_out
from ringverify.cases.running import Runner
from ringverify.cases.strategies import GENERAL_VALUES
from ringverify.implementation import AttentionCall
from ringverify.ring.declared import allgather, ring
from ringverify.worlds.simulated import SimulatedWorld

VALUES = (*GENERAL_VALUES, "float16_limits", "poisoned")
LENGTHS = (0, 1, 2, 3, 5, 8, 13)
WORLD_SIZES = (1, 2, 3, 4, 5)
EVERYTHING = ("out", "lse", "dq", "dk", "dv")
BOTH = pytest.mark.parametrize("implementation", [ring, allgather], ids=lambda implementation: implementation.name)

WORLD = SimulatedWorld()

# Each takes a length and gives the fields of a problem. Their number, that of the dtypes (4), values, memory layouts
# and cotangents share few factors, so that stepping through all of them side by side meets most pairs.
CONSTRAINTS = (
    lambda n: {},
    lambda n: {"causal": True, "heads": 2, "key_heads": 1, "value_dim": 3},
    lambda n: {"window": (2, 1), "batch": 2},
    lambda n: {"causal": True, "window": (1, None), "softcap": 2.0},
    lambda n: {"documents": (n // 5, n // 2, n // 2, n - n // 7), "heads": 2},
    lambda n: {"documents": (0, n // 3, n), "causal": True},
    lambda n: {"key_lengths": (n // 2, 0), "batch": 2, "heads": 2},
    lambda n: {"key_length": n // 2 + 1, "causal": True},
    lambda n: {"key_length": 2 * n + 1, "causal": True, "scale": -0.5},
    lambda n: {"dilation": Dilation(((2, 1), (5, 2))), "heads": 3},
    lambda n: {"dilation": Dilation(((3, 1), (4, 2), (64, 3)), heads="shared"), "heads": 2, "causal": True},
    lambda n: {
        "dilation": Dilation(((6, 2), (4, 1)), heads="shared", head_offset="block"),
        "heads": 4,
        "key_heads": 2,
        "key_lengths": (max(0, n - 2),),
    },
    lambda n: {"key_length": 0},
)


def cases(sharding, world_size):
    """For each length every second constraint, dtypes, values, layouts and cotangents stepping along.

    There is an odd number of constraints, so that another length or world size has the other half.
    """
    for place, (n, make) in enumerate(itertools.product(LENGTHS, CONSTRAINTS)):
        if (place + world_size) % 2:
            continue
        step = place // 2
        values = VALUES[step % len(VALUES)]
        dtype = "float16" if values == "float16_limits" else DTYPES[step % len(DTYPES)]
        yield Case(
            problem=Problem(query_length=n, head_dim=4, dtype=dtype, **make(n)),
            sharding=sharding,
            world_size=world_size,
            values=values,
            memory=MEMORY[(step // 2) % len(MEMORY)],
            cotangent=COTANGENTS[step % len(COTANGENTS)],
            seed=place,
            schedule=place,
        )


def observe(implementation, case):
    """What every rank returned; a run that failed fails the test."""
    observation = Runner(implementation, WORLD).run(case, gradients=True)
    assert observation.failure is None, f"{case}\n{observation.failure.message}\n{observation.failure.detail}"
    return observation


@BOTH
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.by_day(6)
def test_every_rank_returns_what_the_oracle_says(implementation, sharding, world_size):
    """out, lse and all gradients, no input changed, every constraint at every length."""
    for case in cases(sharding, world_size):
        observation = observe(implementation, case)
        margin, finding = worst(case, implementation.capabilities, observation, EVERYTHING)
        assert margin <= 1, f"{case}\n{finding}"
        assert not any(rank.changed for rank in observation.ranks), case


CASE = Case(
    problem=Problem(query_length=11, heads=4, key_heads=2, head_dim=4, causal=True), world_size=4, cotangent="both"
)


@BOTH
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_same_bits_on_any_schedule(implementation, sharding):
    """The order in which ranks run decides nothing."""
    case = CASE.replace(sharding=sharding)
    digests = {observe(implementation, case.replace(schedule=schedule)).digest for schedule in range(6)}
    assert len(digests) == 1


@BOTH
@pytest.mark.parametrize("memory", MEMORY)
def test_the_same_bits_however_inputs_lie_in_memory(implementation, memory):
    """Views of larger buffers give what contiguous copies give."""
    # Values that are legal for every layout: what is expanded must not vary over batch and heads.
    expanded = CASE.replace(memory="expanded", batch=2)
    observations = {}
    for layout in ("contiguous", memory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ringverify.cases.local.lay_out", always(layout))
            observations[layout] = observe(implementation, expanded)
    assert observations["contiguous"].digest == observations[memory].digest


def always(memory):
    """The runner's way to lay out an input, in one layout whatever the case says."""
    return lambda values, dtype, _, device: lay_out(values, dtype, memory, device)


@BOTH
def test_replicated_queries_give_every_rank_the_same_bits(implementation):
    """Else parameters that are replicated would drift apart."""
    ranks = observe(implementation, CASE.replace(sharding="replicated_query")).ranks
    for name in ("out", "lse", "dq"):
        first = getattr(ranks[0], name)
        assert all((getattr(rank, name) == first).all() for rank in ranks), name


# -- programs of our own -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Local:
    """What one rank holds and computes."""

    out: torch.Tensor
    lse: torch.Tensor
    gradients: tuple[torch.Tensor | None, ...]


def attend_local(implementation, problem, sharding, *, group=None, edit=None, require=(True, True, True)):
    """One rank's attention and gradients on inputs that all ranks draw alike and `edit` may change, leaf by leaf."""
    group = group or dist.group.WORLD
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    queries = torch.from_numpy(query_positions(sharding, problem.nq, world_size)[rank])
    keys = torch.from_numpy(key_positions(sharding, problem.nk, world_size)[rank])
    generator = torch.Generator().manual_seed(7)
    p = problem
    shapes = {
        "q": (p.batch, p.nq, p.heads, p.head_dim),
        "k": (p.batch, p.nk, p.hk, p.head_dim),
        "v": (p.batch, p.nk, p.hk, p.dv),
        "dout": (p.batch, p.nq, p.heads, p.dv),
        "dlse": (p.batch, p.heads, p.nq),
    }
    whole = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    if edit is not None:
        edit(whole)
    leaves = [whole["q"][:, queries], whole["k"][:, keys], whole["v"][:, keys]]
    leaves = [leaf.clone().requires_grad_(wanted) for leaf, wanted in zip(leaves, require, strict=True)]
    call = AttentionCall(group, rank, world_size, problem, sharding, queries, keys)
    out, lse = implementation(*leaves, call)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    found = iter(torch.autograd.grad([out, lse], wanted, [whole["dout"][:, queries], whole["dlse"][..., queries]]))
    return Local(out.detach(), lse.detach(), tuple(next(found) if leaf.requires_grad else None for leaf in leaves))


def run(program, world_size, world=WORLD, seed=0):
    """What a program without arguments returns on each rank."""
    finished = world.run(lambda _: program(), None, world_size=world_size, seed=seed, deadline=20)
    assert finished.failure is None, f"{finished.failure.message}\n{finished.failure.detail}"
    assert not finished.unreceived, [mail.describe() for mail in finished.unreceived]
    return finished.results


def equal(first, second):
    """Whether two ranks' results are equal bit for bit."""
    pairs = zip((first.out, first.lse, *first.gradients), (second.out, second.lse, *second.gradients), strict=True)
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def alike(first, second, dtype):
    """Whether two ranks' results are equal up to roundings, fewer than a thousand for each number."""
    for a, b in zip((first.out, first.lse, *first.gradients), (second.out, second.lse, *second.gradients), strict=True):
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            return False
        largest = max(a[torch.isfinite(a)].abs().tolist(), default=0.0)
        if not bool(((a - b).nan_to_num(0.0).abs() <= witness_bound(dtype, 1000) * largest).all()):
            return False
    return True


# Some versions of torch that are supported always sort a group's ranks; the order is kept where it can be.
IN_ORDER = {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
PROBLEM = Problem(query_length=7, heads=2, head_dim=3, dtype="float64", causal=True)


@BOTH
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_groups_smaller_than_the_world_compute_side_by_side(implementation, sharding):
    """Offset and strided groups of different sizes and lengths, at once, give what each gives alone."""
    groups = {(1, 3, 4): PROBLEM, (2, 0): PROBLEM.replace(query_length=4)}

    def program():
        made = {ranks: dist.new_group(list(ranks), **IN_ORDER) for ranks in groups}
        for ranks, problem in groups.items():
            if dist.get_rank() in ranks:
                group = made[ranks]
                return dist.get_rank(group), attend_local(implementation, problem, sharding, group=group)
        return None

    together = run(program, 6)
    for ranks, problem in groups.items():
        alone = run(functools.partial(attend_local, implementation, problem, sharding), len(ranks))
        places = [together[rank][0] for rank in ranks]
        assert sorted(places) == list(range(len(ranks)))
        assert all(equal(together[rank][1], alone[place]) for rank, place in zip(ranks, places, strict=True))


@BOTH
@pytest.mark.parametrize("sharding", SHARDINGS)
def test_ranks_need_not_agree_on_which_inputs_require_a_gradient(implementation, sharding):
    """Messages do not depend on it; a rank gets what it asked for, the same bits as if all had asked for all."""

    def some():
        rank = dist.get_rank()
        return attend_local(implementation, PROBLEM, sharding, require=[place == rank for place in range(3)])

    everything = run(functools.partial(attend_local, implementation, PROBLEM, sharding), 3)
    for rank, (asked, complete) in enumerate(zip(run(some, 3), everything, strict=True)):
        assert torch.equal(asked.gradients[rank], complete.gradients[rank])
        assert sum(gradient is not None for gradient in asked.gradients) == 1


@BOTH
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_the_mask_excludes_cannot_matter(implementation, sharding, poison):
    """Keys and values past the key lengths hold NaN or infinity, and so does the cotangent of rows that are empty."""
    problem = Problem(query_length=9, heads=2, head_dim=3, dtype="float64", key_lengths=(4,), window=(2, 2))

    def spoil(whole):
        whole["k"][:, 4:] = poison
        whole["v"][:, 4:] = poison
        whole["dout"][:, 6:] = poison  # rows 6, 7, 8 reach keys 4 and up only
        whole["dlse"][..., 6:] = poison

    clean = run(functools.partial(attend_local, implementation, problem, sharding), 3)
    spoiled = run(functools.partial(attend_local, implementation, problem, sharding, edit=spoil), 3)
    # Masked tiles that are not finite go to another kernel: the same numbers, rounded elsewhere.
    for before, after in zip(clean, spoiled, strict=True):
        assert alike(before, after, problem.dtype)


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_ring_sends_to_its_right_neighbour_only_and_no_more_than_its_hops(sharding):
    """Sharded queries: W - 1 messages forward, 2 (W - 1) backward; fewer where causality leaves blocks unneeded."""
    sent = collections.Counter()

    def note(event):
        operation = event.operation.describe()
        destination = re.match(r"a send to rank (\d+)", operation)
        if event.moment == "posted" and destination:
            sent[event.operation.rank, int(destination[1])] += 1
        assert "#" not in operation, f"a collective: {operation}"

    world_size, n = 5, 13
    run(
        functools.partial(attend_local, ring, PROBLEM.replace(query_length=n), sharding),
        world_size,
        SimulatedWorld(observe=note),
    )
    assert sorted(sent) == [(r, (r + 1) % world_size) for r in range(world_size)]
    hops = 4 * (world_size - 1) if sharding == "replicated_query" else 3 * (world_size - 1)
    if sharding == "contiguous":  # the block of rank r is needed by later ranks only, and its gradient comes home after
        assert max(sent.values()) < hops
    else:
        assert set(sent.values()) == {hops}


def test_a_rank_that_holds_nothing_is_relayed_past():
    """Two tokens on five ranks: a block with no tokens is no message, and one that nobody needs does not travel."""
    sent = collections.Counter()

    def note(event):
        if event.moment == "posted" and event.operation.describe().startswith("a send"):
            sent[event.operation.rank] += 1

    problem = PROBLEM.replace(query_length=2)
    results = run(functools.partial(attend_local, ring, problem, "contiguous"), 5, SimulatedWorld(observe=note))
    assert [local.out.size(1) for local in results] == [1, 1, 0, 0, 0]
    # Only rank 1 attends a key of another: one hop forward, one backward, and one for the gradient, back.
    assert sum(sent.values()) == 3
