"""What every adapter says when it cannot run: one line that names the package, what was found and the way out."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from pathlib import Path

import pytest

from ringverify.errors import Inconclusive
from ringverify.peers.package import imported
from ringverify.targets import BUILT_IN, load

PEERS = [name for name in BUILT_IN if name.startswith("peer:")]
ADAPTERS = sorted({BUILT_IN[name].partition(":")[0] for name in PEERS})


@pytest.fixture(autouse=True)
def imported_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test imports the adapters itself."""
    for module in ADAPTERS:
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_the_module_of_the_right_version_is_returned() -> None:
    """pytest is here, at the version that it has."""
    version = importlib.metadata.version("pytest")
    assert imported("pytest", peer="peer:this", package="pytest", version=version) is pytest


def test_a_missing_package_is_told_with_the_command_that_installs_it() -> None:
    """The command is the adapter's where the extra does not install the package."""
    with pytest.raises(Inconclusive) as caught:
        imported("absent", peer="peer:this", package="no-such-package", version="1.0", install="pip install it")
    assert str(caught.value) == "peer:this needs the package no-such-package==1.0: pip install it"


def test_an_error_of_many_lines_becomes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may explain at length why it does not import."""
    (tmp_path / "talkative.py").write_text("raise RuntimeError('no device\\n  try another\\n')\n")
    monkeypatch.syspath_prepend(tmp_path)
    version = importlib.metadata.version("pytest")
    with pytest.raises(Inconclusive) as caught:
        imported("talkative", peer="peer:this", package="pytest", version=version)
    assert str(caught.value) == (
        f"peer:this needs the package pytest=={version}, which does not import: RuntimeError: no device try another"
    )


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_without_its_package_is_inconclusive(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was learned about the package: one line, and never a verdict."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(Inconclusive, match=rf"^{peer.rsplit(':', 1)[0]}[^\n]* needs the package [^\n]*: pip install"):
        load(peer)


@pytest.mark.parametrize("peer", PEERS)
def test_a_peer_of_another_version_is_inconclusive(peer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is declared was read from one version; another one is refused with both numbers."""
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "0.0.9999")
    with pytest.raises(Inconclusive, match=r"^[^\n]*==[^\n]*, found 0\.0\.9999: pip install [^\n]*$"):
        load(peer)


@pytest.mark.parametrize("module", ADAPTERS)
def test_an_adapter_says_what_its_package_claims_and_where(module: str) -> None:
    """What is declared is a claim about somebody's package: the docstring names the package's version."""
    tree = ast.parse((Path(__file__).parents[2] / f"{module.replace('.', '/')}.py").read_text())
    constants = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id.isupper()
        if isinstance(node.value, ast.Constant)
    }
    assert constants["PACKAGE"] in (docstring := ast.get_docstring(tree) or "")
    assert constants["VERSION"] in docstring
