"""Regions and tiles against the oracle's pattern: every pair as often as the pattern says, and no pair for nothing."""

import itertools
import random

import numpy as np
import pytest
from covering import mismatch, runs_of

from ringref.problem import Dilation, Problem
from ringref.sharding import SHARDINGS
from ringverify.ring.plan import geometry, rectangles
from ringverify.ring.plan import regions as regions_module
from ringverify.ring.plan import tiles as tiles_module
from ringverify.ring.plan.heads import lanes
from ringverify.ring.plan.rectangles import Rectangle, joined
from ringverify.ring.plan.regions import regions
from ringverify.ring.plan.rows import Span
from ringverify.ring.plan.runs import RowRun
from ringverify.ring.plan.tiles import tiles


def dealt(length, world_size):
    """Blocks of three dealt out in turn: several runs of one step."""
    return [[p for p in range(length) if p // 3 % world_size == rank] for rank in range(world_size)]


def backwards(length, world_size):
    """Stripes from the end: runs of one position each, few enough to be regular, until they are too many."""
    return [list(range(rank, length, world_size))[::-1] for rank in range(world_size)]


def shuffled(length, world_size):
    """Runs of many steps: masks have to be looked up."""
    return np.array_split(np.random.default_rng(length).permutation(length), world_size)


def unequal(length, world_size):
    """Runs of different steps: even positions on rank 0, odd ones cut contiguously among the others."""
    if world_size == 1:
        return [list(range(length))]
    return [range(0, length, 2), *np.array_split(np.arange(1, length, 2), world_size - 1)]


FUNCTIONS = (dealt, backwards, shuffled, unequal)
WINDOWS = [None, (0, 0), (None, 1), (2, None), (1, 2), (3, 0), (20, 20)]
BUCKETS = [(1, 1), (2, 3), (3, 2), (4, 4), (64, 5), (64, 64)]


def kinds(n, rng):
    """The remaining constraints of a problem of `n` queries, one dictionary each."""
    yield {}
    yield {"key_length": rng.randint(0, 14)}
    yield {"key_length": n + 1, "heads": 4, "key_heads": 2}
    yield {"key_length": max(0, n - 3)}
    yield {"batch": 3, "key_lengths": (rng.randint(0, n), n // 2, n // 2)}
    yield {"documents": (0, n // 2, n)}
    yield {"documents": tuple(sorted(rng.choices(range(n + 1), k=5)))}
    late = tuple(sorted(min(offset, n) for offset in (1, 1, n // 2, n // 2, n - 1) if offset >= 0))
    yield {"documents": late, "batch": 2, "key_lengths": (n, n // 3)}
    for heads, key_heads in ((3, 3), (5, 1), (6, 2)):
        branches = tuple((rng.randint(1, n + 2), rng.randint(1, 4)) for _ in range(rng.randint(1, 4)))
        mode, offset = rng.choice([("split", "cyclic"), ("shared", "cyclic"), ("shared", "block")])
        fields = {
            "dilation": Dilation(branches, heads=mode, head_offset=offset),
            "heads": heads,
            "key_heads": key_heads,
        }
        yield fields if rng.random() < 0.7 else {**fields, "key_lengths": (rng.randint(0, n),)}


def small_problems():
    """Every length to 12, causal or not, every window, every kind of constraint."""
    rng = random.Random(0)
    for n, causal, window in itertools.product(range(13), (False, True), WINDOWS):
        for fields in kinds(n, rng):
            yield Problem(query_length=n, causal=causal, window=window, **fields)


@pytest.mark.nightly
def test_every_pair_meets_as_often_as_the_pattern_says():
    """Every small problem under all named shardings and a function, world sizes and buckets in turn."""
    turns = itertools.cycle(itertools.product((1, 2, 3, 4), BUCKETS))
    functions = itertools.cycle(FUNCTIONS)
    for problem in small_problems():
        for sharding in (*SHARDINGS, next(functions)):
            world_size, buckets = next(turns)
            why = mismatch(problem, sharding, world_size, buckets)
            assert why is None, (problem, sharding, world_size, buckets, why)


@pytest.mark.parametrize("sharding", [*SHARDINGS, *FUNCTIONS])
@pytest.mark.by_day(3)
def test_larger_problems_meet_alike(sharding):
    """Random ones, where windows are wider than the narrowest bucket and buckets end within every kind of region."""
    rng = random.Random(1)
    for _ in range(30):
        n = rng.randint(30, 220)
        window = rng.choice([None, None, (0, 0), (n // 3, None), (None, 9), (rng.randint(0, 90), rng.randint(0, 90))])
        fields = rng.choice(list(kinds(n, rng)))
        if "dilation" in fields:
            branches = tuple((rng.randint(5, n), rng.randint(1, 5)) for _ in range(rng.randint(1, 3)))
            fields["dilation"] = Dilation(branches, heads="shared", head_offset=rng.choice(["cyclic", "block"]))
        problem = Problem(query_length=n, causal=rng.random() < 0.6, window=window, **fields)
        buckets = rng.choice([(16, 16), (32, 8), (8, 32), (64, 64), (100, 70)])
        world_size = rng.randint(1, 8)
        why = mismatch(problem, sharding, world_size, buckets)
        assert why is None, (problem, world_size, buckets, why)


def off_by_one_band(original):
    """Wrong in the usual way: the diagonal itself is lost."""
    return lambda problem: tuple(side if side is None else side - 1 for side in original(problem))


def without_last_document(original):
    """The last document is forgotten."""

    return lambda problem: tuple(cutting.at(slice(0, -1)) for cutting in original(problem))


def unshifted_stripes(original):
    """Causality between stripes, not shifted where the key's rank comes after the query's."""

    def bounds(problem, queries, keys, rate):
        return original(problem, queries, keys._replace(first=np.minimum(keys.first, queries.first)), rate)

    return bounds


@pytest.mark.parametrize(
    ("where", "name", "wrong", "problem", "sharding"),
    [
        (geometry, "band", off_by_one_band, Problem(query_length=8, causal=True), "contiguous"),
        (regions_module, "cuttings", without_last_document, Problem(query_length=8, documents=(0, 3, 8)), "contiguous"),
        (geometry, "bounds", unshifted_stripes, Problem(query_length=8, causal=True), "striped"),
    ],
)
def test_the_count_sees_wrong_regions(monkeypatch, where, name, wrong, problem, sharding):
    """Three mistakes that rings have made, each found by the comparison above."""
    assert mismatch(problem, sharding, 2, (4, 4)) is None
    monkeypatch.setattr(where, name, wrong(getattr(where, name)))
    assert mismatch(problem, sharding, 2, (4, 4)) is not None


def test_the_count_sees_regions_joined_in_the_wrong_place(monkeypatch):
    """Keys put beside each other without moving the diagonal that bounds the later ones."""
    problem = Problem(query_length=8, causal=True)
    assert mismatch(problem, "zigzag", 2, (4, 4)) is None
    original = rectangles._beside

    def beside(left, right):
        both = original(left, right)
        return both and both._replace(high=right.high)

    monkeypatch.setattr(rectangles, "_beside", beside)
    assert mismatch(problem, "zigzag", 2, (4, 4)) is not None


HALF = Rectangle(0, (0, 1), Span(0, 2), Span(0, 2), Span(0, 4), Span(0, 4))
"""The first half of the queries and of the keys of a rank that has eight."""
LATER = Span(4, 4)


def test_neighbours_are_joined():
    """Later queries, later keys, and both with the diagonal of the first: each a region of its own before."""
    assert joined([HALF, HALF._replace(queries=LATER)]) == (HALF._replace(queries=Span(0, 8)),)
    assert joined([HALF, HALF._replace(keys=LATER)]) == (HALF._replace(keys=Span(0, 8)),)
    diagonal = HALF._replace(high=0)
    below = [HALF._replace(queries=LATER), diagonal._replace(queries=LATER, keys=LATER)]
    assert joined([diagonal, *below]) == (Rectangle(*HALF[:4], Span(0, 8), Span(0, 8), high=0),)


@pytest.mark.parametrize("side", ["queries", "keys"])
@pytest.mark.parametrize(
    "other",
    [
        {"head_class": 1},
        {"batch": (1, 2)},
        {"heads": Span(2, 2)},
        {"key_heads": Span(2, 2)},
        {"low": 0},
        {"by_position": True},
    ],
)
def test_what_differs_in_anything_else_is_not_joined(side, other):
    """Either of the two may be the one that differs, or both where what is said of both bounds them otherwise."""
    pair = [HALF, HALF._replace(**{side: LATER})]
    assert len(joined(pair)) == 1
    changed = [one._replace(**other) for one in pair]
    assert len(joined([pair[0], changed[1]])) == 2
    assert len(joined([changed[0], pair[1]])) == 2
    if not {"low", "by_position", "copies"}.isdisjoint(other):
        assert len(joined(changed)) == 2


def test_rows_with_a_gap_or_another_step_are_not_joined():
    """Nor keys; nor what is bounded by two diagonals, or from other keys on."""
    for side in ("queries", "keys"):
        for span in (Span(5, 4), Span(4, 4, 2), Span(3, 4), Span(0, 4)):
            assert len(joined([HALF, HALF._replace(**{side: span})])) == 2
    assert len(joined([HALF, HALF._replace(queries=Span(0, 3), keys=LATER)])) == 2
    upper, lower = HALF._replace(high=0), HALF._replace(queries=LATER, keys=Span(0, 8), high=4)
    assert len(joined([upper, lower])) == 1
    for other in (lower._replace(high=3), lower._replace(keys=Span(1, 7)), lower._replace(high=None)):
        assert len(joined([upper, other])) == 2
    assert len(joined([upper._replace(high=1), lower._replace(high=5)])) == 2, "its last row would attend a later key"
    assert len(joined([upper, HALF._replace(keys=LATER)])) == 2, "not all earlier keys are attended"


def test_what_a_window_bounds_is_not_joined():
    """The smallest problem in which row 3 would meet key 0 if regions with a left side were."""
    assert mismatch(Problem(query_length=8, window=(4, None)), "zigzag", 2, (4, 4)) is None


def test_the_count_sees_wrong_tiles(monkeypatch):
    """A band left where the region had it, and tiles that are called full without being so."""
    problem = Problem(query_length=12, window=(2, 1))
    assert mismatch(problem, "contiguous", 1, (4, 4)) is None
    monkeypatch.setattr(
        tiles_module, "_band", lambda rows, keys, low, high: tiles_module.Tile(rows, keys, "band", low, high)
    )
    assert "its tiles are not its pairs" in mismatch(problem, "contiguous", 1, (4, 4))
    monkeypatch.setattr(tiles_module, "_band", lambda rows, keys, low, high: tiles_module.Tile(rows, keys, "full"))
    assert "its tiles are not its pairs" in mismatch(problem, "contiguous", 1, (4, 4))


@pytest.mark.parametrize("window", [(700, 0), (300, 300), (0, 0), (40, 3)])
def test_masks_that_are_built_are_small_and_alike(window):
    """However long the buckets are; and of a wide window, whose masks are made anew only where they differ, few."""
    problem = Problem(query_length=2000, causal=window[1] == 0, window=window)
    queries, keys = runs_of(problem, "contiguous", 2)
    built = [
        tile
        for of in regions(problem, queries[1], keys)
        for region in of
        for tile in tiles(region, 2000, 2000, 32)
        if tile.kind == "band"
    ]
    shapes = [(tile.rows[1] - tile.rows[0], tile.keys[1] - tile.keys[0], tile.low, tile.high) for tile in built]
    assert all(rows <= 32 and columns < 2 * 32 for rows, columns, *_ in shapes)
    changes = sum(before != after for before, after in itertools.pairwise(shapes))
    assert len(built) > 20
    assert changes <= 6


def test_the_first_rows_of_a_window_need_no_mask():
    """Rows that its left side does not bound are plainly causal."""
    everything = (RowRun(0, 1, 64, 0),)
    ((region,),) = regions(Problem(query_length=64, causal=True, window=(40, 0)), everything, [everything])
    assert next(tiles(region, 16, 64)).kind == "causal"


def pairs_computed(problem, sharding, world_size, bucket):
    """Pairs that each rank's kernels work on, over all owners, per head."""
    queries, keys = runs_of(problem, sharding, world_size)
    return [
        sum(
            tile.computed
            for of in regions(problem, queries[rank], [keys[rank]] if sharding == "replicated_query" else keys)
            for region in of
            for tile in tiles(region, bucket, bucket)
        )
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_causal_work_is_balanced_under_zigzag_and_striped(world_size):
    """Between ranks lies at most half a diagonal tile a bucket; contiguous, the last rank does most of the work."""
    n, bucket = 256 * world_size, 64
    problem = Problem(query_length=n, causal=True)
    for sharding in ("zigzag", "striped"):
        counts = pairs_computed(problem, sharding, world_size, bucket)
        # Work that the mask allows differs by a row's length at most; what is computed beyond it, by diagonal tiles.
        assert max(counts) - min(counts) <= (n // world_size) * bucket, (sharding, counts)
        assert sum(counts) <= n * n // 2 + n * bucket * world_size
    counts = pairs_computed(problem, "contiguous", world_size, bucket)
    assert counts[-1] > world_size * counts[0]


@pytest.mark.parametrize("sharding", SHARDINGS)
def test_nothing_that_a_window_excludes_is_computed(sharding):
    """The pairs computed are linear in the length: twice the sequence, twice the pairs and not four times."""
    pairs = [
        sum(pairs_computed(Problem(query_length=n, causal=True, window=(40, 0)), sharding, 4, 64)) for n in (1024, 2048)
    ]
    assert pairs[1] <= 2 * pairs[0] + 4 * 64 * 128
    assert 4 * pairs[0] > 2 * pairs[0] + 4 * 64 * 128, "the test could not tell"


def test_a_plan_is_made_of_a_few_numbers_whatever_the_length():
    """A problem over a million positions is one region a block, and none where its keys are all later."""
    for sharding, causal, n in itertools.product(("contiguous", "striped", "zigzag"), (True, False), (1000, 1_000_000)):
        problem = Problem(query_length=n, causal=causal)
        queries, keys = runs_of(problem, sharding, 4)
        for rank in range(4):
            for owner, found in enumerate(regions(problem, queries[rank], keys)):
                later = causal and sharding == "contiguous" and owner > rank
                assert len(list(found)) == len(found) == (not later)
                assert not any(region.by_position for region in found)


def test_many_documents_cost_what_two_runs_share():
    """A rank meets only the documents that it and the owner hold, and a thousand are few between two."""
    problem = Problem(query_length=8000, documents=tuple(range(0, 8001, 8)))
    queries, keys = runs_of(problem, "contiguous", 8)
    own, *others = regions(problem, queries[0], keys)
    assert len(list(own)) == len(own) == 125
    assert all(list(of) == [] for of in others)
    assert list(regions(problem, queries[7], keys)[3]) == []


def test_runs_of_several_steps_are_looked_up_by_position():
    """Also where there are too many of one; a run of a single position goes with any step."""
    problem = Problem(query_length=40, causal=True)
    mixed = (RowRun(0, 2, 5, 0), RowRun(20, 1, 5, 5))
    many = tuple(RowRun(4 * x, 1, 1, x) for x in range(9))
    for keys in (mixed, many):
        ((everyone, some),) = regions(problem, keys, [(RowRun(0, 1, 40, 0),)])
        assert [region.by_position for region in (everyone, some)] == [False, True]
        assert everyone.keys == Span(0, 1), "the first key"
        assert some.keys == Span(1, keys[-1].last), "up to the last query's, and none beyond"
        ((dense,),) = regions(Problem(query_length=40), keys, [(RowRun(0, 1, 40, 0),)])
        assert [tile.kind for tile in tiles(dense, 64, 64)] == ["full"], "nothing to look up"
    single = (RowRun(0, 1, 5, 0), RowRun(20, 1, 1, 5))
    assert not any(region.by_position for region in regions(problem, single, [single])[0])


def test_a_span_is_the_slice_of_what_it_indexes():
    """Parts of it too; strides and single entries."""
    for start, size, step in itertools.product(range(3), range(1, 5), range(1, 4)):
        whole = list(range(start, start + step * size, step))
        assert whole == list(range(30))[Span(start, size, step).slice()]
        for a, b in itertools.combinations(range(size + 1), 2):
            assert whole[a:b] == list(range(30))[Span(start, size, step).slice(a, b)]


@pytest.mark.parametrize("mode", [("split", "cyclic"), ("shared", "cyclic"), ("shared", "block")])
def test_lanes_have_every_head_once_a_branch_and_whole_key_heads(mode):
    """Groups of query heads that do not align with branches are cut where they have to be."""
    for key_heads, each, count in itertools.product(range(1, 4), range(1, 5), range(1, 4)):
        heads = key_heads * each
        branches = tuple((8, 1 + number) for number in range(count))
        dilation = Dilation(branches, heads=mode[0], head_offset=mode[1])
        problem = Problem(query_length=8, heads=heads, key_heads=key_heads, dilation=dilation)
        seen = []
        for lane in lanes(problem):
            run = list(range(heads))[lane.heads.slice()]
            read = list(range(key_heads))[lane.key_heads.slice()]
            assert len(run) % len(read) == 0
            assert [head // each for head in run] == [key for key in read for _ in range(len(run) // len(read))]
            seen += run
        assert sorted(seen) == sorted(list(range(heads)) * (1 if mode[0] == "split" else count))
