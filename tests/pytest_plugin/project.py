"""Somebody's project, and what pytest says of it, run as a process of its own."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MINIATURES = ROOT / "tests" / "miniatures"


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

    def pytest(self, *arguments, folder=".", **environment):
        """Run it."""
        return self.run(sys.executable, "-m", "pytest", *arguments, folder=folder, **environment)

    def run(self, *command, folder=".", **environment):
        """Run any command, in a folder of the project."""
        ended = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder / folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            # A person's shell, not the environment of the tests' own pytest; and lines as long as they are.
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CI"))},
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
