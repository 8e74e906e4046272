"""The same bits on processors other than this one, as far as one can be made to behave like another."""

import os
import subprocess
import sys

import by_address
import pytest
import test_ring_local

MODES = (
    {"MKL_CBWR": "COMPATIBLE"},
    {"ATEN_CPU_CAPABILITY": "default"},
    pytest.param({}, marks=pytest.mark.nightly),
    pytest.param({"MKL_CBWR": "AVX2"}, marks=pytest.mark.nightly),
)
PROGRAM = """
import test_ring_local as tests
tests.torch.set_num_threads(1)
for dtype, kernel in ("float32", "fused_cpu"), ("float64", "fused_cpu"), ("float64", "streaming"):
    for problem in tests.PROBLEMS[1:3]:
        changing = list(tests.changing(problem.replace(dtype=dtype), kernel))
        assert not changing, (problem, kernel, changing)
tests.test_only_the_inputs_that_require_a_gradient_get_one()
"""


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(mode.values()) or "as it is")
@pytest.mark.by_day(1)
def test_whatever_code_multiplies_the_same_inputs_give_the_same_bits(mode):
    """MKL and torch choose their code by processor; both can be told to take that of another one."""
    others = {name: value for name, value in os.environ.items() if name not in ("MKL_CBWR", "ATEN_CPU_CAPABILITY")}
    folders = {os.path.dirname(module.__file__) for module in (test_ring_local, by_address)}
    path = {"PYTHONPATH": os.pathsep.join([*sorted(folders), *sys.path])}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=others | path | mode, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
