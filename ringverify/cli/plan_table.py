"""`ringverify plan`: what every rank would send and compute, drawn from the plan alone, without a tensor.

The first table has one row for each rank and one column for each step: the height of a bar shows the work at that step,
a number the bytes that arrived for it; where that is too wide, bars alone are drawn. The second table is the balance:
tiles by kind, pairs computed against pairs in the pattern, and each rank's share.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ringref.problem import Dilation, Problem
from ringref.sharding import ShardingName
from ringverify.cli.plan_work import RankWork, Work, works
from ringverify.errors import UsageError
from ringverify.ring.kernels.choose import choose_kernel
from ringverify.ring.kernels.kernel import Setting

BARS = " ▁▂▃▄▅▆▇█"
PASSED_ON = "·"
ELSEWHERE = "…"
NO_LIMIT = 1_000_000
"""Terminal width, in columns, at which any table fits."""


def plan_table(options: argparse.Namespace, console: Console) -> int:
    """Draw a plan and return 0.

    Raises:
        UsageError: the options do not describe a valid problem.
    """
    try:
        problem = _problem(options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    sharding: ShardingName = options.sharding
    bucket = options.bucket or _default_bucket(problem, options.ranks)
    found = works(problem, sharding, options.ranks, bucket)
    console.print(_title(problem, sharding, options.ranks, bucket), highlight=False)
    _draw(found, console)
    console.print("\nbalance: tiles by kind, pairs")
    console.print(_balance(found))
    computed, attended = (sum(one.total[name] for one in found) for name in ("computed", "attended"))
    if attended:
        console.print(
            f"\npairs computed / pairs in the pattern: {computed:,} / {attended:,} = {computed / attended:.3f}",
            highlight=False,
        )
    return 0


def _problem(options: argparse.Namespace) -> Problem:
    dilation = None
    if options.dilation is not None:
        dilation = Dilation(branches=options.dilation, heads=options.head_mode, head_offset=options.head_offset)
    return Problem(
        query_length=options.length,
        key_length=options.key_length,
        heads=options.heads,
        key_heads=options.key_heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
        causal=options.causal,
        window=_numbers("--window", options.window, unbounded=True),  # type: ignore[arg-type]  # Problem counts them
        documents=_numbers("--documents", options.documents),  # type: ignore[arg-type]  # none is unbounded here
        dilation=dilation,
    )


def _numbers(name: str, text: str | None, *, unbounded: bool = False) -> tuple[int | None, ...] | None:
    if text is None:
        return None
    try:
        return tuple(None if unbounded and one.strip() == "none" else int(one) for one in text.split(","))
    except ValueError:
        raise UsageError(f"{name} {text}: expected whole numbers separated by commas") from None


def _default_bucket(problem: Problem, ranks: int) -> int:
    dtype: torch.dtype = getattr(torch, problem.dtype)
    setting = Setting("cpu", dtype, torch.float32, problem.head_dim, problem.dv, problem.scale_value, None)
    return choose_kernel("auto", setting)[0].bucket(setting, -(-max(problem.nq, problem.nk) // ranks))


def _title(problem: Problem, sharding: str, ranks: int, bucket: int) -> str:
    said = ", ".join(f"{name}={value}" for name, value in problem.to_json().items() if name != "query_length")
    return f"{problem.nq:,} positions on {ranks} ranks, {sharding}: {said or 'dense'}; tiles of up to {bucket} rows"


def _draw(found: Sequence[RankWork], console: Console) -> None:
    """Print the table of steps, with bytes if the terminal is wide enough for them."""
    most = max((work["computed"] for one in found for work in one.steps), default=0)
    wide = _with_bytes(found, most)
    anywhere = console.options.update(width=NO_LIMIT)
    if console.measure(wide, options=anywhere).maximum <= console.width:
        console.print("\nstep by step: work as a bar, · passed on only; bytes received")
        console.print(wide)
    else:
        console.print("\nstep by step: work as a bar, · passed on only; own block first, then hop by hop")
        console.print(_narrow(found, most, console.width))


def _with_bytes(found: Sequence[RankWork], most: int) -> Table:
    """Return a table of one column for each step, with the bytes that arrived for it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    for step in range(max(len(one.steps) for one in found)):
        table.add_column("own" if step == 0 else f"hop {step}", justify="left", no_wrap=True)
    for one in found:
        cells = []
        for step, work in enumerate(one.steps):
            sign = _sign(step, work, most)
            bar = sign if sign == PASSED_ON else sign * 3
            cells.append(f"{bar} {_bytes(work['received'])}" if work["received"] else bar)
        table.add_row(str(one.rank), *cells)
    return table


def _narrow(found: Sequence[RankWork], most: int, width: int) -> Table:
    """Return a table of one character for each step, cut off where the terminal ends."""
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("steps", no_wrap=True)
    room = width - max(len("rank"), len(str(len(found)))) - 2
    for one in found:
        signs = "".join(_sign(step, work, most) for step, work in enumerate(one.steps))
        table.add_row(str(one.rank), signs if len(signs) <= room else signs[: room - 1] + ELSEWHERE)
    return table


def _sign(step: int, work: Work, most: int) -> str:
    """Return a bar for a rank's work at a step, relative to the largest; a dot if it only passes a block on."""
    if step > 0 and not work["computed"] and work["received"]:
        return PASSED_ON
    return BARS[-(-work["computed"] * (len(BARS) - 1) // most) if most else 0]


def _balance(found: Sequence[RankWork]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "queries", "full", "causal", "masked", "pairs computed", "of the mean", "received"):
        table.add_column(name, justify="right")
    totals = [one.total for one in found]
    mean = sum(total["computed"] for total in totals) / len(totals)
    for one, total in zip(found, totals, strict=True):
        share = f"{total['computed'] / mean:.2f}" if mean else "-"
        row: list[Any] = [one.rank, one.queries, total["full"], total["causal"]]
        row += [total["band"] + total["positions"], f"{total['computed']:,}", share, _bytes(total["received"])]
        table.add_row(*map(str, row))
    return table


def _bytes(number: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000  # type: ignore[assignment]
    return f"{number:.3g} TB"
