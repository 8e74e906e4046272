"""Worker of `peer:cache-dit-…`: its attention dispatcher on the backend `native`, under a `_ContextParallelConfig`.

Ranks are processes over gloo, forked for each case. As the package says: inference only ("backward pass is not
implemented"), not causal, no grouped heads, degrees of 2 and more; `ulysses` needs heads that the degree divides, and
`ulysses-anything` takes unequal shards and heads ("uneven sequence/head Ulysses mode") where each rank has a head.
The ring asks torch's flash operator for log-sum-exps, which has no kernel for a CPU: torch's CPU operator of the same
results stands in for it. The Triton kernel that merges blocks is left out as if it were not installed: the package's
own formula in torch, its fallback, does it.
"""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "cli" / "workers"))

import gloo_ranks
import numpy_worker as worker
import torch
from cache_dit.attention.backends import (
    native,  # noqa: F401 - it registers the backend
    register,
)
from cache_dit.distributed.core import _templated_ring
from torch.distributed.device_mesh import init_device_mesh

WAY = sys.argv[1]
DEGREE = "ring_degree" if WAY == "ring" else "ulysses_degree"

worker.NAME = f"peer:cache-dit-{WAY}"
worker.VERSIONS = {"torch": torch.__version__}
worker.VERSIONS |= {"cache-dit": version("cache-dit")}
worker.CAPABILITIES = {"sharding": "contiguous", "causal": "never", "gradients": False, "scale": True}
worker.CAPABILITIES |= {"world_sizes": [2, 3, 4]}
worker.CAPABILITIES |= {"heads_multiple": "world_size", "key_heads_multiple": "world_size"} if WAY == "ulysses" else {}
worker.CAPABILITIES |= {"uneven": True} if WAY == "ulysses-anything" else {}


def flash(q, k, v, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """Stand in for `_scaled_dot_product_flash_attention`: out and lse, in its order of results."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout_p, is_causal, scale=scale)
    nothing = torch.empty(0)
    return out, lse, nothing, nothing, q.shape[2], k.shape[2], nothing, nothing, nothing


_templated_ring.fused_merge_attn_states = None
library = torch.library.Library("aten", "IMPL")
library.impl("_scaled_dot_product_flash_attention", flash, "CPU")


def attend(case, number, q, k, v):
    """Return this rank's positions, and their rows of out."""
    size, rows = case["world_size"], case["positions"][number]
    config = register._ContextParallelConfig(**{DEGREE: size}, ulysses_anything=WAY == "ulysses-anything")
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    config.setup(number, size, torch.device("cpu"), mesh)
    local = (tensor[:, rows].contiguous() for tensor in (q, k, v))
    options = {"scale": case["problem"]["scale"], "backend": "native", "cp_config": config}
    return rows, register._dispatch_attention_fn(*local, **options)


def results_of(case, inputs):
    """Return the results of a case by name."""
    heads, size = inputs["q"].shape[2], case["world_size"]
    if WAY == "ulysses-anything" and -heads % size >= -(-heads // size):
        raise worker.Unsupported("the package asserts that padded heads leave every rank one of its own")
    return gloo_ranks.results_of(attend)(case, inputs)


worker.results_of = results_of
if __name__ == "__main__":
    torch.set_num_threads(1)
    worker.main()
