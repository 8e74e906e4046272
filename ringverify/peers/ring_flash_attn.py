"""The rings of the package `ring-flash-attn` (PyPI, 0.1.8), on a CPU stand-in for the CUDA kernels that they call.

The package's modules run as they are; `flash_attn` is `ringverify.peers.flash_attn_interface`. Its `__init__` is left
out: it imports an adapter for transformers, by a name that transformers 5 no longer has.

What is declared is what the README and the test scripts of the package say:

- bfloat16 and float16, which is what flash-attn takes: the functions "correspond to" `flash_attn_func` and
  `flash_attn_varlen_func`. As flash-attn returns the result of a block in the input dtype, `probabilities="input"`;
- causal: the asserts of `zigzag` and `stripe` say that they are for causal attention only;
- equal shards: the scripts assert `seqlen % world_size == 0`, those of zigzag `2 * world_size`;
- lse, not differentiable: the scripts compare what `return_attn_probs=True` returns; flash-attn documents the same;
- grouped heads: the benchmark scripts run Llama-3.1-8B, with 32 query heads and 8 key heads;
- scale and deterministic, which are arguments; groups, which the README makes with `new_group`;
- no window ("window_size is not supported"), no softcap (no argument), no other value_dim (flash-attn has none);
- the varlen functions take documents that every rank holds its part of: "the varlen versions (except the llama3
  version) only support passing one `cu_seqlens`". Here the sequences of a batch become such documents, each followed by
  a filler document of another length, so that lengths differ. `llama3` takes documents anywhere and is declared with
  them, one call per sequence; positions in no document are padding: zeros in a document of their own, whose results are
  dropped;
- worlds of two and more: on one rank the rings' backward sends to itself, which nccl does and gloo refuses.

The adapter only translates: it does what `flash_attn_func` does around the same kernels, padding head_dim with zeros to
a multiple of 8.

Importing this module imports the package.

Raises:
    Inconclusive: the package is missing, is of another version, or does not import.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ringverify.implementation import AttentionCall, Implementation, implementation
from ringverify.merge_contract import merge
from ringverify.peers.flash_attn_interface import for_kernels, standing_in
from ringverify.peers.package import imported

NAME = "peer:ring-flash-attn"
PACKAGE = "ring-flash-attn"
VERSION = "0.1.8"

Tensor = torch.Tensor

RINGS = (2, 3, 4, 5, 6, 7, 8)
"""World sizes of the rings."""
BETWEEN = 2
"""Rows that a rank holds of the filler document after each sequence of a batch; even, because zigzag halves them."""


def _module(name: str) -> Any:
    return imported(f"ring_flash_attn.{name}", peer=NAME, package=PACKAGE, version=VERSION, run_init=False)


with standing_in("ring_flash_attn"):
    _ring = _module("ring_flash_attn").ring_flash_attn_func
    _zigzag = _module("zigzag_ring_flash_attn").zigzag_ring_flash_attn_func
    _stripe = _module("stripe_flash_attn").stripe_flash_attn_func
    _ring_varlen = _module("ring_flash_attn_varlen").ring_flash_attn_varlen_func
    _zigzag_varlen = _module("zigzag_ring_flash_attn_varlen").zigzag_ring_flash_attn_varlen_func
    _llama3 = _module("llama3_flash_attn_varlen")
    _update = _module("utils").update_out_and_lse

_declared = functools.partial(
    implementation,
    dtypes=("bfloat16", "float16"),
    probabilities="input",
    lse=True,
    gqa=True,
    scale=True,
    subgroups=True,
    deterministic=True,
)


def _dense(function: Callable[..., Any], name: str, sharding: str, causal: str) -> Implementation:
    @_declared(name=f"{NAME}-{name}", sharding=sharding, causal=causal, world_sizes=RINGS)
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """This rank's output and log-sum-exp; q, k and v are this rank's shards."""
        dim = q.shape[-1]
        q, k, v = for_kernels(q, k, v)
        out, lse, _ = function(
            q, k, v, softmax_scale=call.scale, causal=call.causal, deterministic=True, return_attn_probs=True,
            group=call.group,
        )  # fmt: skip
        return out[..., :dim], lse

    return attend


def _packed(function: Callable[..., Any], name: str, sharding: str, causal: str) -> Implementation:
    @_declared(name=f"{NAME}-{name}", sharding=sharding, causal=causal, world_sizes=RINGS)
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """This rank's output and log-sum-exp; each sequence of the batch is a document, followed by a filler."""
        batch, rows, _, dim = q.shape
        q, k, v = for_kernels(q, k, v)
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, BETWEEN)).flatten(0, 1) for x in (q, k, v))
        starts = torch.arange(batch)[:, None] * (rows + BETWEEN) + torch.tensor([0, rows])
        lengths = torch.cat([starts.flatten(), torch.tensor([q.shape[0]])]).to(torch.int32)
        out, lse, _ = function(
            q, k, v, lengths, max(rows, BETWEEN), softmax_scale=call.scale, causal=call.causal, deterministic=True,
            return_attn_probs=True, group=call.group,
        )  # fmt: skip
        out = out.unflatten(0, (batch, rows + BETWEEN))[:, :rows, :, :dim]
        return out, lse.unflatten(1, (batch, rows + BETWEEN))[..., :rows].transpose(0, 1)

    return attend


def _gathered(name: str) -> Implementation:
    @_declared(name=f"{NAME}-{name}", sharding="contiguous", causal="both", documents=True)
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """This rank's output and log-sum-exp, one sequence of the batch after the other."""
        dim, ends = q.shape[-1], call.documents or (0, call.problem.nq)
        covered = ((call.positions >= ends[0]) & (call.positions < ends[-1]))[:, None, None]
        q, k, v = (torch.where(covered, x, 0.0) for x in (q, k, v))
        q, k, v = for_kernels(q, k, v)
        inside = {end for end in ends if 0 < end < call.problem.nq}  # without empty documents
        lengths = torch.tensor([0, *sorted(inside), call.problem.nq], dtype=torch.int32)
        prepared = _llama3.llama3_flash_attn_prepare_cu_seqlens(lengths, call.causal, call.rank, call.world_size)
        *sizes, local_k_slice = prepared
        found = [
            _llama3.llama3_flash_attn_varlen_func(
                *one, *sizes, heads_k_stride=1, local_k_slice=local_k_slice,
                softmax_scale=call.scale, causal=call.causal, deterministic=True, return_attn_probs=True,
                group=call.group,
            )
            for one in zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
        ]  # fmt: skip
        outs, lses, _ = zip(*found, strict=True)
        out, lse = torch.where(covered, torch.stack(outs)[..., :dim], 0.0), torch.stack(lses)
        return out, torch.where(covered[..., 0, 0], lse, -torch.inf)

    return attend


ring = _dense(_ring, "ring", "contiguous", "both")
zigzag = _dense(_zigzag, "zigzag", "zigzag", "always")
stripe = _dense(_stripe, "stripe", "striped", "always")
ring_varlen = _packed(_ring_varlen, "ring-varlen", "contiguous", "both")
zigzag_varlen = _packed(_zigzag_varlen, "zigzag-varlen", "zigzag", "always")
llama3 = _gathered("llama3")


@merge(name="merge:ring-flash-attn", dtypes=("float32", "bfloat16", "float16"), empty=None)
def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The step of all its rings, from the first block to the result. Nothing is said of empty partials."""
    out, lse = _update(*_update(None, None, out_a, lse_a), out_b, lse_b)
    return out.to(out_a.dtype), lse.squeeze(-1).transpose(1, 2)
