"""The options of `ringverify bench`. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

from ringverify.option_types import Renamed, branches

PATTERNS = ("dense", "causal", "window", "documents", "uneven", "dilation-split", "dilation-shared")
DTYPES = ("float32", "bfloat16", "float16", "float64")


def add_parser(commands: Any) -> None:
    """Add the command `bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure our ring's speed and memory beside all it can be compared with",
    )
    add_options(parser)
    parser.set_defaults(run=bench)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options to the command's parser."""
    parser.add_argument(
        "--length", type=_sizes, action="append", metavar="N,…", help="positions over all ranks (default: 4096)"
    )
    parser.add_argument("--ranks", type=_sizes, default=(2,), metavar="P,…", help="numbers of ranks (default: 2)")
    parser.add_argument("--batch", type=_size, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument("--heads", type=_size, default=8, metavar="N", help="heads (default: 8)")
    parser.add_argument("--head-dim", type=_size, default=64, metavar="N", help="their dimension (default: 64)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of all tensors (default: float32)")
    parser.add_argument("--pattern", type=_patterns, default=(), metavar="NAME,…", help=", ".join(PATTERNS))
    parser.add_argument(
        "--dilation",
        type=branches,
        nargs="?",
        const=(),
        metavar="W:R,…",
        help="dilated patterns, with these branches of segment length and dilation rate (default: n/8:1,n/4:2,n/2:4)",
    )
    parser.add_argument(
        "--causal",
        action=argparse.BooleanOptionalAction,
        help="causal patterns only, or none (default: dense and causal; others are causal, but for dilations)",
    )
    parser.add_argument(
        "--repeat", type=_count, default=5, metavar="N", help="rounds that are measured (default: 5; 0: no times)"
    )
    parser.add_argument(
        "--sides",
        type=_names,
        metavar="NAME,…",
        help="plain, ring, floor, allgather, world-of-1, local, dense-ring (beside a dilation), peers, any TARGET of "
        "check (default: ours and peers)",
    )
    parser.add_argument("--phases", action="store_true", help="also where our ring's time goes")
    parser.add_argument("--memory", action="store_true", help="also peak bytes a rank, predicted and by component")
    parser.add_argument(
        "--crossover", action="store_true", help="instead: local, allgather and ring by length, and the cost of a hop"
    )
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write everything as JSON")
    parser.add_argument("--report", action=Renamed, now="--json")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time and memory against length and ranks, as .svg or .png"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the tables as a page")
    parser.add_argument("--saved", type=Path, metavar="FILE.json", help="measure nothing, show again what --json wrote")


def bench(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    from ringverify.bench.run import BenchOptions, run
    from ringverify.bench.table import Tables
    from ringverify.bench.workload import Shape
    from ringverify.reports.terminal import ProgressBar

    asked = BenchOptions(
        lengths=tuple(length for some in options.length or [(4096,)] for length in some),
        ranks=options.ranks,
        shape=Shape(options.batch, options.heads, options.head_dim, options.dtype, options.dilation or None),
        dilated=options.dilation is not None,
        patterns=options.pattern,
        causal=options.causal,
        rounds=options.repeat,
        sides=options.sides,
        phases=options.phases,
        memory=options.memory,
        crossover=options.crossover,
        report=options.json,
        plot=options.plot,
        markdown=options.markdown,
        saved=options.saved,
    )
    # A bar that refreshes itself would take processor time from what is measured.
    return run(asked, Tables(console), ProgressBar(console, live=False))


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_size(part) for part in text.split(","))


def _size(text: str) -> int:
    return _whole(text, 1)


def _count(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, minimum: int) -> int:
    if not text.strip().isdecimal() or int(text) < minimum:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {minimum}")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r}: expected names separated by commas")
    return names


def _patterns(text: str) -> tuple[str, ...]:
    for name in _names(text):
        if name not in PATTERNS:
            raise argparse.ArgumentTypeError(f"{name!r}: expected some of {', '.join(PATTERNS)}")
    return _names(text)
