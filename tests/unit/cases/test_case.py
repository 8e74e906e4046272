"""A case is data: it survives JSON, names itself, and says what it needs."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.shapes import fitted
from ringverify.implementation import Capabilities
from ringverify.ring.declared import ring
from ringverify.strategies import cases

PLAIN = Case(problem=Problem(query_length=4), world_size=2)


@given(cases(ring.capabilities, cotangents=("out", "lse", "both"), memory=("contiguous", "expanded")))
def test_a_case_survives_json(case):
    """What `to_json` writes, `from_json` reads back as an equal case with the same identity."""
    again = Case.from_json(json.loads(json.dumps(case.to_json())))
    assert again == case
    assert again.identity == case.identity


def test_replacing_a_field_of_the_problem_validates_it_again():
    """A field of the problem may be named directly, and a wrong value is refused as on construction."""
    assert PLAIN.replace(query_length=6, world_size=3).problem.nk == 6
    with pytest.raises(ValueError, match="heads=0"):
        PLAIN.replace(heads=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 0}, "world_size=0: expected an integer of at least 1"),
        ({"seed": -1}, "seed=-1: expected an integer of at least 0"),
        ({"values": "odd"}, "values='odd': expected one of integers, normal"),
        ({"memory": "odd"}, "memory='odd': expected one of contiguous"),
        ({"cotangent": "odd"}, "cotangent='odd': expected one of out, lse, both"),
        ({"sharding": 3}, "sharding=3: expected the name of a sharding"),
    ],
)
def test_a_case_refuses_what_it_cannot_mean(changes, message):
    """Every field is checked, and the message shows the value."""
    with pytest.raises(ValueError, match=re.escape(message)):
        PLAIN.replace(**changes)


@pytest.mark.parametrize("change", [{"extra": 1}, {"seed": None}, {"problem": {"query_length": 3, "colour": 1}}])
def test_json_that_is_not_a_case_is_refused(change):
    """An unknown field, a field of the wrong kind, and an unknown field of the problem each raise."""
    with pytest.raises(ValueError, match=r"fields|seed=None|colour"):
        Case.from_json({**PLAIN.to_json(), **change})


@pytest.mark.parametrize(
    ("changes", "capability"),
    [
        ({"dtype": "float16"}, {"dtypes": ("float32", "float16")}),
        ({"causal": True}, {"causal": "both"}),
        ({"key_heads": 1, "heads": 2}, {"gqa": True}),
        ({"value_dim": 3}, {"value_dim": True}),
        ({"scale": 1.0}, {"scale": True}),
        ({"window": (1, 1)}, {"window": True}),
        ({"documents": (0, 4)}, {"documents": True}),
        ({"key_lengths": (4,)}, {"key_lengths": True}),
        ({"key_length": 6}, {"cross_lengths": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"dilation": Dilation(((2, 1),))}, {"dilation": ("split",)}),
        ({"query_length": 5}, {"uneven": True}),
        ({"query_length": 0}, {"empty_shards": True}),
        ({"cotangent": "lse"}, {"lse_gradient": True, "lse": True}),
        ({"sharding": "striped"}, {"sharding": ("contiguous", "striped")}),
        ({"world_size": 4}, {"world_sizes": (2, 4)}),
        ({"values": "poisoned_skips"}, {"poison_safe": True}),
    ],
)
def test_what_is_not_declared_is_unsupported_and_what_is_declared_is_not(changes, capability):
    """One capability at a time: without it the case is refused and it is named, with it the case is accepted."""
    without = {"causal": "never", "world_sizes": (2,)}
    case = PLAIN.replace(**changes)
    reason = why_unsupported(case, Capabilities(**without))
    assert reason is not None
    assert reason.keyword == next(iter(capability))
    assert str(reason) == f"{reason.needs} is not declared"
    assert why_unsupported(case, Capabilities(**{**without, **capability})) is None
    assert why_unsupported(PLAIN, Capabilities(**without)) is None


def test_a_negative_scale_is_a_capability_of_its_own():
    """`scale=True` takes positive ones."""
    case = PLAIN.replace(scale=-0.5)
    assert str(why_unsupported(case, Capabilities(scale=True))) == "negative_scale is not declared"
    assert why_unsupported(case.replace(scale=0.5), Capabilities(scale=True)) is None
    assert why_unsupported(case, Capabilities(scale=True, negative_scale=True)) is None


@pytest.mark.parametrize(
    ("needs", "refused", "taken"),
    [
        ({"heads_multiple": "world_size"}, {"heads": 3}, {"heads": 4}),
        ({"heads_multiple": 3}, {"heads": 4}, {"heads": 3}),
        ({"key_heads_multiple": "world_size", "gqa": True}, {"heads": 4, "key_heads": 1}, {"heads": 4, "key_heads": 2}),
        ({"head_dims": (8, 16)}, {"head_dim": 4}, {"head_dim": 16}),
        ({"value_dims": (4,), "value_dim": True}, {"value_dim": 3}, {"value_dim": 4}),
        ({"length_multiple": 4}, {"query_length": 4}, {"query_length": 8}),
    ],
)
def test_a_shape_that_an_implementation_does_not_take_is_refused_and_fitted(needs, refused, taken):
    """The reason names the capability; what fits is left alone; the nearest that fits is asked for instead."""
    declared, ok = Capabilities(**needs), PLAIN.replace(**{"heads": 6, **taken})
    case = PLAIN.replace(**{"heads": 6, **refused})
    reason, keyword = why_unsupported(case, declared), next(iter(needs))
    assert reason is not None
    assert reason.keyword == keyword
    assert f"{keyword}=" in str(reason)
    assert why_unsupported(fitted(case, declared), declared) is None
    assert why_unsupported(ok, declared) is None
    assert fitted(ok, declared) == ok
    assert fitted(case, Capabilities()) is case


def test_what_fits_one_world_can_be_made_to_fit_another():
    """Heads and lengths that both divide."""
    declared = Capabilities(heads_multiple="world_size", length_multiple=5)
    case = fitted(PLAIN, declared, worlds=[3])
    assert (case.problem.heads, case.problem.nq) == (6, 30)


def test_zigzag_is_even_only_where_both_halves_are():
    """Zigzag cuts twice as many pieces as there are ranks, so a length of 3 ranks' worth is uneven."""
    declared = Capabilities(sharding="zigzag")
    case = Case(problem=Problem(query_length=6), sharding="zigzag", world_size=2)
    assert str(why_unsupported(case, declared)) == "uneven is not declared"
    assert why_unsupported(case.replace(query_length=8), declared) is None


def test_a_case_describes_itself_in_one_line():
    """What differs from the plainest case is named, and nothing else."""
    case = Case(
        problem=Problem(
            query_length=5, key_length=7, heads=4, key_heads=2, head_dim=3, value_dim=2, causal=True, window=(1, None)
        ),
        world_size=3,
        sharding="zigzag",
        cotangent="both",
    )
    assert case.describe() == (
        "3 ranks nq=5 nk=7 batch=1 heads=4/2 dim=3/2 float32 zigzag causal window=(1,None) values=normal "
        "cotangent=both seed=0 schedule=0"
    )
    assert PLAIN.replace(world_size=1).describe() == (
        "1 rank n=4 batch=1 heads=1 dim=8 float32 contiguous values=normal seed=0 schedule=0"
    )


@pytest.mark.parametrize("name", ["probabilities", "reduces"])
def test_where_something_is_rounded_is_one_of_two_places(name):
    """Refused when it is declared, with the value and the choices."""
    with pytest.raises(ValueError, match=f"{name}='bfloat16': expected one of accumulates, input"):
        Capabilities(**{name: "bfloat16"})
