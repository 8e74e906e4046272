"""Worker of `peer:ringattention`: `ringattention` of the package of that name, under `shard_map` as its README has it.

The README's arguments are taken as they are, but for the chunks: both are the whole local shard ("choose as large as
you can"). `causal_block_size=1` "is equivalent to causal attention"; `None`, which the signature takes, is not causal.
Documents are `segment_ids`, replicated as in the README, with their ends at both ends of the sequence.
"""

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
import ringattention
from jax.sharding import Mesh, PartitionSpec

worker.NAME = "peer:ringattention"
worker.VERSIONS |= {"ringattention": version("ringattention")}
worker.CAPABILITIES = {"sharding": "contiguous", "dtypes": ["float32"], "causal": "both", "documents": True}
worker.CAPABILITIES |= {"world_sizes": [1, 2, 4, 8]}


def attend(case, q, k, v):
    """Return out of all positions."""
    ends, segments = case["problem"]["documents"], None
    if ends is not None:
        if ends[0] > 0 or ends[-1] < q.shape[1]:
            raise worker.Unsupported("segment ids cannot say that a position is outside all documents")
        segments = jnp.broadcast_to(np.searchsorted(ends[1:], np.arange(q.shape[1]), side="right"), q.shape[:2])
    return compiled(case["world_size"], case["problem"]["causal"], ends is not None)(q, k, v, segments), None


@functools.cache
def compiled(size, causal, documents):
    """Return the package's ring over the first `size` devices, as a function of global tensors."""
    tokens = PartitionSpec(None, "sp")

    def local(q, k, v, segments):
        chunks = {"query_chunk_size": q.shape[1], "key_chunk_size": k.shape[1]}
        chunks |= {"causal_block_size": 1 if causal else None, "deterministic": True, "dropout_rng": None}
        chunks |= {"attn_pdrop": 0.0, "policy": jax.checkpoint_policies.nothing_saveable, "dtype": jnp.float32}
        chunks |= {"precision": None, "prevent_cse": True}
        return ringattention.ringattention(q, k, v, None, segments, None, "sp", True, chunks)

    specs = (tokens, tokens, tokens, PartitionSpec(None, None) if documents else None)
    mesh = Mesh(np.array(jax.devices()[:size]), ("sp",))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False))


worker.attend = attend
if __name__ == "__main__":
    worker.main()
