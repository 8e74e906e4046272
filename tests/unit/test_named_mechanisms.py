"""Mechanisms of attention written by hand, each on cases of its own: its cause explains the numbers, others do not."""

import functools
import itertools
import math
import threading
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from mechanisms import case_of, explaining, library, of_gradients, seen, where

from ringref.problem import Dilation, Problem
from ringref.sharding import PageTable, key_positions
from ringverify.cases.case import Case
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import Runner
from ringverify.diagnosis import reading, undefined
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.diagnose import diagnose
from ringverify.diagnosis.filling import FILLED
from ringverify.diagnosis.fitting import in_some_places
from ringverify.diagnosis.further_cases import _in_shape
from ringverify.diagnosis.gradients import adding, carrying, crossing, sinks
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.merging_branches import MERGED_BRANCHES
from ringverify.diagnosis.narrowing import NARROWED
from ringverify.diagnosis.poison import of_poison
from ringverify.diagnosis.rearranging import REARRANGED
from ringverify.diagnosis.rounding_digits import ROUNDED
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.substituting import SUBSTITUTED
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.catalogue import CAUSES, MUTANTS
from ringverify.faults.place import Block, Partial
from ringverify.faults.ring import EVERYTHING, PLAIN, STEPS, multiplicity, ring_of
from ringverify.implementation import Capabilities, Implementation
from ringverify.worlds.simulated import SimulatedWorld

LOCAL = Capabilities(
    world_sizes=(1,), causal="both", softcap=True, key_lengths=True, cross_lengths=True, scale=True,
    dilation=("shared", "split"),
)  # fmt: skip


# -- excluded pairs that count -----------------------------------------------------------------------------------------


def local_attention(q, k, v, call, *, fill=lambda s, cap: -math.inf, early=False, guard=True, late=False):
    """Attention of one rank; `early`: masked before the softcap, `late`: after the softmax."""
    p = call.problem
    i, j = torch.arange(p.nq)[:, None] + p.nk - p.nq, torch.arange(p.nk)
    mask = (j <= i) if call.causal else torch.ones(p.nq, p.nk, dtype=torch.bool)
    s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if early:
        s = s.masked_fill(~mask, -math.inf)
    s = s if call.softcap is None else call.softcap * torch.tanh(s / call.softcap)
    if not early and not late:
        s = torch.where(mask, s, fill(s, call.softcap))
    some = mask.any(-1, keepdim=True) | (not guard)
    weights = s.masked_fill(~some, 0.0).softmax(-1) * some
    return torch.einsum("bhqk,bkhd->bqhd", weights * mask if late else weights, v)


CROSS = (
    case_of(size=1, query_length=5, key_length=3, causal=True),
    case_of(size=1, causal=True, query_length=4, key_length=2),
)
SQUARE = case_of(size=1, query_length=4, causal=True), case_of(size=1, query_length=6, causal=True)
CAPPED = tuple(case_of(size=1, query_length=5, key_length=4, causal=True, softcap=cap) for cap in (1.0, 3.0))
FILLINGS = {
    "the mask is applied before the softcap: excluded keys have the score -softcap instead of -inf, except in rows "
    "without keys": (CAPPED, {"early": True}),
    "excluded keys have the score 0 instead of -inf": (SQUARE, {"fill": lambda s, cap: 0.0}),
    "a finite number stands for -inf: a row without keys is the mean over the values of all keys": (
        CROSS, {"fill": lambda s, cap: -1e30, "guard": False}
    ),
    "the mask is applied after the softmax, and what is left is not normalised": (SQUARE, {"late": True}),
    "the mask is added to the scores as 0 and 1": (SQUARE, {"fill": lambda s, cap: s - 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("words", FILLINGS)
@pytest.mark.parametrize("gradients", [False, True])
def test_what_becomes_of_excluded_pairs_is_told(words, gradients):
    """By out alone, and by gradients, which have no part that a mask cuts off."""
    cases, ways = FILLINGS[words]
    implementation = Implementation(functools.partial(local_attention, **ways), "filled", LOCAL)
    scenes, _ = seen(implementation, cases, gradients=gradients)
    found = explaining(FILLED, scenes)
    assert found[0] == words
    assert len({text.removesuffix(", except in rows without keys").split(", in blocks")[0] for text in found}) == 1


def by_branches(q, k, v, call, *, nothing=-math.inf, detached=False, equal=None):
    """Each branch of a shared dilation by itself, merged by log-sum-exps."""
    outs, lses = [], []
    i = torch.arange(call.problem.nk)
    for w, r in call.dilation.branches:
        heads = torch.arange(call.problem.heads)[:, None, None] % r
        there = (i[:, None] // w == i // w) & (i[:, None] % w % r == heads) & (i % w % r == heads)
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(~there, -math.inf)
        lse = s.logsumexp(-1)
        outs.append((s - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp() @ v.transpose(1, 2))
        lses.append(torch.where(lse == -math.inf, nothing, lse))
    weights = torch.stack(lses).detach() if detached else torch.stack(lses)
    weights = weights.masked_fill((weights == -math.inf).all(0), 0.0).softmax(0)
    if equal is not None:
        weights = equal(torch.stack(lses) > -math.inf)
    return (weights[..., None] * torch.stack(outs)).sum(0).transpose(1, 2)


SHARED = [
    case_of(size=1, query_length=8, head_dim=2, dilation=Dilation(branches=branches, heads="shared"))
    for branches in (((4, 2), (8, 1)), ((3, 1), (8, 3)))
]


def test_a_branch_that_covers_nothing_and_takes_weight_is_told():
    """As exp(0), which is what an lse that was filled with zeros gives."""
    implementation = Implementation(functools.partial(by_branches, nothing=0.0), "uncovered", LOCAL)
    for gradients in (False, True):
        scenes, _ = seen(implementation, SHARED, gradients=gradients)
        (text,) = explaining(FILLED, scenes)
        assert text.startswith("a branch of a dilation without keys for a query has lse 0")


EQUAL = {
    "the mean of those that cover it": lambda there: there / there.sum(0).clamp(min=1),
    "the mean of all, with 0 where one does not cover it": lambda there: there / 2,
    "their sum": lambda there: 1.0 * there,
}


@pytest.mark.parametrize("words", EQUAL)
def test_branches_that_are_merged_without_their_weights_are_told(words):
    """Each has a softmax of its own."""
    implementation = Implementation(functools.partial(by_branches, equal=EQUAL[words]), "equal", LOCAL)
    for gradients in (False, True):
        scenes, _ = seen(implementation, SHARED, gradients=gradients)
        assert explaining(MERGED_BRANCHES, scenes) == [
            f"branches of a dilation are merged with equal weights: out is {words}"
        ]


def test_weights_of_a_merge_that_have_no_gradient_are_told():
    """Of branches here; dq and dk lack what goes through the log-sum-exps."""
    implementation = Implementation(functools.partial(by_branches, detached=True), "detached", LOCAL)
    scenes, _ = seen(implementation, SHARED, gradients=True)
    words = "the weights with which {} are merged have no gradient: they are detached"
    told = explaining(of_gradients(scenes), scenes)
    assert words.format("branches of a dilation") in told
    assert words.format("blocks, and branches of a dilation in each,") in told  # there is one block


# -- heads and rows in other places ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "words"), [(0, "(rank, head) as (head, rank)"), (1, "(head, rank) as (rank, head)")])
def test_heads_of_results_in_another_order_are_told_by_gradients_too(way, words):
    """Gradients are those of the right attention with the cotangent's heads put back."""

    def attend(q, k, v, call):
        shape = (call.world_size, -1) if way == 0 else (-1, call.world_size)
        return PLAIN.function(q, k, v, call)[0][:, :, torch.arange(q.size(2)).reshape(shape).T.flatten()]

    only_out = replace(EVERYTHING, lse=False, lse_gradient=False)
    cases = case_of(heads=6, key_heads=2, size=2), case_of(heads=6, key_heads=2, query_length=9)
    for gradients in (False, True):
        scenes, _ = seen(Implementation(attend, "turned", only_out), cases, gradients=gradients)
        assert explaining(REARRANGED, scenes) == [f"results are read in the wrong order: heads {words}"]


def test_a_rank_that_reads_the_key_head_of_its_first_query_head_is_told():
    """Where its share of the heads has several key heads in part."""

    def attend(q, k, v, call):
        p = call.problem
        share = p.heads // call.world_size if p.hk % call.world_size else p.group_size
        read = [head // share * share // p.group_size for head in range(p.heads)]
        k, v = (gathered(x[:, :, read], call) for x in (k, v))
        weights = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    declared = Capabilities(causal="never", gqa=True, heads_multiple="world_size")
    wrong = [case_of(size=2, heads=6, key_heads=3), case_of(size=3, heads=12, key_heads=4)]
    scenes, _ = seen(Implementation(attend, "first", declared), [*wrong, case_of(heads=6, key_heads=3)], gradients=True)
    assert not wrong_tensors(scenes.pop())
    causes = [one for one in CAUSES if "reads the wrong key head" in one.sentence()]
    (text,) = explaining([Hypothesis(**vars(one)) for one in causes], scenes)
    assert "that of its rank's first query head" in text


@pytest.mark.parametrize("by_turns", [True, False])
def test_copies_of_key_heads_that_go_wrong_are_told(by_turns):
    """A key head that is repeated for its ranks: by turns instead of side by side, or with gradients of one copy."""

    def attend(q, k, v, call):
        times = math.lcm(k.size(2), call.world_size) // k.size(2)
        if by_turns:
            k, v = k.repeat(1, 1, times, 1), v.repeat(1, 1, times, 1)
        else:
            k, v = (torch.stack([x, *[x.detach()] * (times - 1)], dim=3).flatten(2, 3) for x in (k, v))
        share = q.size(2) // k.size(2)
        k, v = (gathered(x.repeat_interleave(share, dim=2), call) for x in (k, v))
        weights = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).softmax(-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, v)

    declared = Capabilities(causal="never", gqa=True, heads_multiple="world_size")
    cases = [
        case_of(size=4, heads=8, key_heads=2),
        case_of(size=2, heads=6, key_heads=1 if not by_turns else 3, query_length=6),
    ]
    scenes, _ = seen(Implementation(attend, "copies", declared), cases, gradients=not by_turns)
    words = "by turns" if by_turns else "first copy alone"
    causes = [Hypothesis(**vars(one)) for one in CAUSES if "key head" in one.sentence()]
    assert words in explaining(causes, scenes)[0]


class Gathered(torch.autograd.Function):
    """Shards of all ranks, in the order of ranks; their gradients are summed."""

    @staticmethod
    def forward(ctx, x, call):
        """Shards have one length."""
        ctx.call = call
        pieces = [torch.empty_like(x).contiguous() for _ in range(call.world_size)]
        dist.all_gather(pieces, x.contiguous(), group=call.group)
        return torch.cat(pieces, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        """The rank's own part of the sum."""
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.call.group)
        return total.chunk(ctx.call.world_size, dim=1)[ctx.call.rank].contiguous(), None


def gathered(x, call):
    """Keys, or values, of all ranks."""
    return Gathered.apply(x, call)


class Slices(torch.autograd.Function):
    """The identity, whose gradient is cut from the gathered one at rank times the rank's own length."""

    @staticmethod
    def forward(ctx, x, call):
        """As it is."""
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        """Shards differ in length."""
        call, total = ctx.call, ctx.call.problem.nk
        sizes = [len(range(rank, total, call.world_size)) for rank in range(call.world_size)]
        longest = torch.zeros(gradient.size(0), max(sizes), *gradient.shape[2:])
        longest[:, : gradient.size(1)] = gradient
        pieces = [torch.empty_like(longest) for _ in sizes]
        dist.all_gather(pieces, longest, group=call.group)
        whole = torch.cat([piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)], dim=1)
        return whole.narrow(1, call.rank * gradient.size(1), gradient.size(1)).contiguous(), None


def test_gradients_of_other_positions_are_told():
    """With shards of one length, they are right."""

    def attend(q, k, v, call):
        return PLAIN.function(q, Slices.apply(k, call), Slices.apply(v, call), call)[0]

    only_out = replace(EVERYTHING, lse=False, lse_gradient=False)
    cases = case_of(query_length=11), case_of(query_length=7, size=2)
    scenes, _ = seen(Implementation(attend, "slices", only_out), cases, gradients=True)
    assert explaining(of_gradients(scenes), scenes)[0] == (
        "the rows of dk and dv that are returned are those at positions counted from the rank times the rank's own "
        "number of rows"
    )


# -- what is added to gradients ----------------------------------------------------------------------------------------


def own_alone(steps, here, hop, owner, rows, block):
    """The cotangent of lse counts in the rank's own block only."""
    q, dout, delta, lse = rows
    delta = delta if hop == 0 else delta + here.notes["dlse"]
    return STEPS.gradients(steps, here, hop, owner, (q, dout, delta, lse), block)


def noted(here, name, x):
    """The cotangents, of which that of lse is remembered."""
    if name == "dlse":
        here.notes["dlse"] = x
    return x


def keeping(chosen):
    """The lse that is saved is that of some hops only."""

    def accumulate(steps, here, hop, running, new):
        if chosen(here, hop):
            here.notes["lse"] = torch.logaddexp(here.notes.get("lse", torch.full_like(new.lse, -math.inf)), new.lse)
        return STEPS.accumulate(steps, here, hop, running, new)

    return replace(STEPS, accumulate=accumulate, kept=lambda here, saved: (*saved[:4], here.notes["lse"]))


def fewer(here, dq, dk, dv):
    """Means over the copies of a key head instead of sums."""
    times = math.lcm(here.problem.hk, here.size) // here.problem.hk
    return dq, dk / times, dv / times


ADDED = {
    "on blocks of other ranks: the cotangent of lse in ds is missing": (
        replace(STEPS, gradients=own_alone, cotangent=noted),
        [case_of(cotangent="both"), case_of(size=2, cotangent="lse", query_length=9)],
    ),
    "the backward uses the lse of all blocks but that of the last hop instead of all": (
        keeping(lambda here, hop: hop < here.size - 1),
        [case_of(), case_of(size=2)],
    ),
    "the backward uses the lse of the rank's own block instead of all": (
        keeping(lambda here, hop: hop == 0),
        [case_of(size=4), case_of(size=2)],
    ),
    "what is added to dk and dv is divided by the number of times that a key head is repeated so that the ranks divide "
    "them": (
        replace(STEPS, returned_gradients=fewer),
        [case_of(size=size, heads=4, key_heads=2) for size in (4, 3)] + [case_of(size=2, heads=3, key_heads=1)],
    ),
    "on the block of the opposite rank, half way round an even number of ranks: what is added to dq and dk and dv "
    "counts twice": (
        replace(
            STEPS,
            times_in_dq=lambda here, hop, owner: 1 + (2 * hop == here.size),
            times_in_part=lambda here, hop, owner: (1 + (2 * hop == here.size),) * 2,
        ),
        [case_of(size=2), case_of(size=4), case_of()],
    ),
}


@pytest.mark.parametrize("words", ADDED)
def test_what_is_added_otherwise_is_told(words):
    """A factor that two numbers of ranks tell apart."""
    steps, cases = ADDED[words]
    scenes, _ = seen(Implementation(ring_of(steps), "added", EVERYTHING), cases, gradients=True)
    failing = [scene for scene in scenes if wrong_tensors(scene)]
    found = [one for one in of_gradients(failing) if all(one.explains(s) is not None for s in scenes)]
    assert found[0].sentence() == words


# -- what belongs to other rows, ranks and heads -----------------------------------------------------------------------


def test_what_the_backward_takes_of_other_rows_is_told():
    """The delta of a shard in reverse, on some blocks only."""

    def gradients(steps, here, hop, owner, rows, block):
        q, dout, delta, lse = rows
        return STEPS.gradients(
            steps, here, hop, owner, (q, dout, delta.flip(-1) if owner > here.rank else delta, lse), block
        )

    scenes, _ = seen(
        Implementation(ring_of(replace(STEPS, gradients=gradients)), "crossed", EVERYTHING),
        [case_of(cotangent="both"), case_of(cotangent="both", size=2, query_length=10)],
        gradients=True,
    )
    assert explaining(crossing.hypotheses(scenes), scenes) == [
        "on blocks of later ranks: the backward takes delta less the cotangent of lse of the rows in reverse"
    ]


def test_out_of_other_rows_in_delta_is_told():
    """It is not their delta: the cotangent is the row's own."""

    def gradients(steps, here, hop, owner, rows, block):
        q, dout, delta, lse = rows
        if owner <= here.rank:
            return STEPS.gradients(steps, here, hop, owner, rows, block)
        out = here.notes["out"]
        more = (dout * (out.flip(2) - out)).sum(-1)
        return STEPS.gradients(steps, here, hop, owner, (q, dout, delta + more, lse), block)

    def kept(here, saved):
        here.notes["out"] = saved[3]
        return saved

    scenes, _ = seen(
        Implementation(ring_of(replace(STEPS, gradients=gradients, kept=kept)), "crossed", EVERYTHING),
        [case_of(), case_of(size=2, query_length=10)],
        gradients=True,
    )
    words = "on blocks of later ranks: the backward takes out, in delta, of the rows in reverse"
    assert words in explaining(crossing.hypotheses(scenes), scenes)


def test_gradients_that_end_with_the_last_rank_of_a_chain_are_told():
    """What ranks on the way have added to those of a block is not passed on; a window ends the chain sooner."""

    def gradients(steps, here, hop, owner, rows, block):
        dq, of_block = STEPS.gradients(steps, here, hop, owner, rows, block)
        away = here.size - 1 if here.problem.window is None else 2
        last = min(owner + away, here.size - 1) if owner < here.rank else max(owner - away, 0)
        on_its_way = owner != here.rank and here.rank != last
        return dq, of_block._make(x * (not on_its_way) for x in of_block)

    cases = [case_of(size=4, query_length=12), case_of(size=5, query_length=15, window=(5, 5))]
    attend = Implementation(ring_of(replace(STEPS, gradients=gradients)), "chain", EVERYTHING)
    scenes, _ = seen(attend, cases, gradients=True)
    words = (
        "on blocks that go on to a rank further away on that side of the owner: what is added to dk and dv is missing"
    )
    assert words in explaining(adding.hypotheses(scenes), scenes)


class Everyone(torch.autograd.Function):
    """Keys or values of all ranks, whose gradients stay where they are computed."""

    @staticmethod
    def forward(ctx, x, call):
        """Shards of one length."""
        ctx.size = call.world_size
        found = [torch.empty_like(x) for _ in range(call.world_size)]
        dist.all_gather(found, x.contiguous(), group=call.group)
        return torch.cat(found, dim=1)

    @staticmethod
    def backward(ctx, gradient):
        """Row by row."""
        return sum(gradient.chunk(ctx.size, dim=1)), None


class ByTurns(torch.autograd.Function):
    """Heads repeated for groups, whose gradients are summed as if they were dealt out by turns."""

    @staticmethod
    def forward(ctx, x, group):
        """As it should be."""
        ctx.group = group
        return x.repeat_interleave(group, dim=2)

    @staticmethod
    def backward(ctx, gradient):
        """Head h goes to h mod key heads."""
        return gradient.unflatten(2, (ctx.group, -1)).sum(dim=2), None


@pytest.mark.parametrize(
    ("take", "says"),
    [
        (lambda x, call: Everyone.apply(x, call), "gradients of v stay on the rank that computes them"),
        (
            lambda x, call: ByTurns.apply(gathered(x, call), call.problem.group_size),
            "gradients of v of query head h are added to key head h mod key heads",
        ),
    ],
)
def test_gradients_that_arrive_elsewhere_are_told(take, says):
    """On another rank, or in another head."""

    def attend(q, k, v, call):
        v = take(v, call)
        k, v = (x.repeat_interleave(call.problem.heads // x.size(2), dim=2) for x in (gathered(k, call), v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)

    only_out = Capabilities(causal="never", gqa=True, scale=True)
    cases = case_of(heads=6, key_heads=2), case_of(heads=4, key_heads=2, size=2)
    scenes, _ = seen(Implementation(attend, "elsewhere", only_out), cases, gradients=True)
    assert explaining(carrying.hypotheses(scenes), scenes)[0] == says


class SentHome(Gathered):
    """As where k and v travel both ways, and what comes back of those that went left arrives a rank too far."""

    @staticmethod
    def backward(ctx, gradient):
        """On an even number of ranks."""
        size = ctx.call.world_size
        every = [torch.empty_like(gradient) for _ in range(size)]
        dist.all_gather(every, gradient.contiguous(), group=ctx.call.group)
        found = torch.zeros_like(gradient.chunk(size, dim=1)[0])
        for rank, owner in itertools.product(range(size), range(size)):
            too_far = size % 2 == 0 and (rank - owner) % size > size // 2
            if (owner + too_far) % size == ctx.call.rank:
                found += every[rank].chunk(size, dim=1)[owner]
        return found, None


def test_gradients_that_one_way_of_a_ring_brings_home_too_far_are_told():
    """As many hops as the other way has come."""

    def attend(q, k, v, call):
        k, v = (SentHome.apply(x, call) for x in (k, v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)

    cases = case_of(size=4), case_of(size=6)
    scenes, _ = seen(Implementation(attend, "both ways", Capabilities(causal="never")), cases, gradients=True)
    (says,) = {one for one in explaining(carrying.hypotheses(scenes), scenes) if "to the left" in one}
    assert says.startswith("gradients of k and v of blocks that travel to the left, in a ring both ways, are sent home")


def test_sums_over_a_group_that_are_multiplied_are_told():
    """Each head's weights meet every head's cotangents, in groups of two."""

    def dv(p, dout, attended):
        weights, cotangents = (x.unflatten(1, (-1, 2)).sum(2) for x in (p, dout))
        return (weights.mT @ cotangents / 2).repeat_interleave(2, dim=1)

    cases = case_of(heads=4, key_heads=2), case_of(heads=6, key_heads=3, size=2)
    attend = Implementation(ring_of(replace(STEPS, dv=dv)), "sums", EVERYTHING)
    scenes, _ = seen(attend, cases, gradients=True)
    words = "dv is made of the sums of weights and of cotangents of out over the heads of a group"
    assert any(one.startswith(words) for one in explaining(crossing.hypotheses(scenes), scenes))


def test_the_mask_and_the_rows_of_a_block_that_came_the_other_way_are_told():
    """Of blocks that differ in length."""

    def other_way(steps, here, hop, owner):
        other = here.shards[(here.rank + hop) % here.size]
        rows = torch.arange(len(here.shards[owner]))
        j = other[rows.clamp(max=len(other) - 1)]
        return ((j <= here.call.positions[:, None]) & (rows < len(other)))[None, None].long()

    cases = [case_of(size=size, query_length=n, causal=True) for size, n in ((4, 13), (3, 8))]
    steps = replace(STEPS, pattern=other_way)
    scenes, _ = seen(Implementation(ring_of(steps), "other way", EVERYTHING), cases, gradients=False)
    words = (
        "the block of hop h is masked as that of rank + h: the ring turns the other way, and has as many rows as that"
    )
    assert explaining(library(words), scenes) == [words]


# -- who attends whom --------------------------------------------------------------------------------------------------


def taken_for(condition, causal):
    """The causal mask of some blocks of other ranks, made by places."""

    def pattern(steps, here, hop, owner):
        if not condition(here.rank, owner):
            return multiplicity(steps, here, hop, owner)
        i, j = torch.arange(len(here.call.positions))[:, None], torch.arange(len(here.shards[owner]))[None]
        allowed = causal(i, j, (len(i) + 1) // 2).expand(len(i), j.size(1))
        return multiplicity(replace(steps, causal=lambda *_: allowed), here, hop, owner)

    return replace(STEPS, pattern=pattern)


def clamped(steps, here, hop, owner):
    """Every shard has one valid key at least."""

    def key_lengths(problem, j):
        return (j < torch.tensor(problem.key_lengths)[:, None, None, None]) | (j == here.shards[owner][:1])

    return multiplicity(replace(steps, key_lengths=key_lengths), here, hop, owner)


def level_with_valid_keys(steps, here, hop, owner):
    """The last query is level with the last valid key."""
    p = here.problem
    if p.key_lengths is None:
        return multiplicity(steps, here, hop, owner)
    found = []
    for length in p.key_lengths:
        back = p.nk - length

        def moved(of, back=back):
            return lambda problem, i, j: of(problem, i - back, j)

        found.append(
            multiplicity(replace(steps, causal=moved(STEPS.causal), window=moved(STEPS.window)), here, hop, owner)
        )
    return torch.stack([m[number] for number, m in enumerate(found)])


def begins_before(steps, here, hop, owner):
    """A tile of 4 keys of all that begins before the first of a tile of 4 queries of a rank is taken for past."""
    i, j = here.call.positions, here.shards[owner]
    past = j // 4 * 4 < i[torch.arange(len(i)) // 4 * 4][:, None]
    return multiplicity(replace(steps, causal=lambda *at: STEPS.causal(*at) | past), here, hop, owner)


def counting(times):
    """Blocks that count so often."""
    return replace(
        STEPS,
        pattern=lambda steps, here, hop, owner: multiplicity(steps, here, hop, owner) * int(times(here, hop, owner)),
    )


def in_rows(steps, here, hop, owner):
    """A window in rows of striped shards."""

    def window(problem, i, j):
        left, right = (side // here.size for side in problem.window)
        back = i // here.size - j // here.size
        return (back <= left) & (-back <= right)

    return multiplicity(replace(steps, window=window), here, hop, owner)


def first_of_each(steps, here, hop, owner, *, tile):
    """No tile of keys whose first one is hidden from every query of the rank."""
    found = multiplicity(steps, here, hop, owner)
    for begin in range(0, found.size(-1), tile):
        found[..., begin : begin + tile] *= bool(found[..., begin].any())
    return found


def of_the_first_entry(steps, here, hop, owner):
    """No tile of 3 keys of which the first batch entry attends nothing."""
    found = multiplicity(steps, here, hop, owner)
    for begin in range(0, found.size(-1), 3):
        found[..., begin : begin + 3] *= bool(found[0, ..., begin : begin + 3].any())
    return found


def before_an_empty_hop(steps, here, hop, owner, *, way=1):
    """Nothing once a block had nothing."""
    hops = range(way * hop % here.size)
    earlier = [multiplicity(steps, here, way * h % here.size, (here.rank - way * h) % here.size) for h in hops]
    return multiplicity(steps, here, hop, owner) * all(bool(m.any()) for m in earlier)


def given_of_one_segment(here, owner, i, j):
    """Of other ranks' keys, those of the segment of the first row that is covered, by a branch of offset 0."""
    if here.problem.dilation is None or owner == here.rank:
        return torch.ones(len(i), j.size(1), dtype=torch.bool)
    ((w, r),) = here.problem.dilation.branches
    covered = i[i % w % r == 0]
    return j // w == covered[:1] // w


def of_the_ends(positions, i, dilation):
    """Whether queries lie in the segment of the rank's first row, or of its last."""
    if dilation is None or not len(positions):
        return torch.ones_like(i, dtype=torch.bool)
    ((w, _),) = dilation.branches
    return (i // w == positions[0] // w) | (i // w == positions[-1] // w)


def for_all_entries(steps, here, hop, owner):
    """No block of which a batch entry attends nothing."""
    found = multiplicity(steps, here, hop, owner)
    return found * bool((found > 0).flatten(1).any(dim=1).all())


def neighbours(steps, here, hop, owner):
    """A document is taken to reach no farther than the next shard."""
    near = here.problem.documents is None or abs(owner - here.rank) < 2
    return multiplicity(steps, here, hop, owner) * near


def without_the_last_head_but_one(m, heads):
    """Of an odd number."""
    return m * ((torch.arange(heads) != heads - 2) | (heads % 2 == 0))[:, None, None]


def without_the_last_head(m, heads):
    """Heads are taken two at a time."""
    return m * (torch.arange(heads) < heads // 2 * 2)[:, None, None]


def numbered(documents, at):
    """The number of the document of a position; −1 outside."""
    bounds = torch.tensor(documents)
    found = torch.bucketize(torch.as_tensor(at), bounds, right=True) - 1
    return torch.where(found < len(bounds) - 1, found, -1)


def same_ends(here, owner, i, j):
    """A block is kept if its last key is in the document of the rank's first query."""
    documents = here.problem.documents
    return owner == here.rank or documents is None or numbered(documents, j[0, -1]) == numbered(documents, i[0, 0])


def tile_begins_earlier(here, owner, i, j):
    """A tile of 4 keys of a block is kept if it begins before the rank's last query."""
    return j[:, torch.arange(j.size(1)) // 4 * 4] < i[-1, 0] if here.problem.causal else True


def otherwise(constraint, of):
    """A constraint is made in another way."""
    return replace(STEPS, pattern=lambda steps, *at: multiplicity(replace(steps, **{constraint: of}), *at))


def zero_is_none(problem, i, j):
    """A side of a window that is 0 is taken for one that is not bounded."""
    left, right = problem.window
    return (j - i >= -(left or 99)) & (j - i <= (right or 99))


def behind_the_last(problem, i, j):
    """What is past the last document is one more document."""
    of_i, of_j = (torch.bucketize(x, torch.tensor(problem.documents), right=True) - 1 for x in (i, j))
    return (of_i == of_j) & (of_i >= 0)


def wrapped(steps, here, hop, owner):
    """A block of a later rank has positions before 0."""
    back = here.problem.nk * (owner > here.rank)
    return multiplicity(replace(steps, causal=lambda problem, i, j: j - back <= i), here, hop, owner)


def of_its_tile(i, *, last):
    """The last, or the first, position of the tile of 4 queries of each."""
    begins = torch.arange(len(i)) // 4 * 4
    return i[torch.clamp(begins + 3, max=len(i) - 1) if last else begins]


def up_to_the_first_ones_document(here, owner, i, j):
    """A tile's keys end where the document of its first query ends."""
    offsets = torch.tensor(here.problem.documents)
    number = torch.bucketize(of_its_tile(i, last=False), offsets, right=True)
    return j < offsets[torch.clamp(number, max=len(offsets) - 1)]


def placed_in_shards(steps, here, hop, owner):
    """Segments of a dilation are right, places in them are counted from the beginning of the shard."""
    w, r = here.problem.dilation.branches[0]
    (i, j), heads = (here.call.positions[:, None], here.shards[owner][None]), torch.arange(here.problem.heads)
    places = [x % w % r for x in (torch.arange(len(i))[:, None], torch.arange(j.size(1))[None])]
    through = [x == heads[:, None, None] % r for x in places]
    return ((i // w == j // w) & through[0] & through[1]).long()[None]


def offset_by_floor(steps, here, hop, owner):
    """Heads are dealt out to offsets in parts that are rounded down."""
    w, r = here.problem.dilation.branches[0]
    i, j = here.call.positions[:, None], here.shards[owner][None]
    offset = (torch.arange(here.problem.heads) // (here.problem.heads // r) % r)[:, None, None]
    return ((i // w == j // w) & (i % w % r == offset) & (j % w % r == offset)).long()[None]


def packed_by_heads(steps, here, hop, owner):
    """Row (head, query) of a group has the mask of the query with its number divided by the heads."""
    group, count = here.problem.group_size, len(here.call.positions)
    found = multiplicity(steps, here, hop, owner).expand(-1, here.problem.heads, -1, -1)
    rows = [(head % group * count + torch.arange(count)) // group for head in range(here.problem.heads)]
    return torch.stack([found[:, head, row] for head, row in enumerate(rows)], dim=1)


def beyond_the_shard(here, owner, i, j):
    """A document's keys after the rank's last query are there, and that query is level with the last of them."""
    offsets = torch.tensor(here.problem.documents or (0, here.problem.nk))
    number = torch.bucketize(i[:, 0], offsets, right=True) - 1
    last = torch.stack([i[:, 0][number == each].max() for each in number])[:, None]
    return j <= i + offsets[number + 1][:, None] - 1 - last


def level(steps, here, hop, owner, *, entered=False):
    """The causal mask of documents that go on beyond the shard, of those alone that began before it with `entered`."""
    i, j = here.call.positions[:, None], here.shards[owner][None]
    free = replace(steps, causal=lambda problem, i, j: torch.ones(len(i), j.size(-1), dtype=torch.bool))
    offsets = torch.tensor(here.problem.documents or (0, here.problem.nk))
    began_here = offsets[torch.bucketize(i[:, 0], offsets, right=True) - 1] >= i.min()
    allowed = beyond_the_shard(here, owner, i, j)
    allowed = torch.where(began_here[:, None] & entered, j <= i, allowed)
    return multiplicity(free, here, hop, owner) * allowed


def on_fewer_ranks(steps, here, hop, owner):
    """A segment is looked for on as many ranks as it has whole shards."""
    w, _ = here.problem.dilation.branches[0]
    j, size = here.shards[owner], len(here.shards[0])
    return multiplicity(steps, here, hop, owner) * (owner < j // w * w // size + max(1, w // size))


READ = {
    "the heads of a group are packed as rows, of which the mask takes row // heads of the group for the query": (
        replace(STEPS, pattern=packed_by_heads),
        [case_of(heads=4, key_heads=2, causal=True), case_of(heads=3, key_heads=1, size=2, causal=True)],
        [case_of(causal=True)],
    ),
    "the causal mask is made as if a rank's last query of a document, or of all, were level with its last key": (
        replace(STEPS, pattern=level),
        [case_of(causal=True), case_of(causal=True, size=2), case_of(causal=True, documents=(0, 5, 12))],
        [case_of(causal=True, size=1)],
    ),
    "the causal mask is made as if a rank's last query of a document, or of all, were level with its last key, where "
    "that began on an earlier rank": (
        replace(STEPS, pattern=functools.partial(level, entered=True)),
        [case_of(causal=True), case_of(causal=True, size=4), case_of(causal=True, documents=(0, 3, 12))],
        [case_of(causal=True, size=2), case_of(causal=True, documents=(0, 4, 12))],
    ),
    "a tile of 4 keys is skipped under a causal mask if it begins after the rank's last query, as if their first ones "
    "were level": (
        where(lambda here, owner, i, j: j // 4 * 4 <= here.call.positions[-1]),
        [case_of(causal=True, key_length=19), case_of(causal=True, key_length=14, size=2)], [case_of(causal=True)],
    ),
    "keys before a document are attended by its queries: only its end bounds": (
        otherwise("documents", lambda problem, i, j: numbered(problem.documents, j) <= numbered(problem.documents, i)),
        [case_of(documents=(0, 5, 12)), case_of(documents=(0, 2, 7, 12), size=2)], [case_of()],
    ),
    "every rank has key_lengths // ranks keys, and the others are padding": (
        where(lambda here, owner, i, j: torch.arange(j.size(1)) < here.problem.key_lengths[0] // here.size),
        [case_of(key_lengths=(7,), sharding="striped"), case_of(key_lengths=(11,), sharding="striped", size=2)],
        [case_of(key_lengths=(6,), sharding="striped")],
    ),
    "a segment is looked for on segment length // shard ranks from that of its beginning on, and what it has on later "
    "ones is left out": (
        replace(STEPS, pattern=on_fewer_ranks),
        [case_of(dilation=Dilation(((5, 1),), heads="shared")), case_of(dilation=Dilation(((7, 2),), heads="shared"))],
        [case_of(dilation=Dilation(((4, 1),), heads="shared"))],
    ),
    "a tile of 4 queries of a shard attends no key after the end of the document of its first query": (
        where(up_to_the_first_ones_document),
        [case_of(documents=(0, 5, 12), causal=True), case_of(documents=(1, 2, 7, 11), causal=True, size=2)],
        [case_of(documents=(0, 4, 12))],
    ),
    "a tile of 4 queries of a shard attends no key at the end of the window of its last query, which is taken for one "
    "past it": (
        where(lambda here, owner, i, j: j < of_its_tile(i, last=True) + here.problem.window[1]),
        [case_of(window=(3, 1)), case_of(window=(2, 2), size=2)], [case_of(window=(3, 12))],
    ),
    "a rank's keys are split into 3 parts of keys // 3 each, and the rest is left out": (
        where(lambda here, owner, i, j: torch.arange(j.size(1)) < max(1, j.size(1) // 3) * 3),
        [case_of(query_length=12), case_of(query_length=10, size=2)], [case_of(query_length=12, size=4)],
    ),
    "the offset of head h in a dilation is h // (H // r) mod r, where H / r is no whole number": (
        replace(STEPS, pattern=offset_by_floor),
        [case_of(heads=3, dilation=Dilation(((6, 2),), heads="shared", head_offset="block")),
         case_of(heads=5, size=2, dilation=Dilation(((5, 3),), heads="shared", head_offset="block"))],
        [case_of(heads=4, dilation=Dilation(((6, 2),), heads="shared", head_offset="block"))],
    ),
    "places in segments of a dilation are counted from the beginning of the shard, not of the segment": (
        replace(STEPS, pattern=placed_in_shards),
        [case_of(dilation=Dilation(((6, 3),), heads="shared")), case_of(dilation=Dilation(((5, 2),), heads="shared"))],
        [case_of(size=1, dilation=Dilation(((12, 2),), heads="shared"))],
    ),
    "a block is skipped unless its last key's document is that of the rank's first query, but never a rank's own": (
        where(same_ends),
        [case_of(documents=(1, 12)), case_of(documents=(0, 3, 12)), case_of(documents=(3, 11), size=5)],
        [case_of(), case_of(documents=(0, 4, 8, 12)), case_of(documents=(3, 5, 11))],
    ),
    "a tile of 4 keys of a shard is skipped under a causal mask if its first key is level with the rank's last query": (
        where(tile_begins_earlier),
        [case_of(causal=True, query_length=15), case_of(causal=True, query_length=10, size=2)],
        [case_of(), case_of(causal=True), case_of(causal=True, query_length=9)],
    ),
    "a window that is 0 on the left or on the right is not bounded there": (
        otherwise("window", zero_is_none), [case_of(window=(0, 2)), case_of(window=(3, 0)), case_of(window=(0, 0))],
        [case_of(window=(2, 1)), case_of()],
    ),
    "positions after the last document attend each other": (
        otherwise("documents", behind_the_last), [case_of(documents=(2, 5)), case_of(documents=(0, 3, 9), size=2)],
        [case_of(documents=(2, 12)), case_of()],
    ),
    "keys of blocks that have wrapped around the ring are taken for keys before the first": (
        replace(STEPS, pattern=wrapped),
        [case_of(causal=True), case_of(causal=True, size=2), case_of(causal=True, size=4, query_length=16)],
        [case_of(), case_of(causal=True, size=1)],
    ),
    "in heads of a last key head that has no partner: keys that the mask allows are not attended": (
        replace(STEPS, pattern=lambda steps, here, hop, owner: without_the_last_head(
            multiplicity(steps, here, hop, owner), here.problem.heads)),
        [case_of(heads=3), case_of(heads=5, size=2)], [case_of(), case_of(heads=4)],
    ),
    "in heads of the last key head but one, of an odd number of them: keys that the mask allows are not attended": (
        replace(STEPS, pattern=lambda steps, here, hop, owner: without_the_last_head_but_one(
            multiplicity(steps, here, hop, owner), here.problem.heads)),
        [case_of(heads=3), case_of(heads=5, size=2)], [case_of(), case_of(heads=4)],
    ),
    "partial results are merged two by two, by rank, and an odd one that is left over is dropped": (
        counting(lambda here, hop, owner: owner < (2 if here.size < 4 else 4)),
        [case_of(), case_of(size=5, query_length=10)], [case_of(size=2), case_of(size=4)],
    ),
    "partial results are merged two by two, by rank, one of each half, and an odd one that is left over is dropped": (
        counting(lambda here, hop, owner: owner in {2: (0, 1), 3: (0, 1), 6: (0, 1, 3, 4)}[here.size]),
        [case_of(), case_of(size=6)], [case_of(size=2)],
    ),
    "a tile of 3 keys of a shard is skipped if no query of the rank attends its first key": (
        replace(STEPS, pattern=functools.partial(first_of_each, tile=3)),
        [case_of(causal=True, window=(2, 0)), case_of(causal=True, window=(4, 0), query_length=15, size=2)],
        [case_of(causal=True), case_of()],
    ),
    "a block is skipped if it comes after one of which the rank attends nothing, hop by hop": (
        replace(STEPS, pattern=before_an_empty_hop),
        [case_of(window=(0, 2)), case_of(query_length=2), case_of(documents=(0, 2, 9, 12), size=4)],
        [case_of(), case_of(causal=True), case_of(window=(3, 0))],
    ),
    "a block is skipped if it comes after one of which the rank attends nothing, hop by hop, in a ring that sends to "
    "the left": (
        replace(STEPS, pattern=functools.partial(before_an_empty_hop, way=-1)),
        [case_of(window=(2, 0)), case_of(query_length=2), case_of(documents=(0, 2, 9, 12), size=4)],
        [case_of(), case_of(window=(0, 3))],
    ),
    "a rank asks for the segments of a dilation in which its first and its last row lie, not for those between": (
        where(lambda here, owner, i, j: of_the_ends(here.call.positions, i, here.problem.dilation)),
        [case_of(size=2, dilation=Dilation(((2, 1),), heads="split")),
         case_of(size=1, query_length=10, dilation=Dilation(((3, 2),), heads="split")),
         case_of(size=2, query_length=16, sharding="striped", dilation=Dilation(((4, 2),), heads="split"))],
        [case_of(dilation=Dilation(((6, 2),), heads="split")), case_of()],
    ),
    "of other ranks' keys, a rank is given those of the segment of its first row that a branch of the dilation covers, "
    "and none of other segments": (
        where(lambda here, owner, i, j: given_of_one_segment(here, owner, i, j)),
        [case_of(dilation=Dilation(((3, 1),), heads="split"), query_length=13),
         case_of(size=2, dilation=Dilation(((4, 2),), heads="split"), query_length=14)],
        [case_of(dilation=Dilation(((4, 2),), heads="split")), case_of()],
    ),
    "a tile of 3 keys of a shard is skipped in all batch entries if in the first no query of the rank attends it": (
        replace(STEPS, pattern=of_the_first_entry),
        [case_of(batch=2, key_lengths=(3, 12)), case_of(batch=2, key_lengths=(0, 14), query_length=14, size=2)],
        [case_of(batch=2, key_lengths=(12, 5)), case_of(key_lengths=(5,))],
    ),
    "partial results are exchanged in rounds, with rank XOR 1, 2, 4, …: right only for 2, 4, 8, … ranks": (
        counting(lambda here, hop, owner: here.size != 3 or here.rank != 1 or owner < 2),
        [case_of(), case_of(seed=2, query_length=14)], [case_of(size=2), case_of(size=4)],
    ),
    "each batch entry is masked by the largest of all key lengths": (
        replace(STEPS, key_lengths=lambda problem, j: (j < max(problem.key_lengths)).expand(problem.batch, 1, 1, -1)),
        [case_of(batch=2, key_lengths=(3, 9)), case_of(batch=3, key_lengths=(7, 12, 5), size=2)], [case_of(batch=2)],
    ),
    "the causal mask is made with cross lengths aligned by the numbers of queries and keys of a rank and of the block "
    "instead of all": (
        replace(STEPS, queries=lambda here: here.call.positions - here.problem.diagonal
                + len(here.shards[here.rank]) - len(here.call.positions)),
        [case_of(causal=True, key_length=18), case_of(causal=True, key_length=20, size=2)], [case_of(causal=True)],
    ),
    "both ends of the window are laid in rows of a striped shard, at the distance divided by the number of ranks "
    "and rounded down": (
        replace(STEPS, pattern=in_rows),
        [case_of(window=(3, 1), sharding="striped"), case_of(window=(4, 5), sharding="striped", size=4)],
        [case_of(window=(3, 1), size=1)],
    ),
    "a block is skipped in all if it holds no key to attend in one batch entry": (
        replace(STEPS, pattern=for_all_entries),
        [case_of(batch=2, key_lengths=(4, 12)), case_of(batch=2, key_lengths=(12, 5), size=2)], [case_of(batch=2)],
    ),
    "a block is skipped under a causal mask as if the first query and the first key were level": (
        counting(lambda here, hop, owner: here.shards[owner][0] <= here.call.positions[-1]),
        [case_of(causal=True, key_length=20), case_of(causal=True, key_length=16, size=2)], [case_of(causal=True)],
    ),
    "on blocks of later ranks that are more than left // shard, rounded up, away: keys that the mask allows are not "
    "attended": (
        counting(lambda here, hop, owner: owner - here.rank <= -(-here.problem.window[0] // 4)),
        [case_of(window=(1, 12), size=4, query_length=16), case_of(window=(0, 6))],
        [case_of(window=(8, 8))],
    ),
    "on blocks that are further away than the window reaches in whole shards: keys that the mask allows are not "
    "attended": (
        counting(lambda here, hop, owner: -(here.problem.window[0] // 4) <= owner - here.rank
                 <= here.problem.window[1] // 4),
        [case_of(window=(1, 1)), case_of(window=(2, 5), size=4, query_length=16)], [case_of(window=(4, 4))],
    ),
    "the causal mask is made with keys at positions counted from the owner times the number of keys of the rank in "
    "hand": (
        replace(STEPS, keys=lambda here, hop, owner: (
            owner * len(here.shards[here.rank]) + torch.arange(len(here.shards[owner])))),
        [case_of(causal=True, query_length=11), case_of(causal=True, query_length=13)], [case_of(causal=True)],
    ),
    "the causal mask is made with keys at positions of the rank's own keys less the hop times their number": (
        replace(STEPS, keys=lambda here, hop, owner: (
            (here.shards[here.rank] - hop * len(here.shards[here.rank])) % here.problem.nk)),
        [case_of(causal=True, sharding="zigzag"), case_of(causal=True, sharding="zigzag", size=2)],
        [case_of(causal=True)],
    ),
    "on the block of rank 0 on other ranks: the causal mask is made as if the block were that of a later rank": (
        taken_for(lambda rank, owner: owner == 0 < rank, lambda i, j, half: i + 0 * j >= half),
        [case_of(causal=True, sharding="zigzag"), case_of(causal=True, sharding="zigzag", size=4, query_length=16)],
        [],
    ),
    "on blocks of other ranks: the causal mask is made as if the block were that of a later rank": (
        taken_for(lambda rank, owner: owner != rank, lambda i, j, half: j < i),
        [case_of(causal=True, sharding="striped"), case_of(causal=True, sharding="striped", size=2)],
        [],
    ),
    "the causal mask and the window are aligned to key_lengths instead of the number of keys": (
        replace(STEPS, pattern=level_with_valid_keys),
        [case_of(causal=True, batch=2, key_lengths=(9, 4)), case_of(window=(3, 2), key_lengths=(7,), key_length=14)],
        [case_of(causal=True), case_of(causal=True, key_lengths=(12,)), case_of(key_lengths=(5,))],
    ),
    "for keys past the last whole tile of 4 of all: keys that the mask allows are not attended": (
        where(lambda here, owner, i, j: j < here.problem.nk // 4 * 4),
        [case_of(query_length=14), case_of(query_length=9, size=2), case_of(query_length=3, size=1)],
        [case_of(), case_of(query_length=8, size=4)],
    ),
    "a tile of 4 keys that begins before the first query of a tile of 4 queries has no causal mask": (
        replace(STEPS, pattern=begins_before),
        [case_of(causal=True, query_length=15), case_of(causal=True, query_length=10, size=2)],
        [case_of(causal=True), case_of(causal=True, query_length=8, size=2), case_of(query_length=15)],
    ),
    "a block is skipped if its first key is the last in the window of the rank's last query": (
        where(lambda here, owner, i, j: j[0, 0] != i[-1, 0] + (here.problem.window or (0, 99))[1]),
        [case_of(window=(2, 5)), case_of(window=(1, 1), size=2, query_length=8), case_of(window=(3, 1), size=4)],
        [case_of(window=(2, 2)), case_of()],
    ),
    "a shard of queries attends no key after the end of the keys of its first query": (
        where(lambda here, owner, i, j: j <= i[0, 0] + (here.problem.window or (0, 99))[1]),
        [case_of(window=(2, 3)), case_of(window=(9, 1), size=2, query_length=8)],
        [case_of(), case_of(window=(3, None))],
    ),
    "for keys in the first row of a shard: key_lengths ignored": (
        replace(STEPS, pattern=clamped),
        [case_of(batch=2, key_lengths=(3, 12)), case_of(batch=2, key_lengths=(0, 5), size=2)],
        [case_of()],
    ),
    "on blocks of ranks more than one apart, with documents: keys that the mask allows are not attended": (
        replace(STEPS, pattern=neighbours),
        [case_of(documents=(0, 12)), case_of(documents=(0, 3, 16), size=4, query_length=16)],
        [case_of(), case_of(size=4), case_of(documents=(0, 4, 8, 12))],
    ),
}  # fmt: skip


def key_tile(j, *, last):
    """The last, or the first, position of the tile of 4 keys of each."""
    at = torch.arange(j.size(1)) // 4 * 4
    return j[:, torch.clamp(at + 3, max=j.size(1) - 1) if last else at]


def before_the_last_window(here, owner, i, j):
    """A tile of keys is kept if its last one lies in the window of the rank's last query."""
    left = None if here.problem.window is None else here.problem.window[0]
    return True if left is None else key_tile(j, last=True) >= i[-1, 0] - left


def level_with_the_end(here, owner, i, j):
    """A tile of keys is kept if its first one lies before the end of the window of the last query of a tile."""
    right = None if here.problem.window is None else here.problem.window[1]
    return True if right is None else key_tile(j, last=False) < of_its_tile(i, last=True) + right


def by_tile(steps, here, hop, owner):
    """A window excludes whole tiles of 4 queries and 4 keys, where there are documents."""
    p, i, j = here.problem, here.call.positions[:, None], here.shards[owner][None]
    if p.window is None or p.documents is None:
        return multiplicity(steps, here, hop, owner)
    left, right = p.window
    inside = (key_tile(j, last=True) >= of_its_tile(i, last=False) - left) & (
        key_tile(j, last=False) <= of_its_tile(i, last=True) + right
    )
    return multiplicity(replace(steps, window=lambda problem, i, j: i == i + 0 * j), here, hop, owner) * inside


def own_documents(steps, here, hop, owner):
    """The document of a visiting key is that of the rank's own position in its row, striped."""
    rows = here.rank + here.size * torch.arange(len(here.shards[owner]))

    def documents(problem, i, j):
        offsets = torch.tensor(problem.documents)
        of_i, of_j = (torch.bucketize(x, offsets, right=True) for x in (here.call.positions[:, None], rows[None]))
        return (of_i == of_j) & (of_i > 0) & (of_i < len(offsets))

    return multiplicity(replace(steps, documents=documents), here, hop, owner)


def by_key_heads(steps, here, hop, owner):
    """Offsets are those of key heads, which all heads of a group have."""
    p = here.problem
    of_keys = replace(here, call=replace(here.call, problem=p.replace(heads=p.hk, key_heads=None)))
    few = multiplicity(steps, of_keys, hop, owner)
    return few.repeat_interleave(p.group_size, dim=1)


BY_TILE = {
    "a tile of 4 keys is held against all queries of a rank, and is skipped if its last key lies before the window of "
    "its last query": (
        where(before_the_last_window),
        [case_of(window=(2, 3), query_length=15), case_of(window=(1, None), size=2, query_length=14)],
        [case_of(), case_of(window=(None, 2))],
    ),
    "a tile of 4 queries and 4 keys is skipped if its first key lies after the window of its last query, or level with "
    "its end": (
        where(level_with_the_end),
        [case_of(window=(2, 0), query_length=15), case_of(window=(9, 1), size=2, query_length=20)],
        [case_of(), case_of(window=(2, None)), case_of(window=(2, 3), query_length=15)],
    ),
    "where there are documents, the window only skips tiles of 4 queries and 4 keys: what is left of them is whole": (
        replace(STEPS, pattern=by_tile),
        [case_of(window=(1, 1), documents=(0, 15), query_length=15),
         case_of(window=(0, 2), documents=(0, 5, 20), size=2, query_length=20)],
        [case_of(), case_of(window=(1, 1)), case_of(documents=(0, 7, 12))],
    ),
    "documents are told apart as if the block were that of rank (its own rank) mod ranks": (
        replace(STEPS, pattern=own_documents),
        [case_of(sharding="striped", documents=(0, 4, 11), query_length=11),
         case_of(sharding="striped", documents=(0, 3, 8), query_length=8, size=2)],
        [case_of(sharding="striped", documents=(0, 6, 12))],
    ),
    "the offset of head h in a dilation is that of its key head among key heads": (
        replace(STEPS, pattern=by_key_heads),
        [case_of(heads=6, key_heads=3, dilation=Dilation(((6, 2),), heads="shared", head_offset="block")),
         case_of(heads=4, key_heads=2, dilation=Dilation(((6, 3),), heads="shared"), size=2)],
        [case_of(heads=4, dilation=Dilation(((6, 2),), heads="shared"))],
    ),
}  # fmt: skip
READ |= BY_TILE


@pytest.mark.parametrize("words", READ)
@pytest.mark.by_day(6)
def test_what_is_read_of_a_mask_is_told(words):
    """The first rule that predicts the numbers of all cases, right ones included."""
    steps, cases, right = READ[words]
    scenes, probe = seen(Implementation(ring_of(steps), "read", EVERYTHING), [*cases, *right], gradients=False)
    found = [
        one.sentence()
        for one in reading.hypotheses(scenes, probe, lambda: 1)
        if all(one.explains(s) is not None for s in scenes)
    ]
    assert found[0] == words


@pytest.mark.nightly
def test_a_right_case_of_another_sharding_limits_no_rule():
    """Where shards are striped other code may run: that it is right is no reason to limit the rule to other rows."""

    def keys(here, hop, owner):
        own = here.shards[owner]
        if here.call.sharding == "striped":
            return own
        return owner * len(here.shards[here.rank]) + torch.arange(len(own))

    implementation = Implementation(ring_of(replace(STEPS, keys=keys)), "own", EVERYTHING)
    runner = Runner(implementation, SimulatedWorld())
    cases = [case_of(causal=True, query_length=5, size=2, heads=1, head_dim=1, values="integers")]
    cases.append(case_of(causal=True, query_length=25, size=8, heads=4))
    found = diagnose(
        lambda c: runner.run(c, gradients=False), cases, implementation.capabilities,
        probe=lambda case, inputs: runner.run(case, gradients=False, inputs=inputs),
    )  # fmt: skip
    says = "made with keys at positions counted from the owner times the number of keys of the rank in hand"
    assert found.text.split(" (residual")[0] in (f"the causal mask is {says}", f"the mask is {says}")


# -- by the library ----------------------------------------------------------------------------------------------------


def exchanged(steps, here, hop, owner, q, block):
    """What was sent as k, v is received as v, k."""
    return STEPS.attend(steps, here, hop, owner, q, Block(block.v, block.k) if hop % 2 else block)


def from_both_sides(here, every):
    """Blocks from the left and from the right in turn."""
    return sorted(every, key=lambda visit: min(2 * visit[0], 2 * (here.size - visit[0]) + 1))


STALE = next(cause for cause in CAUSES if cause.says == "the merged lse is the earlier one: it is never updated").steps
BY_HEART = {
    "keys and values of a block are exchanged, at odd hops only": (
        replace(STEPS, attend=exchanged), case_of(size=4, query_length=8)
    ),
    "the merged lse is the earlier one: it is never updated, where the order of blocks is one from the left, one from "
    "the right": (replace(STALE, order=from_both_sides), case_of(size=5, query_length=10)),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("words", BY_HEART)
@pytest.mark.by_day(1)
def test_a_mechanism_of_blocks_is_named(words):
    """From all that is known."""
    steps, case = BY_HEART[words]
    only_out = replace(EVERYTHING, lse=False, lse_gradient=False, gradients=False)
    attend = ring_of(steps)
    runner = Runner(Implementation(lambda *x: attend(*x)[0], "blocks", only_out), SimulatedWorld())
    # What is found does not depend on how quick this machine is.
    found = diagnose(lambda c: runner.run(c, gradients=False), [case, case], only_out, seconds=40)
    assert found.text.split(" (residual")[0] == words


@pytest.mark.parametrize(("empty", "says"), [(1.0, "are empty"), (0.0, "are 0 / 0")])
def test_a_running_maximum_that_begins_at_0_is_told_where_exp_underflows(empty, says):
    """In the dtype of the sums, which is why a prediction in float64 would not show it."""

    def attend(q, k, v, call):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        w = (s - s.amax(-1, keepdim=True).clamp(min=0.0)).exp()
        total = w.sum(-1, keepdim=True)
        return torch.einsum("bhqk,bkhd->bqhd", w / torch.where(total == 0, empty, total), v)

    case = case_of(size=1, query_length=1, heads=1)
    x = make_inputs(case)
    low = case.replace(scale=-150 / float((x.q * x.k).sum()))
    declared = replace(LOCAL, causal="never", negative_scale=True)
    scenes, _ = seen(Implementation(attend, "from 0", declared), [low], gradients=False)
    causes = [one for one in CAUSES if one.sentence().startswith("the running maximum begins at 0")]
    found = explaining([Hypothesis(**vars(one)) for one in causes], scenes)
    assert found[0] == f"the running maximum begins at 0: rows whose scores lie far below it {says}"


def test_split_heads_that_are_left_over_go_to_one_branch_however_few_there_are():
    """With fewer heads than branches, all of them are left over."""
    (cause,) = (
        one for one in CAUSES if one.sentence() == "split heads: heads that are left over all go to the last branch"
    )
    of = {
        heads: cause.steps.branches(case_of(heads=heads, dilation=Dilation(((6, 1), (4, 2)))).problem)
        for heads in (1, 3)
    }
    assert of == {1: [[(4, 2, 1)]], 3: [[(6, 1, 0)], [(4, 2, 1)], [(4, 2, 1)]]}


def test_cases_that_tell_hypotheses_apart_have_equal_shards_where_others_are_not_declared():
    """So that four ranks are asked for as well: two agree on what is opposite and what is next."""
    even = replace(EVERYTHING, uneven=False)
    asked = case_of(size=4, query_length=14, causal=True)
    assert _in_shape(asked, even).problem.nq == 16
    assert _in_shape(replace(asked, sharding="zigzag"), even).problem.nq == 16
    assert _in_shape(asked, EVERYTHING) == asked


# -- what is not left out ----------------------------------------------------------------------------------------------


def over_padding(q, k, v, call, *, added=False, clear=(), found=lambda gone, call: gone):
    """Attention of one rank whose weights of padding are 0; `added`: their scores are not replaced."""
    gone = torch.arange(k.size(1)) >= torch.tensor(call.key_lengths)[:, None]
    cleared = found(gone, call)[..., None, None]
    k, v = (x.masked_fill(cleared, 0.0) if n in clear else x for n, x in (("k", k), ("v", v)))
    s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    hidden = gone[:, None, None]
    s = s + torch.where(hidden, -math.inf, 0.0) if added else s.masked_fill(hidden, -math.inf)
    return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"clear": "k"}, "values that no query attends are multiplied by a weight of 0"),
        ({}, "keys and values that no query attends are multiplied by a weight of 0"),
        ({"clear": "v"}, "keys that no query attends are multiplied by a weight of 0"),
        ({"added": True, "clear": "v"}, "keys that no query attends are left out by arithmetic"),
        ({"clear": "kv"}, None),
    ],
)
def test_the_way_of_nan_from_padding_is_told(how, says):
    """By which of keys and values it takes, where all is right without it."""
    attend = functools.partial(over_padding, **how)
    runner = Runner(Implementation(attend, "padding", replace(LOCAL, causal="never")), SimulatedWorld())
    case = case_of(size=1, key_lengths=(7,), values="poisoned")
    found = of_poison(case, runner.capabilities, lambda case, x: runner.run(case, gradients=True, inputs=x))
    assert found is None if says is None else found.startswith(says)
    plain = case.replace(values="normal")
    assert of_poison(plain, runner.capabilities, lambda case, x: runner.run(case, gradients=True, inputs=x)) is None


@pytest.mark.parametrize(
    ("found", "rule"),
    [
        (lambda gone, call: gone & (torch.arange(gone.size(1)) >= max(call.key_lengths)), "as if the longest of"),
        (
            lambda gone, call: gone & (torch.arange(gone.size(1)) >= call.key_lengths[0]),
            "as if the length of the first",
        ),
        (lambda gone, call: gone & gone.roll(1, dims=1), "from the second position past them on"),
        (lambda gone, call: gone & False, None),
    ],
)
def test_which_padding_is_left_is_told(found, rule):
    """By NaN in one value alone, in the case and in others that fail, with shorter lengths."""
    attend = functools.partial(over_padding, clear="kv", found=found)
    runner = Runner(Implementation(attend, "padding", replace(LOCAL, causal="never")), SimulatedWorld())
    case = case_of(size=1, batch=3, query_length=5, key_lengths=(3, 4, 2), values="poisoned")

    def probe(case, inputs):
        return runner.run(case, gradients=True, inputs=inputs)

    told = of_poison(case, runner.capabilities, probe, [case])
    assert told.startswith(f"keys and values past key_lengths are replaced {rule}") is (rule is not None)
    assert told.endswith(
        "keys and values that no query attends are multiplied by a weight of 0, not left out: 0 times NaN is NaN"
    )


def test_padding_that_counts_as_zeros_is_read_of_the_log_sum_exp():
    """Cleared keys and values: no weight of a key tells, but that of all together does."""

    def attend(q, k, v, call):
        j = torch.arange(k.size(1))
        gone = call.key_positions >= torch.tensor(call.key_lengths)[:, None]
        k, v = (x.masked_fill(gone[..., None, None], 0.0) for x in (k, v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        s = s.masked_fill((j >= torch.tensor(call.key_lengths)[:, None])[:, None, None], -math.inf)
        lses = [torch.empty_like(x) for _ in range(call.world_size) for x in (s.logsumexp(-1),)]
        dist.all_gather(lses, s.logsumexp(-1), group=call.group)
        lse = torch.stack(lses).logsumexp(0)
        out = torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v)
        dist.all_reduce(out, group=call.group)
        return out, lse

    declared = Capabilities(sharding="replicated_query", key_lengths=True, lse=True, gradients=False, causal="never")
    cases = [case_of(size=2, sharding="replicated_query", key_lengths=(n,)) for n in (4, 3, 8)]
    scenes, probe = seen(Implementation(attend, "padded", declared), cases, gradients=False)
    found = reading.hypotheses(scenes, probe, lambda: 1)
    assert explaining(found, scenes)[0] == (
        "key_lengths are compared with keys at positions counted from the beginning of the shard"
    )


def test_padding_of_tiles_is_read_of_the_log_sum_exp():
    """Keys and values of 0 behind a shard, up to a multiple of 4."""

    def attend(q, k, v, call):
        k, v = (torch.cat([x, x.new_zeros(x.size(0), -x.size(1) % 4, *x.shape[2:])], dim=1) for x in (k, v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)

    declared = replace(LOCAL, causal="never", lse=True, gradients=False)
    cases = [case_of(size=1, query_length=n) for n in (5, 7)]
    scenes, probe = seen(Implementation(attend, "padded", declared), cases, gradients=False)
    found = explaining(reading.hypotheses(scenes, probe, lambda: 1), scenes)
    assert found[0] == "blocks are padded to whole tiles of 4 keys, and the padding counts as keys of 0"


@pytest.mark.parametrize(("causal_too", "says"), [(True, ""), (False, ", where nothing is causal")])
def test_padding_of_all_keys_is_read_of_the_log_sum_exp(causal_too, says):
    """Of those of all ranks together, up to a multiple of 4."""

    def attend(q, k, v, call):
        whole = [[torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v)]
        for into, x in zip(whole, (k, v), strict=True):
            dist.all_gather(into, x, group=call.group)
        k, v = (torch.cat(x, dim=1) for x in whole)
        n = k.size(1)
        k, v = (torch.cat([x, x.new_zeros(x.size(0), -n % 4, *x.shape[2:])], dim=1) for x in (k, v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        if call.causal:
            j = torch.arange(k.size(1))
            s = s.masked_fill((j > call.positions[:, None]) & ((j < n) | (not causal_too)), -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)

    declared = Capabilities(sharding="contiguous", causal="both", lse=True, gradients=False)
    wrong = [case_of(query_length=15), case_of(size=2, query_length=14)]
    causal = case_of(query_length=9, causal=True)
    scenes, probe = seen(Implementation(attend, "padded", declared), [*wrong, causal], gradients=False)
    assert bool(wrong_tensors(scenes[-1])) == causal_too
    found = [one.sentence() for one in reading.hypotheses(scenes, probe, lambda: 1)
             if all(one.explains(scene) is not None for scene in scenes)]  # fmt: skip
    assert f"all keys are padded to whole tiles of 4, and the padding counts as keys of 0{says}" in found


def of_all_ranks(s, v, call):
    """Out and lse of queries that every rank has, of the scores of its own keys."""
    lses = [torch.empty_like(s[..., 0]) for _ in range(call.world_size)]
    dist.all_gather(lses, s.logsumexp(-1), group=call.group)
    lse = torch.stack(lses).logsumexp(0)
    out = torch.einsum("bhqk,bkhd->bqhd", (s - lse.clamp(min=-1e9)[..., None]).exp(), v)
    dist.all_reduce(out, group=call.group)
    return out, lse


def test_pages_that_are_all_taken_for_full_are_told():
    """A page that is short, or not yet in use, comes before another one in the list of its rank."""

    def attend(q, k, v, call):
        size, pages = call.page_table.page_size, call.page_table.pages[call.rank]
        j = torch.tensor([page * size + row for page in pages for row in range(size)])[: k.size(1)]
        i = call.positions[:, None] + call.problem.diagonal
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        s = s.masked_fill(j[None] > i, -math.inf)
        return of_all_ranks(s, v, call)

    declared = Capabilities(
        query_sharding="replicated", key_sharding="pages", causal="always", lse=True, gradients=False,
        incremental=True, cross_lengths=True,
    )  # fmt: skip
    tables = [PageTable(4, ((2, 0), (1,))), PageTable(3, ((5, 3, 0), (4, 2), (1,)))]
    problem = Problem(query_length=11, heads=2, head_dim=3, causal=True)
    cases = [
        Case(problem=problem, sharding="replicated/pages", world_size=len(table.pages), page_table=table, seed=1)
        for table in tables
    ]
    scenes, probe = seen(Implementation(attend, "full", declared), cases, gradients=False)
    found = explaining(reading.hypotheses(scenes, probe, lambda: 1), scenes)
    assert "the causal mask is made with keys at positions of a rank's pages as if all of them were full" in found


def test_rows_that_are_nan_are_told_where_every_rank_has_all_queries():
    """Of blocks that hold keys, whichever rank they are on."""

    def attend(q, k, v, call):
        i, j = call.positions[:, None], call.key_positions[None]
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(j > i, -math.inf)
        top = s.amax(-1, keepdim=True)
        w = (s - top).exp()
        parts = [(top, w.sum(-1, keepdim=True), torch.einsum("bhqk,bkhd->bhqd", w, v))]
        every = [[torch.empty_like(x) for _ in range(call.world_size)] for x in parts[0]]
        for into, x in zip(every, parts[0], strict=True):
            dist.all_gather(into, x, group=call.group)
        tops, sums, outs = map(torch.stack, every)
        share = (tops - tops.amax(0)).exp()
        return ((share * outs).sum(0) / (share * sums).sum(0)).transpose(1, 2)

    declared = Capabilities(sharding="replicated_query", gradients=False, causal="always")
    cases = [case_of(size=n, sharding="replicated_query", causal=True) for n in (2, 3)]
    scenes, _ = seen(Implementation(attend, "tree", declared), cases, gradients=False)
    assert explaining(undefined.hypotheses(scenes), scenes) == [
        "rows that attend no key of some block that holds any are NaN: -inf - (-inf) is not guarded",
        "rows that attend no key of some block are NaN: -inf - (-inf) is not guarded",
    ]


# -- sinks -------------------------------------------------------------------------------------------------------------


def test_sinks_of_a_ranks_own_heads_are_told():
    """Where heads are dealt out to the ranks, and the first sinks are taken on each."""

    def first_sinks(q, k, v, call):
        p = call.problem
        x = call.sinks[torch.arange(p.heads) % -(-p.heads // call.world_size)]
        return ring_of(STEPS)(q, k, v, replace(call, sinks=x))

    cases = [case_of(sinks=True, heads=4, size=2), case_of(sinks=True, heads=5, size=3)]
    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    scenes, _ = seen(Implementation(first_sinks, "sinks", declared), cases, gradients=False)
    assert explaining(SUBSTITUTED, scenes) == [
        "each head takes the sink of the head with its number on its rank, where heads are dealt out to the ranks"
    ]


def test_heads_that_are_padded_and_come_back_in_another_order_are_told():
    """A head that pads others has zeros for queries, keys and values; one of them comes back of five on four ranks."""

    def attend(q, k, v, call):
        heads, size = q.size(2), call.world_size
        each = -(-heads // size)
        padded = torch.nn.functional.pad
        out, lse = PLAIN.function(q, k, v, call)[:2]
        out = padded(out, (0, 0, 0, size * each - heads))
        of_zeros = torch.full((lse.size(0), size * each - heads, lse.size(2)), math.log(call.problem.nk))
        order = torch.arange(size * each).reshape(size, each).T.ravel()[:heads]
        return out[:, :, order], torch.cat([lse, of_zeros], dim=1)[:, order]

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    scenes, _ = seen(
        Implementation(attend, "padded", declared),
        [case_of(heads=3, size=2), case_of(heads=5, size=4), case_of(heads=6, size=3)],
        gradients=False,
    )
    words = "results are read in the wrong order: heads (rank, head) as (head, rank)"
    assert words in explaining(REARRANGED, scenes)


def sinks_apart(sinks, rank, problem, size):
    """Every second or third sink from the rank on."""
    return sinks[rank::size]


def sinks_by_key_heads(sinks, rank, problem, size):
    """A run of sinks that starts as if the rank had as many heads as key heads."""
    return sinks[rank * problem.hk // size :][: problem.heads // size]


def sinks_filled_up_in_front(sinks, rank, problem, size):
    """A run of sinks, which are filled up in front, where heads are filled up at the end."""
    each = -(-problem.heads // size)
    filled = torch.nn.functional.pad(sinks, (size * each - problem.heads, 0))
    return filled[rank * each : min((rank + 1) * each, problem.heads)]


DIVIDED = ({"heads": 8, "key_heads": 4, "size": 2}, {"heads": 6, "key_heads": 3})


@pytest.mark.parametrize(
    ("taken", "words", "heads"),
    [
        (sinks_apart, "of every so many heads from its rank on, where ranks have runs of heads", DIVIDED),
        (sinks_by_key_heads, "of a run of heads that starts at rank · key heads of a rank, not rank · heads", DIVIDED),
        (
            sinks_filled_up_in_front,
            "of a head before it, or 0, as sinks are filled up in front, and heads at the end",
            ({"heads": 5, "size": 2}, {"heads": 7}),
        ),
    ],
)
def test_sinks_of_other_heads_than_a_ranks_own_are_told(taken, words, heads):
    """Each rank has a run of heads."""

    def attend(q, k, v, call):
        runs = [taken(call.sinks, rank, call.problem, call.world_size) for rank in range(call.world_size)]
        return ring_of(STEPS)(q, k, v, replace(call, sinks=torch.cat(runs)))

    cases = [case_of(sinks=True, **numbers) for numbers in heads]
    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    scenes, _ = seen(Implementation(attend, "sinks", declared), cases, gradients=False)
    assert explaining(SUBSTITUTED, scenes) == [f"each head takes the sink {words}"]


def test_rows_that_are_not_computed_are_told_from_rows_that_attend_nothing():
    """Their lse is 0 and not -inf."""

    def attend(q, k, v, call):
        out, lse = PLAIN.function(q, k, v, call)[:2]
        there = call.rank < call.world_size - 1
        return out * there, lse * there

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    runner = Runner(Implementation(attend, "zeros", declared), SimulatedWorld())

    def run(case, inputs=None):
        return runner.run(case, gradients=False, inputs=inputs)

    found = diagnose(run, [case_of(causal=True), case_of(size=2, causal=True)], declared, probe=run)
    assert found.text.startswith("on the last rank: nothing is computed: results are 0, lse too")


@pytest.mark.parametrize(("what", "of_values", "of_sums"), [("weighted values", 0, 1), ("exponentials", 1, 0)])
def test_sums_that_are_not_rescaled_for_a_large_sink_are_told(what, of_values, of_sums):
    """Sums are taken less of the largest score, and of the sink where this is larger."""

    def attend(q, k, v, call):
        every = [[torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v)]
        for into, x in zip(every, (k, v), strict=True):
            dist.all_gather(into, x.contiguous(), group=call.group)
        keys, values = (torch.cat(parts, dim=1) for parts in every)
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, keys)
        top, sink = s.amax(-1), call.sinks[:, None]
        w = (s - top[..., None]).exp()
        most = torch.maximum(top, sink)
        down = (top - most).exp()
        total = w.sum(-1) * down**of_sums + (sink - most).exp()
        out = torch.einsum("bhqk,bkhd->bhqd", w, values) * (down**of_values / total)[..., None]
        return out.transpose(1, 2), most + total.log()

    declared = Capabilities(causal="never", sinks=True, lse=True, gradients=False)
    cases = [case_of(sinks=True, heads=4, values="zero_queries", seed=n) for n in (1, 2)]
    scenes, _ = seen(Implementation(attend, "sink", declared), cases, gradients=False)
    words = f"the running sum of {what} is not rescaled where the sink exceeds the maximum of the scores"
    assert explaining(library(words), scenes)


def test_a_dq_that_is_written_over_is_told():
    """By each block of which the rank attends anything, the last of which is not the last of all."""
    steps = replace(STEPS, add_dq=lambda here, hop, total, part: part if bool(part.any()) else total)
    cases = [case_of(causal=True, size=size, query_length=4 * size, cotangent="both") for size in (2, 3)]
    scenes, _ = seen(Implementation(ring_of(steps), "over", EVERYTHING), cases, gradients=True)
    words = "each block of which a rank attends anything overwrites its dq: nothing is added up"
    assert explaining(library(words), scenes)


def test_a_slope_of_the_softcap_on_dp_alone_is_told():
    """It belongs to ds, delta included."""
    kept = threading.local()

    def probabilities(s, m, lse):
        kept.s = s
        return STEPS.probabilities(s, m, lse)

    def ds(p, dp, delta):
        return p * (dp * (1 - (kept.s / 2.0) ** 2) - delta[..., None])

    steps = replace(STEPS, probabilities=probabilities, ds=ds, cap_slope=lambda s, softcap: torch.ones_like(s))
    scenes, _ = seen(
        Implementation(ring_of(steps), "slope", EVERYTHING),
        [case_of(softcap=2.0, seed=n) for n in (1, 2)],
        gradients=True,
    )
    words = "derivative of the softcap is applied to dout·v alone, before delta is subtracted"
    assert explaining(library(words), scenes)


def test_a_softcap_on_sinks_is_told():
    """Beside scores that are capped rightly."""

    def attend(q, k, v, call):
        cap = call.softcap
        return ring_of(STEPS)(q, k, v, replace(call, sinks=cap * torch.tanh(call.sinks / cap)))

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    cases = [case_of(sinks=True, softcap=1.0), case_of(sinks=True, softcap=2.0, size=2)]
    scenes, _ = seen(Implementation(attend, "capped", declared), cases, gradients=False)
    assert explaining(SUBSTITUTED, scenes) == ["the softcap is applied to the sinks as well"]


def test_an_order_of_heads_that_only_lse_has_is_told():
    """Though out has the right one."""

    def attend(q, k, v, call):
        out, lse = PLAIN.function(q, k, v, call)[:2]
        return out, lse[:, torch.arange(call.problem.heads).reshape(call.world_size, -1).T.ravel()]

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    cases = [case_of(heads=6), case_of(heads=6, size=2)]
    scenes, _ = seen(Implementation(attend, "lse", declared), cases, gradients=False)
    assert explaining(REARRANGED, scenes)[0] == "lse is read in the wrong order: heads (rank, head) as (head, rank)"


def test_sinks_that_are_not_shifted_with_the_scores_are_told():
    """Their exponential joins those of scores that have lost their maximum."""

    def attend(q, k, v, call):
        s, sinks = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k), call.sinks[:, None, None]
        top = torch.maximum(s.amax(-1, keepdim=True), sinks)
        w = (s - top).exp()
        total = w.sum(-1, keepdim=True) + sinks.exp()
        return torch.einsum("bhqk,bkhd->bqhd", w / total, v), (top + total.log())[..., 0]

    declared = replace(LOCAL, causal="never", sinks=True, lse=True, gradients=False)
    cases = [case_of(size=1, sinks=True), case_of(size=1, sinks=True, heads=5, values="large_scores")]
    scenes, _ = seen(Implementation(attend, "unshifted", declared), cases, gradients=False)
    assert explaining(SUBSTITUTED, scenes) == [
        "sinks are not shifted by the maximum of scores and sinks, as these are: they join the denominator as exp(sink)"
    ]


def by_blocks(q, k, v, call, *, filled):
    """Blocks gathered and merged by log-sum-exps; a query that attends nothing of a block has scores of 0 there."""
    gathered = [[torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v)]
    for into, x in zip(gathered, (k, v), strict=True):
        dist.all_gather(into, x.contiguous(), group=call.group)
    outs, lses, held = [], [], call.problem.nk // call.world_size
    for owner, (key, value) in enumerate(zip(*gathered, strict=True)):
        j = owner * held + torch.arange(held)
        there = (j[None] >= call.positions[:, None] - call.window[0]) & (j[None] <= call.positions[:, None])
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, key)).masked_fill(~there, -math.inf)
        some = there.any(-1)
        nothing = torch.tensor(filled(held)) if there.any() else torch.tensor(-math.inf)
        lse = torch.where(some, s.logsumexp(-1), nothing)
        outs.append((s - torch.where(some, lse, 0.0)[..., None]).exp() @ value.transpose(1, 2))
        lses.append(lse)
    whole = torch.stack(lses)
    return (whole.softmax(0)[..., None] * torch.stack(outs)).sum(0).transpose(1, 2), whole.logsumexp(0)


@pytest.mark.parametrize(
    ("text", "filled"),
    [
        ("lse 0 there instead of -inf: it counts as a key and value of 0", lambda held: 0.0),
        ("scores of 0 there instead of -inf, and values of 0", math.log),
    ],
)
def test_what_stands_for_an_empty_row_of_a_block_is_told(text, filled):
    """Where others of the rank attend some of the block; blocks that nobody attends are skipped."""
    declared = Capabilities(window=True, causal="never", lse=True, gradients=False)
    cases = [case_of(window=(2, 0)), case_of(window=(4, 0), size=2)]
    attend = functools.partial(by_blocks, filled=filled)
    scenes, _ = seen(Implementation(attend, "filled", declared), cases, gradients=False)
    assert explaining(FILLED, scenes)[0] == (
        f"a query that attends no key of a block of which others of its rank attend some has {text}"
    )


@pytest.mark.parametrize("skipping", [False, True])
def test_gradients_of_keys_that_a_row_without_keys_spoils_are_told(skipping):
    """The backward takes exp(scores - lse) of whole blocks, or of those of which a rank attends anything."""

    def gradients(steps, here, hop, owner, rows, block):
        dq, part = STEPS.gradients(steps, here, hop, owner, rows, block)
        if skipping and not bool(steps.pattern(steps, here, hop, owner).any()):
            return dq, part
        lost = (rows[-1] == -math.inf).any(-1).unflatten(1, (here.problem.hk, -1)).any(-1)[:, None, :, None]
        return dq, part._replace(k=part.k.masked_fill(lost, math.nan), v=part.v.masked_fill(lost, math.nan))

    implementation = Implementation(ring_of(replace(STEPS, gradients=gradients)), "nan", EVERYTHING)
    cases = [
        case_of(documents=(2, 7, 12)),
        case_of(documents=(2, 7, 11), size=4, query_length=14, heads=4, key_heads=2),
    ]
    scenes, _ = seen(implementation, cases, gradients=True)
    more = ", and attended by some of its rows" if skipping else ""
    assert explaining(undefined.hypotheses(scenes), scenes) == [
        "dk and dv are NaN of keys whose block is held against a rank's block of queries with a row without any "
        f"key{more}: its lse is -inf, and -inf - (-inf) is not guarded in the backward"
    ]


def test_gradients_that_are_nan_beside_a_right_out_are_told():
    """Of the rows that attend nothing of the last block."""

    def attend(q, k, v, call):
        q = q * 1
        q.register_hook(lambda gradient: gradient * (1.0 if call.rank == call.world_size - 1 else math.nan))
        return PLAIN.function(q, k, v, call)

    cases = [case_of(causal=True), case_of(causal=True, size=2)]
    scenes, _ = seen(Implementation(attend, "nan", replace(EVERYTHING, lse_gradient=False)), cases, gradients=True)
    says = "gradients of rows that attend {} are NaN, and out is not: 0 · NaN in the backward"
    found = explaining(undefined.hypotheses(scenes), scenes)
    assert says.format("no key of the block of the last rank") in found


def test_key_heads_that_are_padded_like_heads_are_told():
    """Two heads of one key head, on two ranks: the second head has the key head that was added."""

    def attend(q, k, v, call):
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, 1)) for x in (k, v))
        return PLAIN.function(q, k, v, replace(call, problem=replace(call.problem, key_heads=2)))

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    cases = [case_of(heads=2, key_heads=1, size=2), case_of(heads=2, key_heads=1, size=2, causal=True)]
    scenes, _ = seen(Implementation(attend, "padded heads", declared), cases, gradients=False)
    assert any(text.startswith("heads and key heads are each padded") for text in explaining(REARRANGED, scenes))


def test_rows_past_the_mean_share_of_pages_are_told():
    """A rank that holds more of a cache than the mean reads no more than that."""

    def attend(q, k, v, call):
        read = -(-call.problem.nk // call.world_size)
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k[:, :read])
        lses = [torch.empty_like(s[..., 0]) for _ in range(call.world_size)]
        dist.all_gather(lses, s.logsumexp(-1), group=call.group)
        lse = torch.stack(lses).logsumexp(0)
        out = torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v[:, :read])
        dist.all_reduce(out, group=call.group)
        return out, lse

    declared = Capabilities(
        query_sharding="replicated", key_sharding="pages", causal="both", lse=True, gradients=False, incremental=True,
        cross_lengths=True,
    )  # fmt: skip
    tables = [PageTable(2, ((0, 1, 2, 3), (4,), (5,))), PageTable(3, ((0, 1, 2), (3,)))]
    problem = Problem(query_length=12, heads=2, head_dim=3)
    cases = [
        Case(problem=problem, sharding="replicated/pages", world_size=len(table.pages), page_table=table, seed=1)
        for table in tables
    ]
    scenes, probe = seen(Implementation(attend, "mean", declared), cases, gradients=False)
    found = reading.hypotheses(scenes, probe, lambda: 1)
    assert "a rank's keys past the mean share of all, in whole tiles of 1, are left out" in explaining(found, scenes)


def test_heads_of_lse_in_the_order_of_groups_are_told():
    """On one rank too: what is mixed up is the group, not the ranks."""

    def attend(q, k, v, call):
        out, lse = PLAIN.function(q, k, v, call)[:2]
        p = call.problem
        return out, lse[:, torch.arange(p.heads).reshape(p.hk, -1).T.ravel()]

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    cases = [case_of(heads=4, key_heads=2, size=1), case_of(heads=6, key_heads=2, size=2)]
    scenes, _ = seen(Implementation(attend, "lse", declared), cases, gradients=False)
    says = "lse is read in the wrong order: heads (key head, head of the group) as (head of the group, key head)"
    assert says in explaining(REARRANGED, scenes)


@pytest.mark.parametrize("sharding", ["contiguous", "striped"])
def test_a_ranks_part_of_summed_gradients_that_begins_elsewhere_is_told(sharding):
    """At the rank times its own length, where shards differ, in the order in which shards were gathered."""

    class Passed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, call):
            ctx.call = call
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            call, longest = ctx.call, -(-ctx.call.problem.nk // ctx.call.world_size)
            padded = torch.nn.functional.pad(gradient, (0, 0, 0, 0, 0, longest - gradient.size(1))).contiguous()
            every = [torch.empty_like(padded) for _ in range(call.world_size)]
            dist.all_gather(every, padded, group=call.group)
            sizes = [call.problem.nk // call.world_size + (r < call.problem.nk % call.world_size)
                     for r in range(call.world_size)]  # fmt: skip
            whole = torch.cat([x[:, :size] for x, size in zip(every, sizes, strict=True)], dim=1)
            return whole[:, call.rank * sizes[call.rank] :][:, : sizes[call.rank]], None

    def attend(q, k, v, call):
        return PLAIN.function(q, Passed.apply(k, call), Passed.apply(v, call), call)

    declared = replace(EVERYTHING, lse_gradient=False)
    cases = [case_of(query_length=n, size=size, sharding=sharding) for n, size in ((11, 3), (7, 2))]
    scenes, _ = seen(Implementation(attend, "sliced", declared), cases, gradients=True)
    found = explaining(of_gradients(scenes), scenes)
    assert any("from the rank times the rank's own number of rows on, in the order of the shards" in x for x in found)


@pytest.mark.parametrize("sinks", [False, True])
def test_a_sum_of_exponentials_in_the_input_dtype_is_told_whatever_the_tiles_are(sinks):
    """By its digits, which lse shows, less what a sink adds; out is off by as much."""

    def attend(q, k, v, call):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float())
        sunk = torch.full_like(s[..., :1], -math.inf)
        if sinks:
            sunk = call.sinks.float()[:, None, None].expand_as(sunk)
        top = torch.maximum(s.amax(-1, keepdim=True), sunk)
        total = torch.zeros_like(top).to(q.dtype)
        for w in (s - top).exp().split(5, -1):
            total = (total + w.sum(-1, keepdim=True)).to(q.dtype)
        total = total.float() + (sunk - top).exp()
        out = torch.einsum("bhqk,bkhd->bqhd", (s - top).exp(), v.float()) / total.transpose(1, 2)
        return out.to(q.dtype), (top + total.log())[..., 0]

    declared = replace(LOCAL, causal="never", dtypes=("bfloat16",), lse=True, gradients=False, sinks=sinks)
    cases = [case_of(size=1, query_length=n, dtype="bfloat16", sinks=sinks) for n in (7, 12)]
    scenes, _ = seen(Implementation(attend, "total", declared), cases, gradients=False)
    assert explaining(NARROWED, scenes) == [
        "the sum of exponentials is kept in the input dtype: exp(lse - maximum) is one of its numbers in every row"
    ]


def test_shards_that_are_joined_with_their_padding_are_told_of_queries_too():
    """As an all-to-all over sequences has them: rows of zeros between the shards, and the last rows are lost."""

    def attend(q, k, v, call):
        longest = -(-call.problem.nk // call.world_size)
        every = []
        for x in (q, k, v):
            padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - x.size(1))).contiguous()
            parts = [torch.empty_like(padded) for _ in range(call.world_size)]
            dist.all_gather(parts, padded, group=call.group)
            every.append(torch.cat(parts, dim=1)[:, : call.problem.nk])
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", *every[:2])
        out = torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), every[2])
        return out[:, call.positions], s.logsumexp(-1)[..., call.positions]

    declared = Capabilities(causal="never", lse=True, gradients=False, uneven=True)
    cases = [case_of(query_length=n, size=size) for n, size in ((10, 3), (9, 4))]
    scenes, _ = seen(Implementation(attend, "joined", declared), cases, gradients=False)
    assert explaining(REARRANGED, scenes) == [
        "q, k and v of shards padded to the longest are joined and cut at their length: zeros stay between the shards, "
        "and the last rows are lost"
    ]


# -- backwards that take what is not theirs ----------------------------------------------------------------------------


class OneRank(torch.autograd.Function):
    """Attention of one rank whose backward takes the slope of the softcap from raw scores."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        """Right."""
        raw = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k) / call.softcap
        p = (call.softcap * torch.tanh(raw)).softmax(-1)
        ctx.save_for_backward(q, k, v, p, raw)
        ctx.call = call
        return torch.einsum("bhqk,bkhd->bqhd", p, v)

    @staticmethod
    def backward(ctx, dout):
        """With 1 - (s / c)²."""
        q, k, v, p, raw = ctx.saved_tensors
        dp = torch.einsum("bqhd,bkhd->bhqk", dout, v)
        ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * (1 - raw**2) * ctx.call.scale
        of_k = torch.einsum("bhqk,bqhd->bkhd", ds, q)
        return torch.einsum("bhqk,bkhd->bqhd", ds, k), of_k, torch.einsum("bhqk,bqhd->bkhd", p, dout), None


def test_a_softcap_whose_slope_is_of_raw_scores_is_told_where_these_are_large():
    """So large that the capped score no longer tells which it was."""
    cases = [case_of(size=1, softcap=cap, scale=scale) for cap, scale in ((1.0, 0.5), (0.5, 40.0), (2.0, 300.0))]
    attend = Implementation(lambda q, k, v, call: OneRank.apply(q, k, v, call), "slope", replace(LOCAL, causal="never"))
    scenes, _ = seen(attend, cases, gradients=True)
    says = "derivative of the softcap is 1 - (s / c)², of the score before the softcap"
    assert explaining(library(says), scenes)


class Overwritten(torch.autograd.Function):
    """Attention to gathered keys whose backward finds in the blocks of some hops those of later ones."""

    @staticmethod
    def forward(ctx, q, k, v, call):
        """Right; what is kept is overwritten."""
        size, n = call.world_size, k.size(1)
        every = [[torch.empty_like(x) for _ in range(size)] for x in (k, v)]
        for x, into in zip((k, v), every, strict=True):
            dist.all_gather(into, x.contiguous(), group=call.group)
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, torch.cat(every[0], dim=1))
        last = {hop % 2: hop for hop in range(1, size)}
        hops = [(call.rank - owner) % size for owner in range(size)]
        places = [(call.rank - last[hop % 2]) % size if hop else call.rank for hop in hops]
        kept = [torch.cat([x[place] for place in places], dim=1) for x in every]
        ctx.save_for_backward(
            q, *kept, s.logsumexp(-1), out := s.softmax(-1) @ torch.cat(every[1], dim=1).transpose(1, 2)
        )
        ctx.call, ctx.rows = call, slice(call.rank * n, (call.rank + 1) * n)
        return out.transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx, dout):
        """With what was kept."""
        q, k, v, lse, out = ctx.saved_tensors
        p = (ctx.call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k) - lse[..., None]).exp()
        dout = dout.transpose(1, 2)
        ds = p * (dout @ v.permute(0, 2, 3, 1) - (dout * out).sum(-1, keepdim=True)) * ctx.call.scale
        of_k, of_v = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bhqd->bkhd", p, dout)
        for x in (of_k, of_v):
            dist.all_reduce(x, group=ctx.call.group)
        return torch.einsum("bhqk,bkhd->bqhd", ds, k), of_k[:, ctx.rows], of_v[:, ctx.rows], None


def test_receive_buffers_that_the_backward_still_needs_are_told():
    """Blocks of hops 1 and 3 share one."""
    declared = replace(PLAIN.capabilities, causal="never", lse=False, lse_gradient=False)
    cases = [case_of(size=size, query_length=2 * size) for size in (4, 5)]
    attend = Implementation(lambda q, k, v, call: Overwritten.apply(q, k, v, call), "two buffers", declared)
    scenes, _ = seen(attend, cases, gradients=True)
    says = "keys and values of the wrong block: that of the last hop that arrived in the same of two buffers"
    assert explaining(library(f"{says}, in the backward only"), scenes)


class Reread(torch.autograd.Function):
    """Passes lse on; its cotangent is reshaped to tokens and heads."""

    @staticmethod
    def forward(ctx, lse):
        """As it is."""
        return lse.clone()

    @staticmethod
    def backward(ctx, dlse):
        """Reshaped where it should be transposed."""
        return dlse.reshape(dlse.size(0), dlse.size(2), dlse.size(1)).transpose(1, 2)


def test_a_cotangent_of_lse_that_is_reshaped_for_transposed_is_told():
    """Of two heads and four tokens a rank."""

    def attend(q, k, v, call):
        out, lse = PLAIN.function(q, k, v, call)
        return out, Reread.apply(lse)

    cases = [case_of(cotangent=cotangent, size=size) for cotangent, size in (("lse", 3), ("both", 2))]
    scenes, _ = seen(Implementation(attend, "reshaped", EVERYTHING), cases, gradients=True)
    says = "elements of the cotangent of lse permuted: heads and tokens are exchanged by a reshape"
    assert explaining(library(says), scenes)


def only_the_last(steps, here, hop, owner, carried, part):
    """The dv of a block is what the last rank has added that attends it."""
    attended = bool(multiplicity(STEPS, here, hop, owner).any())
    added = part if carried is None else Block(carried.k + part.k, part.v if attended else carried.v)
    return STEPS.travel(replace(steps, add_part=lambda *_: added), here, hop, owner, carried, part)


def exchanged_of_later_ranks(steps, here, hop, owner, rows, block):
    """What is added to dk and dv of blocks of later ranks is exchanged."""
    dq, part = STEPS.gradients(steps, here, hop, owner, rows, block)
    return dq, Block(part.v, part.k) if owner > here.rank else part


def of_two_ranks_further(here, dq, dk, dv):
    """The dk and dv of rank r + 2: all are gathered, and those are taken."""
    found = []
    for x in (dk, dv):
        every = [torch.empty_like(x) for _ in range(here.size)]
        dist.all_gather(every, x.contiguous(), group=here.call.group)
        found.append(every[(here.rank + 2) % here.size])
    return dq, *found


def of_a_shorter_ring(here, dq, dk, dv):
    """The dk and dv of rank r − 1 − hops, where a window of half a shard lets blocks come one hop."""
    found = []
    for x in (dk, dv):
        every = [torch.empty_like(x) for _ in range(here.size)]
        dist.all_gather(every, x.contiguous(), group=here.call.group)
        found.append(every[(here.rank - 2) % here.size] if here.problem.window else x)
    return dq, *found


def of_the_last_other(here, hop, owner):
    """What other ranks add is kept by what they read, so that the last one's part is left."""
    others = [rank for rank in range(here.size) if rank != owner]
    counts = int(here.rank in (owner, *others[-1:]))
    return counts, counts


ZIGZAG = [case_of(sharding="zigzag", causal=True, size=size, query_length=4 * size) for size in (3, 2)]
GRADIENTS = {
    "each rank that attends a block overwrites its dv: nothing is added up": (
        replace(STEPS, travel=only_the_last), [case_of(causal=True), case_of(size=4), case_of(size=2, causal=True)]
    ),
    "what a rank adds to dk and dv of a block is exchanged, on blocks of later ranks only": (
        replace(STEPS, gradients=exchanged_of_later_ranks), ZIGZAG
    ),
    "dk and dv are sent one hop more than their block had come, which is home only after a whole round": (
        replace(STEPS, returned_gradients=of_a_shorter_ring),
        [case_of(causal=True, window=(2, 0)), case_of(causal=True, window=(1, 0), size=4)],
    ),
    "dk and dv have, beside the rank's own part, that of the last other rank alone": (
        replace(STEPS, times_in_part=of_the_last_other), [case_of(), case_of(size=4), case_of(size=5, query_length=10)]
    ),
    "dk and dv are sent on by as many hops as their block had come, instead of home": (
        replace(STEPS, returned_gradients=of_two_ranks_further), [case_of(), case_of(size=4), case_of(causal=True)]
    ),
}  # fmt: skip


@pytest.mark.parametrize("words", GRADIENTS)
def test_gradients_of_blocks_that_go_wrong_on_their_way_are_told(words):
    """By the library, in some blocks or in all."""
    steps, cases = GRADIENTS[words]
    scenes, _ = seen(Implementation(ring_of(steps), "on their way", EVERYTHING), cases, gradients=True)
    known = [Hypothesis(**vars(one)) for one in CAUSES]
    if words in {one.sentence() for one in known}:
        assert words in explaining([one for one in known if one.sentence() == words], scenes)
    else:
        plain = [one for one in known if words.startswith(one.sentence())]
        assert words in explaining([one for alike in in_some_places(plain, scenes[0]) for one in alike], scenes)


class BeforeSinks(torch.autograd.Function):
    """Attention of one rank with sinks, whose backward has out as it was before they joined."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, call):
        """Right."""
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        lse = torch.logaddexp(s.logsumexp(-1), sinks[:, None])
        ctx.save_for_backward(q, k, v, sinks, lse, out := s.softmax(-1) @ v.transpose(1, 2))
        ctx.scale = call.scale
        return (out * (s.logsumexp(-1) - lse).exp()[..., None]).transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx, dout):
        """With delta of that out."""
        q, k, v, sinks, lse, out = ctx.saved_tensors
        p = (ctx.scale * torch.einsum("bqhd,bkhd->bhqk", q, k) - lse[..., None]).exp()
        dout = dout.transpose(1, 2)
        delta = (dout * out).sum(-1)
        ds = p * (dout @ v.permute(0, 2, 3, 1) - delta[..., None]) * ctx.scale
        of_k, of_v = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bhqd->bkhd", p, dout)
        of_sinks = -((sinks[:, None] - lse).exp() * delta).sum((0, 2))
        return torch.einsum("bhqk,bkhd->bqhd", ds, k), of_k, of_v, of_sinks, None


def test_a_delta_of_out_before_the_sink_is_told():
    """By dq and dk, and by the gradient of sinks."""
    declared = replace(LOCAL, causal="never", sinks=True)
    attend = Implementation(
        lambda q, k, v, call: BeforeSinks.apply(q, k, v, call.sinks, call), "before sinks", declared
    )
    cases = [case_of(size=1, query_length=n, sinks=True, seed=n) for n in (5, 8)]
    scenes, _ = seen(attend, cases, gradients=True)
    assert explaining(library("delta is computed of out as it is before the sink joins"), scenes)
    many = [case_of(size=1, query_length=2, heads=1, head_dim=1, sinks=True, seed=n) for n in range(30)]
    scenes, _ = seen(attend, many, gradients=True)
    alone = [scene for scene in scenes if not wrong_tensors(scene)]  # sinks that weigh all, or nothing
    assert sum(map(sinks.wrong, alone)) >= sinks.FEWEST
    says = "has the weight exp(sink − lse) of an lse without the sink"  # the same where the sink has all the weight
    assert sinks.cause(alone) in (
        f"the gradient of sinks {text}" for text in (says, "has dout·out of an out that the sink has not joined")
    )


def test_a_merge_without_a_shift_that_spares_empty_parts_is_told():
    """Of three blocks, of which the first rank attends one."""

    def attend(q, k, v, call):
        every = []
        for x in (k, v):
            parts = [torch.empty_like(x) for _ in range(call.world_size)]
            dist.all_gather(parts, x.contiguous(), group=call.group)
            every.append(parts)
        out = lse = None
        for hop in range(call.world_size):
            owner = (call.rank - hop) % call.world_size
            if owner > call.rank:
                continue
            s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, every[0][owner])
            if owner == call.rank:
                s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
            new, new_lse = s.softmax(-1) @ every[1][owner].transpose(1, 2), s.logsumexp(-1)
            if out is None:
                out, lse = new, new_lse
            else:
                total = (lse.exp() + new_lse.exp()).log()
                out = (lse - total).exp()[..., None] * out + (new_lse - total).exp()[..., None] * new
                lse = total
        return out.transpose(1, 2)

    declared = replace(PLAIN.capabilities, causal="always", lse=False, lse_gradient=False, gradients=False, scale=True)
    cases = [case_of(causal=True, values="large_scores", seed=seed, scale=3.0) for seed in (1, 2)]
    scenes, _ = seen(Implementation(attend, "unshifted", declared), cases, gradients=False)
    found = explaining(library("the merge overflows: log-sum-exps are added without a shift"), scenes)
    assert found


def test_a_sum_that_lies_between_two_numbers_rules_no_rounding_out():
    """Digits of what is rounded at every hop, of which some may fall to either side."""
    says = "dk and dv travel in the input dtype: they are rounded at every hop"
    implementation = MUTANTS["A12c"].implementation
    cases = [
        case_of(
            size=2, sharding="striped", causal=True, window=(2, 3), query_length=6 + more, batch=3, heads=9,
            key_heads=3, head_dim=40, dtype="bfloat16", scale=1.0, seed=more,
        )
        for more in range(4)
    ]  # fmt: skip
    scenes, _ = seen(implementation, cases, gradients=True)
    assert says in explaining(ROUNDED, [off_in(scene, 1) for scene in scenes])
    assert says not in explaining(ROUNDED, [off_in(scene, 1000) for scene in scenes])


def off_in(scene, count):
    """The scene with so many values of dv on rank 0 further off than is allowed."""
    first, *others = scene.observation.ranks
    dv = first.dv.copy()
    dv.reshape(-1)[:count] += 3 * scene.limit("dv", 0).reshape(-1)[:count]
    ranks = (replace(first, dv=dv), *others)
    return Scene(scene.case, scene.capabilities, replace(scene.observation, ranks=ranks))


class KeysAlone(BeforeSinks):
    """A backward without the sink: its out and its weights are those of the keys alone."""

    @staticmethod
    def backward(ctx, dout):
        """With the log-sum-exp of the keys."""
        q, k, v, sinks, _, out = ctx.saved_tensors
        s = ctx.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        p, dout = s.softmax(-1), dout.transpose(1, 2)
        delta = (dout * out).sum(-1)
        ds = p * (dout @ v.permute(0, 2, 3, 1) - delta[..., None]) * ctx.scale
        of_k, of_v = torch.einsum("bhqk,bqhd->bkhd", ds, q), torch.einsum("bhqk,bhqd->bkhd", p, dout)
        of_sinks = -((sinks[:, None] - s.logsumexp(-1)).exp() * delta).sum((0, 2))
        return torch.einsum("bhqk,bkhd->bqhd", ds, k), of_k, of_v, of_sinks, None


def test_a_backward_without_the_sink_is_told_however_much_that_weighs():
    """Also where what the keys weigh beside it is less than the rounding of 1."""
    declared = replace(LOCAL, causal="never", sinks=True)
    attend = Implementation(lambda q, k, v, call: KeysAlone.apply(q, k, v, call.sinks, call), "keys alone", declared)
    cases = [case_of(size=1, query_length=3, heads=1, sinks=True, seed=n) for n in range(20)]
    scenes, _ = seen(attend, cases, gradients=True)
    wrong = [scene for scene in scenes if wrong_tensors(scene)]
    assert max(scene.inputs.sinks.max() for scene in wrong) > 50
    says = "the backward leaves the sink out: its weights are those of the keys alone, and so is its out"
    assert explaining(library(says), wrong) == [says]


MERGED = {
    "the merged lse is lse + log(1 + exp(lse - new)): the difference has the wrong sign": (
        lambda a, b: a - torch.nn.functional.logsigmoid(b - a)
    ),
    "the merged lse is lse - log(1 + exp(new - lse)): what is added is subtracted": (
        lambda a, b: a + torch.nn.functional.logsigmoid(a - b)
    ),
}


@pytest.mark.parametrize("words", MERGED)
def test_signs_of_a_merge_are_told(words):
    """Of lse alone: out has the right weights, as in the merge of zhuzilin/ring-flash-attention."""

    def merge(first, second):
        weight = torch.sigmoid(second.lse - first.lse)[..., None]
        return Partial(first.out - weight * (first.out - second.out), MERGED[words](first.lse, second.lse))

    cases = [case_of(size=size, query_length=8) for size in (2, 3, 4)]
    scenes, _ = seen(Implementation(ring_of(replace(STEPS, merge=merge)), "signs", EVERYTHING), cases, gradients=False)
    assert explaining(library(words), scenes) == [words]


def test_partials_that_are_rounded_before_they_are_merged_are_told():
    """Out and lse, in the input dtype."""

    def attend(q, k, v, call):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float())
        parts = [(s.softmax(-1) @ v.float().transpose(1, 2)).to(q.dtype), s.logsumexp(-1).to(q.dtype)]
        every = [[torch.empty_like(x) for _ in range(call.world_size)] for x in parts]
        for x, into in zip(parts, every, strict=True):
            dist.all_gather(into, x.contiguous(), group=call.group)
        outs, lses = (torch.stack(x).float() for x in every)
        whole = lses.logsumexp(0)
        return ((lses - whole).exp()[..., None] * outs).sum(0).transpose(1, 2).to(q.dtype), whole

    declared = Capabilities(sharding="replicated_query", dtypes=("bfloat16",), lse=True, gradients=False)
    cases = [case_of(size=size, sharding="replicated_query", dtype="bfloat16") for size in (2, 3, 4)]
    scenes, _ = seen(Implementation(attend, "rounded parts", declared), cases, gradients=False)
    assert "each block's out and lse are rounded to the input dtype before they are merged" in explaining(
        ROUNDED, scenes
    )


def test_rows_without_a_key_in_the_first_block_of_their_rank_hop_by_hop_are_told():
    """A running maximum is −inf before and after it; blocks of which a rank attends nothing are not visited."""

    def attend(q, k, v, call):
        p, size = call.problem, call.world_size
        shards = [torch.as_tensor(held) for held in key_positions("contiguous", p.nk, size)]
        top = q.new_full((q.size(0), q.size(2), q.size(1), 1), -math.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q).transpose(1, 2)
        every = [[torch.empty_like(x) for _ in range(size)] for x in (k, v)]
        for x, into in zip((k, v), every, strict=True):
            dist.all_gather(into, x.contiguous(), group=call.group)
        for hop in range(size):
            owner = (call.rank - hop) % size
            ahead = shards[owner] - (call.positions[:, None] + p.nk - p.nq)
            mask = (ahead >= -p.window[0]) & (ahead <= p.window[1])
            if not mask.any():
                continue
            s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, every[0][owner])).masked_fill(~mask, -math.inf)
            above = torch.maximum(top, s.amax(-1, keepdim=True))
            shrink, w = (top - above).exp(), (s - torch.where(above == -math.inf, 0.0, above)).exp()
            total, top = total * shrink + w.sum(-1, keepdim=True), above
            out = out * shrink + w @ every[1][owner].transpose(1, 2)
        return (out / torch.where(total == 0, 1.0, total)).transpose(1, 2)

    declared = Capabilities(window=True, cross_lengths=True, gradients=False, lse=False)
    cases = [case_of(window=(0, right), query_length=9, key_length=15) for right in (3, 4)]
    scenes, _ = seen(Implementation(attend, "by hop", declared), cases, gradients=False)
    found = explaining(undefined.hypotheses(scenes), scenes)
    assert "rows that attend no key of the first block, hop by hop, of which the rank attends any" in found[0]


def test_rows_without_keys_in_the_first_block_that_only_causality_may_skip_are_told():
    """A block is skipped if it lies behind the rank's last query, and not if key_lengths hide all of it."""

    def attend(q, k, v, call):
        every = [[torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v)]
        for into, x in zip(every, (k, v), strict=True):
            dist.all_gather(into, x.contiguous(), group=call.group)
        i, each = call.positions[:, None], k.size(1)
        lse = torch.full((q.size(0), q.size(2), q.size(1)), -math.inf)
        out = torch.zeros_like(q.transpose(1, 2))
        for hop in range(call.world_size):
            owner = (call.rank - hop) % call.world_size
            j = torch.arange(owner * each, owner * each + each)[None]
            aligned = i + call.problem.nk - call.problem.nq
            if j[0, 0] > aligned[-1, 0]:
                continue
            mask = (j < torch.tensor(call.key_lengths)[:, None, None]) & (j <= aligned)
            s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, every[0][owner])
            s = s.masked_fill(~mask[:, None], -math.inf)
            of_block = s.logsumexp(-1)
            w = (s - torch.where(of_block == -math.inf, 0.0, of_block)[..., None]).exp()
            new = torch.logaddexp(lse, of_block)
            old_part, part = ((x - new).exp()[..., None] for x in (lse, of_block))
            out, lse = old_part * out + part * (w @ every[1][owner].transpose(1, 2)), new
        return out.transpose(1, 2)

    declared = Capabilities(causal="always", key_lengths=True, cross_lengths=True, gradients=False, lse=False)
    cases = [case_of(causal=True, key_length=6, key_lengths=(length,)) for length in (1, 3)]
    scenes, _ = seen(Implementation(attend, "by hop", declared), cases, gradients=False)
    assert explaining(undefined.hypotheses(scenes), scenes) == [
        "rows that attend no key of the first block, hop by hop, that holds keys and is not hidden whole by causality "
        "are NaN: -inf - (-inf) is not guarded"
    ]


def test_rows_without_keys_in_the_first_zigzag_piece_are_told():
    """A rank visits the early piece of each shard first, and skips those that a causal mask hides whole."""

    def attend(q, k, v, call):
        out, size, n = ring_of(STEPS)(q, k, v, call)[0].clone(), call.world_size, call.problem.nk
        cuts = [len(one) for one in torch.arange(n).tensor_split(2 * size)]
        every = torch.arange(n).split(cuts)
        order = [piece for hop in range(size) for piece in ((call.rank - hop) % size, -1 - (call.rank - hop) % size)]
        begin, end = call.documents[0], call.documents[-1]
        for rows in (every[call.rank], every[-1 - call.rank]):
            keys = next(every[piece] for piece in order if every[piece][0] <= rows[-1])
            inside = (
                (keys >= begin) & (keys < end) & (keys <= rows[:, None]) & ((rows >= begin) & (rows < end))[:, None]
            )
            out[:, torch.isin(call.positions, rows[~inside.any(1)])] = math.nan
        return out

    declared = Capabilities(causal="always", sharding="zigzag", documents=True, gradients=False, lse=False)
    cases = [case_of(causal=True, sharding="zigzag", size=2, documents=(begin, 12)) for begin in (1, 4)]
    scenes, _ = seen(Implementation(attend, "pieces", declared), cases, gradients=False)
    assert explaining(undefined.hypotheses(scenes), scenes) == [
        "rows that attend no key of the first piece of a shard, hop by hop, that causality and windows do not hide "
        "whole from theirs are NaN: -inf - (-inf) is not guarded"
    ]


def test_heads_that_come_back_from_a_part_of_the_ranks_in_another_order_are_told():
    """As many ranks as divide the key heads have heads exchanged: theirs come by turns."""

    def attend(q, k, v, call):
        together = math.gcd(call.world_size, call.problem.hk)
        out, lse = PLAIN.function(q, k, v, call)
        order = torch.arange(q.size(2)).reshape(together, -1).T.flatten()
        return out[:, :, order], lse[:, order]

    cases = [case_of(heads=8, key_heads=2, size=4), case_of(heads=8, key_heads=4, size=2)]
    scenes, _ = seen(Implementation(attend, "turned", EVERYTHING), cases, gradients=False)
    (found,) = explaining(REARRANGED, scenes)
    assert found == (
        "results are read in the wrong order: heads (rank, head) as (head, rank), of the greatest common divisor of "
        "ranks and key heads"
    )


def short_or_whole(problem, i, j):
    """No pair past the last whole segment of a dilation of one branch."""
    w, _ = problem.dilation.branches[0]
    whole = problem.nq // w * w
    return STEPS.dilation(STEPS, problem, i, j) * (i < whole) * (j < whole)


def test_a_last_segment_that_is_left_out_even_where_it_is_the_only_one_is_told():
    """A loop over whole segments ends before it."""
    steps = replace(STEPS, dilation=lambda steps, *of: short_or_whole(*of))
    branches = [Dilation(((w, r),), heads="shared") for w, r in ((5, 1), (20, 1), (7, 2))]
    cases = [case_of(dilation=one) for one in branches]
    scenes, _ = seen(Implementation(ring_of(steps), "whole segments", EVERYTHING), cases, gradients=False)
    words = "the last segment is left out if it is shorter than the segment length, even if it is the only one"
    assert explaining(library(words), scenes) == [words]
    assert not explaining(library("the last segment is left out if it is shorter than the others"), scenes)


def of_the_last_branch(names):
    """Gradients in which the branches before the last have no part: that covers each query and key alone."""

    def gradients(steps, here, hop, owner, rows, block):
        def alone(steps, here, hop, owner):
            m = multiplicity(steps, here, hop, owner)
            return (here.call.positions[:, None] == here.shards[owner]) * torch.ones_like(m)

        dq, (dk, dv) = STEPS.gradients(steps, here, hop, owner, rows, block)
        own_q, (own_k, own_v) = STEPS.gradients(replace(steps, pattern=alone), here, hop, owner, rows, block)
        return own_q if "q" in names else dq, Block(own_k if "k" in names else dk, own_v if "v" in names else dv)

    return replace(STEPS, gradients=gradients)


@pytest.mark.parametrize(("names", "whose", "what"), [("q", "a query", "dq"), ("kv", "a key", "dk and dv")])
def test_a_gradient_of_branches_that_is_overwritten_is_told(names, whose, what):
    """Where it is assigned, not added, the last branch that covers a row is what is left."""
    branches = [Dilation((one, (1, 1)), heads="shared") for one in ((4, 1), (6, 2))]
    cases = [case_of(dilation=one, size=size) for one in branches for size in (1, 2)]
    implementation = Implementation(ring_of(of_the_last_branch(names)), "overwritten", EVERYTHING)
    scenes, _ = seen(implementation, cases, gradients=True)
    words = f"of the branches of a dilation that cover {whose}, the last one overwrites the {what} of the others"
    assert explaining(library(words), scenes) == [words]


def summed_two_at_a_time(here, x):
    """The part of each query head is added to one of two key heads, by turns."""
    found = x.new_zeros(x.size(0), here.problem.hk, *x.shape[2:])
    for first in range(0, here.problem.hk, 2):
        together = min(2, here.problem.hk - first)
        for number in range(together * here.problem.group_size):
            found[:, first + number % together] += x[:, first * here.problem.group_size + number]
    return found


def test_gradients_that_are_summed_over_other_heads_two_key_heads_at_a_time_are_told():
    """With three key heads the last one is right."""
    cases = [case_of(heads=6, key_heads=3), case_of(heads=9, key_heads=3, size=2), case_of(heads=4, key_heads=2)]
    steps = replace(STEPS, per_key_head=summed_two_at_a_time)
    scenes, _ = seen(Implementation(ring_of(steps), "by turns", EVERYTHING), cases, gradients=True)
    words = "dk and dv of a key head are summed over h % 2 instead of its group, 2 key heads at a time"
    assert explaining(library(words), scenes) == [words]


@pytest.mark.parametrize("normalised", [False, True])
def test_what_travels_in_the_input_dtype_with_the_queries_is_told(normalised):
    """The blocks of the next ranks come after a rank's own; one rank sends nothing, though it may keep the dtype."""

    def attend(q, k, v, call):
        every = [[torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v)]
        for x, into in zip((k, v), every, strict=True):
            dist.all_gather(into, x.contiguous(), group=call.group)
        state = torch.full((*q.shape[:1], q.size(2), q.size(1), 1), -math.inf), 0.0, 0.0
        for hop in range(call.world_size):
            of_k, of_v = (x[(call.rank + hop) % call.world_size].float().transpose(1, 2) for x in every)
            s = call.scale * q.float().transpose(1, 2) @ of_k.transpose(2, 3)
            top = torch.maximum(state[0], s.amax(-1, keepdim=True))
            shrink, w = (state[0] - top).exp(), (s - top).exp()
            state = top, state[1] * shrink + w.sum(-1, keepdim=True), state[2] * shrink + w @ of_v
            if normalised:
                state = state[0] + state[1].log(), torch.ones_like(state[1]), state[2] / state[1]
            state = tuple(x.to(q.dtype).float() for x in state) if normalised or call.world_size > 1 else state
        top, total, out = state
        return (out / total).transpose(1, 2).to(q.dtype), (top + total.log())[..., 0]

    declared = Capabilities(dtypes=("bfloat16",), causal="never", lse=True, gradients=False)
    cases = [case_of(size=size, dtype="bfloat16") for size in (2, 3, 4)]
    scenes, _ = seen(Implementation(attend, "travelling", declared), cases, gradients=False)
    (found,) = {text for text in explaining(ROUNDED, scenes) if "every hop" in text}
    what = "out and lse are kept" if normalised else "the running maximum and both running sums travel"
    assert found.startswith(f"{what} in the input dtype, where queries travel to the right")


def test_a_fault_that_does_not_visit_every_block_is_limited_to_none_of_them():
    """What it would contribute to the others is not known."""
    steps = replace(STEPS, times_in_part=lambda here, hop, owner: (2, 2))
    scenes, _ = seen(Implementation(ring_of(steps), "twice", EVERYTHING), [case_of(query_length=1)], gradients=True)
    fewer = [one for one in HYPOTHESES if one.when == "backward" and "hops" in one.steps.changed]
    assert fewer
    assert not list(in_some_places(fewer, scenes[0]))


def test_a_softcap_in_float32_is_told_where_everything_else_is_float64():
    """And from parts of blocks that are: one rank is off too."""

    def attend(q, k, v, call):
        s, cap = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k), call.problem.softcap
        s = s if cap is None else cap * (s / cap).float().tanh().double()
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)

    cases = [case_of(size=1, dtype="float64", softcap=2.0), case_of(size=1, dtype="float64", softcap=5.0, seed=2)]
    declared = replace(LOCAL, causal="never", softcap=True, gradients=False, dtypes=("float64",))
    scenes, _ = seen(Implementation(attend, "cap", declared), cases, gradients=False)
    (found,) = explaining(NARROWED, scenes)
    assert found.startswith("the softcap is computed in float32")


def test_a_merge_in_float32_is_told_where_everything_else_is_float64():
    """On several ranks; one of them alone is right."""

    def merge(one, other):
        right = STEPS.merge(one, other)
        return Partial(right.out.float().double() + 1e-9, right.lse)

    cases = [case_of(size=size, dtype="float64") for size in (1, 2, 3)]
    merged = ring_of(replace(STEPS, merge=merge))
    (alone, *scenes), _ = seen(Implementation(merged, "merge", EVERYTHING), cases, gradients=False)
    assert not wrong_tensors(alone)
    found = [text for text in explaining(NARROWED, scenes) if "float32" in text]
    assert [text.split(",")[0] for text in found] == ["parts of blocks"]


def test_tiles_of_pages_that_are_skipped_by_their_last_position_are_told():
    """As if positions ascended: an earlier row of the tile is still in the window."""

    def attend(q, k, v, call):
        i, j = call.positions[:, None] + call.problem.diagonal, call.key_positions
        oldest = i.min() - call.problem.window[0]
        last = torch.arange(len(j)) // 3 * 3 + 2
        late = j[last.clamp(max=len(j) - 1)] < oldest if len(j) else j < 0
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        s = s.masked_fill((j > i) | (j < i - call.problem.window[0]) | late, -math.inf)
        return of_all_ranks(s, v, call)

    declared = Capabilities(
        query_sharding="replicated", key_sharding="pages", causal="always", lse=True, gradients=False, window=True,
        incremental=True, cross_lengths=True,
    )  # fmt: skip
    cases = [
        Case(
            problem=Problem(query_length=queries, key_length=11, heads=2, head_dim=3, causal=True, window=(left, None)),
            sharding="replicated/pages", world_size=len(table.pages), page_table=table, seed=1,
        )
        for queries, left in ((1, 2), (2, 4))
        for table in (PageTable(1, ((9, 10, 1, 2, 8, 0, 3), (4, 5, 6, 7))), PageTable(2, ((5, 0, 4), (3, 2, 1))))
    ]  # fmt: skip
    scenes, probe = seen(Implementation(attend, "by the last", declared), cases, gradients=False)
    scenes = [scene for scene in scenes if wrong_tensors(scene)]
    assert len(scenes) > 1
    found = explaining(reading.hypotheses(scenes, probe, lambda: 1), scenes)
    assert found[0] == (
        "a tile of 3 keys of a shard is skipped if its last one lies before the window of the rank's first query"
    )


def test_rows_that_the_first_tile_leaves_empty_are_told():
    """Of 3 queries of a shard, and 3 keys of all, of which one of the queries attends any."""

    def attend(q, k, v, call):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        i, j = torch.arange(q.size(1))[:, None], torch.arange(k.size(1))[None]
        mask = (j <= i) & (j >= i - call.window[0])
        out = (s.masked_fill(~mask, -math.inf)).softmax(-1) @ v.transpose(1, 2)
        for at in range(0, q.size(1), 3):
            rows = mask[at : at + 3]
            begin = next(begin for begin in range(0, k.size(1), 3) if rows[:, begin : begin + 3].any())
            out[:, :, at : at + 3][:, :, ~rows[:, begin : begin + 3].any(1)] = math.nan
        return out.transpose(1, 2)

    declared = Capabilities(world_sizes=(1,), causal="always", window=True, gradients=False, lse=False)
    cases = [case_of(causal=True, size=1, query_length=n, window=(1, None)) for n in (11, 8)]
    scenes, _ = seen(Implementation(attend, "tiles", declared), cases, gradients=False)
    assert explaining(undefined.hypotheses(scenes), scenes) == [
        f"rows that attend no key of the first tile of 3 keys{of_all} of which their tile of 3 queries attends any are "
        "NaN: -inf - (-inf) is not guarded"
        for of_all in (" of all", "")
    ]
