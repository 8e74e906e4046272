"""What `method="auto"` decides, and why: a function of what all ranks know, without a group, a tensor or a clock."""

from __future__ import annotations

import csv
import itertools
import math
import pathlib
import re
import statistics

import pytest
from by_tile import setting_of

from ringref.problem import Problem
from ringref.sharding import SHARDINGS
from ringverify.ring.choosing import ASSUMED, METHODS, choose_method
from ringverify.ring.plan.plan import make_plan

DOCS = pathlib.Path(__file__).parents[3] / "docs"
CROSSOVER, HOPS = DOCS / "benchmark-crossover.md", DOCS / "hops.csv"
HEAVY = {"ring": 1, "allgather": 0}
"""The methods in the order in which they suit more to carry."""


def choice(length, world_size=2, *, sharding="contiguous", rank=0, method="auto", device="cpu", **how):
    """The method of a problem of one head of 8 dimensions, unless said otherwise, and the reason."""
    link = {name: how.pop(name, None) for name in ("memory_budget", "bandwidth", "latency")}
    problem = Problem(query_length=length, **how)
    plan = make_plan(problem, sharding, world_size, rank)
    return choose_method(plan, setting_of(problem, device), method, **link)


# A rank of two holds 16 of 32 rows of 8 + 8 numbers of 4 bytes: 1024 bytes, which take a second. All these numbers are
# exact, so that "just as much" is a number too.
EVEN = {"length": 32, "bandwidth": 1024.0, "latency": 1.0}
MORE, LESS = math.nextafter(1, 2), math.nextafter(1, 0)
"""Factors that make next to no difference."""


@pytest.mark.parametrize(
    ("change", "method"),
    [
        ({}, "ring"),
        ({"latency": MORE}, "allgather"),
        ({"latency": LESS}, "ring"),
        ({"bandwidth": 1024 * MORE}, "allgather"),
        ({"bandwidth": 1024 * LESS}, "ring"),
        ({"length": 30}, "allgather"),
        ({"length": 33}, "ring"),
        ({"dtype": "bfloat16"}, "allgather"),
        ({"dtype": "float64"}, "ring"),
        ({"latency": 0.0}, "ring"),
    ],
)
def test_gathering_wins_from_where_hops_cost_more_than_what_they_carry(change, method):
    """On both sides of the line by as little as there is."""
    assert choice(**EVEN | change).method == method


def test_the_reason_names_both_costs():
    """In seconds, with the hops and the bytes that they come from."""
    assert choice(**EVEN) == ("ring", "gathering 1,024 bytes costs 1.0e+00 s that nothing hides, 1 hops 1.0e+00 s")
    gathers = choice(32, 4, bandwidth=1024.0, latency=2.0)
    assert gathers == ("allgather", "3 hops cost 6.0e+00 s whatever they carry, gathering 1,536 bytes 1.5e+00 s")


@pytest.mark.parametrize(("dtype", "held"), [("float32", 1024 + 2 * 1024), ("bfloat16", 512 + 2 * 1024)])
def test_gathered_keys_and_gradients_have_to_fit_the_budget(dtype, held):
    """The other rank's block, and the gradients of both in the accumulation dtype: to the byte."""
    how = {"dtype": dtype, "bandwidth": 1024.0, "latency": 10.0}
    assert choice(32, memory_budget=held, **how).method == "allgather"
    assert choice(32, memory_budget=held - 1, **how) == (
        "ring",
        f"gathered keys and gradients take {held:,} bytes of a budget of {held - 1:,}",
    )


@pytest.mark.parametrize(
    ("name", "values", "towards"),
    [
        ("latency", (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1.0), "allgather"),
        ("bandwidth", (1e5, 1e7, 1e8, 1e9, 1e10, 1e12), "allgather"),
        ("memory_budget", (1, 10**4, 10**6, 10**8, 10**10), "allgather"),
        ("world_size", (2, 3, 4, 8, 16, 32), "allgather"),
        ("length", (32, 100, 1000, 10_000, 100_000), "ring"),
        ("head_dim", (1, 8, 64, 512), "ring"),
        ("batch", (1, 2, 16, 128), "ring"),
    ],
)
def test_more_of_anything_moves_the_choice_in_one_direction(name, values, towards):
    """Whatever the rest is; and there is something that it moves."""
    others = {
        "latency": (1e-5, 1e-4, 1e-3),
        "bandwidth": (1e8, 1e9),
        "memory_budget": (None, 10**6),
        "world_size": (2, 5),
        "length": (64, 3000),
    }
    others.pop(name, None)
    moved = 0
    for rest in itertools.product(*others.values()):
        how = dict(zip(others, rest, strict=True))
        weights = [HEAVY[choice(**how, **{name: value}).method] for value in values]
        assert weights == sorted(weights, reverse=towards == "allgather"), (name, how)
        moved += weights[0] != weights[-1]
    assert moved


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_every_rank_decides_the_same(sharding):
    """Uneven shards, ranks without tokens, windows that only some ranks look beyond, and budgets on the line."""
    seen = set()
    for length, world_size, budget in itertools.product((1, 5, 64, 1000), (2, 3, 7), (None, 3000)):
        for pattern in ({}, {"causal": True}, {"causal": True, "window": (length // 4, 0)}):
            how = {"sharding": sharding, "memory_budget": budget, "bandwidth": 1e6, "latency": 1e-3, **pattern}
            choices = {choice(length, world_size, rank=rank, **how) for rank in range(world_size)}
            assert len(choices) == 1, (length, world_size, how)
            seen |= {one.method for one in choices}
    assert seen == ({"ring"} if sharding == "replicated_query" else {"ring", "allgather", "local"})


def test_nothing_is_sent_where_nothing_has_to_be():
    """Whatever a hop costs."""
    alone = choice(32, 1, latency=10.0)
    assert alone == ("local", "there is one rank")
    assert choice(32, latency=10.0, documents=(0, 16, 32)) == ("local", "no query needs a key of another rank")
    assert choice(32, latency=10.0, documents=(0, 15, 32)).method == "allgather"


def test_what_is_asked_for_is_done():
    """Whatever it costs."""
    for method in set(METHODS) - {"auto", "local"}:
        for how in ({"latency": 10.0}, {"latency": 0.0}, {"memory_budget": 1}):
            assert choice(32, method=method, **how) == (method, "asked for")


def test_what_is_not_given_is_assumed():
    """Each of the two on its own, by type of device; a device that is not known is taken for a fast one."""
    for device, like in (("cpu", "cpu"), ("cuda", "cuda"), ("xpu", "cuda")):
        latency, bandwidth = ASSUMED[like]
        rows = latency * bandwidth / (8 + 8) / 4  # of a rank of two, at the crossover
        short, long = 2 * math.floor(0.9 * rows), 2 * math.ceil(1.1 * rows)
        for given in ({}, {"latency": latency}, {"bandwidth": bandwidth}):
            assert choice(short, device=device, **given).method == "allgather"
            assert choice(long, device=device, **given).method == "ring"
        assert choice(long, device=device, latency=2 * latency).method == "allgather"
        assert choice(long, device=device, bandwidth=2 * bandwidth).method == "allgather"


def test_what_is_assumed_of_gloo_is_the_median_of_what_was_measured():
    """Of every hop that a published page gives; a page that is measured again adds its hops, and takes none away."""
    with HOPS.open() as file:
        hops = [(float(row["microseconds"]), float(row["gigabytes_per_second"])) for row in csv.DictReader(file)]
    page = re.findall(r"a hop(?: costs|: latency) (\d+) µs(?: and|, bandwidth) ([\d.]+) GB/s", CROSSOVER.read_text())
    assert hops[-len(page) :] == [(float(latency), float(bandwidth)) for latency, bandwidth in page]
    microseconds, gigabytes = (statistics.median(of) for of in zip(*hops, strict=True))
    assumed = ASSUMED["cpu"]
    assert round(1e6 * assumed.latency) == round(microseconds)
    assert round(assumed.bandwidth / 1e7) == round(100 * gigabytes)
