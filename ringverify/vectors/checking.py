"""`ringverify vectors check`: check that files are as generated, and that the oracle still gives their results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

import ringverify
from ringref.attention import Answer
from ringref.problem import Problem
from ringref.rounding import Allowed, Pipeline, allowed_error, margins
from ringverify.cases import tensorfile
from ringverify.cases.inputs import Inputs
from ringverify.cases.tensorfile import NotSafetensors, Tensor
from ringverify.check.outcome import ImplementationOutcome, TriedProperty, footer_event, implementation_event
from ringverify.errors import UsageError
from ringverify.events import PropertyOutcome, Verdict
from ringverify.files import read_bytes, read_text, refusing
from ringverify.properties.property import Violation
from ringverify.vectors import index, long, making, merges, sealed
from ringverify.vectors.index import Index
from ringverify.vectors.merges import MergeVector
from ringverify.vectors.recording import AnyVector, Tell, begun, counterexample_event, property_event, sentence
from ringverify.vectors.story import Story, written_out
from ringverify.words import cut


def look_at_files(found: Index) -> None:
    """Check that the folder holds the schema of the index and exactly the vectors that the index names.

    Raises:
        UsageError: a file is missing, a vector is not in the index, or the schema is not the one that it follows.
    """
    again = sealed.again(found.folder)
    named = {index.file_name(id) for id in found.stories}
    there = {path.name for path in found.folder.glob("*.safetensors")}
    if missing := sorted(named - there):
        raise UsageError(f"{found.folder / missing[0]} is missing, and the index names it: {again}")
    if unnamed := sorted(there - named):
        raise UsageError(f"{found.folder / index.NAME} does not name {unnamed[0]}, which lies beside it: {again}")
    schema = found.folder / index.SCHEMA_NAME
    try:
        with refusing(f"read {schema}", again):
            whole = read_text(schema) == index.SCHEMA_FILE.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        whole = False
    if not whole:
        raise UsageError(
            f"{schema} differs from the schema of vectors that ringverify {ringverify.__version__} ships: {again}"
        )


def load(found: Index, story: Story) -> dict[str, Tensor]:
    """Return the tensors of a vector, after checking its file against the index.

    Raises:
        UsageError: the file is cut off or edited, or does not hold what the index says.
    """
    path, described = found.folder / index.file_name(story.id), found.entries[story.id]
    again = sealed.again(found.folder)
    with refusing(f"read {path}", again):
        data = read_bytes(path)
    if isinstance(described.get("bytes"), int) and len(data) < described["bytes"]:
        raise UsageError(f"{path} is truncated: {len(data)} of {described['bytes']} bytes; {again}")
    if hashlib.sha256(data).hexdigest() != described["sha256"]:
        raise UsageError(f"{path} was edited: its SHA-256 is not that of the index; {again}")
    try:
        tensors, metadata = tensorfile.decode(data)
    except NotSafetensors as error:
        raise UsageError(f"{path} is no vector: {error}; {again}") from None
    if metadata.get("id") != story.id:
        raise UsageError(f"{path} holds the vector {metadata.get('id')!r}, expected {story.id}; {again}")
    if _problem(metadata) != written_out(story.problem):
        raise UsageError(f"{path} holds another problem than the index describes for {story.id}; {again}")
    wanted = making.shapes(story)
    if {name: (tensor.values.shape, tensor.dtype) for name, tensor in tensors.items()} != wanted:
        raise UsageError(f"{path} has other tensors than {story.id} needs; {again}")
    said = index.entry(story, data)
    for name in said:
        in_index, right = json.dumps(described.get(name)), json.dumps(said[name])
        if in_index != right:  # as text, because 0 == False in Python
            raise UsageError(
                f"{found.folder / index.NAME}, {story.id}: {name} is {cut(in_index, index.LONGEST_VALUE)}, expected "
                f"{cut(right, index.LONGEST_VALUE)}; {again}"
            )
    return tensors


def look_into(
    found: Index,
    stories: Sequence[Story],
    record: Tell,
    *,
    all_of_them: bool,
    at_length: Sequence[Mapping[str, Any]] = (),
    of_merges: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Check that every vector's file is whole and that the oracle gives its results.

    Args:
        found: the vectors.
        stories: those to check.
        record: receives the events of a report, one verdict per vector.
        all_of_them: whether to go on after a wrong vector.
        at_length: entries of long vectors to check as well.
        of_merges: entries of vectors of merges, likewise.

    Raises:
        UsageError: a vector is wrong; the message is about the first of them.
    """
    name, started = f"vectors in {found.folder}", time.monotonic()
    tried: list[TriedProperty] = []
    wrong: UsageError | None = None
    record(begun("cpu"))
    checks: list[tuple[AnyVector, Callable[[], None]]] = []
    for one in stories:
        checks.append((one, partial(_answer_again, found, one)))
    for described in of_merges:
        checks.append((merges.of(described), partial(merges.answer_again, found.folder, described)))
    for described in at_length:
        checks.append((long.of(described), partial(long.answer_again, found.folder, described)))
    for story, check in checks:
        since = time.monotonic()
        violation: Violation | None = None
        try:
            check()
        except UsageError as error:
            if not all_of_them:
                raise
            wrong, violation = wrong or error, Violation(("vector",), None, str(error))
        seconds = time.monotonic() - since
        verdict: Verdict = "fail" if violation else "pass"
        event = property_event(name, story.id, verdict, meaning=sentence(story), examples=1, seconds=seconds)
        tried.append(TriedProperty(outcome=PropertyOutcome(event), world="none"))
        record(event)
        if violation is not None:
            again = [str(found.folder), "--only", story.id]
            layout = None if isinstance(story, MergeVector) else story.layouts[0]
            record(counterexample_event(name, story, layout, violation, vectors=again))
    record(implementation_event(tried, implementation=name, asked=len(tried), seconds=time.monotonic() - started))
    footer = footer_event([ImplementationOutcome.of([one.verdict for one in tried])], baseline=False)
    record(footer if wrong is None else dataclasses.replace(footer, exit_code=2))
    if wrong is not None:
        raise wrong


def _answer_again(found: Index, story: Story) -> None:
    answer_again(found, story, load(found, story))


def _problem(metadata: Mapping[str, str]) -> object:
    try:
        return json.loads(metadata.get("problem", ""))
    except ValueError:
        return None


def answer_again(found: Index, story: Story, tensors: Mapping[str, Tensor]) -> None:
    """Compute a file's results again: bit for bit in decimal arithmetic, and within its rounding in float64.

    Raises:
        UsageError: a result differs from the file's.
    """
    given, again = making.given_in(tensors), sealed.again(found.folder)
    path = found.folder / index.file_name(story.id)
    for name, tensor in making.answered(story, given).items():
        if not np.array_equal(tensor.values, tensors[name].values, equal_nan=True):
            raise UsageError(f"{path}: {name} is not what the oracle gives; {again}")
    answer = making.float64_answer(story.problem, given)
    bound = _float64_bound(story.problem, given, answer)
    for name in making.results_of(story.problem):
        actual, limit = making.whole(answer, name), making.whole(bound, name)
        margin = margins(actual, tensors[name].values, limit, "float64")
        if margin.max(initial=0.0) > 1:
            raise UsageError(f"{path}: {name} is not what the float64 oracle gives; {again}")


def _float64_bound(problem: Problem, given: Inputs, answer: Answer) -> Allowed:
    """Return the error allowed to one computation in float64."""
    pipeline = Pipeline("float64", accumulates="float64", lse_dtype="float64", blocks=1)
    return allowed_error(problem, answer, given.q, given.k, given.v, given.dout, given.dlse, pipeline)
