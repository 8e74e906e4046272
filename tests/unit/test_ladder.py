"""Each rung of the ladder against the rung below it, and the ring's own facts."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from comparing import assert_agree, oracle, results
from drawing import Inputs, normal_inputs, problems, seeds, sizes
from hypothesis import given
from hypothesis import strategies as st
from wrong_oracles import CROSS, PLAIN

from ringref.ladder import __main__ as demonstration
from ringref.ladder import blockwise, naive, online_softmax, sequential_ring
from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.sharding import SHARDINGS, key_positions, query_positions

pytestmark = pytest.mark.filterwarnings("error")


def climb(rung: Any, problem: Problem, inputs: Inputs, **options: Any) -> dict[str, np.ndarray]:
    """A rung's five results; its backward is given its own out and lse."""
    out, lse = rung.forward(problem, inputs.q, inputs.k, inputs.v, **options)
    gradients = rung.backward(problem, inputs.q, inputs.k, inputs.v, out, lse, inputs.dout, inputs.dlse, **options)
    return results(out, lse, *gradients)


def backwards_striped(length: int, world_size: int) -> list[np.ndarray]:
    """A user's own sharding: striped, each rank's positions in descending order."""
    return [np.arange(rank, length, world_size)[::-1] for rank in range(world_size)]


def all_on_the_last(length: int, world_size: int) -> list[np.ndarray]:
    """A user's own sharding: every rank but the last holds nothing."""
    return [np.arange(0)] * (world_size - 1) + [np.arange(length)]


shardings = st.sampled_from([*SHARDINGS, backwards_striped, all_on_the_last])


@given(problem=problems(), seed=seeds, size=sizes)
def test_naive_agrees_with_the_oracle(problem: Problem, seed: int, size: float) -> None:
    """The lowest rung stands on the definition."""
    inputs = normal_inputs(problem, seed=seed, size=size)
    assert_agree(problem, inputs, climb(naive, problem, inputs), oracle(problem, inputs))


@given(problem=problems(), seed=seeds, size=sizes, block=st.integers(1, 8))
def test_blockwise_agrees_with_naive(problem: Problem, seed: int, size: float, block: int) -> None:
    """Blocks of any size, shorter at the end or longer than the keys."""
    inputs = normal_inputs(problem, seed=seed, size=size)
    assert_agree(problem, inputs, climb(blockwise, problem, inputs, block=block), climb(naive, problem, inputs))


@given(problem=problems(), seed=seeds, size=sizes, query_tile=st.integers(1, 8), key_tile=st.integers(1, 8))
def test_online_softmax_agrees_with_blockwise(
    problem: Problem, seed: int, size: float, query_tile: int, key_tile: int
) -> None:
    """Tiles of any two sizes."""
    inputs = normal_inputs(problem, seed=seed, size=size)
    online = climb(online_softmax, problem, inputs, query_tile=query_tile, key_tile=key_tile)
    assert_agree(problem, inputs, online, climb(blockwise, problem, inputs))


@given(problem=problems(), seed=seeds, size=sizes, sharding=shardings, world_size=st.integers(1, 8))
@pytest.mark.nightly
def test_the_sequential_ring_agrees_with_online_softmax(
    problem: Problem, seed: int, size: float, sharding: Any, world_size: int
) -> None:
    """Every sharding, a user's own too, with any number of ranks, many of which hold nothing."""
    inputs = normal_inputs(problem, seed=seed, size=size)
    ring = climb(sequential_ring, problem, inputs, sharding=sharding, world_size=world_size)
    assert_agree(problem, inputs, ring, climb(online_softmax, problem, inputs))


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("size", [1.0, 1000.0])
def test_every_rank_of_the_ring_returns_its_own_rows_of_the_answer(sharding: Any, size: float) -> None:
    """Rank by rank, also where all hold all queries; gaps between blocks far beyond what an exponential can span."""
    problem = Problem(query_length=7, key_length=9, heads=2, key_heads=1, causal=True)
    inputs = normal_inputs(problem, size=size)
    whole = oracle(problem, inputs)
    by_rank = sequential_ring.forward_by_rank(problem, inputs.q, inputs.k, inputs.v, sharding=sharding, world_size=3)
    for positions, (out, lse) in zip(query_positions(sharding, problem.nq, 3), by_rank, strict=True):
        merged = {"out": whole["out"].copy(), "lse": whole["lse"].copy()}
        merged["out"][:, positions], merged["lse"][:, :, positions] = out, lse
        assert_agree(problem, inputs, merged, {"out": whole["out"], "lse": whole["lse"]})


@pytest.mark.parametrize("rung", [naive, blockwise, online_softmax, sequential_ring])
def test_a_rung_computes_in_the_dtype_of_its_inputs(rung: Any) -> None:
    """float32 in, float32 out, and right to float32."""
    problem = CROSS.replace(softcap=3.0)
    narrow = [x.astype(np.float32) for x in normal_inputs(problem).arrays()]
    answer = climb(rung, problem, Inputs(*narrow))
    assert {name: x.dtype for name, x in answer.items()} == dict.fromkeys(answer, np.dtype(np.float32))
    wide = Inputs(*(x.astype(np.float64) for x in narrow))
    assert_agree(problem, wide, answer, oracle(problem, wide), dtype="float32")


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_the_trace_tells_every_merge_of_the_ring_once(sharding: Any) -> None:
    """At hop t, rank r merges the block of rank r − t; the pairs attended add up to the multiplicity, once a rank
    that holds the query."""
    problem, world_size = Problem(query_length=11, heads=2, causal=True), 4
    inputs, trace = normal_inputs(problem), []
    sequential_ring.forward(
        problem, inputs.q, inputs.k, inputs.v, sharding=sharding, world_size=world_size, trace=trace.append
    )
    assert [(merge.hop, merge.rank, merge.block) for merge in trace] == [
        (hop, rank, (rank - hop) % world_size) for hop in range(world_size) for rank in range(world_size)
    ]
    holders = world_size if sharding == "replicated_query" else 1
    assert sum(merge.pairs for merge in trace) == holders * multiplicity(problem).sum()
    first = trace[1]
    i, j = query_positions(sharding, 11, world_size)[1], key_positions(sharding, 11, world_size)[1]
    assert first.pairs == multiplicity(problem, i, j).sum()


def test_an_empty_partial_is_the_identity_of_the_merge() -> None:
    """On either side, bit for bit; two of them merge to one, without a NaN."""
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal((1, 3, 2, 4)), rng.standard_normal((1, 2, 3))
    nothing = np.zeros_like(out), np.full_like(lse, -np.inf)
    for merged in (sequential_ring.merge(out, lse, *nothing), sequential_ring.merge(*nothing, out, lse)):
        np.testing.assert_array_equal(merged[0], out)
        np.testing.assert_array_equal(merged[1], lse)
    twice = sequential_ring.merge(*nothing, *nothing)
    np.testing.assert_array_equal(twice[0], nothing[0])
    np.testing.assert_array_equal(twice[1], nothing[1])


def _average(out_a, lse_a, out_b, lse_b):
    return (out_a + out_b) / 2, np.logaddexp(lse_a, lse_b)


RIGHT_MERGE = sequential_ring.merge


def _larger_lse(out_a, lse_a, out_b, lse_b):
    out, _ = RIGHT_MERGE(out_a, lse_a, out_b, lse_b)
    return out, np.maximum(lse_a, lse_b)


@pytest.mark.parametrize(
    ("target", "replacement"),
    [("merge", _average), ("merge", _larger_lse), ("passed_on", lambda held: list(held))],
    ids=["partials averaged", "larger lse taken", "nothing passed on"],
)
def test_a_ring_that_is_wrong_is_rejected(target: str, replacement: Callable[..., Any]) -> None:
    """The comparison that passes above can fail."""
    inputs = normal_inputs(PLAIN)
    with mock.patch.object(sequential_ring, target, replacement):
        wrong = climb(sequential_ring, PLAIN, inputs, sharding="zigzag", world_size=3)
    with pytest.raises(AssertionError, match="times the difference allowed"):
        assert_agree(PLAIN, inputs, wrong, climb(online_softmax, PLAIN, inputs))


@pytest.mark.parametrize(
    ("rung", "options"),
    [(blockwise, {"block": 0}), (online_softmax, {"query_tile": 0}), (online_softmax, {"key_tile": -1})],
)
def test_a_tile_without_size_is_refused(rung: Any, options: dict[str, int]) -> None:
    """The message shows the value."""
    inputs = normal_inputs(PLAIN)
    with pytest.raises(ValueError, match=rf"tile size={next(iter(options.values()))}: expected at least 1"):
        rung.forward(PLAIN, inputs.q, inputs.k, inputs.v, **options)


def test_the_demonstration_prints_every_rung_of_every_example_and_the_ring(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m ringref.ladder`: four tables of four rungs, no error that is not a number, four hops."""
    demonstration.main()
    lines = capsys.readouterr().out.splitlines()
    for rung in ("naive", "blockwise", "online softmax", "sequential ring"):
        rows = [line for line in lines if line.startswith(f"  {rung} ")]
        assert len(rows) == len(demonstration.EXAMPLES)
        assert all(re.fullmatch(r"(\s+\d+\.\d){5}", row.removeprefix(f"  {rung}")) for row in rows), rows
    assert [line for line in lines if re.match(r"  \d  +block", line)] == [
        "  0     block 0, 72 pairs     block 1, 72 pairs     block 2, 72 pairs     block 3, 72 pairs",
        "  1     block 3, 64 pairs     block 0, 64 pairs     block 1, 64 pairs     block 2, 64 pairs",
        "  2     block 2, 64 pairs     block 3, 64 pairs     block 0, 64 pairs     block 1, 64 pairs",
        "  3     block 1, 64 pairs     block 2, 64 pairs     block 3, 64 pairs     block 0, 64 pairs",
    ]


def test_the_demonstration_shows_an_infinite_error_where_infinities_differ() -> None:
    """An lse of 0 for an empty row would otherwise not show in its table."""
    problem = Problem(query_length=2, key_lengths=(0,), head_dim=2)
    inputs = normal_inputs(problem)
    expected = demonstration.attention(problem, *inputs.arrays())
    wrong = (expected.out, np.zeros_like(expected.lse), expected.dq, expected.dk, expected.dv)
    assert demonstration.in_units(expected, wrong) == {"out": 0.0, "lse": np.inf, "dq": 0.0, "dk": 0.0, "dv": 0.0}
