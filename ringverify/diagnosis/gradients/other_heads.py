"""Hypotheses of a backward that takes something of other heads, where it is read off each case which heads these are.

What dq of a head is made with shows in dq of that head alone, so each head is held against every other. dk and dv of a
key head are sums over its query heads, and which of them each takes is solved for.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringverify.diagnosis.gradients.crossing import OF_HEADS, TAKEN, Other, Taken, made_with
from ringverify.diagnosis.gradients.piecewise import READ, TooFew, chosen, read_off
from ringverify.diagnosis.gradients.terms import Gradients, Terms, fits, fitted, measured, off
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.pairs import Ints, Mask
from ringverify.diagnosis.scaling import LEFT
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName

Heads = Callable[[Terms], Ints | None]
"""For each query head the one of which it takes something; `None` if that cannot be told."""

EVERYTHING = np.ones((1, 1, 1, 1), dtype=bool)

RULES: dict[str, Callable[[Ints, int, int], Ints]] = {
    **{
        f"head h takes that of head h mod {n}": functools.partial(lambda n, h, group, total: h % n, n)
        for n in (1, 2, 3, 4)
    },
    **{
        f"the heads of key head k take those of key head k mod {n}": functools.partial(
            lambda n, h, group, total: h // group % n * group + h % group, n
        )
        for n in (1, 2, 3, 4)
    },
    "heads lie in turn, one of each group, where they should lie group by group": lambda h, group, total: (
        h % group * (total // group) + h // group
    ),
    "heads lie group by group, where they should lie in turn, one of each group": lambda h, group, total: (
        h % (total // group) * group + h // (total // group)
    ),
    "each head takes that of the head before": lambda h, group, total: (h - 1) % total,
    "each head takes that of the head after": lambda h, group, total: (h + 1) % total,
    "the heads of a key head take that of the first of them": lambda h, group, total: h // group * group,
    "the heads of a key head take that of the last of them": lambda h, group, total: h // group * group + group - 1,
    "heads are taken in reverse": lambda h, group, total: total - 1 - h,
}
"""Which head each takes, by head, query heads of a key head, and heads."""


def hypotheses(scenes: Sequence[Scene]) -> Iterator[Hypothesis]:
    """Yield what explains the gradients of failing cases whose out and lse are right.

    Args:
        scenes: cases, those that fail first.
    """
    terms = [one for one in fitted(scenes, most=READ) if one.scene.problem.heads > 1]
    if not terms:
        return
    if "dq" in wrong_tensors(terms[0].scene):
        for what, taken in TAKEN.items():
            says = f"the backward takes {what} of other heads"
            yield from _told(says, functools.partial(_by_dq, taken), taken, terms)
    else:
        for names, says in OF_HEADS.items():
            yield from _told(says, functools.partial(_by_sums, names), functools.partial(_making, names), terms)


def _told(says: str, heads: Heads, taken: Taken, terms: Sequence[Terms]) -> Iterator[Hypothesis]:
    """Yield that something of other heads is taken: by a rule that says which, or with an example."""
    read: list[tuple[Terms, Ints]] = []
    heads = functools.partial(_read, heads)
    for one in terms:
        try:
            found = heads(one)
        except TooFew:
            continue
        if found is None or not fits(one, _taken_of(heads, taken, one)):
            return
        read.append((one, found))
    if not read:
        return
    for rule, of in RULES.items():
        by_rule = functools.partial(_by_rule, of)
        # Two heads may show the same, such as with cotangents of 0: what was read may be another one.
        if all(np.array_equal(by_rule(one), found) or fits(one, _taken_of(by_rule, taken, one)) for one, found in read):
            yield measured(f"{says}: {rule}", functools.partial(_taken_of, by_rule, taken))
    _, found = read[-1]
    head = int(np.flatnonzero(found != np.arange(len(found)))[0])
    example = f"of {len(found)} query heads, head {head} takes that of head {found[head]}"
    yield read_off(f"{says}: {example}", functools.partial(_taken_of, heads, taken))


def _by_rule(of: Callable[[Ints, int, int], Ints], terms: Terms) -> Ints:
    problem = terms.scene.problem
    return of(np.arange(problem.heads), problem.group_size, problem.heads)


def _read(heads: Heads, terms: Terms) -> Ints | None:
    """Return the heads of a case.

    Raises:
        TooFew: it is wrong, and what would tell is the same with any head, such as dq where each query has one key.
    """
    found = heads(terms)
    if found is not None and (found == np.arange(len(found))).all() and wrong_tensors(terms.scene):
        raise TooFew
    return found


def _taken_of(heads: Heads, taken: Taken, terms: Terms) -> Gradients:
    found = heads(terms)
    return {} if found is None else taken(terms, lambda x: x[:, found], EVERYTHING)


def _by_dq(taken: Taken, terms: Terms) -> Ints | None:
    """Return of which head each takes something, as dq tells; the head itself where its dq is right."""
    wrong, count, found = off(terms)["dq"], terms.scene.problem.heads, list[int]()
    limit = terms.scene.allowed.dq + LEFT * np.abs(wrong).max(initial=0.0)
    with_other = [taken(terms, functools.partial(_all_of, other), EVERYTHING).get("dq") for other in range(count)]
    for head in range(count):
        for other in sorted(range(count), key=lambda other: other != head):
            change = with_other[other]
            if change is not None and (np.abs(wrong - change) <= limit)[:, :, head].all():
                found.append(other)
                break
        else:
            return None
    return np.array(found)


def _all_of(head: int, x: Array) -> Array:
    """Return the same of one head for all."""
    return np.repeat(x[:, [head]], x.shape[1], axis=1)


def _by_sums(names: tuple[TensorName, ...], terms: Terms) -> Ints | None:
    """Return with whose queries or cotangents each head adds to dk or dv; `None` if that is not the same of both."""
    problem, found = terms.scene.problem, list[Ints]()
    parts = {"dk": (terms.ds, terms.q), "dv": (terms.p, terms.dout)}
    for name in names:
        weights, other = parts[name]
        seen, limit = getattr(terms.scene.truth, name) + off(terms)[name], getattr(terms.scene.allowed, name)
        heads = np.full(problem.heads, -1)
        for key_head in range(problem.hk):
            group = range(key_head * problem.group_size, (key_head + 1) * problem.group_size)
            pairs = list(itertools.product(group, range(problem.heads)))
            columns = [weights[:, head].swapaxes(1, 2) @ other[:, of] for head, of in pairs]
            numbers = chosen(columns, seen[:, :, key_head], limit[:, :, key_head])
            if numbers is None or [pairs[n][0] for n in numbers] != list(group):
                return None
            for head, of in (pairs[n] for n in numbers):
                heads[head] = of
        found.append(heads)
    return found[0] if all(np.array_equal(found[0], one) for one in found) else None


def _making(names: tuple[TensorName, ...], terms: Terms, other: Other, here: Mask) -> Gradients:
    return made_with(names, terms, other)
