"""The example that trains on a ring and in one process, shortened: as a script, under torchrun, and what it reports."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import EXAMPLES, ROOT, module_of, printed

from ringref.rounding import scaled_bound

EXAMPLE = EXAMPLES / "train.py"
STEPS = 4
SHORT = ("--steps", str(STEPS))

pytestmark = pytest.mark.timeout(100)


@pytest.fixture(scope="module")
def example() -> Any:
    """The example as a module."""
    return module_of(EXAMPLE)


def largest(text: str) -> float:
    """The difference that it reports."""
    found = re.search(r"^largest relative difference (\S+), \d+ eps$", text, re.MULTILINE)
    assert found is not None, text
    return float(found.group(1))


@pytest.fixture(scope="module")
def allowed(example: Any) -> float:
    """How far apart rounding may lead two float64 runs: what it does in float32, in the ratio of the units."""
    exact, coarse = example.train(STEPS), example.train(STEPS, dtype=torch.float32)
    return scaled_bound(max(abs(a - b) / a for a, b in zip(exact, coarse, strict=True)), "float32", "float64")


@pytest.mark.nightly
def test_four_ranks_and_one_process_have_one_loss_curve(allowed: float, tmp_path: Path) -> None:
    """Started as a script, with a picture."""
    picture = tmp_path / "curves.svg"
    text = printed(str(EXAMPLE), *SHORT, "--plot", str(picture))
    assert f"{STEPS} steps: loss 2.3793 to" in text
    assert "on 4 ranks" in text
    assert largest(text) <= allowed
    if importlib.util.find_spec("matplotlib") is None:
        assert "pip install 'ringverify[plots]'" in text
    else:
        assert picture.read_text(encoding="utf-8").count("<svg") == 1


@pytest.mark.nightly
def test_torchrun_gives_it_its_ranks(allowed: float) -> None:
    """Started by torchrun, without a picture."""
    text = printed("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLE), *SHORT)
    assert "on 2 ranks" in text
    assert largest(text) <= allowed


def test_the_picture_of_the_readme_is_there() -> None:
    """Small, text as text, and of no particular day."""
    picture = (ROOT / "docs" / "loss-curves.svg").read_text(encoding="utf-8")
    assert "4 ranks, zigzag" in picture
    assert "<dc:date>" not in picture
    assert len(picture) < 50_000
