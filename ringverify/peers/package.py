"""A published package at the version that an adapter was written for, or one line on why there is no verdict on it."""

from __future__ import annotations

import importlib
import importlib.metadata
from types import ModuleType

from ringverify.errors import Inconclusive

EXTRA = "pip install 'ringverify[peers]'"
"""What installs the packages of all adapters that need nothing but a CPU."""


def imported(module: str, *, peer: str, package: str, version: str, install: str = EXTRA) -> ModuleType:
    """The module of an installed package.

    Args:
        module: what to import, dotted.
        peer: the adapter's name, with which the line begins.
        package: the package's name in the registry.
        version: the one version whose claims the adapter declares.
        install: the command that installs it.

    Raises:
        Inconclusive: the package is missing, is of another version, or does not import.
    """
    needs = f"{peer} needs the package {package}=={version}"
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise Inconclusive(f"{needs}: {install}") from None
    if found != version:
        raise Inconclusive(f"{needs}, found {found}: {install}")
    try:
        return importlib.import_module(module)
    except Exception as error:
        told = " ".join(f"{type(error).__name__}: {error}".split())
        raise Inconclusive(f"{needs}, which does not import: {told}") from error
