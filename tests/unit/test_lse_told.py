"""What lse is instead, by formula; and a key of 0 that counts beside all others."""

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from mechanisms import case_of, explaining, library, seen

from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import EVERYTHING, STEPS, ring_of
from ringverify.implementation import Capabilities, Implementation

DECLARED = Capabilities(causal="never", gradients=False, lse=True)


def parts(q, k, v, call):
    """Scores of each rank's keys, and its values."""
    keys, values = ([torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v))
    dist.all_gather(keys, k.contiguous(), group=call.group)
    dist.all_gather(values, v.contiguous(), group=call.group)
    return [(call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k), v) for k, v in zip(keys, values, strict=True)]


def attend(lse_of, key_of_0=False):
    """Attention by log-sum-exps of the ranks' keys, of which another lse is made."""

    def attended(q, k, v, call):
        every = parts(q, k, v, call)
        lses = torch.stack([s.logsumexp(-1) for s, _ in every])
        whole = torch.cat([lses, torch.zeros_like(lses[:1])]).logsumexp(0) if key_of_0 else lses.logsumexp(0)
        out = sum(torch.einsum("bhqk,bkhd->bqhd", (s - whole[..., None]).exp(), x) for s, x in every)
        top = torch.stack([s.amax(-1) for s, _ in every]).amax(0)
        return out, lse_of(whole, top, lses)

    return Implementation(attended, "by parts", DECLARED)


WRONG = {
    "lse lacks the maximum of the scores: it is the logarithm of the sum of exp(… - the maximum of the scores) alone": (
        attend(lambda whole, top, lses: whole - top)
    ),
    "lse is the maximum of the scores and the logarithm of the sum in base 2": (
        attend(lambda whole, top, lses: top + (whole - top) / math.log(2))
    ),
    "lse lacks the largest lse of the parts that are merged": (attend(lambda whole, top, lses: whole - lses.amax(0))),
    "the running lse starts at 0 instead of -inf: a key of score 0 and value 0 counts beside all others": (
        attend(lambda whole, top, lses: whole, key_of_0=True)
    ),
}


@pytest.mark.parametrize("words", WRONG)
def test_another_lse_is_told(words):
    """By the formula that it follows in all cases."""
    cases = [case_of(size=size, query_length=4 * size, seed=size) for size in (2, 3)]
    scenes, _ = seen(WRONG[words], cases, gradients=False)
    assert all("lse" in wrong_tensors(scene) for scene in scenes)
    told = [one.sentence() for one in HYPOTHESES if all(one.explains(scene) is not None for scene in scenes)]
    assert told
    assert all(one.startswith(words) for one in told)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (0, "lse is log(number of keys) in rows without keys, whose scores are taken for 0"),
        (1, "lse is log(number of keys + 1) in rows without keys, whose scores are taken for 0, and that of a sink"),
    ],
)
def test_an_lse_of_rows_without_keys_whose_scores_are_0_is_told(more, words):
    """A safe softmax, whose lse is not put back."""

    def returned(here, found):
        out, lse = STEPS.returned(here, found)
        return out, torch.where(lse == -math.inf, math.log(here.problem.nk + more), lse)

    safe = Implementation(ring_of(replace(STEPS, returned=returned)), "safe", EVERYTHING)
    cases = [case_of(causal=True, key_length=n, sinks=sinks) for n, sinks in ((5, False), (7, False), (5, True))]
    (*scenes, sunk), _ = seen(safe, cases, gradients=False)
    assert not wrong_tensors(sunk)
    told = [one.sentence() for one in HYPOTHESES if all(one.explains(scene) is not None for scene in (*scenes, sunk))]
    assert told == [words]


def test_of_a_right_lse_nothing_is_told():
    """By none of these formulas."""
    scenes, _ = seen(attend(lambda whole, top, lses: whole), [case_of(size=2, query_length=8)], gradients=False)
    assert not wrong_tensors(scenes[0])
    named = [one for one in HYPOTHESES if one.sentence(scenes[0]).startswith(tuple(WRONG))]
    assert named
    assert all(one.explains(scenes[0]) is None for one in named)


def test_a_merge_whose_weights_are_exponentials_of_log_sum_exps_is_told():
    """Each part is stabilised, and their weights are not."""

    def attended(q, k, v, call):
        every = parts(q, k, v, call)
        lses = torch.stack([s.logsumexp(-1) for s, _ in every])
        outs = torch.stack([torch.einsum("bhqk,bkhd->bhqd", s.softmax(-1), x) for s, x in every])
        w = lses.exp()
        total = w.sum(0)
        out = (w[..., None] * outs).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
        return out.transpose(1, 2), total.log()

    cases = [case_of(size=size, query_length=4 * size, values="large_scores", seed=size) for size in (1, 2, 3)]
    scenes, _ = seen(Implementation(attended, "unshifted", DECLARED), cases, gradients=False)
    words = (
        "the merge overflows: its weights are exp(lse), without a shift, and lse is the logarithm of their sum, from "
        "the first block on"
    )
    assert words in explaining(library(words), scenes)
