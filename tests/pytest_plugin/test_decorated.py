"""`@ringverify.conformance(attend)` and `run_conformance(attend)` in somebody's own test file."""

import re

import pytest

import ringverify
from ringverify.errors import Inconclusive, UsageError

pytestmark = pytest.mark.timeout(240)

TESTS = """
import os
import unittest

import pytest
from faulty_rings import swapped_gradients
from right import attend

import ringverify
from ringverify import implementation
from right import attention

two = ringverify.conformance(attend, only=["forward", "lse"], max_examples=3)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@two
def test_plain():
    pass


@two
def test_of_more(result, tmp_path):
    assert (result.implementation, result.property, result.verdict) == ("right", "forward", "pass")
    assert result.margin < 0.5
    assert os.listdir(tmp_path) == []
    raise LookupError("the body's own affair")


class TestInAClass:
    @two
    def test_method(self, result):
        assert isinstance(self, TestInAClass)
        assert result.examples == 3


@pytest.mark.xfail(raises=ringverify.ConformanceError, strict=True)
@ringverify.conformance(swapped_gradients, only="gradients", max_examples=4)
def test_expected():
    raise AssertionError("is not reached")


@ringverify.conformance(swapped_gradients, only="gradients", max_examples=4)
def test_wrong():
    raise AssertionError("is not reached")


@implementation(name="declared here")
def declared_here(q, k, v, call):
    return attention(q, k, v, call)


def test_as_one_call():
    result = ringverify.run_conformance(declared_here, only="forward", max_examples=2)
    assert (result.verdict, result.properties["forward"].examples) == ("conformant", 2)


class TestOfUnittest(unittest.TestCase):
    @two
    def test_method(self):
        pass


def test_as_one_call_that_fails():
    ringverify.run_conformance(swapped_gradients, only="forward,gradients", max_examples=4)
"""
CONFTEST = """
import hypothesis
import torch

torch.set_default_dtype(torch.float64)
torch.set_default_device("meta")
torch.set_grad_enabled(False)

hypothesis.settings.register_profile("ci", derandomize=True, max_examples=1)
hypothesis.settings.load_profile("ci")
"""
INI = "[pytest]\nfilterwarnings = error\npythonpath = .\n"


@pytest.fixture(scope="module")
def ran(lasting):
    """One run of a test file in a project with settings of its own, in which tests change the folder."""
    lasting.write(test_ring=TESTS, conftest=CONFTEST)
    (lasting.folder / "pytest.ini").write_text(INI)
    return lasting.pytest_apart("-v", "-rs")


def test_a_decorated_function_is_a_test_a_property(ran):
    """In a module or a class, with fixtures and marks; its body runs after the property held."""
    assert ran.code == 1, ran.out
    assert ran.ended("test_ring.py::test_plain[forward]") == "PASSED"
    assert ran.ended("test_ring.py::test_plain[lse]") == "SKIPPED"
    assert ran.ended("test_ring.py::TestInAClass::test_method[forward]") == "PASSED"
    assert ran.ended("test_ring.py::test_of_more[forward]") == "FAILED"
    assert "LookupError: the body's own affair" in ran.out
    assert ran.ended("test_ring.py::test_expected[gradients]") == "XFAIL"
    assert ran.ended("test_ring.py::test_wrong[gradients]") == "FAILED"
    assert "and in a unittest.TestCase, call ringverify.run_conformance" in ran.out
    assert "is not reached" not in ran.out.replace("        raise AssertionError", "")


def test_a_violation_reads_as_check_tells_it(ran):
    """Without frames of the plugin; the case can be replayed by the line shown."""
    shown = ran.out.split("test_wrong[gradients] _")[1].split("\n____")[0]
    assert re.search(r"\nswapped gradients: gradients: d[kv] is wrong on ranks? 0", shown)
    assert "        replay  ringverify replay .ringverify/faulty-rings-py-swapped-gradients-gradients-" in shown
    assert ".py:" not in shown.replace("faulty_rings.py:", "")


def test_one_call_raises_an_assertion_error_with_the_counterexample(ran, lasting):
    """Under a traceback that ends at the call; cases lie in the folder of the caller."""
    assert ran.ended("test_ring.py::test_as_one_call") == "PASSED"
    assert ran.ended("test_ring.py::test_as_one_call_that_fails") == "FAILED"
    shown = ran.out.split("test_as_one_call_that_fails _")[1]
    assert "ringverify.ConformanceError: swapped gradients: violations: 1 pass, 1 fail" in shown
    assert "replay  ringverify replay .ringverify/" in shown
    assert "testing/conformance.py" not in ran.out
    assert len(list((lasting.folder / ".ringverify").glob("*.json"))) == 1


def test_the_skip_is_reported_where_the_test_is_written(ran):
    """With the capability that is not declared."""
    assert re.search(r"SKIPPED \[\d\] test_ring\.py:\d+: lse=True is not declared", ran.out)


def test_nothing_is_left_in_the_project(ran, lasting):
    """No cache of Hypothesis, whatever the project has it do."""
    left = {path.name for path in lasting.folder.iterdir()} - {"__pycache__", ".pytest_cache", ".ringverify"}
    assert left == {"right.py", "faulty_rings.py", "test_ring.py", "conftest.py", "pytest.ini"}


def test_options_of_pytest_fill_in_what_the_decorator_leaves_open(project):
    """And only that."""
    project.write(
        test_ring="import ringverify\nfrom right import attend\n\n\n"
        "@ringverify.conformance(attend, max_examples=2)\ndef test_it(result):\n    print('tried', result.examples)\n"
    )
    ran = project.pytest("-s", "--ringverify-only", "forward", "--ringverify-max-examples", "9", "--ringverify-seed=4")
    assert ran.code == 0, ran.out
    assert "tried 2" in ran.out
    assert "right: conformant: 1 pass; simulated world, cpu, suite quick, seed 4" in ran.out


def test_a_mistake_in_a_decorator_is_an_error_of_its_file(project):
    """An unknown property is found when tests are collected, anything else when the file is imported."""
    project.write(
        test_one="import ringverify\nfrom right import attend\n\n\n"
        "@ringverify.conformance(attend, only=['forwad'])\ndef test_it():\n    pass\n",
        test_two="import ringverify\nfrom right import attention\n\n\n"
        "@ringverify.conformance(attention)\ndef test_it():\n    pass\n",
    )
    ran = project.pytest()
    assert ran.code == 2, ran.out
    assert ran.counts() == {"errors": 2}
    assert "test_one.py::test_it: unknown property 'forwad'; did you mean 'forward'?" in ran.out
    assert "is a function, not an implementation: decorate the function with" in ran.out


@pytest.mark.nightly
def test_a_target_that_is_none_here_is_an_error_of_its_own_test(project):
    """One line each: a package of another version is inconclusive, a mistyped name is not; other tests run.

    A file that ends its process when it is imported ends none of these.
    """
    test = "@ringverify.conformance({!r}, only='forward', max_examples=2)\ndef test_{}():\n    pass\n\n\n"
    targets = {
        "right": "right.py:attend",
        "missing": "peer:yunchang-ring",
        "mistyped": "right.py:atend",
        "gone": "gone.py:it",
    }
    tests = [test.format(target, name) for name, target in targets.items()]
    project.with_another_version_of("yunchang")
    project.write(gone="import os\n\nos._exit(0)\n", test_ring="import ringverify\n\n\n" + "".join(tests))
    ran = project.pytest_apart("-v")
    assert ran.code == 1, ran.out
    assert ran.counts() == {"passed": 1, "errors": 3}
    assert ran.ended("test_right[forward]") == "PASSED"
    assert re.search(
        r"^peer:yunchang-ring cannot be checked here: .*yunchang==[\d.]+, found 0\.0\.0: pip install", ran.out, re.M
    )
    assert re.search(r"^target 'right.py:atend': right.py has no attribute 'atend'", ran.out, re.M)
    assert re.search(r"^gone.py:it ends its process while it is imported \(exit code 0\)$", ran.out, re.M)
    assert "Traceback" not in ran.out
    assert ".py:" not in ran.out.split("ERROR at")[1].split("\n", 2)[1].replace("right.py:", "")
    assert project.pytest("-k", "missing or right").code == Inconclusive.exit_code


# -- one call, without pytest ------------------------------------------------------------------------------------------


@pytest.fixture
def right(monkeypatch, tmp_path):
    """The miniatures, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return pytest.importorskip("right")


def test_the_result_has_what_came_of_every_property(right):
    """Verdict, reasons, numbers."""
    result = ringverify.run_conformance(right.attend, max_examples=1, only=("lse", "forward"))
    assert result.verdict == "conformant"
    assert (result.world, result.device, result.suite, result.seed) == ("simulated", "cpu", "quick", 0)
    assert list(result.properties) == ["forward", "lse"]
    assert result.properties["lse"].reason == "lse=True is not declared"
    assert 0 <= result.properties["forward"].margin <= 1
    assert result.describe().startswith("right: conformant: ")


def test_what_was_not_learned_raises(right):
    """It is no result."""
    with pytest.raises(Inconclusive, match=r"right: inconclusive: 1 unsupported") as raised:
        ringverify.run_conformance(right.attend, only="lse")
    assert str(raised.value).splitlines()[1:] == ["right: lse: unsupported: lse=True is not declared"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"only": "forwad"}, "'forwad'; did you mean 'forward'?"),
        ({"suite": "slow"}, "suite: 'slow': expected one of smoke, quick, full, nightly"),
        ({"world_sizes": [2, 0]}, "world_sizes: '2,0': expected whole numbers of at least 1"),
        ({"max_examples": 0}, "max_examples: '0': expected a whole number of at least 1"),
        ({"seed": -1}, "seed: '-1'"),
        ({"deadline": 0}, "deadline: '0': expected a positive number of seconds"),
        ({"baseline": "none.toml"}, "cannot read baseline none.toml"),
    ],
)
def test_a_wrong_argument_is_named_with_its_value(arguments, words, right):
    """Before anything runs."""
    with pytest.raises(UsageError, match=re.escape(words)) as raised:
        ringverify.run_conformance(right.attend, **arguments)
    assert [entry.name for entry in raised.traceback][1:] == ["run_conformance"]  # no internals below the call
    assert raised.value.__cause__ is None


def test_a_target_will_do_in_place_of_a_function(right):
    """As on the command line."""
    assert ringverify.run_conformance("allgather", only="forward", max_examples=1).verdict == "conformant"
    with pytest.raises(UsageError, match="did you mean 'ring'"):
        ringverify.run_conformance("rng")


@pytest.mark.nightly
def test_a_script_that_checks_itself_as_it_is_imported_is_told_so(project):
    """Every rank imports it, and each would check it again."""
    call = "run_conformance(attend, only='forward', max_examples=1)\n"
    head = "from ringverify import implementation, run_conformance\nimport right\n\n"
    head += "attend = implementation(name='mine')(right.attention)\n"
    project.write(bare=head + call, guarded=f"{head}if __name__ == '__main__':\n    print({call.strip()}.verdict)\n")
    assert project.run("python", "guarded.py").out == "conformant\n"
    bare = project.run("python", "bare.py")
    assert bare.code == 1
    assert "run_conformance was called while bare.py was being imported" in bare.err.strip().splitlines()[-1]
    assert '__name__ == "__main__"' in bare.err
