"""`[tool.ringverify]` of pyproject.toml: the options of `ringverify check`, as a project wants them.

Its keys are the names of `ringverify.check.option_table`, and a value is looked at by what looks at it on the command
line. The command line wins. Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringverify.check.option_table import EXCLUSIVE, OPTIONS, Option
from ringverify.errors import UsageError
from ringverify.files import read_toml
from ringverify.option_types import count, names, positive, seconds, sizes

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

TARGETS = "targets"
"""The key of what is checked where the command line names no target."""

KEYS: dict[str, Option | None] = {TARGETS: None, **{option.key: option for option in OPTIONS}}


def configured(options: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """The options of a command, and where the command line says nothing, those of the project's file.

    Args:
        options: what was typed; `None`, False and an empty list are not said.
        folder: where to begin; the nearest file with such a table counts, in that folder or above.

    Raises:
        UsageError: the file cannot be read, a key is unknown, or a value is of another type or impossible.
    """
    found = _table(folder)
    if found is None:
        return options
    file, table = found
    said = {name for name, value in vars(options).items() if value not in (None, False) and value != []}
    both = [key for key in EXCLUSIVE if table.get(key) is True]
    if len(both) > 1:
        raise UsageError(f"{file}, [{TABLE}]: {' and '.join(both)} are not both possible: leave one out")
    if said & {*EXCLUSIVE}:  # of -v and -q the file's gives way to the other on the line
        said |= {*EXCLUSIVE}
    merged = argparse.Namespace(**vars(options))
    for key, value in table.items():
        place = f"{file}, [{TABLE}]: {key}"
        if key not in KEYS:
            close = difflib.get_close_matches(str(key).replace("_", "-"), KEYS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(KEYS)}"
            raise UsageError(f"{place} is no option of check; {hint}")
        option = KEYS[key]
        name = TARGETS if option is None else option.name
        looked_at = _value(option, value, file.parent, folder, place)
        if name not in said:
            setattr(merged, name, looked_at)
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


def _value(option: Option | None, value: Any, home: Path, here: Path, place: str) -> Any:
    """What the command line would make of a value; `None` stands for the targets.

    Raises:
        UsageError: it is of another type, or impossible.
    """
    if option is not None and option.read is None:
        if not isinstance(value, bool):
            raise UsageError(f"{place} is {value!r}, expected true or false")
        return value
    types, expected = WRITTEN[names] if option is None else WRITTEN.get(option.read, ((str,), "a text"))
    several: list[Any] = value if isinstance(value, list) else []
    inner = int if option is not None and option.read is sizes else str
    if type(value) not in types or not all(type(one) is inner for one in several):
        raise UsageError(f"{place} is {value!r}, expected {expected}")
    if option is None:
        return [_target_from(home, here, one) for one in several]
    try:
        parsed = option.value(",".join(map(str, several)) if several else str(value))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{place} is {error}") from None
    return Path(_from(home, here, str(value))) if isinstance(parsed, Path) else parsed


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
