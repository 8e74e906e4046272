"""Memory: the most that a rank had allocated at once, and what that was made of."""

import gc

import pytest
import torch
import torch.distributed as dist
from watched_runs import everywhere, line, unwatched, watched

from ringverify.worlds.watch.memory import Memory, PeakShare, measured

pytestmark = pytest.mark.timeout(60)


def peak(program, world_size=1, **how):
    """The memory of rank 0."""
    return watched(program, world_size, watch="memory", **how).memory[0]


def test_the_peak_is_what_was_alive_together_largest_first():
    """Aggregated by the line that allocated it, its shape and its dtype."""

    def program():
        early = torch.ones(100)
        kept = [torch.ones(5, 2) for _ in range(3)]  # kept
        del early
        large = torch.zeros(200, dtype=torch.float64)  # large
        del large
        late = torch.ones(50)
        return len(kept) + late.numel()

    kept = line(program, "kept").replace(" in program", " in <listcomp>")
    memory = peak(program)
    assert memory.peak_bytes == 1600 + 120
    assert memory.parts[0] == PeakShare(line(program, "large"), (200,), "float64", 1, 1600)
    # Python 3.12 calls a list comprehension's frame by the name of the function around it.
    assert memory.parts[1] in [PeakShare(place, (5, 2), "float32", 3, 120) for place in (kept, line(program, "kept"))]
    assert memory.describe() == [
        "rank 0: 1720 bytes at the peak",
        f"  1600 bytes: [200] float64, at {memory.parts[0].place}",
        f"  120 bytes: 3 × [5, 2] float32, at {memory.parts[1].place}",
    ]


def test_views_and_writing_in_place_cost_nothing():
    """Of what the rank has made, and of what it was handed."""
    given = torch.ones(10, 10)

    def program():
        made = torch.ones(4, 4)
        views = [made.T, made[1:], made.view(16), made.detach(), given.T, given[2:5], given.unbind(1)]
        made.add_(1).mul_(2)
        given.copy_(given)
        made.T[1].zero_()
        return len(views)

    assert peak(program).peak_bytes == 64


def test_what_autograd_keeps_counts_until_it_is_let_go():
    """The square of a product needs the product; after the backward pass nothing but the gradient is left."""

    def keeps():
        x = torch.ones(100, requires_grad=True)
        squared = (x * 2).square()
        return squared.numel()

    def lets_go():
        x = torch.ones(100, requires_grad=True)
        (x * 2).square().sum().backward()
        grown = torch.ones(1000)
        return grown.numel()

    assert peak(keeps).peak_bytes == 3 * 400
    memory = peak(lets_go)
    assert memory.peak_bytes == 400 + 400 + 4000
    assert [part.nbytes for part in memory.parts] == [4000, 400, 400]


def test_copies_that_the_world_makes_are_not_the_ranks():
    """Neither snapshots of what is sent, nor what collectives compute; results of functional ones are."""

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        block, arriving = torch.ones(100), torch.empty(100)
        works = [dist.isend(block, (rank + 1) % size), dist.irecv(arriving, (rank - 1) % size)]
        for work in works:
            work.wait()
        dist.all_reduce(block)
        dist.all_gather([torch.empty(100) for _ in range(size)], block)

    for seed, conditions in everywhere():
        memories = watched(program, 3, seed=seed, conditions=conditions, watch="memory").memory
        assert [(memory.rank, memory.peak_bytes) for memory in memories] == [(rank, 2000) for rank in range(3)]


def test_every_rank_has_its_own_peak():
    """Rank r holds r + 1 tensors."""

    def program():
        return len([torch.ones(25) for _ in range(dist.get_rank() + 1)])

    assert [memory.peak_bytes for memory in watched(program, 4, watch="memory").memory] == [100, 200, 300, 400]


def test_only_what_is_measured_counts_if_anything_is():
    """Twice, with something in between, and what was alive before left out."""

    def program():
        before = torch.ones(1000)
        with measured():
            kept = before[:10] + 1
        between = torch.ones(1000)
        with measured():
            more = between[:20] + kept.sum()
        after = torch.ones(5000)
        return float(more.sum() + after.sum())

    memory = peak(program)
    assert memory.peak_bytes == 40 + 80 + 4
    assert unwatched(program, 1).failure is None
    assert watched(program, 1).memory == ()
    with measured():
        pass


def test_memory_repeats_itself_to_the_byte_cycles_or_not():
    """What only Python's collector would free stays until the end, every time."""

    def program():
        for at in range(30):
            cycle = [torch.ones(10 + at)]
            cycle.append(cycle)
        x = torch.ones(8, 8, requires_grad=True)
        (x @ x).softmax(0).sum().backward()

    runs = [watched(program, 2, seed=1, watch="memory").memory for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0].peak_bytes >= sum(4 * (10 + at) for at in range(30))
    assert gc.isenabled()


def test_hazards_and_traffic_are_reported_along_with_memory():
    """The same ones as without."""

    def program():
        block = torch.ones(3)
        sending = dist.isend(block, 1 - dist.get_rank())
        block.zero_()
        dist.recv(torch.empty(3), 1 - dist.get_rank())
        sending.wait()

    with_memory, without = watched(program, watch="memory"), watched(program)
    assert with_memory.hazards == without.hazards
    assert with_memory.traffic == without.traffic
    assert len(without.hazards) == 2


def test_a_rank_that_allocates_nothing_has_a_peak_of_nothing():
    """Zero bytes in zero parts."""
    assert peak(lambda: None) == Memory(0, 0, ())
