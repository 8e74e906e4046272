"""Hypothesis strategies for cases, driven by what an implementation declares.

Everything is constructed, nothing filtered: lengths are built from the world size, documents from gaps, so that no
draw is wasted. Every choice comes from `Capabilities`, so an undeclared feature is never asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from ringref.problem import Dilation, DtypeName, HeadMode, Problem
from ringverify.cases.case import SEEDS, Case, Cotangent, Delayed, Group, Memory, Transport, Values, even_multiple
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
HEAD_DIMS = (1, 2, 3, 4, 5, 8, 16)
TILES = (33, 65, 129)
"""Lengths just past a usual tile of keys, for the whole sequence; times two, for two ranks' worth."""
WIDE = (33, 40, 64, 80)
"""Head dimensions past a half warp, and not all multiples of it."""
CONSTRAINTS = ("window", "documents", "key_lengths", "softcap", "dilation")

Draw = Callable[[st.SearchStrategy[Any]], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scope:
    """What a property wants its cases to look like, within what is declared.

    Attributes:
        world_sizes: world sizes to draw from.
        dtypes: dtypes to draw from; those not declared are left out.
        values: families of values.
        memory: layouts of inputs in memory.
        cotangents: which results get a cotangent.
        groups: which ranks of the world may be the ring.
        transports: how simulated sends complete.
        delayed: which messages a simulated world holds back.
        longest: longest sequence, a little more where the world is large.
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
    """The full-precision dtypes that are declared, or whatever is, if none of them is."""
    full = tuple(dtype for dtype in capabilities.dtypes if dtype in ("float32", "float64"))
    return full or capabilities.dtypes


def cases(capabilities: Capabilities, scope: Scope) -> st.SearchStrategy[Case]:
    """Cases within the declared capabilities and the scope of a property."""

    @st.composite
    def build(draw: Draw) -> Case:
        return _case(draw, capabilities, scope)

    strategy: st.SearchStrategy[Case] = build()
    return strategy


def declared_world_sizes(capabilities: Capabilities, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The wanted world sizes that an implementation runs on; all that it declares, if none of them is wanted."""
    declared = capabilities.world_sizes
    if declared is None:
        return wanted
    return tuple(size for size in wanted if size in declared) or declared


def _case(draw: Draw, c: Capabilities, scope: Scope) -> Case:
    size = draw(st.sampled_from(declared_world_sizes(c, scope.world_sizes)))
    sharding = sharding_name(draw(st.sampled_from(c.shardings)))
    dtype = draw(st.sampled_from([dtype for dtype in scope.dtypes if dtype in c.dtypes]))
    causal = c.causal == "always" or (c.causal == "both" and draw(st.booleans()))
    wanted = _constraints(draw, c, scope)
    values = draw(st.sampled_from(scope.values))
    memory = draw(st.sampled_from(scope.memory))
    shapes = _shapes(draw, c, scope, size, even_multiple(sharding, size))
    if "dilation" in wanted and shapes["query_length"] != shapes["key_length"]:
        wanted = wanted - {"dilation"}
    if "documents" in wanted and shapes["query_length"] != shapes["key_length"]:
        wanted = wanted - {"documents"}
    cotangent = draw(st.sampled_from(scope.cotangents))
    fields: dict[str, Any] = {**shapes, **_pattern(draw, c, wanted, shapes, empty_rows=scope.want_empty_rows)}
    if c.scale:
        fields["scale"] = draw(st.sampled_from([None, None, 1.0, 0.3, -0.7]))
    problem = Problem(dtype=dtype, causal=causal, **fields)
    return Case(
        problem=problem,
        sharding=sharding,
        world_size=size,
        values=values,
        memory=memory,
        cotangent=cotangent,
        group=draw(st.sampled_from(scope.groups)),
        transport=draw(st.sampled_from(scope.transports)),
        delayed=draw(st.sampled_from(scope.delayed)),
        seed=draw(st.integers(0, SEEDS - 1)),
        schedule=draw(st.integers(0, SEEDS - 1)),
    )


def _constraints(draw: Draw, c: Capabilities, scope: Scope) -> set[str]:
    """Which constraints to combine: mostly none or one, sometimes several; never dilation with documents."""
    declared = [name for name in CONSTRAINTS if getattr(c, name)]
    alone = ["none", *declared]
    if scope.want_empty_rows:  # a window always holds the diagonal, a softcap nothing: alone, they leave no row empty
        alone = [name for name in declared if name not in ("window", "softcap")] or ["none"]
    chosen = draw(st.sampled_from([*alone, "several"]))
    if chosen == "none":
        return set()
    if chosen != "several":
        return {chosen}
    several = {name for name in declared if draw(st.booleans())}
    return several - {"documents"} if "dilation" in several else several


def _shapes(draw: Draw, c: Capabilities, scope: Scope, size: int, even: int) -> dict[str, int]:
    if draw(st.integers(0, 7)) == 7:  # equal dimensions: what is transposed or mixed up still has the right shape
        side = draw(st.integers(1, 4))
        length = even * max(1, round(side * size / even)) if not c.uneven else side * size
        return {
            "batch": side, "query_length": length, "key_length": length, "heads": side, "key_heads": side,
            "head_dim": side, "value_dim": side,
        }  # fmt: skip
    if draw(st.integers(0, 31)) == 31:  # more than one tile of a kernel, in keys and in width
        length = even * -(-draw(st.sampled_from(TILES)) // even)
        dim = draw(st.sampled_from(WIDE))
        return {
            "batch": 1, "query_length": length, "key_length": length, "heads": 2, "key_heads": 2, "head_dim": dim,
            "value_dim": draw(st.sampled_from(WIDE)) if c.value_dim else dim,
        }  # fmt: skip
    length = _length(draw, c, scope, size, even)
    cross = c.cross_lengths and draw(st.integers(0, 3)) >= (2 if scope.want_empty_rows else 3)
    key_length = _length(draw, c, scope, size, even) if cross else length
    key_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 3)) if c.gqa else 1
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    value_dim = draw(st.sampled_from(HEAD_DIMS)) if c.value_dim and draw(st.booleans()) else head_dim
    return {
        "batch": draw(st.integers(1, 3)), "query_length": length, "key_length": key_length,
        "heads": key_heads * group, "key_heads": key_heads, "head_dim": head_dim, "value_dim": value_dim,
    }  # fmt: skip


def _length(draw: Draw, c: Capabilities, scope: Scope, size: int, even: int) -> int:
    longest = max(scope.longest, 2 * size + 1)
    if not c.uneven:
        return even * int(draw(st.integers(0 if c.empty_shards else 1, max(1, longest // even))))
    if not c.empty_shards:
        return int(draw(st.integers(size, longest)))
    # Half of the draws around the interesting places: nothing, fewer than ranks, one more or less than a multiple.
    near = [n for n in (0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1) if 0 <= n <= longest]
    return int(draw(st.sampled_from(near) if draw(st.booleans()) else st.integers(0, longest)))


def _pattern(
    draw: Draw, c: Capabilities, wanted: set[str], shapes: dict[str, int], *, empty_rows: bool
) -> dict[str, Any]:
    n, m = shapes["query_length"], shapes["key_length"]
    fields: dict[str, Any] = {}
    if "window" in wanted:
        side = st.one_of(st.integers(0, max(1, m)), st.none())
        fields["window"] = (draw(side), draw(side))
    if "documents" in wanted:
        inside = sorted(draw(st.lists(st.integers(0, n), min_size=1, max_size=5)))
        whole = not empty_rows and draw(st.booleans())
        fields["documents"] = (0, *inside, n) if whole else tuple(inside)
    if "key_lengths" in wanted:
        length = st.sampled_from([0, m]) if empty_rows and draw(st.booleans()) else st.integers(0, m)
        fields["key_lengths"] = tuple(draw(length) for _ in range(shapes["batch"]))
    if "softcap" in wanted:
        fields["softcap"] = draw(st.sampled_from([1.0, 5.0, 30.0]))
    if "dilation" in wanted:
        fields["dilation"] = _dilation(draw, c.dilation, n)
    return fields


def _dilation(draw: Draw, modes: tuple[HeadMode, ...], n: int) -> Dilation:
    heads = draw(st.sampled_from(modes))
    branch = st.tuples(st.integers(1, max(1, n + 1)), st.integers(1, 5))
    branches = tuple(draw(st.lists(branch, min_size=1, max_size=5)))
    if heads == "split":
        return Dilation(branches)
    return Dilation(branches, heads, draw(st.sampled_from(["cyclic", "block"])))
