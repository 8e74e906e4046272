"""A pass says what it is a pass of: features and pairs of them with counts, and declared ones that no example had."""

from __future__ import annotations

import dataclasses
import io
import json
import time
from pathlib import Path

import pytest
from command_line import miniature
from rich.console import Console

from ringref.problem import Dilation, Problem
from ringverify.cases.case import Case
from ringverify.check.counting import joined
from ringverify.check.drawing import drawn
from ringverify.check.outcome import TriedProperty, implementation_event
from ringverify.check.tried import Tried, tried_event, untried
from ringverify.events import KINDS, ImplementationEvent, as_json, from_json
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES
from ringverify.reports.features import MOST, long_table, untried_line
from ringverify.reports.jsonl import ReportWriter
from ringverify.reports.results import Source, read_results
from ringverify.reports.terminal import Terminal
from ringverify.ring.declared import ring
from ringverify.testing.calls import tried_in
from ringverify.testing.results import ConformanceResult

UNREACHED = (miniature("unreached:attend"), "--only", "precision", "--max-examples", 2)
"""The cases of `precision` have no constraints, and are in bfloat16 and float16."""


@pytest.fixture(scope="module")
def event():
    """What forward, lse_gradient and inputs_untouched have of our ring's cases, joined."""
    return joined([of_property(id) for id in ("forward", "lse_gradient", "inputs_untouched")], implementation="ring")


def of_property(id, examples=60):
    """The event of one property's first cases on our ring."""
    tried = Tried()
    for case in drawn(PROPERTIES[id], ring.capabilities, examples):
        tried.add(case)
    return tried_event(tried, PROPERTIES[id], ring.capabilities, implementation="ring")


# -- counts ------------------------------------------------------------------------------------------------------------


def test_the_counts_of_every_dimension_add_up_to_the_number_of_examples(event):
    """And those of every pair of dimensions."""
    assert {sum(counts.values()) for counts in event.features.values()} == {180}
    assert event.features["property"] == {"forward": 60, "lse_gradient": 60, "inputs_untouched": 60}
    both, names = event.together(), list(event.features)
    for place, first in enumerate(names):
        for second in names[:place]:
            pairs = [count for (one, other), count in both.items() if (one[0], other[0]) == (first, second)]
            assert sum(pairs) == 180, (first, second)


def test_pairs_are_symmetric_and_no_more_frequent_than_their_features(event):
    """Two values of one dimension never come together."""
    both = event.together()
    for (one, other), count in both.items():
        assert both[other, one] == count
        assert 0 < count <= min(event.features[name][value] for name, value in (one, other))
        assert one[0] != other[0]


def test_pairs_are_those_of_the_cases(event):
    """Counted one by one."""
    cases = drawn(PROPERTIES["forward"], ring.capabilities, 60)
    both = of_property("forward").together()
    zigzag = sum(case.sharding == "zigzag" and case.problem.causal for case in cases)
    assert zigzag > 0
    assert both[("sharding", "zigzag"), ("causal", "yes")] == zigzag


def test_results_that_a_property_does_not_judge_are_not_counted(event):
    """`forward` has lse at hand and does not look at it; gradients are those of `lse_gradient` alone."""
    both = event.together()
    assert event.features["gradients"] == {"no": 120, "yes": 60}
    assert event.features["lse"] == {"no": 180}
    assert both[("gradients", "yes"), ("property", "lse_gradient")] == 60


def test_counts_of_several_processes_are_added_up():
    """Whoever tried which case."""
    cases = drawn(PROPERTIES["forward"], ring.capabilities, 30)
    parts = [Tried() for _ in range(3)]
    for number, case in enumerate([*cases, cases[0]]):
        parts[number % 3].add(case)
    whole = parts[0].merged(parts[1]).merged(parts[2])
    assert sum(whole.kinds.values()) == 31
    alone = Tried()
    for case in [*cases, cases[0]]:
        alone.add(case)
    assert whole == alone


def test_counting_a_case_takes_microseconds():
    """At most 100 of a processor, pairs included, which are taken apart once a property ends: mostly some 25."""
    cases = drawn(PROPERTIES["gradients"], ring.capabilities, 250)

    def seconds():
        started, tried = time.process_time(), Tried()
        for case in cases:
            tried.add(case)
        tried_event(tried, PROPERTIES["gradients"], ring.capabilities, implementation="ring")
        return time.process_time() - started

    assert 1_000_000 * min(seconds() for _ in range(5)) < 100 * len(cases)


# -- what is declared --------------------------------------------------------------------------------------------------


def test_every_feature_that_can_be_declared_is_missed_where_nothing_was_tried():
    """All that a declaration may hold and an example may have; nothing that it does not declare."""
    assert list(untried(Capabilities(world_sizes=(2,), gradients=False), None)) == [
        "world size 2", "sharding contiguous", "causal", "not causal", "dtype float32",
    ]  # fmt: skip
    flags = {field.name for field in dataclasses.fields(Capabilities) if isinstance(field.default, bool)}
    every = Capabilities(
        **dict.fromkeys(flags, True), dilation=("split", "shared"), traffic="neighbours", memory="sharded",
        sharding=("zigzag", "striped"), dtypes=("float64", "bfloat16"), causal="always",
    )  # fmt: skip
    assert {*untried(every, None)} == {
        "world size 1", "world size 2", "world size 3-4", "world size 5-8", "sharding zigzag", "sharding striped",
        "causal", "dtype float64", "dtype bfloat16", "dilation split", "dilation shared", "traffic", "memory",
    } | flags - {"processes", "uneven_segments"}  # fmt: skip


def test_every_declared_feature_is_found_among_enough_examples():
    """Each of our ring's: what is never drawn would be missed in every run."""
    events = [of_property(id, 150 if id == "forward" else 40) for id in PROPERTIES if id != "chunk_boundaries"]
    assert list(untried(ring.capabilities, joined(events, implementation="ring"))) == []


@pytest.mark.parametrize(
    ("case", "feature"),
    [
        (Case(problem=Problem(query_length=4, window=(1, None))), "window"),
        (Case(problem=Problem(query_length=4, documents=(0, 2))), "documents"),
        (Case(problem=Problem(query_length=5), world_size=2), "uneven"),
        (Case(problem=Problem(query_length=1), world_size=2), "empty_shards"),
        (Case(problem=Problem(query_length=4), group="strided"), "subgroups"),
        (Case(problem=Problem(query_length=4), cotangent="both"), "lse_gradient"),
        (Case(problem=Problem(query_length=4, dilation=Dilation(((2, 1),)))), "dilation split"),
        (Case(problem=Problem(query_length=4), world_size=8), "world size 5-8"),
    ],
)
def test_one_example_with_a_feature_is_enough(case, feature):
    """And one without it is not."""

    def missing(case):
        tried = Tried()
        tried.add(case)
        event = tried_event(tried, PROPERTIES["gradients"], ring.capabilities, implementation="ring")
        return {*untried(ring.capabilities, event)}

    assert feature in missing(Case(problem=Problem(query_length=4)))
    assert feature not in missing(case)


# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_declared_feature_that_no_example_had_is_named_and_counts_as_not_tested(ringverify):
    """In the sentence of the verdict, in a line of the summary, and in the report; the verdict stays."""
    outcome = ringverify.check(*UNREACHED)
    assert outcome.code == 0, outcome.out
    (told,) = outcome.told("implementation")
    assert {"window", "softcap", "dtype float32", "world size 1"} <= {*told["untried"]}
    assert not {"gradients", "dtype bfloat16", "documents"} & {*told["untried"]}
    count = len(told["untried"])
    assert f"1 pass; not run on gloo; {count} declared features not tried\n" in outcome.out
    assert "\n  declared but in no example, so not tested: world size 1, " in outcome.out
    assert ", dtype float32, window, softcap\n" in outcome.out
    assert "all  world size" not in outcome.out
    assert "all  world size" in ringverify.check(*UNREACHED, "-v").out


def test_more_examples_reach_more(ringverify):
    """What is tried is not named any more, and what nothing reaches is found: the window is wrong."""
    outcome = ringverify.check(miniature("unreached:attend"), "--only", "forward", "--max-examples", 30)
    assert outcome.code == 1
    assert "not tested: " not in outcome.out.split("not declared")[0]
    assert outcome.told("implementation")[0]["untried"]  # the search ended at the violation


def test_the_counts_of_a_report_add_up_to_the_examples_of_each_property(ringverify):
    """By the dimension that has the properties, and with each other dimension."""
    outcome = ringverify.check("ring", "--only", "forward,gradients,masked_rows", "--max-examples", 4)
    (tried,) = outcome.told("tried")
    examples = {event["property"]: event["examples"] for event in outcome.told("property")}
    assert tried["features"]["property"] == examples
    event = from_json(KINDS["tried"], tried)
    for id, count in examples.items():
        for name in [*event.features][:-1]:
            with_it = [
                n for (one, other), n in event.together().items() if one == ("property", id) and other[0] == name
            ]
            assert sum(with_it) == count
    kinds = [event["event"] for event in outcome.events]
    assert kinds[-3:] == ["tried", "implementation", "footer"]


@pytest.mark.usefixtures("unexplained")
def test_an_example_that_fails_counts_and_a_run_without_examples_has_no_table(ringverify):
    """What was not tried is then everything that is declared."""
    wrong = ringverify.check(miniature("faulty_rings:wrong_scale"), "--only", "forward", "--max-examples", 5)
    (tried,) = wrong.told("tried")
    assert tried["features"]["property"] == {"forward": wrong.told("property")[0]["examples"]}
    nothing = ringverify.check(miniature("right:attend"), "--only", "lse")
    assert nothing.told("tried") == []
    assert "dtype float32" in nothing.told("implementation")[0]["untried"]


def test_a_stored_report_tells_the_same(ringverify):
    """As a page and as Markdown."""
    ringverify.check(*UNREACHED)
    path = Path("report-1.jsonl")
    assert ringverify("report", path, "--html", "page.html", "--markdown", "short.md").code == 0
    line = "eclared but in no example, so not tested: world size 1, "
    assert line in Path("page.html").read_text()
    assert '<table class="tried">' in Path("page.html").read_text()
    assert line in Path("short.md").read_text().replace("\\", "")
    (one,) = read_results([Source(path)]).implementations
    assert one.tried is not None
    assert one.tried.features["property"] == {"precision": 2}


def test_a_report_of_before_still_reads(ringverify):
    """It has neither the event nor the field, and nothing is said."""
    outcome = ringverify.check(*UNREACHED)
    with ReportWriter(Path("before.jsonl")) as writer:
        for event in outcome.events:
            if event["event"] != "tried":
                told = {name: value for name, value in event.items() if name != "untried"}
                writer.write(from_json(KINDS[event["event"]], told))
    assert ringverify("report", "before.jsonl", "--html", "page.html", "--markdown", "short.md").code == 0
    for path in ("page.html", "short.md"):
        assert "not run on gloo" in Path(path).read_text()
        assert "declared but" not in Path(path).read_text().lower()
        assert 'class="tried"' not in Path(path).read_text()


@pytest.mark.parametrize(
    ("untried", "line"),
    [
        ((), None),
        (("window",), "window"),
        (("world size 1", "world size 5-8", "not causal", "window"), "world size 1 or 5-8, not causal, window"),
        (
            tuple(f"dtype {n}" for n in range(14)),
            "dtype 0 or 1 or 2 or 3 or 4 or 5 or 6 or 7 or 8 or 9 or 10 or 11 and 2 more",
        ),
    ],
)
def test_features_of_one_dimension_are_named_together(untried, line):
    """In one line, however many there are."""
    event = ImplementationEvent(implementation="a", verdict="conformant", world="simulated", untried=untried)
    assert untried_line(event) == (line and f"declared but in no example, so not tested: {line}")
    assert event.not_reached == {0: "", 1: "; 1 declared feature not tried"}.get(
        len(untried), f"; {len(untried)} declared features not tried"
    )


def test_after_a_new_violation_nothing_is_said_of_what_was_not_tried():
    """It ended the search; known ones end only their own property's."""
    event = ImplementationEvent(implementation="a", verdict="violations", untried=("window",), properties={"fail": 2})
    assert untried_line(dataclasses.replace(event, known=1)) is None
    assert untried_line(dataclasses.replace(event, known=2)) is not None


@pytest.mark.parametrize(
    ("features", "pairs"),
    [
        ({"causal": {"yes": 3}, "dtype": {"float32": 3}}, []),
        ({"causal": {"yes": 3}}, ["1 2 3", "4", "5"]),
        ({}, ["1"]),
        ({"world size": {str(n): n for n in range(900)}, "dtype": {str(n): n for n in range(900)}}, [""] * 1800),
    ],
)
def test_a_table_from_elsewhere_may_hold_anything(features, pairs):
    """Rows that are missing, too long or too many: they are shown as far as they go, within a second."""
    event = from_json(KINDS["tried"], {"implementation": "a", "features": features, "pairs": pairs})
    started = time.process_time()
    assert len(long_table(event).rows) <= MOST
    terminal = Terminal(Console(file=io.StringIO(), width=100), verbose=True)
    terminal.tell(event)
    assert time.process_time() - started < 1


# -- calls and pytest --------------------------------------------------------------------------------------------------


def test_what_a_call_tried_is_added_up_again_as_it_was(ringverify):
    """Where its events are taken apart by property, as the plug-in does."""
    outcome = ringverify.check(*UNREACHED)
    events = [from_json(KINDS[event["event"]], event) for event in outcome.events]
    (before,) = (event for event in events if event.event == "tried")
    (told,) = (event for event in events if event.event == "implementation")
    again = tried_in(events)
    assert joined([one.outcome.tried for one in again], implementation="unreached") == before
    assert implementation_event(again, implementation="unreached", asked=1, seconds=1.0).untried == told.untried
    assert ConformanceResult.of(events).elsewhere == told.not_reached


def test_an_outcome_keeps_what_it_tried_on_its_way_to_another_process(ringverify):
    """As JSON, as under xdist."""
    outcome = ringverify.check(*UNREACHED)
    events = [from_json(KINDS[event["event"]], event) for event in outcome.events]
    for one in tried_in(events):
        assert from_json(TriedProperty, json.loads(json.dumps(as_json(one)))) == one
