"""Gradients of which rows do not come back, or are those of other rows, and heads that come back in another order."""

import math
from dataclasses import replace

import pytest
import torch
from mechanisms import case_of, explaining, library, of_gradients, seen

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.diagnosis.gradients import crossing
from ringverify.diagnosis.rearranging import REARRANGED
from ringverify.diagnosis.when.scores import conditions_on_scores, of_scores
from ringverify.faults.place import Block
from ringverify.faults.ring import EVERYTHING, PLAIN, STEPS, multiplicity, ring_of
from ringverify.implementation import Capabilities, Implementation


def told(steps, cases, hypotheses):
    """The sentences that explain a ring of these steps."""
    scenes, _ = seen(Implementation(ring_of(steps), "returned", EVERYTHING), cases, gradients=True)
    return explaining(hypotheses(scenes), scenes)


def cut_at(kept):
    """Rows of dk and dv from this one on are 0."""

    def returned(here, dq, dk, dv):
        rows = torch.arange(dk.size(1))[:, None, None] < kept(here, dk.size(1))
        return dq, dk * rows, dv * rows

    return replace(STEPS, returned_gradients=returned)


KEPT = {
    "rows // ranks": lambda here, rows: here.problem.nk // here.size,
    "the last rank's number of rows": lambda here, rows: len(here.shards[-1]),
    "the last but one of a shard": lambda here, rows: rows - 1,
}


@pytest.mark.parametrize("past", KEPT)
def test_rows_of_gradients_that_do_not_come_back_are_told(past):
    """As many as some rank holds, or all but one."""
    cases = [case_of(query_length=11), case_of(query_length=7, size=2)]
    assert f"the rows of dk and dv past {past} come back as 0" in told(cut_at(KEPT[past]), cases, of_gradients)


def test_rows_that_padding_writes_over_are_told():
    """The first of a shard that is shorter than others."""
    steps = replace(
        STEPS,
        returned_gradients=lambda here, dq, dk, dv: (
            dq, dk, dv * (torch.arange(dv.size(1))[:, None, None] >= (dv.size(1) < len(here.shards[0])))
        ),
    )  # fmt: skip
    found = told(steps, [case_of(query_length=11), case_of(query_length=7, size=2)], of_gradients)
    assert any(
        one.startswith("what a head, or a branch of a dilation, adds to dv of a shard's first row") for one in found
    )


@pytest.mark.parametrize("padding", [False, True])
def test_lse_of_a_shards_first_rows_for_each_document_is_told(padding):
    """Where these are in no document their lse is −inf, and weights are infinite."""

    def gradients(steps, here, hop, owner, rows, block):
        q, dout, delta, lse = rows
        number = torch.bucketize(here.call.positions, torch.tensor(here.problem.documents), right=True)
        first = torch.stack([(number < one).sum() for one in number])
        return STEPS.gradients(
            steps, here, hop, owner, (q, dout, delta, lse[..., torch.arange(len(first)) - first]), block
        )

    cases = [case_of(documents=(0, 2, 7, 12)), case_of(documents=(0, 5, 12), size=2)]
    cases += [case_of(documents=(2, 7, 12), size=1)] if padding else []
    words = "the backward takes lse of the first rows of a shard instead of those of a document"
    assert words in told(replace(STEPS, gradients=gradients), cases, crossing.hypotheses)


def test_sums_that_ranks_keep_of_their_own_keys_alone_are_told():
    """What has arrived for other keys of the block is dropped."""

    def travel(steps, here, hop, owner, carried, part):
        seen = multiplicity(steps, here, hop, owner).any(dim=2).any(dim=1).any(dim=0)
        if hop and bool(seen.any()):
            carried = Block(*(x * seen[:, None, None] for x in carried))
        return STEPS.travel(steps, here, hop, owner, carried, part)

    cases = [case_of(sharding="zigzag", causal=True), case_of(sharding="zigzag", causal=True, size=2, query_length=7)]
    words = (
        "on keys that a rank further on the way of their block does not attend, though others of it: what is added to "
    )
    assert f"{words}dk and dv is missing" in told(replace(STEPS, travel=travel), cases, of_gradients)


@pytest.mark.parametrize("front", [True, False])
def test_heads_that_are_filled_up_at_the_wrong_end_are_told(front):
    """The first heads of results are those of heads of zeros, or the last ones."""

    def attend(q, k, v, call):
        fill = -q.size(2) % call.world_size
        wide = [torch.nn.functional.pad(x, (0, 0, *((fill, 0) if front else (0, fill)))) for x in (q, k, v)]
        many = call.problem.replace(heads=q.size(2) + fill, key_heads=None)
        out, lse = PLAIN.function(*wide, replace(call, problem=many))
        cut = slice(0, q.size(2)) if front else slice(fill, None)
        return out[:, :, cut], lse[:, cut]

    cases = [case_of(heads=2), case_of(size=2, heads=3, query_length=7), case_of(heads=1), case_of(size=4, heads=5)]
    scenes, _ = seen(Implementation(attend, "filled", EVERYTHING), cases, gradients=True)
    ends = ("in front", "at the end") if front else ("at the end", "in front")
    words = "heads are filled up to a multiple of the ranks {}, and those of results are left out {}"
    assert words.format(*ends) in explaining(REARRANGED, scenes)


def test_key_heads_that_a_rank_reads_by_turns_are_told():
    """After an exchange in which each rank has whole groups of heads."""

    def of(p, size):
        each = p.hk // size
        return [h // (p.heads // size) * each + h % each for h in range(p.heads)]

    def per_key_head(here, x):
        found = x.new_zeros((x.size(0), here.problem.hk, *x.shape[2:]))
        return found.index_add_(1, torch.tensor(of(here.problem, here.size)), x)

    steps = replace(STEPS, per_query_head=lambda here, x: x[:, of(here.problem, here.size)], per_key_head=per_key_head)
    cases = [case_of(size=2, heads=8, key_heads=4), case_of(size=3, heads=12, key_heads=6)]
    scenes, _ = seen(Implementation(ring_of(steps), "by turns", EVERYTHING), cases, gradients=True)
    words = (
        "grouped heads: a query head reads the wrong key head, one of its rank by turns, where the ranks divide the "
    )
    assert explaining(library(f"{words}key heads"), scenes)


class Turned(torch.autograd.Function):
    """The identity, whose gradient has its heads (rank, head) in the order (head, rank)."""

    @staticmethod
    def forward(ctx, x, size):
        ctx.size = size
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):
        return dx.unflatten(2, (ctx.size, -1)).transpose(2, 3).flatten(2, 3).contiguous(), None


def test_copies_of_key_heads_whose_gradients_come_back_in_another_order_are_told():
    """As many copies as it takes for the ranks to divide them; they are summed after that."""

    def attend(q, k, v, call):
        times = math.lcm(call.problem.hk, call.world_size) // call.problem.hk
        k, v = (Turned.apply(x.repeat_interleave(times, dim=2), call.world_size) for x in (k, v))
        told = call.problem.replace(key_heads=k.size(2))
        return PLAIN.function(Turned.apply(q, call.world_size), k, v, replace(call, problem=told))

    cases = [case_of(size=2, heads=8, key_heads=1, head_dim=4), case_of(size=4, heads=8, key_heads=2)]
    cases.append(case_of(size=3, heads=12, key_heads=4))
    scenes, _ = seen(Implementation(attend, "copies", EVERYTHING), cases, gradients=True)
    assert explaining(REARRANGED, scenes) == [
        "gradients that are right come back in another place: heads (rank, head) as (head, rank), of key heads with "
        "copies that the ranks divide, before these are summed"
    ]


def test_copies_for_every_query_head_whose_gradients_come_back_in_another_order_are_told():
    """Where the ranks divide the key heads, these have none."""

    def attend(q, k, v, call):
        p = call.problem
        copies = p.group_size if p.hk % call.world_size else 1
        k, v = (Turned.apply(x.repeat_interleave(copies, dim=2), call.world_size) for x in (k, v))
        told = replace(call, problem=p.replace(key_heads=k.size(2)))
        return PLAIN.function(Turned.apply(q, call.world_size), k, v, told)

    cases = [
        case_of(size=2, heads=12, key_heads=3),
        case_of(size=4, heads=8, key_heads=2),
        case_of(size=4, heads=8, key_heads=4),
    ]
    scenes, _ = seen(Implementation(attend, "copies", EVERYTHING), cases, gradients=True)
    assert explaining(REARRANGED, scenes) == [
        "gradients that are right come back in another place: heads (rank, head) as (head, rank), of key heads with a "
        "copy for each query head, where the ranks do not divide them, before these are summed"
    ]


def test_how_far_scores_grow_is_a_condition():
    """From the rank's own block to those of the ranks before it, of the query for which it is most."""
    case = Case(problem=Problem(query_length=6), world_size=3, values="rising_blocks", seed=3)
    declared = Capabilities()
    growth = of_scores(case, declared)["growth"]
    assert growth > 0
    assert of_scores(case.replace(world_size=1), declared)["growth"] == 0
    far = {**of_scores(case, declared), "growth": 95.0}
    (condition,) = [one for one in conditions_on_scores([far]) if one.about == ("growth",)]
    assert condition.text == "a query whose running maximum grows by more than about 95 at a later hop"
    assert condition.meets(far)
    assert not condition.meets(of_scores(case.replace(world_size=1), declared))
