"""Worker of `peer:torchtitan-…`: its context parallelism, `cp_shard` and `apply_cp_to_forward`, over gloo.

`sdpa` is `ScaledDotProductAttention` with "headtail", the default `load_balancer_type`, for causal masks, and with
`None` for others; torch's ring below it asks for lengths that twice the ranks divide. `flex` is `FlexAttention` with
"ptrr", "for FlexAttention", and documents by `get_document_mask_mod`, which begin where positions are 0, so all of the
sequence lies in one; torch's block masks need shards of whole blocks of 128. `scale` and `enable_gqa` are arguments.

A CPU has neither what torch's ring calls nor flex attention's backward. The suite's CPU kernel of torch's GPU flash
operator runs there, called in place of `scaled_dot_product_attention`, which would choose an operator without a ring,
and dense attention over what the rank's `BlockMask` lets through; that mask is made by `create_block_mask` uncompiled.
"""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "cli" / "workers"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

import gloo_ranks
import numpy_worker as worker
import torch
import torch_flash_kernel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask
from torchtitan.distributed import context_parallel
from torchtitan.models.common import attention

WAY = sys.argv[1]

worker.NAME = f"peer:torchtitan-{WAY}"
worker.VERSIONS = {"torch": torch.__version__, "torchtitan": version("torchtitan")}
worker.CAPABILITIES = {"causal": "both", "scale": True, "gqa": True, "probabilities": "input", "world_sizes": [1, 2, 3]}
SDPA, FLEX = {"sharding": "zigzag"}, {"sharding": "contiguous", "documents": True, "length_multiple": 128}
worker.CAPABILITIES |= SDPA if WAY == "sdpa" else FLEX


def flash(q, k, v, *, scale, is_causal, enable_gqa):
    """Stand in for `scaled_dot_product_attention`, as on a GPU."""
    del enable_gqa
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[0]


def dense(q, k, v, *, block_mask, scale, **_):
    """Stand in for the compiled `flex_attention`, without blocks that the mask leaves out."""
    shape = q.shape[2], k.shape[2]
    blocks = block_mask.to_dense().bool().repeat_interleave(128, -2).repeat_interleave(128, -1)
    mask = blocks & create_mask(block_mask.mask_mod, *blocks.shape[:2], *shape, device="cpu")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return torch.softmax((q @ k.mT * scale).masked_fill(~mask, -torch.inf), dim=-1) @ v, None


torch_flash_kernel.register()
torch.nn.functional.scaled_dot_product_attention = flash
attention.FlexAttention._compiled_flex_attn = dense
_attention._compiled_create_block_mask = create_block_mask


def attend(case, number, q, k, v):
    """Return this rank's positions, and their rows of out."""
    problem, n = case["problem"], q.shape[1]
    mesh, positions = init_device_mesh("cpu", (case["world_size"],)), torch.arange(n)[None]
    options = {"scale": problem["scale"], "enable_gqa": q.shape[2] != k.shape[2]}
    if WAY == "sdpa":
        module, mask, balancer = (
            attention.ScaledDotProductAttention(None),
            None,
            "headtail" if problem["causal"] else None,
        )
        options["is_causal"] = problem["causal"]
    else:
        starts = positions.new_tensor((problem["documents"] or [0])[:-1] or [0]).unique()
        within = positions - starts[torch.bucketize(positions, starts, right=True) - 1]
        mods = [attention.get_document_mask_mod(within)] + [attention.get_causal_mask_mod()] * problem["causal"]
        mask = create_block_mask(and_masks(*mods), 1, None, n, n, device="cpu")
        module, balancer = attention.FlexAttention(attention.FlexAttention.Config()), "ptrr"
    context_parallel.apply_cp_to_forward([module], mesh)
    (positions,), mask = context_parallel.cp_shard(mesh, (positions,), mask, balancer)
    rows = positions[0].tolist()
    return rows, module.forward(*(x[:, rows] for x in (q, k, v)), attention_masks=mask, **options)


def results_of(case, inputs):
    """Return the results of a case by name."""
    if (ends := case["problem"]["documents"]) is not None and (ends[0] > 0 or ends[-1] < inputs["q"].shape[1]):
        raise worker.Unsupported("positions that begin at 0 cannot say that one is outside all documents")
    return gloo_ranks.results_of(attend)(case, inputs)


worker.results_of = results_of
if __name__ == "__main__":
    torch.set_num_threads(1)
    worker.main()
