"""The description of a vector: an id, a problem, a family of input values, shardings, and what the vector is for."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any, Literal

from ringref.problem import Dilation, Problem
from ringref.sharding import SHARDING_NAMES, PageTable
from ringverify.cases.case import Case, Cotangent, uneven_or_empty

Topic = Literal[
    "shapes",
    "causal",
    "window",
    "documents",
    "key_lengths",
    "cross_lengths",
    "incremental",
    "scores",
    "sinks",
    "heads",
    "dilation_split",
    "dilation_shared",
    "empty_rows",
    "extremes",
    "dtypes",
    "gradients",
    "isolation",
    "exact",
    "combined",
    "shards",
]
"""What a vector is mostly about."""

Family = Literal[
    "bell",
    "integers",
    "zero_queries",
    "unit_values",
    "large_scores",
    "shifted_up",
    "shifted_down",
    "rising",
    "falling",
    "steep_rising",
    "steep_falling",
    "dominating_first",
    "dominating_last",
    "float16_limits",
    "tiny_values",
    "unattended_nan",
    "selectors",
]
"""Families of input values; see `ringverify.vectors.inputs`."""

ID = re.compile(r"V(\d{3})")


@dataclasses.dataclass(frozen=True)
class Layout:
    """A sharding on a number of ranks; on a cache also the calls, and the pages where keys lie in these.

    Attributes:
        sharding: as of `Case`: "zigzag", or "replicated/pages" on a cache.
        world_size: the number of ranks.
        chunks: as of `Case`.
        page_table: likewise.
    """

    sharding: str
    world_size: int
    chunks: tuple[int, ...] = ()
    page_table: PageTable | None = None


def on(
    *, contiguous: Iterable[int] = (), zigzag: Iterable[int] = (), striped: Iterable[int] = (), **other: Iterable[int]
) -> tuple[Layout, ...]:
    """Return the layouts of these world sizes, given by sharding."""
    sizes = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped, **other}
    return tuple(Layout(sharding, size) for sharding in SHARDING_NAMES for size in sizes.get(sharding, ()))


USUAL = on(contiguous=(3,), zigzag=(2,), striped=(4,), replicated_query=(2,))
"""Every sharding once, on two, three and four ranks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Story:
    """The description of one vector: what it asks of an implementation, and which mistake it detects.

    Attributes:
        id: `V` and three digits; never used again for anything else.
        topic: what it is mostly about.
        title: a few words.
        note: the mistake that makes an implementation fail it.
        bugs: ids of the reported bugs that it shows, as in `ringverify list mutants`.
        problem: what to compute.
        values: family of input values.
        cotangent: which results have a cotangent.
        layouts: shardings and world sizes to try it on.
    """

    id: str
    topic: Topic
    title: str
    note: str
    bugs: tuple[str, ...] = ()
    problem: Problem
    values: Family = "bell"
    cotangent: Cotangent = "out"
    layouts: tuple[Layout, ...] = USUAL

    def __post_init__(self) -> None:
        if ID.fullmatch(self.id) is None:
            raise ValueError(f"id={self.id!r}: expected V and three digits")
        object.__setattr__(self, "problem", Problem.from_json(written_out(self.problem)))

    @property
    def number(self) -> int:
        """The number in the id, from which inputs are seeded."""
        return int(self.id[1:])

    @property
    def exact(self) -> bool:
        """Whether out and dv are right only bit for bit, in every dtype."""
        return self.values == "selectors"

    @property
    def most_ranks(self) -> int:
        """The largest world size that it is tried on."""
        return max(layout.world_size for layout in self.layouts)

    def case(self, layout: Layout) -> Case:
        """Return the case of a layout; its inputs are replaced by the vector's own when an implementation is run."""
        return Case(
            problem=self.problem,
            sharding=layout.sharding,
            world_size=layout.world_size,
            values="poisoned_skips" if skips_nan(self.problem, self.values) else "normal",
            cotangent=self.cotangent,
            chunks=layout.chunks,
            page_table=layout.page_table,
        )


def trial_name(id: str, layout: Layout) -> str:
    """Return a vector's id, sharding and number of ranks, in words."""
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    return f"{id}, {layout.sharding} on {ranks}"


def written_out(problem: Problem) -> dict[str, Any]:
    """Return the problem as JSON values, every field present but absent sinks; absent constraints are null."""
    shape = {"key_length": problem.nk, "key_heads": problem.hk, "value_dim": problem.dv}
    fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)} | shape
    if not problem.sinks:  # vectors that are older than sinks stay as they are
        del fields["sinks"]
    return {name: _plain(value) for name, value in fields.items()}


def skips_nan(problem: Problem, values: Family) -> bool:
    """Whether a NaN may lie in a key that is not padding, but that a window or a dilation skips for every query."""
    return values == "unattended_nan" and (problem.window is not None or problem.dilation is not None)


def flags(problem: Problem, cotangent: Cotangent, values: Family = "bell") -> tuple[str, ...]:
    """Return the capabilities that a vector needs, by their names in the plug-in contract."""
    wanted = {
        "causal": problem.causal,
        "window": problem.window is not None,
        "documents": problem.documents is not None,
        "key_lengths": problem.key_lengths is not None,
        "cross_lengths": problem.nq != problem.nk,
        "gqa": problem.hk != problem.heads,
        "value_dim": problem.dv != problem.head_dim,
        "scale": problem.scale is not None,
        "negative_scale": problem.scale is not None and problem.scale < 0,
        "softcap": problem.softcap is not None,
        "sinks": problem.sinks,
        "dilation:split": problem.dilation is not None and problem.dilation.heads == "split",
        "dilation:shared": problem.dilation is not None and problem.dilation.heads == "shared",
        "uneven_segments": problem.dilation is not None and any(problem.nq % w for w, _ in problem.dilation.branches),
        "lse_gradient": cotangent != "out",
        "poison_safe": skips_nan(problem, values),
    }
    return tuple(name for name, needed in wanted.items() if needed)


def layout_flags(case: Case) -> tuple[str, ...]:
    """Return the capabilities that a vector needs besides on a layout: "uneven", "empty_shards", "incremental"."""
    uneven, empty = uneven_or_empty(case)
    wanted = {"uneven": uneven, "empty_shards": empty, "incremental": case.apart is not None}
    return tuple(name for name, needed in wanted.items() if needed)


def _plain(value: Any) -> Any:
    if isinstance(value, Dilation):
        return value.to_json()
    return list(value) if isinstance(value, tuple) else value


def by_id(stories: Iterable[Story]) -> dict[str, Story]:
    """Return the stories by id.

    Raises:
        ValueError: two stories have the same id.
    """
    found: dict[str, Story] = {}
    for story in stories:
        if story.id in found:
            raise ValueError(f"two vectors are called {story.id}: ids are never used twice")
        found[story.id] = story
    return found
