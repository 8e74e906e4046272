"""`[tool.ringverify]` of pyproject.toml: the options of `ringverify check`, as a project wants them.

There is no list of keys here: they are the options of the command's own parser, under their long names, and a value is
looked at by what looks at it on the command line. The command line wins. Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ringverify.errors import UsageError
from ringverify.files import read_toml
from ringverify.option_types import count, names, positive, seconds, sizes

if sys.version_info >= (3, 11):
    pass
else:
    pass

FILE = "pyproject.toml"
TABLE = "tool.ringverify"

WRITTEN: dict[Any, tuple[tuple[type, ...], str]] = {
    count: ((int,), "a whole number"),
    positive: ((int,), "a whole number"),
    seconds: ((int, float), "a number of seconds"),
    names: ((list,), "a list of texts"),
    sizes: ((list,), "a list of whole numbers"),
}
"""How TOML writes what an option is given as; every other option is a text there."""


def configured(options: argparse.Namespace, parser: argparse.ArgumentParser, folder: Path) -> argparse.Namespace:
    """The options of a command, and where the command line says nothing, those of the project's file.

    Args:
        options: what was typed; `None`, False and an empty list are not said.
        parser: the command's.
        folder: where to begin; the nearest file with such a table counts, in that folder or above.

    Raises:
        UsageError: the file cannot be read, a key is unknown, or a value is of another type or impossible.
    """
    found = _table(folder)
    if found is None:
        return options
    file, table = found
    known = dict(_keys(parser))
    said = {
        action.dest
        for action in known.values()
        if getattr(options, action.dest) not in (None, False) and getattr(options, action.dest) != []
    }
    for group in parser._mutually_exclusive_groups:  # of -v and -q the file's gives way to the other on the line
        of_group = {action.dest for action in group._group_actions}
        written = [key for key, action in known.items() if action.dest in of_group and table.get(key) is True]
        if len(written) > 1:
            raise UsageError(f"{file}, [{TABLE}]: {' and '.join(written)} are not both possible: leave one out")
        if said & of_group:
            said |= of_group
    merged = argparse.Namespace(**vars(options))
    for key, value in table.items():
        place = f"{file}, [{TABLE}]: {key}"
        if key not in known:
            close = difflib.get_close_matches(str(key).replace("_", "-"), known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise UsageError(f"{place} is no option of check; {hint}")
        looked_at = _value(known[key], value, file.parent, folder, place)
        if known[key].dest not in said:
            setattr(merged, known[key].dest, looked_at)
    return merged


def _table(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """The nearest file that has the table, as it is called from that folder, and the table."""
    for place in (folder, *folder.parents):
        file = place / FILE
        if not file.exists() or file.is_dir():
            continue
        shown = file.relative_to(folder) if place == folder else file
        try:
            content = read_toml(file)
        except OSError as error:
            raise UsageError(f"{shown} cannot be read as TOML: {error.strerror}") from None
        except ValueError as error:
            raise UsageError(f"{shown} cannot be read as TOML: {error}") from None
        tool = content.get("tool")
        if isinstance(tool, Mapping) and "ringverify" in tool:
            if not isinstance(tool["ringverify"], Mapping):
                raise UsageError(f"{shown}: [{TABLE}] is {tool['ringverify']!r}, expected a table of options")
            return shown, tool["ringverify"]
    return None


def _keys(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.Action]]:
    """The options that may be written, by their long names, and the targets."""
    for action in parser._actions:
        long = [option.removeprefix("--") for option in action.option_strings if option.startswith("--")]
        if not action.option_strings:
            yield action.dest, action
        elif long and long[0] != "help":
            yield long[0], action


def _value(action: argparse.Action, value: Any, home: Path, here: Path, place: str) -> Any:
    """What the command line would make of a value.

    Raises:
        UsageError: it is of another type, or impossible.
    """
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise UsageError(f"{place} is {value!r}, expected true or false")
        return value
    types, expected = WRITTEN[names] if action.nargs == "*" else WRITTEN.get(action.type, ((str,), "a text"))
    several: list[Any] = value if isinstance(value, list) else []
    inner = int if action.type is sizes else str
    if type(value) not in types or not all(type(one) is inner for one in several):
        raise UsageError(f"{place} is {value!r}, expected {expected}")
    if action.nargs == "*":
        return [_target_from(home, here, one) for one in several]
    text = ",".join(map(str, several)) if several else str(value)
    if action.choices is not None and text not in action.choices:
        raise UsageError(f"{place} is {value!r}, expected one of {', '.join(action.choices)}")
    if not callable(action.type):
        return text
    try:
        parsed = action.type(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{place} is {error}") from None
    return Path(_from(home, here, text)) if isinstance(parsed, Path) else parsed


def _target_from(home: Path, here: Path, target: str) -> str:
    file, separator, attribute = target.rpartition(":")
    if file.endswith(".py"):
        return f"{_from(home, here, file)}{separator}{attribute}"
    return target


def _from(home: Path, here: Path, path: str) -> str:
    """A path of the file, which is relative to it, as it is from the working directory."""
    if os.path.isabs(path) or home.resolve() == here.resolve():
        return path
    return Path(os.path.relpath(home / path, here)).as_posix()
