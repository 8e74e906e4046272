"""Who imports whom in a tree of packages, read from the source without running it."""

import ast
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

from sources import parsed

PACKAGES = ("ringref", "ringverify")


@dataclasses.dataclass(frozen=True)
class Import:
    """One import.

    Attributes:
        importer: dotted name of the module that imports.
        line: where.
        imported: dotted name of the module, or of the package whose name is imported.
        when: "load" as the module is loaded, "call" inside a function, "types" for a type checker only.
    """

    importer: str
    line: int
    imported: str
    when: str

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules(root: Path) -> dict[str, Path]:
    """The modules of the packages in a tree."""
    found = {}
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> list[Import]:
    """Every import that one of these modules has of another, in whatever form."""
    known = modules(root)
    names = frozenset(known)
    return [one for name, path in known.items() for one in _imports(name, path.name, parsed(path), names)]


@functools.cache
def _imports(name: str, file: str, tree: ast.Module, known: frozenset[str]) -> list[Import]:
    package = name if file == "__init__.py" else name.rpartition(".")[0]
    return [
        Import(name, node.lineno, imported, when)
        for node, when in _walk(tree, "load")
        for imported in _named(node, package, known)
        if imported.split(".")[0] in PACKAGES and imported != name
    ]


def _walk(node: ast.AST, when: str) -> Iterator[tuple[ast.AST, str]]:
    """Every node below, with when it runs."""
    yield node, when
    inside = dict.fromkeys(ast.iter_child_nodes(node), when)
    match node:
        case ast.FunctionDef(body=body) | ast.AsyncFunctionDef(body=body) if when == "load":
            inside |= dict.fromkeys(body, "call")
        case ast.Lambda(body=body) if when == "load":
            inside[body] = "call"
        case ast.If(test=ast.Name("TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"), body=body):
            inside |= dict.fromkeys(body, "types")
    for child, its in inside.items():
        yield from _walk(child, its)


def _named(node: ast.AST, package: str, known: frozenset[str]) -> list[str]:
    """The modules that a statement, or a call of `import_module` with a literal name, imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            base = package.rsplit(".", level - 1)[0] if level else ""
            whole = ".".join(part for part in (base, module or "") if part)
            return sorted({f"{whole}.{a.name}" if f"{whole}.{a.name}" in known else whole for a in names})
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name("import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
    return []


def reachable(start: str, edges: list[Import]) -> set[str]:
    """Modules below `start`, and all that they import when they run, directly or not."""
    found: set[str] = set()
    pending = [edge.importer for edge in edges if is_below(edge.importer, start)]
    while pending:
        module = pending.pop()
        if module not in found:
            found.add(module)
            pending += [edge.imported for edge in edges if edge.importer == module and edge.when != "types"]
    return found


def cycle(pairs: set[tuple[str, str]]) -> list[str]:
    """A way round in a directed graph, first and last alike; empty if there is none."""
    after: dict[str, list[str]] = {}
    for importer, imported in sorted(pairs):
        after.setdefault(importer, []).append(imported)
    done: set[str] = set()

    def visit(node: str, way: list[str]) -> list[str]:
        if node in way:
            return [*way[way.index(node) :], node]
        if node not in done:
            for following in after.get(node, []):
                if found := visit(following, [*way, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in list(after) if (found := visit(node, []))), [])


def is_below(module: str, package: str) -> bool:
    """Whether a module is that package or within it."""
    return module == package or module.startswith(package + ".")
