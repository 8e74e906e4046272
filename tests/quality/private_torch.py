"""Private interfaces of torch in a tree of packages, found in the source without running it."""

import ast
from pathlib import Path

from sources import nodes, parsed

HOME = "torch_private.py"
"""The one file of a room that may use them."""

EXPLAINED = {
    "ringverify/peers": "an adapter speaks to the interface of the package that it adapts, torch's own ring among them",
    "ringverify/cli/adapters": "`ringverify init` hands these files to users, who change them: each stands by itself",
}
"""Folders whose files may use them too, and why."""


def private_torch(root: Path) -> list[str]:
    """Where private interfaces of torch are used outside their homes."""
    found = []
    for package in ("ringref", "ringverify"):
        for path in sorted((root / package).rglob("*.py")):
            place = path.relative_to(root)
            if path.name != HOME and not any(place.is_relative_to(folder) for folder in EXPLAINED):
                uses = _uses(parsed(path))
                found += [f"{place.as_posix()}:{line} uses {name}" for line, name in sorted(uses)]
    return found


def explained(root: Path) -> set[str]:
    """The folders of `EXPLAINED` whose files use private interfaces of torch."""
    return {folder for folder in EXPLAINED for path in (root / folder).rglob("*.py") if any(_uses(parsed(path)))}


def _uses(tree: ast.Module) -> set[tuple[int, str]]:
    """The private names of torch in a file, each with its line.

    Names are followed from the file's imports, through attributes and through `getattr` with a literal name. A method
    of an object of torch is known by its name where `METHODS` lists it: the source does not say of which class it is.
    """
    known: dict[str, str] = {}
    found: set[tuple[int, str]] = set()
    for node in nodes(tree):
        match node:
            case ast.Import(names=names):
                imported = {alias.asname or alias.name.split(".")[0]: alias.name for alias in names}
                known |= {own: name if own != "torch" else own for own, name in imported.items() if _is_torch(name)}
                found |= {(node.lineno, name) for name in imported.values() if _is_private(name)}
            case ast.ImportFrom(module=str(module), names=names, level=0) if _is_torch(module):
                known |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
                found |= {(node.lineno, name) for a in names if _is_private(name := f"{module}.{a.name}")}
    for node in nodes(tree):
        match node:
            case ast.Attribute(attr=attr, value=value):
                if attr in METHODS or (attr.startswith("_") and _is_private(name := _dotted(value, known, attr))):
                    found.add((node.lineno, attr if attr in METHODS else name))
            case ast.Call(func=ast.Name("getattr" | "hasattr" | "setattr"), args=[of, ast.Constant(str(attr)), *_]):
                if attr in METHODS or _is_private(_dotted(of, known, attr)):
                    found.add((node.lineno, attr))
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(), args=[ast.Constant(str(name)), *_]):
                if _is_private(name):
                    found.add((node.lineno, name))
    return found


METHODS = {"_get_sequence_number_for_group", "_schema", "_op", "_get_backend", "_apply_to_tensors"}
"""Private methods and attributes of torch's objects, whichever variable holds the object."""


def _dotted(node: ast.AST, known: dict[str, str], attr: str) -> str:
    """The full name of an attribute of what was imported of torch; empty of anything else."""
    match node:
        case ast.Name(id=own) if own in known:
            return f"{known[own]}.{attr}"
        case ast.Attribute(attr=inner, value=value) if whole := _dotted(value, known, inner):
            return f"{whole}.{attr}"
    return ""


def _is_torch(name: str) -> bool:
    return name.split(".")[0] == "torch"


def _is_private(name: str) -> bool:
    return _is_torch(name) and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
