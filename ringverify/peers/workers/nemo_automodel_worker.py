"""Worker of `peer:nemo-automodel-…`: `cp_blockdiag_sdpa`, its attention of packed documents, over gloo.

The batch is sharded by `make_cp_blockdiag_batch_and_ctx`, which pads it to a multiple of twice the ranks, with q, k
and v of a position as its `inputs_embeds`; it takes one sequence at a time ("requires local_batch_size=1"). Masks are
causal ("a per-document causal mask"), documents `_packed_seq_ids` from 1; `scale` and fewer key heads are those of
`scaled_dot_product_attention`, for which it is a "drop-in replacement". On one rank it is not in use.

`dense` is that backend, which lets padding attend itself ("harmless self-edge"): positions outside all documents are
not tried. The others have the backend `flash`, in float16, where padding is "a contiguous tail" and gives zeros: with
the default `kv_exchange`, "allgather", and with "halo" and "a2a". In place of flash-attn's kernels run the suite's for
a CPU, and the one probe that asks for CUDA ("varlen CP attention requires CUDA") is told that all is well.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

sys.path.append(str(Path(__file__).resolve().parents[2] / "cli" / "workers"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import flash_attn_kernels
import gloo_ranks
import numpy as np
import numpy_worker as worker
import torch
from nemo_automodel.components.distributed import blockdiag_cp
from torch.distributed.device_mesh import init_device_mesh

WAY = sys.argv[1]


class Varlen(torch.autograd.Function):
    """flash-attn's kernels for sequences of many lengths, with their gradients."""

    @staticmethod
    def forward(ctx, q, k, v, ends_q, ends_k, options):
        """Return out."""
        out, lse = flash_attn_kernels.varlen_forward(q, k, v, ends_q, ends_k, **options)
        ctx.save_for_backward(q, k, v, out, lse, ends_q, ends_k)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        """Return dq, dk and dv."""
        *tensors, ends_q, ends_k = ctx.saved_tensors
        found = [torch.empty_like(tensor) for tensor in tensors[:3]]
        flash_attn_kernels.varlen_backward(dout.contiguous(), *tensors, *found, ends_q, ends_k, **ctx.options)
        return *found, None, None, None


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale=None, causal=False, **_):
    """Stand in for the function of flash-attn."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    options = {"scale": scale, "causal": causal, "window": (-1, -1), "softcap": 0.0}
    return Varlen.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, options)


def flash_attn_func(q, k, v, **options):
    """Stand in for the function of flash-attn, for one sequence."""
    ends = [torch.tensor([0, x.shape[1]], dtype=torch.int32) for x in (q, k)]
    return flash_attn_varlen_func(q[0], k[0], v[0], *ends, **options)[None]


flash_attn = sys.modules["flash_attn"] = ModuleType("flash_attn")
flash_attn.flash_attn_func, flash_attn.flash_attn_varlen_func = flash_attn_func, flash_attn_varlen_func
blockdiag_cp.kernels.HAS_FLASH_VARLEN = True
blockdiag_cp.kernels._varlen_backend_unavailable_reason = lambda *_: None
blockdiag_cp.configure_cp_varlen(
    attn_backend="dense" if WAY == "dense" else "flash", kv_exchange=WAY if WAY in ("halo", "a2a") else "allgather"
)

worker.NAME = f"peer:nemo-automodel-{WAY}"
worker.VERSIONS = {"torch": torch.__version__, "nemo-automodel": version("nemo-automodel")}
worker.CAPABILITIES = {"sharding": "contiguous", "causal": "always", "documents": True, "scale": True, "gqa": True}
worker.CAPABILITIES |= {"world_sizes": [2, 3, 4], "uneven": True, "empty_shards": True, "probabilities": "input"}
worker.CAPABILITIES |= {} if WAY == "dense" else {"dtypes": ["float16"], "head_dims": [8, 16], "reduces": "input"}


def attend(case, number, q, k, v):
    """Return this rank's positions, and their rows of out."""
    n, ends = q.shape[1], case["problem"]["documents"] or [0, q.shape[1]]
    at = np.arange(n)
    ids = np.where((at < ends[0]) | (at >= ends[-1]), 0, np.searchsorted(ends[1:], at, side="right") + 1)
    mesh, found = init_device_mesh("cpu", (case["world_size"],)), []
    for one in range(q.shape[0]):
        whole = torch.cat([x[one : one + 1].flatten(2) for x in (q, k, v)], dim=2)
        batch = {"inputs_embeds": whole, "_packed_seq_ids": torch.from_numpy(ids)[None]}
        context, batch, layout = blockdiag_cp.make_cp_blockdiag_batch_and_ctx(mesh, None, batch)
        parts = batch["inputs_embeds"].split([x.shape[2] * x.shape[3] for x in (q, k, v)], dim=2)
        local = [p.unflatten(2, x.shape[2:]).transpose(1, 2) for p, x in zip(parts, (q, k, v), strict=True)]
        with context():
            options = {"is_causal": True, "scale": case["problem"]["scale"], "enable_gqa": True}
            found.append(blockdiag_cp.cp_blockdiag_sdpa(*local, **options).transpose(1, 2))
    length = layout.padded_seq_len // case["world_size"]
    rows = range(n)[number * length : (number + 1) * length]
    return list(rows), torch.cat(found)[:, : len(rows)]


def results_of(case, inputs):
    """Return the results of a case by name."""
    n, ends = inputs["q"].shape[1], case["problem"]["documents"] or [0, inputs["q"].shape[1]]
    if ends[0] > 0:
        raise worker.Unsupported("the package takes padding at the end alone")
    if WAY == "dense" and ends[-1] < n:
        raise worker.Unsupported("the dense backend lets padding attend itself, as it says")
    return gloo_ranks.results_of(attend)(case, inputs)


worker.results_of = results_of
if __name__ == "__main__":
    torch.set_num_threads(1)
    worker.main()
