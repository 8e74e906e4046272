"""What is wrong is said in one line, with the value and a way out, before anything is sent.

Nothing here has a process group: a call that began to communicate would say so instead.
"""

import re

import pytest
import torch

from ringref.problem import Dilation, Problem
from ringverify.ring.attention import attend, ring_attention
from ringverify.ring.calls import Engine
from ringverify.ring.group import Ring
from ringverify.ring.method import METHODS

TENSORS = tuple(torch.zeros(1, 6, heads, 4) for heads in (4, 2, 2))
"""q, k and v of six positions."""


class Unhashable:
    """A sharding that is a callable, and equal to others by what it says of itself."""

    def __call__(self, length, world_size):
        return [range(rank, length, world_size) for rank in range(world_size)]

    def __eq__(self, other):
        return isinstance(other, Unhashable)


def refused(message, function, *arguments, **how):
    """Check that one line is raised and holds the message."""
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        function(*arguments, **how)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p=0.1: ring attention has no dropout"),
        ({"dropout_p": 0.1}, "use dropout_p=0.0"),
        ({"sharding": "stripes"}, "sharding='stripes': expected one of contiguous, zigzag, striped, replicated_query"),
        ({"sharding": lambda n, p: [range(n - 1)]}, "is not a partition"),
        ({"method": "gather"}, "method='gather': expected ring or allgather"),
        ({"method": "auto"}, "method='auto': expected ring or allgather"),
        ({"method": ["ring"]}, "method=['ring']: expected ring or allgather"),
        ({"transport": "mpi"}, "transport='mpi': expected p2p or blocking"),
        ({"kernel": "flash"}, "kernel='flash': expected auto, fused_cpu,"),
        ({"kernel": "fused_cpu", "softcap": 1.0}, "kernel='fused_cpu' knows no softcap; kernel='auto' chooses one"),
        ({"memory_budget": 0}, "memory_budget=0: expected a positive number of bytes"),
        ({"memory_budget": "1000"}, "memory_budget='1000': expected a positive number of bytes, an integer, or None"),
        ({"memory_budget": 1.5e6}, "memory_budget=1500000.0: expected a positive number of bytes, an integer, or None"),
        ({"memory_budget": True}, "memory_budget=True: expected a positive number of bytes, an integer, or None"),
        (
            {"sharding": ["zigzag"]},
            "sharding of type list: expected contiguous, zigzag, striped, replicated_query, zigzag_documents, or a",
        ),
        ({"sharding": Unhashable()}, "sharding of type Unhashable: expected contiguous, zigzag, striped"),
        ({"group": object()}, "a group was given, but torch.distributed is not initialised, or not any more"),
        ({"causal": 1}, "causal=1: expected True or False"),
        (
            {"window": (-1, 0)},
            "window=(-1, 0): each side is an integer of at least 0, both ends inclusive; None (not -1)",
        ),
        ({"softcap": 0.0}, "softcap=0.0: expected a positive number, or None for no softcap"),
        ({"scale": float("nan")}, "scale=nan: expected a finite number"),
        (
            {"documents": (0, 9)},
            "documents=(0, 9): expected non-decreasing cumulative lengths of at most 6, the sequence length",
        ),
        ({"documents": torch.tensor([4, 2])}, "documents=(4, 2): expected non-decreasing cumulative lengths"),
        ({"key_lengths": torch.tensor([7])}, "key_lengths=(7,): expected lengths of at most key_length=6"),
        ({"key_lengths": (1, 2)}, "key_lengths=(1, 2): expected one length for each of 1 batch elements"),
        ({"dilation": ((2, 1),)}, "dilation=((2, 1),): expected ringref.Dilation"),
        ({"dilation": Dilation(((2, 1),)), "documents": (0, 6)}, "dilation with documents has no agreed meaning"),
        ({"query_length": 7}, "q has shape (1, 6, 4, 4) on rank 0 of 1: expected (1, 7, 4, 4)"),
        ({"key_length": 5}, "k has shape (1, 6, 2, 4) on rank 0 of 1: expected (1, 5, 2, 4)"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(how, message):
    """Each named with its value."""
    refused(message, ring_attention, *TENSORS, **how)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[0], k, v), "q has shape (6, 4, 4): expected (batch, sequence, heads, head_dim)"),
        (lambda q, k, v: (q, k, v[..., 0]), "v has shape (1, 6, 2): expected (batch, sequence, heads, head_dim)"),
        (lambda q, k, v: (q.long(), k, v), "q is torch.int64: expected one of float64, float32, bfloat16, float16"),
        (lambda q, k, v: (q, k.cfloat(), v), "k is torch.complex64: expected one of"),
        (lambda q, k, v: (q, k.double(), v), "k is torch.float64 on rank 0: expected float32, the dtype of q"),
        (lambda q, k, v: (q.half(), k, v), "k is torch.float32 on rank 0: expected float16"),
        (lambda q, k, v: (q, k[..., :3], v), "k has shape (1, 6, 2, 3) on rank 0 of 1: expected (1, 6, 2, 4)"),
        (lambda q, k, v: (q, k, v[:, :5]), "v has shape (1, 5, 2, 4) on rank 0 of 1: expected (1, 6, 2, 4)"),
        (
            lambda q, k, v: (q, k.repeat(2, 1, 1, 1), v),
            "k has shape (2, 6, 2, 4) on rank 0 of 1: expected (1, 6, 2, 4)",
        ),
        (lambda q, k, v: (q[:, :, :3], k, v), "heads=3, key_heads=2: key_heads must divide heads"),
        (lambda q, k, v: (q, k, v.to("meta")), "v is on meta and q on cpu: expected one device"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(change, message):
    """With the shape, dtype or device that was expected."""
    refused(message, ring_attention, *change(*TENSORS))


PROBLEM = Problem(query_length=11, heads=4, key_heads=2, head_dim=4)


@pytest.mark.parametrize("method", METHODS)
def test_shards_that_are_not_the_rank_s_own_are_refused(method):
    """Rank 1 of 2 holds five of eleven positions: what to give is said, and which keywords unequal shards need."""
    for transport in ("p2p", "blocking"):
        how = {"problem": PROBLEM, "sharding": "contiguous", "ring": Ring(None, 1, 2)}
        how["engine"] = Engine(method, transport)
        message = (
            "q has shape (1, 6, 4, 4) on rank 1 of 2: expected (1, 5, 4, 4), that is (batch, positions of this rank"
        )
        refused(message, attend, *TENSORS, **how)
        refused("shards of unequal length need query_length and key_length", attend, *TENSORS, **how)


@pytest.mark.parametrize("method", METHODS)
def test_a_call_of_which_no_query_needs_another_rank_sends_nothing(method):
    """Documents that end with a shard."""
    tensors = [x[:, :5] for x in TENSORS]
    how = {"sharding": "contiguous", "ring": Ring(None, 1, 2), "engine": Engine(method)}
    out, _ = attend(*tensors, problem=PROBLEM.replace(documents=(0, 6, 11)), **how)
    assert out.shape == (1, 5, 4, 4)


@pytest.mark.parametrize("method", METHODS)
def test_a_call_that_needs_a_group_says_so_when_it_communicates(method):
    """The proof that the tests above would notice: the same call with nothing wrong fails in torch.distributed."""
    tensors = [x[:, :5] for x in TENSORS]
    with pytest.raises(ValueError, match="process group has not been initialized"):
        attend(*tensors, problem=PROBLEM, sharding="contiguous", ring=Ring(None, 1, 2), engine=Engine(method))
