"""Faults of shapes at the edge (G in the reports)."""

from __future__ import annotations

from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.fault import Faults
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, forward, returning, whole
from ringverify.faults.tiles import chunked, first_dimensions, last_tile

FAULTS = Faults()


def _needs_a_chunk(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    chunks = [shard for shard in here.shards if len(shard)]
    chunks[here.rank]  # as an index into what a split returned
    return forward(steps, here, q, k, v)


G1 = FAULTS.add(
    "G1",
    "fewer tokens than ranks",
    story="The chunk of a rank that has none is looked up and is not there.",
    source="lucidrains/ring-attention-pytorch cc1aea8, ab57c27",
    kind="failure",
    ring=replace(STEPS, forward=_needs_a_chunk),
)


def _dead_rank(here: Here, found: Partial) -> Partial:
    dead = found.lse.numel() and bool((found.lse == -torch.inf).all())
    return found._replace(out=found.out / 0.0) if dead else found


G2 = FAULTS.add(
    "G2",
    "a rank whose tokens are all masked",
    story="0 / 0 on that rank alone. Needs padding longer than a shard.",
    source="Megatron-LM#1764",
    ring=whole(_dead_rank),
    cause="out is NaN on a rank on which no query attends a key",
)
G3a = FAULTS.add(
    "G3a",
    "no keys at all",
    story="The maximum over an empty axis raises. Needs a block of no keys.",
    source="flash-attention#2470",
    kind="failure",
    ring=replace(STEPS, skip=lambda here, hop, owner, m: False),
)


def _by_key_count(here: Here, whole: Partial) -> Partial:
    if here.problem.nk == 0:
        whole = whole._replace(out=whole.out / 0.0)
    return whole


G3b = FAULTS.add(
    "G3b",
    "NaN where there are no keys",
    story="0 / 0 for a sequence of no keys: out is NaN in place of 0. Needs Nk = 0 and queries.",
    source="flash-attention#2421, #2515 (l)",
    ring=replace(STEPS, together=lambda steps, here, whole: _by_key_count(here, STEPS.together(steps, here, whole))),
    cause="out is NaN where there are no keys at all",
)


G5a = FAULTS.add(
    "G5a",
    "one query: lse not written",
    story="The special case for one row forgets lse. The output is right; a shard of one token shows it.",
    source="xformers 41646dbb",
    ring=returning(lambda here, out, lse: (out, torch.zeros_like(lse) if lse.size(-1) == 1 else lse)),
    cause="lse of a rank with one query is not written: it is 0",
)


def _one_row_saved(here: Here, saved: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    *others, lse = saved
    return (*others, torch.zeros_like(lse) if lse.size(-1) == 1 else lse)


G5b = FAULTS.add(
    "G5b",
    "one query: backward gets no lse",
    story="As G5a, but what is returned is right and what is saved is not.",
    source="xformers 41646dbb",
    ring=replace(STEPS, kept=_one_row_saved),
    cause="the backward of a rank with one query has no lse: it counts as 0",
)


def _one_key(s: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Partial:
    found = arithmetic.partial(s, m, v)
    return found._replace(lse=torch.zeros_like(found.lse)) if s.size(-1) == 1 else found


G5c = FAULTS.add(
    "G5c",
    "one key: lse not written",
    story="A block of one key has lse 0; the merge weighs it wrongly.",
    source="xformers 41646dbb",
    ring=replace(STEPS, partial=_one_key),
    cause="the lse of a block of one key is not written: it is 0",
)

G6 = FAULTS.add(
    "G6",
    "mask cut by chunk(size), keys by split(size)",
    story="The same for n = size²; elsewhere a tile of keys is masked as other keys. Needs a mask and another length.",
    source="lucidrains/ring-attention-pytorch 0f748b2",
    ring=chunked(2),
    when="forward",
)

O92 = FAULTS.add(
    "O92",
    "only the last tile of 32 keys counts",
    story="Right for blocks of one tile, whatever their shape; real kernels have tiles of 16 to 128 keys. Needs a "
    "shard longer than a tile.",
    ring=last_tile(32),
    when="forward",
)
O93 = FAULTS.add(
    "O93",
    "dimensions past the 32nd left out of the scores",
    story="A kernel compiled for 32 dimensions. Needs a larger head_dim.",
    ring=first_dimensions(32),
)
