"""What is drawn is within what is declared, and reaches all of it."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_features import WAYS, counted, recorded
from hypothesis import given, settings
from hypothesis import strategies as st

from ringref.pattern import multiplicity
from ringref.sharding import SHARDING_NAMES
from ringverify.cases.case import COTANGENTS, MEMORY, Case, why_unsupported
from ringverify.cases.choices import Maker, SeededChoices
from ringverify.cases.inputs import make_inputs, selectable
from ringverify.cases.strategies import GENERAL_VALUES, Scope, cases, widest
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.chunk_boundaries import sweep
from ringverify.properties.world_size_invariance import other_world
from ringverify.ring.declared import ring
from ringverify.strategies import made

FLAGS = (
    "gqa", "value_dim", "scale", "window", "documents", "key_lengths", "cross_lengths", "softcap", "uneven_segments",
    "empty_shards", "subgroups", "poison_safe",
)  # fmt: skip


@st.composite
def capabilities(draw):
    """Any declaration."""
    flags = {name: draw(st.booleans()) for name in FLAGS}
    lse = draw(st.booleans())
    length = draw(st.sampled_from([None, None, 1, 2, 5, 32, 1024]))
    return Capabilities(
        **flags,
        sharding=tuple(draw(st.lists(st.sampled_from(["contiguous", "zigzag", "striped"]), min_size=1, unique=True))),
        dtypes=tuple(draw(st.lists(st.sampled_from(["float32", "float64", "float16"]), min_size=1, unique=True))),
        causal=draw(st.sampled_from(["both", "always", "never"])),
        lse=lse,
        lse_gradient=lse and draw(st.booleans()),
        dilation=tuple(draw(st.lists(st.sampled_from(["split", "shared"]), unique=True))),
        world_sizes=draw(st.sampled_from([None, (2,), (1, 4), (16,), (2, 3), (3, 6)])),
        memory=draw(st.sampled_from([None, "streaming"])),
        negative_scale=flags["scale"] and draw(st.booleans()),
        heads_multiple=draw(st.sampled_from([None, None, 4, "world_size"])),
        key_heads_multiple=draw(st.sampled_from([None, None, 2, "world_size"])),
        head_dims=draw(st.sampled_from([None, None, (64, 128), (3,)])),
        value_dims=draw(st.sampled_from([None, (32, 64)])) if flags["value_dim"] else None,
        length_multiple=length,
        uneven=length in (None, 1) and draw(st.booleans()),
    )


@given(st.data(), capabilities(), st.sampled_from(list(PROPERTIES.values())))
def test_every_case_of_every_property_is_within_what_is_declared(data, declared, property):
    """Whatever an implementation declares, it is never asked for more."""
    if property.unsupported(declared) is not None or property.id == "chunk_boundaries":
        return
    case = data.draw(made(property.cases(declared)))
    assert why_unsupported(case, declared) is None
    for compared in property.compared(case, declared):
        assert why_unsupported(compared, declared) is None


@given(st.data(), capabilities(), st.sampled_from(["world_size_invariance", "exact_selection", "isolation"]))
def test_what_a_property_needs_is_among_what_it_draws(data, declared, id):
    """A second world, a dimension a key, something to leak: a property without any such case would be inconclusive."""
    if PROPERTIES[id].unsupported(declared) is not None:
        return
    some = taken(PROPERTIES[id].cases(declared), 25, seed=data.draw(st.integers(0, 2**24)))
    match id:
        case "world_size_invariance":
            assert any(other_world(case, declared) is not None for case in some)
        case "exact_selection":
            assert any(selectable(case) for case in some)
        case "isolation":
            future = [case for case in some if case.problem.causal and case.problem.nq == case.problem.nk > 1]
            assert future or any(np.isnan(make_inputs(case).k).any() for case in some)


def test_a_negative_scale_is_drawn_only_where_it_is_declared():
    """`scale=True` means positive scales."""
    for negative in (False, True):
        declared = Capabilities(scale=True, negative_scale=negative)
        scales = {case.problem.scale for case in taken(cases(declared, Scope()), 60)}
        assert min(scale for scale in scales if scale is not None) == (-0.7 if negative else 0.3)


def test_nan_is_drawn_beyond_padding_only_where_it_is_declared():
    """`poison_safe` asks for it, and what is skipped is finite without it."""
    for safe in (False, True):
        declared = Capabilities(dilation=("split",), window=True, documents=True, poison_safe=safe)
        drawn = taken(PROPERTIES["isolation"].cases(declared), 60)
        poisoned = [case for case in drawn if np.isnan(make_inputs(case).k).any()]
        assert poisoned
        assert safe == any(case.problem.documents is None for case in poisoned)


def test_shapes_that_are_needed_are_drawn_small_and_of_every_kind():
    """A length of 128 a rank: small worlds, one and two blocks a rank, each dimension; one batch, few heads."""
    declared = Capabilities(
        gqa=True, head_dims=(64, 128), length_multiple=128, heads_multiple="world_size", key_heads_multiple="world_size"
    )
    drawn = taken(cases(declared, Scope()), 120)
    problems = [case.problem for case in drawn]
    assert {case.world_size for case in drawn} == {1, 2, 3, 4}
    assert {p.nq // case.world_size for p, case in zip(problems, drawn, strict=True)} == {128, 256}
    assert {p.head_dim for p in problems} == {64, 128}
    assert any(p.hk != p.heads for p in problems)
    assert max(p.batch * p.heads * p.nq for p in problems) <= 2 * 4 * 512


@settings(max_examples=20)
@given(capabilities())
def test_every_case_of_the_sweep_is_within_what_is_declared(declared):
    """The same for the dense sweep, which lists its cases; it is empty only where small sizes are not declared."""
    found = list(sweep(declared))
    some = found[:: max(1, len(found) // 50)]
    assert all(why_unsupported(case, declared) is None for case in some)
    assert all(PROPERTIES["chunk_boundaries"].applies(case, declared) for case in some), "they are drawn unasked"
    assert len(set(found)) == len(found)


def taken(make: Maker[Case], count: int, seed: int = 0) -> list[Case]:
    """As many cases, of choices like those of `check`."""
    choices = SeededChoices(seed)
    return [make(choices) for _ in range(count)]


def drawn(count: int, **scope: object) -> list[Case]:
    """Cases as the ring is given them."""
    return taken(cases(ring.capabilities, Scope(**scope)), count)


def test_a_few_hundred_draws_reach_every_feature():
    """World sizes 1 to 8, every sharding, constraint, family, layout and dtype, equal and distinct dimensions."""
    seen = drawn(600, memory=MEMORY, cotangents=COTANGENTS)
    assert {case.world_size for case in seen} == set(range(1, 9))
    assert {case.sharding for case in seen} == set(SHARDING_NAMES)
    assert {case.values for case in seen} == set(GENERAL_VALUES)
    assert {case.memory for case in seen} == set(MEMORY)
    assert {case.cotangent for case in seen} == set(COTANGENTS)
    problems = [case.problem for case in seen]
    assert {p.dtype for p in problems} == {"float32", "float64", "bfloat16", "float16"}
    assert {p.causal for p in problems} == {True, False}
    for name in ("window", "documents", "key_lengths", "softcap", "scale", "dilation"):
        assert sum(getattr(p, name) is not None for p in problems) >= 30, name
    assert sum(p.nq != p.nk for p in problems) >= 30
    assert sum(p.hk != p.heads for p in problems) >= 30
    assert sum(p.dv != p.head_dim for p in problems) >= 30
    assert sum(p.nq % case.world_size != 0 for p, case in zip(problems, seen, strict=True)) >= 30
    assert sum(p.nq < case.world_size for p, case in zip(problems, seen, strict=True)) >= 30
    assert sum(p.nq == 0 for p in problems) >= 5
    assert sum(p.batch == p.heads == p.head_dim for p in problems) >= 20
    assert sum(len({p.batch, p.nq, p.heads, p.head_dim}) == 4 for p in problems) >= 100
    modes = {(p.dilation.heads, p.dilation.head_offset) for p in problems if p.dilation is not None}
    assert modes == {("split", "cyclic"), ("shared", "cyclic"), ("shared", "block")}


def test_most_cases_for_masked_rows_have_an_empty_row():
    """The property is about empty rows, so its cases have them."""
    seen = [case for case in drawn(200, want_empty_rows=True) if case.problem.nq]
    empty = [case for case in seen if (multiplicity(case.problem).sum(axis=3) == 0).any()]
    assert len(empty) > len(seen) / 2


@pytest.mark.parametrize(
    ("declared", "chosen"),
    [
        (("bfloat16", "float64", "float32"), ("float64", "float32")),
        (("float16", "float32"), ("float32",)),
        (("bfloat16",), ("bfloat16",)),
    ],
)
def test_full_precision_is_used_where_it_is_declared(declared, chosen):
    """Values are judged in the dtypes that show errors best."""
    assert widest(Capabilities(dtypes=declared)) == chosen


CHANCE = 5.5
"""Standard deviations by which one of two thousand frequencies differs by chance once in twenty thousand tests."""


@pytest.mark.parametrize("way", WAYS)
def test_every_feature_is_drawn_as_often_as_before(way):
    """As when Hypothesis drew an integer and a generator made the case of it; recorded then, see `drawn_features`."""
    declared, scope = WAYS[way]
    assert differing(way, taken(cases(declared, scope), 2000)) == []


@pytest.mark.parametrize(
    "fewer",
    [
        lambda case: case.problem.nq != case.problem.nk,
        lambda case: case.problem.batch == case.problem.heads == case.problem.head_dim,
        lambda case: case.problem.documents is not None,
        lambda case: case.problem.nq == 0,
        lambda case: case.world_size == 8,
    ],
)
def test_what_is_drawn_half_as_often_is_noticed(fewer):
    """The test above can fail: every second case of a kind is left out."""
    declared, scope = WAYS["everything"]
    places = iter(range(10**6))
    seen = [case for case in taken(cases(declared, scope), 4000) if not fewer(case) or next(places) % 2]
    assert differing("everything", seen)


def differing(way: str, seen: list[Case]) -> list[str]:
    """Features whose frequency differs from the recorded one by more than chance."""
    before, then = recorded()[way]
    now, found = counted(seen), []
    for name in sorted({*then, *now}):
        counts = then.get(name, 0), now[name]
        pooled = (sum(counts) + 1) / (before + len(seen) + 2)
        deviation = (pooled * (1 - pooled) * (1 / before + 1 / len(seen))) ** 0.5
        if abs(counts[0] / before - counts[1] / len(seen)) > CHANCE * deviation:
            found.append(f"{name}: {counts[0]} of {before} before, {counts[1]} of {len(seen)} now")
    return found
