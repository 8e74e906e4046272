"""Search for a case that violates a property, and shrink, confirm and explain it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ringverify.cases.running import Runner
from ringverify.check.budget import ENDLESS, Share
from ringverify.check.finishing import finished
from ringverify.check.sameness import ToldFailure
from ringverify.check.searching import Ending, Hunt, Search, found_only, in_short, search_cases
from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.properties.property import Property

if TYPE_CHECKING:
    from ringverify.check.casefile import CaseFile


def hunt(
    property: Property,
    runner: Runner,
    *,
    examples: int,
    seed: int,
    share: Share = ENDLESS,
    progress: Callable[[int], None],
    told: Callable[[str], None] = lambda violation: None,
    shrinking: bool = True,
    first: Sequence[CaseFile] = (),
    watched: Callable[[], Runner | None] = lambda: None,
    known: Sequence[Hypothesis] = HYPOTHESES,
    stories: Sequence[ToldFailure] = (),
) -> Hunt:
    """Try up to `examples` cases of a property, stop at the first violation, and shrink it.

    A call that the transport refuses on some world sizes only, such as a send to oneself on one rank, does not end the
    search: other violations would never be seen. If no other is found, the refusal is the violation.

    Args:
        property: what must hold.
        runner: runs the implementation; a new one for each property (`Runner.for_another_property`).
        examples: most cases to draw.
        seed: decides which cases are drawn.
        share: the time for the search, shrinking included.
        progress: called with the number of cases tried so far.
        told: called with what a violation is when it is found, before it is shrunk.
        shrinking: whether to shrink and explain the case found first.
        first: counterexamples of earlier runs, tried before drawn cases.
        watched: returns a runner in a simulated world, if `runner` is in another one, or `None`.
        known: the faults that may be named as causes.
        stories: failures of the same implementation that were reported; one of them once more is not explained.

    Raises:
        WorldUnavailable: the world could not be set up, or a limit of the machine was reached, before a violation.
        Exception: an error of ours, before a violation was found; later errors are noted as mishaps.
    """
    started = time.monotonic()
    search = Search(share, progress)
    search_cases(search, property, runner, examples=examples, seed=seed, first=first)
    if (found := search.found(runner.log)) is not None:
        if shrinking:
            told(in_short(property.id, found))
            search.ends_with(
                finished(
                    property,
                    runner,
                    found,
                    examples=examples,
                    seed=seed,
                    share=share,
                    first=first,
                    watched=watched,
                    known=known,
                    stories=stories,
                )
            )
        else:
            search.ends_with(Ending(found_only(found)))
    search.hunt.seconds = time.monotonic() - started
    return search.hunt
