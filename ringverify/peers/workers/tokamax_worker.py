"""Worker of `peer:tokamax-…`: the ring over splash attention, `make_ring_attention`, its Pallas kernels interpreted.

It is called as its own test does: sharded by `manual_sharding_spec` under `shard_map`, heads first, a batch by `vmap`,
queries scaled by the caller. The mask is an array, which the signature takes; documents are `SegmentIds`, with their
ends at both ends of the sequence. `ring` has the config that `config=None` stands for, but for `interpret=True`;
`ring-natural` sets `use_base2_exp=False` too, as the package's own test does; `ring-as-tested` does, and is held to the
masks of that test alone, full and causal, with and without documents. Head dimension and local shard are at least a
block of the default config, 128. The signature takes sinks and refuses them, so they are not declared.
"""

import dataclasses
import functools
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "cli" / "workers"))

import jax_worker as worker  # before jax: it asks XLA for eight host devices

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from tokamax._src.ops.experimental.tpu.splash_attention import base, ring_attention_kernel, splash_attention_kernel

CONFIG = dataclasses.replace(splash_attention_kernel.SplashConfig.get_default(), interpret=True)
WAY = sys.argv[1]
if WAY != "default":
    CONFIG = dataclasses.replace(CONFIG, use_base2_exp=False)
COMPILED = {}
"""Functions that were compiled, by number of devices and what is fixed in the kernel."""

worker.NAME = "peer:tokamax-ring" if WAY == "default" else f"peer:tokamax-ring-{WAY}"
worker.VERSIONS |= {"tokamax": version("tokamax")}
worker.CAPABILITIES = {"sharding": "contiguous", "dtypes": ["float32"], "causal": "both", "scale": True}
worker.CAPABILITIES |= {"window": WAY != "as-tested", "documents": True, "softcap": True, "gqa": True}
worker.CAPABILITIES |= {"world_sizes": [1, 2, 4], "length_multiple": 128, "head_dims": [128], "shapes": "compiled"}


def attend(case, q, k, v):
    """Return out of all positions."""
    problem, size, n = case["problem"], case["world_size"], q.shape[1]
    config = dataclasses.replace(CONFIG, attn_logits_soft_cap=problem["softcap"])
    left, right = (n if side is None else side for side in problem["window"] or (None, None))
    ahead = np.arange(n)[None, :] - np.arange(n)[:, None]
    mask = (-left <= ahead) & (ahead <= (0 if problem["causal"] else right))
    kernel = ring_attention_kernel.make_ring_attention(
        mask, config=config, is_mqa=False, ring_axis="ring", q_seq_shards=size, kv_seq_shards=size
    )
    segments = None
    if (ends := problem["documents"]) is not None:
        if ends[0] > 0 or ends[-1] < n:
            raise worker.Unsupported("segment ids cannot say that a position is outside all documents")
        ids = jnp.asarray(np.searchsorted(ends[1:], np.arange(n), side="right"), jnp.int32)
        segments = base.SegmentIds(q=ids, kv=ids)
    leaves, tree = jax.tree.flatten(kernel)
    known = size, str(tree), segments is None  # a tree that holds a dict has no hash
    if known not in COMPILED:
        COMPILED[known] = compiled(size, tree, kernel.manual_sharding_spec(), segments is not None)
    q, k, v = (x.swapaxes(1, 2) for x in (q * problem["scale"], k, v))
    return COMPILED[known](leaves, q, k, v, segments).swapaxes(1, 2), None


def compiled(size, tree, spec, documents):
    """Return the package's ring over the first `size` devices, as a function of a kernel's leaves and of tensors."""
    tokens, ring = PartitionSpec(None, None, "ring", None), PartitionSpec("ring")
    specs = (spec, tokens, tokens, tokens, base.SegmentIds(q=ring, kv=ring) if documents else None)
    mesh = Mesh(np.array(jax.devices()[:size]), ("ring",))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False)
    def attention(kernel, q, k, v, segments):
        return jax.vmap(kernel, in_axes=(0, 0, 0, None))(q, k, v, segments)

    return jax.jit(lambda leaves, *tensors: attention(jax.tree.unflatten(tree, leaves), *tensors))


worker.attend = attend
if __name__ == "__main__":
    worker.main()
