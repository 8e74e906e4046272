"""Gradients of which pieces are lost, changed or misdirected, and of other heads: told without a rule for which."""

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mechanisms import case_of, explaining, of_gradients, seen, where

from ringverify.diagnosis.further_cases import with_scores_far_below_0
from ringverify.diagnosis.gradients import crossing, other_heads, piecewise, sinks
from ringverify.diagnosis.gradients.piecewise import TooFew, chosen
from ringverify.diagnosis.masks.made import MADE
from ringverify.diagnosis.reading import Rule, hypothesis_of
from ringverify.diagnosis.substituting import SUBSTITUTED
from ringverify.diagnosis.when.scores import conditions_on_scores, of_scores
from ringverify.faults.ring import EVERYTHING, STEPS, multiplicity, ring_of
from ringverify.implementation import Capabilities, Implementation


def irregular(here, owner):
    """Some pairs of ranks that no rule is known for."""
    return (3 * here.rank + owner * owner + here.rank * owner) % 5 in (1, 4)


EXAMPLE = (
    "by no rule that is known: for example on 3 ranks, what the queries of rank 2 add to that of rank 0 and what the "
    "queries of rank 0 add to that of rank 1, and more"
)
COUNTED = {
    "a part of dv is lost": lambda here, there: (1, 0 if there else 1),
    "a part of dv is added twice": lambda here, there: (1, 2 if there else 1),
    "a part of dk lacks the scale": lambda here, there: (1 / here.problem.scale_value if there else 1, 1),
}


@pytest.mark.parametrize("words", COUNTED)
def test_pieces_of_gradients_that_count_otherwise_are_told(words):
    """Which these are differs from case to case, and nothing is said of it."""
    cases = [case_of(size=size, query_length=3 * size, head_dim=5) for size in (5, 4, 3)]
    steps = replace(STEPS, times_in_part=lambda here, hop, owner: COUNTED[words](here, irregular(here, owner)))
    scenes, _ = seen(Implementation(ring_of(steps), "in part", EVERYTHING), cases, gradients=True)
    assert explaining(piecewise.hypotheses(scenes), scenes) == [f"{words}, {EXAMPLE}"]


class Gathered(torch.autograd.Function):
    """Attention with all keys and values of ranks that hold as many each, whose gradients are summed and cut."""

    @staticmethod
    def forward(ctx, q, k, v, call, wrongly):
        """Right."""
        k, v = (torch.cat(gathered(x, call), dim=1) for x in (k, v))
        group = call.problem.group_size
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, dim=2))
        lse = s.logsumexp(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v.repeat_interleave(group, dim=2))
        ctx.save_for_backward(q, k, v, s, lse, out)
        ctx.call, ctx.wrongly = call, wrongly
        return out

    @staticmethod
    def backward(ctx, dout):
        """With what is wrong: the rows that come back, or the lse that is taken."""
        q, k, v, s, lse, out = ctx.saved_tensors
        call, group = ctx.call, ctx.call.problem.group_size
        p = (s - ctx.wrongly.get("lse", lambda lse: lse)(lse)[..., None]).exp()
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v.repeat_interleave(group, dim=2))
        ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * call.scale
        dq = torch.einsum("bhqk,bkhd->bqhd", ds, k.repeat_interleave(group, dim=2))
        dk, dv = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bqhd->bkhd", p, dout)
        both = [x.unflatten(2, (-1, group)).sum(3).contiguous() for x in (dk, dv)]
        for x in both:
            dist.all_reduce(x, group=call.group)
        cut = ctx.wrongly.get("cut", lambda x, size: x.unflatten(1, (size, -1)).transpose(0, 1))
        dk, dv = (cut(x, call.world_size)[call.rank] for x in both)
        return dq, dk, dv, None, None


def gathered(x, call):
    """What all ranks have, by rank."""
    dist.all_gather(every := [torch.empty_like(x) for _ in range(call.world_size)], x.contiguous(), group=call.group)
    return every


def gathering(**wrongly):
    """The implementation that is wrong so."""
    declared = Capabilities(causal="never", gqa=True, value_dim=True)
    return Implementation(lambda q, k, v, call: Gathered.apply(q, k, v, call, wrongly), "gathered", declared)


class Overwritten(Gathered):
    """As `Gathered`, but for how gradients of several ranks are put together."""

    @staticmethod
    def backward(ctx, dout):
        """The last rank that is not the owner has written over all others."""
        q, k, v, s, lse, out = ctx.saved_tensors
        call = ctx.call
        p = (s - lse[..., None]).exp()
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        ds = p * (dp - (dout * out).sum(-1).transpose(1, 2)[..., None]) * call.scale
        last = (call.world_size - 1) - (call.rank == call.world_size - 1)
        own = torch.cat([torch.einsum("bhqk,bqhd->bkhd", *x) for x in ((ds, q), (p, dout))], dim=-1)
        own = gathered(own, call)[max(last, 0)].unflatten(1, (call.world_size, -1))[:, call.rank]
        return torch.einsum("bhqk,bkhd->bqhd", ds, k), *own.split([q.size(-1), v.size(-1)], dim=-1), None, None


def test_gradients_that_ranks_write_over_one_another_are_told():
    """Each after the one before, the owner's own first."""
    declared = Capabilities(causal="never")
    attend = Implementation(lambda q, k, v, call: Overwritten.apply(q, k, v, call, {}), "over", declared)
    scenes, _ = seen(attend, [case_of(size=size) for size in (4, 3, 2)], gradients=True)
    words = "the dk and dv that come from each rank, one rank after the other, are written over those that were there"
    assert words in explaining(of_gradients(scenes), scenes)


class Beside(Gathered):
    """As `Overwritten`, but that a rank adds its own."""

    @staticmethod
    def backward(ctx, dout):
        """Of other ranks the last one counts."""
        dq, dk, dv, *none = Overwritten.backward(ctx, dout)
        q, _, v, s, lse, out = ctx.saved_tensors
        call = ctx.call
        p = (s - lse[..., None]).exp()
        ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, v) - (dout * out).sum(-1).transpose(1, 2)[..., None])
        own = torch.einsum("bhqk,bqhd->bkhd", call.scale * ds, q), torch.einsum("bhqk,bqhd->bkhd", p, dout)
        mine = (x.unflatten(1, (call.world_size, -1))[:, call.rank] for x in own)
        return dq, *(x + y for x, y in zip((dk, dv), mine, strict=True)), *none


def test_gradients_that_other_ranks_write_over_one_another_are_told():
    """Where the owner's own is added to what the last one has written."""
    declared = Capabilities(causal="never")
    attend = Implementation(lambda q, k, v, call: Beside.apply(q, k, v, call, {}), "beside", declared)
    scenes, _ = seen(attend, [case_of(size=size) for size in (4, 3)], gradients=True)
    words = "the dk and dv that come from other ranks, one rank after the other, are written over one another"
    assert any(one.startswith(words) for one in explaining(of_gradients(scenes), scenes))


def by_batch_entry(x, size):
    """Batch entries and ranks are not exchanged before the whole is cut."""
    rows = x.unflatten(1, (size, -1)).flatten(0, 1)
    return rows.unflatten(0, (size, -1))


ELSEWHERE = {
    "dk and dv arrive elsewhere: on 2 ranks, what lies by batch entry and rank is taken by rank and batch entry": (
        by_batch_entry, [case_of(size=size, batch=2, head_dim=6) for size in (3, 2)]
    ),
    "dk and dv arrive elsewhere, by no rule that is known: for example on 3 ranks, that of rank 2 arrives at rank 0": (
        lambda x, size: x.unflatten(1, (size, -1)).transpose(0, 1)[[2, 0, 1, *range(3, size)]],
        [case_of(size=size, head_dim=6) for size in (4, 3)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", ELSEWHERE)
def test_gradients_that_arrive_elsewhere_are_told(words):
    """On other ranks, or in other batch entries."""
    cut, cases = ELSEWHERE[words]
    scenes, _ = seen(gathering(cut=cut), cases, gradients=True)
    assert explaining(piecewise.hypotheses(scenes), scenes)[0] == words


LSE = {
    "the backward takes lse of other heads: the heads of key head k take those of key head k mod 2": (
        lambda lse: lse[:, torch.arange(lse.size(1)) // 2 % 2 * 2 + torch.arange(lse.size(1)) % 2],
        [case_of(heads=heads, key_heads=heads // 2, size=2) for heads in (6, 8)],
    ),
    "the backward takes lse of other heads: of 4 query heads, head 0 takes that of head 1": (
        lambda lse: lse[:, [1, 1, 0, 2, *range(4, lse.size(1))]],
        [case_of(heads=heads, size=2) for heads in (5, 4)],
    ),
}


@pytest.mark.parametrize("words", LSE)
def test_an_lse_of_other_heads_is_told(words):
    """By a rule, if there is one for all cases."""
    wrong, cases = LSE[words]
    scenes, _ = seen(gathering(lse=wrong), cases, gradients=True)
    assert words in explaining(other_heads.hypotheses(scenes), scenes)


def test_a_rule_of_heads_is_told_where_some_show_the_same():
    """With equal queries and keys of two heads, what is read of one may be the other."""
    in_turn = replace(STEPS, delta=lambda dout, out, dlse: STEPS.delta(dout, out, _in_turn(dlse)))
    cases = [
        case_of(heads=6, key_heads=2, size=size, cotangent="lse", values=values)
        for size, values in ((2, "integers"), (3, "normal"))
    ]
    scenes, _ = seen(Implementation(ring_of(in_turn), "in turn", EVERYTHING), cases, gradients=True)
    words = "the backward takes the cotangent of lse of other heads: heads lie in turn, one of each group, where they "
    assert any(one.startswith(words) for one in explaining(other_heads.hypotheses(scenes), scenes))


def _in_turn(x):
    """Six heads of two groups."""
    return x.unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2)


def test_cotangents_of_other_heads_are_told():
    """In dv alone; each key head is the sum of two."""
    order = [0, 3, 1, 2]
    steps = replace(STEPS, dv=lambda p, dout, *attended: STEPS.dv(p, dout[:, order], *attended))
    scenes, _ = seen(
        Implementation(ring_of(steps), "other heads", EVERYTHING),
        [case_of(heads=4, key_heads=2, size=size) for size in (1, 2)], gradients=True
    )  # fmt: skip
    assert explaining(other_heads.hypotheses(scenes), scenes) == [
        "dv is made with the cotangents of out of other heads: of 4 query heads, head 1 takes that of head 3"
    ]


MAXIMA = {
    "the maximum of a block is detached in its log-sum-exp and not in its weights: the largest score lacks the "
    "gradient of that log-sum-exp": (True, False),
    "the maximum of a row is detached in its weights and not in its log-sum-exp: the largest score has the gradient "
    "of that log-sum-exp twice": (False, True),
}


@pytest.mark.parametrize("words", MAXIMA)
def test_a_maximum_that_is_detached_in_one_place_is_told(words):
    """In out, what a block's maximum has of a gradient cancels; in its log-sum-exp it does not."""
    of_block, in_weights = MAXIMA[words]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        from torch.distributed.nn import functional as differentiable

    def attend(q, k, v, call):
        k, v = (torch.cat(differentiable.all_gather(x, group=call.group), dim=1) for x in (k, v))
        blocks = call.world_size if of_block else 1
        parts = []
        for one, values in zip(k.chunk(blocks, dim=1), v.chunk(blocks, dim=1), strict=True):
            s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, one)
            top = s.amax(-1)
            weights = (s - (top.detach() if in_weights else top)[..., None]).exp()
            total = weights.sum(-1)
            out = torch.einsum("bhqk,bkhd->bhqd", weights / total[..., None], values)
            parts.append((out, (top if in_weights else top.detach()) + total.log()))
        lse = torch.stack([part for _, part in parts]).logsumexp(0)
        out = sum((part - lse).exp()[..., None] * out for out, part in parts)
        return out.transpose(1, 2), lse

    declared = Capabilities(causal="never", lse=True, lse_gradient=True)
    cases = [case_of(size=size, cotangent="both") for size in (2, 3)]
    scenes, _ = seen(Implementation(attend, "detached", declared), cases, gradients=True)
    assert words in explaining(of_gradients(scenes), scenes)


def test_the_derivative_of_another_softcap_is_told():
    """Of the scores before the cap."""
    steps = replace(STEPS, cap_slope=lambda s, softcap: 1 - torch.atanh(s / softcap) ** 2)
    scenes, _ = seen(
        Implementation(ring_of(steps), "slope", EVERYTHING),
        [case_of(softcap=2.0, size=size) for size in (1, 3)], gradients=True
    )  # fmt: skip
    words = "the derivative of the softcap is taken to be 1 - (score / softcap)² of scores before the cap"
    assert words in explaining(of_gradients(scenes), scenes)


def test_too_few_numbers_are_no_answer():
    """Of two equal columns nothing tells which it is; of few, every choice is tried."""
    columns = [np.array([float(n)]) for n in range(1, 30)]
    assert chosen(columns[:4], np.array([7.0]), 0.0) == (2, 3)
    assert chosen(columns[:4], np.array([0.5]), 0.0) is None
    assert chosen(columns, np.array([0.0]), 0.0) == ()
    with pytest.raises(TooFew):
        chosen(columns, np.array([7.0]), 0.0)


# -- masks -------------------------------------------------------------------------------------------------------------


def rule(words):
    """What the words say of a mask, as a hypothesis about the forward and the backward."""
    (made,) = (made for made in MADE if made.text == words)
    return hypothesis_of(Rule(made, ()), "always")


def ends(i, j):
    """The first key and the last query of a block."""
    return j[0, 0], i[-1, 0]


def bare_if_it_begins_within(here, owner, i, j):
    """A block counts as a whole if its first key is within the mask of the last query."""
    left, right = here.problem.window
    key, query = ends(i, j)
    whole = query - left <= key <= query + right
    return (j >= i - left) & (j <= i + right) | whole


def test_a_block_that_is_taken_whole_is_told():
    """By one pair of its ends."""

    def pattern(steps, here, hop, owner):
        i, j = here.call.positions[:, None], here.shards[owner][None]
        shape = here.problem.batch, here.problem.heads, len(i), j.size(1)
        return bare_if_it_begins_within(here, owner, i, j).long().expand(shape)

    cases = [case_of(size=size, window=(5, 1), query_length=n) for size, n in ((2, 12), (3, 12), (2, 9))]
    attend = Implementation(ring_of(replace(STEPS, pattern=pattern)), "whole", EVERYTHING)
    scenes, _ = seen(attend, cases, gradients=True)
    words = "a block has no window if its first key is within that of the rank's last query"
    assert explaining([rule(words)], scenes)


def test_partial_results_that_are_merged_once_more_in_each_round_are_told():
    """Of four ranks, two are an inner ring."""

    def pattern(steps, here, hop, owner):
        return multiplicity(STEPS, here, hop, owner) * (1 + (here.rank // 2 == owner // 2))

    scenes, _ = seen(
        Implementation(ring_of(replace(STEPS, pattern=pattern)), "again", EVERYTHING), [case_of(size=4)], gradients=True
    )
    words = (
        "what was merged in earlier rounds of inner rings, of as many ranks as the smallest divisor of their number is "
        "merged again with each later one"
    )
    assert explaining([rule(words)], scenes)


def test_padding_of_short_shards_that_is_attended_is_told():
    """As keys of 0 at position -1: under a window, the first queries see them alone."""

    def attend(q, k, v, call):
        longest = -(-call.problem.nk // call.world_size)
        short = longest - k.size(1)
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, short)) for x in (k, v))
        at = torch.nn.functional.pad(call.key_positions, (0, short), value=-1)
        k, v, at = (torch.cat(gathered(x, call), dim=0 if x.ndim == 1 else 1) for x in (k, v, at))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        left, right = call.window
        i = call.positions[:, None]
        hidden = (at < i - left) | (at > i + right)
        return torch.einsum("bhqk,bkhd->bqhd", s.masked_fill(hidden, -math.inf).softmax(-1), v)

    declared = Capabilities(causal="never", window=True, uneven=True, gradients=False)
    cases = [case_of(size=size, window=(3, 2), query_length=11) for size in (2, 3)]
    scenes, _ = seen(Implementation(attend, "padded", declared), cases, gradients=False)
    at_minus_one, everywhere = (
        rule(f"shards are padded to the longest, and the padding counts as keys of 0{where}")
        for where in (" at position -1", "")
    )
    assert explaining([at_minus_one, everywhere], scenes) == [at_minus_one.sentence()]


@pytest.mark.parametrize("size", [4, 6])
def test_the_last_key_of_a_tile_that_is_left_out_is_told(size):
    """The end of the causal mask of its last query is taken for one past it."""
    steps = where(lambda here, owner, i, j: j < ((i // 4 + 1) * 4).clamp(max=here.problem.nq) - 1)
    scenes, _ = seen(
        Implementation(ring_of(steps), "tile", EVERYTHING), [case_of(causal=True, size=size)], gradients=True
    )
    words = (
        "a tile of 4 queries, cut from position 0 on, attends no key at the end of the causal mask of its last query, "
        "which is taken for one past it"
    )
    assert explaining([rule(words)], scenes)


@pytest.mark.parametrize("words", ["max(keys - queries, 0)", "|keys - queries|"])
def test_cross_lengths_that_are_aligned_otherwise_are_told(words):
    """More queries than keys, of which the first attend nothing."""
    by = {"max(keys - queries, 0)": lambda n: max(n, 0), "|keys - queries|": abs}[words]

    def pattern(steps, here, hop, owner):
        p = here.problem
        m = here.shards[owner][None] <= here.call.positions[:, None] + by(p.diagonal)
        return m.long().expand(p.batch, p.heads, *m.shape)

    cases = [case_of(causal=True, size=size, query_length=9, key_length=5) for size in (1, 3)]
    attend = Implementation(ring_of(replace(STEPS, pattern=pattern)), "aligned", EVERYTHING)
    scenes, _ = seen(attend, cases, gradients=True)
    assert explaining(
        [rule(f"the causal mask is made with cross lengths aligned by {words} instead of keys - queries")], scenes
    )


def test_a_block_that_is_cut_to_the_rows_of_another_rank_is_told():
    """Nothing takes the place of what a shorter block lacks."""
    steps = where(lambda here, owner, i, j: torch.arange(j.size(1)) < len(i))
    cases = [case_of(size=size, query_length=11) for size in (2, 3)]
    scenes, _ = seen(Implementation(ring_of(steps), "cut", EVERYTHING), cases, gradients=True)
    words = "a block is cut to as many keys as the rank's own shard holds: the last ones of a longer block are left out"
    assert explaining([rule(words)], scenes)


def test_a_block_of_the_document_of_the_first_query_that_is_skipped_is_told():
    """The last key of an earlier block is in the document of the rank's first query."""

    def keeps(here, owner, i, j):
        bounds = torch.tensor(here.problem.documents)
        of_key, of_query = (torch.bucketize(x, bounds, right=True) for x in (j[0, -1], i[0, 0]))
        return owner == here.rank or of_key > of_query

    cases = [case_of(size=size, query_length=12, documents=(0, 5, 12)) for size in (2, 3)]
    scenes, _ = seen(Implementation(ring_of(where(keeps)), "skipped", EVERYTHING), cases, gradients=True)
    words = (
        "a block is skipped if its last key lies in the document of the rank's first query, or in an earlier one, but "
        "never a rank's own"
    )
    assert explaining([rule(words)], scenes)


def combined(q, k, v, call):
    """The parts of all ranks with the common maximum; the sums keep those of the ranks."""
    top, total, weighted = [], [], []
    for k_r, v_r in zip(gathered(k, call), gathered(v, call), strict=True):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k_r)
        top.append(s.amax(-1))
        w = (s - top[-1][..., None]).exp()
        total.append(w.sum(-1))
        weighted.append(torch.einsum("bhqk,bkhd->bhqd", w, v_r))
    top = torch.stack(top)
    back = (top - top.amax(0)).exp()
    out = (back[..., None] * torch.stack(weighted)).sum(0) / sum(total)[..., None]
    return out.transpose(1, 2), top.amax(0) + sum(total).log()


def test_sums_that_are_not_rescaled_to_the_common_maximum_are_told():
    """Of the weighted values it is done."""
    declared = Capabilities(causal="never", lse=True, gradients=False)
    scenes, _ = seen(Implementation(combined, "tree", declared), [case_of(size=s) for s in (2, 3)], gradients=False)
    assert explaining(SUBSTITUTED, scenes) == [
        "the sums of exponentials of the ranks' partial results are added up without being rescaled to the common "
        "maximum"
    ]
    case = scenes[0].case
    (unlike,) = (one for one in conditions_on_scores([]) if one.text.startswith("a query whose largest scores"))
    assert unlike.meets(of_scores(case, declared))
    assert not unlike.meets(of_scores(case.replace(values="zero_queries"), declared))


class LastTile(torch.autograd.Function):
    """Sinks that give the right out, and the gradient that a rank's last tile of 4 queries adds."""

    @staticmethod
    def forward(ctx, sinks, out, lse, whole):
        """Right."""
        ctx.save_for_backward(sinks, out, lse)
        return whole.clone()

    @staticmethod
    def backward(ctx, dout):
        """With `=` where `+=` should be."""
        sinks, out, lse = ctx.saved_tensors
        each = -(sinks[:, None] - lse).exp() * (dout * out).sum(-1).transpose(1, 2)
        last = each[..., (each.size(2) - 1) // 4 * 4 :]
        return last.sum((0, 2)), None, None, dout


def last_tile(q, k, v, call):
    """Attention of one rank."""
    s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    sinks = call.sinks.detach()
    lse = torch.logaddexp(s.logsumexp(-1), sinks[:, None])
    out = torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v)
    return LastTile.apply(call.sinks, out.detach(), lse.detach(), out)


def test_a_gradient_of_sinks_of_the_last_tile_alone_is_told():
    """And so is that it takes more queries than a tile."""
    declared = Capabilities(causal="never", sinks=True, world_sizes=(1,))
    cases = [case_of(size=1, sinks=True, query_length=n, seed=n) for n in (6, 7, 9, 12)]
    scenes, _ = seen(Implementation(last_tile, "tiles", declared), cases, gradients=True)
    assert sinks.cause(scenes) == (
        "the gradient of sinks is that of the last tile of 4 queries of each rank alone, as if it were not added up "
        "over tiles"
    )


# -- by tiles, partners and orders -------------------------------------------------------------------------------------


def by_pairs(keeps):
    """The plain ring with a mask of the whole, by the positions of queries and keys of a rank and an owner."""

    def pattern(steps, here, hop, owner):
        p = here.problem
        m = keeps(here, owner, multiplicity(STEPS, here, hop, owner))
        return m.expand(p.batch, p.heads, *m.shape[2:])

    return Implementation(ring_of(replace(STEPS, pattern=pattern)), "by pairs", EVERYTHING)


def corner(here, owner, m):
    """Tiles of 3 queries and 4 keys count as a whole if the first query attends the last key."""
    m = m.clone()
    for i in range(0, m.size(2), 3):
        for j in range(0, m.size(3), 4):
            tile = m[:, :, i : i + 3, j : j + 4]
            tile[:] = torch.where((tile[:, :, 0, -1] > 0).all(), 1, tile)
    return m


def first_entry(here, owner, m):
    """Tiles of 2 queries and 3 keys are skipped, or count as a whole, as in the first batch entry."""
    m = m.clone()
    for i in range(0, m.size(2), 2):
        for j in range(0, m.size(3), 3):
            tile = m[:, :, i : i + 2, j : j + 3]
            tile[:] = 0 if not tile[0].any() else torch.where((tile[0] > 0).all(), 1, tile)
    return m


TILED = {
    "a tile of 3 queries and 4 keys has no mask if its first query attends its last key": (
        corner, [case_of(size=size, query_length=n, window=(3, 0)) for size, n in ((1, 12), (2, 17))]
    ),
    "a tile of 2 queries and 3 keys is skipped, or has no mask, in all batch entries as it is in the first": (
        first_entry, [case_of(size=size, batch=2, query_length=14, key_lengths=(9, 5)) for size in (1, 2)]
    ),
    "ranks meet two by two, rank with rank XOR step for steps below the number of ranks: right only of 2, 4, 8, …, "
    "others miss those for which that is no step": (
        lambda here, owner, m: m * ((here.rank ^ owner) < here.size), [case_of(size=size) for size in (3, 5, 6)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", TILED)
def test_what_is_decided_by_a_part_of_it_is_told(words):
    """Tiles by a corner or by the first batch entry, partners by their number."""
    keeps, cases = TILED[words]
    scenes, _ = seen(by_pairs(keeps), cases, gradients=True)
    assert explaining([rule(words)], scenes)


def test_query_positions_that_are_gathered_with_padding_are_told():
    """Zeros lie between those of ranks, and the last ones are cut off."""

    def pattern(steps, here, hop, owner):
        longest = max(map(len, here.shards))
        filled = torch.cat([torch.nn.functional.pad(held, (0, longest - len(held))) for held in here.shards])
        first = sum(map(len, here.shards[: here.rank]))
        i = filled[first : first + len(here.call.positions)]
        m = (here.shards[owner][None] <= i[:, None]).long()
        return m.expand(here.problem.batch, here.problem.heads, *m.shape)

    cases = [case_of(causal=True, size=size, query_length=n) for size, n in ((3, 10), (4, 13))]
    attend = Implementation(ring_of(replace(STEPS, pattern=pattern)), "filled", EVERYTHING)
    scenes, _ = seen(attend, cases, gradients=True)
    words = (
        "the causal mask is made with queries at positions of the row with its number in shards that are filled up "
        "with 0 to the longest"
    )
    assert explaining([rule(words)], scenes)


def test_values_of_other_key_heads_than_keys_are_told():
    """As if the groups of query heads were dealt out in turn."""

    def attend(q, k, v, call):
        group = call.problem.group_size
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(group, dim=2))
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v.repeat(1, 1, group, 1))

    declared = Capabilities(causal="never", gqa=True, world_sizes=(1,))
    cases = [case_of(size=1, heads=heads, key_heads=2) for heads in (4, 6)]
    scenes, _ = seen(Implementation(attend, "values", declared), cases, gradients=True)
    assert explaining(SUBSTITUTED, scenes) == [
        "grouped heads: query head h reads the values of key head h mod key heads, and the keys of its own"
    ]


class Cotangents(torch.autograd.Function):
    """What a wrong backward gives of the cotangents of right results."""

    @staticmethod
    def forward(ctx, out, lse, call, change):
        """Right."""
        ctx.call, ctx.change = call, change
        return out.clone(), lse.clone()

    @staticmethod
    def backward(ctx, dout, dlse):
        """In another order of heads, or of rows."""
        return *ctx.change(ctx.call, dout, dlse), None, None


def in_another_order(call, dout, dlse):
    """The order of the shards is applied where its inverse is needed."""
    whole = [torch.cat(gathered(x.transpose(0, axis), call)) for x, axis in ((dout, 1), (dlse, 2))]
    order = torch.cat(gathered(call.positions, call))
    inverse = torch.argsort(order)
    return tuple(
        x[inverse[order[order[call.positions]]]].transpose(0, axis) for x, axis in zip(whole, (1, 2), strict=True)
    )


def in_turn(x, axis, problem):
    """Heads `(group, key head)` instead of `(key head, group)`."""
    return x.unflatten(axis, (problem.group_size, problem.hk)).transpose(axis, axis + 1).flatten(axis, axis + 1)


CHANGED = {
    "the backward takes the cotangent of out, for delta too, of other heads: heads lie in turn, one of each group, "
    "where they should lie group by group": (
        lambda call, dout, dlse: (in_turn(dout, 2, call.problem), dlse),
        [case_of(size=1, heads=heads, key_heads=2, cotangent="both") for heads in (4, 6)],
    ),
    "the backward takes the cotangent of lse of other heads: heads lie in turn, one of each group, where they should "
    "lie group by group": (
        lambda call, dout, dlse: (
            dout,
            dlse.unflatten(1, (call.problem.hk, -1)).transpose(1, 2).flatten(1, 2)
            if call.problem.hk == call.problem.group_size else dlse[:, [0, 2, 4, 1, 3, 5]],
        ),
        [case_of(size=1, heads=heads, key_heads=2, cotangent="both") for heads in (4, 6)],
    ),
    "the backward takes the cotangents of out and lse of the rows that the order of the shards gives where its inverse "
    "is needed": (
        in_another_order, [case_of(size=size, sharding="striped", query_length=3 * size, cotangent="both")
                           for size in (2, 4)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", CHANGED)
def test_cotangents_of_other_heads_or_rows_are_told(words):
    """Those of lse alone, or all of them."""
    change, cases = CHANGED[words]
    attend = Implementation(
        lambda q, k, v, call: Cotangents.apply(*ring_of(STEPS)(q, k, v, call), call, change), "cotangents", EVERYTHING
    )
    scenes, _ = seen(attend, cases, gradients=True)
    assert words in explaining([*other_heads.hypotheses(scenes), *crossing.hypotheses(scenes)], scenes)


def of_first_lengths(x, lengths):
    """Rows of the whole that begin at the rank times the first rank's number of rows."""
    x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, x.size(1)))
    return [x[:, rank * lengths[0] :][:, :n] for rank, n in enumerate(lengths)]


def of_padded_shards(x, lengths):
    """Each shard is padded to the longest, and begins at the rank times its own number of rows."""
    shards = [torch.nn.functional.pad(y, (0, 0, 0, 0, 0, lengths[0] - y.size(1))) for y in x.split(lengths, dim=1)]
    whole = torch.cat(shards, dim=1)
    return [whole[:, rank * n :][:, :n] for rank, n in enumerate(lengths)]


def of_the_last_of_padded(x, lengths):
    """Each shard is padded to the longest, and its last rows are taken."""
    shards = [torch.nn.functional.pad(y, (0, 0, 0, 0, 0, lengths[0] - y.size(1))) for y in x.split(lengths, dim=1)]
    return [y[:, y.size(1) - n :] for y, n in zip(shards, lengths, strict=True)]


def of_one_row_for_all(x, lengths):
    """A slice that begins with the last row is broadcast where it is assigned."""
    slices = [x[:, rank * lengths[0] :][:, :n] for rank, n in enumerate(lengths)]
    return [y.expand(-1, n, -1, -1) for y, n in zip(slices, lengths, strict=True)]


@pytest.mark.parametrize(
    ("cut", "size", "lengths", "words"),
    [
        (of_first_lengths, 4, (14, 10),
         "rows from the rank times the first rank's number of rows on, in the order of the shards"),
        (of_padded_shards, 4, (14, 10),
         "rows from the rank times the rank's own number of rows on, in the order of the shards, padded to the "
         "longest"),
        (of_the_last_of_padded, 4, (14, 10),
         "the last rows of their shard padded to the longest, as if padding came before them"),
        (of_one_row_for_all, 3, (7,),
         "rows from the rank times the longest shard on, in the order of the shards, a single one that is left being "
         "taken for all"),
    ],
)  # fmt: skip
def test_gradients_that_are_cut_elsewhere_from_the_whole_are_told(cut, size, lengths, words):
    """In the order of the shards, from a row on that is not where the rank's shard begins."""

    def attend(q, k, v, call):
        return Uneven.apply(q, k, v, call, cut)

    declared = Capabilities(causal="never", uneven=True)
    cases = [case_of(size=size, query_length=n) for n in lengths]
    scenes, _ = seen(Implementation(attend, "cut", declared), cases, gradients=True)
    says = f"the rows of dk and dv that are returned are those at positions of {words}"
    assert says in explaining(of_gradients(scenes), scenes)


class Uneven(torch.autograd.Function):
    """Right but for which rows of dk and dv come back; shards may differ in length."""

    @staticmethod
    def forward(ctx, q, k, v, call, cut):
        """Right."""
        longest = -(-call.problem.nk // call.world_size)
        pad = (0, 0, 0, 0, 0, longest - k.size(1))
        lengths = [call.problem.nk // call.world_size + (r < call.problem.nk % call.world_size)
                   for r in range(call.world_size)]  # fmt: skip
        k, v = (
            torch.cat(
                [y[:, :n] for y, n in zip(gathered(torch.nn.functional.pad(x, pad), call), lengths, strict=True)], dim=1
            )
            for x in (k, v)
        )
        p = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).softmax(-1)
        ctx.save_for_backward(q, k, v, p)
        ctx.call, ctx.cut, ctx.lengths = call, cut, lengths
        return torch.einsum("bhqk,bkhd->bqhd", p, v)

    @staticmethod
    def backward(ctx, dout):
        """With what is cut."""
        q, k, v, p = ctx.saved_tensors
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * ctx.call.scale
        both = [torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bqhd->bkhd", p, dout)]
        for x in both:
            dist.all_reduce(x, group=ctx.call.group)
        dk, dv = (ctx.cut(x, ctx.lengths)[ctx.call.rank] for x in both)
        return torch.einsum("bhqk,bkhd->bqhd", ds, k), dk, dv, None, None


def test_nan_of_rows_without_keys_is_no_running_maximum_of_0():
    """A case whose scores are far below 0 tells the two apart."""
    found = list(with_scores_far_below_0(case_of(size=2, key_lengths=(0,))))
    assert any(case.values == "large_scores" and case.problem.key_lengths is None for case in found)
