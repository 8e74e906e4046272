"""Somebody's project, and what pytest says of it: in this process, or in one of its own where that is the point."""

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hunts import unexplained

ROOT = Path(__file__).resolve().parents[2]
MINIATURES = ROOT / "tests" / "miniatures"
NOT_A_PERSONS = ("PYTEST_", "CI")
"""Variables of the environment that the tests' own pytest or a CI service sets, and no person's shell has."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How pytest ended and what it said."""

    code: int
    out: str
    err: str

    def ended(self, name):
        """How a test ended, as `-v` has it: its id, or the end of it."""
        (word,) = re.findall(rf"{re.escape(name)}(?: <- \S+)? +(\w+)", self.out)
        return word

    def counts(self):
        """How many tests ended how, by the last line."""
        return {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", self.out.strip().splitlines()[-1])}


class Project:
    """A folder that is somebody's."""

    def __init__(self, folder):
        self.folder = folder

    def with_miniatures(self):
        """The project, with a right implementation and some that are not."""
        for name in ("right", "faulty_rings"):
            shutil.copy(MINIATURES / f"{name}.py", self.folder)
        return self

    def with_another_version_of(self, package):
        """The project, where a package is of a version that no adapter was written for, whatever is installed."""
        metadata = self.folder / "another" / f"{package.replace('-', '_')}-0.0.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.0.0\n")
        self.write(conftest="import os\nimport sys\n\nsys.path.insert(0, os.path.abspath('another'))\n")
        return self

    def write(self, **files):
        """Files by their name without `.py`."""
        for name, text in files.items():
            (self.folder / f"{name}.py").write_text(text, encoding="utf-8")

    def pytest(self, *arguments, folder=".", explain=False, **environment):
        """Run it in this process, which has torch already, by default without explanations of what it finds.

        Nothing of the project stays in the process.
        """
        out, err = io.StringIO(), io.StringIO()
        captured = (contextlib.redirect_stdout(out), contextlib.redirect_stderr(err))
        with self._alone(self.folder / folder, environment) as patch, captured[0], captured[1]:
            if not explain:
                unexplained(patch)
            code = pytest.main([str(word) for word in arguments])
        return Outcome(int(code), out.getvalue(), err.getvalue())

    @contextlib.contextmanager
    def _alone(self, folder, environment):
        """This process in that folder, with the project's modules in place of others of the same names."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            for name in [name for name in os.environ if name.startswith(NOT_A_PERSONS)]:
                patch.delenv(name)
            for name, value in {"COLUMNS": "200", **environment}.items():
                patch.setenv(name, value)
            patch.setattr(sys, "path", [str(folder), *sys.path])
            patch.setattr(sys, "dont_write_bytecode", True)
            for name in {path.stem for path in self.folder.rglob("*.py")} & set(sys.modules):
                patch.delitem(sys.modules, name)
            importlib.invalidate_caches()
            before = set(sys.modules)
            try:
                yield patch
            finally:
                for name in set(sys.modules) - before:
                    if str(getattr(sys.modules[name], "__file__", None)).startswith(str(self.folder)):
                        del sys.modules[name]

    def pytest_apart(self, *arguments, folder=".", **environment):
        """Run it in a process of its own."""
        return self.run(sys.executable, "-m", "pytest", *arguments, folder=folder, **environment)

    def run(self, *command, folder=".", **environment):
        """Run any command, in a folder of the project."""
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder / folder,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            # A person's shell, not the environment of the tests' own pytest; and lines as long as they are.
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(NOT_A_PERSONS)},
                "COLUMNS": "200",
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                **environment,
            },
        )
        return Outcome(ended.returncode, ended.stdout, ended.stderr)

    def events(self, name):
        """The events of a report."""
        return [json.loads(line) for line in (self.folder / name).read_text(encoding="utf-8").splitlines()]

    def junit(self, name):
        """The test cases of a JUnit file, by classname and name."""
        cases = ET.parse(self.folder / name).getroot().iter("testcase")
        return {(case.get("classname"), case.get("name")): case for case in cases}
