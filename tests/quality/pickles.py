"""Where pickles are written or read, found in the source."""

import ast
from collections.abc import Iterator
from pathlib import Path

from sources import nodes, parsed

PACKAGES = ("ringref", "ringverify")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
CALLS = {("torch", "save"), ("torch", "load"), ("np", "save"), ("numpy", "save"), ("pandas", "read_pickle")}

WITHIN_A_WORLD = {
    "ringverify/check/units.py": "causes that were made for a case, between the tool and its own workers",
    "ringverify/worlds/processes/gloo.py": "a program and its results, between the harness and its own workers",
    "ringverify/worlds/processes/pool.py": "jobs, through a pipe between the harness and its own workers",
    "ringverify/worlds/processes/wire.py": "reports, through that pipe, with a digest and read as reports only",
    "ringverify/worlds/processes/worker.py": "the workers' end of that pipe",
}
"""Files that may pickle, and what: nothing of it outlives a process or is handed to a person."""


def pickles(root: Path) -> list[str]:
    """Each as `file:line: what`, those allowed included."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            for node in nodes(parsed(path)):
                found += [f"{path.relative_to(root).as_posix()}:{line}: {what}" for line, what in _in_node(node)]
    return found


def _in_node(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Import(names=names):
            for alias in names:
                if alias.name.split(".")[0] in MODULES:
                    yield node.lineno, f"import {alias.name}"
        case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
            yield node.lineno, f"from {module}"
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (owner, name) in CALLS:
            yield node.lineno, f"{owner}.{name}"
        case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
            yield node.value.lineno, "allow_pickle=True"
