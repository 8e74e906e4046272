"""The strategies that users draw from: what they reach, what they shrink to, which bounds they refuse."""

from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st

import ringverify
from ringref.attention import attention
from ringref.pattern import multiplicity
from ringref.problem import Dilation, Problem
from ringverify.cases.case import COTANGENTS, MEMORY, Case, why_unsupported
from ringverify.errors import UsageError
from ringverify.faults.catalogue import MUTANTS
from ringverify.faults.ring import PLAIN
from ringverify.implementation import Capabilities, implementation
from ringverify.strategies import cases, dilations, documents, inputs, problems, shardings

ALL = PLAIN.capabilities
PLAINEST = Case(problem=Problem(query_length=0, key_length=0, key_heads=1, head_dim=1, value_dim=1), values="integers")
"""What is left of a case on which nothing depends."""


@pytest.mark.parametrize(
    ("needs", "left"),
    [
        (lambda c: True, {}),
        (lambda c: c.world_size >= 3, {"world_size": 3}),
        (lambda c: c.problem.nq > c.world_size > 1, {"world_size": 2, "query_length": 3, "key_length": 3}),
        (lambda c: c.problem.nk > c.problem.nq, {"key_length": 1}),
        (lambda c: c.problem.group_size > 1, {"heads": 2}),
        (lambda c: c.problem.causal and c.problem.dtype == "float16", {"causal": True, "dtype": "float16"}),
        (lambda c: c.problem.window is not None, {"window": (None, None)}),
        (lambda c: c.problem.documents is not None, {"documents": (0,)}),
        (lambda c: len(getattr(c.problem.dilation, "branches", ())) > 1, {"dilation": Dilation(((1, 1), (1, 1)))}),
        (lambda c: c.values == "rising_blocks", {"values": "rising_blocks"}),
        (lambda c: c.memory != "contiguous", {"memory": "transposed"}),
        (lambda c: c.seed > 40, {"seed": 41}),
    ],
)
@pytest.mark.by_day(4)
def test_what_a_failure_needs_stays_and_the_rest_is_the_plainest_case(needs, left):
    """For each kind of need, Hypothesis shrinks to the case that a person would choose."""
    strategy = cases(ALL, memory=MEMORY)
    found = find(strategy, needs, settings=settings(max_examples=2000, derandomize=True, database=None))
    assert found == PLAINEST.replace(**left)


def drawn(strategy, count):
    """What Hypothesis draws in a test of so many examples."""
    seen = []

    @settings(max_examples=count, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy)
    def collect(one):
        seen.append(one)

    collect()
    return seen


def test_hypothesis_reaches_every_feature():
    """World sizes 1 to 8, every sharding, constraint, family, layout and dtype, however it prefers small things."""
    seen = drawn(cases(ALL, memory=MEMORY, cotangents=COTANGENTS), 500)
    assert all(why_unsupported(case, ALL) is None for case in seen)
    assert {case.world_size for case in seen} == set(range(1, 9))
    assert {case.sharding for case in seen} == {"contiguous", "zigzag", "striped", "replicated_query"}
    assert {case.memory for case in seen} == set(MEMORY)
    assert {case.cotangent for case in seen} == set(COTANGENTS)
    assert len({case.values for case in seen}) == 8
    every = [case.problem for case in seen]
    assert {p.dtype for p in every} == {"float32", "float64", "bfloat16", "float16"}
    for name in ("window", "documents", "key_lengths", "softcap", "scale", "dilation"):
        assert sum(getattr(p, name) is not None for p in every) >= 10, name
    assert sum(p.nq != p.nk for p in every) >= 10
    assert sum(p.nq > 24 for p in every) >= 3
    assert sum(p.batch == p.heads == p.head_dim > 1 for p in every) >= 5


@settings(max_examples=60)
@given(st.data(), st.integers(0, 9), st.sampled_from(["contiguous", "zigzag"]))
def test_no_length_exceeds_its_bound(data, most, sharding):
    """Not on any world, nor with more than a tile; and shards that have to be even are."""
    even = Capabilities(sharding=sharding, window=True)
    assert max_length(data.draw(cases(ALL, max_length=most)).problem) <= most
    assert max_length(data.draw(problems(max_length=most, world_size=4))) <= most
    if most >= 2:
        case = data.draw(cases(even, max_length=most))
        assert why_unsupported(case, even) is None
        assert max_length(case.problem) <= most


def max_length(problem: Problem) -> int:
    """The longer of its two lengths."""
    return max(problem.nq, problem.nk)


@settings(max_examples=60)
@given(st.data())
def test_each_strategy_keeps_to_its_bounds(data):
    """Dtypes, world sizes, families, rates, branches, segments, offsets, shardings, values."""
    case = data.draw(cases(ALL, world_sizes=(2, 5), dtypes=("float16",), values=("normal", "poisoned")))
    assert (case.world_size in (2, 5), case.problem.dtype) == (True, "float16")
    assert case.values in ("normal", "poisoned")
    dilation = data.draw(dilations(6, heads=("shared",), uneven_segments=False, max_branches=2, max_rate=3))
    assert dilation.heads == "shared"
    assert len(dilation.branches) <= 2
    assert all(6 % segment == 0 and 1 <= rate <= 3 for segment, rate in dilation.branches)
    whole, padded = (data.draw(documents(7, padding=padding, max_cuts=2)) for padding in (False, True))
    assert (whole[0], whole[-1], len(whole) <= 4) == (0, 7, True)
    assert 1 <= len(padded) <= 2
    assert data.draw(shardings(("striped", "zigzag"))) in ("striped", "zigzag")
    problem = data.draw(problems(Capabilities(window=True), sharding="contiguous"))
    assert (problem.dtype, problem.dilation, problem.documents, problem.nq) == ("float32", None, None, problem.nk)
    x = data.draw(inputs(problem, values=("unit_values",)))
    assert (x.v == 1).all()
    assert x.q.shape == (problem.batch, problem.nq, problem.heads, problem.head_dim)


@settings(max_examples=40)
@given(st.data())
def test_strategies_compose(data):
    """Offsets drawn for a length are those of a problem, and its inputs have an answer."""
    length = data.draw(st.integers(0, 12))
    packed = st.builds(Problem, query_length=st.just(length), documents=documents(length), causal=st.booleans())
    problem, x = data.draw(packed.flatmap(lambda one: st.tuples(st.just(one), inputs(one))))
    assert attention(problem, x.q, x.k, x.v, x.dout, x.dlse).out.shape[1] == length


def test_empty_rows_are_preferred_where_they_are_asked_for():
    """As the property of masked rows asks for them."""

    def empty(problem: Problem) -> bool:
        return bool((multiplicity(problem).sum(axis=3) == 0).any())

    asked, usual = (sum(map(empty, drawn(problems(empty_rows=preferred), 150))) for preferred in (True, False))
    assert asked > usual > 0


NARROW = Capabilities(world_sizes=(4, 8), sharding="zigzag")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cases(ALL, world_sizes=(0,)), "world_sizes=(0,): 0 is none of 1 to 64: declare more"),
        (lambda: cases(NARROW, world_sizes=(3,)), "world_sizes=(3,): 3 is none of 4, 8: declare more, or leave it out"),
        (lambda: cases(ALL, world_sizes=()), "world_sizes=(): expected a tuple of some of 1 to 64"),
        (lambda: cases(ALL, dtypes=("float8",)), "dtypes=('float8',): 'float8' is none of 'float32',"),
        (lambda: cases(ALL, memory="strided"), "memory='strided': expected a tuple of some of 'contiguous',"),
        (lambda: cases(ALL, values=("selectors",)), "values=('selectors',): 'selectors' is none of 'integers',"),
        (lambda: cases(NARROW, values=("poisoned_skips",)), "'poisoned_skips' is none of 'integers',"),
        (lambda: cases(NARROW, cotangents=("lse",)), "cotangents=('lse',): 'lse' is none of 'out': declare lse_grad"),
        (lambda: cases(NARROW, groups=("strided",)), "groups=('strided',): 'strided' is none of 'world': declare subg"),
        (lambda: cases(ALL, max_length=-1), "max_length=-1: expected an integer of at least 0"),
        (lambda: cases(ALL, max_length=2.5), "max_length=2.5: expected an integer of at least 0"),
        (lambda: cases(NARROW, max_length=7), "max_length=7: no sequence of what is declared is shorter than 8 (shard"),
        (lambda: cases("ring"), "capabilities='ring': expected those of an implementation, such as attend.capabilitie"),
        (lambda: problems(PLAIN), "expected Capabilities, such as Capabilities(window=True)"),
        (lambda: problems(world_size=0), "world_size=0: expected one of 1 to 64"),
        (lambda: problems(sharding="round"), "sharding='round': expected one of 'contiguous', 'zigzag',"),
        (lambda: problems(Capabilities(), max_length=0), "max_length=0: no sequence of what is declared is shorter"),
        (lambda: dilations(-1), "length=-1: expected an integer of at least 0"),
        (lambda: dilations(4, heads=()), "heads=(): expected a tuple of some of 'split', 'shared'"),
        (lambda: dilations(4, max_rate=0), "max_rate=0: expected an integer of at least 1"),
        (lambda: dilations(4, max_branches=True), "max_branches=True: expected an integer of at least 1"),
        (lambda: documents(4, max_cuts=0), "max_cuts=0: expected an integer of at least 1"),
        (lambda: documents(4, padding="some"), "padding='some': expected one of None, False, True"),
        (lambda: problems(empty_rows="few"), "empty_rows='few': expected one of False, True"),
        (lambda: shardings("zigzag"), "among='zigzag': expected a tuple of some of 'contiguous',"),
        (lambda: shardings(3), "among=3: expected a tuple of some of 'contiguous',"),
        (lambda: documents("4"), "length='4': expected an integer of at least 0"),
        (lambda: shardings(()), "among=(): expected a tuple of some of 'contiguous',"),
        (lambda: shardings(("x",)), "sharding='x': expected one of contiguous, zigzag,"),
        (lambda: inputs(3), "problem=3: expected a problem, such as problems() draws"),
        (lambda: inputs(Problem(query_length=1), values=("many",)), "values=('many',): 'many' is none of"),
    ],
)
def test_an_impossible_bound_is_refused_in_a_line_as_the_strategy_is_made(make, message):
    """It names the value, and the way out; no example has to be drawn for that."""
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        make()
    assert "\n" not in str(raised.value)


@settings(max_examples=15, deadline=None)
@given(cases(ALL, max_length=12))
def test_a_right_implementation_passes_every_drawn_case(case):
    """Forward and backward, on every kind of case."""
    ringverify.check_case(PLAIN, case)


def test_a_wrong_implementation_fails_with_a_case_that_hypothesis_shrank():
    """The message says what is wrong, where, and on which case."""
    wrong = MUTANTS["O40"].implementation

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(cases(wrong.capabilities, world_sizes=(1, 2), dtypes=("float32",), max_length=6))
    def test(case):
        ringverify.check_case(wrong, case)

    with pytest.raises(AssertionError) as raised:
        test()
    summary, case, worst = str(raised.value).splitlines()[:3]
    assert re.search(r" is wrong on rank", summary), summary
    assert re.match(r"case    \d ranks? n=\d ", case), case
    assert re.match(r"worst   \w+\[.*\] on rank \d is \S+, expected \S+ ± \S+$", worst), worst


def test_a_rank_that_raises_is_a_failure_with_its_traceback():
    """And no error of the suite."""

    @implementation(name="raises")
    def attend(q, k, v, call):
        raise ZeroDivisionError("no")

    with pytest.raises(AssertionError, match=r"raised ZeroDivisionError: no\ncase .*\n(?s:.*)in attend"):
        ringverify.check_case(attend, Case(problem=Problem(query_length=2)))


@pytest.mark.parametrize(
    ("attend", "case", "message"),
    [
        (3, {}, "3 is not an implementation: decorate it with @ringverify.implementation"),
        (Capabilities(), {"window": (1, 1)}, "window is not declared by one: draw cases from its capabilities"),
        (Capabilities(processes=True), {}, "one declares processes=True, and ranks are threads here: call run_conf"),
    ],
)
def test_a_case_that_cannot_be_checked_here_is_refused(attend, case, message):
    """With what to do instead."""
    if isinstance(attend, Capabilities):
        attend = ringverify.Implementation(lambda q, k, v, call: q, "one", attend)
    with pytest.raises(UsageError, match=re.escape(message)):
        ringverify.check_case(attend, Case(problem=Problem(query_length=2, **case)))
