"""What is read off an implementation is said in words that hold in every case; where none do, nothing is said."""

import functools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from ringref.pattern import multiplicity as pattern_of
from ringref.problem import Problem
from ringref.sharding import key_positions
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.diagnosis import reading
from ringverify.diagnosis.diagnose import _Inquiry, diagnose
from ringverify.diagnosis.masks.made import MADE
from ringverify.diagnosis.pairs import Pairs
from ringverify.diagnosis.parts import PARTS
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.standing import Standing
from ringverify.diagnosis.substituting import SUBSTITUTED
from ringverify.diagnosis.when.needs import Needs, Requirement
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import sinks_of
from ringverify.faults.place import Block, Partial
from ringverify.faults.ring import EVERYTHING, STEPS, multiplicity, returning, ring_of
from ringverify.faults.sinks import SINKS
from ringverify.implementation import Implementation
from ringverify.worlds.simulated import SimulatedWorld


def case_of(*, size=4, sharding="contiguous", **problem):
    """Eleven positions on four ranks, so that shards differ in length."""
    plain = {"query_length": 11, "heads": 2, "head_dim": 3}
    return Case(problem=Problem(**plain | problem), world_size=size, sharding=sharding, values="normal", seed=1)


def masked(change):
    """The plain ring with the counts of each block changed."""
    return replace(
        STEPS, pattern=lambda steps, here, hop, owner: change(multiplicity(steps, here, hop, owner), here, hop, owner)
    )


def at_own_rows(steps, here, hop, owner):
    """The causal mask with queries that begin at the rank times its own number of rows."""
    queries = here.call.positions
    return multiplicity(
        replace(STEPS, queries=lambda here: here.rank * len(queries) + torch.arange(len(queries))), here, hop, owner
    )


def without_late(m, here, hop, owner):
    """The second half of each block of an earlier rank is left out for odd rows."""
    late = torch.arange(m.size(3)) >= (m.size(3) + 1) // 2
    odd = torch.arange(m.size(2)) % 2 == 1
    return m * ~(late[None] & odd[:, None] & (owner < here.rank))


def named(steps, case, *, gradients, capabilities=EVERYTHING, needs=None, known=()):
    """What the diagnosis says of a ring of these steps, without the library of faults."""
    world = SimulatedWorld()
    runner = Runner(Implementation(ring_of(steps), "ring with a fault", capabilities), world)
    try:
        found = diagnose(
            functools.partial(runner.run, gradients=gradients),
            [case, case],
            capabilities,
            probe=lambda case, inputs: runner.run(case, gradients=gradients, inputs=inputs),
            hypotheses=known,
            needs=needs,
        )
    finally:
        world.close()
    return found and found.text and found.text.split(" (residual")[0]


NEIGHBOURS = masked(lambda m, here, hop, owner: m * (min(hop, here.size - hop) <= 1))
FORWARD = {
    "on blocks not of a neighbour: keys that the mask allows are not attended": (NEIGHBOURS, case_of()),
    "the causal mask is made with queries at positions counted from the rank times the rank's own number of rows": (
        replace(STEPS, pattern=at_own_rows), case_of(causal=True)
    ),
    "on blocks of earlier ranks, for keys in the late piece, for queries in odd rows of a shard: keys that the mask "
    "allows are not attended": (masked(without_late), case_of()),
    "each batch entry is masked by the next batch entry's key length": (
        masked(lambda m, here, hop, owner: m.roll(-1, 0)), case_of(batch=2, key_lengths=(4, 9))
    ),
}  # fmt: skip


def unguarded(s, m, v):
    """A row without keys in a block that other rows attend is NaN."""
    found = STEPS.partial(s, m, v)
    return found._replace(out=torch.where((m.sum(-1, keepdim=True) == 0) & m.any(), torch.nan, found.out))


def made(name, holds):
    """The plain ring in which a constraint is whether `holds` of a problem, query and key positions says so."""

    def pattern(steps, here, hop, owner):
        p, i, j = here.problem, steps.queries(here), steps.keys(here, hop, owner)
        if getattr(p, name) is None:
            return multiplicity(steps, here, hop, owner)
        rest = torch.from_numpy(pattern_of(p.replace(**{name: None})))[:, :, i][..., j]
        return rest * holds(here, i[:, None], j[None, :])

    return replace(STEPS, pattern=pattern)


def documents_by(number):
    """Documents are told apart by this number of positions, by offsets; a negative one attends nothing."""

    def same(here, i, j):
        offsets = torch.tensor(here.problem.documents)
        return (number(offsets, i) == number(offsets, j)) & (number(offsets, i) >= 0)

    return made("documents", same)


def inside(offsets, at, number, *, else_=-1):
    """No document before the first offset and from the last one on."""
    return torch.where((at < offsets[0]) | (at >= offsets[-1]), else_, number)


def aligned_with_the_first(here, i, j):
    """The left end is aligned with the last key, the right end with the first."""
    (left, right), p = here.problem.window, here.problem
    after = True if left is None else j - i - (p.nk - p.nq) >= -left
    return after & (torch.tensor(True) if right is None else j - i <= right)


FORWARD |= {
    "the right end of the window is laid with queries at positions aligned with the first key instead of the last": (
        made("window", aligned_with_the_first), case_of(window=(3, 1), key_length=14)
    ),
    "the first position of each document is taken for one of the document before, of the first for one of none": (
        documents_by(lambda offsets, at: inside(offsets, at, torch.searchsorted(offsets, at) - 1)),
        case_of(documents=(0, 4, 11)),
    ),
    "the first position of each document is taken for one of the document before, of the first for one of its own": (
        documents_by(lambda offsets, at: inside(offsets, at, torch.searchsorted(offsets, at))),
        case_of(documents=(0, 4, 11)),
    ),
    "the first position of each document is taken for one of the document before, and positions up to that of the "
    "first, and after the last one's, for documents": (
        documents_by(lambda offsets, at: torch.searchsorted(offsets, at)), case_of(documents=(2, 5, 9))
    ),
    "positions that are in no document attend each other": (
        documents_by(
            lambda offsets, at: inside(offsets, at, torch.searchsorted(offsets, at, right=True) - 1, else_=99)
        ),
        case_of(documents=(2, 5, 9)),
    ),
}  # fmt: skip
NAN = "rows that attend no key of some block of which the rank attends any are NaN: -inf - (-inf) is not guarded"
FORWARD[NAN] = replace(STEPS, partial=unguarded), case_of(window=(2, 1))
NUMBERS = {
    "out on the last rank is 0.97 times what it should be": lambda here, out, lse: (
        out * (0.97 if here.rank == here.size - 1 else 1), lse
    ),
    "lse is larger by log of the scale": lambda here, out, lse: (out, lse + math.log(here.problem.scale_value)),
    "lse in the first head is 1.25 times what it should be": lambda here, out, lse: (
        out, torch.cat([lse[:, :1] * 1.25, lse[:, 1:]], dim=1)
    ),
}  # fmt: skip
BACKWARD = {
    "on the block of rank 1: what is added to dv is multiplied by 1.01": replace(
        STEPS, returned_gradients=lambda here, dq, dk, dv: (dq, dk, dv * (1.01 if here.rank == 1 else 1))
    ),
    "delta takes the part of out that comes from the block in hand instead of the whole out": replace(
        STEPS, ds=lambda p, dp, delta: p * (dp - (p * dp).sum(-1, keepdim=True))
    ),
    "on blocks of later ranks: what is added to dv is divided by the number of ranks": replace(
        STEPS, times_in_part=lambda here, hop, owner: (1, 1 / here.size if owner > here.rank else 1)
    ),
    "on the block of the opposite rank, half way round an even number of ranks: what is added to dv counts "
    "twice": replace(STEPS, times_in_part=lambda here, hop, owner: (1, 2 if 2 * hop == here.size else 1)),
    "the rows of dv that are returned are those at positions of the shard's rows in reverse": replace(
        STEPS, returned_gradients=lambda here, dq, dk, dv: (dq, dk, dv.flip(1))
    ),
    "on blocks of other ranks: what is added to dv is added to the rows in reverse": replace(
        STEPS,
        travel=lambda steps, here, hop, owner, carried, part: STEPS.travel(
            steps, here, hop, owner, carried, part if owner == here.rank else Block(part.k, part.v.flip(1))
        ),
    ),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", FORWARD)
@pytest.mark.by_day(1)
def test_a_mask_is_said_as_it_is_made(words):
    """By blocks, by positions, by rows and pieces of a block, by batch entry."""
    steps, case = FORWARD[words]
    assert named(steps, case, gradients=False) == words


def of_sinks(change):
    """The plain ring with what it makes of the whole result beside sinks."""
    return replace(STEPS, sink=lambda here, whole: change(here, whole, STEPS.sink(here, whole)))


def empty_without(here, whole, joined):
    """Rows without keys have no lse."""
    return Partial(joined.out, torch.where(whole.lse == -math.inf, -math.inf, joined.lse))


def sinks_of_the_next(here, whole, joined):
    """Each head's sink is that of the head after it."""
    return arithmetic.merge(whole, Partial(0 * whole.out, sinks_of(here).roll(-1, 0).expand_as(whole.lse)))


SUBSTITUTES = {
    "lse is -inf in rows without keys, though there are sinks": (
        of_sinks(empty_without),
        {"key_lengths": (0, 9), "window": (1, 1)},
    ),
    "each head takes the sink of the next head": (of_sinks(sinks_of_the_next), {}),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", SUBSTITUTES)
def test_what_is_taken_instead_of_something_else_is_said(words):
    """The lse of rows without keys, and sinks of other heads."""
    steps, problem = SUBSTITUTES[words]
    case = case_of(batch=2, heads=3, sinks=True, **problem)
    assert named(steps, case, gradients=False, capabilities=SINKS, known=SUBSTITUTED) == words


@pytest.mark.timeout(60)
def test_another_normaliser_of_the_backward_is_said():
    """It takes every weight for one of equal scores."""

    def counted(here, saved):
        count = torch.from_numpy(pattern_of(here.problem).sum(axis=-1))[:, :, STEPS.queries(here)]
        return *saved[:4], torch.where(count > 0, count.to(saved[4].dtype).log(), saved[4])

    told = "the backward takes the log of the number of keys for lse: its weights do not add up to 1"
    assert named(replace(STEPS, kept=counted), case_of(), gradients=True) == told


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", NUMBERS)
def test_a_number_that_is_the_same_in_all_cases_is_said(words):
    """Of the rows in which it is so, and none where a number follows from nothing."""
    assert named(returning(NUMBERS[words]), case_of(), gradients=False) == words


@pytest.mark.timeout(60)
def test_a_number_that_is_another_in_every_case_is_not_said():
    """It is a rule only if one can say it."""
    strange = returning(lambda here, out, lse: (out * (1 + here.problem.nk / 7 + here.problem.heads / 3), lse))
    assert named(strange, case_of(), gradients=False) is None


@pytest.mark.timeout(60)
@pytest.mark.nightly
def test_a_number_may_need_what_the_case_needs():
    """Where three ranks have it and two have not, the condition is said beside it."""
    wrong = returning(lambda here, out, lse: (out * (0.9 if here.size > 2 else 1), lse))
    ranks = (Requirement("at least 3 ranks", lambda case: case.world_size > 2),)
    told = "out on three ranks or more is 0.9 times what it should be"
    assert named(wrong, case_of(), gradients=False) == told
    odd = returning(lambda here, out, lse: (out * (0.9 if here.size > 2 and here.rank == 1 else 1), lse))
    assert named(odd, case_of(), gradients=False) is None
    assert named(odd, case_of(), gradients=False, needs=Needs(ranks, (), complete=True, tried=1)) == (
        "out on rank 1 is 0.9 times what it should be"
    )


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", BACKWARD)
@pytest.mark.by_day(1)
def test_what_is_added_to_gradients_is_said(words):
    """A factor in some blocks, another delta, other rows."""
    capabilities = replace(EVERYTHING, lse_gradient=False)  # a step that takes no delta takes no cotangent of lse
    assert named(BACKWARD[words], case_of(), gradients=True, capabilities=capabilities) == words


@pytest.mark.timeout(60)
def test_nothing_is_said_of_a_mask_that_follows_no_rule():
    """Which key is left out depends on the lengths and on the number of ranks, and on nothing that has a name."""
    strange = masked(lambda m, here, hop, owner: m * ((torch.arange(m.size(3)) * 7 + hop * 5 + here.size) % 4 > 0))
    assert named(strange, case_of(), gradients=False) is None


@pytest.mark.timeout(60)
def test_what_was_read_is_said_if_it_is_so_in_every_case():
    """With one head or three the mask is right, so hop 1 is not all that it takes: no rule says which blocks."""
    always = masked(lambda m, here, hop, owner: m * (hop != 1))
    with_two = masked(lambda m, here, hop, owner: m * (hop != 1 or here.problem.heads != 2))
    assert named(always, case_of(), gradients=False) == "at hop 1: keys that the mask allows are not attended"
    assert named(with_two, case_of(), gradients=False) is None


def read_of(case, counts):
    """A case of which these counts were read."""
    pairs = Pairs(Scene(case, EVERYTHING, None))
    return reading.Read(pairs, pairs.true, counts(pairs), np.zeros(pairs.true.shape[:3], dtype=np.int64))


def test_a_rule_has_to_give_what_was_read_of_every_case():
    """Hop 1 is left out on four ranks: so it has to be on three."""
    hop = {n: lambda pairs, n=n: pairs.true * (pairs.hop != n) for n in (1, 2)}
    one, other, strange = read_of(case_of(), hop[1]), read_of(case_of(size=3), hop[1]), read_of(case_of(size=3), hop[2])
    assert next(reading.rules([one, other], [])).sentence() == "at hop 1: keys that the mask allows are not attended"
    assert not any(rule.sentence().startswith("at hop 1:") for rule in reading.rules([one, strange], []))


def test_a_right_case_that_a_rule_spoils_makes_it_dearer():
    """What is wrong of causal cases alone is said to be so."""
    wrong = read_of(case_of(causal=True), lambda pairs: pairs.true * (pairs.hop == 0))
    right = Pairs(Scene(case_of(), EVERYTHING, None))
    assert next(reading.rules([wrong], [])).parts[0].text == "on blocks of other ranks"
    assert {part.text for part in next(reading.rules([wrong], [right])).parts} == {
        "on blocks of other ranks", "under a causal mask"
    }  # fmt: skip


def test_a_rule_has_one_part_of_queries_and_one_of_keys():
    """Odd rows of the late piece are two parts of queries; together with blocks of earlier ranks each is one."""
    late, odd = (
        next(part.holds for part in PARTS if part.text == f"for queries {where}")
        for where in ("in the late piece", "in odd rows of a shard")
    )
    earlier = next(part.holds for part in PARTS if part.text == "on blocks of earlier ranks")
    one = read_of(case_of(query_length=24), lambda pairs: pairs.true * ~(odd(pairs) & earlier(pairs)))
    two = read_of(case_of(query_length=24), lambda pairs: pairs.true * ~(odd(pairs) & late(pairs)))
    assert {part.limits for part in next(reading.rules([one], [])).parts} == {"blocks", "queries"}
    for rule in reading.rules([two], []):
        assert len({part.limits for part in rule.parts}) == len(rule.parts)


@pytest.mark.parametrize("everywhere", [True, False])
def test_causes_of_which_one_says_more_are_parted_by_a_case_that_only_one_says_fails(everywhere):
    """Positions that are wrong in every mask, or in key_lengths alone: another mask tells, which no case had so far."""
    where = "with {}keys at positions counted from the rank times the longest shard"
    texts = (f"the mask is made {where.format('queries and ')}", f"key_lengths are compared {where.format('')}")
    made = [next(one for one in MADE if one.text == text) for text in texts]
    both = [Standing(reading.hypothesis_of(reading.Rule(one, ()), "always"), 0.0) for one in made]
    kept = made[0 if everywhere else 1]

    def attend(q, k, v, call):
        pairs = Pairs(Scene(Case(problem=call.problem, world_size=call.world_size), EVERYTHING, None))
        counts = pairs.true if (changed := kept.counts(pairs)) is None else np.array(changed)
        k, v = (torch.cat(gathered(x, call), dim=1) for x in (k, v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        here = torch.tensor(counts).expand(1, q.size(2), call.problem.nq, k.size(1))[:, :, call.positions]
        s = s.masked_fill(here == 0, -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1).nan_to_num(), v)

    alone = case_of(query_length=9, key_lengths=(8,), heads=1)
    with_a_mask = case_of(causal=True, query_length=6, key_length=9, heads=1)
    declared = replace(EVERYTHING, lse=False, lse_gradient=False, gradients=False)
    runner = Runner(Implementation(attend, "at other positions", declared), SimulatedWorld())
    run = functools.partial(runner.run, gradients=False)
    asked = []

    def observe(case):
        asked.append(case)
        return run(case)

    inquiry = SimpleNamespace(
        _smallest=Scene(alone, declared, run(alone)), _capabilities=declared, _seconds=60.0, _observe=observe,
        _patience_of=lambda seconds: SimpleNamespace(left=lambda: 1.0), _stands=Standing.stands,
    )  # fmt: skip
    plain = case_of(heads=1)  # none of them says that it fails: it is not run
    found = SimpleNamespace(
        failing=lambda: [alone], scattered=lambda cases, draw, cotangents: iter([plain, with_a_mask, plain])
    )
    assert wrong_tensors(inquiry._smallest)
    assert all(one.stands(inquiry._smallest) for one in both)
    assert _Inquiry._parted(inquiry, both, found) == [both[0 if everywhere else 1]]
    assert asked == [with_a_mask]


def gathered(x, call):
    """All ranks' rows; contiguous shards differ by one row at most."""
    most = -(-(call.problem.nk) // call.world_size)
    parts = [x.new_empty(x.size(0), most, *x.shape[2:]) for _ in range(call.world_size)]
    dist.all_gather(parts, torch.nn.functional.pad(x, (0, 0, 0, 0, 0, most - x.size(1))), group=call.group)
    counts = [len(held) for held in key_positions("contiguous", call.problem.nk, call.world_size)]
    return [part[:, :count] for part, count in zip(parts, counts, strict=True)]


def test_a_part_needs_more_wrong_counts_than_one():
    """One wrong count lies in a hundred parts."""

    def spoilt(pairs):
        counts = pairs.true.copy()
        counts[0, 0, 5, 1] = 0
        return counts

    assert list(reading.rules([read_of(case_of(), spoilt)], [])) == []


@pytest.mark.parametrize(("weights", "total", "counts"), [
    ([0.25, 0.5, 0.25, 0.0], np.nan, [1, 2, 1, 0]),
    ([0.25, 0.25, 0.0, 0.0], 4.0, [1, 1, 0, 0]),  # the rest is zeros that are attended
    ([0.0, 0.0, 0.0, 0.0], np.nan, [0, 0, 0, 0]),
    ([0.3, 0.11, 0.59, 0.0], np.nan, None),
    ([0.5, np.nan, 0.5, 0.0], np.nan, None),
    ([-0.5, 1.0, 0.5, 0.0], np.nan, None),
])  # fmt: skip
def test_counts_are_whole_numbers(weights, total, counts):
    """Weights of equal scores are counts over their sum; what is not whole is not a count."""
    found = reading._whole(np.array([[[weights]]]), np.array([[[total]]]))
    assert (None if found is None else found[0, 0, 0].tolist()) == counts


@pytest.mark.parametrize(
    "case", [case_of(causal=True, key_length=14), case_of(window=(2, 1)), case_of(documents=(1, 4, 9))]
)
def test_at_the_true_positions_a_mask_is_the_true_one(case):
    """Or a rule at other positions would be held against another mask."""
    pairs = Pairs(Scene(case, EVERYTHING, None))
    assert (pairs.counts(lambda name: (pairs.queries.p, pairs.keys.p)) == pairs.true).all()
