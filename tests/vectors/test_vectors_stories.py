"""The vectors as a set: ids that stay, stories that are true, nothing of the semantics left out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from semantics_covered import CONSTRAINTS, FEATURES, lacking, meaningless

from ringref.problem import Dilation, Problem
from ringverify.cases.running import Runner
from ringverify.faults import documents, incremental, sinks
from ringverify.faults.catalogue import MUTANTS
from ringverify.vectors import making
from ringverify.vectors.catalogue import STORIES, bugs
from ringverify.vectors.story import Story, by_id, on
from ringverify.vectors.trying import Trial, trial, tried
from ringverify.worlds.simulated import SimulatedWorld

IDS = Path(__file__).with_name("ids.txt")
"""Each id that was ever given, and what it stands for; lines are added, never changed."""


def test_every_vector_has_a_title_and_a_note_of_its_own() -> None:
    """Sentences, and nothing twice."""
    for story in STORIES.values():
        assert re.fullmatch(r"\S.*[^.]", story.title), story.id
        assert story.note, story.id
        assert "|" not in story.title + story.note, story.id
    titles = [story.title for story in STORIES.values()]
    assert sorted(titles) == sorted(set(titles))


def test_ids_count_on_from_the_first() -> None:
    """No gaps, so that a missing one is seen."""
    assert [story.number for story in STORIES.values()] == list(range(1, len(STORIES) + 1))


def test_an_id_stands_for_what_it_stood_for(stands_for) -> None:
    """Compared with the committed list: problem, cotangents and every bit of the inputs."""
    listed = dict(line.split() for line in IDS.read_text().splitlines())
    assert listed == {id: stands_for(story) for id, story in STORIES.items()}


def test_a_changed_input_is_another_vector(stands_for) -> None:
    """The list can tell."""
    story = STORIES["V013"]
    others = [
        dataclasses.replace(story, problem=story.problem.replace(window=(11, None))),
        dataclasses.replace(story, values="integers"),
        dataclasses.replace(story, cotangent="both"),
        dataclasses.replace(story, id="V014"),
    ]
    assert len({stands_for(story), *map(stands_for, others)}) == 5
    assert stands_for(dataclasses.replace(story, note="Told otherwise.", layouts=on(zigzag=(2,)))) == stands_for(story)


def test_two_vectors_of_one_id_are_refused() -> None:
    """Wherever they are written down."""
    with pytest.raises(ValueError, match="two vectors are called V001"):
        by_id([STORIES["V001"], STORIES["V001"]])


@pytest.mark.parametrize("id", ["V1", "V0001", "v001", "001", ""])
def test_an_id_is_a_letter_and_three_digits(id: str) -> None:
    """Nothing else sorts."""
    with pytest.raises(ValueError, match="expected V and three digits"):
        dataclasses.replace(STORIES["V001"], id=id)


def test_the_vectors_cover_the_written_semantics() -> None:
    """Every constraint alone, every pair that has a meaning, each with a cotangent of lse, and the corners."""
    assert lacking(STORIES.values()) == []


def test_what_is_not_covered_is_noticed() -> None:
    """Without the vectors that have a constraint or a feature, it is missed; pairs without a meaning are not."""
    assert set(FEATURES) <= set(lacking([]))
    assert len(lacking([])) > 2 * len(CONSTRAINTS) + 40
    without = [story for story in STORIES.values() if story.problem.softcap is None]
    assert "softcap alone" in lacking(without)
    assert "causal with softcap" in lacking(without)
    assert "softcap with a cotangent of lse" in lacking(without)
    assert meaningless(("documents", "cross_lengths"))
    assert meaningless(("dilation:split", "documents"))
    assert not meaningless(("documents", "window"))
    dilation = Dilation(((2, 1),))
    for fields in (
        {"documents": (0, 3), "key_length": 5},
        {"documents": (0, 3), "dilation": dilation},
        {"dilation": dilation, "key_length": 5},
    ):
        with pytest.raises(ValueError, match="no agreed meaning"):
            Problem(query_length=3, **fields)


def test_named_bugs_are_reported_ones() -> None:
    """Of the reports, by the ids of `ringverify list mutants`; two vectors of three name one at least."""
    for story in STORIES.values():
        assert len(set(story.bugs)) == len(story.bugs), story.id
        for bug in story.bugs:
            assert not bug.startswith("O"), f"{story.id}: {bug} was reported by nobody"
    assert set(bugs(STORIES)) <= set(MUTANTS)
    assert all(told["source"] for told in bugs(STORIES).values())
    assert sum(bool(story.bugs) for story in STORIES.values()) * 3 > len(STORIES) * 2


@pytest.mark.timeout(120)
@pytest.mark.parametrize("topic", sorted({story.topic for story in STORIES.values() if story.bugs}))
@pytest.mark.by_day(5)
def test_a_vector_shows_the_bugs_that_it_names(topic: str) -> None:
    """An implementation with that very fault, in a simulated world, is told from a right one by this vector alone."""
    missed = []
    for story in STORIES.values():
        if story.topic != topic:
            continue
        tensors = making.make(story)
        for bug in story.bugs:
            runner = Runner(MUTANTS[bug].implementation, SimulatedWorld(), deadline=5.0)
            asked = (trial(story, layout, runner.capabilities) for layout in story.layouts)
            if all(tried(one, tensors, runner).violation is None for one in asked):
                missed.append((story.id, bug, MUTANTS[bug].title))
    assert missed == []


def test_a_bug_that_a_vector_does_not_show_is_noticed() -> None:
    """A causal fault, on a vector without a causal mask."""
    story = STORIES["V001"]
    runner = Runner(MUTANTS["B8a"].implementation, SimulatedWorld(), deadline=5.0)
    tensors = making.make(story)
    for layout in story.layouts:
        assert tried(trial(story, layout, runner.capabilities), tensors, runner).violation is None


def test_layouts_are_told_in_one_order() -> None:
    """By sharding, then by ranks; each once."""
    for story in STORIES.values():
        assert len(set(story.layouts)) == len(story.layouts), story.id
    assert [layout.sharding for layout in on(striped=(2,), contiguous=(3,))] == ["contiguous", "striped"]


def test_a_story_is_the_same_after_it_is_written_out() -> None:
    """Lengths and heads left to their default are those that the index spells out."""
    short = Problem(query_length=4)
    story = Story(id="V001", topic="shapes", title="t", note="n.", problem=short)
    assert story.problem == Problem(query_length=4, key_length=4, key_heads=1, value_dim=8)


FAULTS_OF = {"sinks": sinks.FAULTS, "incremental": incremental.FAULTS, "shards": documents.FAULTS}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("topic", FAULTS_OF)
@pytest.mark.by_day(5)
def test_every_fault_of_a_topic_is_shown_by_a_vector_of_it(topic: str) -> None:
    """Also where nobody has reported one yet."""
    stories = [story for story in STORIES.values() if story.topic == topic]
    given = [(story, making.make(story)) for story in stories]
    missed = set()
    for bug, mutant in FAULTS_OF[topic].mutants.items():
        runner = Runner(mutant.implementation, SimulatedWorld(), deadline=5.0)
        asked = [(trial(one, layout, runner.capabilities), x) for one, x in given for layout in one.layouts]
        if not any(isinstance(one, Trial) and tried(one, x, runner).violation for one, x in asked):
            missed.add(bug)
    assert stories
    assert missed == set()
