"""The jobs that docs/ci.md shows, run as a runner would, for a project that has to be installed to be found."""

import shutil
import sys
import sysconfig
import venv

import pytest
import yaml
from report_lines import report_lines
from steps import ROOT, document, run

pytestmark = pytest.mark.timeout(400)

ACTION = document("action.yml")
FEWER = {"only": "forward", "max-examples": "2"}
HERE = {"cpu": {}, "gpus": {"nproc": "2", "world": "gloo"}}
"""By job: what is another input where there is no GPU."""


@pytest.fixture
def offline():
    """Variables of a runner: pip has no index, and what a project depends on is importable as it is here."""
    paths = sysconfig.get_paths()
    return {
        "PYTHONPATH": f"{paths['purelib']}:{paths['platlib']}",  # where editable installs are not looked for
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as the value of "build isolation"
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


@pytest.fixture
def runner(tmp_path, offline):
    """The same with `python3`, and with a `python` in which ringverify is not installed."""
    venv.create(tmp_path / "runner", symlinks=True)
    programs = {"python3": sys.executable, "python": str(tmp_path / "runner/bin/python")}
    (tmp_path / "bin").mkdir()
    for name, program in programs.items():
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    return {**offline, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}


@pytest.fixture
def action(tmp_path):
    """The action where a runner has it; pip builds within."""
    folder = tmp_path / "action"
    for name in ("ringref", "ringverify"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture
def project(tmp_path):
    """Somebody's project, whose package cannot be imported from its top."""
    folder = tmp_path / "project"
    (folder / "src/my_package").mkdir(parents=True)
    (folder / "src/my_package/__init__.py").touch()
    shutil.copy(ROOT / "docs/examples/my_ring.py", folder / "src/my_package/ring.py")
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "my_package"\nversion = "1"\n'
    )
    return folder


def shown_jobs():
    """The jobs of docs/ci.md."""
    text = (ROOT / "docs/ci.md").read_text(encoding="utf-8")
    return yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])["jobs"]


def test_every_job_that_is_shown_is_run_here():
    """None is forgotten."""
    assert set(shown_jobs()) == set(HERE)


@pytest.mark.parametrize("job", ["cpu", pytest.param("gpus", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_a_job_that_is_shown_installs_the_project_and_checks_it(job, project, action, runner):
    """Word for word, but on few examples; what it installs is what is checked."""
    steps = shown_jobs()[job]["steps"]
    prepared = run([step for step in steps if "run" in step], {}, project, environment=runner, timeout=200)
    assert set(prepared.codes.values()) <= {0}, prepared.out
    (given,) = [step["with"] for step in steps if "OWNER/ringverify" in step.get("uses", "")]
    inputs = {name: told.get("default", "") for name, told in ACTION["inputs"].items()} | given | FEWER | HERE[job]
    known = {"github.action_path": str(action), **{f"inputs.{name}": value for name, value in inputs.items()}}
    ran = run(ACTION["runs"]["steps"], known, project, environment=runner, timeout=200)
    assert ran.codes == {"Install": 0, "Check": 0}, ran.out
    (verdict,) = [one for one in report_lines(project / inputs["folder"] / "report.jsonl") if one.get("world")]
    assert (verdict["implementation"], verdict["verdict"]) == ("my_package.ring.attend", "conformant")
