"""Worker of `peer:veomni-ulysses`: `flash_attention_forward` under a parallel state with `ulysses_size`, over gloo.

Its exchanges of heads and positions are the package's, on both sides of `_flash_attention_forward`, the "module-level
patch slot for the underlying flash-attention forward", where dense attention goes. What it asserts is declared: the
ranks divide the heads, and key heads divide the ranks or are divided by them; other cases are left out. `scaling` and
`is_causal` are arguments.
"""

import contextlib
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).resolve().parents[2] / "cli" / "workers"))

import gloo_ranks
import numpy_worker as worker
import torch

with contextlib.redirect_stdout(sys.stderr):  # it prints and logs there
    from veomni.distributed.parallel_state import init_parallel_state
    from veomni.ops.kernels.attention import flash

worker.NAME = "peer:veomni-ulysses"
worker.VERSIONS = {"torch": torch.__version__, "veomni": version("veomni")}
worker.CAPABILITIES = {"sharding": "contiguous", "causal": "both", "scale": True, "gqa": True}
worker.CAPABILITIES |= {"heads_multiple": "world_size", "world_sizes": [1, 2, 3, 4]}


def dense(query, key, value, _, *, is_causal, softmax_scale, **__):
    """Stand in for flash attention: `(batch, positions, heads, head_dim)` in and out."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * softmax_scale
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:], dtype=torch.bool).tril(), -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2)


flash._flash_attention_forward = dense
CONFIG = SimpleNamespace(_attn_implementation="veomni_flash_attention_2_with_sp", _pre_quantization_dtype=torch.float32)
MODULE = SimpleNamespace(config=CONFIG)


def attend(case, number, q, k, v):
    """Return this rank's positions, and their rows of out."""
    init_parallel_state(ulysses_size=case["world_size"], device_type="cpu", dp_mode="ddp")
    rows, local = case["positions"][number], (x[:, case["positions"][number]].transpose(1, 2) for x in (q, k, v))
    options = {"scaling": case["problem"]["scale"], "is_causal": case["problem"]["causal"]}
    return rows, flash.flash_attention_forward(MODULE, *local, None, **options)[0]


def results_of(case, inputs):
    """Return the results of a case by name."""
    if (size := case["world_size"]) % inputs["k"].shape[2] and inputs["k"].shape[2] % size:
        raise worker.Unsupported("the package asserts that key heads divide the ranks or are divided by them")
    return gloo_ranks.results_of(attend)(case, inputs)


worker.results_of = results_of
if __name__ == "__main__":
    torch.set_num_threads(1)
    worker.main()
