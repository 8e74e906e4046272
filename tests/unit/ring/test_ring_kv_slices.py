"""Sets of rows against numpy's, and KV slices of a block against the rows that they are to hold."""

import itertools
import random

import numpy as np
import pytest
import torch

from ringref.problem import Dilation, Problem
from ringverify.ring.gradients import Gradients, TileGradient
from ringverify.ring.plan.heads import head_classes
from ringverify.ring.plan.kv_slices import ClassRows, KVSlice, KVTensors, everything
from ringverify.ring.plan.rectangles import Rectangle
from ringverify.ring.plan.rows import Span, as_array, evenly, locate, same

SPANS = [Span(start, size, step) for start, size, step in itertools.product(range(4), range(1, 5), range(1, 4))]


def taken(span):
    """The rows of a span, counted out."""
    return [span.start + span.step * x for x in range(span.size)]


def drawn(rng, most=20):
    """A span, or a sorted list."""
    if rng.random() < 0.5:
        start, step = rng.randint(0, 5), rng.randint(1, 3)
        return Span(start, rng.randint(1, min(6, (most - 1 - start) // step + 1)), step)
    return np.array(sorted(rng.sample(range(most), rng.randint(1, 8))))


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_span_as_an_array_is_its_rows():
    """In ascending order."""
    for span in SPANS:
        assert as_array(span).tolist() == taken(span)


def test_rows_become_a_span_where_they_are_evenly_spaced():
    """Which costs no index; others stay a list."""
    rng = random.Random(0)
    for _ in range(1000):
        rows = as_array(drawn(rng))
        found = evenly(rows)
        assert as_array(found).tolist() == rows.tolist()
        assert isinstance(found, Span) == (len(set(np.diff(rows))) <= 1)


def test_rows_are_the_same_if_they_hold_the_same():
    """However they are written; a single row has no step."""
    for first, second in itertools.product(SPANS, repeat=2):
        expected = taken(first) == taken(second)
        for a, b in itertools.product((first, as_array(first)), (second, as_array(second))):
            assert same(a, b) == expected


def test_rows_are_found_in_what_holds_them():
    """Every sub-span of every span, and lists in lists; a slice wherever the places are evenly spaced."""
    rng = random.Random(0)
    for outer in SPANS:
        for start, stop, by in itertools.product(range(outer.size), range(1, outer.size + 1), range(1, 3)):
            chosen = taken(outer)[start:stop:by]
            if chosen:
                inner = Span(chosen[0], len(chosen), outer.step * by)
                assert isinstance(locate(inner, outer), slice)
                assert as_array(outer)[locate(inner, outer)].tolist() == chosen
    for _ in range(1000):
        outer = as_array(drawn(rng))
        inner = np.array(sorted(rng.sample(outer.tolist(), rng.randint(1, len(outer)))))
        assert outer[locate(inner, outer)].tolist() == inner.tolist()


# -- KV slices ---------------------------------------------------------------------------------------------------------

PROBLEMS = [
    Problem(batch=2, query_length=12, heads=4, key_heads=2, head_dim=3, value_dim=5),
    Problem(query_length=12, heads=6, key_heads=3, head_dim=2, dilation=Dilation(((4, 1), (6, 2), (12, 3)))),
    Problem(query_length=12, heads=6, head_dim=2, dilation=Dilation(((4, 2), (12, 3)), heads="shared")),
]


def classes_of(problem):
    """The key heads of every class."""
    return tuple(one.key_heads for one in head_classes(problem.dilation, problem.heads, problem.hk))


def tensors(problem, seed=0):
    """k and v of a block of twelve rows, every element another."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(problem.batch, 12, problem.hk, width, generator=generator)
        for width in (problem.head_dim, problem.dv)
    ]


def needs(problem, rng):
    """What one rank may need: rows of some classes."""
    return {number: drawn(rng, 12) for number in range(len(classes_of(problem))) if rng.random() < 0.7}


def test_classes_are_a_partition_of_the_key_heads():
    """Heads of one class run the same branches; without dilation there is one class."""
    for problem in PROBLEMS:
        heads = [head for span in classes_of(problem) for head in taken(span)]
        assert sorted(heads) == list(range(problem.hk))
    assert len(classes_of(PROBLEMS[0])) == 1
    assert len(classes_of(PROBLEMS[1])) == 3


def slice_of(problem, needs):
    """The KV slice of what at least one of several needs asks for."""
    wanted = {}
    for need in needs:
        for number, rows in need.items():
            wanted.setdefault(number, set()).update(as_array(rows).tolist())
    classes = classes_of(problem)
    rows = {number: evenly(np.array(sorted(wanted[number]))) for number in sorted(wanted)}
    return KVSlice(problem, {number: ClassRows(classes[number], of) for number, of in rows.items()})


def test_a_kv_slice_is_as_long_as_its_rows():
    """Two are equal if they hold the same rows; a class of which nothing is held takes no place."""
    rng = random.Random(0)
    for problem in PROBLEMS:
        width = problem.batch * (problem.head_dim + problem.dv)
        for _ in range(100):
            asked = [needs(problem, rng) for _ in range(rng.randint(0, 3))]
            found = slice_of(problem, asked)
            assert found.numel == sum(part.rows.size * part.key_heads.size for part in found.parts.values()) * width
            assert found == slice_of(problem, asked[::-1])
            whole = found.numel == 12 * problem.hk * width
            assert (found == everything(problem, classes_of(problem), 12)) == whole


def scattered(problem, block):
    """k and v of a block at their places among all twelve rows, NaN elsewhere."""
    whole = [torch.full_like(x, torch.nan) for x in tensors(problem)]
    for number, pair in block.parts.items():
        part = block.slice.parts[number]
        for target, source in zip(whole, pair, strict=True):
            for place, row in enumerate(as_array(part.rows).tolist()):
                target[:, row, part.key_heads.slice()] = source[:, place]
    return whole


def test_what_is_copied_from_slice_to_slice_lies_where_it_lay():
    """A whole block into a smaller slice, that into a smaller one, and back among others; a buffer may be too long."""
    rng = random.Random(0)
    for problem in PROBLEMS:
        k, v = tensors(problem)
        classes = classes_of(problem)
        block = KVTensors.of_tensors(everything(problem, classes, 12), k, v)
        assert all(pair[0].data_ptr() >= k.data_ptr() for pair in block.parts.values()), "a copy"
        for _ in range(100):
            less = needs(problem, rng)
            more = [less, needs(problem, rng)]
            large, small = slice_of(problem, more), slice_of(problem, [less])
            first = KVTensors.of_flat(large, torch.full((large.numel + 3,), torch.nan))
            second = KVTensors.of_flat(small, torch.full((small.numel,), torch.nan))
            block.copy_to(first)
            first.copy_to(second)
            for found in (first, second):
                assert found.flat is not None
                assert found.flat.numel() == found.slice.numel
                assert not bool(found.flat.isnan().any())
                for got, right in zip(scattered(problem, found), (k, v), strict=True):
                    assert torch.equal(torch.where(got.isnan(), right, got), right)
            back = KVTensors.of_flat(large, torch.full((large.numel,), torch.nan))
            gradients = Gradients(back, empty=True)
            gradients.begin(second)
            gradients.complete()
            assert back.flat is not None
            assert int((back.flat != 0).sum()) == small.numel
            for got, right in zip(scattered(problem, back), (k, v), strict=True):
                assert torch.equal(torch.where(got.isnan() | (got == 0), right, got), right)


@pytest.mark.parametrize("whole", [True, False])
def test_a_region_is_read_from_its_rows_and_added_to_them(whole):
    """From a whole block and from a KV slice with gaps; a region reads its own batch, heads and rows and no others."""
    rng = random.Random(0)
    for problem in PROBLEMS:
        classes, (k, v) = classes_of(problem), tensors(problem)
        for _ in range(100):
            number = rng.randrange(len(classes))
            batch = rng.choice([(0, problem.batch), (problem.batch - 1, problem.batch)])
            keys = Span(rng.randint(0, 3), rng.randint(1, 4), rng.randint(1, 2))
            region = Rectangle(number, batch, Span(0, 1), classes[number], Span(0, 1), keys)
            held = [{number: keys}, {number: drawn(rng, 12)}]
            found = everything(problem, classes, 12) if whole else slice_of(problem, held)
            block = KVTensors.of_flat(found, torch.zeros(found.numel))
            KVTensors.of_tensors(everything(problem, classes, 12), k, v).copy_to(block)
            rows, heads = taken(keys), classes[number].slice()
            for got, right in zip(block.of(region), (k, v), strict=True):
                assert torch.equal(got.transpose(1, 2), right[slice(*batch), rows][:, :, heads])
            start = rng.randrange(keys.size)
            part = slice(start, rng.randint(start + 1, keys.size))
            totals = [x.clone() for x in (k, v)]
            gradients = []
            for total in totals:
                gradient = torch.randn(batch[1] - batch[0], part.stop - part.start, classes[number].size, total.size(3))
                for place, row in enumerate(rows[part]):
                    total[slice(*batch), row, heads] += gradient[:, place]
                gradients.append(gradient.transpose(1, 2))
            Gradients(block, empty=False).add(TileGradient(region, part, *gradients))
            for got, right in zip(scattered(problem, block), totals, strict=True):
                assert torch.equal(torch.where(got.isnan(), right, got), right)


def test_keys_of_a_class_come_before_its_values():
    """The wire's layout, head by head: the two are never mixed along the head dimension, where their widths differ."""
    problem = PROBLEMS[0]
    k, v = tensors(problem)
    whole = everything(problem, classes_of(problem), 12)
    block = KVTensors.of_flat(whole, torch.empty(whole.numel))
    KVTensors.of_tensors(whole, k, v).copy_to(block)
    assert torch.equal(block.flat, torch.cat([x.transpose(1, 2).flatten() for x in (k, v)]))
    assert everything(problem, classes_of(problem), 0).numel == 0
