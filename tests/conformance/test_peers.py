"""Published packages in environments of their own: listed, installed from a package index in a folder, and checked."""

import ast
import zipfile
from pathlib import Path

import pytest
from command_line import assert_one_line

from ringverify import environments, targets
from ringverify.describing import describe
from ringverify.environments import PACKAGES, PublishedPackage

pytestmark = pytest.mark.timeout(240)

ROOT = Path(__file__).resolve().parents[2]
WORKER = """
import json, tiny
print(json.dumps({"kind": "hello", "protocol": 1, "name": "peer:tiny", "capabilities": {}, "versions": tiny.VERSIONS}))
"""


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """The one package that is known: it needs 1.0 of itself, which is the one in the index. Nothing is downloaded."""
    workers, index = tmp_path / "workers", tmp_path / "index"
    workers.mkdir()
    index.mkdir()
    (workers / "tiny.txt").write_text("tiny==1.0\n")
    (workers / "tiny_worker.py").write_text(WORKER)
    with zipfile.ZipFile(index / "tiny-1.0-py3-none-any.whl", "w") as wheel:
        about = "tiny-1.0.dist-info"
        wheel.writestr("tiny.py", "import sys\nVERSIONS = {'tiny': '1.0', 'prefix': sys.prefix}\n")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    package = PublishedPackage("tiny", "1.0", "MIT", (("tiny", ()),))
    monkeypatch.setattr(environments, "WORKERS", workers)
    monkeypatch.setattr("ringverify.cli.peers.PACKAGES", (package,))
    monkeypatch.setattr(environments, "PACKAGES", (package,))
    monkeypatch.setattr(environments, "ELSEWHERE", {"peer:tiny": package})
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    return workers / "tiny.txt"


def test_a_package_is_installed_once_and_its_target_runs_there(tiny, ringverify):
    """With the interpreter and the packages of its own environment; other pins want another installation."""
    assert ringverify("peers").out.endswith("  is not installed: ringverify peers install tiny\n")
    outcome = ringverify("check", "peer:tiny")
    assert outcome.code == 3
    assert_one_line(outcome.err, ["peer:tiny is not installed: ringverify peers install tiny"])
    outcome = ringverify("peers", "install", "peer:tiny", "tiny")
    assert (outcome.code, outcome.out) == (
        0,
        "installing tiny 1.0 in .ringverify/peers/tiny\n  ringverify check peer:tiny\n",
    )
    home = ringverify.folder / ".ringverify" / "peers" / "tiny"
    assert describe("peer:tiny").function.hello.versions == {"tiny": "1.0", "prefix": str(home)}
    assert ringverify("peers").out.endswith("in its own environment  is here\n")
    tiny.write_text("tiny==2.0\n")
    assert (
        "tiny is installed, but not as pinned today: ringverify peers install tiny"
        in ringverify("check", "peer:tiny").err
    )


@pytest.mark.parametrize(
    ("pinned", "variables", "words"),
    [
        ("tiny==2.0", {}, "tiny==2.0 is gone from the package index, which has 1.0"),
        ("large==1.0", {}, "large==1.0 is not in the package index"),
        (
            "large==1.0",
            {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
            "large==1.0 cannot be downloaded: no network, or the package index does not answer",
        ),
        (
            "tiny==2.0",
            {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/simple"},
            "tiny==2.0 cannot be downloaded: no network, or the package index does not answer",
        ),
        ("not a requirement", {}, "Invalid requirement: 'not a requirement'"),
    ],
)
def test_an_environment_that_cannot_be_made_names_the_requirement(
    tiny, ringverify, monkeypatch, pinned, variables, words
):
    """In one line, and nothing half-made is left."""
    tiny.write_text(f"{pinned}\n")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    outcome = ringverify("peers", "install", "tiny")
    assert outcome.code == 3
    assert_one_line(outcome.err, [f"no environment for tiny could be made: {words}"])
    assert not (ringverify.folder / ".ringverify" / "peers" / "tiny").exists()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ejkernl", "unknown peer 'ejkernl'; did you mean 'ejkernel'?"),
        ("peer:tokamax-rings", "did you mean 'tokamax-ring'?"),
        ("yunchang", "yunchang runs in this environment: pip install yunchang==0.6.4"),
    ],
)
def test_a_wrong_name_is_one_line(ringverify, name, words):
    """The nearest name, or how else the package is installed."""
    outcome = ringverify("peers", "install", name)
    assert outcome.code == 2
    assert_one_line(outcome.err, [words])
    assert not (ringverify.folder / ".ringverify").exists()


def test_a_mistyped_target_of_an_environment_is_told_the_nearest(ringverify):
    """As for those that are imported."""
    outcome = ringverify("check", "peer:ringatention")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["did you mean 'peer:ringattention'?"])


def test_what_is_listed_is_what_adapters_and_pins_say():
    """One version a package, in the table, in its adapter, and in the requirements of its environment."""
    adapters = [
        {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(path.read_text()).body
            if _constant(node)
        }
        for path in sorted((ROOT / "ringverify" / "peers").glob("*.py"))
    ]
    written = {one["PACKAGE"]: one["VERSION"] for one in adapters if "PACKAGE" in one}
    assert {one.name: one.version for one in PACKAGES if not one.targets} == written
    for package in PACKAGES:
        if package.targets:
            pins = package.requirements.read_text().splitlines()
            assert f"{package.name}=={package.version}" in pins
            assert all("==" in pin or pin.startswith("--") for pin in pins)
            assert package.worker.is_file()
            assert not any(f"peer:{name}" in targets.BUILT_IN for name, _ in package.targets)


def _constant(node):
    """Whether a statement of a module gives a text a name of its own."""
    return (
        isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.targets[0], ast.Name)
    )
