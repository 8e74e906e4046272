"""`ringverify plan`: what every rank would send and compute, drawn from the plan alone, without a tensor.

One row a rank, one column a step: how much of the step's work there is, by the height of a bar, and the bytes that
arrived for it. Then the balance: tiles by kind, pairs computed against pairs in the pattern, and each rank's share.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from ringref.problem import Dilation, Problem
from ringref.sharding import ShardingName
from ringverify.errors import UsageError
from ringverify.ring.kernels.choose import choose_kernel
from ringverify.ring.kernels.kernel import Setting
from ringverify.ring.plan import Plan, make_plan
from ringverify.ring.regions import Region
from ringverify.ring.tiles import tiles

BARS = " ▁▂▃▄▅▆▇█"
MOST_STEPS = 32
"""Columns of the drawing; of longer passes the first ones are shown."""


def plan_table(options: argparse.Namespace, console: Console) -> int:
    """Draw a plan and return 0.

    Raises:
        UsageError: the options name no problem, or no world.
    """
    if options.ranks < 1:
        raise UsageError(f"--ranks {options.ranks}: expected at least 1")
    if options.bucket is not None and options.bucket < 1:
        raise UsageError(f"--bucket {options.bucket}: expected at least 1")
    try:
        problem = _problem(options)
    except ValueError as error:
        raise UsageError(str(error)) from None
    sharding: ShardingName = options.sharding
    plans = [make_plan(problem, sharding, options.ranks, rank) for rank in range(options.ranks)]
    bucket = options.bucket or _default_bucket(problem, options.ranks)
    works = [[_work(plan, step, bucket) for step in range(plan.schedule.steps)] for plan in plans]
    console.print(_title(problem, sharding, options.ranks, bucket), highlight=False)
    console.print("\nstep by step: work as a bar, · passed on only; bytes received")
    console.print(_drawing(plans, works))
    console.print("\nbalance: tiles by kind, pairs")
    console.print(_balance(plans, works))
    computed, attended = (sum(work[name] for rank in works for work in rank) for name in ("computed", "attended"))
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


def _work(plan: Plan, step: int, bucket: int) -> Counter[str]:
    """Tiles by kind, pairs computed and attended, and bytes received, of one rank at one step."""
    work: Counter[str] = Counter()
    moves = plan.schedule
    owner = moves.owner(step)
    if step > 0 and moves.reach[owner] >= step:
        itemsize: int = getattr(torch, plan.problem.dtype).itemsize
        work["received"] = plan.outward(owner, step - 1).numel * itemsize
    if not moves.computes[step]:
        return work
    for region in plan.regions(owner):
        heads = region.heads.size * (region.batch[1] - region.batch[0])
        work["attended"] += _pairs(region) * heads
        for tile in tiles(region, bucket, bucket):
            work[tile.kind] += 1
            rows, keys = tile.rows[1] - tile.rows[0], tile.keys[1] - tile.keys[0]
            # A fused kernel leaves out what lies above the diagonal of a causal square, block by block.
            work["computed"] += heads * (rows * (rows + 1) // 2 if tile.kind == "causal" else rows * keys)
    return work


def _pairs(region: Region) -> int:
    """Pairs of a region, per head."""
    rows = np.arange(region.queries.size)
    first = 0 if region.low is None else np.maximum(rows + region.low, 0)
    last = region.keys.size - 1 if region.high is None else np.minimum(rows + region.high, region.keys.size - 1)
    return int(np.maximum(last - first + 1, 0).sum() if np.ndim(last - first) else rows.size * (last - first + 1))


def _title(problem: Problem, sharding: str, ranks: int, bucket: int) -> str:
    said = ", ".join(f"{name}={value}" for name, value in problem.to_json().items() if name != "query_length")
    return f"{problem.nq:,} positions on {ranks} ranks, {sharding}: {said or 'dense'}; tiles of up to {bucket} rows"


def _drawing(plans: list[Plan], works: list[list[Counter[str]]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    shown = min(MOST_STEPS, max(len(work) for work in works))
    for step in range(shown):
        table.add_column("own" if step == 0 else f"hop {step}", justify="left", no_wrap=True)
    most = max((work["computed"] for rank in works for work in rank), default=0)
    for plan, rank in zip(plans, works, strict=True):
        cells = []
        for step, work in enumerate(rank[:shown]):
            height = -(-work["computed"] * (len(BARS) - 1) // most) if most else 0
            passing = step > 0 and not work["computed"] and work["received"]
            bar = "·" if passing else BARS[height] * 3
            cells.append(f"{bar} {_bytes(work['received'])}" if work["received"] else bar)
        table.add_row(str(plan.rank), *cells)
    return table


def _balance(plans: list[Plan], works: list[list[Counter[str]]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("rank", "queries", "full", "causal", "masked", "pairs computed", "of the mean", "received"):
        table.add_column(name, justify="right")
    totals = [sum(rank, Counter[str]()) for rank in works]
    mean = sum(total["computed"] for total in totals) / len(totals)
    for plan, total in zip(plans, totals, strict=True):
        share = f"{total['computed'] / mean:.2f}" if mean else "-"
        row: list[Any] = [plan.rank, plan.query_count, total["full"], total["causal"]]
        row += [total["band"] + total["positions"], f"{total['computed']:,}", share, _bytes(total["received"])]
        table.add_row(*map(str, row))
    return table


def _bytes(number: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000  # type: ignore[assignment]
    return f"{number:.3g} TB"
