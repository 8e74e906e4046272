"""What is said of a pass at length is so: which keys a row would miss, which rows are sampled, what is measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from at_length import reports

from ringref.intervals import parts
from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.cases.running import shards
from ringverify.faults.ring import EVERYTHING
from ringverify.reports.progress import Hidden
from ringverify.scale import watching
from ringverify.scale.numbers import Numbers
from ringverify.scale.sampling import rows_to_sample
from ringverify.scale.worth import moved, sampled_worth

N = 96
PROBLEMS = {
    "causal": Problem(query_length=N, head_dim=8, causal=True),
    "window": Problem(query_length=N, head_dim=8, window=(5, 3)),
    "documents": Problem(query_length=N, head_dim=8, documents=(0, 3, 4, 40, 96)),
    "lengths": Problem(query_length=N, head_dim=8, key_lengths=(60,)),
    "dilation": Problem(query_length=N, head_dim=8, dilation=Dilation(((32, 3),)), causal=True),
}


@pytest.mark.parametrize("stretch", [(0, 1), (40, 20), (93, 3)])
@pytest.mark.parametrize("name", PROBLEMS)
def test_rows_that_attend_a_part_of_what_is_lost_count(name: str, stretch: tuple[int, int]) -> None:
    """The largest loss of any row decides, by the sums that dense weights give."""
    p, (start, count) = PROBLEMS[name], stretch
    numbers = Numbers(p, 3, "classes")
    queries, keys = numbers.codebooks
    exps = np.exp(queries @ keys.T * p.scale_value)
    seekers, classes = numbers.query_classes(0, 0, np.arange(p.nq)), numbers.key_classes(0, 0, np.arange(p.nk))
    lost = (multiplicity(p)[0, 0] * exps[seekers][:, classes])[:, start : start + count].sum(axis=1)
    for limit in (0.5 * lost.max(), 1.001 * lost.max()):
        found = False
        for part in parts(p, 0, 0):
            first, last = np.searchsorted(part.keys, [start, start + count])
            log = np.full(p.nq, np.log(limit)) if limit else np.full(p.nq, -np.inf)
            found |= bool(first < last and moved(part, (first, last), classes, exps, seekers, log))
        assert found == bool((lost > limit).any())


def test_rows_are_sampled_for_every_purpose() -> None:
    """Every pair of ranks, both sides of powers of two, and edges of documents from the first to the last."""
    problem = Problem(query_length=600, documents=tuple(range(0, 601, 3)), causal=True)
    case = Case(problem=problem, world_size=4, sharding="striped", seed=1)
    found = np.array(rows_to_sample(case, EVERYTHING, 64))
    m, (queries, keys) = multiplicity(problem)[0, 0], shards(case, EVERYTHING)
    for own in queries:
        for others in keys:
            sampled = found[np.isin(found, own)]
            assert m[np.ix_(sampled, others)].any() or not m[np.ix_(own, others)].any()
    assert {1, 2, 3, 4, 7, 8, 127, 128, 255, 256, 511, 512} <= set(found.tolist())
    edges = np.intersect1d(found, np.arange(3, 600, 3))
    assert len(edges) > 50
    assert edges.min() < 30
    assert edges.max() > 570


def test_ranks_that_seldom_meet_are_sampled_together() -> None:
    """Documents of three positions over 32 ranks: each pair of ranks meets in a few rows only."""
    problem = Problem(query_length=1280, documents=tuple(range(0, 1280, 3)))
    case = Case(problem=problem, world_size=32, sharding="striped", seed=1)
    found = np.array(rows_to_sample(case, EVERYTHING, 8))
    m, (queries, keys) = multiplicity(problem)[0, 0] > 0, shards(case, EVERYTHING)
    for own in queries:
        for others in keys:
            assert m[np.ix_(found[np.isin(found, own)], others)].any() == m[np.ix_(own, others)].any()


def test_probabilities_are_those_of_the_rows() -> None:
    """Of a hundred rows, one in a hundred is met with 1 - 0.99^100; of 128 neighbours, by how far apart rows are."""
    told = sampled_worth(np.arange(0, 10_000, 100), 10_000)
    assert "in 1 % of all rows with probability 0.63, in 5 % 0.99, in 256 neighbours 1.00" in told
    assert "in 256 neighbours 0.03" in sampled_worth(np.array([5000]), 10_000)


def test_classes_are_drawn_by_the_seed() -> None:
    """A mix-up within a class does not show, so that the next run needs other classes."""
    every = np.arange(N)
    first, again, other = (Numbers(PROBLEMS["causal"], seed, "classes").key_classes(0, 0, every) for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_a_dq_beside_the_sample_is_found() -> None:
    """Rows without cotangents have a dq of zero."""
    case = Case(problem=Problem(query_length=700, head_dim=4, causal=True), world_size=2, sharding="contiguous", seed=1)
    target = f"{Path(__file__).parent.parent / 'miniatures' / 'long_faults.py'}:dq_beside"
    found = [one for report in reports(target, case, "sampled_rows") for one in report.differences]
    assert {one.tensor for one in found} == {"dq"}
    beside = 700 - len(rows_to_sample(case, EVERYTHING, 64))
    assert sum(one.rows for one in found) > beside > 500


def test_mean_errors_are_those_of_all_rows() -> None:
    """Of two ranks' pieces as of one: as many rows count as there are."""
    case = Case(
        problem=Problem(query_length=5000, head_dim=4, dtype="bfloat16"), world_size=2, sharding="contiguous", seed=1
    )
    found = reports("ring", case)
    assert sum(report.squares["out"][0, 1] for report in found) == 5000


def test_the_bar_moves_with_what_rank_0_notes(tmp_path: Path) -> None:
    """And the work that is done is no more than there is."""
    steps: list[int] = []

    class Noted(Hidden):
        def step(self, done: int) -> None:
            steps.append(done)
            over.set()

    over = watching.threading.Event()
    (tmp_path / "0.json").write_text(json.dumps({"rows": {"out": 30, "lse": 12}}))
    with watching.shown(Noted(), "ring", "every_row", 40, tmp_path, None):
        assert over.wait(20)
    assert set(steps) == {40}


def test_the_bar_counts_seconds_where_they_are_known(tmp_path: Path) -> None:
    """So it moves while the implementation runs; then with what is verified, and never beyond its end."""
    steps: list[int] = []
    started: list[tuple[str, int]] = []

    class Noted(Hidden):
        def start(self, implementation: str, property: str, examples: int) -> None:
            started.append((property, examples))

        def step(self, done: int) -> None:
            steps.append(done)
            moved_on.set()

    for rows, seconds, expected in ((0, (0.4, 40.0), 0), (20, (4.0, 8.0), 8), (90, (4.0, 8.0), 12)):
        moved_on = watching.threading.Event()
        (tmp_path / "0.json").write_text(json.dumps({"rows": {"out": rows}}))
        with watching.shown(Noted(), "ring", "every_row", 40, tmp_path, seconds):
            assert moved_on.wait(20)
        assert steps.pop() == expected
    assert started == [("every_row, in seconds", 40), *[("every_row, in seconds", 12)] * 2]
