"""The ring is a product of its own: it trains where nothing of the suite is installed, and is quick to import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(60)

ABSENT = ("hypothesis", "pytest", "_pytest", "rich", "beartype", "jsonschema", "mpmath", "matplotlib")
"""What the suite and its tests need, and a training loop need not have."""

STEP = """
import torch
import torch.distributed as dist
from ringverify.ring import RingAttention, position_ids, ring_attention, shard, unshard

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
attend = RingAttention(group=dist.group.WORLD, sharding="zigzag", causal=True)
weight = torch.ones(4, 4, requires_grad=True)
x = shard(torch.randn(2, 7, 3, 4), group=dist.group.WORLD, sharding="zigzag") @ weight
out = unshard(attend(x, x, x), length=7, group=dist.group.WORLD, sharding="zigzag")
out.square().sum().backward()
assert weight.grad.isfinite().all()
assert position_ids(7).tolist() == list(range(7))
dist.destroy_process_group()
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Code in a fresh interpreter."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def without(modules: tuple[str, ...]) -> str:
    """Code that makes modules impossible to import."""
    return f"import sys\nsys.modules.update(dict.fromkeys({modules!r}))\n"


def test_a_training_step_needs_nothing_of_the_suite(tmp_path: Path) -> None:
    """Imports and a step, forward and backward, where hypothesis, pytest and rich cannot be imported."""
    ended = run(without(ABSENT) + STEP, str(tmp_path / "store"))
    assert ended.returncode == 0, ended.stderr


def test_a_module_that_is_missing_would_be_noticed() -> None:
    """The gate can close: the suite itself does not come through it."""
    ended = run(without(ABSENT) + "import ringverify.strategies")
    assert ended.returncode == 1
    assert "hypothesis" in ended.stderr


def test_importing_the_ring_imports_no_compiler_and_none_of_the_suite() -> None:
    """`torch._dynamo` alone takes seconds; whoever compiles has it already."""
    ended = run(
        "import sys\nimport torch\nbefore = set(sys.modules)\n"
        "from ringverify.ring import *\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    assert ended.returncode == 0, ended.stderr
    loaded = ended.stdout.split()
    assert "ringverify.ring.attention" in loaded
    heavy = {name for name in loaded if name.split(".")[0] in ABSENT or name.startswith(("torch._dynamo", "sympy"))}
    assert not heavy
    rooms = {name.split(".")[1] for name in loaded if name.startswith("ringverify.")}
    assert rooms <= {"ring", "implementation", "errors"}


def test_the_package_hands_out_what_a_training_loop_uses() -> None:
    """By one short name each, which `dir` shows; there is no other."""
    ended = run(
        "import ringverify.ring as ring\n"
        "print(*(getattr(ring, name).__module__ + '.' + name for name in ring.__all__))\n"
        "assert set(ring.__all__) <= set(dir(ring))\n"
        "from ringverify.ring import attend_to_me"
    )
    assert ended.stdout.split() == [
        "ringverify.ring.dilated.DilatedRingAttention",
        "ringverify.ring.module.RingAttention",
        "ringverify.ring.shards.position_ids",
        "ringverify.ring.attention.ring_attention",
        "ringverify.ring.sdpa.ring_sdpa",
        "ringverify.ring.shards.shard",
        "ringverify.ring.shards.unshard",
        "ringverify.ring.shards.unshard_from",
    ]
    assert "cannot import name 'attend_to_me' from 'ringverify.ring'" in ended.stderr
