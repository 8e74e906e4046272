"""The vectors come along with an installed package: no clone of the repository is needed to check them."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]
BUILT_OF = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "ringref", "ringverify", "fixtures")
BUILD = "from setuptools import build_meta; build_meta.build_wheel('dist')"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The folder of the packages, as pip would unpack them."""
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for name in BUILT_OF:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    (source / "dist").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = (source / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(site)
    return site


@pytest.mark.nightly
def test_vectors_are_checked_from_an_installed_package(installed, tmp_path):
    """In an empty folder: the files are found, complete and unedited, and the oracle reproduces their results."""
    ended = subprocess.run(
        [sys.executable, "-m", "ringverify", "vectors", "check", "--only", "V001,V013"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"2 vectors in {installed}" in ended.stdout


def test_what_is_installed_is_what_lies_beside_the_packages(installed):
    """Every vector, the index and its schema."""
    there = installed / "ringverify" / "vectors" / "fixtures"
    for path in (ROOT / "fixtures").iterdir():
        assert (there / path.name).read_bytes() == path.read_bytes()
