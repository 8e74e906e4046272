"""From an implementation at hand to what has to be typed to get it."""

import importlib
import sys
from pathlib import Path

import pytest

from ringverify import implementation, targets
from ringverify.errors import UsageError

TEXT = "from ringverify import implementation\n\n\n@implementation()\ndef attend(q, k, v, call):\n    return q\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory; modules that are imported from it are forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def imported(path, name, folder):
    """A module of that text, imported by that name from a folder on the module path."""
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(TEXT)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("path", "name", "folder", "address"),
    [
        ("ring_of_one.py", "ring_of_one", "", "ring_of_one.py:attend"),
        ("ring_of_two.py", "ring_of_two", "tests", "tests/ring_of_two.py:attend"),
        ("of_three/ring.py", "of_three.ring", "", "of_three.ring:attend"),
        ("of_four/ring.py", "of_four.ring", "src", "of_four.ring:attend"),
    ],
)
def test_an_address_leads_back_to_the_implementation(path, name, folder, address, here):
    """Files outside packages by their path, modules of packages by their name."""
    module = imported(path, name, here / folder)
    assert targets.address_of(module.attend) == address
    assert targets.load(address).capabilities == module.attend.capabilities


def test_a_module_outside_the_working_directory_is_named_if_it_can_be_imported(here, tmp_path_factory):
    """As an installed one is."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    module = imported("ring_of_five.py", "ring_of_five", elsewhere)
    assert targets.address_of(module.attend) == "ring_of_five:attend"
    sys.path.remove(str(elsewhere))
    assert targets.address_of(module.attend) == f"{elsewhere.as_posix()}/ring_of_five.py:attend"


def test_a_built_in_implementation_has_its_short_name():
    """`ring` rather than where it lives."""
    from ringverify.ring.declared import ring

    assert targets.address_of(ring) == "ring"


def test_an_implementation_that_was_put_into_another_module_is_found_there(here):
    """A function of a package, declared in a test file."""
    module = imported("declared_here.py", "declared_here", here)
    module.other = implementation(name="other")(Path.joinpath)
    assert targets.address_of(module.other) == "declared_here.py:other"


def test_what_no_module_has_cannot_be_named():
    """The line says where to put it."""
    hidden = implementation(name="hidden")(lambda q, k, v, call: q)
    with pytest.raises(UsageError, match=r"hidden is no attribute of a module.*top level"):
        targets.address_of(hidden)


def test_a_rank_is_told_of_a_file_by_its_whole_path(here):
    """It may change its working directory, which ranks that are threads share."""
    assert targets.from_anywhere("below/mine.py:attend") == f"{here / 'below/mine.py'}:attend"
    for other in ("ring", "peer:diffusers-ring", "mutant:A1", "package.module:attend"):
        assert targets.from_anywhere(other) == other
