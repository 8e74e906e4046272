"""What a run says: a frozen dataclass for each kind of event, and for each value that an event is made of.

A report is a line of JSON for each event. JSON and the published schema (`reports/schema/report-1.json`) are derived
from these classes, so the format is changed here and nowhere else:

- A field without a default is required, and always written.
- A field whose default is `None` is left out where it is `None`, unless it is marked `NULLED`.
- A text in a field's annotation is its description in the schema; `Rules` there are added to its schema.

Importing this module imports nothing but the standard library.
"""

from __future__ import annotations

import builtins
import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

SCHEMA: Literal[1] = 1
"""Version of the format."""

NULLED = object()
"""Marks a field that is written as null where it is `None`."""

Json = Any
"""A value that `json.dumps` writes as standard JSON."""

Verdict = Literal["pass", "fail", "unsupported", "inconclusive"]
"""On a property."""

ImplementationVerdict = Literal["conformant", "violations", "inconclusive"]
"""On an implementation, or on all of a run."""

Kind = Literal["pass", "fail", "known", "unsupported", "inconclusive"]
"""What became of a property; `known` is a `fail` that a baseline lists."""

TensorName = Literal["out", "lse", "dq", "dk", "dv", "dsinks"]

AXES: dict[TensorName, tuple[str, ...]] = {
    "out": ("batch", "query", "head", "dim"),
    "lse": ("batch", "head", "query"),
    "dq": ("batch", "query", "head", "dim"),
    "dk": ("batch", "key", "head", "dim"),
    "dv": ("batch", "key", "head", "dim"),
    "dsinks": ("head",),
}
"""The axes of each result of a rank, in the order in which events index it."""

What = Literal["missing", "forbidden", "repeated", "scaled", "wrong"]
"""What is wrong between queries and keys: the keys have no weight; have one though they are excluded; count several
times; all of the row is multiplied by one number; or their weight is another wrong one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """What a value has to follow beyond its type, in the words of JSON Schema."""

    content: Mapping[str, Json]


Seconds = Annotated[float, Rules({"type": "number", "minimum": 0})]
Refusals = Annotated[tuple[str, ...], "what worked here, and over NCCL, and gloo refuses: its name, and an example"]
Piece = Annotated[tuple[int, ...], Rules({"minItems": 3, "maxItems": 3})]
"""A rank, and the first and the last of some of its positions."""

Pieces = Annotated[tuple[Piece, ...], Rules({"maxItems": 24})]
Digits = Annotated[tuple[Annotated[str, Rules({"pattern": "^[0-9]{0,24}$"})], ...], Rules({"maxItems": 24})]
"""A string a row, a digit a cell."""


# -- what events are made of -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedCase:
    """A case as JSON values: what `Case.to_json` gives."""

    more: ClassVar[Mapping[str, Json]] = {"additionalProperties": False}

    problem: Annotated[Mapping[str, Any], Rules({"required": ["query_length"]})]
    sharding: str
    world_size: Annotated[int, Rules({"minimum": 1})]
    values: str
    memory: str
    cotangent: Literal["out", "lse", "both"]
    group: Literal["world", "leading", "offset", "strided"]
    transport: Literal["buffered", "rendezvous"]
    delayed: Literal["some"] | tuple[int, ...]
    seed: int
    schedule: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedMerge:
    """A case of a merge as JSON values."""

    more: ClassVar[Mapping[str, Json]] = {"additionalProperties": False}

    partials: Annotated[int, Rules({"minimum": 2})]
    batch: int
    tokens: int
    heads: int
    dim: int
    dtype: str
    values: str
    memory: str
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """Why a violation does not count, and where it is tracked."""

    reason: str
    link: str


@dataclasses.dataclass(frozen=True)
class WrongPair:
    """What is wrong between the queries of one rank and the keys that another one owns.

    Attributes:
        rank: whose queries.
        owner: whose keys.
        hop: passes that the block has made when it gets there; `None` where nothing rotates.
        keys: global positions of the keys concerned.
        what: see `What`.
    """

    rank: int
    owner: int
    hop: int | None
    keys: tuple[int, ...]
    what: What


@dataclasses.dataclass(frozen=True)
class Where:
    """Where a case is wrong.

    Attributes:
        tensor: the result.
        rows: global positions of its wrong rows, by rank.
        heads: heads in which it is wrong.
        pairs: the queries and keys between which it goes wrong; empty where that cannot be told.
        text: all of it in one line or two.
    """

    tensor: TensorName
    rows: Annotated[Mapping[int, tuple[int, ...]], "positions of wrong rows by rank"]
    heads: tuple[int, ...]
    pairs: Annotated[
        tuple[WrongPair, ...],
        "between which rank's queries and which rank's keys it goes wrong, where that can be told",
    ]
    text: Annotated[tuple[str, ...], Rules({"minItems": 1, "maxItems": 2})]

    @property
    def hop(self) -> int | None:
        """The hop, if only one is concerned."""
        hops = {pair.hop for pair in self.pairs}
        return hops.pop() if len(hops) == 1 else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """A map of the case and of what is wrong in it.

    Both axes run rank by rank and are cut in pieces [rank, first position, last position]; a cell is a digit, a row a
    string.
    """

    tensor: Annotated[TensorName | None, "the result that is wrong; null where no values came back"]
    queries: Pieces
    keys: Pieces
    pattern: Annotated[Digits | None, "how often a query attends a key, at most, by query and key"]
    pairs: Annotated[
        Digits | None,
        "the error between query and key, where it can be told: 0 is allowed, n is up to 10 to the n times what is "
        "allowed, 9 is more",
    ]
    rows: Annotated[
        Digits | None, "the error of the result itself, by query (dk and dv: by key) and head, in the same digits"
    ]


@dataclasses.dataclass(frozen=True)
class Hint:
    """Something that was found beside a failure.

    Attributes:
        text: it, in a sentence.
        property: the property that says so, if it is one.
    """

    text: str
    property: Annotated[str | None, "the property that says so", NULLED] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Needed:
    """When a case fails, found by varying it."""

    requires: Annotated[tuple[str, ...], "conditions, all of which it takes"]
    irrelevant: Annotated[tuple[str, ...], "factors whose variants all failed"]
    complete: Annotated[bool, "false: the time ended before all was tried"]

    def __str__(self) -> str:
        """Say it in a line, to follow "needs"."""
        told = ", ".join(self.requires) or ("nothing in particular" if self.complete else "nothing that was found")
        if self.irrelevant:
            told += f"; not a matter of {', '.join(self.irrelevant)}"
        return told if self.complete else f"{told}; the time ended before all was tried"


@dataclasses.dataclass(frozen=True)
class Printed:
    """The end of what a rank printed."""

    rank: Annotated[int | None, "null: of the process that ranks share"]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunFailure:
    """How a run ended that gave no results; exception is the type, where a rank raised one."""

    kind: Literal["raised", "deadlock", "deadline", "died"]
    exception: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Refused:
    """Another case, on which the transport refused a message of a rank to itself; the search went on after it."""

    summary: str
    case: RecordedCase
    case_text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declaration:
    """The capabilities with which an implementation would pass in bfloat16 or float16."""

    more: ClassVar[Mapping[str, Json]] = {"minProperties": 1}

    probabilities: Literal["input"] | None = None
    reduces: Literal["input"] | None = None
    accumulates: Literal["bfloat16", "float16"] | None = None


# -- events, in the order in which a report has them -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeaderEvent:
    """A run begins."""

    event: ClassVar[str] = "header"

    schema: Literal[1] = SCHEMA
    started: Annotated[str | None, "when, ISO 8601, UTC"] = None
    ringverify: str
    torch: str
    python: str
    platform: str
    device: str
    suite: Annotated[
        Literal["smoke", "quick", "full", "nightly", "scale", "vectors"],
        "vectors: golden vectors were tried, and a property is the id of one",
    ]
    seed: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PropertyEvent:
    """A property was tried, or it was found that it does not apply."""

    event: ClassVar[str] = "property"

    implementation: str
    property: str
    meaning: Annotated[str | None, "what must hold, in a sentence"] = None
    verdict: Verdict
    examples: int
    seconds: Seconds
    margin: float | None
    passed_over: Annotated[
        tuple[str, ...] | None, "cases of earlier runs that could not be tried, each with the reason"
    ] = None
    world: Annotated[Literal["simulated"] | None, "where it was tried, if that is not the implementation's world"] = (
        None
    )
    gloo_refuses: Refusals | None = None
    remembered: Annotated[
        int | None, "how many of the examples are cases that failed in earlier runs, which are tried first"
    ] = None
    reason: Annotated[str | None, "why it is unsupported or inconclusive, or what cut it short"] = None
    figures: Annotated[tuple[str, ...] | None, "what was measured, a line each"] = None
    known: Annotated[
        Known | None, "with verdict fail: the baseline knows this violation, so it does not count for the exit code"
    ] = None
    unexpected: Annotated[
        str | None, "with verdict pass: the baseline has it violated, so the run does not end with 0"
    ] = None
    traceback: Annotated[
        str | None,
        "of errors of ringverify itself: they cost a verdict, or what would have been said of a violation",
    ] = None

    @builtins.property  # `property` is a field here
    def kind(self) -> Kind:
        """Its verdict, with known violations apart."""
        return self.verdict if self.known is None else "known"

    def is_new_violation(self) -> bool:
        """Whether it is violated in a way that no baseline lists."""
        return self.kind == "fail"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CounterexampleEvent:
    """The smallest case that violates a property; it follows the event of that property."""

    event: ClassVar[str] = "counterexample"
    more: ClassVar[Mapping[str, Json]] = {
        "if": {"properties": {"tensor": {"const": "lse"}}},
        "then": {"properties": {"index": {"minItems": 3, "maxItems": 3}}},
        "else": {"properties": {"index": {"minItems": 4, "maxItems": 4}}},
    }

    implementation: str
    property: str
    case: Annotated[RecordedCase | None, "null: of a merge"]
    merge_case: Annotated[RecordedMerge | None, "of a merge: the case"] = None
    case_text: str | None = None
    rank: int | None
    hop: int | None
    tensor: TensorName | None
    index: tuple[int, ...] | None
    error: float | None
    allowed: float | None
    diagnosis: str | None
    hints: Annotated[tuple[Hint, ...] | None, "what was found beside the failure, where nothing explains it"] = None
    needs: Annotated[Needed | None, "when it fails, found by varying the smallest case"] = None
    printed: Annotated[tuple[Printed, ...] | None, "the end of what each rank printed"] = None
    where: Annotated[Where | None, NULLED] = None
    summary: str | None = None
    note: Annotated[str | None, "something to know about it: why there is no file, or what a vector is about"] = None
    detail: str | None = None
    declaration: Annotated[
        Declaration | None,
        "a failure in bfloat16 or float16 that another declaration accounts for: the capabilities with which the "
        "implementation would pass",
    ] = None
    declare: Annotated[str | None, "the same in words, with what u is"] = None
    failure: RunFailure | None = None
    refused: Refused | None = None
    position: int | None = None
    actual: float | None = None
    expected: float | None = None
    margin: float | None = None
    element: Annotated[str | None, "of a merge: the worst element, in words"] = None
    of: int | None = None
    wrong: Annotated[Mapping[int, int] | None, "wrong elements by rank"] = None
    region: Annotated[Region | None, NULLED] = None
    after: Annotated[tuple[str, ...] | None, "cases that have to run first, in the same process"] = None
    shrunk_from: str | None = None
    tried: int | None = None
    smallest: bool | None = None
    repeats: bool | None = None
    first_margin: Annotated[float | None, "margin of the case that was found first"] = None
    same_as: Annotated[str | None, "property whose failure this is once more", NULLED] = None
    file: str | None = None
    vectors: Annotated[
        tuple[str, ...] | None, "of a golden vector: the arguments of ringverify vectors check that show it again"
    ] = None
    scale: Annotated[
        tuple[str, ...] | None, "of the suite scale: the arguments of ringverify check that show it again"
    ] = None
    sum: Annotated[
        tuple[int, int, int, int] | None,
        "of the suite scale, where sums over all rows differ: the number of the identity, element of the batch, key "
        "head and dimension",
    ] = None
    smaller: Annotated[str | None, "of the suite scale: the file of a smaller case, which the ordinary suite found"] = (
        None
    )
    smaller_property: Annotated[str | None, "the property that this case violates"] = None
    merge: Annotated[tuple[str, ...] | None, "of a merge: the arguments of ringverify check that show it again"] = None
    replay: str


Feature = tuple[str, str]
"""A dimension such as "window", and one of its values, such as "left"."""

ABSENT, PRESENT = "no", "yes"
"""The value of a dimension that a case does without, and that of one of which there is one kind only."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedEvent:
    """What the examples of an implementation were: how many had each feature, and how many each pair of features."""

    event: ClassVar[str] = "tried"

    implementation: str
    features: Annotated[
        Mapping[str, Mapping[str, int]],
        "examples by dimension and value, those of all properties together: the counts of a dimension add up to the "
        "number of examples; no: a case does without it",
    ]
    pairs: Annotated[
        tuple[Annotated[str, Rules({"pattern": "^([0-9]{1,9}( [0-9]{1,9})*)?$"})], ...],
        "a row for each feature, in the order above: how many of its examples had each feature of the dimensions "
        "before its own, numbers with a space between",
    ]

    def together(self) -> dict[tuple[Feature, Feature], int]:
        """Return how many examples had both of two features, in both orders; 0 is left out."""
        found: dict[tuple[Feature, Feature], int] = {}
        rows, before = iter(self.pairs), list[Feature]()
        for dimension, counts in self.features.items():
            mine = [(dimension, value) for value in counts]
            for one, row in zip(mine, rows, strict=False):  # what is read may lack rows
                for other, count in zip(before, map(int, row.split()), strict=False):
                    if count:
                        found[one, other] = found[other, one] = count
            before += mine
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImplementationEvent:
    """All properties of an implementation were tried."""

    event: ClassVar[str] = "implementation"

    implementation: str
    verdict: ImplementationVerdict
    world: str | None = None
    not_run_in: Annotated[tuple[str, ...] | None, "worlds of real processes in which nothing of this was run"] = None
    gloo_refuses: Refusals | None = None
    undeclared: tuple[str, ...] | None = None
    untried: Annotated[tuple[str, ...] | None, "declared features that no example had, so that they are not tested"] = (
        None
    )
    properties: Mapping[str, int] | None = None
    known: int | None = None
    not_run: int | None = None
    examples: int | None = None
    runs: int | None = None
    simulated_runs: Annotated[int | None, "runs of a simulated world beside these, for what only that one can show"] = (
        None
    )
    seconds: Seconds | None = None
    seconds_inside: Seconds | None = None
    device: Annotated[str | None, "device, suite and seed: where they are not the header's"] = None
    suite: Literal["smoke", "quick", "full", "nightly"] | None = None
    seed: int | None = None
    versions: Annotated[Mapping[str, str] | None, "of what a program runs on, as it says itself"] = None
    shapes: Annotated[int | None, "number of shapes that the examples had, where every new one is compiled"] = None

    @property
    def reached(self) -> str:
        """Of a pass: in which world it is one; to follow the verdict. Empty for other verdicts."""
        return f" in the {self.world} world" if self._is_pass_somewhere() else ""

    @property
    def not_reached(self) -> str:
        """Of a pass: where and of what it is none; in older reports that is not said. Empty for other verdicts."""
        if not self._is_pass_somewhere():
            return ""
        where = f"; not run on {' and '.join(self.not_run_in)}" if self.not_run_in else ""
        features = f"{len(self.untried or ())} declared feature{'s' if len(self.untried or ()) > 1 else ''}"
        return f"{where}; {features} not tried" if self.untried else where

    def _is_pass_somewhere(self) -> bool:
        return self.verdict == "conformant" and self.world is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExchangeEvent:
    """What an implementation exchanges, and what its memory peaks at, on one ordinary case; with -v."""

    event: ClassVar[str] = "exchange"

    implementation: str
    case: RecordedCase
    case_text: str | None = None
    traffic: tuple[str, ...]
    memory: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FooterEvent:
    """A run is over; the file of a report adds its seal."""

    event: ClassVar[str] = "footer"
    seal: ClassVar[Mapping[str, Json]] = {
        "type": "string",
        "description": "SHA-256 of all lines, each with a line feed, this one without its last field, the seal: what "
        "was edited by hand no longer fits it",
    }

    verdict: ImplementationVerdict
    exit_code: Annotated[
        Literal[0, 1, 2, 3],
        "with a baseline, violations that are all known end with 0, and a violation that is gone with 2",
    ]
    known: int | None = None
    unexpected: tuple[str, ...] | None = None
    elsewhere: Annotated[
        tuple[str, ...] | None, "implementations that the baseline names and that this run did not check"
    ] = None


Event = (
    HeaderEvent | PropertyEvent | CounterexampleEvent | TriedEvent | ImplementationEvent | ExchangeEvent | FooterEvent
)
KINDS: Mapping[str, type[Event]] = {kind.event: kind for kind in typing.get_args(Event)}
"""The classes by the name of their kind."""


@dataclasses.dataclass(frozen=True)
class PropertyOutcome:
    """What became of one property of one implementation.

    Attributes:
        verdict: the event of the property.
        counterexample: that of the smallest case that violates it, if there is one.
        tried: what its examples were, which a report tells of all properties together.
        shapes: shapes and dtypes of their tensors, each once, where every new one is compiled.
    """

    verdict: PropertyEvent
    counterexample: CounterexampleEvent | None = None
    tried: TriedEvent | None = None
    shapes: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """Of the property."""
        return self.verdict.property

    @property
    def events(self) -> tuple[PropertyEvent | CounterexampleEvent, ...]:
        """In the order in which a report has them."""
        return (self.verdict,) if self.counterexample is None else (self.verdict, self.counterexample)


def outcomes_of(events: Iterable[Event]) -> dict[str, dict[str, PropertyOutcome]]:
    """What became of each property of each implementation, by name and id, in the order of the events.

    Raises:
        ValueError: the events contradict one another.
    """
    found: dict[str, dict[str, PropertyOutcome]] = {}
    for event in events:
        if isinstance(event, PropertyEvent):
            mine = found.setdefault(event.implementation, {})
            if event.property in mine:
                raise ValueError(f"two verdicts on {event.property} of {event.implementation!r}")
            mine[event.property] = PropertyOutcome(event)
        elif isinstance(event, CounterexampleEvent):
            outcome = found.get(event.implementation, {}).get(event.property)
            if outcome is None or outcome.verdict.verdict != "fail":
                raise ValueError(
                    f"a counterexample to {event.property} of {event.implementation!r}, which is not said to fail"
                )
            found[event.implementation][event.property] = dataclasses.replace(outcome, counterexample=event)
    return found


# -- JSON --------------------------------------------------------------------------------------------------------------

Made = TypeVar("Made")


def as_json(value: Any) -> Json:
    """A dataclass, or a value that may hold some, as JSON values; numbers that JSON lacks are "inf", "-inf", "nan"."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    found = {"event": value.event} if isinstance(value, typing.get_args(Event)) else {}
    kind: Any = type(value)
    for field in _fields(kind):
        item = getattr(value, field.name)
        if item is not None or field.required or field.nulled:
            found[field.name] = as_json(item)
    return found


def from_json(kind: type[Made], content: Mapping[str, Json]) -> Made:
    """The dataclass that `as_json` made JSON of; fields that are not known are left out.

    Raises:
        KeyError: a field is missing. What comes from a file is held to the schema before.
    """
    fields = _fields(typing.cast(Any, kind))
    return kind(
        **{
            field.name: _read(field.type, content[field.name])
            for field in fields
            if field.required or field.name in content
        }
    )


def _read(kind: Any, value: Json) -> Any:
    kind = _plain(kind)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (Union, types.UnionType):
        if value is None:
            return None
        several = [one for one in arguments if one is not type(None)]
        # Of several, one is an array: `Literal["some"] | tuple[int, ...]`.
        wanted = [one for one in several if (typing.get_origin(_plain(one)) is tuple) == isinstance(value, list)]
        return _read((wanted or several)[0], value)
    if dataclasses.is_dataclass(kind):
        return from_json(typing.cast(type[Any], kind), value)
    if kind is float:
        return _number(value)
    if kind is int:
        return int(value)  # JSON Schema takes 1.0 for an integer
    if typing.get_origin(kind) is tuple:
        return tuple(_read(arguments[0], item) for item in value)
    if typing.get_origin(kind) is Mapping:
        key, inner = arguments
        return {key(name): _read(inner, item) for name, item in value.items()}
    return value


def _number(value: float | str) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON's whole numbers have no end
        return math.inf


@dataclasses.dataclass(frozen=True)
class _Field:
    """A field of a dataclass, as far as JSON and the schema need it.

    Attributes:
        type: as it is annotated, without `None` where that means that it is left out.
        required: whether it is in every object.
        nulled: whether it is written as null where it is `None`, though readers do without it.
    """

    name: str
    type: Any
    required: bool
    nulled: bool


@functools.cache
def _fields(kind: Any) -> tuple[_Field, ...]:
    hints = typing.get_type_hints(kind, include_extras=True)
    found = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        required = field.default is dataclasses.MISSING or field.default is SCHEMA
        found.append(_Field(field.name, hint, required, NULLED in getattr(hint, "__metadata__", ())))
    return tuple(found)


def _plain(kind: Any) -> Any:
    """A type without what its annotation adds."""
    return typing.get_args(kind)[0] if typing.get_origin(kind) is Annotated else kind


# -- the schema --------------------------------------------------------------------------------------------------------

NUMBER: Json = {"oneOf": [{"type": "number"}, {"enum": ["inf", "-inf", "nan"]}]}
"""The schema of a number that may be one that JSON lacks."""


def schema() -> Json:
    """The published schema, derived from the classes of the events."""
    definitions: dict[str, Json] = {"number": NUMBER}
    for kind in KINDS.values():
        _define(kind, definitions)
    footer = definitions[FooterEvent.event]
    footer["properties"]["seal"] = FooterEvent.seal
    footer["required"].append("seal")
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"RingVerify report, schema {SCHEMA}: one event, one line of a JSON Lines file",
        "description": "A report begins with a header and is whole only if it ends with a footer. Numbers that JSON "
        "lacks are the strings inf, -inf and nan. Readers ignore fields that they do not know.",
        "oneOf": [{"$ref": f"#/$defs/{kind}"} for kind in KINDS],
        "$defs": definitions,
    }


def schema_of(kind: type) -> Json:
    """The schema of what `as_json` makes of any dataclass whose fields are of the types that events have."""
    definitions: dict[str, Json] = {"number": NUMBER}
    return _define(kind, definitions) | {"$defs": definitions}


def _define(kind: type, definitions: dict[str, Json]) -> Json:
    """Put the schema of a dataclass among the definitions; give back the reference to it."""
    event: str | None = getattr(kind, "event", None)
    name = event or re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
    if name not in definitions:
        definitions[name] = {}  # its place: those that it refers to come behind it
        properties = {} if event is None else {"event": {"const": event}}
        for field in _fields(kind):
            optional = not field.required and not field.nulled
            properties[field.name] = _schema_of(field.type, definitions, may_be_null=not optional)
        required = [*properties][:1] if event else []
        required += [field.name for field in _fields(kind) if field.required]
        definitions[name] = {
            "type": "object",
            "description": " ".join((kind.__doc__ or "").partition("\n\n    Attributes:")[0].split()),
            "properties": properties,
            **({"required": required} if required else {}),
            **getattr(kind, "more", {}),
        }
    return {"$ref": f"#/$defs/{name}"}


def _schema_of(kind: Any, definitions: dict[str, Json], *, may_be_null: bool = True) -> Json:
    """The schema of a type, as it is annotated."""
    added: dict[str, Json] = {}
    for note in getattr(kind, "__metadata__", ()):
        added |= {"description": note} if isinstance(note, str) else note.content if isinstance(note, Rules) else {}
    kind = _plain(kind)
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (Union, types.UnionType):
        options = [_schema_of(one, definitions) for one in arguments if one is not type(None)]
        found = options[0] if len(options) == 1 else {"oneOf": options}
        return (_or_null(found) if may_be_null and type(None) in arguments else found) | added
    if "type" in added:
        return added
    if dataclasses.is_dataclass(kind):
        return _define(typing.cast(type, kind), definitions) | added
    match typing.get_origin(kind):
        case origin if origin is Literal:
            return ({"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}) | added
        case origin if origin is tuple:
            return {"type": "array", "items": _schema_of(arguments[0], definitions)} | added
        case origin if origin is Mapping:
            inner = {} if arguments[1] is Any else {"additionalProperties": _schema_of(arguments[1], definitions)}
            names = {"propertyNames": {"pattern": "^[0-9]{1,9}$"}} if arguments[0] is int else {}
            return {"type": "object"} | names | inner | added
    plain: dict[type, Json] = {
        str: {"type": "string"},
        bool: {"type": "boolean"},
        int: {"type": "integer", "minimum": 0},
        float: {"$ref": "#/$defs/number"},
    }
    return plain[kind] | added


def _or_null(one: Json) -> Json:
    """The schema that also lets null through."""
    if "type" in one:
        return one | {"type": [one["type"], "null"]}
    if "enum" in one:
        return one | {"enum": [*one["enum"], None]}
    return {"oneOf": [one, {"type": "null"}]}
