"""Reading a document as a user does: blocks of code and of commands, in order, in a folder of one's own."""

import dataclasses
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ringverify.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
GENERATED = {
    name for name in DOCUMENTS if re.search(r"^(Written|Generated) (by|from) ", (ROOT / name).read_text()[:400], re.M)
}
"""Written by the tool, with the commands that took minutes to hours; these are held to be commands, and not run."""

FENCE = re.compile(r"(?:<!-- (?P<name>.+?) -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`(ringverify [^`\n]+)`")
EXIT_CODE = re.compile(r"\s+#(?: exits with (\d+))?.*$")
ELSEWHERE = "…"
"""Stands for lines that a document leaves out."""

FEW, FEWER = ("--max-examples", "12"), ("--max-examples", "3")
"""Either ends a command that checks: the last one counts. Fewer where all properties are tried, and pass."""


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        document: where it is.
        language: what the fence says.
        name: the file that it is, if a comment above it says so; a text with a space in it is a file that others try.
        text: what is in it.
    """

    document: str
    language: str
    name: str | None
    text: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A line that begins with a prompt, the exit code that the document promises, and the output that it shows."""

    words: tuple[str, ...]
    code: int
    shown: tuple[str, ...]


def text_of(document):
    """A document."""
    return (ROOT / document).read_text(encoding="utf-8")


def blocks(document):
    """The fenced blocks of a document, in order."""
    return [Block(document, **found.groupdict()) for found in FENCE.finditer(text_of(document))]


def commands(block):
    """The commands of a console block."""
    found = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        code = EXIT_CODE.search(line)
        words = tuple(shlex.split(line[: code.start()] if code else line))
        found.append(Command(words, int((code and code.group(1)) or 0), tuple(line for line in shown if line.strip())))
    return found


def steady(text):
    """Without what differs from run to run and from machine to machine."""
    return re.sub(r" +\d+ examples? +[\d.]+ s +margin .*|residual \S+|-[0-9a-f]{8}\.json|shrunk .*", " … ", text)


def left_out(command):
    """Why a command is not run by these tests, or `None`."""
    for words, reason in NOT_RUN.items():
        if " ".join(command.words).startswith(words):
            return reason
    return None


NOT_RUN = {
    "pip install": "a fresh environment takes a minute; CI does it through the action",
    "pytest ": "tests/pytest_plugin/test_readme.py runs them in a project of their own",
    "ringverify vectors generate": "tests/vectors/test_vectors_documents.py runs it, where it writes nothing",
    "ringverify check program:": "tests/conformance/test_worker.py runs it, by the interpreter that the tests have",
    "make verify": "it checks our ring and a published package; tests/conformance checks both",
    "make test": "it is what runs these tests",
    "make nightly": "it is what runs the tests that take long",
    "ringverify check ring --suite scale": "tests/conformance/test_scale_suite.py runs it, with its own properties",
    "ringverify bench --length 8192": "takes minutes; tests/bench runs it small",
}


def cheap(command):
    """The same command on fewer examples, on two properties where all are checked and none is shown, on fewer ranks."""
    program, *rest = words = command.words
    few = FEW if "--only" in words else FEWER if command.shown else (*FEWER, "--only", "forward,gradients")
    if program == "torchrun":
        place = rest.index("--nproc-per-node") + 1
        rest = [*rest[:place], "2", *rest[place + 1 :]]
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *rest, *few]
    if program == "python":
        return [sys.executable, *rest]
    if words[:3] == ("ringverify", "vectors", "check"):
        return [*words, "--only", "V001,V013"]
    return [*words, *few] if words[:2] == ("ringverify", "check") else list(words)


class Reader:
    """Does what a document says, in an empty folder that has the project's `docs` and `fixtures`."""

    def __init__(self, folder, capfd):
        self.folder, self._capfd, self._names = folder, capfd, {}
        for name in ("docs", "fixtures"):
            (folder / name).symlink_to(ROOT / name)

    def follow(self, document):
        """Every block: files are written, Python and commands are run; what is promised is asserted."""
        for block in blocks(document):
            if block.name is not None and " " not in block.name and not block.name.startswith("docs/"):
                (self.folder / block.name).write_text(block.text, encoding="utf-8")
            elif block.language == "python" and block.name is None:
                exec(compile(block.text, block.document, "exec"), self._names)
            elif block.language == "console":
                for command in commands(block):
                    self.run(command)

    def run(self, command):
        """One command; its exit code and the lines shown are those of the document."""
        if left_out(command) is not None:
            return
        words = cheap(command)
        if words[0] == "ringverify":
            self._capfd.readouterr()
            code = main(words[1:])
            out, err = self._capfd.readouterr()
        else:
            ended = subprocess.run(
                words,
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            code, out, err = ended.returncode, ended.stdout, ended.stderr
        assert code == command.code, f"{shlex.join(command.words)} ended with {code}\n{out}\n{err}"
        self._show(command, [line.rstrip() for line in steady(out).splitlines() if line.strip()])

    def _show(self, command, lines):
        """The lines are those of the document, in its order; between two of them others only where it says so."""
        said, anywhere = shlex.join(command.words), True
        for line in map(str.rstrip, steady("\n".join(command.shown)).splitlines()):
            if line.strip() == ELSEWHERE:
                anywhere = True
                continue
            assert line in lines, f"{said} does not show\n{line}\nbut\n" + "\n".join(lines)
            assert anywhere or lines[0] == line, f"{said} shows\n{lines[0]}\nbefore\n{line}"
            lines, anywhere = lines[lines.index(line) + 1 :], False


@pytest.fixture
def reader(tmp_path, monkeypatch, capfd):
    """A reader in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")  # what is shown is as wide as a terminal is where nobody made it wider
    monkeypatch.setattr(sys, "path", list(sys.path))
    return Reader(tmp_path, capfd)
