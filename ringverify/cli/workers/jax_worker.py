"""A worker for ringverify in JAX: answers cases in a process of its own. Needs jax, numpy, safetensors and ml_dtypes.

Put your own code into `ring`, or into `attend` in its place, declare in CAPABILITIES what it supports, and run:
  ringverify check 'program: python worker.py'
What is printed here goes to ringverify's log. The protocol is described in ringverify's docs/worker.md.
"""

import functools
import json
import os
import time
import traceback

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from safetensors.numpy import load_file, save_file

NAME = os.path.basename(__file__)
VERSIONS = {"jax": jax.__version__}
CAPABILITIES = {"sharding": "contiguous", "dtypes": ["float32", "bfloat16"], "lse": True, "lse_gradient": True}
CAPABILITIES |= {"gqa": True, "value_dim": True, "world_sizes": [1, 2, 3, 4], "shapes": "compiled"}


class Unsupported(Exception):
    """Raise this with a reason for a case that your code does not run."""


# -- yours -------------------------------------------------------------------------------------------------------------


def attend(case, q, k, v):
    """Return out and lse (None if not declared) of all positions, in the layout of q; lse is (batch, heads, queries).

    It must be differentiable by `jax.vjp`. `case["problem"]` says what to compute.
    """
    return compiled(case["world_size"], case["problem"]["causal"], case["problem"]["scale"])(q, k, v)


@functools.cache  # jax compiles a function once for each shape, but a new function anew
def compiled(size, causal, scale):
    """Return the ring over the first `size` devices, as a function of global tensors."""
    mesh = Mesh(np.array(jax.devices()[:size]), ("ring",))
    tokens, rows = PartitionSpec(None, "ring"), PartitionSpec(None, None, "ring")
    local = functools.partial(ring, size=size, causal=causal, scale=scale)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(tokens, tokens, tokens), out_specs=(tokens, rows), check_vma=False)
    )


def ring(q, k, v, *, size, causal, scale):
    """Compute out and lse of one device's queries; keys and values pass round the ring once."""
    rank, local = jax.lax.axis_index("ring"), q.shape[1]
    dtype, groups = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))  # so that vjp sums dk and dv of all hops in float32
    rows = rank * local + jnp.arange(local)
    sums = jnp.zeros((*q.shape[:3], v.shape[3]), jnp.float32)
    logs = jnp.full((q.shape[0], q.shape[2], local), -jnp.inf, jnp.float32)
    for hop in range(size):
        keys = (rank - hop) % size * local + jnp.arange(local)
        wide_k, wide_v = (jnp.repeat(x, groups, axis=2) for x in (k, v))
        scores = scale * jnp.einsum("bihd,bjhd->bhij", q, wide_k, precision="highest")
        if causal:
            scores = jnp.where(keys[None, :] <= rows[:, None], scores, -jnp.inf)
        new = jnp.logaddexp(logs, jax.nn.logsumexp(scores, axis=-1))
        sums = sums * jnp.exp(logs - new).swapaxes(1, 2)[..., None]
        sums += jnp.einsum("bhij,bjhd->bihd", jnp.exp(scores - new[..., None]), wide_v, precision="highest")
        logs = new
        if hop + 1 < size:
            k, v = (jax.lax.ppermute(x, "ring", [(i, (i + 1) % size) for i in range(size)]) for x in (k, v))
    return sums.astype(dtype), logs


# -- the protocol ------------------------------------------------------------------------------------------------------


def results_of(case, inputs):
    """Return the results of a case by name; gradients are those of `jax.vjp`, and without them the call is plain."""
    q, k, v = (jnp.asarray(inputs[name]) for name in "qkv")
    if not case["gradients"]:
        out, lse = attend(case, q, k, v)
        return {"out": out} if lse is None else {"out": out, "lse": lse}
    (out, lse), pull = jax.vjp(functools.partial(attend, case), q, k, v)
    dlse = None if lse is None else jnp.asarray(inputs["dlse"], lse.dtype)
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    return results | dict(zip(("dq", "dk", "dv"), pull((jnp.asarray(inputs["dout"]), dlse)), strict=True))


def answer(case):
    """Run a case and return the message that answers it."""
    try:
        inputs = load_file(case["inputs"])
        began = time.process_time()
        results = {name: np.ascontiguousarray(array) for name, array in results_of(case, inputs).items()}
        seconds = time.process_time() - began
        save_file(results, case["outputs"])
        return {"kind": "result", "case": case["case"], "seconds": seconds}
    except Unsupported as reason:
        return {"kind": "unsupported", "case": case["case"], "reason": str(reason)}
    except Exception as error:
        told = {"exception": type(error).__name__, "text": str(error), "traceback": traceback.format_exc()}
        return {"kind": "error", "case": case["case"], **told}


def main():
    """Say hello, and answer cases until bye. Standard output is kept for messages; what is printed goes to the log."""
    cases, messages = os.fdopen(os.dup(0), "r", encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def say(message):
        print(json.dumps(message), file=messages, flush=True)

    hello = {"kind": "hello", "protocol": 1, "name": NAME, "versions": VERSIONS}
    say({**hello, "capabilities": CAPABILITIES, "devices": ["cpu"]})
    for line in cases:
        message = json.loads(line)
        if message["kind"] == "bye":
            break
        say(answer(message))


if __name__ == "__main__":
    main()
