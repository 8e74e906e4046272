"""Golden vectors under `zigzag_documents`: the head and the tail of every document to the same rank."""

from __future__ import annotations

from ringref.problem import Problem
from ringverify.vectors.story import Story, on

STORIES = (
    Story(
        id="V166",
        topic="shards",
        title="head and tail of each document, causal",
        note="A rank holds two pieces of every document, so its rows are in another order than those of the sequence.",
        problem=Problem(query_length=24, heads=2, head_dim=4, causal=True, documents=(0, 8, 24)),
        layouts=on(zigzag_documents=(2, 4)),
    ),
    Story(
        id="V167",
        topic="shards",
        title="head and tail of documents that pieces do not divide",
        note="Tokens that are left over go round the ranks from document to document; none is lost or held twice.",
        problem=Problem(query_length=21, heads=2, head_dim=4, causal=True, documents=(0, 3, 3, 12, 19)),
        cotangent="both",
        layouts=on(zigzag_documents=(2, 3, 4)),
    ),
    Story(
        id="V168",
        topic="shards",
        title="head and tail of documents, in a window, with grouped heads and padding",
        note="A window is measured between positions, not between rows as they lie on a rank.",
        problem=Problem(
            batch=2,
            query_length=19,
            heads=4,
            key_heads=2,
            head_dim=4,
            causal=True,
            window=(4, 0),
            documents=(0, 11, 17),
            key_lengths=(19, 12),
        ),
        layouts=on(zigzag_documents=(2, 3)),
    ),
    Story(
        id="V169",
        topic="shards",
        title="head and tail of documents shorter than the ranks are many",
        note="Some ranks hold nothing of a document, and one holds nothing at all.",
        problem=Problem(query_length=3, heads=1, head_dim=4, causal=True, documents=(0, 1, 3)),
        layouts=on(zigzag_documents=(4,)),
    ),
)
