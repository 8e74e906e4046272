"""The ranks of workers in torch: what each computes of its own rows comes back as one result."""

import subprocess
import sys

import pytest

from ringverify.environments import WORKERS

pytestmark = pytest.mark.timeout(60)

PROGRAM = """
import sys
sys.path.append(sys.argv[1])
import gloo_ranks
import numpy as np
import torch
import torch.distributed as dist

torch.set_num_threads(1)

def attend(case, number, q, k, v):
    rows = [number, 3 - number]
    keys = [torch.empty_like(k[:, rows]) for _ in range(2)]
    dist.all_gather(keys, k[:, rows].detach())
    assert torch.equal(torch.cat(keys, 1), k[:, [0, 3, 1, 2]])
    return rows, q[:, rows] * 2 + v[:, rows] * number

inputs = {name: np.random.rand(1, 4, 1, 2).astype(np.float16) for name in ("q", "k", "v", "dout")}

own = np.array([0, 1, 1, 0], np.float16)[None, :, None, None]  # the rank of each row
for names in ("qkv", ("q", "k", "v", "dout")):
    found = gloo_ranks.results_of(attend)({"world_size": 2}, {name: inputs[name] for name in names})
    right = {"out": inputs["q"] * 2 + inputs["v"] * own, "dq": inputs["dout"] * 2, "dv": inputs["dout"] * own}
    assert set(found) == ({"out"} if names == "qkv" else {"out", "dq", "dk", "dv"}), found.keys()
    for name, array in found.items():
        assert array.dtype == np.float16, array.dtype
        assert np.array_equal(array, right.get(name, 0 * inputs["k"])), name
print("right")
"""


def test_rows_of_ranks_make_one_result_and_gradients_are_summed():
    """In processes over gloo; without a cotangent nothing is differentiated, and what is not used has gradient 0."""
    run = subprocess.run([sys.executable, "-c", PROGRAM, str(WORKERS)], capture_output=True, text=True, check=False)
    assert run.stdout == "right\n", run.stderr
