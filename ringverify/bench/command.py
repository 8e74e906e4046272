"""The options of `ringverify bench`. Importing this module does not import torch."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from ringref.problem import DTYPES
from ringverify.option_types import Renamed, branches, count, names, positive, sizes

PATTERNS = ("dense", "causal", "window", "documents", "uneven", "sinks", "dilation-split", "dilation-shared")
DEFAULT_CACHE: dict[Literal["decode", "prefill"], int] = {"decode": 131_072, "prefill": 16_384}
"""Positions in the cache of a decoded token, and of a chunk of a prompt."""


def add_parser(commands: Any) -> None:
    """Add the command `bench`."""
    parser = commands.add_parser(
        "bench",
        help="measure our ring's speed and memory beside all it can be compared with",
    )
    parser.add_argument(
        "--length", type=sizes, action="append", metavar="N,…", help="positions over all ranks (default: 4096)"
    )
    parser.add_argument("--ranks", type=sizes, default=(2,), metavar="P,…", help="numbers of ranks (default: 2)")
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument("--heads", type=positive, default=8, metavar="N", help="heads (default: 8)")
    parser.add_argument("--head-dim", type=positive, default=64, metavar="N", help="their dimension (default: 64)")
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
        help="only causal patterns, or only others (default: dense and causal; dilations not causal, all others "
        "causal)",
    )
    parser.add_argument(
        "--repeat", type=count, default=5, metavar="N", help="rounds that are measured (default: 5; 0: no times)"
    )
    parser.add_argument(
        "--sides",
        type=names,
        metavar="NAME,…",
        help="plain, ring, floor, allgather, world-of-1, local, dense-ring (beside a dilation), sinkless-ring and "
        "sinkless-allgather (beside sinks), peers, any TARGET of "
        "check (default: ours and peers)",
    )
    parser.add_argument(
        "--phases", action="store_true", help="also split our ring's time into compute, communication, merge and other"
    )
    parser.add_argument(
        "--memory", action="store_true", help="also measure peak memory per rank by component, beside the prediction"
    )
    for name, cached in DEFAULT_CACHE.items():
        what = "a decoded token" if name == "decode" else "a chunk of a prompt"
        parser.add_argument(
            f"--{name}",
            type=positive,
            nargs="?",
            const=0,
            metavar="N",
            help=f"measure {what} against a cache of N positions in pages (default: {cached}) on --ranks",
        )
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write everything as JSON")
    parser.add_argument("--report", dest="json", action=Renamed, now="--json")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw time and memory against length and ranks, as .svg or .png"
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="write the tables as a page")
    parser.add_argument("--saved", type=Path, metavar="FILE.json", help="measure nothing, show again what --json wrote")
    parser.set_defaults(run=bench)


def bench(options: argparse.Namespace, console: Console) -> int:
    """Run the command and return its exit code."""
    from ringverify.bench.run import BenchOptions, run
    from ringverify.bench.table import Tables
    from ringverify.bench.workload import Shape
    from ringverify.reports.terminal import ProgressBar

    caches = {name: getattr(options, name) for name in DEFAULT_CACHE if getattr(options, name) is not None}
    apart = caches and not (options.length or options.pattern or options.memory or options.dilation is not None)
    asked = BenchOptions(
        lengths=tuple(length for some in options.length or [() if apart else (4096,)] for length in some),
        ranks=options.ranks,
        shape=Shape(options.batch, options.heads, options.head_dim, options.dtype, options.dilation or None),
        dilated=options.dilation is not None,
        patterns=options.pattern,
        causal=options.causal,
        rounds=options.repeat,
        sides=options.sides,
        phases=options.phases,
        memory=options.memory,
        caches=tuple((name, caches[name] or DEFAULT_CACHE[name]) for name in DEFAULT_CACHE if name in caches),
        report=options.json,
        plot=options.plot,
        markdown=options.markdown,
        saved=options.saved,
    )
    # A bar that refreshes itself would take processor time from what is measured.
    return run(asked, Tables(console), ProgressBar(console, live=False))


def _patterns(text: str) -> tuple[str, ...]:
    found = names(text)
    for name in found:
        if name not in PATTERNS:
            raise argparse.ArgumentTypeError(f"{name!r}: expected some of {', '.join(PATTERNS)}")
    return found
