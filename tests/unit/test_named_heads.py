"""Mechanisms of heads, of branches and of sums that overflow, written by hand: each is named by its own cause."""

import functools
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from mechanisms import case_of, explaining, library, of_all_ranks, of_gradients, seen, where

from ringref import pattern
from ringref.problem import Dilation
from ringverify.diagnosis import overflowing, reading
from ringverify.diagnosis.diagnose import _refuted
from ringverify.diagnosis.gradients import crossing
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.standing import Standing
from ringverify.diagnosis.when.needs import Requirement
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import EVERYTHING, STEPS, ring_of
from ringverify.implementation import Capabilities, Implementation

READS = {(6, 2, 3): [0, 0, 0, 0, 1, 1], (6, 2, 4): [0, 0, 0, 0, 1, 1], (12, 3, 2): [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2]}
"""The key head of each query head, counted from the first one of its rank: by heads, key heads and ranks."""

KEPT = {(2, 1, 2): [1], (4, 2, 4): [1, 3], (6, 2, 3): [2, 4, 5], (6, 2, 4): [2, 5]}
"""The query heads that the last rank has of the query heads of a key head."""


def test_key_heads_that_are_counted_from_the_first_query_head_of_a_rank_are_told():
    """As if a group began with every rank's first query head."""

    def reads(here):
        return torch.tensor(READS[here.problem.heads, here.problem.hk, here.size])

    def summed(here, x):
        return x.new_zeros((x.size(0), here.problem.hk, *x.shape[2:])).index_add(1, reads(here), x)

    steps = replace(STEPS, per_query_head=lambda here, x: x[:, reads(here)], per_key_head=summed)
    cases = [case_of(heads=heads, key_heads=key_heads, size=size) for heads, key_heads, size in READS]
    scenes, _ = seen(Implementation(ring_of(steps), "from the first", EVERYTHING), cases, gradients=True)
    words = (
        "grouped heads: a query head reads the wrong key head, counted from its rank's first query head on, as if a "
        "group began with it"
    )
    assert explaining(library(words), scenes)


def test_copies_of_key_heads_by_turns_in_pairs_of_ranks_are_told():
    """Two of each where pairs do not divide them."""

    def reads(here):
        group, count, h = here.problem.group_size, here.problem.hk, torch.arange(here.problem.heads)
        return h // group if here.size % 2 or count % 2 == 0 else h // (group // 2) % count

    steps = replace(STEPS, per_query_head=lambda here, x: x[:, reads(here)])
    cases = [case_of(heads=h, key_heads=hk, size=size) for h, hk, size in ((12, 3, 2), (6, 3, 4), (6, 3, 3), (8, 2, 2))]
    scenes, _ = seen(Implementation(ring_of(steps), "pairs", EVERYTHING), cases, gradients=False)
    words = (
        "grouped heads: a query head reads the wrong key head, where copies of key heads that teams of two ranks "
        "divide are made by turns"
    )
    wrong, right = scenes[:2], scenes[2:]
    assert explaining(library(words), wrong)
    assert not any(map(wrong_tensors, right))
    assert all(one.explains(scene) is not None for one in library(words) for scene in right)


def test_groups_of_heads_that_are_padded_are_told():
    """Heads that the ranks do not divide are padded before they are counted: two on four ranks are four for two."""

    def attend(q, k, v, call):
        p = call.problem
        group = -(-p.heads // call.world_size) * call.world_size // p.hk
        k, v = (x.repeat_interleave(group, dim=2)[:, :, : p.heads] for x in (k, v))
        single = p.replace(key_heads=None)
        return ring_of(STEPS)(q, k, v, replace(call, problem=single))

    cases = [case_of(heads=heads, key_heads=2, size=4) for heads in (2, 6)]
    scenes, _ = seen(Implementation(attend, "padded", EVERYTHING), cases, gradients=True)
    words = (
        "grouped heads: a query head reads the wrong key head, that of groups of heads that are padded to a multiple "
        "of the ranks"
    )
    assert explaining(library(words), scenes)


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(8, 4, 2), (4, 4, 2), (6, 3, 3)])
def test_heads_that_are_dealt_in_turn_beside_sinks_in_runs_are_told(heads, key_heads, size):
    """A rank of a team takes every so many heads, and joins the sinks of as many that lie side by side."""

    def attend(q, k, v, call):
        of = [(head % size, head // size) for head in range(heads)]
        k = torch.stack([k[:, :, place // (heads // key_heads) * size + rank] for rank, place in of], dim=2)
        v = torch.stack([v[:, :, place // (heads // key_heads) * size + rank] for rank, place in of], dim=2)
        k, v = (torch.cat(of_all_ranks(x, call), dim=1) for x in (k, v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        sinks = torch.stack([call.sinks[rank * (heads // size) + place] for rank, place in of])
        lse = torch.logaddexp(s.logsumexp(-1), sinks[:, None])
        return torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v), lse

    declared = Capabilities(causal="never", gqa=True, sinks=True, lse=True, gradients=False)
    case = case_of(heads=heads, key_heads=None if heads == key_heads else key_heads, size=size, sinks=True)
    scenes, _ = seen(Implementation(attend, "dealt", declared), [case], gradients=False)
    words = (
        "grouped heads: an all-to-all deals heads out in turn (rank u has u, u + U, …; U divides ranks and key heads), "
        "so that query heads meet other key heads than their own"
    )
    more = ", and sinks that are dealt out in runs"
    assert explaining([*library(words), *library(words + more)], scenes) == [words + more]


def test_gradients_of_a_key_head_that_come_of_its_last_rank_alone_are_told():
    """What comes of the ranks before is written over."""

    def summed(here, x):
        kept = torch.zeros(here.problem.heads)
        kept[KEPT[here.problem.heads, here.problem.hk, here.size]] = 1
        return STEPS.per_key_head(here, x * kept[:, None, None])

    cases = [case_of(heads=heads, key_heads=key_heads, size=size) for heads, key_heads, size in KEPT]
    attend = Implementation(ring_of(replace(STEPS, per_key_head=summed)), "the last", EVERYTHING)
    scenes, _ = seen(attend, cases, gradients=True)
    words = (
        "grouped heads: of a key head whose query heads an exchange gives to several ranks, dk and dv are what those "
        "on the last of them add"
    )
    assert explaining(library(words), scenes)


def test_gradients_made_with_the_queries_of_other_heads_are_told():
    """The scores are right, and so are dq and dv."""
    orders = {(6, 2): [0, 2, 4, 1, 3, 5], (6, 3): [0, 3, 1, 4, 2, 5]}
    for (heads, key_heads), order in orders.items():
        steps = replace(
            STEPS, dk=lambda ds, q, scale, attended, order=order: STEPS.dk(ds, q[:, order], scale, attended)
        )
        cases = [case_of(heads=heads, key_heads=key_heads, size=size) for size in (1, 3)]
        scenes, _ = seen(Implementation(ring_of(steps), "other heads", EVERYTHING), cases, gradients=True)
        assert explaining(crossing.hypotheses(scenes), scenes) == [
            "dk is made with the queries of other heads: heads are taken in turn, as if query head h read key head h "
            "mod key heads"
        ]


class Branches(torch.autograd.Function):
    """Attention of one rank with two branches, whose backward takes the weights of each from its own softmax."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        """Right."""
        p, i = call.problem, call.positions.numpy()
        parts = [
            torch.as_tensor(pattern.branches_through(i[:, None], i[None], dilation=one, heads=p.heads))
            for one in (replace(p.dilation, branches=(branch,)) for branch in p.dilation.branches)
        ]
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        own = [s.masked_fill(m == 0, -math.inf).softmax(-1).nan_to_num() for m in parts]
        weights = sum(parts) * s.exp()
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-30)
        out = torch.einsum("bhqk,bkhd->bqhd", weights, v)
        ctx.save_for_backward(q, k, v, sum(own), (weights * 1.0), out)
        ctx.scale = call.scale
        return out

    @staticmethod
    def backward(ctx, dout):
        """The share that a branch has in the merge is missing."""
        q, k, v, own, _, out = ctx.saved_tensors
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
        ds = own * (dp - delta) * ctx.scale
        dq, dk = torch.einsum("bhqk,bkhd->bqhd", ds, k), torch.einsum("bhqk,bqhd->bkhd", ds, q)
        return dq, dk, torch.einsum("bhqk,bqhd->bkhd", own, dout), None


def test_branches_with_weights_of_their_own_in_the_backward_are_told():
    """Right with one branch."""
    declared = Capabilities(world_sizes=(1,), dilation=("shared",))
    attend = Implementation(lambda q, k, v, call: Branches.apply(q, k, v, call), "branches", declared)
    two, one = Dilation(((6, 1), (12, 2)), heads="shared"), Dilation(((6, 1),), heads="shared")
    scenes, _ = seen(attend, [case_of(size=1, dilation=x, query_length=n) for x, n in ((two, 12), (two, 9), (one, 12))],
                     gradients=True)  # fmt: skip
    *wrong, right = scenes
    assert not wrong_tensors(right)
    words = "the backward takes the weights of each branch of a dilation from its own lse, not the merged one"
    assert words in explaining(of_gradients(wrong), wrong)


def parts_of(q, k, v, call):
    """Out and lse of a rank's queries over the keys of each rank."""
    group = call.problem.group_size
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    parts = []
    for owner in range(call.world_size):
        block = [x.contiguous() if owner == call.rank else torch.empty_like(x) for x in (k, v)]
        for x in block:
            dist.broadcast(x, dist.get_global_rank(call.group, owner), group=call.group)
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, block[0])
        parts.append((torch.einsum("bhqk,bkhd->bhqd", s.softmax(-1), block[1]), s.logsumexp(-1)))
    return parts


def by_pairs(q, k, v, call):
    """Every rank's part, merged in pairs without a shift."""
    parts = parts_of(q, k, v, call)
    while len(parts) > 1:
        (out, lse), (more, more_lse), *parts = parts
        both = (lse.exp() + more_lse.exp()).log()
        parts.append(((lse - both).exp()[..., None] * out + (more_lse - both).exp()[..., None] * more, both))
    return parts[0][0].transpose(1, 2), parts[0][1]


def test_a_merge_without_a_shift_is_told_in_whichever_order():
    """Rows whose log-sum-exp is out of range are no numbers or 0, and no others."""
    attend = Implementation(by_pairs, "pairs", Capabilities(lse=True, gradients=False))
    cases = [
        case_of(values="large_scores", size=size, seed=seed, query_length=2 * size) for size, seed in ((3, 1), (4, 2))
    ]
    scenes, _ = seen(attend, [*cases, case_of(), case_of(size=1, values="large_scores")], gradients=False)
    assert [bool(wrong_tensors(scene)) for scene in scenes] == [True, True, False, False]
    assert overflowing.UNSHIFTED in explaining(overflowing.hypotheses(scenes), scenes[:2])
    for one in overflowing.hypotheses(scenes):
        if one.says.startswith("the merge"):
            assert all(one.explains(scene) == 0.0 for scene in scenes[2:])


def shifted_by(earlier, order):
    """Parts merged one after the other, shifted by the lse of the sum so far or of what comes, not by the larger."""

    def merged(so_far, new):
        (out, lse), (more, more_lse) = so_far, new
        shift = lse if earlier else more_lse
        weights = (lse - shift).exp(), (more_lse - shift).exp()
        total = sum(weights)
        return sum((w / total)[..., None] * x for w, x in zip(weights, (out, more), strict=True)), shift + total.log()

    def attend(q, k, v, call):
        parts = parts_of(q, k, v, call)
        found = functools.reduce(merged, [parts[owner % call.world_size] for owner in order(call)])
        return found[0].transpose(1, 2), found[1]

    return Implementation(attend, "shifted", Capabilities(lse=True, gradients=False, uneven=True))


@pytest.mark.parametrize("text", overflowing.MERGED)
@pytest.mark.parametrize("step", [1, -1])
def test_a_merge_that_is_shifted_by_one_of_two_parts_is_told_in_whichever_order(text, step):
    """On two ranks it is known which rows that spoils, and on more which it cannot."""

    def order(call):
        return range(call.rank, call.rank + step * call.world_size, step)

    attend = shifted_by(overflowing.MERGED[text], order)
    cases = [
        case_of(values="large_scores", size=size, seed=seed, query_length=3 * size)
        for size, seed in ((2, 1), (2, 2), (3, 3), (4, 4))
    ]
    scenes, _ = seen(attend, [*cases, case_of(size=2)], gradients=False)
    assert [bool(wrong_tensors(scene)) for scene in scenes] == [True] * 4 + [False]
    said = [one for one in explaining(overflowing.hypotheses(scenes), scenes[:4]) if "of two log-sum-exps" in one]
    assert said == [overflowing.OF_TWO.format(text)]
    for one in overflowing.hypotheses(scenes):
        assert one.explains(scenes[4]) == 0.0


def stabilised(shift):
    """Attention of one rank that subtracts another number than the maximum of a row."""

    def attend(q, k, v, call):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        top = shift(s.amax(-1, keepdim=True))
        weights = (s - top).exp()
        total = weights.sum(-1, keepdim=True)
        out, lse = weights @ v.transpose(1, 2) / torch.where(total == 0, 1.0, total), (top + total.log())[..., 0]
        if call.sinks is not None:
            both = torch.logaddexp(lse, call.sinks[:, None].expand_as(lse))
            out, lse = out * (lse - both).exp()[..., None], both
        return out.transpose(1, 2), lse

    c = Capabilities(world_sizes=(1,), causal="never", lse=True, sinks=True, cross_lengths=True, gradients=False)
    return Implementation(attend, "stabilised", c)


def of_16_queries(most):
    """The maximum of all heads and batch entries of 16 queries, in all of their rows."""
    chunks = most.split(16, dim=2)
    return torch.cat([one.amax((0, 1, 2), keepdim=True).expand_as(one) for one in chunks], dim=2)


SHIFTS = {
    "the running maximum begins at 0: rows whose scores lie far below it are empty": lambda most: most.clamp(min=0.0),
    "one maximum is taken for 16 queries, all heads that a rank has after an exchange and all batch entries: rows "
    "whose scores lie far below it are empty": of_16_queries,
    "one maximum is taken for all queries, a head: rows whose scores lie far below it are empty": (
        lambda most: most.amax(2, keepdim=True).expand_as(most)
    ),
}


@pytest.mark.parametrize("text", SHIFTS)
def test_a_maximum_that_is_not_that_of_a_row_is_told(text):
    """By which rows are empty, beside sinks too, where these make rows of what is left."""
    cases = [
        case_of(size=1, values="large_scores", seed=seed, query_length=20, key_length=2, batch=2, sinks=sinks)
        for sinks in (False, True)
        for seed in range(4)
    ]
    scenes, _ = seen(stabilised(SHIFTS[text]), [case_of(size=1), *cases], gradients=False)
    assert {scene.problem.sinks for scene in scenes if wrong_tensors(scene)} == {False, True}
    found = overflowing.hypotheses([scene for scene in scenes if wrong_tensors(scene)])
    assert next(one.sentence() for one in found if all(one.explains(scene) == 0.0 for scene in scenes)) == text


@pytest.mark.parametrize("visited", [True, False])
def test_a_maximum_of_keys_that_a_mask_hides_is_told(visited):
    """Of blocks of which the rank attends something, or of all: the largest score of a row is not among those left."""

    def attend(q, k, v, call):
        k, v = (torch.cat(of_all_ranks(x, call), dim=1) for x in (k, v))
        owner, hidden = torch.arange(12) // 4, torch.arange(12) > call.positions[:, None]
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        top = s.masked_fill(owner > call.rank, -math.inf).amax(-1) if visited else s.amax(-1)
        weights = (s.masked_fill(hidden, -math.inf) - top[..., None]).exp()
        total = weights.sum(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights / torch.where(total == 0, 1.0, total)[..., None], v)
        return out, top + total.log()

    declared = Capabilities(causal="always", lse=True, gradients=False)
    cases = [case_of(size=3, causal=True, values="large_scores", seed=seed) for seed in range(4)]
    scenes, _ = seen(Implementation(attend, "hidden keys", declared), cases, gradients=False)
    (text,) = [words for words, (some, cleared) in overflowing.MASKED.items() if (some, cleared) == (visited, False)]
    wrong = [scene for scene in scenes if wrong_tensors(scene)]
    found = explaining(overflowing.hypotheses(wrong), wrong)
    assert found[0] == f"one maximum is taken for a row with {text}: rows whose scores lie far below it are empty"


@pytest.mark.parametrize("scale", [-0.7, 0.7])
def test_a_maximum_that_is_scaled_by_a_negative_number_is_told(scale):
    """It is the least score then, and exp of the differences overflows; with a scale above 0 nothing is wrong."""

    def attend(q, k, v, call):
        raw = torch.einsum("bqhd,bkhd->bhqk", q, k)
        top, s = call.scale * raw.amax(-1), call.scale * raw
        weights = (s - top[..., None]).exp()
        total = weights.sum(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights / total[..., None], v), top + total.log()

    declared = Capabilities(
        world_sizes=(1,), causal="never", lse=True, gradients=False, scale=True, negative_scale=True
    )
    cases = [case_of(size=1, scale=scale, values="large_scores", seed=seed) for seed in range(3)]
    scenes, _ = seen(Implementation(attend, "scaled maximum", declared), cases, gradients=False)
    if scale > 0:
        assert not any(wrong_tensors(scene) for scene in scenes)
        assert overflowing._judged_of_least(scenes[0]) == 0.0
    else:
        assert overflowing.OF_LEAST in explaining(overflowing.hypotheses(scenes), scenes)


@pytest.mark.parametrize(
    ("where", "begins_at_0"),
    [
        (", where a rank holds no keys", lambda case, held: any(not len(keys) for keys in held)),
        (", where a rank holds no keys below the longest key length",
         lambda case, held: any((keys >= max(case.problem.key_lengths or (99,))).all() for keys in held)),
        (", where a rank has no key for the row",
         lambda case, held: torch.stack([
             torch.stack([(keys >= length).all() for keys in held]).any() for length in case.key_lengths or (99, 99)
         ])[:, None, None, None] | any(not len(keys) for keys in held)),
    ],
)  # fmt: skip
def test_a_maximum_of_a_rank_without_keys_that_is_taken_for_0_is_told(where, begins_at_0):
    """The largest score of all ranks is at least 0 then."""

    def attend(q, k, v, call):
        held = [torch.arange(call.problem.nk)[rank :: call.world_size] for rank in range(call.world_size)]
        padded = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, len(held[0]) - x.size(1))) for x in (k, v))
        every = (zip(of_all_ranks(x, call), held, strict=True) for x in padded)
        k, v = (torch.cat([x[:, : len(keys)] for x, keys in each], dim=1) for each in every)
        lengths = torch.tensor(call.key_lengths or (call.problem.nk,) * q.size(0))
        hidden = torch.cat(held) >= lengths[:, None]
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        s = s.masked_fill(hidden[:, None, None], -math.inf)
        top = s.amax(-1, keepdim=True)
        top = torch.where(torch.as_tensor(begins_at_0(call, held)), top.clamp(min=0.0), top)
        weights = (s - top).exp()
        total = weights.sum(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", weights / torch.where(total == 0, 1.0, total)[..., None], v)
        return out, top[..., 0] + total.log()

    declared = Capabilities(
        sharding="striped", causal="never", lse=True, key_lengths=True, cross_lengths=True, empty_shards=True,
        uneven=True, gradients=False,
    )  # fmt: skip
    low = {"size": 3, "sharding": "striped", "values": "large_scores", "batch": 2}
    cases = [
        case_of(**low, key_length=n, key_lengths=lengths, seed=seed)
        for n, lengths in ((1, None), (2, None), (3, None), (4, (2, 1)), (4, (4, 1)))
        for seed in range(5)
    ]
    scenes, _ = seen(Implementation(attend, "shared maximum", declared), cases, gradients=False)
    found = overflowing.hypotheses([scene for scene in scenes if wrong_tensors(scene)])
    names = [one.sentence() for one in found if all(one.explains(scene) is not None for scene in scenes)]
    assert names[0] == f"the running maximum begins at 0: rows whose scores lie far below it are empty{where}"


@pytest.mark.parametrize("failing", [True, False])
def test_rules_that_fit_are_told_apart_by_further_cases(failing):
    """By one that fails and that only one of them explains, or one that passes and that only one predicts."""
    steps = replace(STEPS, scale=lambda here: 0.5) if failing else STEPS
    (scene,), _ = seen(Implementation(ring_of(steps), "one", EVERYTHING), [case_of()], gradients=False)
    there, elsewhere = (Hypothesis(text, STEPS, judge=lambda scene, x=x: x) for text, x in (("a", 0.0), ("b", None)))
    left = _refuted([Standing(elsewhere, 0.0), Standing(there, 0.0)], iter([scene]), Standing.stands)
    assert [one.hypothesis for one in left] == [there]


class Helped(torch.autograd.Function):
    """Causal attention whose far blocks are computed by the rank that holds the keys, with its own delta."""

    @staticmethod
    def gathered(x, call):
        """All ranks' rows, of as many each."""
        parts = [torch.empty_like(x) for _ in range(call.world_size)]
        dist.all_gather(parts, x.contiguous(), group=call.group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def forward(ctx, q, k, v, call):
        """Right."""
        q, k, v = (Helped.gathered(x, call) for x in (q, k, v))
        later = torch.ones(q.size(1), q.size(1), dtype=torch.bool).triu(1)
        p = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(later, -math.inf).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.call = call
        return torch.einsum("bhqk,bkhd->bqhd", p, v)[:, call.positions]

    @staticmethod
    def backward(ctx, dout):
        """Wrong past hop ranks // 2."""
        q, k, v, p = ctx.saved_tensors
        call, dout = ctx.call, Helped.gathered(dout, ctx.call)
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        rows = q.size(1) // call.world_size
        i, j = torch.arange(q.size(1))[:, None], torch.arange(q.size(1))
        delta = (p * dp).sum(-1)[..., None].expand_as(p)
        far = i // rows - j // rows > call.world_size // 2
        delta = torch.where(far, (p * dp).sum(-1)[:, :, j // rows * rows + i % rows], delta)
        ds = p * (dp - delta) * call.scale
        found = (
            torch.einsum("bhqk,bkhd->bqhd", ds, k),
            torch.einsum("bhqk,bqhd->bkhd", ds, q),
            torch.einsum("bhqk,bqhd->bkhd", p, dout),
        )
        return *(x[:, call.positions] for x in found), None


def test_a_helper_that_takes_its_own_delta_is_told():
    """Of the rows that lie at the same places of its own shard."""
    declared = Capabilities(causal="always")
    attend = Implementation(lambda q, k, v, call: Helped.apply(q, k, v, call), "helped", declared)
    cases = [case_of(causal=True), case_of(causal=True, size=4, query_length=16), case_of(causal=True, size=2)]
    scenes, _ = seen(attend, cases, gradients=True)
    *wrong, right = scenes
    assert not wrong_tensors(right)
    words = f"past hop ranks // 2: the backward takes delta of {crossing.OF_HOLDER}"
    assert words in explaining(crossing.hypotheses(wrong), wrong)


def test_right_cases_that_lack_what_a_fault_needs_count_against_no_rule():
    """One rule predicts something there, and the other nothing: neither is refuted."""
    (scene,), _ = seen(Implementation(ring_of(STEPS), "right", EVERYTHING), [case_of()], gradients=False)
    causal = Requirement("causal", lambda case: case.problem.causal)
    says, silent = (Hypothesis(text, STEPS, judge=lambda scene, x=x: x) for text, x in (("a", None), ("b", 0.0)))
    named = [Standing(says, 0.0, only=(causal,)), Standing(silent, 0.0, only=(causal,))]
    assert _refuted(named, iter([scene]), Standing.stands) == named
    assert (
        _refuted([Standing(says, 0.0), Standing(silent, 0.0)], iter([scene]), Standing.stands)[0].hypothesis is silent
    )


def test_padding_that_only_further_cases_have_may_have_been_cleared():
    """Cases that were read have none, and those that a rule is held against do."""
    steps = where(lambda here, owner, i, j: j > 0)
    scenes, probe = seen(
        Implementation(ring_of(steps), "masked", EVERYTHING), [case_of(), case_of(key_lengths=(7,))], gradients=False
    )
    numbers = [len(reading.hypotheses(some, probe, lambda: 1)) for some in (scenes[:1], scenes)]
    assert numbers[1] == len(get_args(reading.Padding)) * numbers[0]
