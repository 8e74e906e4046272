"""A class name means one thing in the whole project."""

import ast
import collections
from pathlib import Path

from sources import nodes, parsed

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = {
    "ringverify/confirm/long_template.py",
    "ringverify/confirm/script_template.py",
    "ringverify/confirm/shared_template.py",
    "ringverify/cli/workers/jax_worker.py",
    "ringverify/cli/workers/numpy_worker.py",
}
"""Texts of scripts that stand alone, where they call things as the package does."""


def names_of_several_classes(root):
    """Names that classes of more than one place have, with the files."""
    found = collections.defaultdict(list)
    for package in ("ringref", "ringverify"):
        for path in sorted((root / package).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            if place not in SCRIPTS:
                classes = [one for one in nodes(parsed(path)) if isinstance(one, ast.ClassDef)]
                for one in classes:
                    found[one.name.lstrip("_")].append(place)
    return {name: places for name, places in found.items() if len(places) > 1}


def test_a_class_name_means_one_thing():
    """Private classes too, which a reader meets all the same."""
    assert names_of_several_classes(ROOT) == {}


def test_a_name_of_two_classes_is_seen(tmp_path):
    """In two rooms, or in two packages, or once with an underscore."""
    for place, text in {
        "ringref/problem.py": "class Problem: ...\nclass Block: ...",
        "ringverify/faults/place.py": "def f():\n    class Block: ...",
        "ringverify/worlds/world.py": "class Run: ...",
        "ringverify/ring/runs.py": "class _Run: ...",
    }.items():
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(text, encoding="utf-8")
    assert names_of_several_classes(tmp_path).keys() == {"Block", "Run"}
