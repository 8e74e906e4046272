"""Documents that do not cover the sequence: legal, as padding is, and said, because it is mostly a forgotten end."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from on_ranks import WORLD

from ringverify.ring import RingAttention, ring_attention, shard

pytestmark = pytest.mark.timeout(60)

X = torch.randn(2, 9, 2, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("documents", "words"),
    [
        ((0, 4), "documents end at 4 and the sequence at 9: positions 4 to 8 lie in no document"),
        ((4, 9), "documents start at 4: positions 0 to 3 lie in no document"),
        ((2, 5, 8), "start at 2: positions 0 to 1, and end at 8 and the sequence at 9: positions 8 to 8 lie in"),
        (torch.tensor([0, 8]), "cumulative lengths from 0 to query_length, such as (0, …, 9)"),
    ],
)
@pytest.mark.parametrize("attend", [ring_attention, lambda *x, **how: RingAttention(causal=True)(*x, **how)])
def test_documents_that_do_not_cover_the_sequence_are_warned_of(documents, words, attend):
    """In one line with both numbers and the way out; the result is what it was."""
    with pytest.warns(UserWarning, match=re.escape(words)) as said:
        out = attend(X, X, X, documents=documents)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    start, end = int(documents[0]), int(documents[-1])
    assert not out[:, :start].any()
    assert not out[:, end:].any()


@pytest.mark.parametrize(
    "how",
    [
        {"documents": (0, 4, 9)},
        {"documents": (0, 0, 9, 9)},
        {"documents": None},
        {"documents": (0, 4), "key_lengths": (4, 3)},
    ],
)
def test_documents_that_do_or_that_padding_explains_are_not(how):
    """Nothing is said of a call that says what it means."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ring_attention(X, X, X, **how)


def test_documents_past_the_end_are_refused_with_both_numbers():
    """Of the whole sequence, which a rank's shard does not show."""
    with pytest.raises(ValueError, match=re.escape("documents=(0, 12): expected non-decreasing cumulative lengths of")):
        ring_attention(X, X, X, documents=(0, 12))


def test_one_rank_says_it():
    """The first one: a warning a rank would be one and the same many times."""

    def program(_):
        x = shard(X)
        ring_attention(x, x, x, documents=(0, 4), query_length=9, key_length=9)
        return dist.get_rank()

    with pytest.warns(UserWarning, match="documents end at 4") as said:
        run = WORLD.run(program, None, world_size=2, seed=0, deadline=30)
    assert run.failure is None, run.failure.detail
    assert run.results == (0, 1)
    assert len(said) == 1
