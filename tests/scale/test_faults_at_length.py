"""Faults that need length are found by the suite `scale`, and by no case of an ordinary length."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from at_length import reports

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.events import WrongPair
from ringverify.faults.length import AT_LENGTH
from ringverify.faults.ring import PLAIN
from ringverify.lab.faults_at_length import case_of, row
from ringverify.properties.suites import Method
from ringverify.scale.sampling import rows_to_sample
from ringverify.targets import load
from ringverify.worlds.simulated.world import SimulatedWorld

MINIATURE = Path(__file__).parents[1] / "miniatures/long_faults.py"
BY_DAY = ("mask_off_by_one", "lse_in_bfloat16")


def wrong(target: str, case: Case) -> set[str]:
    """The results that some rank found wrong."""
    return {one.tensor for report in reports(target, case) for one in report.differences}


@pytest.mark.parametrize(
    "name", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in AT_LENGTH]
)
def test_it_is_found_where_it_begins_and_equals_the_plain_ring_before(name: str) -> None:
    """Of 2,048 positions every row is verified; at 200 positions the results have the bits of the right ring."""
    target = f"ringverify.faults.length:{name}"
    assert wrong(target, case_of(name, 2048))
    case, runs = case_of(name, 200, 8), []
    for implementation in (AT_LENGTH[name].implementation, PLAIN):
        runs.append(Runner(implementation, SimulatedWorld(), deadline=60.0).run(case, gradients=True).ranks)
    for one, right in zip(*runs, strict=True):
        for tensor in ("out", "lse", "dq", "dk", "dv"):
            assert torch.equal(torch.from_numpy(getattr(one, tensor)), torch.from_numpy(getattr(right, tensor)))


def test_the_block_that_is_lost_is_named() -> None:
    """Where one rank's keys explain the worst row, the finding says whose, with which hop, and what happened."""
    case = case_of("far_block_lost", 512)
    found = [
        (rank, one)
        for rank, report in enumerate(reports("ringverify.faults.length:far_block_lost", case))
        for one in report.differences
        if one.pair is not None
    ]
    assert found
    for rank, one in found:
        assert one.pair == WrongPair(rank, (rank - 9) % 16, 9, (), "missing")
        assert one.ranges[0][0] <= one.ranges[0][1]


@pytest.mark.parametrize("method", ["every_row", "sampled_rows"])
def test_the_queries_whose_part_of_dk_and_dv_is_lost_are_named(method: Method) -> None:
    """By the rank that returns the keys: whose queries' part is missing from them, and at which hop these two meet."""
    case = dataclasses.replace(case_of("", 500), world_size=4)
    for rank, report in enumerate(reports(f"{MINIATURE}:part_lost", case, method)):
        found = {one.tensor: one.pair for one in report.differences}
        assert found == dict.fromkeys(("dk", "dv"), WrongPair((rank + 2) % 4, rank, 2, (), "missing"))


@pytest.mark.parametrize("method", ["every_row", "sampled_rows"])
def test_the_keys_whose_part_of_dq_counts_twice_are_named(method: Method) -> None:
    """By the rank that returns the queries: whose keys, and the hop with which they come."""
    case = dataclasses.replace(case_of("", 500), world_size=4, sharding="striped")
    for rank, report in enumerate(reports(f"{MINIATURE}:dq_twice", case, method)):
        found = {one.tensor: one.pair for one in report.differences}
        assert found == {"dq": WrongPair(rank, (rank - 1) % 4, 1, (), "repeated")}


@pytest.mark.parametrize("method", ["every_row", "sampled_rows"])
def test_a_part_of_dk_that_is_a_hundredth_too_large_is_found(method: Method) -> None:
    """In dk alone: what is allowed there is in proportion to what each row and key give to it."""
    case = dataclasses.replace(case_of("", 500), world_size=4)
    found = [one for report in reports(f"{MINIATURE}:dk_scaled", case, method) for one in report.differences]
    assert {one.tensor for one in found} == {"dk"}


@pytest.mark.parametrize("method", ["every_row", "sampled_rows"])
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_one_wrong_element_is_found(name: str, method: Method) -> None:
    """The last dimension of the last row, beyond the first piece, and nothing else."""
    case = Case(
        problem=Problem(query_length=1100, heads=2, key_heads=2, head_dim=4, causal=True),
        world_size=1,
        sharding="zigzag",
        cotangent="both",
        seed=1,
    )
    found = [
        (rank, one)
        for rank, of in enumerate(reports(f"{MINIATURE}:{name}_off", case, method))
        for one in of.differences
    ]
    ((rank, one),) = found
    assert (rank, one.tensor, one.rows, one.position) == (0, name, 1, 1099)
    assert one.ranges == ((1099, 1099),)
    assert one.index == ((0, 1, 1099) if name == "lse" else (0, 1099, 1, 3))


@pytest.mark.parametrize("length", [1024, pytest.param(4096, marks=pytest.mark.nightly)])
def test_identities_see_rows_that_no_sample_meets(length: int) -> None:
    """Sixteen rows give no gradients: sparse cotangents are zero there anyway, sums over all rows lack them."""
    target, case = f"{MINIATURE}:tile_detached", dataclasses.replace(case_of("", length), seed=1)
    sampled = rows_to_sample(case, load(target).capabilities, 64)
    assert not any(700 <= row < 716 for row in sampled)
    assert all(report.differences == () for report in reports(target, case, "sampled_rows"))
    (found,) = (one for report in reports(target, case, "identities") for one in report.differences)
    assert found.tensor == "dv"
    assert found.identity is not None


@pytest.mark.nightly
def test_none_is_found_before_it_begins_and_all_are_found_above() -> None:
    """The table of docs/scale.md: in bold what is found, at 1,000 positions nothing but what begins at 257."""
    for name in AT_LENGTH:
        cells = row(name).split("|")[2:-1]
        found = [any("**" in cell for cell in cells[start : start + 3]) for start in (0, 3)]
        assert found == [name == "positions_in_bfloat16", True], (name, cells)
