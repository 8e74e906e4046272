"""Makers of cases, driven by what an implementation declares; `ringverify.strategies` hands them to users.

Cases are constructed rather than filtered, so that no draw is wasted: lengths are multiples of what the world size
needs, documents are sorted offsets. Every choice respects `Capabilities`, so an undeclared feature is never asked for.

Choices are made in the order in which a person reads a case, and the simplest option comes first: Hypothesis shrinks
the earliest choices first, toward their first options.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from ringref.problem import Dilation, DtypeName, HeadMode, Problem
from ringverify.cases.case import SEEDS, Case, Cotangent, Delayed, Group, Memory, Transport, Values, even_multiple
from ringverify.cases.choices import Choices, Maker
from ringverify.cases.shapes import LONGEST_NEEDED, fitted, length_unit
from ringverify.implementation import Capabilities, sharding_name

WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
GENERAL_VALUES: tuple[Values, ...] = (
    "normal",
    "integers",
    "zero_queries",
    "unit_values",
    "dominating_key",
    "large_scores",
    "rising_blocks",
    "falling_blocks",
)
HEAD_DIMS = (1, 2, 3, 4, 5, 8, 16, 40)
TILES = (33, 65)
"""Keys per rank, one more than common kernel tiles of 32 and 64."""
MOST_TILES = 2
"""Most ranks for which `TILES` is multiplied by the world size; larger worlds share the keys of this many."""
WIDE = (33, 40, 64, 80)
"""Head dimensions above 32, not all of them multiples of 16."""
MOST_CUTS = 5
MOST_BRANCHES = 5
MOST_RATE = 5
CONSTRAINTS = ("window", "documents", "key_lengths", "softcap", "dilation")

SINKS = 5
"""One in so many cases has learned sinks, where these are declared."""

LONG = 64
"""If lengths must be multiples of more positions than this, cases have one batch entry and at most two heads."""
FEWER = {"any": 4, "compiled": 6}
"""Divisor of the number of examples for such lengths: one of 512 positions costs ten times what one of 24 does, and
more where it is compiled, often once for each mask."""

TURNS = 32
"""Most cases built until one meets the condition `wanted`; each takes a few microseconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """Which cases a property asks for, within what is declared.

    Attributes:
        world_sizes: world sizes to draw from.
        dtypes: dtypes to draw from; those not declared are left out.
        values: families of input values.
        memory: memory layouts of the inputs.
        cotangents: which results get a cotangent.
        groups: which ranks of the world may be the ring.
        transports: when simulated sends complete.
        delayed: which messages a simulated world holds back.
        longest: usually the longest sequence; large worlds, required multiples and cases of more than a tile exceed it.
        max_length: no sequence is longer; world sizes and shardings that need longer ones are left out.
        want_empty_rows: prefer patterns that leave queries without keys.
    """

    world_sizes: tuple[int, ...] = WORLD_SIZES
    dtypes: tuple[DtypeName, ...] = ("float32", "float64", "bfloat16", "float16")
    values: tuple[Values, ...] = GENERAL_VALUES
    memory: tuple[Memory, ...] = ("contiguous",)
    cotangents: tuple[Cotangent, ...] = ("out",)
    groups: tuple[Group, ...] = ("world",)
    transports: tuple[Transport, ...] = ("buffered",)
    delayed: tuple[Delayed, ...] = ((),)
    longest: int = 24
    max_length: int | None = None
    want_empty_rows: bool = False


def widest(capabilities: Capabilities) -> tuple[DtypeName, ...]:
    """Return the declared dtypes among float32 and float64; if there are none, all declared dtypes."""
    full = tuple(dtype for dtype in capabilities.dtypes if dtype in ("float32", "float64"))
    return full or capabilities.dtypes


def cases(capabilities: Capabilities, scope: Scope, wanted: Callable[[Case], bool] | None = None) -> Maker[Case]:
    """Return a maker of cases within the declared capabilities and the scope of a property.

    Args:
        capabilities: what the implementation declares.
        scope: which cases the property asks for.
        wanted: a condition that no scope can express: the first of `TURNS` cases that meets it is taken, or the last.
    """

    def make(choices: Choices) -> Case:
        case = case_of(choices, capabilities, scope)
        for _ in range(1, TURNS):
            if wanted is None or wanted(case):
                break
            case = case_of(choices, capabilities, scope)
        return case

    return make


def within(case: Case, capabilities: Capabilities, scope: Scope) -> bool:
    """Return whether a case is within a scope (but for its length and messages); shrinking may have led it outside."""
    return (
        case.world_size in declared_world_sizes(capabilities, scope.world_sizes)
        and case.problem.dtype in scope.dtypes
        and case.values in scope.values
        and case.memory in scope.memory
        and case.cotangent in scope.cotangents
        and case.group in scope.groups
    )


def declared_world_sizes(capabilities: Capabilities, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the wanted world sizes that are declared; if none of them is, all that are declared."""
    declared = capabilities.world_sizes
    if declared is None:
        return wanted
    return tuple(size for size in wanted if size in declared) or declared


def affordable_world_sizes(capabilities: Capabilities, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Return the wanted and declared world sizes, without those on which the required lengths cost too much.

    At least the two smallest are kept, if there are two: some properties compare worlds.
    """
    sizes = declared_world_sizes(capabilities, wanted)
    if capabilities.length_multiple is None:
        return sizes
    small = tuple(size for size in sizes if size * capabilities.length_multiple <= LONGEST_NEEDED)
    return small if len(small) > 1 else tuple(sorted(sizes)[:2])


def affordable_examples(capabilities: Capabilities, examples: int) -> int:
    """Return how many of `examples` to try: fewer if required lengths make each of them expensive."""
    return -(-examples // FEWER[capabilities.shapes]) if (capabilities.length_multiple or 1) > LONG else examples


def case_of(choices: Choices, c: Capabilities, scope: Scope) -> Case:
    """Make a case within the capabilities and the scope."""
    size = choices.among([size for size in affordable_world_sizes(c, scope.world_sizes) if _short(c, scope, size)])
    sharding = choices.among(_short(c, scope, size))
    group = choices.among(scope.groups)
    problem = problem_of(choices, c, scope, size, sharding)
    case = Case(
        problem=problem,
        sharding=sharding,
        world_size=size,
        values=choices.among(scope.values),
        memory=choices.among(scope.memory),
        cotangent=choices.among(scope.cotangents),
        group=group,
        transport=choices.among(scope.transports),
        delayed=choices.among(scope.delayed),
        seed=choices.integer(0, SEEDS - 1),
        schedule=choices.integer(0, SEEDS - 1),
    )
    if c.sinks and case.schedule % SINKS == SINKS - 1:  # no choice of its own: all else is drawn as without sinks
        case = case.replace(sinks=True)
    return fitted(case, c)


def problem_of(choices: Choices, c: Capabilities, scope: Scope, size: int, sharding: str) -> Problem:
    """Make a problem for a world of this size: its shapes, its constraints, its dtype."""
    even = _even(c, sharding, size)
    shapes = _shapes(choices, c, scope, size, even)
    if scope.max_length is not None:
        most = scope.max_length if c.uneven else scope.max_length // even * even
        shapes |= {name: min(shapes[name], most) for name in ("query_length", "key_length")}
    causal = c.causal == "always" or (c.causal == "both" and choices.among((False, True)))
    wanted = _constraints(choices, c, scope)
    if shapes["query_length"] != shapes["key_length"]:
        wanted -= {"dilation", "documents"}
    fields: dict[str, Any] = {**shapes, **_pattern(choices, c, wanted, shapes, empty_rows=scope.want_empty_rows)}
    if c.scale:
        fields["scale"] = choices.among((None, None, 1.0, 0.3, -0.7 if c.negative_scale else 0.7))
    dtype = choices.among([dtype for dtype in scope.dtypes if dtype in c.dtypes])
    return Problem(dtype=dtype, causal=causal, **fields)


def _even(c: Capabilities, sharding: str, size: int) -> int:
    """Return a number of positions that the sharding cuts into equal shards, each as long as is required."""
    return math.lcm(even_multiple(sharding, size), length_unit(c, sharding, size))


def shortest(c: Capabilities, sharding: str, size: int) -> int:
    """Return the length of the shortest sequence that is declared for a sharding on a world of this size."""
    if c.empty_shards:
        return 0
    return size if c.uneven else _even(c, sharding, size)


def _short(c: Capabilities, scope: Scope, size: int) -> list[str]:
    """Return the declared shardings with sequences within `max_length` on a world of this size."""
    names = [sharding_name(sharding) for sharding in c.shardings]
    return [name for name in names if scope.max_length is None or shortest(c, name, size) <= scope.max_length]


def _constraints(choices: Choices, c: Capabilities, scope: Scope) -> set[str]:
    """Choose the constraints to combine: mostly none or one, sometimes several; never dilation with documents."""
    declared = [name for name in CONSTRAINTS if getattr(c, name)]
    alone = ["none", *declared, *c.dilation[1:]]  # each mode of dilation counts as one
    alone = ["dilation" if name in c.dilation else name for name in alone]
    if scope.want_empty_rows:  # a window holds the diagonal, a softcap masks nothing: alone, they empty no row
        alone = [name for name in declared if name not in ("window", "softcap")] or ["none"]
    chosen = choices.among([*alone, "several"])
    if chosen == "none":
        return set()
    if chosen != "several":
        return {chosen}
    several = {name for name in declared if choices.among((False, True))}
    return several - {"documents"} if "dilation" in several else several


def _shapes(choices: Choices, c: Capabilities, scope: Scope, size: int, even: int) -> dict[str, int]:
    """Make lengths, heads and dimensions, any at first; some are then replaced, so that the plainest case is shortest.

    Hypothesis takes a case of fewer choices for a simpler one.
    """
    long = c.length_multiple is not None and even > LONG
    equal = not long and choices.integer(0, 7) == 7
    tiles = not equal and choices.integer(0, 23) == 23
    length = _length(choices, c, scope, size, even)
    cross = c.cross_lengths and choices.integer(0, 3) >= (2 if scope.want_empty_rows else 3)
    key_length = _length(choices, c, scope, size, even) if cross else length
    key_heads = choices.integer(1, 3)
    group = choices.integer(1, 3) if c.gqa else 1
    head_dim = choices.among(c.head_dims or HEAD_DIMS)
    value_dim = choices.among(c.value_dims or HEAD_DIMS) if c.value_dim and choices.among((False, True)) else head_dim
    batch = choices.integer(1, 3)
    if long:
        batch, key_heads, group = 1, 1, min(group, 2)
    if equal:  # a transposed or mixed-up tensor keeps its shape, so only its values can give it away
        side = choices.integer(1, 4)
        batch, key_heads, group, head_dim, value_dim = side, side, 1, side, side
        length = key_length = even * max(1, round(side * size / even)) if not c.uneven else side * size
    if tiles:  # more than one tile of a kernel, in keys and in width
        length = key_length = even * -(-choices.among(TILES) * min(size, MOST_TILES) // even)
        batch, key_heads, group, head_dim = 1, 2, 1, choices.among(c.head_dims or WIDE)
        value_dim = choices.among(c.value_dims or WIDE) if c.value_dim else head_dim
    return {
        "batch": batch, "query_length": length, "key_length": key_length,
        "heads": key_heads * group, "key_heads": key_heads, "head_dim": head_dim, "value_dim": value_dim,
    }  # fmt: skip


def _length(choices: Choices, c: Capabilities, scope: Scope, size: int, even: int) -> int:
    longest = max(scope.longest, 2 * size + 1)
    if not c.uneven:
        # On small worlds up to two required blocks for each rank, so that a rank can have more than one.
        most = max(1 if c.length_multiple is None or 2 * even > LONGEST_NEEDED else 2, longest // even)
        return even * choices.integer(0 if c.empty_shards else 1, most)
    if not c.empty_shards:
        return choices.integer(size, longest)
    # Half of the draws at the edges: no positions, fewer than ranks, one more or less than a multiple of the ranks.
    near = sorted((0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1))
    return choices.among(near) if choices.among((False, True)) else choices.integer(0, longest)


def _pattern(
    choices: Choices, c: Capabilities, wanted: set[str], shapes: dict[str, int], *, empty_rows: bool
) -> dict[str, Any]:
    n, m = shapes["query_length"], shapes["key_length"]
    fields: dict[str, Any] = {}
    if "window" in wanted:
        fields["window"] = (_side(choices, m), _side(choices, m))
    if "documents" in wanted:
        fields["documents"] = documents_of(choices, n, padding=True if empty_rows else None)
    if "key_lengths" in wanted:
        lengths = [0, m] if empty_rows and choices.among((False, True)) else range(m + 1)
        fields["key_lengths"] = tuple(choices.among(lengths) for _ in range(shapes["batch"]))
    if "softcap" in wanted:
        fields["softcap"] = choices.among([1.0, 5.0, 30.0])
    if "dilation" in wanted:
        fields["dilation"] = dilation_of(choices, n, c.dilation, uneven_segments=c.uneven_segments)
    return fields


def _side(choices: Choices, keys: int) -> int | None:
    """Choose one side of a window: unbounded, at most 3, or any up to the number of keys."""
    kind = choices.integer(0, 3)
    return None if kind == 0 else choices.integer(0, min(3, keys) if kind == 1 else max(1, keys))


def documents_of(choices: Choices, length: int, *, padding: bool | None, most: int = MOST_CUTS) -> tuple[int, ...]:
    """Make offsets of documents: 1 to `most` ends in any place, or (`padding` False) these and both ends as well."""
    inside = sorted(choices.integer(0, length) for _ in range(choices.integer(1, most)))
    if padding is None:
        padding = not choices.among((False, True))
    return tuple(inside) if padding else (0, *inside, length)


def dilation_of(
    choices: Choices,
    length: int,
    modes: Sequence[HeadMode],
    *,
    uneven_segments: bool,
    most: int = MOST_BRANCHES,
    widest: int = MOST_RATE,
) -> Dilation:
    """Make 1 to `most` branches of rates from 1 to `widest`; a segment may be one position longer than the sequence."""
    heads = choices.among(modes)
    segments = range(1, length + 2) if uneven_segments else [w for w in range(1, length + 1) if length % w == 0] or [1]
    branches = tuple((choices.among(segments), choices.integer(1, widest)) for _ in range(choices.integer(1, most)))
    if heads == "split":
        return Dilation(branches)
    return Dilation(branches, heads, choices.among(["cyclic", "block"]))
