"""What the documents say is what the code does."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
from pathlib import Path

import pytest

from ringverify.cli import _parser, main
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import BUILT_IN

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Every `ringverify` command line that the README shows."""
    return sorted(set(re.findall(r"(?:^\$ |`)(ringverify [^`\n]+)", README, re.MULTILINE)))


@pytest.mark.parametrize("name", ["my_ring", "wrong_ring"])
def test_the_readme_shows_the_examples_as_they_are(name):
    """The code block and the file are the same text."""
    shown = re.search(rf"<!-- docs/examples/{name}.py -->\n```python\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    assert shown.group(1) == (ROOT / f"docs/examples/{name}.py").read_text(encoding="utf-8")


@pytest.mark.timeout(120)
def test_the_wrong_ring_gets_the_diagnosis_that_the_readme_shows(monkeypatch, tmp_path, capfd):
    """Word for word, but for seconds, digits of rounding, and which case is drawn before it is shrunk."""
    shown = re.search(r"\$ ringverify (check docs/examples/wrong_ring.py.*?)\n(.*?)```", README, re.DOTALL)
    assert shown is not None
    (tmp_path / "docs" / "examples").mkdir(parents=True)
    shutil.copy(ROOT / "docs/examples/wrong_ring.py", tmp_path / "docs" / "examples")
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(shown.group(1))) == 1
    assert _steady(shown.group(2)) in _steady(capfd.readouterr().out)


def _steady(text: str) -> str:
    """Without what differs from run to run and from machine to machine."""
    return re.sub(r" +\d+ examples +[\d.]+ s +margin .*|residual \S+|-[0-9a-f]{8}\.json|shrunk .*", " … ", text)


def test_the_example_gets_its_verdict(monkeypatch, tmp_path):
    """The plug-in of the README is conformant in both worlds."""
    monkeypatch.chdir(ROOT)
    for world in ("simulated", "gloo"):
        arguments = ["check", "docs/examples/my_ring.py:attend", "--max-examples", "12", "--world", world]
        assert main([*arguments, "--world-sizes", "1,2,3", "--cases", str(tmp_path)]) == 0


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_readme_is_one(command):
    """Options and commands exist, and named targets and properties are known."""
    words = shlex.split(command)[1:]
    if words[0] == "replay":
        assert _parser().parse_args(["replay", "FILE"])
        return
    options = _parser().parse_args([word for word in words if word != "FILE"])
    for target in getattr(options, "targets", ()):
        assert target in BUILT_IN or (ROOT / target.split(":")[0]).is_file()
    for name in getattr(options, "only", None) or ():
        assert name in PROPERTIES


def test_the_readme_lists_every_capability_and_every_property():
    """The tables are complete: nothing can be declared or judged that they do not name."""
    declared = README.split("## What you declare")[1].split("## What must hold")[0]
    for field in dataclasses.fields(Capabilities):
        assert f"`{field.name}`" in declared, field.name
    judged = README.split("## What must hold")[1].split("## Where ranks run")[0]
    assert re.findall(r"^\| `(\w+)` \|", judged, re.MULTILINE) == list(PROPERTIES)


def test_the_documents_name_files_that_exist():
    """Paths in README and CONTRIBUTING lead somewhere."""
    for name in ("README.md", "CONTRIBUTING.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        for path in re.findall(r"`((?:ringref|ringverify|tests|docs)/[\w./-]+)`", text):
            assert (ROOT / path).exists(), (name, path)
