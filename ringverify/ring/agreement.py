"""Whether all ranks make the same call, compared before anything else is sent.

A rank that works out another length than its neighbour expects messages of another size, and a transport need not
notice: what arrives is garbage, or the process dies. Gathered is one digest a rank, of all that ranks have to agree on;
only if these differ do the ranks exchange what they were made of, so that every rank can name what differs, and where.
With it travels whether a rank wants gradients, because then all ranks take part in the backward pass.

A rank cannot know whether others are given sinks, and with these every call is compared. So calls go uncompared, for
the sake of time, only in a group that has agreed on calls before, all of them without sinks.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from ringref.problem import Problem
from ringref.sharding import PageTable, QueryKeySharding, Sharding, key_positions
from ringverify.ring.group import Ring

Terms = Mapping[str, str]
"""What a rank's call consists of, by name."""
REFUSED = "refused"
"""Name of the term that says why a rank will not compute its call."""
LENGTHS = ("query_length", "key_length")
SINK = "sinks["
"""How the names of terms begin that are one head's sink; of those that differ, the first is told."""
LONGEST = 60
"""Characters of a value that are shown."""
DIGEST = 8
"""Bytes of a digest: it travels as an int64."""
_HAD_SINKS: weakref.WeakKeyDictionary[dist.ProcessGroup, bool] = weakref.WeakKeyDictionary()
"""Groups whose ranks have agreed on a call, and whether any of these calls had sinks."""


def known_without_sinks(ring: Ring) -> bool:
    """Whether the ranks of a group have agreed on calls, all of them without sinks; the same on every rank."""
    return ring.world_size > 1 and _HAD_SINKS.get(ring.handle) is False


def terms_of(problem: Problem) -> dict[str, str]:
    """The terms of what is to be computed."""
    terms = {field.name: str(getattr(problem, field.name)) for field in dataclasses.fields(problem)}
    return terms | {"sinks": "given" if problem.sinks else "None"}


def terms_of_sinks(sinks: torch.Tensor, gradient: str) -> dict[str, str]:
    """The terms of learned sinks and of their gradient: one for each head, so that the value that differs is named."""
    return {"sink_gradient": gradient} | {f"{SINK}{head}]": str(sink) for head, sink in enumerate(sinks.tolist())}


@functools.lru_cache(maxsize=128)
def sharding_term(
    sharding: Sharding, query_length: int, key_length: int, world_size: int, documents: tuple[int, ...] | None = None
) -> str:
    """The term of a sharding that can be hashed: its name, or a digest of a page table or of a function's positions.

    Neither the function's name nor its text says what it does: two lambdas are called alike, and the text of an object
    may be another one in each process.

    Raises:
        ValueError: it returns no partition of the positions.
    """
    if isinstance(sharding, str):
        return sharding
    if isinstance(sharding, QueryKeySharding):
        keys = sharding_term(sharding.keys, key_length, key_length, world_size)
        return f"queries {sharding.queries}, keys {keys}"
    if isinstance(sharding, PageTable):
        return _page_table_term(sharding)
    digest = hashlib.blake2b(digest_size=DIGEST)
    for length in (query_length, key_length):
        for positions in key_positions(sharding, length, world_size, documents):
            digest.update(positions.size.to_bytes(8, "little") + positions.astype("<i8").tobytes())
    return f"a function whose positions have the digest {digest.hexdigest()}"


@functools.lru_cache(maxsize=8)
def _page_table_term(table: PageTable) -> str:
    """The term of a page table, with a digest of all of it: pages that hold nothing yet will."""
    digest = hashlib.blake2b(json.dumps(table.pages).encode(), digest_size=DIGEST)
    return f"pages of {table.page_size} ({digest.hexdigest()})"


def refusal_of(error: Exception) -> str:
    """The term of what keeps a rank from its call, in one line; what is no plain ValueError is shown with its type."""
    text = " ".join(str(error).split())
    return text if type(error) is ValueError else f"{type(error).__name__}: {text}"


def check_agreement(ring: Ring, terms: Terms, device: torch.device, *, gradient: bool = False) -> bool:
    """Whether any rank wants gradients, if the call of every rank has the same terms. All ranks call this together.

    Args:
        ring: the group.
        terms: of this rank's call.
        device: of the group's messages; on a CUDA device this waits for the device.
        gradient: whether this rank wants gradients, in which ranks may differ.

    Raises:
        ValueError: terms differ; the same on every rank.
    """
    text = json.dumps(terms).encode()
    digest = hashlib.blake2b(text, digest_size=DIGEST).digest()  # Python's own hash differs from process to process
    numbers = [int.from_bytes(digest, "big", signed=True), len(text), int(gradient)]
    found = _gathered(ring, torch.tensor(numbers, dtype=torch.int64, device=device))
    if all(one[:2] == found[0][:2] for one in found):
        if (sinks := terms.get("sinks")) is not None:  # not where a call was refused before they were looked at
            _HAD_SINKS[ring.handle] = _HAD_SINKS.get(ring.handle, False) or sinks != "None"
        return any(wanted for *_, wanted in found)
    padded = text.ljust(max(length for _, length, _ in found))
    texts = _gathered(ring, torch.tensor(list(padded), dtype=torch.uint8, device=device))
    raise ValueError(disagreement([json.loads(bytes(one)) for one in texts]))


def disagreement(calls: Sequence[Terms]) -> str:
    """One line on what differs between the calls of the ranks, and the way out.

    Args:
        calls: terms by rank, not all alike.
    """
    common = [name for name in calls[0] if name != REFUSED and all(name in call for call in calls)]
    differing = [name for name in common if len({call[name] for call in calls}) > 1]
    of_sinks = [name for name in differing if name.startswith(SINK)]
    differing = [name for name in differing if name not in of_sinks[1:]]
    said = [f"{name} is {_by_rank([call[name] for call in calls])}" for name in differing]
    said += [f"rank {rank} refuses: {call[REFUSED]}" for rank, call in enumerate(calls) if REFUSED in call]
    if not differing and all(REFUSED in call for call in calls):
        return f"no rank can make its call: {', '.join(said)}"
    way_out = "give every rank the same"
    if any(name in differing for name in LENGTHS):
        way_out = (
            "a length that is not given is taken to be that of the rank's own shard times the number of ranks; shards "
            "of unequal length need query_length= and key_length=, the lengths over all ranks, on every rank"
        )
    return f"the ranks do not make the same call: {', '.join(said)}; {way_out}"


def _by_rank(values: Sequence[str]) -> str:
    """Each value with the ranks that have it."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return " and ".join(
        f"{value if len(value) <= LONGEST else value[:LONGEST] + '…'} on rank{'s' * (len(having) > 1)} "
        + ", ".join(map(str, having))
        for value, having in ranks.items()
    )


def _gathered(ring: Ring, mine: torch.Tensor) -> list[list[int]]:
    """The numbers of all ranks, equally many on each."""
    everyone = [torch.empty_like(mine) for _ in range(ring.world_size)]
    dist.all_gather(everyone, mine, group=ring.group)
    numbers: list[list[int]] = torch.stack(everyone).tolist()
    return numbers
