"""torch's own context parallelism (torch 2.13.0): SDPA over a ring or an all-gather, with and without balancing.

On a CPU `context_parallel` itself ends in "Operator aten._scaled_dot_product_flash_attention_for_cpu.default does not
have a sharding strategy registered": it knows the GPU operators only. Here the GPU flash operator is called under
torch's dispatcher, with `ringverify.peers.torch_flash_kernel` for its kernel, so that all that is torch's runs
untouched: the `_ContextParallel` style, DTensor's sharding rules, the rotation, the merging, the autograd formula and
the backward.
Flex attention has no backward on a CPU; what torch's style adds to it is a differentiable all-gather of keys and
values, which is run here with dense attention on what it returns.
`flex-documents` goes further: documents are a mask function, and torch makes the rank's `BlockMask` of it. Dense
attention then runs on what that mask lets through, block by block and pair by pair, and sees zeros where it lets
nothing through. `_create_cp_block_mask` compiles `create_block_mask` for each shape, for seconds; here the same
function is called uncompiled.

What is declared, and where it says so (`torch/distributed/tensor/experimental/_context_parallel/`):

- `allgather` and `alltoall` are the two methods of `set_rotate_method` (`_attention.py`);
- `-balanced`: `_HeadTailLoadBalancer` (`_load_balancer.py`) gives rank r the pieces r and 2P-1-r, that is zigzag, and
  "Load balancing requires `is_causal=True`";
- scale and grouped heads: arguments of `scaled_dot_product_attention`, which `context_parallel` replaces, and which the
  handler passes on;
- bfloat16 and float16: what flash attention takes; float32 is what the stand-in adds. Sums in float32:
  `convert_to_f32`, "upcast parameters and gradients to float32 to avoid accumulation errors"; weights are rounded to
  the input dtype by the kernel;
- the log-sum-exp of the merged result is what `_templated_ring_attention` says it returns, next to out; autograd has
  no formula for it;
- `flex-documents-balanced`: `_PerDocumentHeadTailLoadBalancer`, whose indices and restore indices are a balancer and
  its inverse. Where shards are contiguous, `_context_parallel_shard` and `context_parallel_unshard` move rows to where
  it says and back. It asserts that 2P divides each document's length, so it is told documents whose ends are rounded
  to that: it says which rank holds a position, the mask what is attended. Its documentation promises no number, so no
  `balance` is claimed, and the figure is only told;
- `_create_cp_block_mask` "requires Q_LEN to be divisible by CP mesh world size * BLOCK_SIZE (BLOCK_SIZE defaults to
  128)"; a row that attends nothing is 0, as flex attention has it;
- lengths that 2P divides, or P without balancing, are asserted by the balancer and needed by equal messages;
- sub-groups: any one-dimensional `DeviceMesh`.

`_cp_options` and the replaced dispatch rules are global to the process; all ranks of a call set them alike.

Importing this module registers the CPU kernels and torch's rules for context parallelism.

Raises:
    Inconclusive: torch is of another version.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask

from ringref.sharding import balancer, covering, key_positions
from ringverify.implementation import AttentionCall, Implementation, implementation
from ringverify.merge_contract import merge
from ringverify.peers import torch_flash_kernel
from ringverify.peers.dense import attention, causal_mask
from ringverify.peers.package import imported

NAME = "peer:torch-cp"
PACKAGE = "torch"
VERSION = "2.13.0"

Tensor = torch.Tensor

_cp: Any = imported(
    "torch.distributed.tensor.experimental._attention",
    peer=NAME,
    package=PACKAGE,
    version=VERSION,
    install=f"pip install torch=={VERSION}",
)
torch_flash_kernel.register()
_cp._enable_context_parallel_dispatcher()

_declared = functools.partial(
    implementation, tensor_layout="bhsd", gqa=True, scale=True, subgroups=True, probabilities="input"
)
_SEQUENCE = 2
"""The axis of the sequence; torch's templates have it hard-coded."""
_cp_attention: Any = sys.modules[_cp._ContextParallel.__module__]
_cp_attention._compiled_create_block_mask = create_block_mask


class _Flash(torch.nn.Module):
    """The flash operator, which `scaled_dot_product_attention` calls on a GPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, lse


class _Moved(torch.autograd.Function):
    """Rows moved between contiguous shards and those of a load balancer, by torch's own functions; and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, balancer: Any, to_balanced: bool) -> Tensor:
        ctx.back = mesh, balancer, not to_balanced
        return _move(x, mesh, balancer, to_balanced)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _move(gradient, *ctx.back), None, None, None


def _move(x: Tensor, mesh: DeviceMesh, balancer: Any, to_balanced: bool) -> Tensor:
    origin, target = (None, balancer) if to_balanced else (balancer, None)
    _cp_attention._cp_options.enable_load_balance = False  # else None stands for the default balancer
    (whole,) = _cp.context_parallel_unshard(mesh, [x], [_SEQUENCE], origin)
    moved: Tensor = _cp_attention._context_parallel_buffers(mesh, [whole], [_SEQUENCE], target)[0]
    return moved


_moved: Any = _Moved.apply


class _DenseFlex(torch.nn.Module):
    """Dense attention in place of `flex_attention`, which has no backward on a CPU."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        if mask is None:
            return attention(q, k, v, mask=None, scale=scale)
        idle, unread = ~mask.any(-1, keepdim=True), ~mask.any(-2).unsqueeze(-1)  # rows that may hold anything
        q, k, v = q.masked_fill(idle, 0), k.masked_fill(unread, 0), v.masked_fill(unread, 0)
        return attention(q, k, v, mask=mask | idle, scale=scale).masked_fill(idle, 0)


def _parallel(module: torch.nn.Module, kind: str, call: AttentionCall) -> torch.nn.Module:
    """The module with torch's style applied, on a mesh of the ring's ranks."""
    style = _cp._ContextParallel(_SEQUENCE, getattr(_cp._ContextParallel.AttentionType, kind))
    applied: torch.nn.Module = style._apply(module, DeviceMesh.from_group(call.group, call.positions.device.type))
    return applied


def _sdpa(rotation: str, balanced: bool) -> Implementation:
    @_declared(
        name=f"{NAME}-{rotation}{'-balanced' if balanced else ''}",
        sharding="zigzag" if balanced else "contiguous",
        causal="always" if balanced else "both",
        dtypes=("float32", "bfloat16", "float16"),
        lse=True,
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """This rank's output and log-sum-exp; q, k and v are this rank's shards."""
        _cp.set_rotate_method(rotation)
        _cp._cp_options.enable_load_balance = balanced
        out, lse = _parallel(_Flash(), "SDPA", call)(q, k, v, call.causal, call.scale)
        return out, lse

    return attend


allgather = _sdpa("allgather", False)
alltoall = _sdpa("alltoall", False)
allgather_balanced = _sdpa("allgather", True)
alltoall_balanced = _sdpa("alltoall", True)


@_declared(name=f"{NAME}-flex", sharding=("contiguous", "zigzag"), causal="both")
def flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """This rank's output; q, k and v are this rank's shards."""
    shards = key_positions(call.sharding, call.problem.nk, call.world_size, call.documents)
    gathered = torch.cat([torch.from_numpy(rows) for rows in shards])  # in the order of ranks
    mask = causal_mask(call.positions, gathered) if call.causal else None
    out: Tensor = _parallel(_DenseFlex(), "FLEX", call)(q, k, v, mask, call.scale)
    return out


def _per_document(documents: tuple[int, ...], world_size: int) -> Any:
    """torch's balancer of documents from the first position to the last; 2P has to divide the last."""
    step = 2 * world_size
    rounded = [0, *(end // step * step for end in documents[1:-1]), documents[-1]]
    lengths = [stop - start for start, stop in itertools.pairwise(rounded)]
    return _cp._PerDocumentHeadTailLoadBalancer([lengths], world_size, "cpu")


def _restored(documents: tuple[int, ...], world_size: int) -> Tensor:
    """The row of each position, as torch's balancer says."""
    (rows,) = _per_document(documents, world_size)._generate_indices(restore=True)
    return rows  # type: ignore[no-any-return]  # torch leaves it untyped


@functools.partial(balancer, inverse=_restored)
def per_document(documents: tuple[int, ...], world_size: int) -> list[Tensor]:
    """What each rank holds: `_context_parallel_shard` cuts the balancer's indices in one piece for each."""
    (indices,) = _per_document(documents, world_size)._generate_indices()
    return list(indices.chunk(world_size))


def _documents(balanced: bool) -> Implementation:
    @_declared(
        name=f"{NAME}-flex-documents{'-balanced' if balanced else ''}",
        sharding=("contiguous", per_document) if balanced else "contiguous",
        causal="both",
        documents=True,
        length_multiple=128,
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """This rank's output; q, k and v are this rank's shards."""
        mesh, n = DeviceMesh.from_group(call.group, q.device.type), call.problem.nq
        ends = torch.tensor(call.documents or (0, n))
        ids = torch.bucketize(torch.arange(n), ends, right=True)  # 0 before the first document

        def attends(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            inside = (ids[i] == ids[j]) & (ids[i] > 0) & (ids[i] < len(ends))
            return inside & (j <= i) if call.causal else inside

        order = _per_document(covering(call.documents, n), call.world_size) if balanced else None
        moves = balanced and call.sharding == "contiguous"
        if moves:
            q, k, v = (_moved(x, mesh, order, True) for x in (q, k, v))
        whole = create_block_mask(attends, None, None, n, n, device=q.device.type)
        (mask,) = _cp._context_parallel_shard(mesh, (whole,), (_SEQUENCE,), order)
        out: Tensor = _parallel(_DenseFlex(), "FLEX", call)(q, k, v, _allowed(mask, q.shape[_SEQUENCE], n), call.scale)
        return _moved(out, mesh, order, False) if moves else out

    return attend


def _allowed(mask: BlockMask, queries: int, keys: int) -> Tensor:
    """What a `BlockMask` lets through, `(B, 1, queries, keys)`."""
    blocks, (rows, columns) = mask.to_dense().bool(), mask.BLOCK_SIZE
    batch, heads = blocks.shape[:2]
    inside = blocks.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :queries, :keys]
    return inside & create_mask(mask.mask_mod, batch, heads, queries, keys, device=blocks.device.type)


flex_documents = _documents(False)
flex_documents_balanced = _documents(True)


@merge(
    name="merge:torch-cp",
    out_layout="bhsd",
    dtypes=("float32", "bfloat16", "float16"),
    empty=None,
)
def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The merger of `_templated_ring_attention`; nothing is said of empty partials."""
    merger = _cp_attention._SDPAMerger(True, seq_dim=_SEQUENCE)
    merger.step(out_a, lse_a, False)
    merger.step(out_b, lse_b, False)
    out, lse = merger.results()
    return out, lse
