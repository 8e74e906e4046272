"""What a call works on at a time fits its memory budget: kernels say what a tile costs them, and sides follow."""

import itertools

import pytest
import torch
from peaks import DIM, Call, peak

from ringref.problem import DTYPES, Problem
from ringverify.ring.accumulate import Sum, merge_
from ringverify.ring.calls import ACCUMULATES
from ringverify.ring.kernels.choose import KERNELS, STREAMING, choose_kernel
from ringverify.ring.kernels.fused_cpu import FusedCPU
from ringverify.ring.kernels.kernel import Extent, KernelTile, MergedRows, Setting
from ringverify.ring.kernels.streaming import Streaming
from ringverify.ring.sides import SMALLEST, make_sides
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.watch.memory import measured

pytestmark = pytest.mark.timeout(120)

TOO_MUCH = 2
"""A kernel that says that a tile costs so many times what it does would have tiles half as long as they could be."""


def setting_of(dtype, head_dim=DIM, value_dim=DIM, softcap=None, scale=0.25):
    """On CPU."""
    return Setting("cpu", dtype, ACCUMULATES[dtype], head_dim, value_dim, scale, softcap)


def taken(kernel, setting, tile):
    """Bytes that a forward and a backward of an unmasked and a causal tile have alive at most, added to sums."""

    def program(_):
        def given(heads, length, width):
            shape = tile.batch, length, heads, width  # as a rank holds them
            return torch.ones(shape, dtype=setting.dtype).transpose(1, 2)

        q, dout = given(tile.heads, tile.rows, setting.head_dim), given(tile.heads, tile.rows, setting.value_dim)
        k = given(tile.key_heads, tile.keys, setting.head_dim)
        v = given(tile.key_heads, tile.keys, setting.value_dim)
        lse = torch.zeros(tile.batch, tile.heads, tile.rows, dtype=setting.accumulates)
        sums = torch.zeros(dout.shape, dtype=setting.accumulates), lse.clone()
        into = [torch.zeros(x.shape, dtype=setting.accumulates).transpose(1, 2) for x in (q, k, v)]
        gradients = [Sum(x.shape, x.dtype, x.device, into=x, written=x.size(1)) for x in into]
        for mask in (None, "causal"):
            with measured():
                found = kernel.forward(setting, KernelTile(q, k, v, mask))
                merge_(*sums, *found)
            del found
            with measured():
                found = kernel.backward(setting, KernelTile(q, k, v, mask), MergedRows(dout, dout, lse))
                for total, part in zip(gradients, found, strict=True):
                    total.add(slice(0, tile.batch), slice(0, part.size(2)), slice(0, part.size(1)), part)
            del found, part

    run = SimulatedWorld().run(program, None, world_size=1, seed=0, deadline=100, watch="memory")
    assert run.failure is None, run.failure.detail
    return run.memory[0].peak_bytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [FusedCPU(), STREAMING], ids=lambda kernel: kernel.name)
@pytest.mark.by_day(3)
def test_a_kernel_says_what_a_tile_costs_it(kernel, dtype):
    """At least what the meter sees, and less than twice that: few heads and many, long tiles, unequal dimensions."""
    tiles = [
        Extent(1, 2, 2, 64, 64),
        Extent(2, 4, 2, 32, 32),
        Extent(1, 8, 1, 64, 64),
        Extent(1, 2, 2, 256, 256),
        Extent(1, 4, 4, 1024, 64),  # more than is converted at a time
        Extent(1, 4, 4, 64, 1024),
    ]
    for tile, dims, softcap in itertools.product(tiles, ((16, 16), (8, 24), (64, 64)), (None, 5.0)):
        setting = setting_of(getattr(torch, dtype), *dims, softcap=softcap)
        if kernel.why_not(setting) is None:
            said, found = kernel.held(setting, tile), taken(kernel, setting, tile)
            assert found <= said < TOO_MUCH * found, (setting, tile, said / found)


def dealt(length, world_size):
    """Blocks of 16, every other one last: on one rank too masks are looked up."""
    del world_size
    return [[p for half in range(2) for p in range(length) if p // 16 % 2 == half]]


KINDS = {
    "streaming": {"kernel": "streaming"},
    "softcap": {"softcap": 5.0},
    "softcap, causal": {"softcap": 5.0, "causal": True},
    "a wide window": {"causal": True, "window": (512, 0)},
    "a narrow window": {"window": (9, 9)},
    "masks by position": {"causal": True, "sharding": dealt},
    "float16": {"dtype": torch.float16, "causal": True, "window": (300, 0)},
    "bfloat16": {"dtype": torch.bfloat16, "causal": True, "window": (512, 0)},
}
"""Calls that are not one call of a kernel, also on one rank."""


ROWS = 1024
"""Of the rank."""


def beside(kind, budget, heads=8):
    """Bytes at the peak beside inputs, outputs and sums, and what they were made of."""
    call = Call(ROWS, 1, heads=heads, memory_budget=budget, **{"dtype": torch.float32, **KINDS[kind]})
    wide = ACCUMULATES[call.dtype].itemsize
    found, parts = peak(call)
    narrow = call.dtype.itemsize
    # q, out, dout; dq, dk, dv as sums, and as they are returned where that is another dtype.
    rows = ROWS * call.heads * DIM * (3 * narrow + 3 * wide + 3 * narrow * (narrow < wide))
    lse = 2 * ROWS * call.heads * wide
    return found - rows - lse, parts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.by_day(3)
def test_what_is_worked_on_at_a_time_fits_the_budget(kind):
    """Scores, masks, results: of all that a rank has at once, beside what the call is made of."""
    for budget in (1_000_000, 400_000):
        found, parts = beside(kind, budget)
        assert found <= budget, parts


@pytest.mark.parametrize("kind", ["streaming", "softcap", "a wide window"])
@pytest.mark.by_day(1)
def test_a_budget_is_made_use_of(kind):
    """A smaller one makes smaller tiles, and a call takes a good part of the one that it has."""
    assert beside(kind, 400_000)[0] < beside(kind, 1_000_000)[0] < beside(kind, None)[0]
    assert beside(kind, 1_000_000)[0] > 1_000_000 / 3


@pytest.mark.nightly
def test_a_budget_that_is_too_small_has_the_smallest_tiles():
    """It is exceeded by what those need, and no further however small it is."""
    for kind in ("softcap", "a wide window"):
        least, parts = beside(kind, 1)
        assert least == beside(kind, 1000)[0] < 300_000, parts


def test_a_kernel_that_forgets_its_scores_is_seen(monkeypatch):
    """A mutant that counts the gradients that it returns and nothing else, as the ring once did."""
    returned = staticmethod(lambda setting, tile: tile.of_rows(setting.head_dim) * 3 * setting.accumulates.itemsize)
    monkeypatch.setattr(Streaming, "held", returned)
    assert beside("softcap", 1_000_000)[0] > 1_000_000


TIGHT = 40_000
"""Bytes."""


def test_a_mask_that_is_not_counted_is_seen(monkeypatch):
    """A mutant whose masks cost nothing; with one head a mask is as large as all else of a tile."""
    for kind in ("a wide window", "masks by position"):
        assert beside(kind, TIGHT, heads=1)[0] <= TIGHT
    monkeypatch.setattr("ringverify.ring.masks.held", lambda *_, **__: 0)
    for kind in ("a wide window", "masks by position"):
        assert beside(kind, TIGHT, heads=1)[0] > TIGHT


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_sides_shrink_with_the_budget_down_to_the_smallest(kernel):
    """For kernels of other devices too: never longer than they like, never shorter than a call is worth."""
    problem = Problem(query_length=100_000, heads=8, head_dim=64, causal=True, window=(5000, 0))
    setting = setting_of(torch.bfloat16, 64, 64)
    previous = make_sides(problem, setting, kernel, 20_000, 20_000, None)
    assert (previous.bucket, previous.bounded) == (kernel.bucket(setting, 20_000), False)
    for budget in (1 << exponent for exponent in range(34, 0, -3)):
        sides = make_sides(problem, setting, kernel, 20_000, 20_000, budget)
        assert all(SMALLEST <= less <= more for less, more in zip(sides[:4], previous[:4], strict=True)), budget
        held = kernel.held(setting, Extent(1, 8, 8, sides.bucket, sides.bucket))
        assert held <= budget or sides.bucket == SMALLEST
        previous = sides
    assert previous[:4] == (SMALLEST,) * 4


def test_a_few_rows_are_one_tile_whatever_the_budget():
    """A kernel's own side may be below the smallest."""
    setting = setting_of(torch.float32)
    kernel, _ = choose_kernel("auto", setting)
    sides = make_sides(Problem(query_length=8), setting, kernel, 8, 8, 1)
    assert sides.bucket <= kernel.bucket(setting, 8)


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_that_is_not_positive_is_refused(budget):
    """By its value."""
    setting = setting_of(torch.float32)
    with pytest.raises(ValueError, match=f"memory_budget={budget}: expected a positive number of bytes"):
        make_sides(Problem(query_length=8), setting, STREAMING, 8, 8, budget)
