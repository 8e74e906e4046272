"""The conditions in terms of which a failure is explained: statements about a case, each in a few words.

A condition has a cost: the longer its words and the rarer it is as the reason of a fault, the higher. Of several
explanations that fit all runs, the cheapest is the one to report.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import shards
from ringverify.implementation import Capabilities

Features = dict[str, int | bool | str]
"""What conditions look at in a case, by name."""

LARGE = ("dominating_key", "large_scores", "rising_blocks", "falling_blocks", "float16_limits")
"""Families of values with scores far apart."""


@dataclasses.dataclass(frozen=True)
class Condition:
    """A statement about a case.

    Attributes:
        text: it in words, to follow "needs": "at least 3 ranks".
        factors: names of the factors that it is about, such as "ranks".
        cost: how long and how rare it is; lower is preferred.
        meets: whether features meet it.
        said: False for what every case of interest meets, such as a length of two: it explains a run and is not news.
    """

    text: str
    factors: frozenset[str]
    cost: float
    meets: Callable[[Features], bool]
    said: bool = True


FLAGS: dict[str, tuple[str, str, float]] = {
    "causal": ("causal", "causal", 1.0),
    "not_causal": ("not causal", "causal", 1.1),
    "window": ("window", "window", 1.0),
    "left": ("a window bounded on the left", "window", 1.2),
    "right": ("a window bounded on the right", "window", 1.2),
    "forward": ("a window bounded on the right, without causal", "window", 1.6),
    "narrow": ("a window narrower than a rank's shard", "window", 1.3),
    "narrow_left": ("a window shorter to the left than a rank's shard", "window", 1.3),
    "narrow_right": ("a window shorter to the right than a rank's shard", "window", 1.3),
    "wide": ("a window wider than a rank's shard", "window", 1.4),
    "documents": ("documents", "documents", 1.0),
    "several_documents": ("several documents", "documents", 1.2),
    "crossing": ("a document on several ranks", "documents", 1.3),
    "inner_boundary": ("a document that begins inside a rank's shard", "documents", 1.3),
    "outside": ("positions outside all documents", "documents", 1.5),
    "key_lengths": ("key_lengths", "key_lengths", 1.0),
    "padded": ("key_lengths below the length", "key_lengths", 1.1),
    "padded_rank": ("key_lengths that leave a rank without keys", "key_lengths", 1.4),
    "ragged": ("key_lengths that differ between batch entries", "key_lengths", 1.4),
    "dilation": ("dilation", "dilation", 1.0),
    "split": ("dilation with split heads", "dilation", 1.2),
    "shared": ("dilation with shared heads", "dilation", 1.2),
    "long_segment": ("dilation with a segment on several ranks", "dilation", 1.4),
    "several_branches": ("dilation with several branches", "dilation", 1.4),
    "softcap": ("softcap", "softcap", 1.0),
    "scale": ("a scale of its own", "scale", 1.0),
    "negative_scale": ("a negative scale", "scale", 1.2),
    "cross": ("queries and keys of different lengths", "cross lengths", 1.1),
    "more_keys": ("more keys than queries", "cross lengths", 1.2),
    "more_queries": ("more queries than keys", "cross lengths", 1.2),
    "gqa": ("fewer key heads than heads (GQA)", "key heads", 1.05),
    "other_value_dim": ("value_dim other than head_dim", "dims", 1.1),
    "wide_values": ("value_dim above head_dim", "dims", 1.3),
    "narrow_values": ("value_dim below head_dim", "dims", 1.3),
    "empty_rows": ("a query without keys", "empty rows", 1.3),
    "uneven": ("shards of different lengths", "even shards", 1.2),
    "even": ("shards of equal lengths", "even shards", 1.6),
    "empty_shard": ("a rank without tokens", "even shards", 1.3),
    "no_keys": ("a rank without keys", "even shards", 1.35),
    "no_queries": ("a rank without queries", "even shards", 1.35),
    "few_heads": ("fewer heads than ranks", "heads", 1.7),
    "strides": ("inputs that are not contiguous in memory", "strides", 1.0),
    "half": ("a 16-bit dtype", "dtype", 1.0),
    "large": ("large or dominating scores", "values", 1.0),
    "of_lse": ("a cotangent of lse", "cotangent", 1.0),
    "of_out": ("a cotangent of out", "cotangent", 1.1),
    "subgroup": ("a group smaller than the world", "group", 1.0),
    "delayed": ("messages held back", "schedule", 1.0),
    "rendezvous": ("sends that wait for their receive", "schedule", 1.0),
}
"""Statements that hold or do not: the words, the factor and the cost."""

MASKS = ("causal", "window", "documents", "key_lengths", "dilation")
"""Constraints of which one may do instead of another."""

COUNTS: dict[str, tuple[str, str, str, float]] = {
    "ranks": ("rank", "ranks", "ranks", 1.0),
    "keys_here": ("key on a rank", "keys on a rank", "length", 1.0),
    "queries_here": ("query on a rank", "queries on a rank", "length", 1.02),
    "keys": ("key", "keys", "length", 1.05),
    "queries": ("query", "queries", "length", 1.07),
    "heads": ("head", "heads", "heads", 1.0),
    "key_heads": ("key head", "key heads", "key heads", 1.03),
    "group_size": ("head a key head", "heads a key head", "key heads", 1.1),
    "batch": ("batch entry", "batch entries", "batch", 1.0),
    "branches": ("branch of a dilation", "branches of a dilation", "dilation", 1.2),
    "document_count": ("document", "documents", "documents", 1.25),
    "left_side": ("key to the left in the window", "keys to the left in the window", "window", 1.4),
    "right_side": ("key to the right in the window", "keys to the right in the window", "window", 1.4),
}
"""Numbers of things: singular and plural, the factor and the cost."""

SIZES: dict[str, tuple[str, str, float]] = {
    "head_dim": ("head_dim", "dims", 1.0),
    "value_dim": ("value_dim", "dims", 1.02),
    "rate": ("dilation rate", "dilation", 1.1),
    "segment": ("segment length", "dilation", 1.2),
}
"""Sizes: the name, the factor and the cost."""

DIVIDED = ("keys_here", "keys", "queries_here", "queries", "head_dim", "value_dim")
"""Numbers of which it may matter whether 4, 8 or 16 divides them."""

PARITY = ("ranks", "heads", "key_heads", *DIVIDED)
"""Numbers of which it may matter whether they are even."""

CHOICES: dict[str, tuple[str, str]] = {
    "sharding": ("{} sharding", "sharding"),
    "dtype": ("{}", "dtype"),
    "memory": ("{} inputs", "strides"),
    "values": ("{} values", "values"),
    "cotangent": ("cotangent {}", "cotangent"),
    "group": ("{} group", "group"),
    "schedule": ("schedule {}", "schedule"),
}
"""Statements about a name."""


@functools.lru_cache(maxsize=4096)
def features(case: Case, capabilities: Capabilities) -> Features:
    """Return what conditions look at in a case."""
    p = case.problem
    queries, keys = shards(case, capabilities)
    lengths = [len(rows) for rows in keys]
    rows = [len(rows) for rows in queries]
    here = max(lengths)
    left, right = p.window or (None, None)
    documents = p.documents or (0,)
    padded = p.key_lengths is not None and min(p.key_lengths) < p.nk
    found: Features = {
        "ranks": case.world_size,
        "keys": p.nk,
        "queries": p.nq,
        "keys_here": here,
        "queries_here": max(rows),
        "heads": p.heads,
        "key_heads": p.hk,
        "group_size": p.group_size,
        "head_dim": p.head_dim,
        "value_dim": p.dv,
        "batch": p.batch,
        "sharding": case.sharding,
        "dtype": p.dtype,
        "memory": case.memory,
        "values": case.values,
        "cotangent": case.cotangent,
        "group": case.group,
        "schedule": case.schedule,
        "causal": p.causal,
        "not_causal": not p.causal,
        "left": left is not None,
        "right": right is not None,
        "forward": right is not None and not p.causal,
        "narrow_left": left is not None and left < here,
        "narrow_right": right is not None and right < here,
        "narrow": any(side is not None and side < here for side in (left, right)),
        "wide": p.window is not None and all(side is None or side >= here for side in (left, right)),
        "several_documents": len(documents) > 2,
        "crossing": _crossing(documents, keys),
        "inner_boundary": _inner_boundary(documents, keys),
        "outside": p.documents is not None and (documents[0] > 0 or documents[-1] < p.nk),
        "padded": padded,
        "padded_rank": padded and any(len(r) > 0 and min(p.key_lengths or ()) <= r.min() for r in keys),
        "ragged": p.key_lengths is not None and len(set(p.key_lengths)) > 1,
        "negative_scale": p.scale is not None and p.scale < 0,
        "scale": p.scale is not None and p.scale != p.head_dim**-0.5,
        "cross": p.nq != p.nk,
        "more_keys": p.nk > p.nq,
        "more_queries": p.nq > p.nk,
        "gqa": p.hk != p.heads,
        "other_value_dim": p.dv != p.head_dim,
        "wide_values": p.dv > p.head_dim,
        "narrow_values": p.dv < p.head_dim,
        "empty_rows": _empty_rows(p),
        "uneven": len(set(lengths)) > 1 or len(set(rows)) > 1,
        "even": len(set(lengths)) == 1 and len(set(rows)) == 1,
        "no_keys": min(lengths) == 0,
        "no_queries": min(rows) == 0,
        "empty_shard": min(lengths) == 0 or min(rows) == 0,
        "few_heads": p.heads < case.world_size,
        "strides": case.memory != "contiguous",
        "half": p.dtype in ("bfloat16", "float16"),
        "large": case.values in LARGE,
        "of_lse": case.cotangent != "out",
        "of_out": case.cotangent != "lse",
        "subgroup": case.group != "world",
        "delayed": bool(case.delayed),
        "rendezvous": case.transport != "buffered",
        "dilation": False,
        "document_count": 0 if p.documents is None else len(documents) - 1,
    }
    found |= {name: getattr(p, name) is not None for name in ("window", "documents", "key_lengths", "softcap")}
    # A side that is not bounded, or a dilation that is not there, has no number: no condition on it holds.
    found |= {name: side for name, side in (("left_side", left), ("right_side", right)) if side is not None}
    if p.dilation is not None:
        d = p.dilation
        found |= {"dilation": True, "split": d.heads == "split", "shared": d.heads == "shared"}
        found |= {"rate": max(r for _, r in d.branches), "segment": max(w for w, _ in d.branches)}
        found |= {"branches": len(d.branches), "several_branches": len(d.branches) > 1}
        found["long_segment"] = max(w for w, _ in d.branches) > here and case.world_size > 1
    return found


@functools.lru_cache(maxsize=1024)
def _empty_rows(p: Problem) -> bool:
    return p.nq > 0 and bool((multiplicity(p).sum(axis=-1) == 0).any())


def _crossing(documents: tuple[int, ...], keys: list[np.ndarray]) -> bool:
    """Whether the positions of one document lie on several ranks."""
    spans = itertools.pairwise(documents)
    return any(sum(bool(((rows >= a) & (rows < b)).any()) for rows in keys) > 1 for a, b in spans)


def _inner_boundary(documents: tuple[int, ...], keys: list[np.ndarray]) -> bool:
    """Whether some rank holds the positions before and after the beginning or the end of a document."""
    return any(bool((rows < cut).any() and (rows >= cut).any()) for rows in keys for cut in documents if cut)


# -- the vocabulary ----------------------------------------------------------------------------------------------------


def conditions(seen: Iterable[Features], c: Capabilities) -> list[Condition]:
    """Return the statements that the cases at hand can tell apart, those about numbers with every limit that they span.

    Args:
        seen: features of the cases, run or not.
        c: what the implementation declares; where it has no cross lengths, a key is called a token.
    """
    cases = list(seen)
    found = list(_flags())
    for name in CHOICES:
        for value in sorted({str(one[name]) for one in cases}):
            found.append(_choice(name, value))
    for name in (*COUNTS, *SIZES):
        replicated = any(one["sharding"] == "replicated_query" for one in cases)
        if not c.cross_lengths and (name == "queries" or (name == "queries_here" and not replicated)):
            continue  # the number of keys is the same
        numbers = sorted({int(one[name]) for one in cases if name in one})
        found += _numbers(name, numbers, token=not c.cross_lengths)
    return found


def _flags() -> Iterator[Condition]:
    for name, (text, factor, cost) in FLAGS.items():
        yield Condition(text, frozenset({factor}), cost, functools.partial(_flag, (name,)))
    names = [*MASKS, "softcap", "scale"]
    for count in (2, 3):
        for several in itertools.combinations(names[: len(MASKS)] if count == 3 else names, count):
            text = " or ".join(FLAGS[name][0] for name in several)
            factors = frozenset(FLAGS[name][1] for name in several)
            yield Condition(text, factors, 0.9 * count, functools.partial(_flag, several))
    text = "a mask (causal, window, documents, key_lengths or dilation)"
    yield Condition(text, frozenset(MASKS), 2.75, functools.partial(_flag, MASKS))


def _flag(names: tuple[str, ...], one: Features) -> bool:
    return any(bool(one.get(name, False)) for name in names)


def _choice(name: str, value: str) -> Condition:
    text, factor = CHOICES[name]
    return Condition(
        text.format(value.replace("_", " ")), frozenset({factor}), 1.15, lambda one: str(one[name]) == value
    )


def _numbers(name: str, numbers: list[int], *, token: bool) -> Iterator[Condition]:
    """Yield the statements about a number: at least, at most, exactly, even, odd, and what divides it."""
    if name in SIZES:
        many, factor, cost = SIZES[name]
        single, number = many, many
    else:
        single, many, factor, cost = COUNTS[name]
        if token:
            single, many = (re.sub(r"^key(?! head)", "token", text) for text in (single, many))
        number = f"number of {many}"

    def one_of(text: str, more: float, meets: Callable[[int], bool], *, said: bool = True) -> Condition:
        return Condition(
            text, frozenset({factor}), cost + more, lambda one: name in one and meets(int(one[name])), said
        )

    def compared(words: str, n: int) -> str:
        if name in SIZES:
            return f"{many} {words} {n}"
        if name.endswith("_here") and words == "at least":
            return f"{n} {many.replace(' on ', ' or more on ')}"
        return f"{words} {n} {single if n == 1 else many}"

    for n in sorted({*numbers[1:], *(number + 1 for number in numbers[:-1])}):
        # That there are tokens at all, and two of them for a softmax to choose from, is so in every case of interest.
        said = not (n < 2 or (n == 2 and name in ("keys", "queries")))
        yield one_of(compared("at least", n), n / 1e4, functools.partial(operator.le, n), said=said)
    for n in numbers[:-1]:
        yield one_of(compared("at most", n), 0.5 - n / 1e4, functools.partial(operator.ge, n))
    for n in numbers:
        yield one_of(compared("exactly", n), 0.45, functools.partial(operator.eq, n))
    if name in PARITY:
        article = "" if name in SIZES else "an "
        yield one_of(f"{article}even {number}", 0.3, lambda value: value % 2 == 0)
        yield one_of(f"{article}odd {number}", 0.3, lambda value: value % 2 == 1)
    if name in DIVIDED:
        subject = number if name in SIZES else f"a {number} that is"
        for n in (4, 8, 16):
            yield one_of(f"{subject} not a multiple of {n}", 0.4 + n / 200, lambda value, n=n: value % n != 0)  # type: ignore[misc]
            yield one_of(f"{subject} a multiple of {n}", 0.6 + n / 200, lambda value, n=n: value % n == 0)  # type: ignore[misc]
