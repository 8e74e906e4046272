"""The tree as it is handed over: no drawer for odds and ends, no path of one person's machine."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDERS = (".ci", ".github", "docs", "examples", "fixtures", "ringref", "ringverify", "tests")
TEXT = {"", ".cfg", ".json", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
DRAWERS = {"utils", "util", "helpers", "misc", "common"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|farm)/\w")


def files(root: Path) -> Iterator[Path]:
    """What is written by people: the folders of the project, and the files beside them."""
    places = [*root.glob("*"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    for path in sorted(places):
        if path.is_file() and path.suffix in TEXT and not {"__pycache__", ".git"} & set(path.parts):
            yield path


def drawers(root: Path) -> list[str]:
    """Files named for having no name."""
    return [str(path.relative_to(root)) for path in files(root) if DRAWERS & {path.stem, path.parent.name}]


def machine_paths(root: Path) -> list[str]:
    """Lines with a path that only one machine has."""
    return [
        f"{path.relative_to(root)}:{number}: {line.strip()}"
        for path in files(root)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]


@pytest.mark.parametrize("gate", [drawers, machine_paths])
def test_the_tree_is_as_it_should_be(gate):
    """The gates, on the whole tree."""
    assert gate(ROOT) == []
    assert sum(1 for _ in files(ROOT)) > 50


def test_the_gates_can_close(tmp_path):
    """A tree with one fault of each kind."""
    package = tmp_path / "ringverify" / "cases"
    package.mkdir(parents=True)
    (package / "utils.py").write_text("x = 1\n")
    (tmp_path / "README.md").write_text("Run /" + "home/somebody/ring/check.py, or /opt/check.\n")
    assert len(drawers(tmp_path)) == len(machine_paths(tmp_path)) == 1
