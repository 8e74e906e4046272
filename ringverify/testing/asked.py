"""What people ask of pytest, and in whose words it is refused. Importing this module does not import torch."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ringverify.check.option_table import ARGUMENTS, OPTIONS
from ringverify.check.options import CheckRequest
from ringverify.check.outcome import LOADS
from ringverify.errors import UsageError
from ringverify.testing.items import ROOM

Chosen = dict[str, tuple[str, ...] | None]
"""Properties by target; `None` is all of them."""


def option(name: str) -> str:
    """How a setting is typed."""
    return "--ringverify-" + name.replace("_", "-")


def in_our_words(message: str) -> str:
    """A message of `check`, which names its own options, with those of pytest."""
    known = "|".join(option.key for option in OPTIONS if option.pytest)
    return re.sub(rf"(?<![\w-])--({known})(?![\w-])", r"--ringverify-\1", message)


def request(config: pytest.Config) -> CheckRequest:
    """What the command line asks for, and where it says nothing, the project's configuration.

    Raises:
        UsageError: a value is impossible.
    """
    typed = {name: config.getoption(f"ringverify_{name}") for name in ARGUMENTS}
    written = {name: text for name in ARGUMENTS if (text := config.getini(f"ringverify_{name}"))}
    written |= {name: _from_here(config, text) for name, text in written.items() if ARGUMENTS[name].read is Path}
    file = config.inipath.name if config.inipath is not None else "configuration"
    return CheckRequest.of(typed, option).over(CheckRequest.of(written, lambda name: f"{file}: ringverify_{name}"))


def take_targets(config: pytest.Config) -> tuple[list[str], Chosen | None]:
    """The targets to check, and what of them, if ids of ours were given among pytest's arguments; these are taken out.

    Those of the configuration are checked where pytest is not told by arguments what to run.

    Raises:
        UsageError: an id has more parts than ours have.
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
    """The targets of the configuration."""
    return [_target_from_here(config, target) for target in config.getini("ringverify_targets")]


def _target_from_here(config: pytest.Config, target: str) -> str:
    file, _, attribute = target.rpartition(":")
    return f"{_from_here(config, file)}:{attribute}" if file.endswith(".py") else target


def _from_here(config: pytest.Config, path: str) -> str:
    """A path of the configuration, which is relative to its file, as it is from where pytest runs."""
    root, here = config.rootpath if config.inipath is None else config.inipath.parent, config.invocation_params.dir
    return path if root == here or os.path.isabs(path) else Path(os.path.relpath(root / path, here)).as_posix()
