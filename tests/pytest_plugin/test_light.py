"""In a project that merely has ringverify installed, pytest is as fast as it was and looks as it did."""

import importlib.metadata
import sys

import pytest

from ringverify import pytest_plugin

pytestmark = pytest.mark.timeout(60)

HEAVY = {"torch", "numpy", "hypothesis", "rich", "jaxtyping"}


def imported(project, *arguments):
    """The packages that pytest imports on the way."""
    ran = project.run(sys.executable, "-X", "importtime", "-m", "pytest", *arguments)
    assert ran.code == 0, ran.out
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in ran.err.splitlines()}


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_nothing_heavy_is_imported_without_need(arguments, project):
    """Not even by a run of other tests. What other plugins import is theirs."""
    project.write(test_own="def test_own():\n    pass\n")
    ours = imported(project, *arguments)
    assert "ringverify" in ours
    assert "torch" not in ours
    assert ours & HEAVY == imported(project, *arguments, "-p", "no:ringverify") & HEAVY


def test_a_run_without_us_looks_as_it_did(project):
    """No header, no section, no line."""
    project.write(test_own="def test_own():\n    pass\n")
    with_it, without = project.pytest_apart(), project.pytest_apart("-p", "no:ringverify")
    assert [line for line in with_it.out.splitlines() if "ringverify" in line and "plugins" not in line] == []
    assert with_it.code == without.code == 0


def test_the_plugin_is_found_by_its_entry_point():
    """As pytest finds it in an installed package; `-p no:ringverify` leaves it out."""
    (found,) = importlib.metadata.entry_points(group="pytest11", name="ringverify")
    assert found.load() is pytest_plugin is sys.modules["ringverify.pytest_plugin"]
