"""Hypothesis strategies for cases, driven by what an implementation declares.

Cases are constructed rather than filtered, so that no draw is wasted: lengths are multiples of what the world size
needs, documents are sorted offsets. Every choice respects `Capabilities`, so an undeclared feature is never asked for.

Hypothesis draws one integer for each case; it seeds a generator that makes all choices, uniformly and independently.
Hypothesis' own choices repeat what it drew before, which helps its shrinking: one seed had 3 cases of cross lengths in
120, another 2 of key lengths, and every eighth case twice. Here the case is shrunk instead.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from ringref.problem import Dilation, DtypeName, HeadMode, Problem
from ringverify.cases.case import SEEDS, Case, Cotangent, Delayed, Group, Memory, Transport, Values, even_multiple
from ringverify.cases.shapes import fitted, length_unit
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
CONSTRAINTS = ("window", "documents", "key_lengths", "softcap", "dilation")

LONG = 64
"""If lengths must be multiples of more positions than this, cases have one batch entry and at most two heads."""
FEWER = 4
"""Divisor of the number of examples for such lengths: one of 512 positions costs ten times what one of 24 does."""
LONGEST_NEEDED = 512
"""Larger worlds are left out if `length_multiple` times their size exceeds this many positions."""

ROOTS = 2**24
"""Number of integers that Hypothesis draws from; in a larger range, some of its versions prefer small ones."""

BEYOND = 10**60
"""The smallest integer that Hypothesis draws.

From 0 on it would prefer small integers and mix in numbers from the source of imported modules: a seed would give
other cases after an edit of the code under test. No source holds numbers of this size.
"""

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
        longest: longest sequence; large worlds, required multiples and cases of more than a tile exceed it.
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
    want_empty_rows: bool = False


def widest(capabilities: Capabilities) -> tuple[DtypeName, ...]:
    """Return the declared dtypes among float32 and float64; if there are none, all declared dtypes."""
    full = tuple(dtype for dtype in capabilities.dtypes if dtype in ("float32", "float64"))
    return full or capabilities.dtypes


def cases(
    capabilities: Capabilities, scope: Scope, wanted: Callable[[Case], bool] | None = None
) -> st.SearchStrategy[Case]:
    """Return a strategy for cases within the declared capabilities and the scope of a property.

    Args:
        capabilities: what the implementation declares.
        scope: which cases the property asks for.
        wanted: a condition that no scope can express: the first of `TURNS` cases that meets it is taken, or the last.
    """

    def build(root: int) -> Case:
        case = case_from(root, capabilities, scope)
        for turn in range(1, TURNS):
            if wanted is None or wanted(case):
                break
            case = case_from(root + turn * ROOTS, capabilities, scope)
        return case

    return roots().map(build)


def roots() -> st.SearchStrategy[int]:
    """Return a strategy for the number from 0 to `ROOTS` - 1 that determines a case, whatever modules are imported."""
    return st.integers(BEYOND, BEYOND + ROOTS - 1).map(lambda drawn: drawn - BEYOND)


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
    return -(-examples // FEWER) if (capabilities.length_multiple or 1) > LONG else examples


def case_from(root: int, capabilities: Capabilities, scope: Scope) -> Case:
    """Return the case that one number determines, given the capabilities and the scope."""
    rng, c = random.Random(root), capabilities
    size = rng.choice(affordable_world_sizes(c, scope.world_sizes))
    sharding = sharding_name(rng.choice(c.shardings))
    dtype = rng.choice([dtype for dtype in scope.dtypes if dtype in c.dtypes])
    causal = c.causal == "always" or (c.causal == "both" and rng.random() < 1 / 2)
    wanted = _constraints(rng, c, scope)
    values = rng.choice(scope.values)
    memory = rng.choice(scope.memory)
    even = math.lcm(even_multiple(sharding, size), length_unit(c, sharding, size))
    shapes = _shapes(rng, c, scope, size, even)
    if "dilation" in wanted and shapes["query_length"] != shapes["key_length"]:
        wanted = wanted - {"dilation"}
    if "documents" in wanted and shapes["query_length"] != shapes["key_length"]:
        wanted = wanted - {"documents"}
    cotangent = rng.choice(scope.cotangents)
    fields: dict[str, Any] = {**shapes, **_pattern(rng, c, wanted, shapes, empty_rows=scope.want_empty_rows)}
    if c.scale:
        fields["scale"] = rng.choice([None, None, 1.0, 0.3, -0.7 if c.negative_scale else 0.7])
    problem = Problem(dtype=dtype, causal=causal, **fields)
    case = Case(
        problem=problem,
        sharding=sharding,
        world_size=size,
        values=values,
        memory=memory,
        cotangent=cotangent,
        group=rng.choice(scope.groups),
        transport=rng.choice(scope.transports),
        delayed=rng.choice(scope.delayed),
        seed=rng.randint(0, SEEDS - 1),
        schedule=rng.randint(0, SEEDS - 1),
    )
    return fitted(case, c)


def _constraints(rng: random.Random, c: Capabilities, scope: Scope) -> set[str]:
    """Choose the constraints to combine: mostly none or one, sometimes several; never dilation with documents."""
    declared = [name for name in CONSTRAINTS if getattr(c, name)]
    alone = ["none", *declared, *c.dilation[1:]]  # each mode of dilation counts as one
    alone = ["dilation" if name in c.dilation else name for name in alone]
    if scope.want_empty_rows:  # a window holds the diagonal, a softcap masks nothing: alone, they empty no row
        alone = [name for name in declared if name not in ("window", "softcap")] or ["none"]
    chosen = rng.choice([*alone, "several"])
    if chosen == "none":
        return set()
    if chosen != "several":
        return {chosen}
    several = {name for name in declared if rng.random() < 1 / 2}
    return several - {"documents"} if "dilation" in several else several


def _shapes(rng: random.Random, c: Capabilities, scope: Scope, size: int, even: int) -> dict[str, int]:
    long = c.length_multiple is not None and even > LONG
    if rng.randint(0, 7) == 7 and not long:
        # Equal dimensions: a transposed or mixed-up tensor keeps its shape, so only its values can give it away.
        side = rng.randint(1, 4)
        length = even * max(1, round(side * size / even)) if not c.uneven else side * size
        return {
            "batch": side, "query_length": length, "key_length": length, "heads": side, "key_heads": side,
            "head_dim": side, "value_dim": side,
        }  # fmt: skip
    if rng.randint(0, 23) == 23:  # more than one tile of a kernel, in keys and in width
        length = even * -(-rng.choice(TILES) * min(size, MOST_TILES) // even)
        dim = rng.choice(c.head_dims or WIDE)
        return {
            "batch": 1, "query_length": length, "key_length": length, "heads": 2, "key_heads": 2, "head_dim": dim,
            "value_dim": rng.choice(c.value_dims or WIDE) if c.value_dim else dim,
        }  # fmt: skip
    length = _length(rng, c, scope, size, even)
    cross = c.cross_lengths and rng.randint(0, 3) >= (2 if scope.want_empty_rows else 3)
    key_length = _length(rng, c, scope, size, even) if cross else length
    key_heads = rng.randint(1, 3)
    group = rng.randint(1, 3) if c.gqa else 1
    head_dim = rng.choice(c.head_dims or HEAD_DIMS)
    value_dim = rng.choice(c.value_dims or HEAD_DIMS) if c.value_dim and rng.random() < 1 / 2 else head_dim
    batch = rng.randint(1, 3)
    if long:
        batch, key_heads, group = 1, 1, min(group, 2)
    return {
        "batch": batch, "query_length": length, "key_length": key_length,
        "heads": key_heads * group, "key_heads": key_heads, "head_dim": head_dim, "value_dim": value_dim,
    }  # fmt: skip


def _length(rng: random.Random, c: Capabilities, scope: Scope, size: int, even: int) -> int:
    longest = max(scope.longest, 2 * size + 1)
    if not c.uneven:
        # On small worlds up to two required blocks for each rank, so that a rank can have more than one.
        most = max(1 if c.length_multiple is None or 2 * even > LONGEST_NEEDED else 2, longest // even)
        return even * rng.randint(0 if c.empty_shards else 1, most)
    if not c.empty_shards:
        return rng.randint(size, longest)
    # Half of the draws at the edges: no positions, fewer than ranks, one more or less than a multiple of the ranks.
    near = [n for n in (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1) if 0 <= n <= longest]
    return rng.choice(near) if rng.random() < 1 / 2 else rng.randint(0, longest)


def _pattern(
    rng: random.Random, c: Capabilities, wanted: set[str], shapes: dict[str, int], *, empty_rows: bool
) -> dict[str, Any]:
    n, m = shapes["query_length"], shapes["key_length"]
    fields: dict[str, Any] = {}
    if "window" in wanted:
        fields["window"] = (_side(rng, m), _side(rng, m))
    if "documents" in wanted:
        inside = sorted(rng.randint(0, n) for _ in range(rng.randint(1, 5)))
        whole = not empty_rows and rng.random() < 1 / 2
        fields["documents"] = (0, *inside, n) if whole else tuple(inside)
    if "key_lengths" in wanted:
        lengths = [0, m] if empty_rows and rng.random() < 1 / 2 else range(m + 1)
        fields["key_lengths"] = tuple(rng.choice(lengths) for _ in range(shapes["batch"]))
    if "softcap" in wanted:
        fields["softcap"] = rng.choice([1.0, 5.0, 30.0])
    if "dilation" in wanted:
        segments = range(1, n + 2) if c.uneven_segments else [w for w in range(1, n + 1) if n % w == 0] or [1]
        fields["dilation"] = _dilation(rng, c.dilation, segments)
    return fields


def _side(rng: random.Random, keys: int) -> int | None:
    """Choose one side of a window: unbounded, at most 3, or any up to the number of keys."""
    kind = rng.randint(0, 3)
    return None if kind == 0 else rng.randint(0, min(3, keys) if kind == 1 else max(1, keys))


def _dilation(rng: random.Random, modes: tuple[HeadMode, ...], segments: Sequence[int]) -> Dilation:
    heads = rng.choice(modes)
    branches = tuple((rng.choice(segments), rng.randint(1, 5)) for _ in range(rng.randint(1, 5)))
    if heads == "split":
        return Dilation(branches)
    return Dilation(branches, heads, rng.choice(["cyclic", "block"]))
