"""Worker of `peer:cache-dit-…`: its attention dispatcher on the backend `native`, under a `_ContextParallelConfig`.

Ranks are processes over gloo, forked for each case. As the package says: inference only ("backward pass is not
implemented"), not causal, no grouped heads, degrees of 2 and more. `ulysses` and `ulysses-anything` take any number of
heads ("Ulysses Attention and UAA in cache-dit now support arbitrary numbers of heads"); heads of zeros are appended
here where the package's own padding would be as large as what a rank holds, which it asserts against. Shards may be
unequal with `ulysses-anything` ("arbitrary sequence length"). `usp` is both at once ("Unified Sequence Parallelism"),
with Ulysses over two of 4 or 6 ranks. Of rotations, "Only rotate_method='p2p' is supported now".
The ring asks torch's flash operator for log-sum-exps, which has no kernel for a CPU: torch's CPU operator of the same
results stands in for it. The Triton kernel that merges blocks is left out as if it were not installed: the package's
own formula in torch, its fallback, does it.
"""

import sys
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "cli" / "workers"))

import gloo_ranks
import numpy as np
import numpy_worker as worker
import torch
from cache_dit.attention.backends import (
    native,  # noqa: F401 - it registers the backend
    register,
)
from cache_dit.distributed.core import _templated_ring
from torch.distributed.device_mesh import init_device_mesh

WAY = sys.argv[1]


def degrees(size):
    """Return how many ranks the ring and Ulysses are over."""
    return {"ring": (size, 1), "usp": (size // 2, 2)}.get(WAY, (1, size))


worker.NAME = f"peer:cache-dit-{WAY}"
worker.VERSIONS = {"torch": torch.__version__}
worker.VERSIONS |= {"cache-dit": version("cache-dit")}
worker.CAPABILITIES = {"sharding": "contiguous", "causal": "never", "gradients": False, "scale": True}
worker.CAPABILITIES |= {"world_sizes": [4, 6] if WAY == "usp" else [2, 3, 4]}
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
    ring, ulysses = degrees(size)
    options = {"ring_degree": ring, "ulysses_degree": ulysses, "ulysses_anything": WAY == "ulysses-anything"}
    config = register._ContextParallelConfig(**options)
    mesh = init_device_mesh("cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names)
    config.setup(number, size, torch.device("cpu"), mesh)
    local = (tensor[:, rows].contiguous() for tensor in (q, k, v))
    options = {"scale": case["problem"]["scale"], "backend": "native", "cp_config": config}
    return rows, register._dispatch_attention_fn(*local, **options)


def results_of(case, inputs):
    """Return the results of a case by name."""
    count = heads = inputs["q"].shape[2]
    size = degrees(case["world_size"])[1]
    while -count % size >= -(-count // size):
        count += 1
    more = [(0, 0), (0, 0), (0, count - heads), (0, 0)]
    out = gloo_ranks.results_of(attend)(case, {name: np.pad(array, more) for name, array in inputs.items()})["out"]
    return {"out": np.ascontiguousarray(out[:, :, :heads])}


worker.results_of = results_of
if __name__ == "__main__":
    torch.set_num_threads(1)
    worker.main()
