"""Read what pytest is asked for: options, settings, targets and ids. Importing this module does not import torch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ringverify.check.option_table import ARGUMENTS, OPTIONS
from ringverify.check.options import CheckRequest
from ringverify.check.outcome import LOADS
from ringverify.errors import UsageError
from ringverify.files import moved
from ringverify.targets import with_file
from ringverify.testing.items import ROOM

Chosen = dict[str, tuple[str, ...] | None]
"""The properties chosen for each target; `None` means all of them."""


def option(name: str) -> str:
    """Return how the option of a setting is typed in pytest."""
    return "--ringverify-" + name.replace("_", "-")


def in_our_words(message: str) -> str:
    """Replace the names of options of `check` in a message by those of pytest."""
    known = "|".join(option.key for option in OPTIONS if option.pytest)
    return re.sub(rf"(?<![\w-])--({known})(?![\w-])", r"--ringverify-\1", message)


def request(config: pytest.Config) -> CheckRequest:
    """Return what the command line asks for, completed by the project's configuration.

    Raises:
        UsageError: a value is impossible.
    """
    typed = {name: config.getoption(f"ringverify_{name}") for name in ARGUMENTS}
    written = {name: text for name in ARGUMENTS if (text := config.getini(f"ringverify_{name}"))}
    written |= {name: _from_here(config, text) for name, text in written.items() if ARGUMENTS[name].read is Path}
    file = config.inipath.name if config.inipath is not None else "configuration"
    return CheckRequest.of(typed, option).over(CheckRequest.of(written, lambda name: f"{file}: ringverify_{name}"))


def take_targets(config: pytest.Config) -> tuple[list[str], Chosen | None]:
    """Return the targets to check, and the properties chosen by ids `ringverify::…` among pytest's arguments, if any.

    These ids are removed from the arguments. Targets of the configuration are checked only if no argument says what to
    run, or `ringverify::` does.

    Raises:
        UsageError: an id has more parts than a target and a property.
    """
    targets = list(config.getoption("ringverify") or ())
    ids = [argument for argument in config.args if argument.startswith(f"{ROOM}::")]
    chosen: Chosen | None = None
    if ids:
        config.args[:] = [argument for argument in config.args if argument not in ids]
        chosen = {}
        for id in ids:
            target, *properties = id.removeprefix(f"{ROOM}::").split("::")
            if len(properties) > 1:
                raise UsageError(f"{id!r}: expected {ROOM}::TARGET or {ROOM}::TARGET::PROPERTY")
            if target:
                before = chosen.get(target, ())
                whole = before is None or not properties or properties == [LOADS]
                chosen[target] = None if whole else (*before, *properties)  # type: ignore[misc]  # it is not None here
    if not targets and (config.args_source != config.ArgsSource.ARGS or f"{ROOM}::" in ids):
        targets = configured(config)
    if chosen:
        targets = list(chosen)
    return targets, chosen


def configured(config: pytest.Config) -> list[str]:
    """Return the targets of the configuration."""
    return [with_file(target, lambda path: _from_here(config, path)) for target in config.getini("ringverify_targets")]


def _from_here(config: pytest.Config, path: str) -> str:
    """Turn a path that is relative to the configuration file into one relative to where pytest runs."""
    home = config.rootpath if config.inipath is None else config.inipath.parent
    return moved(path, home, config.invocation_params.dir)
