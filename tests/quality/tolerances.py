"""Tolerances written as numbers, found in the source: as keywords, in comparisons, and in functions that have one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sources import nodes, parsed

HOME = Path("ringref") / "rounding.py"
"""Where tolerances are derived; nowhere else may one be written."""

FOLDERS = ("ringref", "ringverify", "tests")
NAME = re.compile(r"(^|_)(a|r|abs_?|rel_?)?tol(erances?)?$", re.IGNORECASE)
CLOSE = {
    "allclose": 2, "isclose": 2, "assert_allclose": 2, "assert_close": 2, "approx": 1, "assert_array_almost_equal": 2,
    "assertAlmostEqual": 2,
}  # fmt: skip
"""Functions that compare within a tolerance, and how many arguments come before it. Left out, it is theirs."""
TOLERANCE_KEYWORDS = {"abs", "rel", "delta", "places", "decimal"}
SMALL = 0.01


def literal_tolerances(root: Path) -> list[str]:
    """Each as `file:line: what`."""
    found = []
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if relative == HOME:
                continue
            text = path.read_text(encoding="utf-8")
            for node in nodes(parsed(path)):
                found += [f"{relative}:{line}: {what}" for line, what in _in_node(node, text)]
    return found


def _in_node(node: ast.AST, text: str) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name), args=args, keywords=keywords) if name in CLOSE:
            told = [*args[CLOSE[name] :], *(k.value for k in keywords if _is_tolerance(k.arg, close=True))]
            if not told:
                yield node.lineno, f"{name} with its own tolerance"
            for value in told:
                if _number(value):
                    yield node.lineno, f"{name} with a literal tolerance"
        case ast.Call(keywords=keywords):
            for keyword in keywords:
                if _is_tolerance(keyword.arg) and _number(keyword.value):
                    yield node.lineno, f"{keyword.arg}= with a literal"
        case ast.Compare(left=left, comparators=others, ops=ops):
            ordered = any(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in ops)
            for value in (left, *others):
                if ordered and _is_small(value, text):
                    yield node.lineno, f"comparison with {ast.unparse(value)}"
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if NAME.search(name) and _number(value):
            yield node.lineno, f"{name} = a literal"
        case ast.AnnAssign(target=ast.Name(id=name), value=value) if NAME.search(name) and _number(value):
            yield node.lineno, f"{name} = a literal"
        case ast.arguments(posonlyargs=first, args=args, defaults=defaults, kwonlyargs=only, kw_defaults=only_defaults):
            pairs = [
                *zip([*first, *args][len(first) + len(args) - len(defaults) :], defaults, strict=True),
                *zip(only, only_defaults, strict=True),
            ]
            for argument, value in pairs:
                if NAME.search(argument.arg) and _number(value):
                    yield argument.lineno, f"{argument.arg} with a literal default"


def _is_tolerance(keyword: str | None, *, close: bool = False) -> bool:
    return keyword is not None and bool(NAME.search(keyword) or (close and keyword in TOLERANCE_KEYWORDS))


def _number(node: ast.AST | None) -> float:
    """The value of a literal, or of arithmetic on literals; 0 for anything else, and for 0, which is exact."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return float(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand)
        case ast.BinOp(left=left, right=right) if _number(left) and _number(right):
            return float(eval(compile(ast.Expression(node), "literal", "eval"), {}))
    return 0.0


def _is_small(node: ast.AST, text: str) -> bool:
    value = abs(_number(node))
    if value < SMALL:
        return value > 0
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return False
    return re.search(r"\de-\d", (ast.get_source_segment(text, node) or "").lower()) is not None
