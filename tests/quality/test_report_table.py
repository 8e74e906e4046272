"""The tables that point from reports to tests, and from features to commands, lead somewhere."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "field-reports.md").read_text(encoding="utf-8")
RING = (ROOT / "docs" / "ring.md").read_text(encoding="utf-8")
FEATURES = (
    "bucket size", "precision", "ring size", "fused kernels", "checkpointing", "overlap", "one device",
)  # fmt: skip
"""What was recommended and never built."""


def rows(text: str) -> dict[str, list[str]]:
    """The test ids of each row of the table."""
    found = re.findall(r"^\| (R\d+) \| [^|]+ \| ([^|]*)\|$", text, re.MULTILINE)
    return {row: re.findall(r"`([^`]+)`", held) for row, held in found}


def missing(test: str) -> str | None:
    """Why a test id leads nowhere."""
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file():
        return f"{path}: no such file"
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    return None if name in names else f"{test}: no such test"


def test_every_report_points_to_tests_that_exist() -> None:
    """R1 to R16, in order, each with a test at least."""
    held = rows(TABLE)
    assert list(held) == [f"R{number}" for number in range(1, 17)]
    assert [row for row, tests in held.items() if not tests] == []
    assert [reason for tests in held.values() for test in tests if (reason := missing(test))] == []


def test_a_test_that_is_gone_is_noticed() -> None:
    """The gate can close: a file, a function, a row without any."""
    assert missing("tests/quality/test_gone.py::test_it") == "tests/quality/test_gone.py: no such file"
    assert missing("tests/quality/test_report_table.py::test_gone") is not None
    assert missing("tests/quality/test_report_table.py::test_a_test_that_is_gone_is_noticed") is None
    assert rows("| R1 | something | |\n") == {"R1": []}


def commands() -> dict[str, str]:
    """Each feature of the ring's table, and the command that shows it."""
    table = RING.split("| feature |")[1].split("\n\n")[0]
    return dict(re.findall(r"^\| ([^|]+?) \| [^|]+ \| `([^`|]+)` \|$", table, re.MULTILINE))


def test_every_feature_has_its_row() -> None:
    """The seven that were recommended."""
    assert len(commands()) >= len(FEATURES)
    for feature in FEATURES:
        assert any(feature in row for row in commands()), feature


@pytest.mark.nightly
@pytest.mark.timeout(60)
@pytest.mark.parametrize("feature", [row for row, command in commands().items() if command.startswith("python ")])
def test_every_feature_is_shown_by_a_command_that_runs(feature: str) -> None:
    """Scripts are run as the table has them; `pytest` and `ringverify` commands are held to exist elsewhere."""
    words = shlex.split(commands()[feature])
    if "train.py" in words[1]:
        pytest.skip("tests/training/test_example.py runs it")
    ended = subprocess.run(
        [sys.executable, *words[1:]], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "bytes at the peak" in ended.stdout


@pytest.mark.parametrize("feature", [row for row, command in commands().items() if command.startswith("pytest ")])
def test_every_test_that_shows_a_feature_exists(feature: str) -> None:
    """Its file, and its function where one is named."""
    target = shlex.split(commands()[feature])[1]
    assert (missing(target) if "::" in target else None) is None
    assert (ROOT / target.partition("::")[0]).exists()
