"""`replay --snippet` writes a script that shows a failure without ringverify."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.check.casefile import CaseFile
from ringverify.cli.main import main
from ringverify.confirm.script import snippet
from ringverify.targets import load

pytestmark = pytest.mark.usefixtures("unexplained")

ROOT = Path(__file__).parents[2]
MINIATURES = ROOT / "tests" / "miniatures"
WRONG = {
    "faulty_rings.py:swapped_gradients": {"dk", "dv"},
    "ten_faults.py:grouped": {"out", "dq", "dk", "dv"},
    "ten_faults.py:own_gradients": {"dk", "dv"},
    "ten_faults.py:causal": {"out", "dq", "dk", "dv"},
}
"""What is wrong with each: plain, (batch, heads, …) with other value_dim, bfloat16 through lse, and zigzag."""


def shown(script, *, hidden):
    """The script run where some modules cannot be imported."""
    missing = script.parent / "not_installed"
    missing.mkdir()
    for name in hidden:
        text = f"raise ModuleNotFoundError('No module named {name}', name='{name}')\n"
        (missing / f"{name}.py").write_text(text)
    return subprocess.run(
        [sys.executable, script.name],
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(missing), *([] if hidden else [str(ROOT)])])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "target",
    ["ten_faults.py:grouped", *(pytest.param(one, marks=pytest.mark.nightly) for one in WRONG if "grouped" not in one)],
)
def test_a_snippet_shows_the_failure_where_ringverify_is_not_installed(target, tmp_path, capsys, monkeypatch):
    """It exits with 1, says which results are off, and imports nothing of the suite."""
    monkeypatch.chdir(tmp_path)
    only = ("--only", "gradients", "--max-examples", "60")
    assert main(["check", f"{MINIATURES / target}", *only]) == 1
    (case,) = (tmp_path / ".ringverify").glob("*.json")
    assert main(["replay", str(case), "--snippet", "shown.py"]) == 1
    told = capsys.readouterr().out
    assert "shows the violation without ringverify" in told
    assert "exactly the recorded bits" in told
    run = shown(tmp_path / "shown.py", hidden=("ringverify", "ringref"))
    assert run.returncode == 1, run.stderr
    *lines, last, _ = run.stdout.splitlines()
    off = {line.split()[2] for line in lines if "; 0 of " not in line}
    assert off
    assert off <= WRONG[target]
    assert {told.split()[0] for told in last.removeprefix("wrong: ").split(", ")} == off


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_a_snippet_shows_a_mean_that_is_off(tmp_path, capsys, monkeypatch):
    """`precision` is about all elements together: each alone is within what is allowed."""
    monkeypatch.chdir(tmp_path)
    assert main(["check", f"{MINIATURES / 'lenses.py:rounds_dq'}", "--only", "precision", "--max-examples", "4"]) == 1
    (case,) = (tmp_path / ".ringverify").glob("*.json")
    assert main(["replay", str(case), "--snippet", "shown.py"]) == 1
    capsys.readouterr()
    run = shown(tmp_path / "shown.py", hidden=("ringverify", "ringref"))
    assert run.returncode == 1, run.stderr
    means = [line for line in run.stdout.splitlines()[:-1] if "root mean square" in line]
    (off,) = (line for line in means if float(line.split()[7]) > float(line.split()[12]))
    assert off.startswith("all ranks dq")


RIGHT = f"{MINIATURES / 'right.py'}:attend"


def recorded(property, **fields):
    """A case file, as if that had failed."""
    case = Case(problem=Problem(query_length=2, key_lengths=(1,)), world_size=2, **fields)
    return CaseFile(
        target=RIGHT, property=property, world="simulated", device="cpu", case=case, after=(), digest="", summary="",
        made_with="",
    )  # fmt: skip


@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_a_snippet_holds_values_that_are_no_numbers(tmp_path):
    """Keys that nothing attends are NaN in some cases; this implementation knows no key lengths, and attends them."""
    written = tmp_path / "poisoned.py"
    written.write_text(snippet(recorded("isolation", values="poisoned"), load(RIGHT).capabilities).text)
    assert "nan" in written.read_text().split("INPUTS = ")[1].split("M = ")[0]
    run = shown(written, hidden=())
    assert run.returncode == 1, run.stderr
    assert "largest difference inf; 8 of 8 elements differ by more than allowed" in run.stdout, run.stderr


def test_a_snippet_takes_gradients_where_the_property_did():
    """What only fails in backward must not hide what a forward pass shows."""
    for property, gradients in (("forward", ""), ("lse", ""), ("gradients", "qkv"), ("isolation", "qkv")):
        text = snippet(recorded(property), load(RIGHT).capabilities).text
        assert f"\nWAYS = (('enable_grad', '{gradients}'),)" in text


def test_a_snippet_calls_in_every_mode_that_the_property_did():
    """In its order; the seed of the case says which inputs are frozen."""
    text = snippet(recorded("modes", seed=4), load(RIGHT).capabilities).text
    some = "('enable_grad', 'k'), ('enable_grad', 'qv')"
    every = f"('no_grad', ''), ('inference_mode', ''), {some}, ('enable_grad', 'qkv')"
    assert f"\nWAYS = ({every})" in text


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_a_snippet_of_what_lives_in_the_tool_says_that_it_needs_it(tmp_path, capsys, monkeypatch):
    """A mutant is part of ringverify: its script runs where that is installed."""
    monkeypatch.chdir(tmp_path)
    assert main(["check", "mutant:A9", "--only", "forward", "--max-examples", "20"]) == 1
    (case,) = (tmp_path / ".ringverify").glob("*.json")
    assert main(["replay", str(case), "--snippet", "shown.py"]) == 1
    assert "shows the violation with ringverify installed, where mutant:A9 lives" in capsys.readouterr().out
    run = shown(tmp_path / "shown.py", hidden=())
    assert run.returncode == 1, run.stderr
    assert any(line.split()[2] == "out" and "; 0 of " not in line for line in run.stdout.splitlines())
