"""The cause of failures that no value tells: ranks that wait for ever, and state that is kept between calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from ringref.pattern import multiplicity
from ringverify.cases.case import GROUPS, Case
from ringverify.cases.running import shards
from ringverify.diagnosis.when.conditions import SKIPPING
from ringverify.diagnosis.when.needs import Needs
from ringverify.implementation import Capabilities
from ringverify.worlds.world import Failure

HELD: tuple[tuple[str, str, tuple[int, ...]], ...] = (
    ("a rank without queries", "holds no queries", (0,)),
    ("a rank without keys", "holds no keys", (1,)),
    ("a rank without tokens", "holds no tokens", (0, 1)),
)
"""What may set a rank apart: the condition in words, the same of the rank, and whether of queries (0) or keys (1)."""


def of_deadlock(
    case: Case, capabilities: Capabilities, failure: Failure, requires: Sequence[str], *, full: bool = False
) -> str | None:
    """Return why ranks of a case wait for ever: for messages without elements, or for one that holds nothing.

    Args:
        case: the smallest case.
        capabilities: what the implementation declares.
        failure: which ranks wait for what, and which have returned.
        requires: what the case needs in order to fail, in words.
        full: whether ranks wait too where each of them holds tokens, so that it is no matter of one that holds none.
    """
    if not set(SKIPPING).isdisjoint(requires) and failure.waits:
        rank, what = failure.waits[0]
        return (
            "a rank that skips a block of which it attends nothing, or that needs no further one, leaves out its "
            f"messages: rank {rank} waits for {what}"
        )
    for_nothing = {rank for rank, _ in failure.waits} == {*failure.for_nothing} != set()
    ring, held = case.ring_ranks, shards(case, capabilities)
    gone = [ring.index(rank) for rank in failure.returned if rank in ring]
    waiting = [ring.index(rank) for rank, _ in failure.waits if rank in ring]
    for _, holds, axes in () if full else sorted(HELD, key=lambda one: one[0] not in requires):
        empty = [rank for rank in (*gone, *waiting) if not any(len(held[axis][rank]) for axis in axes)]
        idle = not for_nothing or {ring[rank] for rank in empty} <= {*failure.idle}
        if waiting and empty and set(empty) <= set(gone) and idle:
            rank, what = failure.waits[0]
            return (
                f"rank {ring[empty[0]]}, which {holds}, takes no part in the exchange, or not in all of it: "
                f"rank {rank} waits for {what}"
            )
    m, queries = multiplicity(case.problem), held[0]
    blind = [rank for rank in (*gone, *waiting) if len(queries[rank]) and not m[:, :, queries[rank]].any()]
    if waiting and blind and set(blind) <= set(gone):
        rank, what = failure.waits[0]
        return (
            f"rank {ring[blind[0]]}, whose queries attend no key, takes no part in the exchange, or not in all of it: "
            f"rank {rank} waits for {what}"
        )
    waits = dict(failure.waits)
    behind = [rank for rank in waits if rank not in failure.together]
    if behind and failure.together:
        ahead = failure.together[0]
        return (
            f"rank {ahead} leaves an exchange of messages before others do: it waits for {waits[ahead]}, and rank "
            f"{behind[0]} for {waits[behind[0]]}"
        )
    if for_nothing and not full:
        rank, what = failure.waits[0]
        return f"a message without elements is received, and not sent: rank {rank} waits for {what}"
    return None


def of_messages(failure: Failure) -> str | None:
    """Return why ranks wait for ever as their messages alone tell: for a rank that has returned, or for each other."""
    waits, peers = dict(failure.waits), dict(failure.peers)
    for rank, peer in peers.items():
        if peer in failure.returned:
            return (
                f"ranks do not agree on who sends to whom, or how often: rank {rank} waits for {waits[rank]}, and rank "
                f"{peer} has returned"
            )
    for rank in peers:
        circle = [rank]
        while (following := peers.get(circle[-1])) is not None and following not in circle:
            circle.append(following)
        if following == rank:
            each = ", ".join(f"rank {one} for {waits[one]}" for one in circle)
            return f"ranks wait for each other in a circle: {each}"
    return None


def of_group(needs: Needs, failure: Failure | None = None) -> str | None:
    """Return the cause where a case fails in a group of a larger world, and not where the group is the world.

    Args:
        needs: when it fails.
        failure: how it fails, if ranks do not return.
    """
    exploration = needs.exploration
    if exploration is None:
        return None
    failing = {case for case, failed in exploration.runs.items() if failed}
    right = {case for case, failed in exploration.runs.items() if not failed}
    alike = {group for group in GROUPS for case in failing if case.replace(group=group) in right}
    if "world" not in alike or any(case.group == "world" for case in failing):
        return None
    if "offset" in alike and failure is not None and failure.peers:  # where ranks have other numbers too
        return PARITY
    if any(case.group == "leading" for case in failing):
        return "the default group, or its size, is used where the group of the ring is meant"
    return OTHER_NUMBERS if "leading" in alike else None


OTHER_NUMBERS = (
    "ranks of the group are used where torch takes those of the world, or the other way round: send, recv and P2POp "
    "take the latter, as dist.get_global_rank(group, rank) tells them, unless they are given group_dst, group_src or "
    "group_peer"
)
"""Cause of what fails only in groups whose ranks have other numbers in the world."""


PARITY = (
    "who sends first, or goes before others, is decided by ranks of the world instead of those of the group: in a "
    "group of every second rank all of them do the same"
)
"""Cause of what waits for ever only in groups whose ranks are all even, or all odd."""


WORDS = {
    "causal": "causal mask",
    "query_length": "length",
    "key_length": "number of keys",
    "key_heads": "key heads",
    "head_dim": "head_dim",
    "world_size": "number of ranks",
    "values": "input values",
    "seed": "input values",
    "memory": "memory layout",
    "schedule": "order of the ranks",
    "transport": "transport",
}
"""Fields of a case in words, where their names are not."""


def in_words(field: str) -> str:
    """Return the name of a field of a case for a sentence."""
    return WORDS.get(field, field.replace("_", " "))


TIED = {"heads": "key_heads", "head_dim": "value_dim", "query_length": "key_length"}
"""Fields whose value may have to be changed together with another one's."""


def untied(fields: Iterable[str]) -> tuple[str, ...]:
    """Return fields without those that may have changed since another one of them has."""
    names = tuple(fields)
    return tuple(name for name in names if not any(TIED.get(other) == name for other in names))


def differing(case: Case, other: Case) -> dict[str, object]:
    """Return the fields in which another case differs, with its values: those of the problem, then of the case."""
    found: dict[str, object] = {}
    for one, another in ((case.problem, other.problem), (case, other)):
        for field in dataclasses.fields(one):
            if field.name != "problem" and getattr(one, field.name) != (value := getattr(another, field.name)):
                found[field.name] = value
    return found


MANY = {
    "query_length": "positions",
    "key_length": "keys",
    "world_size": "ranks",
    "batch": "batch entries",
    "heads": "heads",
    "key_heads": "key heads",
}
"""What a field is the number of."""


PLURAL = ("documents", "key_lengths", "sinks")
"""Fields whose names are plurals."""


@dataclasses.dataclass(frozen=True)
class CallRelation:
    """How the earlier of two calls has to differ from the later one, or may.

    Attributes:
        field: the field of a case in which they differ.
        sign: 1 if the earlier one has more, −1 if it has less.
        present: whether it is about having the field at all.
        at_least: whether it may be equal too.
    """

    field: str
    sign: int
    present: bool = False
    at_least: bool = False

    def in_words(self) -> str:
        """Return what the earlier call has, to follow "with"."""
        name = in_words(self.field)
        if self.present:
            article, one = ("", "some") if self.field in PLURAL else ("a ", "one")
            return f"{article}{name}, before one without" if self.sign > 0 else f"no {name}, before one with {one}"
        many = MANY.get(self.field)
        if self.at_least:
            least = "at least" if self.sign > 0 else "at most"
            return f"{least} as many {many}" if many else f"{least} as large a {name}"
        if many:
            return f"{'more' if self.sign > 0 else 'fewer'} {many}"
        return f"a {'larger' if self.sign > 0 else 'smaller'} {name}"


def of_state(
    fields: Sequence[str],
    alike: Sequence[str] | None = None,
    *,
    together: bool = True,
    relation: CallRelation | None = None,
    enough: Sequence[CallRelation] = (),
) -> tuple[str, str]:
    """Return what a case needs, and the cause, where it fails only after another one.

    Args:
        fields: those in which the two differ.
        alike: in words, what has to be the same in both; `None` if that was not tried.
        together: whether they differ in all of these fields, and not in any of them.
        relation: how they have to differ, if not in any way.
        enough: of what the earlier one has to have as much as the later one, or as little, at least.
    """
    names = list(dict.fromkeys(map(in_words, fields)))
    if len(names) > 1 and together:  # the two were not shrunk together, so that they may differ in what does not matter
        return (
            "an earlier call in the same process",
            "what an earlier call leaves behind in the process changes the result of this one",
        )
    same = [f"the same {_listed(alike, 'and')}"] if alike else []
    same += [one.in_words() for one in enough]
    if not names:
        if alike is None:
            same = ["the same arguments"]
        return (
            f"an earlier call in the same process{', with ' if same else ''}{_listed(same, 'and')}",
            "what an earlier call leaves behind in the process changes the result of the same call, made again",
        )
    singular = [name.startswith("number of ") or not name.endswith("s") for name in names]
    other = _listed([f"{'an' if one else ''}other {name}" for name, one in zip(names, singular, strict=True)], "or")
    kept = other
    if relation is not None:
        other = relation.in_words()
        kept = kept if relation.present else other
    beside = (", with " if relation is not None and relation.present else " and ") if same else ""
    return (
        f"an earlier call in the same process with {other}{beside}{_listed(same, 'and')}",
        f"what an earlier call with {kept} leaves behind in the process is used again",
    )


def _listed(words: Sequence[str], last: str) -> str:
    """Return words as a list in a sentence."""
    return ", ".join([*words[:-2], f" {last} ".join(words[-2:])])
