"""The command `ringverify peers`: published packages, and their environments. Importing it does not import torch."""

from __future__ import annotations

import argparse
from typing import Any

from rich.console import Console

from ringverify.environments import PACKAGES, PEER, install, package_named, why_missing
from ringverify.words import say_on


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "peers",
        help="list published packages, and install those that run in an environment of their own",
        description="Without an action, lists each package with its version, licence, and whether it is here. "
        "ringverify list peers lists the targets.",
    )
    parser.set_defaults(run=run)
    actions = parser.add_subparsers(metavar="ACTION")
    action = actions.add_parser(
        "install",
        help="make the environments of packages, anew if they are there",
        description="Makes a virtual environment below .ringverify/peers for each package, from pinned requirements.",
    )
    action.add_argument("names", nargs="+", metavar="NAME", help="a package, or a target of it")
    action.set_defaults(run=run_install)


def run(options: argparse.Namespace, console: Console) -> int:
    """List the packages, one a line, and return 0."""
    del options
    say = say_on(console.file)
    for package in PACKAGES:
        runs = "in its own environment" if package.targets else "beside ringverify"
        about = f"{package.name:<27}{package.version:<10}{package.licence:<14}{runs:<24}"
        say(f"{about}{why_missing(package) or 'is here'}")
    return 0


def run_install(options: argparse.Namespace, console: Console) -> int:
    """Make the environments, say how to check what is in them, and return 0.

    Raises:
        UsageError: a name is unknown, or its package runs in this environment.
        Inconclusive: an environment cannot be made.
    """
    say = say_on(console.file)
    for package in dict.fromkeys(package_named(name) for name in options.names):
        say(f"installing {package.name} {package.version} in {package.folder}")
        install(package)
        say(f"  ringverify check {' '.join(f'{PEER}{name}' for name, _ in package.targets)}")
    return 0
