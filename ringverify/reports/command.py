"""The command `ringverify report`: makes a page, JUnit, Markdown and badges of reports. Nothing is run again."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify import files
from ringverify.errors import UsageError, complain
from ringverify.option_types import OUTPUTS
from ringverify.reports.badge import badges
from ringverify.reports.jsonl import ReportError
from ringverify.reports.junit import junit
from ringverify.reports.markdown import markdown
from ringverify.reports.page import page
from ringverify.reports.results import Results, Source, read_results
from ringverify.words import say_on

INDEX, BADGES = "index.html", "badges"
"""Names of the page and of the folder of its badges, in the folder of `--site`."""

FOLDERS = ("--badges", "--site")
"""Options that name a folder."""


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="make a page, JUnit, Markdown and badges of what check wrote",
    )
    parser.add_argument(
        "reports",
        nargs="+",
        metavar="[LABEL=]FILE.jsonl",
        help="what check --report wrote; labels tell runs apart",
    )
    add_outputs(parser)
    parser.add_argument("--site", type=Path, metavar="DIR", help="write the page DIR/index.html and its badges")
    parser.add_argument("--badges", type=Path, metavar="DIR", help="write a badge for each implementation")
    parser.set_defaults(run=run)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options for output files that several commands have."""
    for name, (metavar, text) in OUTPUTS.items():
        parser.add_argument(f"--{name}", type=Path, metavar=metavar, help=text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Write what is asked for and return the exit code: 0 whatever the verdicts are, which were given before.

    The exit code is 2 if a file could not be written; the other files are written all the same.

    Raises:
        ReportError: a report or an output cannot be used; nothing is written then.
    """
    outputs = Outputs.of(options)
    if not outputs.named:
        raise ReportError("nothing to write: name --html, --site, --junit, --markdown or --badges")
    sources = [Source.of(text) for text in options.reports]
    outputs.look(read=[source.path for source in sources])
    results = read_results(sources)
    written, missing = outputs.write(results)
    say = say_on(console.file)
    for path, size in written.items():
        say(f"{path}  {size / 1000:.1f} kB")
    return with_missing(0, missing)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """The output files that a command is to write; `None` where one is not asked for.

    Attributes:
        html: file of the page.
        site: folder for the page and its badges.
        junit: file of the JUnit XML.
        markdown: file of the Markdown summary.
        badges: folder for badges.
    """

    html: Path | None = None
    site: Path | None = None
    junit: Path | None = None
    markdown: Path | None = None
    badges: Path | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Outputs:
        """Read the outputs from the options of a command.

        `--html DIR`, the older form of `--site DIR`, is still accepted, with a line on standard error.
        """
        paths = {field.name: getattr(options, field.name, None) for field in dataclasses.fields(cls)}
        page = paths["html"]
        named_so = page is None or page.suffix.lower() in (".html", ".htm") or files.is_stream(page)
        if not named_so and paths["site"] is None:
            complain(f"--html {page} does not name a file FILE.html, and is taken for a folder: use --site {page}")
            paths |= {"html": None, "site": page}
        return cls(**paths)

    @property
    def named(self) -> dict[str, Path]:
        """The options that were given, each with its path."""
        pairs = {f"--{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: path for name, path in pairs.items() if path is not None}

    def look(self, *, read: Sequence[Path] = (), written: Sequence[Path] = ()) -> None:
        """Check that all outputs can be written, before any work is done.

        Args:
            read: files that are read, so that they must not be written to.
            written: files that another part of the command writes.

        Raises:
            ReportError: a path is used twice, has no parent folder or may not be written to.
        """
        taken = {path.resolve(): "is a report that is read" for path in read}
        taken |= {path.resolve(): "is named by --report too" for path in written}
        for option, path in self.named.items():
            for place in (path, path / INDEX) if option in FOLDERS else (path,):
                if files.is_stream(place):
                    continue
                if place.resolve() in taken:
                    raise ReportError(f"{option} {path} {taken[place.resolve()]}: name another")
                taken[place.resolve()] = f"is named by {option} too"
            if option in FOLDERS:
                _look_at_folder(option, path)
                if (path / INDEX).is_dir():
                    raise ReportError(f"{option} {path}: its index.html is a folder; name another folder")
            else:
                look_at_file(option, path)

    def write(self, results: Results) -> tuple[dict[Path, int], list[str]]:
        """Write all outputs, each file whole or not at all, and a page after the badges beside it.

        Returns:
            The sizes of the files that were written, and a line on each that could not be.
        """
        wanted: dict[Path, Callable[[], str]] = {}
        missing: list[str] = []
        folders = [self.badges] if self.badges is not None else []
        if self.site is not None:
            folders.append(self.site / BADGES)
        for folder in folders:
            wanted |= {folder / name: functools.partial(str, text) for name, text in badges(results).items()}
        if self.junit is not None:
            wanted[self.junit] = functools.partial(junit, results)
        if self.markdown is not None:
            wanted[self.markdown] = functools.partial(markdown, results)
        for path in (self.html, None if self.site is None else self.site / INDEX):
            if path is not None:
                wanted[path] = functools.partial(page, results)
        written: dict[Path, int] = {}
        for path, text in wanted.items():
            try:
                data = text().encode(errors="backslashreplace")
                path.parent.mkdir(parents=True, exist_ok=True)
                files.write_whole(path, data)
                written[path] = len(data)
            except OSError as error:
                missing.append(f"cannot write {path}: {error.strerror}; name another place")
            except Exception as error:
                missing.append(f"cannot write {path}: {type(error).__name__}: {error}, an error of ringverify itself")
        return written, missing


def with_missing(code: int, missing: Sequence[str]) -> int:
    """Return the exit code of a run: that of its verdict, but 2 instead of 0 if an output was not written.

    An exit code of 0 promises that all that was asked for was done.

    Args:
        code: exit code of the verdict.
        missing: a line on each output that was not written; it is printed on standard error.
    """
    for line in missing:
        complain(line)
    return code or (UsageError.exit_code if missing else 0)


def look_at_file(option: str, path: Path) -> None:
    """Check that the file an option names can be written, before any work is done.

    Raises:
        ReportError: it is a folder, has no parent folder or may not be written to.
    """
    if (reason := files.look_at_place(path)) is not None:
        raise ReportError(f"{option} {path}{reason}")


def _look_at_folder(option: str, path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ReportError(f"{option} {path} is a file: name a folder")
    if path.is_dir():
        if not os.access(path, os.W_OK | os.X_OK):
            raise ReportError(f"{option} {path}: no permission to write there; name another folder")
    else:
        look_at_file(option, path)
