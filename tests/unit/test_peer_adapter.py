"""The adapter of ring-attention-pytorch: what it says when it cannot run, and that it translates faithfully.

Whether the package computes attention is for a check to say, not for these tests: they look at the forward pass.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys

import pytest

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.comparing import worst
from ringverify.cases.running import Runner
from ringverify.errors import Inconclusive
from ringverify.targets import load
from ringverify.worlds.processes.gloo import GlooWorld

MODULE = "ringverify.peers.ring_attention_pytorch"
TARGET = "peer:ring-attention-pytorch"
NOT_HERE = f"{TARGET} cannot be checked here: {TARGET} needs"


@pytest.fixture(autouse=True)
def imported_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test imports the adapter itself."""
    monkeypatch.delitem(sys.modules, MODULE, raising=False)


def test_a_missing_package_is_told_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was learned about the package: inconclusive, one line."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Inconclusive) as caught:
        load(TARGET)
    assert str(caught.value) == (
        f"{NOT_HERE} the package ring-attention-pytorch==0.5.20: pip install 'ringverify[peers]'"
    )


def test_another_version_is_not_taken_for_the_one_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is declared was read from one version; another one is refused with both numbers."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.6.0")
    with pytest.raises(Inconclusive) as caught:
        load(TARGET)
    assert str(caught.value) == (
        f"{NOT_HERE} the package ring-attention-pytorch==0.5.20, found 0.6.0: pip install 'ringverify[peers]'"
    )


def test_a_package_that_does_not_import_is_told_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation is no verdict either."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.5.20")
    monkeypatch.setitem(sys.modules, "ring_attention_pytorch", None)
    with pytest.raises(Inconclusive, match=r"^[^\n]*which does not import: ModuleNotFoundError: [^\n]*$"):
        load(TARGET)


def test_peers_can_be_listed_without_their_packages() -> None:
    """Importing the room imports neither an adapter nor a package."""
    program = "import sys, ringverify.peers; print([name for name in sys.modules if 'ring_attention' in name])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.timeout(60)
def test_heads_masks_and_softcap_are_translated() -> None:
    """Grouped heads, which the package counts the other way round, come out right on every rank, masked and capped."""
    pytest.importorskip("ring_attention_pytorch", reason="needs the extra: pip install 'ringverify[peers]'")
    attend = load(TARGET)
    world = GlooWorld()
    runner = Runner(attend, world, target=TARGET)
    try:
        for world_size in (1, 2):
            for causal, softcap in ((False, None), (True, None), (True, 2.0)):
                problem = Problem(
                    batch=2, query_length=8, heads=6, key_heads=2, head_dim=5, causal=causal, softcap=softcap
                )
                case = Case(problem=problem, world_size=world_size)
                observation = runner.run(case, gradients=False)
                assert observation.failure is None, observation.failure.detail
                margin, finding = worst(case, attend.capabilities, observation, ("out",))
                assert finding is None
                assert margin > 0
    finally:
        world.close()
