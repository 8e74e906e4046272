"""Import a published package at the version that its adapter was written for, or say in one line why that fails."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType

from ringverify.errors import Inconclusive

EXTRA = "pip install 'ringverify[peers]'"
"""Command that installs the packages of all adapters that need nothing but a CPU."""


def imported(
    module: str, *, peer: str, package: str, version: str, install: str = EXTRA, run_init: bool = True
) -> ModuleType:
    """Import a module of an installed package, which has to be of one version.

    Args:
        module: what to import, dotted.
        peer: the adapter's name, with which the line begins.
        package: the package's name in the registry.
        version: the one version whose claims the adapter declares.
        install: the command that installs it.
        run_init: whether to run the `__init__` of the outermost package, which may need more than the module does.

    Raises:
        Inconclusive: the package is missing, is of another version, or does not import.
    """
    needs = f"{peer} needs the package {package}=={version}"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise Inconclusive(f"{needs}: {install}") from None
    if found.partition("+")[0] != version:  # torch appends its build, such as +cpu
        raise Inconclusive(f"{needs}, found {found}: {install}")
    try:
        if not run_init:
            _without_init(module.partition(".")[0])
        return importlib.import_module(module)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise Inconclusive(f"{needs}, which does not import: {told}") from error


def _without_init(name: str) -> None:
    """Let modules of a package be found without running its `__init__`."""
    if name not in sys.modules and (spec := importlib.util.find_spec(name)) is not None:
        sys.modules[name] = importlib.util.module_from_spec(spec)


@contextlib.contextmanager
def replaced(modules: Mapping[str, ModuleType], *packages: str) -> Iterator[None]:
    """Context in which imports find these modules by their names, and `packages` are imported afresh.

    Afterwards `sys.modules` is as it was: later imports find what is installed.
    """
    names = {name.partition(".")[0] for name in (*modules, *packages)}
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    for name in hidden:
        del sys.modules[name]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(hidden)
