"""The command `ringverify reach`: its options and what it prints. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ringverify import files
from ringverify.errors import UsageError
from ringverify.option_types import count, positive, seconds
from ringverify.words import legible_lines, say_on

if TYPE_CHECKING:
    from ringverify.reach.run import ReachResult


def add_parser(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "reach",
        help="say whether context parallelism happens in a model: what reads what, on ranks and in one process",
        description="Builds a model on several ranks and in one process, changes one token after the other, and "
        "compares which outputs move, and outputs, loss and parameter gradients.",
        epilog="Exit codes: 0 the ranks do what one process does, 1 they do not, 2 usage, 3 inconclusive.",
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="function build(group) that returns a rank's model: FILE.py:build or module:build",
    )
    parser.add_argument("--ranks", type=positive, metavar="P", help="ranks (default: as declared, else 4)")
    parser.add_argument("--length", type=positive, metavar="N", help="tokens (default: as declared, else 64)")
    parser.add_argument(
        "--world", choices=("simulated", "gloo"), help="where ranks run (default: simulated; gloo if processes=True)"
    )
    parser.add_argument(
        "--seed", type=count, default=0, metavar="N", help="decides weights, tokens and labels (default: 0)"
    )
    parser.add_argument(
        "--deadline",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="time for one run (default: 60; there are five)",
    )
    parser.add_argument(
        "--load-deadline",
        type=seconds,
        default=120.0,
        metavar="SECONDS",
        help="time to import the target (default: 120)",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE.svg", help="write the picture")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="write a page with the verdict and the picture")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write the verdict and the picture as data")
    parser.add_argument("-v", "--verbose", action="store_true", help="show the stacks of ranks that fail")
    parser.add_argument("-q", "--quiet", action="store_true", help="print no picture")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    outputs = {"--svg": options.svg, "--html": options.html, "--json": options.json}
    for name, path in outputs.items():
        if path is not None and (reason := files.look_at_place(path)) is not None:
            raise UsageError(f"{name} {path}{reason}")

    from ringverify.reach import picture
    from ringverify.reach.run import ReachOptions, reach

    result = reach(
        ReachOptions(
            options.target,
            options.ranks,
            options.length,
            options.world,
            options.seed,
            options.deadline,
            options.load_deadline,
        )
    )
    say, said = say_on(console.file), told(result)
    for line in said[:-1]:
        say(line)
    if options.verbose and result.detail:
        print(legible_lines(result.detail), file=console.file)
    if result.pairs is not None and not options.quiet:
        for line in ["", *picture.lines(result), ""]:
            say(line)
    say(said[-1])
    if options.svg is not None and result.pairs is not None:
        files.write_named(options.svg, picture.svg(result))
    if options.html is not None:
        files.write_named(options.html, picture.page(result, said))
    if options.json is not None:
        files.write_named(options.json, files.laid_out(as_data(result)) + "\n")
    return 1 if result.findings else 0


def told(result: ReachResult) -> list[str]:
    """Tell a result in lines; the last one is the verdict."""
    where = f"{result.length} tokens, {result.sharding}, {result.world}"
    lines = [f"{result.target}: {result.ranks} ranks and one process, {where}"]
    if result.sent:
        forward, backward = (sum(one) for one in zip(*result.sent, strict=True))
        lines.append(f"  sent       {forward:,} bytes in the forward, {backward:,} in the backward")
    lines += [f"  {finding.kind:<10} {finding.text}" for finding in result.findings]
    lines += [f"  cause      {cause}" for cause in result.causes]
    if result.findings and not result.causes and result.pairs is not None:
        lines.append("  cause      unknown: none of the known faults does just this")
    if result.findings:
        return [*lines, f"  violations: {', '.join(dict.fromkeys(one.kind for one in result.findings))}"]
    return [
        *lines,
        f"  conformant: outputs read {result.expectation}, and differ by {result.differ:.2g} from one process "
        f"(allowed {result.allowed:.1g})",
    ]


def as_data(result: ReachResult) -> dict[str, Any]:
    """Return a result as JSON values; a digit for each pair: 0 not read, 1 read, 2 lost, 3 leaked, 4 NaN."""
    return {
        "target": result.target,
        "world": result.world,
        "ranks": result.ranks,
        "length": result.length,
        "sharding": result.sharding,
        "verdict": result.verdict,
        "findings": [{"kind": one.kind, "text": one.text} for one in result.findings],
        "causes": list(result.causes),
        "sent": [{"forward": forward, "backward": backward} for forward, backward in result.sent],
        "differ": result.differ,
        "allowed": result.allowed,
        "pairs": None if result.pairs is None else ["".join(map(str, row)) for row in result.pairs],
    }
