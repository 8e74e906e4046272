"""What docs/vectors.md says is so: its commands run, its tables are complete, its reader reads."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringverify.cases import tensorfile
from ringverify.cli.main import main
from ringverify.vectors import generating, making
from ringverify.vectors.catalogue import STORIES, bugs
from ringverify.vectors.generating import encoded
from ringverify.vectors.story import flags, layout_flags

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "vectors.md").read_text(encoding="utf-8")
READER = ROOT / "docs" / "examples" / "read_vectors.py"
MOST_LINES = 40

pytestmark = pytest.mark.timeout(120)


def commands() -> list[str]:
    """Every command line that the page shows."""
    return re.findall(r"^\$ ringverify (.+)$", PAGE, re.MULTILINE)


@pytest.mark.parametrize("command", commands())
@pytest.mark.by_day(1)
def test_every_command_of_the_page_succeeds(command, generated, monkeypatch, capsys, tmp_path) -> None:
    """As it stands, in a folder like the project's, whose vectors stay as they are. What is generated was so before."""
    monkeypatch.setattr(generating, "contents", lambda stories: generated)
    for name in ("docs", "fixtures"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = {path: path.stat().st_mtime_ns for path in (ROOT / "fixtures").iterdir()}
    assert main(shlex.split(command)) == 0, capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (ROOT / "fixtures").iterdir()} == before


def test_the_page_shows_every_action_of_the_command() -> None:
    """And no more commands than these are executed."""
    assert {command.split()[1] for command in commands()} == {"check", "generate"}
    assert len(commands()) == PAGE.count("$ ringverify")


def test_the_tables_are_complete() -> None:
    """Every flag and every tensor that occurs, and no flag that does not."""
    told = set(re.findall(r"`([\w:]+)`", PAGE.split("| flag |")[1].split("## ")[0]))
    occurring = {flag for story in STORIES.values() for flag in flags(story.problem, story.cotangent, story.values)}
    occurring |= {f for story in STORIES.values() for layout in story.layouts for f in layout_flags(story.case(layout))}
    assert occurring <= told
    assert told - occurring <= {"dlse", "out", "lse"}
    tensors = PAGE.split("| tensor |")[1].split("\n\n")[0]
    for name in {name for story in STORIES.values() for name in making.shapes(story)}:
        assert f"`{name}`" in tensors or f"`….{name.rpartition('.')[2]}`" in tensors


# -- the reader --------------------------------------------------------------------------------------------------------


def read(folder: Path) -> subprocess.CompletedProcess[str]:
    """The example on a folder, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-W", "error", READER, folder], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_reader_is_short_and_needs_numpy_alone() -> None:
    """Forty lines at most, and nothing of ours."""
    text = READER.read_text()
    assert text.count("\n") <= MOST_LINES
    assert set(re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)) == {"json", "pathlib", "sys", "numpy"}


def test_the_reader_finds_all_outputs_right(fixtures) -> None:
    """Hundreds of shards, of every sharding."""
    ended = read(fixtures)
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stdout.split()[0]) > 500


def test_the_reader_finds_an_output_that_is_wrong(tmp_path, fixtures) -> None:
    """It is more than a reader."""
    story = STORIES["V013"]
    tensors = making.make(story)
    wrong = tensors["out"].values.copy()
    wrong[0, 5] *= 1 + 2**-10
    (tmp_path / "V013.safetensors").write_bytes(
        encoded(story, tensors | {"out": tensors["out"]._replace(values=wrong)})
    )
    index = json.loads((fixtures / "index.json").read_text())
    index["vectors"] = [entry for entry in index["vectors"] if entry["id"] == "V013"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    ended = read(tmp_path)
    assert ended.returncode == 1
    assert "AssertionError: V013" in ended.stderr


def test_the_reader_reads_what_we_wrote(fixtures, monkeypatch) -> None:
    """The same numbers in every file, whatever their dtype."""
    monkeypatch.setattr(sys, "argv", [str(READER), str(fixtures)])
    namespace: dict[str, object] = {}
    definitions = READER.read_text().split("folder, held")[0]
    exec(compile(definitions, str(READER), "exec"), namespace)
    for path in fixtures.glob("*.safetensors"):
        ours, _ = tensorfile.decode(path.read_bytes())
        theirs = namespace["tensors"](path)
        assert set(theirs) == set(ours)
        for name, tensor in ours.items():
            np.testing.assert_array_equal(theirs[name], tensor.values)


def test_the_folder_tells_its_story(fixtures) -> None:
    """A row a vector, and every bug with its source in the index."""
    told = (fixtures / "README.md").read_text()
    for story in STORIES.values():
        assert f"| {story.id} | {story.topic} | {story.title} | {story.note} |" in told
    assert json.loads((fixtures / "index.json").read_text())["bugs"] == bugs(STORIES)
