"""Which outputs a token may reach, composed over layers."""

import numpy as np
import torch

from ringref.problem import Problem
from ringverify.reach.counting import Counting
from ringverify.reach.expected import attended, composed, inferred


def test_a_window_reaches_as_far_as_its_layers():
    """(w, 0) over L layers reaches L·w."""
    step = attended(Problem(query_length=20, causal=True, window=(3, 0)))
    distance = np.arange(20)[:, None] - np.arange(20)
    for layers in (1, 2, 4):
        assert np.array_equal(composed(step, layers).pairs, (distance >= 0) & (distance <= 3 * layers))
    assert np.array_equal(composed(step, None).pairs, distance >= 0)


def test_causality_and_documents_reach_no_further_in_more_layers():
    """They are transitive."""
    for problem in (Problem(query_length=12, causal=True), Problem(query_length=12, documents=(0, 5, 12))):
        assert np.array_equal(composed(attended(problem), 5).pairs, attended(problem))


def test_the_share_of_a_token_shrinks_with_its_paths():
    """If every layer attends evenly, the far end of a window is one path of many."""
    share = composed(attended(Problem(query_length=20, causal=True, window=(3, 0))), 2).share
    assert share[19, 13] == 1 / 16
    assert np.abs(share.sum(1) - 1).max() < 20 * np.finfo(float).eps


def test_a_pattern_is_read_off_only_where_it_is_known():
    """Everything, causal, or none of them."""
    assert inferred(np.ones((4, 4), bool)) == Problem(query_length=4)
    assert inferred(np.tri(4, dtype=bool)) == Problem(query_length=4, causal=True)
    assert inferred(np.eye(4, dtype=bool)) is None


def test_counting_replaces_whole_ranges_and_nothing_else():
    """By arange or a slice, along the right dimension; shorter ranges and other lines stay."""
    local = torch.tensor([0, 1, 0, 1])
    table = torch.arange(24).reshape(4, 6)
    with Counting(local, None) as looking:
        torch.arange(4), table[:4], table[..., :4], table[None, 1, :4], torch.arange(5), table[:3], table[1:4]
    assert len(looking.seen) == 1
    with Counting(local, set(looking.seen)):
        assert torch.arange(4).tolist() == [0, 1, 2, 3]  # another line
    replaced = Counting(local, None)
    replaced._replaces = lambda: True
    with replaced:
        assert torch.arange(4).tolist() == [0, 1, 0, 1]
        assert torch.arange(5).tolist() == [0, 1, 2, 3, 4]
        rows, columns, picked = table[:4], table[..., :4], table[None, 1, :4]
        both, fewer = table[:4, :4], table[:3]
    assert torch.equal(rows, table[local])
    assert torch.equal(columns, table[:, local])
    assert torch.equal(picked, table[1][local][None])
    assert torch.equal(both, table[local][:, local])
    assert torch.equal(fewer, table[:3])
