"""Shards that are taken for longer or shorter than they are, or for beginning elsewhere."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from ringref import pattern
from ringverify.diagnosis.masks.positions import POSITIONS, At, own_keys
from ringverify.diagnosis.pairs import Ints, Otherwise, Pairs
from ringverify.diagnosis.scene import Counts

LENGTHS: dict[str, Callable[[Pairs], Ints]] = {
    "the rank's own shard": own_keys,
    "the first rank's shard": lambda pairs: np.array(len(pairs.keys.shards[0])),
    "the last rank's shard": lambda pairs: np.array(len(pairs.keys.shards[-1])),
}
"""How many keys every block is taken to hold, by pairs `(Nq, 1)` or one number."""


def ways_to_take_lengths() -> Iterator[Otherwise]:
    """Yield masks of shards of other lengths."""
    for whose, (queries_too, keys_too) in {
        "queries and keys are": (True, True), "queries are": (True, False), "keys are": (False, True),
    }.items():  # fmt: skip
        for counted in ("length // ranks", "the longest shard"):
            yield Otherwise(
                f"{whose} placed at positions counted from the rank times {counted}, and those past the end are in no "
                "sequence",
                functools.partial(_placed, POSITIONS[f"counted from the rank times {counted}"], queries_too, keys_too),
                1,
            )
    for whose, count in LENGTHS.items():
        yield Otherwise(
            f"every block is taken to hold as many keys as {whose}: the last ones of a longer block are left out, and "
            "a shorter one is filled up with keys and values of 0",
            functools.partial(_cut_to, count),
            0.75,
            functools.partial(_filled_up_to, count),
        )
        yield Otherwise(
            f"a block is cut to as many keys as {whose} holds: the last ones of a longer block are left out",
            functools.partial(_cut_to, count),
            0.5,
        )
    for up in (False, True):
        says = f"every rank has key_lengths // ranks keys{', rounded up' if up else ''}, and the others are padding"
        yield Otherwise(says, functools.partial(_share_of_lengths, up), 0.75)
    yield Otherwise(
        "shards are gathered with the padding that makes them equally long: zeros are attended as keys between them, "
        "and the last keys are cut off",
        lambda pairs: _gathered(pairs)[0],
        0.5,
        lambda pairs: _gathered(pairs)[1],
    )


def _placed(at: At, queries: bool, keys: bool, pairs: Pairs) -> Counts | None:
    """Return counts with queries or keys, or both, at other positions, of which those past the end count nowhere."""
    i, j = (at(pairs, x) if moved else x.p for x, moved in ((pairs.queries, queries), (pairs.keys, keys)))
    if pairs.case.sharding != "contiguous" or ((i == pairs.queries.p).all() and (j == pairs.keys.p).all()):
        return None
    return pairs.counts(lambda name: (i, j)) * ((i < pairs.problem.nq) & (j < pairs.problem.nk))


def _cut_to(count: Callable[[Pairs], Ints], pairs: Pairs) -> Counts | None:
    if pairs.case.replicated or len({len(held) for held in pairs.keys.shards}) == 1:
        return None
    return np.where(pairs.keys.place < count(pairs), pairs.true, 0)


def _filled_up_to(count: Callable[[Pairs], Ints], pairs: Pairs) -> Counts:
    """Return how many rows of 0 fill up shorter blocks, where no mask hides what comes after a shard."""
    p, keys, i = pairs.problem, pairs.keys, pairs.queries.p
    found, shards = np.zeros(pairs.true.shape[:3], dtype=np.int64), keys.shards
    if pairs.case.replicated or p.documents is not None or p.key_lengths is not None or p.dilation is not None:
        return found
    for rank, place in ((rank, n) for rank, held in enumerate(shards) for n in range(len(held), keys.of.shape[1])):
        at = place * len(shards) + rank if pairs.case.sharding == "striped" else keys.of[rank, place]
        seen = place < count(pairs)
        if p.causal:
            seen = seen & pattern.causal(i, np.array([[at]]), diagonal=p.diagonal)
        if p.window is not None:
            seen = seen & pattern.window(i, np.array([[at]]), left=p.window[0], right=p.window[1], diagonal=p.diagonal)
        found += np.broadcast_to(seen, (p.nq, 1))[:, 0]
    return found


def _share_of_lengths(up: bool, pairs: Pairs) -> Counts | None:
    """Return counts if each rank's keys that are no padding are a whole share of the key length."""
    if pairs.problem.key_lengths is None:
        return None
    lengths = np.array(pairs.problem.key_lengths)
    each = (-(-lengths // pairs.size) if up else lengths // pairs.size)[:, None, None, None]
    rest = pairs.counts(lambda name: None if name == "key_lengths" else (pairs.queries.p, pairs.keys.p))
    return np.where(pairs.keys.place < each, rest, 0)


def _gathered(pairs: Pairs) -> tuple[Counts, Counts]:
    """Return counts of keys, and of zeros, if shards padded to the longest are joined and the first Nk rows taken."""
    keys, counts = pairs.keys, np.zeros_like(pairs.true)
    zeros = counts.sum(axis=-1)
    longest = max(map(len, keys.shards))
    for slot in range(keys.total):
        rank, place = divmod(slot, longest)
        if rank < len(keys.shards) and place < len(keys.shards[rank]):
            counts[..., keys.shards[rank][place]] += pairs.true[..., slot]
        else:
            zeros += pairs.true[..., slot]
    return counts, zeros
