"""Exponentials in base 2 beside natural ones: which of the two a factor or a score is of, is told."""

import math

import pytest
import torch
import torch.distributed as dist
from mechanisms import case_of, explaining, library, seen

from ringverify.diagnosis.where import wrong_tensors
from ringverify.implementation import Capabilities, Implementation

DECLARED = Capabilities(causal="never", softcap=True, gradients=False, lse=False)
TILE = 2


def tiled(rescale, capped):
    """A ring whose kernel loops over tiles of two keys, with scores in base 2."""

    def attend(q, k, v, call):
        total = weighted = torch.zeros(1)
        top = torch.tensor(-math.inf)
        for hop in range(call.world_size):
            keys, values = ([torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v))
            dist.all_gather(keys, k.contiguous(), group=call.group)
            dist.all_gather(values, v.contiguous(), group=call.group)
            owner = (call.rank - hop) % call.world_size
            for at in range(0, k.size(1), TILE):
                s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, keys[owner][:, at : at + TILE])
                s = s / math.log(2) if call.softcap is None else capped(call.softcap * (s / call.softcap).tanh())
                most = torch.maximum(top, s.amax(-1, keepdim=True))
                factor, w = rescale(top - most), (s - most).exp2()
                total = total * factor + w.sum(-1, keepdim=True)
                weighted = weighted * factor + torch.einsum("bhqk,bkhd->bhqd", w, values[owner][:, at : at + TILE])
                top = most
        return (weighted / total).transpose(1, 2)

    return Implementation(attend, "tiled", DECLARED)


def in_base_2(s):
    """Right."""
    return s / math.log(2)


WRONG = {
    "the factor by which running sums over tiles of 2 keys of all blocks are rescaled is exp of what are logarithms in "
    "base 2": (tiled(torch.exp, in_base_2), [{}, {"size": 2, "query_length": 10, "softcap": 3.0}]),
    "scores lack the factor log2(e) where they are capped": (
        tiled(torch.exp2, lambda s: s),
        [{"softcap": 3.0}, {"softcap": 1.0, "size": 2}],
    ),
}


def gathered(rescaled):
    """Attention to all keys in the order of positions, by tiles of 3, whose sums are rescaled or not."""

    def attend(q, k, v, call):
        keys, values = ([torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v))
        dist.all_gather(keys, k.contiguous(), group=call.group)
        dist.all_gather(values, v.contiguous(), group=call.group)
        s, v = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, torch.cat(keys, 1)), torch.cat(values, 1)
        total, weighted, top = torch.zeros(1), torch.zeros(1), torch.tensor(-math.inf)
        for at in range(0, s.size(-1), 3):
            most = torch.maximum(top, s[..., at : at + 3].amax(-1, keepdim=True))
            factor, w, top = (top - most).exp(), (s[..., at : at + 3] - most).exp(), most
            total = (factor if rescaled else 1) * total + w.sum(-1, keepdim=True)
            weighted = factor * weighted + torch.einsum("bhqk,bkhd->bhqd", w, v[:, at : at + 3])
        return (weighted / total).transpose(1, 2)

    return Implementation(attend, "gathered", DECLARED)


def test_sums_over_tiles_of_all_keys_are_told():
    """Tiles reach over the ends of shards."""
    cases = [case_of(size=size, query_length=8 * size) for size in (1, 2, 3)]
    scenes, _ = seen(gathered(rescaled=False), cases, gradients=False)
    assert all(wrong_tensors(scene) for scene in scenes)
    (cause,) = library(
        "the running sum of exponentials over tiles of 3 keys of all, in the order of positions, is not rescaled where "
        "the maximum grows"
    )
    assert all(cause.explains(scene) is not None for scene in scenes)
    right, _ = seen(gathered(rescaled=True), cases, gradients=False)
    assert not any(wrong_tensors(scene) for scene in right)


def merged_in_two_bases(q, k, v, call):
    """Log-sum-exps of blocks, in base 2, are merged by logaddexp."""
    keys, values = ([torch.empty_like(x) for _ in range(call.world_size)] for x in (k, v))
    dist.all_gather(keys, k.contiguous(), group=call.group)
    dist.all_gather(values, v.contiguous(), group=call.group)
    out = lse = None
    for hop in range(call.world_size):
        owner = (call.rank - hop) % call.world_size
        s = call.scale / math.log(2) * torch.einsum("bqhd,bkhd->bhqk", q, keys[owner])
        of_block = s.exp2().sum(-1).log2()
        part = torch.einsum("bhqk,bkhd->bhqd", (s - of_block[..., None]).exp2(), values[owner])
        if out is None:
            out, lse = part, of_block
        else:
            both = torch.logaddexp(lse, of_block)
            out = out * (lse - both).exp2()[..., None] + part * (of_block - both).exp2()[..., None]
            lse = both
    return out.transpose(1, 2)


def test_a_merge_of_logarithms_in_another_base_is_told():
    """Weights are powers of the right base, and do not add up to 1."""
    implementation = Implementation(merged_in_two_bases, "merged", DECLARED)
    scenes, _ = seen(implementation, [case_of(size=size, query_length=6 * size) for size in (2, 3)], gradients=False)
    words = "log-sum-exps are merged by logaddexp, where they are logarithms in base 2"
    assert words in explaining(library(words), scenes)


@pytest.mark.parametrize("words", WRONG)
def test_a_base_that_is_taken_for_another_is_told(words):
    """In all cases that it shows in, and nothing in another."""
    implementation, shapes = WRONG[words]
    scenes, _ = seen(implementation, [case_of(**shape) for shape in shapes], gradients=False)
    assert all(wrong_tensors(scene) for scene in scenes)
    (cause,) = library(words)
    assert all(cause.explains(scene) is not None for scene in scenes)
    right, _ = seen(tiled(torch.exp2, in_base_2), [case_of(softcap=3.0)], gradients=False)
    assert not wrong_tensors(right[0])
    assert cause.explains(right[0]) is None
