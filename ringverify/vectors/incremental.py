"""Golden vectors for chunked prefill and decoding: a causal problem, its calls, and how the cache lies."""

from __future__ import annotations

from ringref.problem import Problem
from ringref.sharding import PageTable
from ringverify.vectors.story import Layout, Story

OUT_OF_ORDER = PageTable(2, ((4, 0), (), (3, 1, 2)))
"""Pages of nine or ten positions, of which a rank has none."""
FOURS = PageTable(4, ((1,), (0, 2)))
"""Pages of ten positions, the last of which is never full."""

STORIES = (
    Story(
        id="V162",
        topic="incremental",
        title="decoding: a prefill, then single tokens",
        note="A token attends all that the cache holds on every rank, and the next one attends one key more.",
        problem=Problem(query_length=9, heads=2, head_dim=4, causal=True),
        layouts=(
            Layout("replicated/contiguous", 2, (5, 1, 1, 1, 1)),
            Layout("replicated/striped", 3, (6, 1, 1, 1)),
            Layout("replicated/pages", 3, (4, 2, 1, 1, 1), OUT_OF_ORDER),
            Layout("contiguous/striped", 2, (7, 1, 1)),
        ),
    ),
    Story(
        id="V163",
        topic="incremental",
        title="chunked prefill: a window, grouped heads, another value dimension",
        note="A chunk attends the tokens before it, as far as the window reaches, also across chunks and pages.",
        problem=Problem(query_length=10, heads=4, key_heads=2, head_dim=4, value_dim=3, causal=True, window=(3, 0)),
        layouts=(
            Layout("replicated/contiguous", 3, (4, 3, 3)),
            Layout("striped/pages", 3, (3, 4, 2, 1), OUT_OF_ORDER),
            Layout("contiguous/striped", 2, (6, 4)),
        ),
    ),
    Story(
        id="V164",
        topic="incremental",
        title="decoding: sinks, and a sequence that ends before the other",
        note="Tokens past the end of a sequence attend its keys alone, and a sink joins once in every call.",
        problem=Problem(batch=2, query_length=8, heads=4, head_dim=4, causal=True, key_lengths=(8, 3), sinks=True),
        layouts=(
            Layout("replicated/striped", 2, (6, 1, 1)),
            Layout("replicated/pages", 3, (4, 1, 1, 1, 1), OUT_OF_ORDER),
        ),
    ),
    Story(
        id="V165",
        topic="incremental",
        title="bfloat16: decoding with a softcap and a scale",
        note="As V162, in 16 bits: partial results of ranks are merged by log-sum-exps in float32.",
        problem=Problem(query_length=10, heads=2, head_dim=8, dtype="bfloat16", causal=True, softcap=5.0, scale=0.5),
        layouts=(
            Layout("replicated/contiguous", 4, (7, 1, 1, 1)),
            Layout("zigzag/pages", 3, (8, 2), OUT_OF_ORDER),
        ),
    ),
    Story(
        id="V170",
        topic="incremental",
        title="decoding: a window, and pages that fill up token by token",
        note="Tokens of a page that is not full count too; and where a rank's rows stay, what is attended moves on.",
        problem=Problem(query_length=10, heads=2, head_dim=4, causal=True, window=(3, 0)),
        layouts=(
            Layout("replicated/pages", 2, (6, 1, 1, 1, 1), FOURS),
            Layout("striped/pages", 2, (6, 1, 1, 1, 1), FOURS),
        ),
    ),
)
