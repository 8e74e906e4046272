"""The action, its steps run as a runner would run them, in the folder of somebody else's project."""

import shutil
import subprocess
import sys
import xml.etree.ElementTree

import pytest
from report_lines import report_lines
from steps import ROOT, document, run

pytestmark = pytest.mark.timeout(180)

ACTION = document("action.yml")
RESULTS = "ringverify-results"


def used(folder, **inputs):
    """What comes of the action with these inputs, beside its defaults; dashes are underscores."""
    given = {name: told.get("default", "") for name, told in ACTION["inputs"].items()}
    given |= {"python": sys.executable, "install": "none", "max-examples": "2"}
    given |= {name.replace("_", "-"): value for name, value in inputs.items()}
    known = {"github.action_path": str(ROOT), **{f"inputs.{name}": value for name, value in given.items()}}
    return run(ACTION["runs"]["steps"], known, folder)


@pytest.fixture
def project(tmp_path):
    """A folder with a right ring and a wrong one."""
    shutil.copy(ROOT / "docs/examples/my_ring.py", tmp_path / "my_ring.py")
    shutil.copy(ROOT / "tests/miniatures/faulty_rings.py", tmp_path)
    shutil.copy(ROOT / "tests/miniatures/right.py", tmp_path)
    return tmp_path


@pytest.mark.nightly
def test_a_right_ring_leaves_reports_for_people_and_for_machines(project):
    """Verdict, summary, JUnit, page and report; what an earlier job left there is gone."""
    (project / RESULTS / "cases").mkdir(parents=True)
    (project / RESULTS / "cases" / "old.json").write_text("{}")
    ran = used(project, target="my_ring.py:attend", only="forward,inputs_untouched", seed="3", world_sizes="1,3")
    assert ran.codes == {"Check": 0}, ran.out
    assert ran.outputs == {"exit-code": "0"}
    assert "conformant" in ran.summary
    assert "my\\_ring.attend" in ran.summary
    folder = project / RESULTS
    assert sorted(path.name for path in folder.iterdir()) == ["junit.xml", "report.html", "report.jsonl", "summary.md"]
    header, *events = report_lines(folder / "report.jsonl")
    assert (header["suite"], header["seed"]) == ("quick", 3)
    assert [event["property"] for event in events if event["event"] == "property"] == ["forward", "inputs_untouched"]
    names = [case.get("name") for case in xml.etree.ElementTree.parse(folder / "junit.xml").iter("testcase")]
    assert [name for name in names if "forward" in name]
    ((action, inputs),) = ran.used
    assert action.startswith("actions/upload-artifact@")
    assert inputs == {"name": RESULTS, "path": RESULTS, "if-no-files-found": "ignore"}


def test_a_wrong_ring_fails_the_job_and_its_case_is_kept_for_replay(project, tmp_path_factory):
    """The summary tells of the failure, and the line it shows works where the artifact is unpacked and trusted."""
    ran = used(project, target="faulty_rings.py:wrong_scale my_ring.py:attend", only="forward")
    assert ran.codes == {"Check": 1}, ran.out
    assert ran.outputs == {"exit-code": "1"}
    assert "out is wrong on rank" in ran.summary
    (failure,) = [
        event for event in report_lines(project / RESULTS / "report.jsonl") if event["event"] == "counterexample"
    ]
    assert failure["replay"] in ran.summary
    assert len(ran.used) == 1  # the artifact, although the job failed
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for name in ("faulty_rings.py", "right.py"):
        shutil.copy(project / name, elsewhere)
    shutil.copytree(project / RESULTS, elsewhere / RESULTS)
    command = [sys.executable, "-m", *failure["replay"].split(), "--trust"]
    replayed = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True, timeout=100, check=False)
    assert replayed.returncode == 1
    assert "exactly the recorded bits" in replayed.stdout


@pytest.mark.nightly
def test_a_known_violation_does_not_fail_the_job(project):
    """The baseline decides, and the summary says that it did."""
    (project / "known.toml").write_text(
        '[[violation]]\nimplementation = "wrong scale"\nproperty = "forward"\n'
        'reason = "the scale of another head_dim"\nlink = "https://example.org/issues/3"\n'
    )
    ran = used(project, target="faulty_rings.py:wrong_scale", only="forward", baseline="known.toml")
    assert ran.codes == {"Check": 0}, ran.out
    assert "the scale of another head" in ran.summary


@pytest.mark.nightly
def test_under_torchrun_the_exit_code_is_the_verdicts(project):
    """torchrun ends with 1 whatever happens; three ranks over gloo, as where there is no GPU."""
    target = "my_ring.py:attend faulty_rings.py:wrong_scale"
    ran = used(project, target=target, only="forward", nproc="3", world_sizes="3")
    assert "under torchrun: 3 ranks on 1 machine, over gloo" in ran.out
    assert ran.codes == {"Check": 1}, ran.out
    verdicts = [event["verdict"] for event in report_lines(project / RESULTS / "report.jsonl") if "world" in event]
    assert verdicts == ["conformant", "violations"]
    ran = used(project, target="my_ring.py:attend", world="nccl", nproc="2")
    assert ran.codes == {"Check": 3}, ran.out
    assert "exit code 3" in ran.summary


@pytest.mark.parametrize(
    ("inputs", "line"),
    [
        ({"target": "my_rng.py:attend"}, "no file 'my_rng.py'"),
        ({"target": "my_ring.py:attend", "suite": "fast"}, "'fast'"),
        ({"target": "my_ring.py:attend", "only": "forward; touch hacked"}, "'forward; touch hacked'"),
        ({"target": "my_ring.py:attend $(touch hacked)"}, "'$(touch'"),
    ],
)
@pytest.mark.by_day(1)
def test_wrong_inputs_end_with_2_and_are_only_text(project, inputs, line):
    """The log has the one line; nothing in an input is run."""
    ran = used(project, **inputs)
    assert ran.codes == {"Check": 2}, ran.out
    assert ran.outputs == {"exit-code": "2"}
    assert line in ran.out
    assert "exit code 2" in ran.summary
    assert not (project / "hacked").exists()


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"install": ""}, ["-m", "pip", "install", str(ROOT)]),
        ({"install": ". numpy>=2"}, ["-m", "pip", "install", str(ROOT), ".", "numpy>=2"]),
        ({"install": "-r\n$(id)\n"}, ["-m", "pip", "install", str(ROOT), "-r", "$(id)"]),
        ({"install": "", "constraints": "a b.txt"}, ["-m", "pip", "install", "--constraint", "a b.txt", str(ROOT)]),
    ],
)
def test_what_is_installed_is_what_was_asked_for(project, inputs, words):
    """With an interpreter that only says what it was given."""
    python = project / "python"
    python.write_text(f"#!{shutil.which('bash')}\nprintf '%s\\n' \"$@\"\n")
    python.chmod(0o755)
    steps = [step for step in ACTION["runs"]["steps"] if step["name"] == "Install"]
    known = {"inputs.install": "", "inputs.constraints": "", "github.action_path": str(ROOT)}
    known |= {"inputs.python": str(python), **{f"inputs.{name}": value for name, value in inputs.items()}}
    assert run(steps, known, project).out.splitlines() == words


def test_python_is_set_up_only_where_a_version_is_named(project):
    """On a machine of one's own the Python that is there is used."""
    steps = [step for step in ACTION["runs"]["steps"] if step["name"] == "Set up Python"]
    assert run(steps, {"inputs.python-version": ""}, project).used == []
    ((action, inputs),) = run(steps, {"inputs.python-version": "3.12"}, project).used
    assert action.startswith("actions/setup-python@")
    assert inputs == {"python-version": "3.12"}
