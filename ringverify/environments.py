"""Published packages that the tool knows, and the environments of those that run in one of their own.

Such a package has a folder below `.ringverify/peers` of the working directory: a virtual environment with the pinned
requirements of `ringverify/peers/workers`, where its worker lies too. Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

from ringverify.errors import Inconclusive, UsageError, instead

ENVIRONMENTS = Path(".ringverify") / "peers"
WORKERS = Path(__file__).parent / "peers" / "workers"
PEER = "peer:"
"""Prefix of the targets of published packages."""

INSTALLED = "installed.txt"
"""File in an environment that is whole: the requirements that it was made from."""


@dataclasses.dataclass(frozen=True)
class PublishedPackage:
    """A published package.

    Attributes:
        name: its name in the registry, and that of its environment.
        version: the one version whose claims its targets declare.
        licence: an SPDX expression, as the package names it.
        targets: the targets of a package with an environment of its own: what follows `peer:`, with what its worker is
            given as arguments. Others are imported, and are listed in `targets.BUILT_IN`.
    """

    name: str
    version: str
    licence: str
    targets: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @property
    def requirements(self) -> Path:
        """The file of the pinned requirements of its environment."""
        return WORKERS / f"{self.name}.txt"

    @property
    def worker(self) -> Path:
        """The program that runs it there."""
        return WORKERS / f"{self.name.replace('-', '_')}_worker.py"

    @property
    def folder(self) -> Path:
        """Its environment, which may not be there."""
        return ENVIRONMENTS / self.name

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return self.folder.absolute() / "bin" / "python"


PACKAGES = (
    PublishedPackage("ring-attention-pytorch", "0.5.20", "MIT"),
    PublishedPackage("ring-flash-attn", "0.1.8", "MIT"),
    PublishedPackage("yunchang", "0.6.4", "Apache-2.0"),
    PublishedPackage("torch", "2.13.0", "BSD-3-Clause"),
    PublishedPackage("diffusers", "0.42.1", "Apache-2.0"),
    PublishedPackage("deepspeed", "0.19.8", "Apache-2.0"),
    PublishedPackage("dilated-attention-pytorch", "0.2.0", "MIT"),
    PublishedPackage("natten", "0.21.7", "MIT"),
    PublishedPackage("ringattention", "0.1.2", "Apache-2.0", (("ringattention", ()),)),
    PublishedPackage(
        "tokamax",
        "0.0.12",
        "Apache-2.0",
        (
            ("tokamax-ring", ("default",)),
            ("tokamax-ring-natural", ("natural",)),
            ("tokamax-ring-as-tested", ("as-tested",)),
        ),
    ),
    PublishedPackage(
        "cache-dit",
        "1.5.3",
        "Apache-2.0",
        (
            ("cache-dit-ring", ("ring",)),
            ("cache-dit-ulysses", ("ulysses",)),
            ("cache-dit-ulysses-anything", ("ulysses-anything",)),
            ("cache-dit-usp", ("usp",)),
        ),
    ),
    PublishedPackage(
        "nemo-automodel",
        "0.7.0",
        "Apache-2.0",
        tuple((f"nemo-automodel-{way}", (way,)) for way in ("dense", "allgather", "halo", "a2a")),
    ),
    PublishedPackage("veomni", "0.1.12", "Apache-2.0", (("veomni-ulysses", ()),)),
    PublishedPackage(
        "torchtitan",
        "0.3.0",
        "BSD-3-Clause",
        (("torchtitan-sdpa", ("sdpa",)), ("torchtitan-flex", ("flex",))),
    ),
    PublishedPackage(
        "ejkernel",
        "0.0.80.3",
        "Apache-2.0",
        (
            ("ejkernel-ring", ("ring",)),
            ("ejkernel-ring-chunked", ("chunked",)),
            ("ejkernel-ring-sinks", ("sinks",)),
        ),
    ),
)
ELSEWHERE = {f"{PEER}{name}": package for package in PACKAGES for name, _ in package.targets}
"""The targets that run in environments of their own, and their packages."""


def package_named(name: str) -> PublishedPackage:
    """Return the package of this name, or the one that a target of this name runs.

    Raises:
        UsageError: there is none, or it runs in this environment.
    """
    known = {one.name: one for one in PACKAGES} | {target.removeprefix(PEER): one for target, one in ELSEWHERE.items()}
    found = known.get(name.removeprefix(PEER))
    if found is None:
        raise UsageError(f"unknown peer {name!r}{instead(name.removeprefix(PEER), known)}")
    if not found.targets:
        raise UsageError(f"{found.name} runs in this environment: pip install {found.name}=={found.version}")
    return found


def command(target: str) -> list[str]:
    """Return the words of the command that runs a target of `ELSEWHERE`.

    Raises:
        Inconclusive: its package is not installed, or in other versions than are wanted today.
    """
    package = ELSEWHERE[target]
    if (missing := why_missing(package)) is not None:
        raise Inconclusive(f"{target} {missing}")
    arguments = dict(package.targets)[target.removeprefix(PEER)]
    return [str(package.python), str(package.worker), *arguments]


def why_missing(package: PublishedPackage) -> str | None:
    """Say why a package cannot run here, and the command that installs it; `None` if it can."""
    if not package.targets:
        try:
            found = importlib.metadata.version(package.name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            return f"is not installed: pip install {package.name}=={package.version}"
        other = f"is here in version {found}: pip install {package.name}=={package.version}"
        return None if found == package.version else other
    try:
        made_from = (package.folder / INSTALLED).read_text(encoding="utf-8")
    except OSError:
        return f"is not installed: ringverify peers install {package.name}"
    same = made_from == package.requirements.read_text(encoding="utf-8") and package.python.exists()
    return None if same else f"is installed, but not as pinned today: ringverify peers install {package.name}"


def install(package: PublishedPackage) -> None:
    """Make the environment of a package anew, from its pinned requirements alone.

    Raises:
        Inconclusive: it cannot be made; the message names the requirement that failed.
    """
    shutil.rmtree(package.folder, ignore_errors=True)
    _run(package, sys.executable, "-m", "venv", "--without-pip", str(package.folder))
    options = ("--disable-pip-version-check", "--no-input", "--no-deps", "--quiet", "--retries=1")
    pip = (sys.executable, "-m", "pip", "--python", str(package.python), "install")
    _run(package, *pip, *options, "--requirement", str(package.requirements))
    shutil.copyfile(package.requirements, package.folder / INSTALLED)


def _run(package: PublishedPackage, *words: str) -> None:
    run = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if run.returncode:
        shutil.rmtree(package.folder, ignore_errors=True)
        raise Inconclusive(f"no environment for {package.name} could be made: {_why(run.stderr)}")


def _why(said: str) -> str:
    """Return what pip or venv said is wrong, in a line that names the requirement."""
    if "No module named pip" in said:
        return f"pip is missing here: {sys.executable} -m ensurepip"
    gone = re.search(r"satisfies the requirement (\S+) \(from versions: (.*)\)", said)
    if gone is None:
        errors = re.findall(r"^(?:ERROR|error): (.+)", said, re.MULTILINE)
        return errors[-1] if errors else (said.strip().splitlines() or ["no reason was given"])[-1]
    requirement, versions = gone.groups()
    if "connection" in said:  # with several indexes, the versions are those of the ones that answered
        return f"{requirement} cannot be downloaded: no network, or the package index does not answer"
    if versions != "none":
        return f"{requirement} is gone from the package index, which has {', '.join(versions.split(', ')[-3:])}"
    python = "; it needs another Python" if "Requires-Python" in said else ""
    return f"{requirement} is not in the package index{python}"
