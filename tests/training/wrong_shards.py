"""What the ranks of `test_wrong_shards` run: a call of which one rank's shard is wrong, in one way each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from ringverify.ring import RingAttention, shard

LENGTH = 8
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

WRONG: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Tensors]] = {
    "a row short in q": lambda q, k, v: (q[:, 1:], k, v),
    "a row short in k": lambda q, k, v: (q, k[:, 1:], v),
    "a row short in v": lambda q, k, v: (q, k, v[:, 1:]),
    "a row short in all": lambda q, k, v: (q[:, 1:], k[:, 1:], v[:, 1:]),
    "another dtype in k": lambda q, k, v: (q, k.double(), v),
    "another dtype in all": lambda q, k, v: (q.double(), k.double(), v.double()),
    "no floating point": lambda q, k, v: (q, k, v.long()),
    "another batch in v": lambda q, k, v: (q, k, v[:1]),
    "another batch in all": lambda q, k, v: (q[:1], k[:1], v[:1]),
    "fewer heads in q": lambda q, k, v: (q[:, :, :3], k, v),
    "fewer key heads": lambda q, k, v: (q, k[:, :, :1], v[:, :, :1]),
    "fewer heads in v": lambda q, k, v: (q, k, v[:, :, :1]),
    "another head_dim in k": lambda q, k, v: (q, k[..., :4], v),
    "another value_dim": lambda q, k, v: (q, k, v[..., :4]),
    "no batch": lambda q, k, v: (q[0], k[0], v[0]),
    "whole instead of cut": lambda q, k, v: tuple(x.repeat(1, 2, 1, 1) for x in (q, k, v)),  # type: ignore[return-value]
}
"""One kind of wrong each."""


def refused(asked: tuple[str, bool, dict[str, object], bool]) -> str:
    """What a rank says, of which `odd` ones have a wrong shard; that both lengths are given or not is asked as well."""
    kind, lengths, settings, autocast = asked
    attend = RingAttention(check_shards=True, causal=True, **settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    whole = (torch.randn(2, LENGTH, heads, 6, generator=generator) for heads in (4, 2, 2))
    q, k, v = (shard(x) for x in whole)
    odd = dist.get_rank() == dist.get_world_size() - 1
    if odd and kind in WRONG:
        q, k, v = WRONG[kind](q, k, v)
    inside = torch.autocast("cpu", torch.bfloat16) if autocast and odd else contextlib.nullcontext()
    given = {"query_length": LENGTH, "key_length": LENGTH} if lengths else {}
    try:
        with inside:
            attend(q, k, v, **given)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return "computed"
