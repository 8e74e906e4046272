"""Events are classes, from which JSON and the published schema come; the committed schema is what they say."""

import dataclasses
import json
import math
import os
from pathlib import Path

import pytest
import sample_events as sample
from jsonschema import Draft202012Validator

from ringverify import events, reports

PUBLISHED = Path(reports.__file__).parent / "schema" / "report-1.json"
VALIDATOR = Draft202012Validator(events.schema())
TOLD = [*sample.everything(), {**sample.counterexample("a", "lse"), "where": None, "hints": [], "same_as": "forward"}]


def derived():
    """The schema as text."""
    return json.dumps(events.schema(), indent=2, ensure_ascii=False) + "\n"


def test_the_published_schema_is_derived_from_the_events():
    """To the letter: a change of the format shows in a file that is reviewed."""
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        PUBLISHED.write_text(derived(), encoding="utf-8")
    assert derived() == PUBLISHED.read_text(encoding="utf-8"), "after a change that is meant: UPDATE_SNAPSHOTS=1"


def test_a_field_that_is_added_changes_the_schema(monkeypatch):
    """The gate can close."""
    fields = [("mood", str)]
    more = dataclasses.make_dataclass("MoreEvent", fields, bases=(events.ExchangeEvent,), frozen=True, kw_only=True)
    monkeypatch.setattr(events, "KINDS", {**events.KINDS, "exchange": more})
    assert derived() != PUBLISHED.read_text(encoding="utf-8")


@pytest.mark.parametrize("number", range(len(TOLD)))
def test_an_event_that_was_read_is_written_as_it_was(number):
    """Every field, those that are null and those that are not there included."""
    told = TOLD[number]
    kind = events.KINDS[told["event"]]
    event = events.from_json(kind, told)
    again = events.as_json(event)
    assert events.from_json(kind, again) == event
    assert told == {name: value for name, value in again.items() if name in told or value is not None}
    assert not list(VALIDATOR.iter_errors({**again, "seal": ""}))


def test_numbers_that_json_lacks_are_text_there_and_numbers_here():
    """In both directions."""
    told = sample.row("a", "forward", "fail", margin="inf")
    event = events.from_json(events.PropertyEvent, told)
    assert event.margin == math.inf
    assert events.as_json(event)["margin"] == "inf"
    assert events.as_json({"a": (math.nan, -math.inf)}) == {"a": ["nan", "-inf"]}
    assert events.from_json(events.PropertyEvent, told | {"margin": 10**400}).margin == math.inf


BROKEN = {
    "a field less": lambda event: event.pop("verdict"),
    "a verdict that is none": lambda event: event.update(verdict="fine"),
    "text for a number": lambda event: event.update(margin="a lot"),
    "fewer than none": lambda event: event.update(examples=-1),
    "null for what is left out": lambda event: event.update(reason=None),
    "another kind of value": lambda event: event.update(known="yes"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_breaks_the_types_breaks_the_schema(how):
    """The schema is no looser than the classes."""
    event = sample.row("a", "forward", "fail", known=sample.KNOWN)
    assert not list(VALIDATOR.iter_errors(event))
    BROKEN[how](event)
    assert list(VALIDATOR.iter_errors(event))


def test_fields_that_are_new_are_left_out():
    """Adding is free: an older reader goes on."""
    told = sample.row("a", "forward", "pass")
    assert events.from_json(events.PropertyEvent, {**told, "weather": "sun"}) == events.from_json(
        events.PropertyEvent, told
    )


def test_outcomes_belong_to_a_property_of_an_implementation():
    """With its counterexample; what contradicts itself is refused."""
    told = [events.from_json(events.KINDS[one["event"]], one) for one in sample.everything()]
    outcomes = events.outcomes_of(told)
    assert list(outcomes["wrong_ring.attend"]) == ["forward", "lse", "gradients", "isolation"]
    assert outcomes["wrong_ring.attend"]["lse"].counterexample is None
    assert outcomes["wrong_ring.attend"]["gradients"].verdict.kind == "known"
    with pytest.raises(ValueError, match="two verdicts on forward of "):
        events.outcomes_of([*told, *told])
