"""Arithmetic of attention written by hand that goes wrong in one step: the cause explains its numbers."""

import math
from dataclasses import replace

import pytest
import torch
from mechanisms import case_of, explaining, library, of_all_ranks, of_gradients, seen

from ringref.problem import Dilation
from ringref.sharding import pieces
from ringverify.diagnosis.merging_branches import MERGED_BRANCHES
from ringverify.diagnosis.substituting import SUBSTITUTED
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.place import Block, like
from ringverify.faults.ring import EVERYTHING, STEPS, ring_of, visit
from ringverify.implementation import Capabilities, Implementation


def attention_by_maximum(q, k, v, call, maximum):
    """Attention over all keys, of which the maximum of scores `(B, H, S, T)` is given by a function."""
    k, v = (torch.cat(of_all_ranks(x, call), dim=1) for x in (k, v))
    s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    if call.causal:
        s = s.masked_fill(torch.arange(k.size(1)) > call.positions[:, None], -math.inf)
    top = maximum(s).expand(s.shape[:3])
    w = torch.exp(s - top[..., None])
    total = w.sum(-1)
    if call.sinks is not None:
        total = total + torch.exp(call.sinks.to(s.dtype)[:, None] - top)
    safe = torch.where(total == 0, 1.0, total)
    out = torch.einsum("bhqk,bkhd->bqhd", w / safe[..., None], v)
    return out, torch.where(total == 0, -math.inf, top + safe.log())


@pytest.mark.parametrize(
    ("axes", "whose"),
    [((-2, -1), "in each head"), ((-3, -2, -1), "of all heads"), ((-4, -3, -2, -1), "of the whole batch")],
)
def test_a_maximum_that_rows_share_is_told(axes, whose):
    """Rows far below it underflow."""

    def attend(q, k, v, call):
        return attention_by_maximum(q, k, v, call, lambda s: s.amax(axes, keepdim=True)[..., 0])

    declared = Capabilities(causal="always", lse=True, gradients=False)
    cases = [
        case_of(causal=True, size=size, batch=2, heads=3, values="large_scores", seed=seed)
        for size in (1, 2)
        for seed in (1, 2)
    ]
    scenes, _ = seen(Implementation(attend, "shared", declared), cases, gradients=False)
    words = f"the maximum that is subtracted is one for all rows of a rank, {whose}: rows far below it are lost"
    assert explaining(SUBSTITUTED, scenes) == [words]


def test_a_maximum_that_leaves_sinks_out_is_told():
    """Whose exponential overflows."""

    def attend(q, k, v, call):
        return attention_by_maximum(q, k, v, call, lambda s: s.amax(-1))

    declared = Capabilities(causal="never", lse=True, gradients=False, sinks=True)
    cases = [case_of(sinks=True, size=size, values="large_scores", seed=seed) for size in (1, 2) for seed in range(12)]
    scenes, _ = seen(Implementation(attend, "without sinks", declared), cases, gradients=False)
    scenes = [scene for scene in scenes if wrong_tensors(scene)]
    assert len(scenes) > 1
    words = "the maximum that is subtracted leaves sinks out: lse is infinite where exp(sink - largest score) overflows"
    assert words in explaining(SUBSTITUTED, scenes)


def changed_blocks(change):
    """The ring whose blocks of hops from 1 on are changed; those of all hops so far are given, the rank's own first."""

    def visited(steps, here, block):
        every = []
        for hop, owner, arrived in visit(steps, here, block):
            every.append(arrived)
            yield hop, owner, change(here, every, owner)

    return replace(STEPS, visit=visited)


def test_a_rank_that_sends_its_own_block_at_every_hop_is_told():
    """So that the left neighbour's comes again and again."""
    steps = changed_blocks(lambda here, every, owner: like(every[min(len(every) - 1, 1)], here, owner))
    scenes, _ = seen(
        Implementation(ring_of(steps), "own", EVERYTHING), [case_of(size=size) for size in (3, 4)], gradients=True
    )
    words = "keys and values of the wrong block: from hop 1 on that of hop 1, as every rank sends its own"
    assert words in explaining(library(words), scenes)


@pytest.mark.parametrize(("of", "for_what"), [("v", "keys"), ("k", "values")])
def test_one_buffer_of_keys_and_values_is_told(of, for_what):
    """The later ones are written over the earlier ones."""
    steps = changed_blocks(lambda here, every, owner: Block(*(getattr(every[-1], of) for _ in "kv")))
    scenes, _ = seen(
        Implementation(ring_of(steps), "one buffer", EVERYTHING),
        [case_of(size=size) for size in (1, 3)],
        gradients=True,
    )
    kept = "values" if of == "v" else "keys"
    words = f"{kept} stand in the place of {for_what}, where both have the same shape"
    assert words in explaining(library(words), scenes)


@pytest.mark.parametrize("heads", ["shared", "split"])
def test_a_merge_of_branches_by_the_first_and_the_latest_log_sum_exp_is_told(heads):
    """What comes between lacks in the denominator."""

    def attend(q, k, v, call):
        branches, i = call.dilation.branches, torch.arange(q.size(1))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        out, lse, first = torch.zeros_like(q), None, None
        for number, (w, r) in enumerate(branches):
            head = torch.arange(q.size(2))
            offset = head % r if heads == "shared" else torch.full_like(head, number % r)
            covered = (i[None] % w % r == offset[:, None]) & ((heads == "shared") | (head == number))[:, None]
            there = covered[:, :, None] & covered[:, None] & (i[:, None] // w == i // w)
            part = s.masked_fill(~there, -math.inf)
            new = part.logsumexp(-1)
            p = torch.exp(part - torch.where(new == -math.inf, 0.0, new)[..., None])
            of_part = torch.einsum("bhqk,bkhd->bqhd", p, v)
            first = new if first is None else first
            total = new if lse is None else torch.logaddexp(first, new)
            shift = torch.where(total == -math.inf, 0.0, total)
            before = 0.0 if lse is None else torch.exp(lse - shift).transpose(1, 2)[..., None] * out
            out = before + torch.exp(new - shift).transpose(1, 2)[..., None] * of_part
            lse = total
        return out, lse

    declared = Capabilities(world_sizes=(1,), causal="never", lse=True, gradients=False, dilation=(heads,))
    dilation = Dilation(((12, 2), (6, 1), (4, 2)), heads)
    cases = [case_of(size=1, heads=3, dilation=dilation, seed=seed) for seed in (1, 2)]
    scenes, _ = seen(Implementation(attend, "folded", declared), cases, gradients=False)
    words = (
        "branches of a dilation are merged by the log-sum-exp of the first and the latest: those between are left out"
    )
    assert explaining(MERGED_BRANCHES, scenes) == [words]


@pytest.mark.parametrize(
    ("scaled", "sloped", "after"),
    [
        (False, True, "the multiplication by the scale"),
        (True, False, "the derivative of the softcap"),
        (False, False, "the derivative of the softcap and the scale"),
    ],
)
def test_a_cotangent_of_lse_that_joins_too_late_is_told(scaled, sloped, after):
    """Without the factors that the rest of the gradient of a score has."""

    def gradients(steps, here, hop, owner, rows, block):
        q, *_, lse = rows
        dq, parts = STEPS.gradients(steps, here, hop, owner, rows, block)
        k = steps.per_query_head(here, steps.widen(here, block.k))
        s = steps.capped(steps, here, q, k)
        p = steps.probabilities(s, steps.pattern(steps, here, hop, owner), lse)
        slope, scale = steps.cap_slope(s, here.problem.softcap), steps.scale(here)
        late = (scale if scaled else 1.0) * (slope if sloped else 1.0) - scale * slope
        more = p * late * here.notes["dlse"][..., None]
        of_k = steps.per_key_head(here, more.transpose(2, 3) @ q).transpose(1, 2)
        return dq + more @ k, parts._replace(k=parts.k + of_k)

    def backward(steps, here, saved, dout, dlse):
        here.notes["dlse"] = dlse.to(here.wide)
        return STEPS.backward(steps, here, saved, dout, dlse)

    steps = replace(STEPS, gradients=gradients, backward=backward)
    cases = [case_of(softcap=2.0, size=size, cotangent="both") for size in (1, 3)]
    scenes, _ = seen(Implementation(ring_of(steps), "late", EVERYTHING), cases, gradients=True)
    words = f"the cotangent of lse is added to the gradient of the scores after {after} instead of before"
    assert words in explaining(of_gradients(scenes), scenes)


def test_a_rank_without_keys_whose_log_sum_exp_is_0_is_told():
    """Blocks that a mask hides have −inf, as they should."""

    def attend(q, k, v, call):
        whole = torch.cat(of_all_ranks(q, call), dim=1)
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", whole, k)).masked_fill(
            call.key_positions > torch.arange(whole.size(1))[:, None] + call.problem.diagonal, -math.inf
        )
        empty = torch.zeros(s.shape[:3])
        lse = s.logsumexp(-1) if k.size(1) else empty
        p = torch.exp(s - torch.where(lse == -math.inf, 0.0, lse)[..., None])
        out = torch.einsum("bhqk,bkhd->bqhd", p, v)
        outs, lses = torch.stack(of_all_ranks(out, call)), torch.stack(of_all_ranks(lse, call))
        total = lses.logsumexp(0)
        merged = (torch.exp(lses - total).transpose(2, 3)[..., None] * outs).sum(0)
        own = slice(call.rank * q.size(1), (call.rank + 1) * q.size(1))
        return merged[:, own], total[..., own]

    declared = Capabilities(
        causal="always", cross_lengths=True, empty_shards=True, uneven=True, lse=True, gradients=False
    )
    cases = [
        case_of(causal=True, size=size, query_length=2 * size, key_length=nk) for size, nk in ((3, 2), (4, 2), (4, 3))
    ]
    scenes, _ = seen(Implementation(attend, "empty", declared), cases, gradients=False)
    words = "the block of a rank that holds no keys has lse 0"
    assert words in explaining(library(words), scenes)
    assert not explaining(library("a block without visible keys has lse 0"), scenes)


@pytest.mark.parametrize(("by_piece", "whose"), [(False, "of the rows"), (True, "of the pieces")])
def test_a_dq_that_blocks_write_over_is_told(by_piece, whose):
    """In those rows of a rank that attend a block, or in the zigzag pieces in which they lie."""

    def add_dq(here, hop, total, part):
        there = (STEPS.pattern(STEPS, here, hop, (here.rank - hop) % here.size) > 0).any(-1)
        half = len(pieces(here.problem.nq, 2 * here.size)[here.rank])
        for rows in (slice(half), slice(half, None)) if by_piece else ():
            there[..., rows] = there[..., rows].any()
        return torch.where(there[..., None], part, total)

    cases = [
        case_of(sharding="zigzag", size=size, causal=True, query_length=14, documents=cuts)
        for size in (2, 3)
        for cuts in (None, (0, 5, 9, 14))
    ]
    scenes, _ = seen(
        Implementation(ring_of(replace(STEPS, add_dq=add_dq)), "assigned", EVERYTHING), cases, gradients=True
    )
    words = f"each block overwrites the dq {whose} that attend it: nothing is added up"
    assert words in explaining(library(words), scenes)
