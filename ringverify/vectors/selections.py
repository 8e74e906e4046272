"""Golden vectors for isolation: exact selection without any tolerance, and NaN in keys that no query attends."""

from __future__ import annotations

from ringref.problem import Problem
from ringverify.vectors.dilations import split
from ringverify.vectors.story import Story, on

STORIES = (
    Story(
        id="V119",
        topic="isolation",
        title="NaN in padding",
        note="Keys and values that no query attends are NaN: padding holds whatever was there before, and 0 times NaN "
        "is NaN.",
        bugs=("B14a", "B14b"),
        problem=Problem(batch=2, query_length=9, heads=2, head_dim=4, key_lengths=(4, 7)),
        values="unattended_nan",
        cotangent="both",
    ),
    Story(
        id="V120",
        topic="isolation",
        title="NaN before and after the documents",
        note="Positions in no document are attended by nobody, themselves included.",
        bugs=("B14a", "B14b"),
        problem=Problem(query_length=10, heads=2, head_dim=4, causal=True, documents=(2, 5, 8)),
        values="unattended_nan",
        cotangent="both",
    ),
    Story(
        id="V121",
        topic="isolation",
        title="NaN outside the window",
        note="More keys than queries: the first ones lie outside every window.",
        bugs=("B14a", "B14b"),
        problem=Problem(query_length=5, key_length=11, heads=2, head_dim=4, window=(2, 0)),
        values="unattended_nan",
    ),
    Story(
        id="V122",
        topic="isolation",
        title="NaN at places that no branch covers",
        note="With one branch of rate 3 two places of three are covered by no head.",
        bugs=("B14a", "B14b"),
        problem=Problem(query_length=12, heads=2, head_dim=4, dilation=split((6, 3))),
        values="unattended_nan",
        cotangent="both",
    ),
    Story(
        id="V123",
        topic="exact",
        title="each query selects one key",
        note="Out is a whole number, and so is dv: a key dropped, a value of another rank or position changes it. No "
        "error is allowed.",
        bugs=("R6a", "F2"),
        problem=Problem(query_length=12, heads=2, head_dim=12),
        values="selectors",
    ),
    Story(
        id="V124",
        topic="exact",
        title="selection under a causal mask",
        note="The first forbidden key scores highest of all: where the mask leaks, its value comes out.",
        bugs=("B1", "B2", "C1a"),
        problem=Problem(query_length=12, heads=2, head_dim=12, causal=True),
        values="selectors",
        layouts=on(contiguous=(3, 4), zigzag=(2, 3), striped=(3,), replicated_query=(3,)),
    ),
    Story(
        id="V125",
        topic="exact",
        title="selection in a window, float16",
        note="Both edges of the window have a forbidden neighbour that scores higher.",
        bugs=("B9b",),
        problem=Problem(query_length=12, heads=2, head_dim=12, dtype="float16", window=(3, 1)),
        values="selectors",
    ),
    Story(
        id="V126",
        topic="exact",
        title="selection within documents, grouped heads",
        note="The first key of the next document scores highest.",
        bugs=("B10",),
        problem=Problem(query_length=12, heads=4, key_heads=2, head_dim=12, documents=(0, 5, 7, 12)),
        values="selectors",
    ),
    Story(
        id="V127",
        topic="exact",
        title="selection before the padding, float64",
        note="The first padded key scores highest.",
        bugs=("B4",),
        problem=Problem(batch=2, query_length=9, heads=2, head_dim=9, dtype="float64", key_lengths=(4, 8)),
        values="selectors",
    ),
    Story(
        id="V128",
        topic="exact",
        title="selection, dilated heads",
        note="A key of the next segment, or at another offset, scores highest.",
        bugs=("H3", "R3"),
        problem=Problem(query_length=12, heads=4, head_dim=12, dilation=split((4, 1), (6, 2))),
        values="selectors",
    ),
    Story(
        id="V129",
        topic="exact",
        title="selection with more keys than queries, causal, bfloat16",
        note="The key after the diagonal scores highest, and the diagonal is that of the last query.",
        bugs=("B8a",),
        problem=Problem(
            query_length=5, key_length=12, heads=2, head_dim=12, value_dim=2, dtype="bfloat16", causal=True
        ),
        values="selectors",
    ),
    Story(
        id="V154",
        topic="exact",
        title="selection under a causal mask, bfloat16",
        note="Whole numbers up to nine, which eight bits hold: the dtype is no excuse.",
        bugs=("B1", "B2"),
        problem=Problem(query_length=13, heads=2, head_dim=16, value_dim=3, dtype="bfloat16", causal=True),
        values="selectors",
        cotangent="both",
    ),
)
