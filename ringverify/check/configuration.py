"""`[tool.ringverify]` of pyproject.toml: a project's own defaults for the options of `ringverify check`.

Keys are the long option names of `ringverify.check.option_table`, and values are validated by the same functions as on
the command line, which takes precedence. Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringverify.check.option_table import EXCLUSIVE, OPTIONS, Option
from ringverify.errors import UsageError, instead
from ringverify.files import moved, read_toml
from ringverify.option_types import count, jobs, names, positive, seconds, sizes
from ringverify.targets import with_file

FILE = "pyproject.toml"
TABLE = "tool.ringverify"

WRITTEN: dict[Any, tuple[tuple[type, ...], str]] = {
    count: ((int,), "a whole number"),
    positive: ((int,), "a whole number"),
    seconds: ((int, float), "a number of seconds"),
    jobs: ((int, str), 'a whole number or "auto"'),
    names: ((list,), "a list of texts"),
    sizes: ((list,), "a list of whole numbers"),
}
"""The TOML types of an option, by the function that reads its value, and how messages name them; others are strings."""

TARGETS = "targets"
"""The key of the targets that are checked if the command line names none."""

KEYS: dict[str, Option | None] = {TARGETS: None, **{option.key: option for option in OPTIONS}}
"""The keys of the table, with their options; `None` for the targets."""


def configured(options: argparse.Namespace, folder: Path) -> argparse.Namespace:
    """Return the options of a command, completed from the project's file where the command line is silent.

    Args:
        options: what was typed; `None`, False and an empty list count as not given.
        folder: working directory; the nearest file with the table counts, in that folder or above it.

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
    if said & {*EXCLUSIVE}:  # -q on the command line overrides verbose in the file, and -v quiet
        said |= {*EXCLUSIVE}
    merged = argparse.Namespace(**vars(options))
    for key, value in table.items():
        place = f"{file}, [{TABLE}]: {key}"
        if key not in KEYS:
            raise UsageError(f"{place} is no option of check{instead(str(key).replace('_', '-'), KEYS)}")
        option = KEYS[key]
        name = TARGETS if option is None else option.name
        looked_at = _value(option, value, file.parent, folder, place)
        if name not in said:
            setattr(merged, name, looked_at)
    return merged


def _table(folder: Path) -> tuple[Path, Mapping[str, Any]] | None:
    """Return the nearest file that has the table, relative if it is in `folder` itself, and the table."""
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
    """Convert a value as the command line would; an option of `None` stands for the targets.

    Raises:
        UsageError: the value is of another type, or out of range.
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
        return [with_file(one, lambda path: moved(path, home, here)) for one in several]
    try:
        parsed = option.value(",".join(map(str, several)) if several else str(value))
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{place} is {error}") from None
    return Path(moved(str(value), home, here)) if isinstance(parsed, Path) else parsed
