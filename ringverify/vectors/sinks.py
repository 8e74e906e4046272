"""Golden vectors for learned sinks: a logit a head that joins the denominator once and carries no value."""

from __future__ import annotations

from ringref.problem import Dilation, Problem
from ringverify.vectors.story import Story, on

STORIES = (
    Story(
        id="V155",
        topic="sinks",
        title="sinks: two ordinary ones, a large one, none",
        note="Merged once, whatever the number of ranks; one of 100 takes all the weight, one of −inf is none.",
        problem=Problem(query_length=9, heads=4, head_dim=4, sinks=True),
        cotangent="both",
        layouts=on(contiguous=(1, 3), zigzag=(2,), striped=(4,), replicated_query=(2,)),
    ),
    Story(
        id="V156",
        topic="sinks",
        title="sinks, causal, grouped heads, scale, another value dimension",
        note="A sink for each query head, not for each key head, and none is scaled; their gradient is a sum over all "
        "ranks' queries, though most ranks see few of the keys.",
        problem=Problem(
            query_length=11, heads=4, key_heads=2, head_dim=4, value_dim=3, causal=True, scale=0.3, sinks=True
        ),
        cotangent="both",
    ),
    Story(
        id="V157",
        topic="sinks",
        title="sinks, rows without keys",
        note="Where nothing is attended out is 0 and lse is the sink, whose gradient there is that of lse alone.",
        problem=Problem(
            batch=2, query_length=8, heads=4, head_dim=4, key_lengths=(3, 0), documents=(1, 5), causal=True, sinks=True
        ),
        cotangent="both",
    ),
    Story(
        id="V158",
        topic="sinks",
        title="bfloat16: sinks, a softcap, a window, more keys than queries",
        note="A softcap bends scores, not sinks; sinks and their gradient are float32 also where inputs are not.",
        problem=Problem(
            query_length=8, key_length=11, heads=4, head_dim=4, dtype="bfloat16", window=(4, 1), softcap=2.0, sinks=True
        ),
    ),
    Story(
        id="V159",
        topic="sinks",
        title="sinks, dilation with split heads",
        note="Heads run different branches and have different sinks; a position that no branch covers has its sink.",
        problem=Problem(query_length=10, heads=4, head_dim=4, dilation=Dilation(((5, 2), (10, 3))), sinks=True),
        cotangent="both",
    ),
    Story(
        id="V160",
        topic="sinks",
        title="sinks, dilation with shared heads, cyclic offsets",
        note="Branches are merged by their log-sum-exps, and the sink joins once, not once a branch.",
        problem=Problem(
            query_length=10, heads=4, head_dim=4, dilation=Dilation(((5, 1), (10, 2)), heads="shared"), sinks=True
        ),
        cotangent="both",
    ),
    Story(
        id="V161",
        topic="sinks",
        title="sinks, dilation with shared heads, block offsets",
        note="As V160.",
        problem=Problem(
            query_length=10,
            heads=4,
            head_dim=4,
            dilation=Dilation(((5, 1), (10, 3)), heads="shared", head_offset="block"),
            sinks=True,
        ),
        cotangent="both",
    ),
)
