"""The index of a folder of vectors: JSON, sealed, described by `schema/vectors-1.json`.

The seal is the SHA-256 of the index's other fields, and each vector's checksum that of its file. They do not protect
against malice; they show that a folder is not what was generated.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import ringverify
from ringref.problem import Problem
from ringref.sharding import SHARDING_NAMES, PageTable
from ringverify.cases.case import COTANGENTS, look_at_size
from ringverify.cases.running import shards
from ringverify.errors import UsageError
from ringverify.files import laid_out, read_json, refusing
from ringverify.implementation import Capabilities
from ringverify.vectors.sealed import again, seal
from ringverify.vectors.story import ID, Layout, Story, by_id, flags, layout_flags, written_out
from ringverify.words import cut

SCHEMA = 1
ANY_SHARDING = Capabilities(sharding=SHARDING_NAMES)
NAME = "index.json"
SCHEMA_NAME = "schema.json"
LONGEST_VALUE = 120
"""Most characters of a field's value in a message."""
SCHEMA_FILE = Path(__file__).parent / "schema" / f"vectors-{SCHEMA}.json"


@dataclasses.dataclass(frozen=True)
class Index:
    """The index of a folder, as it was read.

    Attributes:
        folder: the folder.
        stories: the description of each vector, by id.
        entries: the index's entry of each vector as JSON values, by id.
    """

    folder: Path
    stories: dict[str, Story]
    entries: dict[str, dict[str, Any]]

    def chosen(self, ids: tuple[str, ...] | None, long: Collection[str] = ()) -> list[Story]:
        """Return the vectors of these ids, or all for `None`; `long` are ids that the folder has besides.

        Raises:
            UsageError: there is no vector of an id.
        """
        for id in ids or ():
            if id not in self.stories and id not in long:
                besides = f", and {', '.join(long)}" if long else ""
                raise UsageError(
                    f"no vector {id!r} in {self.folder}: it has {min(self.stories)} to {max(self.stories)}{besides}"
                )
        return [story for id, story in self.stories.items() if ids is None or id in ids]


def entry(story: Story, data: bytes) -> dict[str, Any]:
    """Return the index's entry of a vector whose file has these bytes."""
    p = story.problem
    return {
        "id": story.id,
        "topic": story.topic,
        "title": story.title,
        "note": story.note,
        "bugs": list(story.bugs),
        "flags": list(flags(p, story.cotangent, story.values)),
        "exact": story.exact,
        "problem": written_out(p),
        "values": story.values,
        "cotangent": story.cotangent,
        "layouts": [_layout(story, layout) for layout in story.layouts],
        "file": file_name(story.id),
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
    }


def file_name(id: str) -> str:
    """Return the name of a vector's file."""
    return f"{id}.safetensors"


def write(entries: Iterable[Mapping[str, Any]], bugs: Mapping[str, Mapping[str, str]]) -> str:
    """Return the text of an index, its seal included."""
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "about": "golden vectors of attention: docs/vectors.md of ringverify says how to read them",
        "bugs": dict(bugs),
        "vectors": list(entries),
    }
    content["seal"] = seal(content)
    return laid_out(content) + "\n"


def read(folder: Path) -> Index:
    """Read the index of a folder, and check its schema number, its seal and its fields.

    Raises:
        UsageError: there is no index, or it is cut off, edited, of another schema, or does not describe vectors.
    """
    path = folder / NAME
    try:
        with refusing(f"read {path}", "name a folder of vectors, or make one with ringverify vectors generate DIR"):
            content = read_json(path)
    except ValueError:  # not UTF-8, or not JSON
        raise UsageError(f"{path} is truncated or not JSON: {again(folder)}") from None
    if not isinstance(content, dict) or "schema" not in content:
        raise UsageError(f"{path} is not an index of vectors, it names no schema: {again(folder)}")
    if content["schema"] != SCHEMA:
        raise UsageError(
            f"{path} has schema {content['schema']!r}, and ringverify {ringverify.__version__} reads schema {SCHEMA}: "
            "upgrade ringverify"
        )
    if content.pop("seal", None) != seal(content):
        raise UsageError(f"{path} was edited after it was generated: {again(folder)}")
    if not isinstance(content.get("vectors"), list) or not content["vectors"]:
        raise UsageError(f"{path} lists no vectors: {again(folder)}")
    stories: list[Story] = []
    for number, described in enumerate(content["vectors"], 1):
        try:
            stories.append(_story(described))
        except KeyError as error:
            raise UsageError(f"{path}, vector {number} lacks the field {error.args[0]!r}") from None
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}, vector {number} does not describe a vector: {error}") from None
    try:
        named = by_id(stories)
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    return Index(folder, named, {described["id"]: described for described in content["vectors"]})


def _story(described: Any) -> Story:
    if not isinstance(described, Mapping):
        raise TypeError(f"{described!r} is not an object")
    texts = {
        name: described[name] for name in ("id", "topic", "title", "note", "values", "cotangent", "file", "sha256")
    }
    for name, value in texts.items():
        if not isinstance(value, str):
            raise TypeError(f"{name}={value!r}, expected text")
    if not ID.fullmatch(texts["id"]) or texts["file"] != file_name(texts["id"]):
        raise ValueError(f"id={texts['id']!r} with file={texts['file']!r}: expected V001 with V001.safetensors")
    if texts["cotangent"] not in COTANGENTS:
        raise ValueError(f"cotangent={texts['cotangent']!r}: expected one of {', '.join(COTANGENTS)}")
    bugs, layouts = described["bugs"], described["layouts"]
    if not isinstance(bugs, list) or not all(isinstance(bug, str) for bug in bugs):
        raise TypeError(f"bugs={bugs!r}, expected a list of ids")
    if not isinstance(layouts, list) or not layouts:
        raise TypeError(f"layouts={layouts!r}, expected a list that is not empty")
    problem, named = Problem.from_json(described["problem"]), tuple(_named_layout(layout) for layout in layouts)
    look_at_size(problem, max(layout.world_size for layout in named))
    return Story(
        id=texts["id"],
        topic=texts["topic"],
        title=texts["title"],
        note=texts["note"],
        bugs=tuple(bugs),
        problem=problem,
        values=texts["values"],
        cotangent=texts["cotangent"],
        layouts=named,
    )


def _named_layout(described: Any) -> Layout:
    if not isinstance(described, Mapping):
        raise TypeError(f"layout {described!r} is not an object")
    sharding, size = described["sharding"], described["world_size"]
    cached = "chunks" in described
    known = isinstance(sharding, str) and (cached or sharding in SHARDING_NAMES)
    if not known or isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(
            f"layout {sharding!r} on {size!r} ranks: expected one of {', '.join(SHARDING_NAMES)} and a number"
        )
    for name in ("queries", "keys"):
        if not isinstance(described[name], list) or len(described[name]) != size:
            shown = cut(str(described[name]), LONGEST_VALUE)
            raise ValueError(f"layout {sharding} on {size} ranks: {name}={shown}, expected {size} lists of positions")
    if not cached:
        return Layout(sharding, size)
    table = described["page_table"]
    pages = None if table is None else PageTable(table["page_size"], table["pages"])
    return Layout(sharding, size, tuple(described["chunks"]), pages)


def _layout(story: Story, layout: Layout) -> dict[str, Any]:
    """Return the entry of a layout, with the positions that each rank holds; on a cache also its calls and pages."""
    case = story.case(layout)
    queries, keys = shards(case, ANY_SHARDING)
    table = layout.page_table
    pages = None if table is None else {"page_size": table.page_size, "pages": [list(held) for held in table.pages]}
    return {
        "sharding": layout.sharding,
        "world_size": layout.world_size,
        "flags": list(layout_flags(case)),
        "queries": [rows.tolist() for rows in queries],
        "keys": [rows.tolist() for rows in keys],
        **({"chunks": list(layout.chunks), "page_table": pages} if layout.chunks else {}),
    }
