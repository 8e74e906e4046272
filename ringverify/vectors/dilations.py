"""Golden vectors for dilated attention: split heads, and shared heads with cyclic and with block offsets."""

from __future__ import annotations

from ringref.problem import Dilation, HeadOffset, Problem
from ringverify.vectors.story import Story, on


def split(*branches: tuple[int, int]) -> Dilation:
    """Return a dilation in which each head runs one of these branches `(segment_length, dilation_rate)`."""
    return Dilation(branches)


def shared(*branches: tuple[int, int], offset: HeadOffset = "cyclic") -> Dilation:
    """Return a dilation in which every head runs every branch, with cyclic or block head offsets."""
    return Dilation(branches, heads="shared", head_offset=offset)


STORIES = (
    Story(
        id="V068",
        topic="dilation_split",
        title="segments of four",
        note="One branch of rate 1: attention within segments, and nothing between them.",
        bugs=("H2",),
        problem=Problem(query_length=12, heads=2, head_dim=4, dilation=split((4, 1))),
    ),
    Story(
        id="V069",
        topic="dilation_split",
        title="every second position of segments of six",
        note="Positions at odd places are covered by no branch, and are empty rows. The offset is the branch's and "
        "does not move from segment to segment.",
        bugs=("H3", "R3"),
        problem=Problem(query_length=12, heads=2, head_dim=4, dilation=split((6, 2))),
        cotangent="both",
    ),
    Story(
        id="V070",
        topic="dilation_split",
        title="two branches, four heads",
        note="Heads 0 and 1 run (4, 1), heads 2 and 3 run (8, 2) with offset 1.",
        bugs=("R3",),
        problem=Problem(query_length=16, heads=4, head_dim=4, dilation=split((4, 1), (8, 2))),
    ),
    Story(
        id="V071",
        topic="dilation_split",
        title="three branches, seven heads",
        note="Groups of 3, 2 and 2 heads: cut at multiples of one size, some heads run twice and the last ones never.",
        bugs=("H1", "R3"),
        problem=Problem(query_length=12, heads=7, head_dim=2, dilation=split((3, 1), (6, 2), (12, 3))),
    ),
    Story(
        id="V072",
        topic="dilation_split",
        title="five branches, twelve heads",
        note="Groups of 3, 3, 2, 2 and 2 heads.",
        bugs=("H1",),
        problem=Problem(query_length=8, heads=12, head_dim=1, dilation=split((2, 1), (4, 1), (4, 2), (8, 2), (8, 4))),
        layouts=on(contiguous=(2,), zigzag=(2,), striped=(3,), replicated_query=(2,)),
    ),
    Story(
        id="V073",
        topic="dilation_split",
        title="more branches than heads",
        note="The first two branches have a head each, the third has none.",
        problem=Problem(query_length=10, heads=2, head_dim=4, dilation=split((5, 1), (10, 2), (3, 1))),
    ),
    Story(
        id="V074",
        topic="dilation_split",
        title="nothing divides anything",
        note="Thirteen positions, segments of 5 and 12, rates 3 and 5: the last segment is short. Lengths that do not "
        "line up were refused, or had tensors that did not fit.",
        bugs=("R4", "R5", "R3"),
        problem=Problem(query_length=13, heads=4, head_dim=4, dilation=split((5, 3), (12, 5))),
        layouts=on(contiguous=(2, 3, 4), zigzag=(2, 3), striped=(2, 5), replicated_query=(3,)),
    ),
    Story(
        id="V075",
        topic="dilation_split",
        title="causal, a segment of two shards",
        note="Four ranks, segments of eight over shards of four: a rank's own keys, and those of the rank before in "
        "its segment, and no others.",
        bugs=("H5", "R3"),
        problem=Problem(query_length=16, heads=2, head_dim=4, causal=True, dilation=split((8, 1), (16, 2))),
        layouts=on(contiguous=(4,), zigzag=(2, 4), striped=(4,), replicated_query=(4,)),
    ),
    Story(
        id="V076",
        topic="dilation_split",
        title="a rate above its segment",
        note="One position of each segment is covered, at most.",
        problem=Problem(query_length=9, heads=2, head_dim=4, dilation=split((3, 5), (2, 4))),
        cotangent="both",
    ),
    Story(
        id="V077",
        topic="dilation_split",
        title="a segment longer than the sequence",
        note="One segment, cut short.",
        bugs=("R3",),
        problem=Problem(query_length=7, heads=2, head_dim=4, causal=True, dilation=split((64, 2), (100, 3))),
    ),
    Story(
        id="V078",
        topic="dilation_split",
        title="with grouped heads and padding",
        note="The branch is that of the query head; two heads of different branches may read one key head.",
        problem=Problem(
            batch=2,
            query_length=10,
            heads=6,
            key_heads=2,
            head_dim=3,
            key_lengths=(10, 6),
            dilation=split((4, 1), (10, 2), (6, 3)),
        ),
        cotangent="both",
    ),
    Story(
        id="V079",
        topic="dilation_shared",
        title="one branch, offsets by head",
        note="Every third position of segments of six: head h starts at place h % 3, so four heads "
        "cover three offsets.",
        bugs=("H3", "R3"),
        problem=Problem(query_length=12, heads=4, head_dim=4, dilation=shared((6, 3))),
        cotangent="both",
    ),
    Story(
        id="V080",
        topic="dilation_shared",
        title="two branches, twice the weight",
        note="A pair that both branches let through counts twice in the sum, as merging the branches by their "
        "log-sum-exps has it.",
        problem=Problem(query_length=12, heads=2, head_dim=4, dilation=shared((6, 1), (12, 2))),
        cotangent="both",
    ),
    Story(
        id="V081",
        topic="dilation_shared",
        title="the same branch three times",
        note="Out is that of one branch, lse is larger by log 3.",
        problem=Problem(query_length=8, heads=2, head_dim=4, dilation=shared((4, 1), (4, 1), (4, 1))),
        cotangent="both",
    ),
    Story(
        id="V082",
        topic="dilation_shared",
        title="causal, LongNet's ladder",
        note="Segments 4, 8 and 16 at rates 1, 2 and 4: near keys densely, far ones thinly. Causality is about "
        "positions.",
        bugs=("R3", "H5"),
        problem=Problem(query_length=16, heads=4, head_dim=4, causal=True, dilation=shared((4, 1), (8, 2), (16, 4))),
        layouts=on(contiguous=(2, 4), zigzag=(2, 3), striped=(4,), replicated_query=(2,)),
    ),
    Story(
        id="V083",
        topic="dilation_shared",
        title="thirteen positions, nothing lines up",
        note="Segments of 5 and 9, rates 2 and 4, on worlds that divide none of them.",
        bugs=("R4", "R5", "R3"),
        problem=Problem(query_length=13, heads=3, head_dim=4, dilation=shared((5, 2), (9, 4))),
        cotangent="both",
        layouts=on(contiguous=(2, 3, 5), zigzag=(2, 3), striped=(2, 4), replicated_query=(3,)),
    ),
    Story(
        id="V084",
        topic="dilation_shared",
        title="block offsets",
        note="Four heads at rate 3: heads 0 and 1 start at place 0, heads 2 and 3 at place 1, nobody at place 2. "
        "Rounded down the blocks are of one head, and the last offset does not exist.",
        problem=Problem(query_length=12, heads=4, head_dim=4, dilation=shared((6, 3), offset="block")),
        cotangent="both",
    ),
    Story(
        id="V085",
        topic="dilation_shared",
        title="block offsets, branches of different rates",
        note="Five heads: the blocks are of 3 heads at rate 2, of 2 at rate 3, of 1 at rate 6.",
        bugs=("R3",),
        problem=Problem(query_length=12, heads=5, head_dim=2, dilation=shared((4, 2), (6, 3), (12, 6), offset="block")),
        cotangent="both",
    ),
    Story(
        id="V086",
        topic="dilation_shared",
        title="block offsets, causal",
        note="Branches of rates 2 and 3 under a mask of positions, on uneven shards.",
        bugs=("R3",),
        problem=Problem(
            query_length=13, heads=4, head_dim=4, causal=True, dilation=shared((5, 2), (13, 3), offset="block")
        ),
    ),
    Story(
        id="V087",
        topic="dilation_shared",
        title="more ranks than a segment has positions",
        note="Segments of two over shards of two and fewer; most hops bring nothing.",
        problem=Problem(query_length=8, heads=2, head_dim=4, dilation=shared((2, 1), (8, 4))),
        layouts=on(contiguous=(4, 5), zigzag=(3,), striped=(5,), replicated_query=(4,)),
    ),
    Story(
        id="V088",
        topic="dilation_shared",
        title="in a window, with padding",
        note="Constraints multiply the branches' count: 0 or 1 times 0, 1 or 2.",
        problem=Problem(
            batch=2,
            query_length=10,
            heads=2,
            head_dim=4,
            window=(3, 2),
            key_lengths=(10, 5),
            dilation=shared((10, 1), (4, 2)),
        ),
        cotangent="both",
    ),
    Story(
        id="V153",
        topic="dilation_shared",
        title="two branches over values that are ones",
        note="Out is 1 wherever a branch covers the query: what divides is the sum of the weights, not of the output.",
        bugs=("H2",),
        problem=Problem(query_length=12, heads=3, head_dim=4, causal=True, dilation=shared((6, 1), (12, 3))),
        values="unit_values",
    ),
)
