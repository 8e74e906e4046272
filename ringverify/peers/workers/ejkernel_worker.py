"""Worker of `peer:ejkernel-…`: `ring_attention` of `ejkernel.kernels._xla`, "within jax.shard_map", as its Note has it.

The keywords are those of its docstring: `causal`, `sliding_window=(left, right)`, `logits_soft_cap`, `softmax_scale`,
and documents as `q_segment_ids` of the local shard; what is outside all documents has a negative id, "padding".
`ring` leaves `chunk_size` out; `ring-chunked` gives half the local shard, and "the chunk_size should evenly divide the
sequence length". The signature tells key heads from heads, but no sentence says that they may be fewer: not declared.
`ring-sinks` adds `softmax_aux`, "attention sink logits [num_sinks]", which all heads of a call have in common: a call
for each head has its own. No sentence says that they are differentiated, so it is forward only; and shards have two
positions and more, since what happens to one is a finding of `ring`.
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
from ejkernel.kernels._xla.ring_attention import ring_attention
from jax.sharding import Mesh, PartitionSpec

WAY = sys.argv[1]

worker.NAME = "peer:ejkernel-ring" if WAY == "ring" else f"peer:ejkernel-ring-{WAY}"
worker.VERSIONS |= {"ejkernel": version("ejkernel")}
worker.CAPABILITIES = {"sharding": "contiguous", "dtypes": ["float32"], "causal": "both", "window": True, "scale": True}
worker.CAPABILITIES |= {"documents": True, "softcap": True, "world_sizes": [1, 2, 4, 8]}
worker.CAPABILITIES |= {"length_multiple": 4} if WAY == "chunked" else {}
worker.CAPABILITIES |= {"sinks": True, "gradients": False, "length_multiple": 2} if WAY == "sinks" else {}


def attend(case, q, k, v):
    """Return out of all positions."""
    problem, ids = case["problem"], None
    if (ends := problem["documents"]) is not None:
        at = np.arange(q.shape[1])
        found = np.searchsorted(ends[1:], at, side="right")
        ids = jnp.broadcast_to(np.where((at < ends[0]) | (at >= ends[-1]), -1, found).astype(np.int32), q.shape[:2])
    window = problem["window"] and tuple(q.shape[1] if side is None else side for side in problem["window"])
    which = (case["world_size"], problem["causal"], window, problem["softcap"], problem["scale"], ids is not None)
    if (sinks := case["sinks"]) is None:
        return compiled(*which, False)(q, k, v, ids, None), None
    heads = [slice(head, head + 1) for head in range(len(sinks))]
    ring = compiled(*which, True)
    return jnp.concatenate([ring(*(x[:, :, one] for x in (q, k, v)), ids, sinks[one]) for one in heads], axis=2), None


@functools.cache
def compiled(size, causal, window, softcap, scale, documents, with_sinks):
    """Return the package's ring over the first `size` devices, as a function of global tensors and sinks."""

    def local(q, k, v, ids, sinks):
        chunk = q.shape[1] // 2 if WAY == "chunked" else None
        options = {"sliding_window": window, "logits_soft_cap": softcap, "softmax_scale": scale, "chunk_size": chunk}
        return ring_attention(q, k, v, ids, ids, softmax_aux=sinks, causal=causal, axis_name="sp", **options)

    tokens, mesh = PartitionSpec(None, "sp"), Mesh(np.array(jax.devices()[:size]), ("sp",))
    specs = (tokens, tokens, tokens, tokens if documents else None, PartitionSpec() if with_sinks else None)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=tokens, check_vma=False))


def results_of(case, inputs, of_template=worker.results_of):
    """Hand the sinks on with the case."""
    return of_template(case | {"sinks": inputs.get("sinks")}, inputs)


worker.attend, worker.results_of = attend, results_of
if __name__ == "__main__":
    worker.main()
