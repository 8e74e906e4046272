"""Faults of masks and of the positions they are made of (B in the reports)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ringref.problem import Problem
from ringref.sharding import pieces
from ringverify.faults import pattern
from ringverify.faults.fault import Faults, on_blocks
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, multiplicity

FAULTS = Faults()


def cut(positions: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Cut positions, or repeat the last one, to the number of those that are masked as if they had them."""
    return positions[torch.arange(len(like)).clamp(max=len(positions) - 1)] if len(positions) else like


def keys_of(rank: Callable[[Here, int, int], int]) -> Steps:
    """Mask keys as if they had the positions of another rank's keys."""
    return replace(
        STEPS,
        keys=lambda here, hop, owner: cut(here.shards[rank(here, hop, owner) % here.size], here.shards[owner]),
    )


def by_block(attends: Callable[[int, int], bool | None]) -> Steps:
    """Decide the causal mask by whole blocks, from the ranks of owner and queries; `None` leaves a block as it is."""

    def masked(steps: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
        whole = attends(owner, here.rank)
        if whole is not None:
            steps = replace(steps, causal=lambda problem, i, j: torch.full_like(i - j, whole, dtype=torch.bool))
        return multiplicity(steps, here, hop, owner)

    return replace(STEPS, pattern=masked)


B1 = FAULTS.add(
    "B1",
    "block predicate inverted",
    story="Causal: later ranks' blocks are attended whole and earlier ones skipped. Any causal world of two, if every "
    "rank is looked at.",
    source="zhuzilin/ring-flash-attention 63b1c31",
    ring=by_block(lambda owner, rank: None if owner == rank else owner > rank),
    cause="causal mask inverted between blocks: later ranks are attended, earlier are not",
    masks=True,
)
B2 = FAULTS.add(
    "B2",
    "ring direction against source index",
    story="Blocks move right while the mask takes them to come from rank + hop. Left is right in a world of two, and "
    "without a mask the order does not matter: needs three ranks and causality.",
    source="lucidrains/ring-attention-pytorch 51ec491, e974570",
    ring=keys_of(lambda here, hop, owner: here.rank + hop),
    cause="the block of hop h is masked as that of rank + h: the ring turns the other way",
    also=("backward", "forward"),
)
B3 = FAULTS.add(
    "B3",
    "mask chunk picked by the hop",
    story="The chunk of the mask belongs to rank hop instead of rank − hop.",
    source="TransformerEngine b3e64d19f",
    ring=keys_of(lambda here, hop, owner: hop),
    cause="the block of hop h is masked as that of rank h",
    also=("backward", "forward"),
)


def _own_padding(steps: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
    own = cut(here.shards[here.rank], here.shards[owner])[None, :]
    padded = replace(steps, key_lengths=lambda problem, j: pattern.key_lengths(problem, own))
    return multiplicity(padded, here, hop, owner)


B4 = FAULTS.add(
    "B4",
    "key padding does not travel with the keys",
    story="Every block is masked by this rank's own padding. Needs key lengths that end in one shard.",
    source="lucidrains/ring-attention-pytorch 57cf3fc; huggingface/diffusers#13756",
    ring=replace(STEPS, pattern=_own_padding),
    cause="padding does not travel: every block is masked by this rank's own key_lengths",
    also=("backward", "forward"),
)
B8a = FAULTS.add(
    "B8a",
    "causal mask aligned top-left",
    story="j ≤ i where the last query should attend the last key. Needs as many queries as keys not to be given.",
    source="flash-attention#282, #436; onnx#8068",
    ring=replace(STEPS, causal=lambda problem, i, j: j <= i),
    cause="causal mask aligned top-left instead of bottom-right",
    masks=True,
)
B8b = FAULTS.add(
    "B8b",
    "window aligned top-left",
    story="As B8a, for the window. Needs cross lengths and a window.",
    source="flash-attention#1778",
    ring=replace(STEPS, window=lambda problem, i, j: pattern.window(problem, i + problem.nq - problem.nk, j)),
    cause="window aligned top-left instead of bottom-right",
    masks=True,
)


def local_window(*, moved: bool) -> Steps:
    """Take the window on places in the shards, moved by the difference of the whole lengths or not."""

    def window(problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        places = torch.arange(i.size(0))[:, None], torch.arange(j.size(1))[None, :]
        return pattern.window(problem, places[0] - (0 if moved else problem.diagonal), places[1])

    return replace(STEPS, window=window)


B9a = FAULTS.add(
    "B9a",
    "window on local indices",
    story="Indices within the shards instead of positions. Needs a window and two ranks.",
    source="TransformerEngine#1046; lm-engine#447 (r)",
    ring=local_window(moved=True),
    cause="window uses local indices, moved by the whole lengths",
    masks=True,
)


Window = tuple[int | None, int | None]


def window_of(change: Callable[[int | None, int | None], Window]) -> Steps:
    """Mask with another window, made of the ends of the one that was asked for."""

    def window(problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        assert problem.window is not None
        return pattern.near(problem, change(*problem.window), i, j)

    return replace(STEPS, window=window)


def wider(left: int, right: int) -> Steps:
    """Mask with the window's ends moved outward by so many."""
    return window_of(lambda a, b: (None if a is None else a + left, None if b is None else b + right))


LEFT_END_EXCLUSIVE = wider(-1, 0)

B9b = FAULTS.add(
    "B9b",
    "left end of the window exclusive",
    story="One key too few on the left; the row without any other is empty.",
    source="prime-rl#2828 (r)",
    ring=LEFT_END_EXCLUSIVE,
    cause="window off by one: one key too few on the left",
    masks=True,
)
B9c = FAULTS.add(
    "B9c",
    "window inverted",
    story="Keys outside the window are attended.",
    source="zml#763",
    ring=replace(STEPS, window=lambda problem, i, j: ~pattern.window(problem, i, j)),
    cause="window inverted: keys outside it are attended",
    masks=True,
)


def everything(problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    """Let all keys through."""
    return torch.ones_like(i - j, dtype=torch.bool)


WINDOW_IGNORED = replace(STEPS, window=everything)

B9d = FAULTS.add(
    "B9d",
    "window dropped on other ranks' blocks",
    story="Applied within the own block only. Needs a window that ends inside another shard.",
    source="TransformerEngine#1046",
    ring=on_blocks(WINDOW_IGNORED, others=True),
)
B9e = FAULTS.add(
    "B9e",
    "left end of the window one too far",
    story="One key too many on the left.",
    source="lm-engine#447 (r)",
    ring=wider(1, 0),
    cause="window off by one: one key too many on the left",
    masks=True,
)
COUNTED_ONCE = replace(
    STEPS, pattern=lambda steps, here, hop, owner: multiplicity(steps, here, hop, owner).clamp(max=1)
)

B10 = FAULTS.add(
    "B10",
    "documents ignored",
    story="The batch ring on packed data: a query attends other documents. Needs two documents.",
    source="axolotl#4002 (#3608)",
    ring=replace(STEPS, documents=everything),
    cause="documents ignored",
    masks=True,
)


def _half_blocks(steps: Steps, here: Here, hop: int, owner: int) -> torch.Tensor:
    m = multiplicity(steps, here, hop, owner)
    if here.call.sharding == "zigzag" and not here.problem.causal:
        first = pieces(here.problem.nk, 2 * here.size)[owner]
        if owner < here.rank:
            m[..., len(first) :] = 0
        elif owner > here.rank:
            m[:, :, : len(pieces(here.problem.nq, 2 * here.size)[here.rank])] = 0
    return m


B12 = FAULTS.add(
    "B12",
    "zigzag's half blocks without causality",
    story="The branch that attends half a block lacks `and is_causal`. Needs zigzag without a causal mask.",
    source="pytorch#141429, #141622",
    ring=replace(STEPS, pattern=_half_blocks),
    cause="half a block is attended although nothing is causal (zigzag)",
    also=("backward", "forward"),
)


def lowest_fill(s: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Partial:
    """Attention over one block whose masked scores are the smallest finite number."""
    s = torch.where(m > 0, s, torch.finfo(s.dtype).min)
    top = s.amax(dim=-1, keepdim=True)
    w = torch.where(m > 0, m, 1) * torch.exp(s - top)
    total = w.sum(dim=-1, keepdim=True)
    return Partial(w @ v / total, (top + total.log()).squeeze(-1))


B13 = FAULTS.add(
    "B13",
    "finfo.min in place of −inf",
    story="A row that attends nothing in a block becomes the average of that block, with a finite lse.",
    source="pytorch#110213, #103963",
    ring=replace(STEPS, partial=lowest_fill),
    cause="a finite number stands for -inf: a row without keys in a block becomes the block's average",
    overflows=True,
)


def _leaking(steps: Steps) -> Steps:
    """Multiply weights of 0 with values that are not numbers."""

    def partial(s: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Partial:
        found = STEPS.partial(s, m, torch.zeros_like(v))
        top = torch.where(found.lse == -torch.inf, 0.0, found.lse)[..., None]
        w = torch.where(m > 0, m * torch.exp(s - top), 0.0)
        return Partial(w @ v, found.lse)

    return replace(steps, partial=partial)


B14a = FAULTS.add(
    "B14a",
    "0 · NaN leaks from masked values",
    story="A value that no query attends, but that is NaN, meets a weight of 0. Needs NaN in what the mask excludes.",
    source="flash-attention#2374; pytorch#101967",
    kind="isolation",
    ring=_leaking(STEPS),
)
B14b = FAULTS.add(
    "B14b",
    "0 · NaN leaks in backward",
    story="As B14a, in the sums over keys of dq: the forward is clean.",
    source="flash-attention#2374",
    kind="isolation",
    ring=replace(STEPS, dq=lambda ds, k, scale, attended: ds @ k * scale),
)
