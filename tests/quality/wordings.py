"""Decisions on the wording of a failure, found in the source.

A text of a failure is what an exception says of itself, or a field of a failure, a violation or an event that holds a
sentence, or a sentence that a function is handed, or gets from another; and whatever is made of such a text in the same
function. It may be shown, cut and joined. It may not be compared, searched or taken apart: what code needs to know of a
failure is a field.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from sources import nodes, parsed

PACKAGES = ("ringref", "ringverify")

HOME = Path("ringverify") / "worlds" / "foreign_text.py"
"""Where what programs of others say only in words is turned into fields."""

ATTRIBUTES = {"message", "summary", "detail", "traceback", "said", "diagnosis", "stderr"}
"""Fields that hold sentences, of failures, violations, mishaps and processes."""

KEYS = {"message", "summary", "detail", "traceback", "reason", "diagnosis"}
"""The same, of events."""

HANDED = {"summary", "detail", "reason", "sentence", "diagnosis", "why"}
"""Names of parameters that are sentences, or with an s several, where they are annotated as texts."""

TELLS = {"sentence", "in_words", "why_not", "why_unsupported"}
"""Functions and methods that return sentences."""

SAYS = {"str", "repr", "text_of", "one_line", "format_exception", "format_exc", "traceback_of_user"}
"""Functions that make a text of an exception."""

TAKES_APART = {
    "startswith", "endswith", "split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "find",
    "rfind", "index", "rindex", "count", "replace", "translate", "isdigit", "isdecimal",
}  # fmt: skip
"""Methods of a text that look at its words. `splitlines` and `strip` do not, nor does a `split` at white space whose
parts are joined again: they are for showing."""

SEARCHES = {"search", "match", "fullmatch", "findall", "finditer", "sub", "split"}
"""Functions of `re`, and methods of a compiled pattern."""


def decisions(root: Path) -> list[str]:
    """Each as `file:line: what`."""
    found = []
    for package in PACKAGES:
        for path in sorted((root / package).rglob("*.py")):
            relative = path.relative_to(root)
            if relative == HOME:
                continue
            for scope in _scopes(parsed(path)):
                found += [f"{relative.as_posix()}:{line}: {what}" for line, what in _in_scope(scope)]
    return sorted(found)


def _scopes(tree: ast.Module) -> Iterator[ast.AST]:
    """The functions, each with what is nested in it; and the module's own code, without its functions."""
    yield ast.Module([node for node in tree.body if not isinstance(node, (ast.FunctionDef, ast.ClassDef))], [])
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        elif isinstance(node, ast.ClassDef):
            pending += node.body


def _in_scope(scope: ast.AST) -> list[tuple[int, str]]:
    errors = {one.name for one in nodes(scope) if isinstance(one, ast.ExceptHandler) and one.name}
    for one in nodes(scope):
        if isinstance(one, ast.arg) and one.annotation is not None and "Exception" in ast.unparse(one.annotation):
            errors.add(one.arg)
    texts = _Texts(errors)
    texts.names |= {one.arg for one in nodes(scope) if isinstance(one, ast.arg) and _is_handed(one)}
    before = -1
    while len(texts.names) > before:  # a name may be used above the line that makes a text of it, in a loop
        before = len(texts.names)
        for node in nodes(scope):
            texts.learn(node)
    folded = {
        id(part)
        for node in nodes(scope)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join"
        for part in node.args
        if isinstance(part, ast.Call) and not part.args
    }
    return [(node.lineno, ast.unparse(node)) for node in nodes(scope) if texts.decides(node) and id(node) not in folded]


def _is_handed(one: ast.arg) -> bool:
    """Whether a parameter is a sentence, or several."""
    annotation = "" if one.annotation is None else ast.unparse(one.annotation)
    several = re.fullmatch(r"(Sequence|Iterable|Collection|list|set)\[str\]", annotation)
    return one.arg.removesuffix("s") in HANDED and (several is not None or annotation in ("str", "str | None"))


class _Texts:
    """Which expressions of a function are texts of failures.

    Args:
        errors: names of exceptions in it.
    """

    def __init__(self, errors: set[str]) -> None:
        self._errors = errors
        self.names: set[str] = set()

    def learn(self, node: ast.AST) -> None:
        """Take names that a statement gives to texts."""
        match node:
            case ast.Assign(targets=targets, value=value) if self.is_text(value):
                self.names |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
            case (
                ast.AnnAssign(target=ast.Name(id=name), value=value)
                | ast.NamedExpr(target=ast.Name(id=name), value=value)
            ) if value is not None and self.is_text(value):
                self.names.add(name)
            case ast.For(target=ast.Name(id=name), iter=iterated) if self.is_text(iterated):
                self.names.add(name)
            case ast.comprehension(target=ast.Name(id=name), iter=iterated) if self.is_text(iterated):
                self.names.add(name)
            case ast.MatchClass(kwd_attrs=attributes, kwd_patterns=patterns):
                for attribute, pattern in zip(attributes, patterns, strict=True):
                    if attribute in ATTRIBUTES and isinstance(pattern, ast.MatchAs) and pattern.name:
                        self.names.add(pattern.name)
            case _:
                pass

    def is_text(self, node: ast.AST) -> bool:
        """Whether an expression is the text of a failure, or made of one."""
        match node:
            case ast.Name(id=name):
                return name in self.names
            case ast.Attribute(value=ast.Name(id=name), attr="args") if name in self._errors:
                return True
            case ast.Attribute(attr=attribute):
                return attribute in ATTRIBUTES
            case ast.Subscript(slice=ast.Constant(value=key)) if key in KEYS:
                return True
            case ast.Subscript(value=value) | ast.Starred(value=value) | ast.FormattedValue(value=value):
                return self.is_text(value)
            case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=key), *_]) if key in KEYS:
                return True
            case ast.Call(func=ast.Name(id=tells) | ast.Attribute(attr=tells)) if tells in TELLS:
                return True
            case ast.Call(func=ast.Name(id=says) | ast.Attribute(attr=says), args=[first, *_]) if says in SAYS:
                return self.is_text(first) or (isinstance(first, ast.Name) and first.id in self._errors)
            case ast.Call(func=ast.Attribute(value=value, attr=method), args=arguments):
                return self.is_text(value) or (method == "join" and any(map(self.is_text, arguments)))
            case ast.JoinedStr(values=values) | ast.BoolOp(values=values):
                return any(map(self.is_text, values))
            case ast.BinOp(left=left, right=right):
                return self.is_text(left) or self.is_text(right)
            case ast.IfExp(body=body, orelse=otherwise):
                return self.is_text(body) or self.is_text(otherwise)
            case _:
                return False

    def decides(self, node: ast.AST) -> bool:
        """Whether an expression looks at the words of such a text."""
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr=method)) if method in TAKES_APART and self.is_text(
                value
            ):
                return True
            case ast.Call(func=ast.Attribute(attr=method), args=arguments) if method in SEARCHES:
                return any(map(self.is_text, arguments))
            case ast.Compare(left=left, ops=operators, comparators=others):
                # With None it is asked whether there is a text, not what it says.
                pairs = zip([left, *others], operators, others, strict=False)
                return any(
                    not isinstance(operator, (ast.Is, ast.IsNot)) and (self.is_text(one) or self.is_text(other))
                    for one, operator, other in pairs
                )
            case ast.Match(subject=subject):
                return self.is_text(subject)
            case _:
                return False
