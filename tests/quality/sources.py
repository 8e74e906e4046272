"""Syntax trees of source files, which several tests walk: each is made once a process, and so are lists of nodes."""

import ast
import functools
from pathlib import Path


def parsed(path: Path) -> ast.Module:
    """The tree of a file as it is now."""
    return _tree(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """A node of a tree and every node below it."""
    return tuple(ast.walk(tree))


@functools.cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)
