"""Faults of masks: causality, window, documents, key lengths (B in the reports, K2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ringref.problem import Problem
from ringref.sharding import pieces
from ringverify.faults import pattern
from ringverify.faults.fault import Faults
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, multiplicity

Tensor = torch.Tensor
FAULTS = Faults()


def everything(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    """Let all keys through."""
    return torch.ones_like(i - j, dtype=torch.bool)


# -- causality ---------------------------------------------------------------------------------------------------------

FAULTS.cause("causal mask missing", replace(STEPS, causal=everything), masks=True)
FAULTS.add(
    "O40",
    "causal mask shifted by one: every query sees one key too many",
    replace(STEPS, causal=lambda problem, i, j: j <= i + problem.diagonal + 1),
    masks=True,
)
FAULTS.add(
    "O41",
    "causal mask shifted by one: every query sees one key too few",
    replace(STEPS, causal=lambda problem, i, j: j < i + problem.diagonal),
    masks=True,
)
FAULTS.mutant("O42", "causal mask shifted by one: every query sees one key too many on blocks from other ranks")
FAULTS.mutant("O43", "causal mask shifted by one: every query sees one key too few on blocks from other ranks")
FAULTS.add(
    "O109",
    "causal mask shifted by one: every query sees one key too few",
    replace(STEPS, causal=lambda problem, i, j: j <= i + problem.diagonal - (problem.nk > problem.nq)),
    more=" where keys outnumber queries",
    narrow=True,
)
FAULTS.add(
    "B8a",
    "causal mask aligned top-left instead of bottom-right",
    replace(STEPS, causal=lambda problem, i, j: j <= i),
    masks=True,
)


def _aligned_by_shards(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    there = len(here.shards[owner]) - len(here.call.positions) - here.problem.diagonal
    return multiplicity(replace(steps, queries=lambda here: here.call.positions + there), here, hop, owner)


FAULTS.cause(
    "causal mask and window are aligned by the lengths of shards instead of the whole lengths",
    replace(STEPS, pattern=_aligned_by_shards),
    masks=True,
)


def by_block(attends: Callable[[int, int], bool | None]) -> Steps:
    """Decide the causal mask by whole blocks, from the ranks of owner and queries; `None` leaves a block as it is."""

    def masked(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        whole = attends(owner, here.rank)
        if whole is not None:
            steps = replace(steps, causal=lambda problem, i, j: torch.full_like(i - j, whole, dtype=torch.bool))
        return multiplicity(steps, here, hop, owner)

    return replace(STEPS, pattern=masked)


FAULTS.add(
    "B1",
    "causal mask inverted between blocks: later ranks are attended, earlier are not",
    by_block(lambda owner, rank: None if owner == rank else owner > rank),
    masks=True,
)
FAULTS.cause("causal mask decided by whole blocks", by_block(lambda owner, rank: owner <= rank), masks=True)


def _by_places(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    if here.call.sharding != "striped":
        return multiplicity(steps, here, hop, owner)

    def causal(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        return (j // here.size < i // here.size) | ((j // here.size == i // here.size) & (owner <= here.rank))

    return multiplicity(replace(steps, causal=causal), here, hop, owner)


FAULTS.add(
    "O118",
    "striped: the causal mask compares places in the shards, and ranks where places are equal",
    replace(STEPS, pattern=_by_places),
    narrow=True,
)


def _half_blocks(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    m = multiplicity(steps, here, hop, owner)
    if here.call.sharding == "zigzag" and not here.problem.causal:
        first = pieces(here.problem.nk, 2 * here.size)[owner]
        if owner < here.rank:
            m[..., len(first) :] = 0
        elif owner > here.rank:
            m[:, :, : len(pieces(here.problem.nq, 2 * here.size)[here.rank])] = 0
    return m


FAULTS.add("B12", "half a block is attended although nothing is causal (zigzag)", replace(STEPS, pattern=_half_blocks))


def _other_half(steps: Steps, here: Here, hop: int, owner: int, *, of_keys: bool) -> Tensor:
    """Zigzag: attend the wrong half of an earlier rank's keys, or a later rank's with the wrong half of queries."""
    m = multiplicity(steps, here, hop, owner)
    if here.call.sharding != "zigzag" or not here.problem.causal or owner == here.rank:
        return m
    keys, queries = ((torch.arange(n) >= n // 2).to(m.dtype) for n in (m.size(3), m.size(2)))
    unmasked = multiplicity(replace(steps, causal=everything), here, hop, owner)
    if of_keys:
        return unmasked * keys if owner < here.rank else m
    return unmasked * (1 - queries)[:, None] if owner > here.rank else m


for of_keys, says in {
    True: "zigzag: of the blocks of earlier ranks, the second half of the keys is attended instead of the first",
    False: "zigzag: blocks of later ranks are attended by the first half of the queries instead of the second",
}.items():
    FAULTS.cause(
        says,
        replace(STEPS, pattern=lambda *here, of_keys=of_keys: _other_half(*here, of_keys=of_keys)),
    )


# -- window ------------------------------------------------------------------------------------------------------------

FAULTS.cause("window ignored", replace(STEPS, window=everything), masks=True)
FAULTS.mutant("B9d", "window ignored on blocks from other ranks")


def _window_or_documents(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
    return pattern.window(problem, i, j) | torch.full_like(i - j, problem.documents is not None, dtype=torch.bool)


FAULTS.add(
    "O120",
    "window ignored",
    replace(STEPS, window=_window_or_documents),
    more=" where there are documents",
    narrow=True,
)
FAULTS.add(
    "B8b",
    "window aligned top-left instead of bottom-right",
    replace(STEPS, window=lambda problem, i, j: pattern.window(problem, i + problem.nq - problem.nk, j)),
    masks=True,
)


def local_window(*, moved: bool) -> Steps:
    """Take the window on places in the shards, moved by the difference of the whole lengths or not."""

    def window(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        places = torch.arange(i.size(0))[:, None], torch.arange(j.size(1))[None, :]
        return pattern.window(problem, places[0] - (0 if moved else problem.diagonal), places[1])

    return replace(STEPS, window=window)


FAULTS.add("B9a", "window uses local indices, moved by the whole lengths", local_window(moved=True), masks=True)
FAULTS.cause("window uses local indices", local_window(moved=False), masks=True)


Window = tuple[int | None, int | None]


def window_of(change: Callable[[int | None, int | None], Window]) -> Steps:
    """Mask with another window, made of the ends of the one that was asked for."""

    def window(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        assert problem.window is not None
        return pattern.near(problem, change(*problem.window), i, j)

    return replace(STEPS, window=window)


def wider(left: int, right: int) -> Steps:
    """Mask with the window's ends moved outward by so many."""
    return window_of(lambda a, b: (None if a is None else a + left, None if b is None else b + right))


FAULTS.add("B9b", "window off by one: one key too few on the left", wider(-1, 0), masks=True)
FAULTS.mutant("O104", "window off by one: one key too few on the left on blocks from other ranks")
FAULTS.add("B9e", "window off by one: one key too many on the left", wider(1, 0), masks=True)
FAULTS.add("O44", "window off by one: one key too few on the right", wider(0, -1), masks=True)
FAULTS.add("O45", "window off by one: one key too many on the right", wider(0, 1), masks=True)
FAULTS.add("O46", "left and right of the window exchanged", window_of(lambda left, right: (right, left)), masks=True)
FAULTS.cause("window off by one: one key too few on both sides", wider(-1, -1), masks=True)
FAULTS.cause("window off by one: one key too many on both sides", wider(1, 1), masks=True)
FAULTS.cause("left of the window used for both sides", window_of(lambda left, right: (left, left)), masks=True)
FAULTS.cause("right of the window used for both sides", window_of(lambda left, right: (right, right)), masks=True)
FAULTS.cause("left side of the window ignored", window_of(lambda left, right: (None, right)), masks=True)
FAULTS.cause("right side of the window ignored", window_of(lambda left, right: (left, None)), masks=True)
FAULTS.add(
    "B9c",
    "window inverted: keys outside it are attended",
    replace(STEPS, window=lambda problem, i, j: ~pattern.window(problem, i, j)),
    masks=True,
)


def _adjacent(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    m = multiplicity(steps, here, hop, owner)
    left, right = here.problem.window or (None, None)
    finite = left is not None and (right is not None or here.problem.causal)
    return m * 0 if finite and abs(owner - here.rank) > 1 else m


FAULTS.cause(
    "a finite window reaches adjacent shards only: keys beyond them are left out", replace(STEPS, pattern=_adjacent)
)


# -- documents ---------------------------------------------------------------------------------------------------------

FAULTS.add("B10", "documents ignored", replace(STEPS, documents=everything), masks=True)


def documents_of(change: Callable[[Problem, tuple[int, ...]], tuple[int, ...]]) -> Steps:
    """Mask with other offsets of documents."""

    def documents(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        return pattern.documents(problem.replace(documents=change(problem, problem.documents or ())), i, j)

    return replace(STEPS, documents=documents)


FAULTS.add(
    "K2a",
    "the first document is taken to start at 0",
    documents_of(lambda problem, offsets: (0, *offsets[1:])),
    masks=True,
)
FAULTS.add(
    "K2b",
    "the last document is taken to end with the sequence",
    documents_of(lambda problem, offsets: (*offsets[:-1], problem.nk)),
    masks=True,
)
FAULTS.add(
    "O107",
    "document offsets are counted from the first one, as if that were 0",
    documents_of(lambda problem, offsets: tuple(one - offsets[0] for one in offsets)),
)


def documents_by(first: int, *, right: bool = True, inside: bool = False) -> Steps:
    """Tell documents by how many offsets lie before a position, those before `first` left out.

    Args:
        first: the first offset that counts.
        right: whether a position's own offset counts.
        inside: whether what lies in no document attends nothing.
    """

    def together(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        offsets = torch.tensor((problem.documents or ())[first:], device=i.device)
        of_i, of_j = (torch.bucketize(p, offsets, right=right) for p in (i, j))
        return (of_i == of_j) & ((of_i > 0) & (of_i < len(offsets)) if inside else True)

    return replace(STEPS, documents=together)


FAULTS.add("O47", "documents begin one token late", documents_by(0, right=False, inside=True), masks=True)


def _between_documents(attends: Callable[[Tensor, Tensor], Tensor]) -> Steps:
    """Compare the numbers of the documents of query and key otherwise; what lies in none attends nothing."""

    def together(problem: Problem, i: Tensor, j: Tensor) -> Tensor:
        offsets = torch.tensor(problem.documents or (), device=i.device)
        of_i, of_j = (torch.bucketize(p, offsets, right=True) for p in (i, j))
        inside = (of_i > 0) & (of_i < len(offsets)) & (of_j > 0) & (of_j < len(offsets))
        return inside & attends(of_i, of_j)

    return replace(STEPS, documents=together)


FAULTS.cause("documents: earlier ones are attended too", _between_documents(lambda i, j: j <= i))
FAULTS.cause("documents: later ones are attended too", _between_documents(lambda i, j: j >= i))
FAULTS.cause("documents: the one before is attended too", _between_documents(lambda i, j: (j == i) | (j == i - 1)))
FAULTS.cause("documents: all are one", _between_documents(lambda i, j: i + j > 0))


def no_padding(problem: Problem, j: Tensor) -> Tensor:
    """Whether keys lie in a document, and before the key length, `(B, T)`."""
    start, end = (0, problem.nk) if problem.documents is None else (problem.documents[0], problem.documents[-1])
    lengths = torch.tensor(problem.key_lengths or (problem.nk,) * problem.batch)
    return (start <= j) & (j < end) & (j < lengths[:, None])


def zeroed(steps: Steps) -> Steps:
    """Set keys and values that are padding to 0: they still count if they are attended."""

    def given(here: Here, name: str, x: Tensor) -> Tensor:
        there = no_padding(here.problem, here.shards[here.rank])
        return x if name == "q" else torch.where(there[..., None, None], x, 0.0)

    return replace(steps, given=given)


FAULTS.cause(
    "documents begin one token late",
    zeroed(documents_by(0, right=False, inside=True)),
    more=", and what lies in none has keys and values of 0",
)
FAULTS.add("O48", "what lies in no document attends itself", documents_by(0), masks=True)
FAULTS.cause(
    "documents are taken to cover the sequence: what lies before the first belongs to it, and what lies after the "
    "last attends itself",
    documents_by(1),
    masks=True,
)


# -- key lengths -------------------------------------------------------------------------------------------------------


def _lengths(change: Callable[[Tensor], Tensor]) -> Steps:
    """Mask with other key lengths, made of those `(B)` that were asked for."""

    def key_lengths(problem: Problem, j: Tensor) -> Tensor:
        return j < change(torch.tensor(problem.key_lengths, device=j.device))[:, None, None, None]

    return replace(STEPS, key_lengths=key_lengths)


FAULTS.cause("key_lengths ignored", _lengths(lambda n: torch.full_like(n, 2**62)), masks=True)
FAULTS.add("O49", "key_lengths off by one: one padded key is attended", _lengths(lambda n: n + 1), masks=True)
FAULTS.add("O50", "key_lengths off by one: the last valid key is left out", _lengths(lambda n: n - 1), masks=True)
FAULTS.add("O51", "key_lengths of the first batch element used for all", _lengths(lambda n: n[:1]), masks=True)
FAULTS.cause("the shortest of key_lengths used for all", _lengths(lambda n: n.min().expand_as(n)), masks=True)
FAULTS.cause("the longest of key_lengths used for all", _lengths(lambda n: n.max().expand_as(n)), masks=True)
FAULTS.cause("key_lengths of another batch element used", _lengths(lambda n: n.roll(1)), masks=True)
FAULTS.add(
    "O110", "a batch element of key length 0 attends its first key", _lengths(lambda n: n.clamp(min=1)), narrow=True
)


def _unpadded_zigzag(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    def all_there(problem: Problem, j: Tensor) -> Tensor:
        everything = torch.ones((problem.batch, 1, 1, j.size(1)), dtype=torch.bool, device=j.device)
        return everything if problem.causal else pattern.key_lengths(problem, j)

    chosen = replace(steps, key_lengths=all_there) if here.call.sharding == "zigzag" else steps
    return multiplicity(chosen, here, hop, owner)


FAULTS.add(
    "O121",
    "key_lengths ignored",
    replace(STEPS, pattern=_unpadded_zigzag),
    more=" where zigzag shards are causal",
    narrow=True,
)


def _local_lengths(problem: Problem, j: Tensor) -> Tensor:
    return pattern.key_lengths(problem, torch.arange(j.size(1), device=j.device)[None, :])


FAULTS.cause("key_lengths compared with local indices", replace(STEPS, key_lengths=_local_lengths), masks=True)


# -- keys of one place -------------------------------------------------------------------------------------------------


def _without(key: Callable[[Here, int], int]) -> Steps:
    """Leave one key out, where more than one is attended."""

    def left_out(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
        m = multiplicity(steps, here, hop, owner)
        return m * (here.shards[owner] != key(here, owner)) if here.problem.nk > 1 else m

    return replace(STEPS, pattern=left_out)


for says, key in {
    "the last key is never attended": lambda here, owner: here.problem.nk - 1,
    "the first key is never attended": lambda here, owner: 0,
    "the last key of every block is never attended": lambda here, owner: max(here.shards[owner].tolist(), default=0),
    "the first key of every block is never attended": lambda here, owner: min(here.shards[owner].tolist(), default=0),
}.items():
    FAULTS.cause(says, _without(key))


def _equal_shares(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    """Ignore the keys of a block past the first n // world_size."""
    m = multiplicity(steps, here, hop, owner)
    return m * (torch.arange(m.size(3), device=m.device) < here.problem.nk // here.size)


FAULTS.add(
    "C5", "every rank is taken to hold n // world keys: the rest is dropped", replace(STEPS, pattern=_equal_shares)
)


def _leaking(s: Tensor, m: Tensor, v: Tensor) -> Partial:
    """Multiply weights of 0 with values that are not numbers."""
    found = STEPS.partial(s, m, torch.zeros_like(v))
    top = torch.where(found.lse == -torch.inf, 0.0, found.lse)[..., None]
    return Partial(torch.where(m > 0, m * torch.exp(s - top), 0.0) @ v, found.lse)


FAULTS.add(
    "B14a",
    "0 · NaN leaks into out from values that the mask excludes",
    replace(STEPS, partial=_leaking),
    kind="isolation",
)
FAULTS.add(
    "B14b",
    "0 · NaN leaks into dq from keys that the mask excludes",
    replace(STEPS, dq=lambda ds, k, scale, attended: ds @ k * scale),
    kind="isolation",
)
