"""The written worker of numpy with learned sinks; its argument names what is wrong with their gradient, if anything."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "ringverify" / "cli" / "workers"))

import numpy as np
import numpy_worker as worker

WAY = sys.argv[1]
worker.CAPABILITIES |= {"sinks": "partial" if WAY == "partial" else True}
PLAIN = worker.attend


def results_of(case, inputs):
    """Join the sinks where there are some, and return their gradient with the others."""
    sinks = inputs.get("sinks")

    def attend(case, q, k, v):
        out, lse = PLAIN(case, q, k, v)
        if sinks is None:
            return out, lse
        joined = np.logaddexp(lse, sinks.astype(lse.dtype)[:, None])
        share = np.exp(lse - np.where(np.isneginf(joined), 0, joined))
        return out * share.swapaxes(1, 2)[..., None].astype(out.dtype), joined

    out, lse = attend(case, *(inputs[name] for name in "qkv"))
    results = {"out": out, "lse": lse}
    if case["gradients"]:
        dout, dlse = inputs["dout"], inputs["dlse"]
        found = worker.gradients(case, *(inputs[name] for name in "qkv"), out, lse, dout, dlse)
        results |= zip(("dq", "dk", "dv"), found, strict=True)
        if sinks is not None and WAY != "missing":
            weight = np.where(np.isneginf(sinks)[:, None], 0, np.exp(sinks[:, None] - lse))
            dsinks = weight * (dlse - np.einsum("bihd,bihd->bhi", dout, out))
            results["dsinks"] = dsinks.sum(axis=(0, 2)).astype(np.float64 if WAY == "wide" else np.float32)
    return results


worker.results_of = results_of
if __name__ == "__main__":
    worker.main()
