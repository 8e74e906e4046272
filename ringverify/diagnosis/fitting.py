"""Known faults in part: in some rows, on some blocks, in what some ranks add to gradients; and in rings of teams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ringverify.diagnosis.grids import GRIDS, IN_PAIRS, Grid, as_teams_see
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.limiting import AFTER_PARTS, BLOCKS, BLOCKWISE, RANKS, Limitable, limited
from ringverify.diagnosis.misunderstood import LAYOUT
from ringverify.diagnosis.reproducing import place_of
from ringverify.diagnosis.rows import all_wrong
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import BACKWARD, FORWARD, STEPS

Alike = Sequence[Hypothesis]
"""Hypotheses that predict the same of a case."""


def in_some_rows(known: Sequence[Hypothesis], explaining: Sequence[Hypothesis], scene: Scene) -> Iterator[Alike]:
    """Yield hypotheses that are limited to the rows in which a case is wrong, and anew on every other case.

    Args:
        known: all hypotheses.
        explaining: those that explain the case without a limit.
        scene: the case.
    """
    for hypothesis in _that_may_be(explaining if all_wrong(scene) else known, scene):
        if hypothesis not in LAYOUT:
            yield [replace(hypothesis, rows=True)]


def in_some_places(known: Sequence[Hypothesis], scene: Scene) -> Iterator[Alike]:
    """Yield hypotheses that are limited to some blocks; or, if gradients alone are wrong, to some ranks."""
    if scene.replicated:
        return
    every = [(place_of(scene, rank), hop) for rank in range(scene.size) for hop in range(scene.size)]
    by_blocks: dict[frozenset[tuple[int, int]], list[str]] = {}
    for text, blocks in BLOCKS.items():
        chosen = [(here.rank, hop) for here, hop in every if blocks(here, hop, (here.rank - hop) % here.size)]
        by_blocks.setdefault(frozenset(chosen), []).append(text)
    by_ranks: dict[frozenset[tuple[int, int]], list[str]] = {}
    for text, ranks in RANKS.items():
        held = [(here.rank, hop) for here, hop in every if here.rank in ranks(scene)]
        by_ranks.setdefault(frozenset(held), []).append(text)
    backward = _backward_alone(scene)
    for hypothesis in _that_may_be(known, scene):
        steps, more = hypothesis.steps, hypothesis.more
        blockwise = steps.changed <= BLOCKWISE
        if not blockwise and (not backward or steps.changed & AFTER_PARTS):
            continue
        adds_up = backward or not steps.changed & {"merge", "accumulate"}
        fault = Limitable(scene, steps, backward=backward)
        for places, texts in by_blocks.items() if blockwise else ():
            if places and (not adds_up or fault.may_fit(places)):
                limits = {text: limited(steps, BLOCKS[text]) for text in texts}
                yield [
                    replace(hypothesis, steps=some, more=f"{more}, {text}", scored=steps)
                    for text, some in limits.items()
                ]
        for places, texts in by_ranks.items() if backward else ():
            if places and fault.may_fit(places):
                yield [replace(hypothesis, ranks=RANKS[text], more=f"{more}, {text}") for text in texts]


def in_ring_of_teams(known: Sequence[Hypothesis], explaining: Sequence[Hypothesis], scene: Scene) -> Iterator[Alike]:
    """Yield faults of a ring as those of a ring of teams.

    Args:
        known: all hypotheses.
        explaining: those that explain the case in a ring of its ranks, as they do where every rank is a team.
        scene: the case.
    """
    alike: dict[int, list[Grid]] = {}
    for grid in (*GRIDS, IN_PAIRS):
        alike.setdefault(id(as_teams_see(scene, grid)), []).append(grid)
    for grids in alike.values():
        there = as_teams_see(scene, grids[0])
        if there.size > 1:  # one team makes no hop
            for one in explaining if there is scene else known:
                yield [_in_ring_of(grid, one) for grid in grids]


def _in_ring_of(grid: Grid, one: Hypothesis) -> Hypothesis:
    of = one.whole
    return replace(
        one,
        more=one.more + grid.whose,
        steps=STEPS,
        judge=lambda scene: one.explains(as_teams_see(scene, grid)),
        whole=None if of is None else lambda scene: of(as_teams_see(scene, grid)),
    )


def _backward_alone(scene: Scene) -> bool:
    return not {"out", "lse"} & set(wrong_tensors(scene))


def _that_may_be(known: Sequence[Hypothesis], scene: Scene) -> Iterator[Hypothesis]:
    """Yield the hypotheses of the direction in which a case is wrong that concern all blocks and cases."""
    backward = _backward_alone(scene)
    for hypothesis in known:
        changed = hypothesis.steps.changed
        alone = hypothesis.when == "backward" or changed <= BACKWARD
        possible = backward or hypothesis.when == "always" or changed <= FORWARD
        if (
            possible
            and hypothesis.judge is None
            and not hypothesis.narrow
            and alone == backward
            and not hypothesis.idle(scene)
        ):
            yield hypothesis
