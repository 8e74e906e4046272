"""Find the known fault that explains a failing case.

Many faults return the same numbers on a small case: with one key, every mask is the same. A hypothesis therefore has to
explain the smallest failing case, the case found first, and further cases like them; a wrong prediction of a failing
case rules it out. Of the hypotheses that remain, the simplest are named. If none remains, no cause is named.

A fault may be there only under a condition: on three ranks or more, under a causal mask. Then a hypothesis explains all
cases that fail, and is wrong of cases that the implementation computes rightly. It is named with what those cases lack
of what a case needs in order to fail.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, get_args

from ringref.problem import Dilation
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.inputs import selectable
from ringverify.cases.running import Observation
from ringverify.cases.shapes import fitted, length_unit
from ringverify.diagnosis import (
    adding,
    carrying,
    crossing,
    overflowing,
    reading,
    scaling,
    sink_gradients,
    stale,
    undefined,
)
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.fitting import Alike, in_some_places, in_some_rows
from ringverify.diagnosis.hypothesis import Hypothesis, comparable
from ringverify.diagnosis.narrowing import rounding
from ringverify.diagnosis.needs import Needs
from ringverify.diagnosis.probing import Asked
from ringverify.diagnosis.region import FailureMap, region
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.standing import Standing
from ringverify.diagnosis.where import Probe, locate, of_other_code, wrong_tensors
from ringverify.events import TensorName, Where
from ringverify.faults.fault import When
from ringverify.implementation import Capabilities
from ringverify.worlds.patience import Patience, WorkLimit

SECONDS = 5.0
"""Seconds for further cases that tell hypotheses apart; a case in a simulated world takes a hundredth of that."""

WALL = 6
"""Times as many seconds of the wall clock as of processor time are allowed."""

LOOK = 16
"""Hypotheses that are tried between two looks at the clock."""

VARIED = 6
"""Failing variants of the smallest case that a cause has to explain too, as unlike each other as there are."""

FURTHER = 20
"""Variants beside those that a cause has to explain which is not there in every case, or beside which another fits."""

OF_SINKS = 10
"""Cases beside the smallest in which a gradient of sinks has to be explained."""

ALTERNATIVES = 2
"""Hypotheses that are named, at most, if no case tells them apart."""

NO_DIGIT = "cause unknown: sums in {sums} over so many terms have a rounding error as large as the result"
"""Message for a case whose sums, in the declared dtype, may have a rounding error as large as the sums themselves."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """The cause of a failing case, and where the case is wrong.

    Attributes:
        text: the cause in a sentence, and what to try first; or why no cause can be told; `None` if none is known.
        causes: the hypotheses that explain what was seen, the simplest first; empty if there is none.
        telling: those of them that the text names, if each is there in every case like the smallest: what all of them
            say of other cases is known of these too.
        residual: the largest difference between what the first cause predicts and what was seen.
        where: where the smallest case is wrong, whether or not a cause is known.
        region: where the smallest case is wrong, as a map.
    """

    text: str | None = None
    causes: tuple[Hypothesis, ...] = ()
    telling: tuple[Hypothesis, ...] = ()
    residual: float | None = None
    where: Where | None = None
    region: FailureMap | None = None

    @property
    def hop(self) -> int | None:
        """The hop of the blocks that are treated wrongly, where it is known and one hop.

        The block of rank o reaches rank r at hop (r − o) mod P, in a ring that sends to the right.
        """
        return None if self.where is None else self.where.hop


def diagnose(
    observe: Callable[[Case], Observation],
    cases: Sequence[Case],
    capabilities: Capabilities,
    *,
    tensor: TensorName | None = None,
    probe: Probe | None = None,
    differentiate: Callable[[Case], Observation] | None = None,
    needs: Needs | None = None,
    hypotheses: Sequence[Hypothesis] = HYPOTHESES,
    seconds: float = SECONDS,
    processes: Callable[[], Iterable[int]] | None = None,
) -> Diagnosis | None:
    """Name the hypothesis that explains a failing case and others like it.

    Args:
        observe: runs the implementation on a case; all results that it returns have to be explained.
        cases: the smallest failing case, then others that fail in the same way, such as the case found first.
        capabilities: what the implementation declares.
        tensor: the result whose wrong rows are reported; `None` takes the first result that is wrong.
        probe: runs the implementation on a case with other inputs, to find the queries and keys concerned; `None`
            leaves them out.
        differentiate: runs a case with gradients, if `observe` leaves them out: they may tell apart hypotheses that
            agree in out and lse.
        needs: what the smallest case needs in order to fail, if that was found: the condition that a fault may have.
        hypotheses: the faults that may be named, the first of those that explain the same cases first.
        seconds: time for running further cases; cases that are not reached by then are left out.
        processes: returns the ids of the processes that run cases, whose processor time is then what counts; `None` if
            running a case takes time otherwise.

    Returns:
        the diagnosis; `None` if the first case returns no values, or only right ones.
    """
    if not cases[0].chunks:  # faults are predicted a call at a time
        cases = [call for case in cases for call in case.calls[-2:]]
    smallest = _seen(observe, cases[0], capabilities)
    if smallest is None:
        return None
    if not (wrong := wrong_tensors(smallest)):
        return _of_sinks(observe, smallest, cases, capabilities)

    def patience(seconds: float) -> WorkLimit | Patience:
        # The cause that is named must not depend on the load of the machine.
        return (
            Patience(seconds, [os.getpid()])
            if processes is None
            else WorkLimit(seconds, processes, wall=WALL * seconds)
        )

    found = _named(observe, smallest, cases, capabilities, patience, seconds, differentiate, needs, hypotheses, probe)
    shown = tensor if tensor in wrong else wrong[0]
    if probe is None:
        return dataclasses.replace(found, where=locate(smallest, shown, ()))
    asked = Asked(smallest, probe)
    where = locate(smallest, shown, asked.pairs(shown))
    return dataclasses.replace(found, where=where, region=region(smallest, shown, asked))


def _of_sinks(
    observe: Callable[[Case], Observation], smallest: Scene, cases: Sequence[Case], capabilities: Capabilities
) -> Diagnosis | None:
    """Return the diagnosis of a gradient of sinks beside which nothing is wrong."""
    if not sink_gradients.wrong(smallest):
        return None
    others = dict.fromkeys(_in_shape(case, capabilities) for case in (*cases[1:], *like(cases[0], cases[-1])))
    asked = itertools.islice((case for case in others if _possible(case, capabilities)), OF_SINKS)
    scenes = (_seen(observe, case, capabilities) for case in asked)
    there = [smallest, *(one for one in scenes if one is not None and not wrong_tensors(one))]
    text = sink_gradients.cause(there)
    return None if text is None else Diagnosis(text)


def _named(
    observe: Callable[[Case], Observation],
    smallest: Scene,
    cases: Sequence[Case],
    capabilities: Capabilities,
    patience_of: Callable[[float], WorkLimit | Patience],
    seconds: float,
    differentiate: Callable[[Case], Observation] | None,
    needs: Needs | None,
    known: Sequence[Hypothesis],
    probe: Probe | None,
) -> Diagnosis:
    """Return a diagnosis with the hypotheses that explain all cases, without `where` and `region`."""
    requires = () if needs is None else needs.requires
    # Extreme values hide a fault in rounding errors; shrinking left the smallest case with the simplest values.
    others = [*(case.replace(values=cases[0].values) for case in cases[1:]), *like(cases[0], cases[-1])]
    fits_it = dict.fromkeys(_in_shape(case, capabilities) for case in others)
    asked = [case for case in fits_it if case != cases[0] and _possible(case, capabilities)]
    if needs is not None:
        # A call on a cache that passes may do so for the calls before it, which are not part of it.
        for several in (needs.failing, () if cases[0].apart else needs.passing):
            varied = (case for case in several if case.values in (cases[0].values, "normal") and not case.chunks)
            asked += [case for case in unlike(varied) if case not in (cases[0], *asked)]
    asked.sort(key=_cost)  # many small cases tell more hypotheses apart than one large case
    if not comparable(smallest):
        return Diagnosis(_without_digits(smallest))
    # Without gradients, a fault of one direction cannot be told from the same fault in both.
    ways = ("always",) if "dq" not in smallest.tensors else get_args(When)
    tried = [one for one in known if one.when in ways]
    whole = [Standing(one, residual) for one in tried if (residual := one.explains(smallest)) is not None]
    patience = patience_of(seconds)
    scenes = list(_answered(observe, asked, capabilities, patience))
    # Failing cases rule out most hypotheses: those are asked first.
    scenes.sort(key=lambda scene: not wrong_tensors(scene))
    if cases[-1] != cases[0] and not (scenes and wrong_tensors(scenes[0])):
        scenes += _answered(observe, cases[-1:], capabilities, patience)  # no other case failed; this one does

    def in_part(hypotheses: Iterable[Alike], *, hurried: bool) -> Iterator[Standing]:
        for number, alike in enumerate(hypotheses):
            if hurried and number % LOOK == 0 and patience.left() <= 0:
                return
            if (residual := alike[0].explains(smallest)) is not None:
                yield from (Standing(one, residual) for one in alike)

    explaining = [one.hypothesis for one in whole]

    def as_read() -> Iterator[Standing]:
        nonlocal patience
        left = patience.left()
        there = [smallest, *scenes]

        def others() -> Iterator[Scene]:
            """Cases that nobody has run, other in every number."""
            for case in dict.fromkeys(_in_shape(one, capabilities) for one in _in_other_numbers(smallest.case)):
                if _possible(case, capabilities):
                    yield Scene(case, capabilities, Observation((), None))

        if probe is not None and (
            found := [
                *undefined.hypotheses(there),
                *overflowing.hypotheses(there),
                *scaling.hypotheses(there),
                *carrying.hypotheses(there),
                *adding.hypotheses(there),
                *crossing.hypotheses(there),
                *stale.hypotheses(),
                *reading.hypotheses(there, probe, patience_of(reading.SECONDS).left, others()),
            ]
        ):
            # A rule was made to fit the cases that were read: others have to follow it too.
            fresh = dict.fromkeys(_in_shape(case, capabilities) for case in _fresh(smallest.case, cases[-1]))
            scenes.extend(
                _answered(observe, [one for one in fresh if _possible(one, capabilities)], capabilities, patience)
            )
            for one in found:
                if (residual := one.explains(smallest)) is not None:
                    yield Standing(one, residual)
        patience = patience_of(left)  # reading has its own time

    stages: tuple[Callable[[], Iterable[Standing]], ...] = (
        lambda: whole,
        as_read,
        lambda: in_part(in_some_rows(tried, explaining, smallest), hurried=False),
        lambda: in_part(in_some_places(tried, smallest), hurried=True),
    )
    sometimes: list[Standing] = []
    for standing in stages:
        if sometimes and standing is not as_read:
            break
        left = list(standing())
        for number, scene in enumerate(scenes):
            if not left or (number and not wrong_tensors(scene) and patience.left() <= 0):
                break
            left = [one for one in left if one.stands(scene, elsewhere=of_other_code(scene, cases[0]))]
        named = [told for one in left if (told := one.settled(smallest, requires)) is not None]
        fewest = min((len(one.only) for one in named), default=0)
        named = [one for one in named if len(one.only) == fewest]
        if standing is as_read:
            if needs is not None:
                passing = () if cases[0].apart else needs.passing
                further = [case for case in (*needs.failing[-FURTHER:], *passing[-FURTHER:]) if case not in asked]
                of_one_call = [case for case in further if not case.chunks]
                named = _refuted(named, _answered(observe, of_one_call, capabilities, patience_of(seconds)))
            # It was fitted to some cases, so it is said if it is so in all others; what comes later takes more to say.
            needed = {one.text for one in requires}
            named, left = [one for one in named[:1] if one.in_all_like_it or one.when_it_fails(needed)], []
        if len(_apart(named)) > 1 and differentiate is not None:
            named = _told_apart(named, [_seen(differentiate, case, capabilities) for case in (cases[0], *asked[:1])])
        if named and all(one.in_all_like_it for one in named):
            return _told(named, smallest)
        # What is not so in some right case may be there under a condition, unless something else is so in all cases.
        sometimes = sometimes or named or [one.with_unknown_condition() for one in left if one.may_be]
    if sometimes and needs is not None:  # what is not so in every case is held against more of those that fail
        more = [case for case in needs.failing if case not in asked and not case.chunks][-FURTHER:]
        for scene in _answered(observe, more, capabilities, patience_of(seconds)):
            sometimes = [one for one in sometimes if one.stands(scene)]
    return _told(sometimes, smallest) if sometimes else Diagnosis()


def _refuted(named: list[Standing], scenes: Iterator[Scene]) -> list[Standing]:
    """Return the hypotheses that further cases leave, of which as many are run as it takes to leave one sentence."""
    while len(_apart(named)) > 1 and (scene := next(scenes, None)) is not None:
        named = [one for one in named if one.stands(scene)] or named
        fewest = min(len(one.excused) for one in named)
        named = [one for one in named if len(one.excused) == fewest]
    return named


def _fresh(smallest: Case, first: Case) -> Iterator[Case]:
    """Yield larger cases with other numbers of ranks and tokens than those that told hypotheses apart so far."""
    for seed, (size, length) in enumerate(((3, 11), (2, 9), (4, 14), (5, 13)), 5):
        for case in (smallest, first):
            try:
                yield case.replace(
                    world_size=size, query_length=length, key_length=length + case.problem.diagonal, values="normal",
                    head_dim=max(4, case.problem.head_dim), seed=first.seed + seed
                )  # fmt: skip
            except ValueError:
                continue


def _in_other_numbers(smallest: Case) -> Iterator[Case]:
    """Yield cases with the constraints of the smallest, and other numbers of ranks, positions and what bounds them."""
    p = smallest.problem
    for seed, (size, length) in enumerate(((3, 10), (2, 9), (4, 14), (3, 11), (2, 12), (5, 13), (4, 9), (3, 16))):
        draw = random.Random(seed)
        nk = length + p.diagonal
        if nk < 1:
            continue
        changes: dict[str, Any] = {}
        if p.window is not None:
            left, right = (None if side is None else draw.randint(0, length // 2) for side in p.window)
            changes["window"] = left, right
        if p.documents is not None:
            ends = sorted(draw.sample(range(1, length), draw.randint(1, 3)))
            changes["documents"] = (draw.choice((0, 0, 0, 1)), *(end for end in ends if end > 1), length - seed % 2)
        if p.key_lengths is not None:
            changes["key_lengths"] = tuple(draw.randint(0 if n else nk // 2, nk) for n in range(p.batch))
        if p.dilation is not None:  # of several branches, what is read of a pair is a sum
            w, r = draw.randint(2, length), draw.randint(1, 3)
            changes["dilation"] = dataclasses.replace(p.dilation, branches=((max(w, r), r),))
        yield from _if_legal(
            smallest, world_size=size, query_length=length, key_length=None if nk == length else nk, **changes,
            value_dim=p.value_dim and max(p.value_dim, 8), head_dim=max(p.head_dim, 8), values="normal", seed=seed,
        )  # fmt: skip


def diagnose_rounding(
    observe: Callable[[Case], Observation], cases: Sequence[Case], capabilities: Capabilities
) -> Diagnosis | None:
    """Name what is rounded once more than declared, by the digits of 16-bit cases whose values may be within bounds."""
    scenes = [scene for case in dict.fromkeys(cases) if (scene := _seen(observe, case, capabilities)) is not None]
    found = rounding(scenes)
    return Diagnosis(found[0].sentence(), tuple(found), tuple(found[:1])) if found else None


def _answered(
    observe: Callable[[Case], Observation],
    asked: Sequence[Case],
    capabilities: Capabilities,
    patience: WorkLimit | Patience,
) -> Iterator[Scene]:
    """Yield what is seen of cases, the first of them at least; of a case without digits nothing can be told."""
    for number, case in enumerate(asked):
        if number and patience.left() <= 0:
            return
        scene = _seen(observe, case, capabilities)
        if scene is not None and comparable(scene):
            yield scene


def _told(named: list[Standing], smallest: Scene) -> Diagnosis:
    """Return the diagnosis that names these hypotheses, the first ones in words."""
    first, apart = named[0], _apart(named)
    text = "; or ".join(one.sentence(smallest) for one in apart[:ALTERNATIVES])
    text += f" (residual {first.residual:.0e})"
    if advice := first.hypothesis.advised(smallest):
        text += f". {advice}"
    sure = len(apart) <= ALTERNATIVES and all(one.in_all_like_it and not one.somewhere for one in apart)
    telling = tuple(one.hypothesis for one in apart if sure)
    return Diagnosis(text, tuple(one.hypothesis for one in named), telling, first.residual)


def _without_digits(scene: Scene) -> str:
    """Return the message that rounding hides the cause, and which dtype to declare so that it can be named."""
    text, declared = NO_DIGIT.format(sums=scene.pipeline.sums), scene.capabilities.dtypes
    wider = [dtype for dtype in ("float32", "float64") if dtype not in declared]
    return f"{text}. Add {wider[0]} to dtypes to get a cause" if len(wider) == 2 else text


def _possible(case: Case, capabilities: Capabilities) -> bool:
    """Whether an implementation declares what a case asks for, and its values can be made."""
    return why_unsupported(case, capabilities) is None and (case.values != "selectors" or selectable(case))


def _in_shape(case: Case, capabilities: Capabilities) -> Case:
    """Return the case in a shape that an implementation accepts; of equal shards, if it declares no others."""
    case = fitted(case, capabilities)
    unit = length_unit(capabilities, case.sharding, case.world_size)
    nq, nk = (-(-length // unit) * unit for length in (case.problem.nq, case.problem.nk))
    longer = _if_legal(case, query_length=nq, key_length=None if nq == nk else nk)
    return case if capabilities.uneven else next(longer, case)


def _cost(case: Case) -> int:
    p = case.problem
    threads = 4 if case.replicated else 1  # its ranks cannot be predicted one after the other
    return p.batch * p.heads * p.nq * p.nk * case.world_size * threads


def _told_apart(named: list[Standing], scenes: list[Scene | None]) -> list[Standing]:
    """Return the hypotheses that explain gradients too; all if none does, as gradients may have another fault."""
    for scene in scenes:
        if scene is not None and comparable(scene):
            named = [one for one in named if one.stands(scene)] or named
    return named


def _apart(named: list[Standing]) -> list[Standing]:
    """Return the hypotheses without those that an earlier one covers."""
    found: list[Standing] = []
    for one in named:
        if not any(earlier.hypothesis.covers(one.hypothesis) for earlier in found):
            found.append(one)
    return found


def _seen(observe: Callable[[Case], Observation], case: Case, capabilities: Capabilities) -> Scene | None:
    observation = observe(case)
    return None if observation.failure is not None else Scene(case, capabilities, observation)


def unlike(cases: Iterable[Case]) -> list[Case]:
    """Return up to `VARIED` of the cases, each with the most choices that none before has."""
    left, found, seen = list(cases), list[Case](), set[tuple[str, object]]()
    while left and len(found) < VARIED:
        best = max(left, key=lambda case: len(_choices(case) - seen))
        if _choices(best) <= seen:
            break
        left.remove(best)
        found.append(best)
        seen |= _choices(best)
    return found


def _choices(case: Case) -> set[tuple[str, object]]:
    """Return what a fault may depend on in a case, without the numbers that are another in every case."""
    p = case.problem
    return {
        ("ranks", case.world_size),
        ("sharding", case.sharding),
        ("group", case.group),
        ("causal", p.causal),
        ("heads", (p.heads > 1, p.hk != p.heads)),
        ("lengths", (p.nq > p.nk) - (p.nq < p.nk)),
        ("even", p.nq % case.world_size == p.nk % case.world_size == 0),
        ("long", p.nk > 4 * case.world_size),
        *((name, getattr(p, name) is not None) for name in ("window", "documents", "key_lengths", "dilation")),
    }


def like(smallest: Case, first: Case) -> Iterator[Case]:
    """Yield cases like the smallest and the first: other inputs, one choice changed, or larger, to part hypotheses."""
    yield first.replace(values=smallest.values, seed=first.seed + 1)
    yield first.replace(values="normal", seed=first.seed + 3)
    yield smallest.replace(values="normal", seed=smallest.seed + 1)
    yield smallest.replace(values="normal", cotangent="both")
    yield first.replace(values=smallest.values, world_size=1)
    yield from _plainer(first.replace(values=smallest.values))
    yield from _varied(smallest, first.replace(values=smallest.values))
    if smallest.problem.documents is not None:
        third = first.problem.nq // 3
        yield first.replace(values=smallest.values, documents=(min(1, third), third, max(third, first.problem.nq - 1)))
        if (grown := _grown(smallest, world_size=4, length=12, heads=1)) is not None:
            yield grown.replace(documents=(0, grown.problem.nq))  # a document on all of several ranks
    for size, length, heads, values in ((4, 17, 4, smallest.values), (3, 12, 6, "normal"), (2, 8, 2, "normal")):
        grown = _grown(smallest, world_size=size, length=length, heads=heads)
        if grown is not None:
            yield grown.replace(values=values, seed=first.seed + 2)
    if smallest.problem.nk > smallest.world_size * 2:
        # Blocks that are long enough to be cut into tiles: with another length, the last tile has another size.
        grown = _grown(smallest, world_size=smallest.world_size, length=3 * smallest.problem.nk // 2, heads=1)
        if grown is not None:
            yield grown
    yield first.replace(values="normal", seed=first.seed + 2)


def _varied(smallest: Case, first: Case) -> Iterator[Case]:
    """Yield the first case with one choice changed, to separate faults that depend on it from those that do not."""
    p = first.problem
    if smallest.replicated:
        yield from _if_legal(first, sharding="contiguous")
    for sharding in ("contiguous", "zigzag", "striped"):
        grown = _grown(smallest, world_size=2, length=12, heads=2)
        if grown is not None and sharding != smallest.sharding:
            yield from _if_legal(grown, sharding=sharding, seed=first.seed + 2)
    if smallest.memory != "contiguous":
        yield from _if_legal(first, memory="contiguous")
    if p.scale is None:
        yield from _if_legal(first, scale=0.3)
    if p.window is not None:
        yield from _if_legal(first, window=(2, 1))
        if (grown := _grown(smallest, world_size=3, length=12, heads=1)) is not None:
            rows = -(-grown.problem.nk // grown.world_size)
            yield from _if_legal(grown, window=(3 * rows // 2, p.window[1] and 3 * rows // 2))  # reaches half a shard
    if p.softcap is not None:
        yield from _if_legal(first, values="large_scores")
    yield from _if_legal(first, cotangent="both")
    # One constraint more or less tells a fault of the ring from a fault of a mask.
    yield from _if_legal(first, causal=not p.causal)
    if p.key_lengths is not None or p.documents is not None:
        yield from _if_legal(first, key_lengths=None, documents=None, causal=True)
    if not smallest.problem.nk:
        # Instead of no keys: keys that no query attends, and keys that the queries of some ranks do not attend.
        p = smallest.problem
        yield from _if_legal(smallest, query_length=p.nq, key_length=4, key_lengths=(0,) * p.batch)
        yield from _if_legal(smallest, query_length=12, key_length=4, causal=True, world_size=3)
    if (kept := smallest.problem.dilation) is not None:
        # Where the rate does not divide the segment length, places in a segment are not places in the sequence.
        branches = ((7, 3), (6, 2), (5, 4))[: max(2, len(kept.branches))]
        grown = _grown(smallest, world_size=3, length=18, heads=4)
        if grown is not None:
            yield from _if_legal(
                grown, dilation=Dilation(branches, heads=kept.heads, head_offset=kept.head_offset), seed=first.seed + 2
            )


def _plainer(first: Case) -> Iterator[Case]:
    """Yield the first case with one thing less that a fault may depend on: other faults may have it there too."""
    p = first.problem
    for name in ("window", "documents", "key_lengths", "softcap", "dilation", "key_heads", "value_dim"):
        if getattr(p, name) is not None:
            yield from _if_legal(first, **{name: None})
    if p.batch > 1:
        yield from _if_legal(first, batch=1, key_lengths=p.key_lengths and p.key_lengths[:1])
    if p.nq != p.nk:
        yield from _if_legal(first, query_length=p.nk, key_length=None)
    if p.dtype != "float32":
        yield from _if_legal(first, dtype="float32")
    for size in {2, first.world_size - 1}:
        if 1 < size != first.world_size:
            yield from _if_legal(first, world_size=size)
    even = -(-max(p.nq, p.nk) // (2 * first.world_size)) * 2 * first.world_size
    if p.nq == p.nk != even:
        yield from _if_legal(first, query_length=even, key_length=None)


def _if_legal(case: Case, **changes: Any) -> Iterator[Case]:
    """Yield the case with some fields changed, unless they contradict other fields."""
    try:
        yield case.replace(**changes)
    except ValueError:
        return


def _grown(case: Case, *, world_size: int, length: int, heads: int) -> Case | None:
    """Return a larger case (ranks, positions, heads, dimensions), same constraints; `None` if they do not fit."""
    p = case.problem
    lengths = max(p.nq, length), max(p.nk, length)
    if p.nq != p.nk:
        lengths = (length, length + p.nk - p.nq) if p.nk > p.nq else (length + p.nq - p.nk, length)
    grouped = p.hk != p.heads
    many = heads if p.heads > 1 or grouped else 1
    equal = p.head_dim == p.dv
    dim = max(p.head_dim, 3)
    try:
        return case.replace(
            world_size=max(case.world_size, world_size),
            query_length=lengths[0],
            key_length=None if lengths[0] == lengths[1] else lengths[1],
            heads=max(many, p.heads) if not grouped else heads,
            key_heads=2 if grouped else None,
            head_dim=dim,
            value_dim=None if equal else max(p.dv, 2),
        )
    except ValueError:
        return None
