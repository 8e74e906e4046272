"""`replay --snippet` writes a script that shows a failure without ringverify."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringverify.cli import main

FAULTY = Path(__file__).parent.parent / "miniatures" / "faulty_rings.py"


@pytest.mark.timeout(240)
def test_a_snippet_shows_the_failure_where_ringverify_is_not_installed(tmp_path, capsys, monkeypatch):
    """It exits with 1, says which results are off, and imports nothing of the suite."""
    monkeypatch.chdir(tmp_path)
    assert main(["check", f"{FAULTY}:swapped_gradients", "--only", "gradients", "--max-examples", "40"]) == 1
    (case,) = (tmp_path / ".ringverify").glob("*.json")
    assert main(["replay", str(case), "--snippet", "shown.py"]) == 1
    assert "without ringverify" in capsys.readouterr().out
    missing = tmp_path / "not_installed"
    missing.mkdir()
    for name in ("ringverify", "ringref"):
        text = f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n"
        (missing / f"{name}.py").write_text(text)
    shown = subprocess.run(
        [sys.executable, "shown.py"],
        env={**os.environ, "PYTHONPATH": str(missing)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 1, shown.stderr
    lines = {line.split()[2]: line for line in shown.stdout.splitlines()}
    assert "allowed in 0 of" in lines["out"]
    assert "allowed in 0 of" in lines["dq"]
    assert "allowed in 0 of" not in lines["dk"]
