"""What the README says of pytest is done as it says."""

import re
import shlex
import shutil

import pytest
from project import ROOT, Project

pytestmark = pytest.mark.timeout(240)

SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("## In your own tests\n")[1].split("\n## ")[0]
COMMANDS = [shlex.split(line) for line in re.findall(r"^\$ (.*)$", SECTION, re.MULTILINE)]


@pytest.fixture
def theirs(tmp_path):
    """A project that has the README's example as its package, and its test file."""
    (tmp_path / "my_package").mkdir()
    shutil.copy(ROOT / "docs" / "examples" / "my_ring.py", tmp_path / "my_package" / "ring.py")
    (tests,) = re.findall(r"<!-- a test file -->\n```python\n(.*?)```", SECTION, re.DOTALL)
    project = Project(tmp_path)
    project.write(test_ring=tests)
    return project


def test_the_test_file_is_a_test_file(theirs):
    """Two properties and one call."""
    ran = theirs.pytest_apart("-v", PYTEST_ADDOPTS="--ringverify-max-examples 2 --ringverify-only forward")
    assert ran.code == 0, ran.out
    assert ran.ended("test_ring.py::test_attend_is_attention[gradients]") == "PASSED"
    assert ran.counts() == {"passed": 3}


@pytest.mark.parametrize(
    ("right", "wrong", "counts"),
    [
        ("", "", {"passed": 2}),
        pytest.param("(distance >= -left)", "(distance > -left)", {"failed": 2}, marks=pytest.mark.nightly),
    ],
)
def test_the_example_of_strategies_holds_its_function_to_the_oracle(right, wrong, counts, tmp_path):
    """It passes as it is, and both of its tests notice a window that is one key short."""
    text = (ROOT / "docs" / "examples" / "test_with_strategies.py").read_text(encoding="utf-8")
    project = Project(tmp_path)
    project.write(test_with_strategies=text.replace(right, wrong))
    assert project.pytest_apart("-v").counts() == counts


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.nightly
def test_the_commands_are_what_people_can_type(command, theirs):
    """Each from where the package lies, as a command of its own."""
    (theirs.folder / "test_ring.py").unlink()
    ran = theirs.run(*command, PYTEST_ADDOPTS="--ringverify-max-examples 2 --ringverify-only forward,gradients,lse")
    assert ran.code == 0, ran.out + ran.err
    assert ran.counts()["passed"] >= (1 if "gradients" in command[-1] else 2)
