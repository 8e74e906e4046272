"""The workflows and the action are what GitHub reads: by its schemas, by two linters, and by what they refer to."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from steps import EXPRESSION, ROOT, document, run, steps_of, workflows
from yamllint import linter
from yamllint.config import YamlLintConfig

pytestmark = pytest.mark.timeout(120)

ALL = ["action.yml", *workflows()]
BUILT_IN_NAMES = {"github.action_path", "github.ref", "github.run_id", "vars.GPU_RUNNER", "vars.TORCH_CPU_INDEX"}
RUN_ELSEWHERE = {".venv/bin/ringverify doctor": "README shows it, so its commands are run with those of the documents"}
NOT_RUN_HERE = {
    "make test PYTHON=python": "it is what runs this test",
    "make suite PYTHON=python": "it is what runs this test, with other versions",
    "make nightly PYTHON=python": "it is what runs this test, which is one of a night's",
    "make install PYTHON=python": "it installs packages; `make test` has just done so",
    "make install PYTHON=python3": "it installs packages; `make test` has just done so",
}


def invalid(content, schema):
    """What the schema has against a document."""
    file = files("check_jsonschema").joinpath("builtin_schemas", "vendor", f"{schema}.json")
    rules = json.loads(file.read_text(encoding="utf-8"))
    return [error.message for error in jsonschema.validators.validator_for(rules)(rules).iter_errors(content)]


def complaints_of_shellcheck(script):
    """What shellcheck says of a script."""
    program = shutil.which("shellcheck", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert program is not None, "shellcheck is not installed: pip install '.[test]'"
    command = [program, "--shell", "bash", "--format", "gcc", "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("path", ALL)
def test_the_schema_of_github_accepts_it(path):
    """With the schemas that check-jsonschema brings; a misspelt key is refused."""
    content, schema = document(path), "github-actions" if path == "action.yml" else "github-workflows"
    assert invalid(content, schema) == []
    steps = content["runs"]["steps"] if path == "action.yml" else next(iter(content["jobs"].values()))["steps"]
    steps[-1]["usess"] = steps[-1].pop("uses", None) or steps[-1].pop("run")
    assert invalid(content, schema) != []


@pytest.mark.parametrize("path", ALL)
def test_yamllint_has_nothing_to_say(path):
    """With the settings of the project."""
    settings = YamlLintConfig(file=str(ROOT / ".yamllint.yaml"))
    assert [str(problem) for problem in linter.run((ROOT / path).read_text(encoding="utf-8"), settings)] == []
    assert list(linter.run("a: 1\na: 2\n", settings)) != []


@pytest.mark.parametrize("path", ALL)
def test_shellcheck_has_nothing_to_say(path):
    """Of any step's commands; of a variable that is not quoted it has."""
    for _, step in steps_of(path):
        if "run" in step:
            assert complaints_of_shellcheck(step["run"]) == ""
    assert "SC2086" in complaints_of_shellcheck("rm $1\n")


@pytest.mark.parametrize("path", ALL)
def test_expressions_stay_out_of_commands(path):
    """What is filled into a command is run; what is handed over as a variable is not."""
    assert [step for _, step in steps_of(path) if EXPRESSION.search(step.get("run", ""))] == []


PINNED = re.compile(r"uses: (?:\./|[\w.-]+/[\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+)$")


def unpinned(text):
    """Lines that use somebody else's action by anything but a commit with its version beside it."""
    used = [line.strip() for line in text.splitlines() if re.match(r"\s*(?:- )?uses:", line)]
    return [line for line in used if not PINNED.search(line)]


@pytest.mark.parametrize("path", ALL)
def test_actions_of_others_are_pinned_by_commit(path):
    """A tag may be moved to other code; a commit is what was read. The version beside it is for people."""
    text = (ROOT / path).read_text(encoding="utf-8")
    assert "uses:" in text
    assert unpinned(text) == []
    assert unpinned(text.replace("  # v", "  # ")) != []
    assert unpinned("    - uses: actions/checkout@v4\n") == ["- uses: actions/checkout@v4"]


def test_one_version_of_each_action_is_used():
    """In all workflows and in our action."""
    used = {step["uses"] for path in ALL for _, step in steps_of(path) if "@" in step.get("uses", "")}
    assert len({action.partition("@")[0] for action in used}) == len(used)


@pytest.mark.parametrize("path", workflows())
def test_a_workflow_may_read_the_repository_and_do_nothing_else(path):
    """What is not stated is granted by the repository's settings, which may be all there is; no job asks for more."""
    content = document(path)
    assert content["permissions"] == {"contents": "read"}
    assert [job for job, told in content["jobs"].items() if "permissions" in told] == []
    for _, step in steps_of(path):
        if step.get("uses", "").startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", ALL)
def test_every_name_in_an_expression_exists(path):
    """Inputs are declared and used, steps have their ids, matrices their axes."""
    content, text = document(path), (ROOT / path).read_text(encoding="utf-8")
    inputs = content.get("inputs") or ((content["on"].get("workflow_dispatch") or {}).get("inputs") or {})
    known = BUILT_IN_NAMES | {f"inputs.{name}" for name in inputs} | {f"env.{name}" for name in content.get("env", {})}
    for job in content.get("jobs", {}).values():
        known |= {f"matrix.{axis}" for axis in job.get("strategy", {}).get("matrix", {})}
    written = "\n".join(step.get("run", "") for _, step in steps_of(path))
    known |= {
        f"steps.{step['id']}.outputs.{name}"
        for _, step in steps_of(path) if "id" in step
        for name in re.findall(r'echo "([\w-]+)=.*GITHUB_OUTPUT', written)
    }  # fmt: skip
    conditions = [str(step["if"]) for _, step in steps_of(path) if "if" in step]
    expressions = "\n".join(EXPRESSION.findall(text) + conditions)
    names = set(re.findall(r"(?:inputs|env|steps|matrix|github|vars)\.[\w.-]+", expressions))
    assert names <= known
    assert {f"inputs.{name}" for name in inputs} <= names


def test_the_workflows_use_the_action_with_inputs_that_it_has():
    """And with all that it requires."""
    declared = document("action.yml")["inputs"]
    uses = [step for path in workflows() for _, step in steps_of(path) if step.get("uses") == "./"]
    assert uses
    for step in uses:
        assert set(step["with"]) <= set(declared)
        assert {name for name, told in declared.items() if told.get("required")} <= set(step["with"])


def test_the_matrix_has_every_python_that_is_promised():
    """Those that CONTRIBUTING names."""
    first, last = re.findall(r"Python 3\.(\d+) to 3\.(\d+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))[0]
    versions = document(".github/workflows/tests.yml")["jobs"]["cpu"]["strategy"]["matrix"]["python"]
    assert versions == [f"3.{minor}" for minor in range(int(first), int(last) + 1)]


def test_the_oldest_the_pinned_and_the_newest_versions_have_a_job_each():
    """`make` knows them, and nothing else."""
    jobs = document(".github/workflows/tests.yml")["jobs"]
    assert jobs["versions"]["strategy"]["matrix"]["versions"] == ["floor", "newest"]
    assert jobs["versions"]["env"]["VERSIONS"] == "${{ matrix.versions }}"
    assert "VERSIONS" not in jobs["cpu"].get("env", {})
    for versions, folder in {"pinned": ".venv", "floor": ".venv-floor", "newest": ".venv-newest"}.items():
        assert f"python3 -m venv {folder}\n" in _made("--dry-run", "--always-make", "install", versions=versions).stdout
    refused = _made("install", "--always-make", versions="oldest")
    assert refused.returncode != 0
    assert "VERSIONS=oldest: expected pinned, floor or newest" in refused.stderr


def test_the_floor_is_what_the_package_asks_for():
    """Of each dependency that has one, as `make` reads them; of torch above all."""
    words = _made("--dry-run", "--always-make", "install", versions="floor").stdout
    script = re.search(r"sed -n '([^']*)' pyproject.toml", words).group(1)
    floors = subprocess.run(["sed", "-n", script, ROOT / "pyproject.toml"], capture_output=True, text=True, check=True)
    asked = re.findall(r'^  "([\w-]+)>=([\d.]+)', (ROOT / "pyproject.toml").read_text().split("[project.opt")[0], re.M)
    assert floors.stdout.split() == [f"{name}=={version}" for name, version in asked]
    assert "torch==2.11" in floors.stdout.split()


def test_a_night_runs_the_tests_that_a_day_leaves_out():
    """pytest leaves out one marker; `make nightly` chooses it, and the workflow of a night runs that."""
    assert "-m 'not nightly'" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r"-m pytest .*-m nightly$", _made("--dry-run", "nightly", versions="pinned").stdout, re.M)
    commands = [step.get("run") for _, step in steps_of(".github/workflows/nightly.yml")]
    assert "make nightly PYTHON=python" in commands


def _made(*words, versions):
    """What `make` says."""
    command = ["make", *words, f"VERSIONS={versions}", "PYTHON=python3"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_a_night_runs_with_its_seed_and_keeps_it(tmp_path):
    """The commands of the nightly job, on few examples and few tests; a failing test keeps its example."""
    content = document(".github/workflows/nightly.yml")
    for name in ("docs", "ringref", "ringverify", "pyproject.toml"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "tests").mkdir()
    for name in ("miniatures", "misbehaviour", "reports", "unit"):
        (tmp_path / "tests" / name).symlink_to(ROOT / "tests" / name)
    shutil.copy(ROOT / "tests/conftest.py", tmp_path / "tests")
    (tmp_path / "tests/test_random.py").write_text(RANDOM_TEST)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name, words in {"python": "", "ringverify": "-m ringverify"}.items():
        (tmp_path / ".venv/bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        (tmp_path / ".venv/bin" / name).chmod(0o755)
    steps = [step for _, step in steps_of(".github/workflows/nightly.yml") if step.get("run") not in NOT_RUN_HERE]
    known = {"env.SEED": "41", "github.run_id": "41", "inputs.seed": ""}
    environment = {
        "SEED": "41",
        "OPTIONS": "--max-examples 2 --only forward",
        "TESTS": "tests/test_random.py",
        "WAYS": "--only raises --place simulated",
        "LOADED": "--verdicts 1",
        "MUTATED": "26",
        "EMULATED": "--examples 2",
    }
    assert set(environment) == set(content["env"])
    ran = run(steps, known, tmp_path, environment=environment)
    assert ran.codes == {
        "The seed": 0,
        "Our ring": 0,
        "The table of misbehaviour": 0,
        "Verdicts under load": 0,
        "Mutated files, each read or refused": 0,
        "What error is allowed, on emulated right pipelines of every declaration": 0,
        "The tests on random examples": 1,
    }, ran.out
    assert "| in forward | 1 of 1 |" in ran.summary
    assert "8 verdicts in 1 runs" in ran.summary
    assert "| report | 3 |" in ran.summary
    assert "41" in ran.summary
    assert "conformant" in ran.summary
    assert '"seed": 41' in (tmp_path / ".ringverify/nightly.jsonl").read_text(encoding="utf-8")
    assert "reproduce_failure" in ran.out
    kept = ran.used[-1][1]
    assert kept["name"] == "nightly-41"
    for path in kept["path"].split():
        assert any((tmp_path / path).rglob("*")), path


RANDOM_TEST = '''
from hypothesis import given, settings, strategies

@given(strategies.integers())
def test_wrong(number):
    """Fails, so that there is an example to keep."""
    assert not settings().derandomize
    assert number < 1000
'''


def test_every_command_is_run_here_or_has_a_reason():
    """So that none is forgotten; `make` is asked whether it knows its target."""
    others = [step for path in workflows() if not path.endswith("nightly.yml") for _, step in steps_of(path)]
    for command in [step["run"] for step in others if "run" in step]:
        assert command in {**NOT_RUN_HERE, **RUN_ELSEWHERE}
        if command in NOT_RUN_HERE:
            subprocess.run([*command.split(), "--dry-run"], cwd=ROOT, check=True, capture_output=True)
