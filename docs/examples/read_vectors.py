"""Read golden vectors with json and numpy alone, and hold an attention to what each rank should return."""

import json
import pathlib
import sys

import numpy as np

STORED = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def tensors(path):
    """Every tensor of a safetensors file by name, as float64."""
    data, found = path.read_bytes(), {}
    start = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = (start + offset for offset in entry["data_offsets"])
            values = np.frombuffer(data[begin:end], STORED[entry["dtype"]])
            if entry["dtype"] == "BF16":  # the first sixteen bits of a float32
                values = (values.astype("<u4") << 16).view("<f4")
            found[name] = values.astype("f8").reshape(entry["shape"])
    return found


folder, held = pathlib.Path(sys.argv[1]), 0
for vector in json.loads((folder / "index.json").read_text())["vectors"]:
    x = tensors(folder / vector["file"])
    for layout in vector["layouts"]:
        for queries, keys in zip(layout["queries"], layout["keys"], strict=True):
            q, k, v = x["q"][:, queries], x["k"][:, keys], x["v"][:, keys]  # what a rank is given; lse is (b, h, i)
            if queries and set(vector["flags"]) <= {"causal", "lse_gradient"}:  # what this attention is capable of
                scores = np.einsum("bihd,bjhd->bhij", q, x["k"]) * q.shape[-1] ** -0.5  # of all ranks' keys
                if vector["problem"]["causal"]:
                    scores[..., np.arange(scores.shape[-1]) > np.array(queries)[:, None]] = -np.inf
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                out = np.einsum("bhij,bjhd->bihd", weights / weights.sum(axis=-1, keepdims=True), x["v"])
                assert (abs(out - x["out"][:, queries]) <= x["allowed.accumulates.out"][:, queries]).all(), vector["id"]
                held += 1
print(f"{held} shards of the output are right")
