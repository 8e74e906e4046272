"""Every golden vector by id. An id is never used again for anything else, and none is ever taken away."""

from __future__ import annotations

from ringverify.faults.catalogue import MUTANTS, place
from ringverify.vectors import balanced, dilations, incremental, masks, numbers, ranks, selections, shapes, sinks
from ringverify.vectors.story import Story, by_id

GROUPS = shapes, masks, dilations, numbers, selections, ranks, sinks, incremental, balanced
STORIES: dict[str, Story] = by_id(
    sorted((story for group in GROUPS for story in group.STORIES), key=lambda story: story.number)
)
"""Every vector by id, in the order of their numbers."""


def bugs(stories: dict[str, Story]) -> dict[str, dict[str, str]]:
    """Return every reported bug that a vector names, by id: what is wrong, and where it was reported."""
    named = {bug for story in stories.values() for bug in story.bugs}
    return {id: {"title": MUTANTS[id].sentence, "source": MUTANTS[id].source} for id in sorted(named, key=place)}
