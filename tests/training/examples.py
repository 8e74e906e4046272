"""The examples of the documents that are programs: as modules, and in processes of their own."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def module_of(example: Path) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(f"{example.stem}_example", example)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(*command: str) -> str:
    """What a command of Python prints."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
