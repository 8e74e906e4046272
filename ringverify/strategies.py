"""Hypothesis strategies for attention: problems, their inputs, and whole cases, for tests of your own.

A case of an implementation is drawn within what it declares, and run and judged by `ringverify.check_case`:

    @given(cases(attend.capabilities))
    def test_a_case(case):
        check_case(attend, case)

For any other function there are `problems` and `inputs`, and the oracle `ringref.attention`. These are the problems and
cases that `ringverify check` tries, with the same frequencies but for Hypothesis' own preferences. What Hypothesis
shrinks to is simpler in the order in which a person reads a case: fewer ranks, shorter, fewer heads, smaller
dimensions, fewer constraints, float32, plain values, seed 0.

Bounds are keywords, checked when the strategy is made: an impossible one is a `ValueError`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypeVar, get_args

from hypothesis import strategies as st

from ringref.problem import DTYPES, Dilation, DtypeName, HeadMode, Problem
from ringref.sharding import SHARDINGS, Sharding
from ringverify.cases.case import COTANGENTS, GROUPS, MEMORY, SEEDS, VALUES, Case, Cotangent, Group, Memory, Values
from ringverify.cases.choices import Choices, Maker
from ringverify.cases.inputs import Inputs, make_inputs
from ringverify.cases.strategies import (
    GENERAL_VALUES,
    MOST_BRANCHES,
    MOST_CUTS,
    MOST_RATE,
    WORLD_SIZES,
    Scope,
    case_of,
    dilation_of,
    documents_of,
    problem_of,
    shortest,
)
from ringverify.implementation import Capabilities, sharding_name

__all__ = ["ANY_PROBLEM", "cases", "dilations", "documents", "inputs", "problems", "shardings"]

T = TypeVar("T")

ANY_PROBLEM = Capabilities(
    sharding=SHARDINGS, dtypes=DTYPES, lse=True, lse_gradient=True, gqa=True, value_dim=True, scale=True,
    negative_scale=True, window=True, documents=True, key_lengths=True, cross_lengths=True, softcap=True,
    dilation=("split", "shared"), uneven=True, empty_shards=True, subgroups=True,
)  # fmt: skip
"""Everything that a problem can ask for."""

SIMPLEST_FIRST: tuple[DtypeName, ...] = ("float32", "float64", "bfloat16", "float16")
MOST_RANKS = 64
DRAWN_VALUES = tuple(values for values in VALUES if values != "selectors")
"""Families of values that suit every shape; selectors need a head dimension for each key."""


class HypothesisChoices:
    """Choices that Hypothesis draws."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def among(self, options: Sequence[T]) -> T:
        """Choose one of the options."""
        return self._draw(st.sampled_from(options))

    def integer(self, least: int, most: int) -> int:
        """Choose an integer from `least` to `most`."""
        return self._draw(st.integers(least, most))


@st.composite
def made(draw: st.DrawFn, make: Maker[T]) -> T:
    """Draw with Hypothesis what a maker makes of choices."""
    return make(HypothesisChoices(draw))


def cases(
    capabilities: Capabilities,
    *,
    world_sizes: Collection[int] | None = None,
    dtypes: Collection[DtypeName] | None = None,
    values: Collection[Values] = GENERAL_VALUES,
    memory: Collection[Memory] = MEMORY[:1],
    cotangents: Collection[Cotangent] | None = None,
    groups: Collection[Group] = GROUPS[:1],
    max_length: int | None = None,
    empty_rows: bool = False,
) -> st.SearchStrategy[Case]:
    """Draw cases of an implementation: problem, sharding, world size, kind of inputs, seeds.

    Args:
        capabilities: what the implementation declares, `attend.capabilities`; nothing else is asked for.
        world_sizes: numbers of ranks; by default those declared, up to 8 if any is.
        dtypes: dtypes among those declared; by default all of them.
        values: families of input values, see `ringverify.cases.inputs`.
        memory: memory layouts of the inputs.
        cotangents: which results get a cotangent; by default out, and out with lse where `lse_gradient` is declared.
        groups: which ranks of the world are the ring; others than "world" need `subgroups`.
        max_length: longest sequence; world sizes and shardings that need longer ones are left out. By default most
            have at most 24 positions, and few up to 130, or what a required multiple makes them.
        empty_rows: prefer patterns that leave queries without keys.

    Raises:
        ValueError: a bound that nothing declared meets.
    """
    c = capabilities
    if not isinstance(c, Capabilities):
        raise ValueError(f"capabilities={c!r}: expected those of an implementation, such as attend.capabilities")
    declared = "declare more, or leave it out"
    sizes: Collection[int] = c.world_sizes or WORLD_SIZES
    if world_sizes is not None:
        sizes = _among("world_sizes", world_sizes, c.world_sizes or range(1, MOST_RANKS + 1), declared)
    safe = tuple(one for one in DRAWN_VALUES if c.poison_safe or one != "poisoned_skips")
    scope = Scope(
        world_sizes=tuple(sizes),
        dtypes=_among("dtypes", c.dtypes if dtypes is None else dtypes, _simplest(c.dtypes), declared),
        values=_among("values", values, safe, "name some of these"),
        memory=_among("memory", memory, MEMORY, "name some of these"),
        cotangents=_among(
            "cotangents",
            cotangents or (("out", "both") if c.lse_gradient else ("out",)),
            COTANGENTS if c.lse_gradient else ("out",),
            "declare lse_gradient, or leave it out",
        ),
        groups=_among("groups", groups, GROUPS if c.subgroups else ("world",), "declare subgroups, or leave it out"),
        max_length=_length("max_length", max_length),
        want_empty_rows=_one("empty_rows", empty_rows, (False, True)),
    )
    _look_at_length(c, scope)
    return made(lambda choices: case_of(choices, c, scope))


def problems(
    capabilities: Capabilities = ANY_PROBLEM,
    *,
    world_size: int = 1,
    sharding: Sharding | None = None,
    dtypes: Collection[DtypeName] | None = None,
    max_length: int | None = None,
    empty_rows: bool = False,
) -> st.SearchStrategy[Problem]:
    """Draw problems: shapes, constraints, scale and dtype, without ranks and inputs.

    Args:
        capabilities: what may be asked for; by default anything, `Capabilities(window=True)` for plain problems and
            windows in float32.
        world_size: number of ranks whose shards the lengths suit: half of the lengths are near its multiples.
        sharding: one of the shardings of `capabilities`, the first by default; lengths suit it.
        dtypes: dtypes among those of `capabilities`; by default all of them.
        max_length: longest sequence; by default as in `cases`.
        empty_rows: prefer patterns that leave queries without keys.

    Raises:
        ValueError: a bound that nothing in `capabilities` meets.
    """
    c = capabilities
    if not isinstance(c, Capabilities):
        raise ValueError(f"capabilities={c!r}: expected Capabilities, such as Capabilities(window=True)")
    size = _one("world_size", world_size, c.world_sizes or range(1, MOST_RANKS + 1))
    name = sharding_name(c.shardings[0] if sharding is None else _one("sharding", sharding, c.shardings))
    scope = Scope(
        world_sizes=(size,),
        dtypes=_among("dtypes", c.dtypes if dtypes is None else dtypes, _simplest(c.dtypes), "allow more"),
        max_length=_length("max_length", max_length),
        want_empty_rows=_one("empty_rows", empty_rows, (False, True)),
    )
    _look_at_length(c, scope, name)
    return made(lambda choices: problem_of(choices, c, scope, size, name))


def dilations(
    length: int,
    *,
    heads: Collection[HeadMode] = ("split", "shared"),
    uneven_segments: bool = True,
    max_branches: int = MOST_BRANCHES,
    max_rate: int = MOST_RATE,
) -> st.SearchStrategy[Dilation]:
    """Draw dilations of a sequence.

    Args:
        length: number of positions; a segment is at most one longer.
        heads: whether heads are split among the branches, or share them, or both.
        uneven_segments: whether segments may leave a shorter one at the end.
        max_branches: largest number of branches.
        max_rate: largest dilation rate.

    Raises:
        ValueError: a bound that no dilation meets.
    """
    _least("length", length, 0)
    modes = _among("heads", heads, get_args(HeadMode), "name one of these, or both")
    most, widest = _least("max_branches", max_branches, 1), _least("max_rate", max_rate, 1)

    def make(choices: Choices) -> Dilation:
        return dilation_of(choices, length, modes, uneven_segments=uneven_segments, most=most, widest=widest)

    return made(make)


def documents(
    length: int, *, padding: bool | None = None, max_cuts: int = MOST_CUTS
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw offsets of packed documents (cu_seqlens); documents of no positions are among them.

    Args:
        length: number of positions.
        padding: whether positions before the first and after the last document are padding; by default either.
        max_cuts: most offsets, beside 0 and `length` where there is no padding.

    Raises:
        ValueError: a bound that no offsets meet.
    """
    _least("length", length, 0)
    _one("padding", padding, (None, False, True))
    most = _least("max_cuts", max_cuts, 1)
    return made(lambda choices: documents_of(choices, length, padding=padding, most=most))


def shardings(among: Collection[Sharding] = SHARDINGS) -> st.SearchStrategy[Sharding]:
    """Draw a sharding.

    Args:
        among: names of shardings, or functions; `attend.capabilities.shardings` are those that it declares.

    Raises:
        ValueError: there is none, or an unknown one.
    """
    _some("among", among, SHARDINGS)
    named = Capabilities(sharding=tuple(among)).shardings
    return made(lambda choices: choices.among(named))


def inputs(problem: Problem, *, values: Collection[Values] = GENERAL_VALUES) -> st.SearchStrategy[Inputs]:
    """Draw inputs of a problem: q, k, v and the cotangents of out and lse, float64 arrays of numbers of its dtype.

    Args:
        problem: what to compute.
        values: families of input values, see `ringverify.cases.inputs`.

    Raises:
        ValueError: there is no such family, or no problem.
    """
    if not isinstance(problem, Problem):
        raise ValueError(f"problem={problem!r}: expected a problem, such as problems() draws")
    families = _among("values", values, DRAWN_VALUES, "name some of these")

    def make(choices: Choices) -> Inputs:
        family, seed = choices.among(families), choices.integer(0, SEEDS - 1)
        return make_inputs(Case(problem=problem, values=family, cotangent="both", seed=seed))

    return made(make)


def _simplest(dtypes: Collection[DtypeName]) -> tuple[DtypeName, ...]:
    return tuple(dtype for dtype in SIMPLEST_FIRST if dtype in dtypes)


def _among(name: str, asked: Any, possible: Sequence[T], way_out: str) -> tuple[T, ...]:
    """Return the possible values that are asked for, in their order.

    Raises:
        ValueError: none is asked for, or one that is not possible.
    """
    _some(name, asked, possible)
    for one in asked:
        if one not in possible:
            raise ValueError(f"{name}={asked!r}: {one!r} is none of {_listed(possible)}: {way_out}")
    return tuple(one for one in possible if one in asked)


def _some(name: str, asked: Any, possible: Sequence[object]) -> None:
    if isinstance(asked, str) or not isinstance(asked, Collection) or not asked:
        raise ValueError(f"{name}={asked!r}: expected a tuple of some of {_listed(possible)}")


def _one(name: str, asked: T, possible: Sequence[T]) -> T:
    if asked not in possible:
        raise ValueError(f"{name}={asked!r}: expected one of {_listed(possible)}")
    return asked


def _listed(possible: Sequence[object]) -> str:
    return f"{possible[0]} to {possible[-1]}" if isinstance(possible, range) else ", ".join(map(repr, possible))


def _least(name: str, number: int, least: int) -> int:
    if type(number) is not int or number < least:
        raise ValueError(f"{name}={number!r}: expected an integer of at least {least}")
    return number


def _length(name: str, number: int | None) -> int | None:
    return None if number is None else _least(name, number, 0)


def _look_at_length(c: Capabilities, scope: Scope, *names: str) -> None:
    """Raise an error if every sequence is longer than `max_length`.

    Raises:
        ValueError: it is.
    """
    if scope.max_length is None:
        return
    named = names or tuple(map(sharding_name, c.shardings))
    least, size, name = min((shortest(c, name, size), size, name) for size in scope.world_sizes for name in named)
    if least > scope.max_length:
        raise ValueError(
            f"max_length={scope.max_length}: no sequence of what is declared is shorter than {least} (sharding {name}, "
            f"world size {size}): allow that length, or declare uneven or empty_shards"
        )
