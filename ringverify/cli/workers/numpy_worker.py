"""A worker for ringverify: answers cases in a process of its own. Needs numpy and safetensors.

Put your own code into `attend` and `gradients`, declare in CAPABILITIES what it supports, and run:
  ringverify check 'program: python worker.py'
What is printed here goes to ringverify's log. The protocol is described in ringverify's docs/worker.md.
"""

import json
import os
import time
import traceback

import numpy as np
from safetensors.numpy import load_file, save_file

NAME = os.path.basename(__file__)
VERSIONS = {"numpy": np.__version__}
CAPABILITIES = {"sharding": "zigzag", "dtypes": ["float32", "float64"], "lse": True, "lse_gradient": True}
CAPABILITIES |= {"value_dim": True, "scale": True, "uneven": True, "empty_shards": True}


class Unsupported(Exception):
    """Raise this with a reason for a case that your code does not run."""


# -- yours -------------------------------------------------------------------------------------------------------------


def attend(case, q, k, v):
    """Return out and lse (None if not declared) of all positions, in the layout of q; lse is (batch, heads, queries).

    `case["positions"][rank]` are the queries that a rank holds, and `case["key_positions"][rank]` its keys.
    """
    batch, length, heads, _ = q.shape
    out, lse = np.zeros((*q.shape[:3], v.shape[3]), q.dtype), np.zeros((batch, heads, length), q.dtype)
    for rows in case["positions"]:  # each rank
        sums, logs = np.zeros_like(out[:, rows]), np.full_like(lse[:, :, rows], -np.inf)
        for keys in case["key_positions"]:  # each KV block that comes by
            scores = scores_of(case, q[:, rows], k[:, keys], rows, keys)
            new = np.logaddexp(logs, logsumexp(scores))
            safe = np.where(np.isneginf(new), 0, new)
            sums *= np.exp(logs - safe).swapaxes(1, 2)[..., None]
            sums += np.einsum("bhij,bjhd->bihd", np.exp(scores - safe[..., None]), v[:, keys])
            logs = new
        out[:, rows], lse[:, :, rows] = sums, logs
    return out, lse


def gradients(case, q, k, v, out, lse, dout, dlse):
    """Return dq, dk and dv for the cotangents dout and dlse, in the layouts of q, k and v."""
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    safe = np.where(np.isneginf(lse), 0, lse)
    delta = np.einsum("bihd,bihd->bhi", dout, out) - dlse
    for rows in case["positions"]:
        for keys in case["key_positions"]:
            scores = scores_of(case, q[:, rows], k[:, keys], rows, keys)
            p = np.exp(scores - safe[:, :, rows, None])
            dp = np.einsum("bihd,bjhd->bhij", dout[:, rows], v[:, keys])
            ds = p * (dp - delta[:, :, rows, None]) * case["problem"]["scale"]
            dq[:, rows] += np.einsum("bhij,bjhd->bihd", ds, k[:, keys])
            dk[:, keys] += np.einsum("bhij,bihd->bjhd", ds, q[:, rows])
            dv[:, keys] += np.einsum("bhij,bihd->bjhd", p, dout[:, rows])
    return dq, dk, dv


def scores_of(case, q, k, rows, keys):
    """Return the scores of some queries and keys, -inf where the mask excludes a key."""
    scores = np.einsum("bihd,bjhd->bhij", q, k) * np.asarray(case["problem"]["scale"], q.dtype)
    if case["problem"]["causal"]:
        allowed = np.array(keys, int)[None, :] <= np.array(rows, int)[:, None]
        scores = np.where(allowed, scores, np.asarray(-np.inf, q.dtype))
    return scores


def logsumexp(scores):
    """Return the logarithm of the sum of exponentials over the last axis; -inf where nothing is summed."""
    top = scores.max(axis=-1, initial=-np.inf)
    safe = np.where(np.isneginf(top), 0, top)
    with np.errstate(divide="ignore"):
        return safe + np.log(np.exp(scores - safe[..., None]).sum(axis=-1))


# -- the protocol ------------------------------------------------------------------------------------------------------


def results_of(case, inputs):
    """Return the results of a case by name."""
    out, lse = attend(case, inputs["q"], inputs["k"], inputs["v"])
    results = {"out": out} if lse is None else {"out": out, "lse": lse}
    if case["gradients"]:
        found = gradients(case, *(inputs[name] for name in "qkv"), out, lse, inputs["dout"], inputs["dlse"])
        results |= zip(("dq", "dk", "dv"), found, strict=True)
    return results


def answer(case):
    """Run a case and return the message that answers it."""
    try:
        inputs, before = load_file(case["inputs"]), load_file(case["inputs"])
        began = time.process_time()
        results = results_of(case, inputs)
        seconds = time.process_time() - began
        changed = [name for name in before if not np.array_equal(inputs[name], before[name], equal_nan=True)]
        save_file({name: np.ascontiguousarray(array) for name, array in results.items()}, case["outputs"])
        return {"kind": "result", "case": case["case"], "seconds": seconds, "changed": changed}
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
    say({**hello, "capabilities": CAPABILITIES, "devices": ["cpu"], "reports_changes": True})
    for line in cases:
        message = json.loads(line)
        if message["kind"] == "bye":
            break
        say(answer(message))


if __name__ == "__main__":
    main()
