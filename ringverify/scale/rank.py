"""One rank's program at length: run the implementation on its shard, and verify what it returned where it lies.

Expected values are computed a piece at a time, by each rank for its own rows.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from ringverify.scale.every_row import every_row
from ringverify.scale.golden import checksums
from ringverify.scale.identities import identities
from ringverify.scale.long_run import LongRun
from ringverify.scale.sampled_rows import sampled_rows
from ringverify.scale.task import LongTask, RankReport, Way
from ringverify.worlds.whose import ours

VERIFY: dict[Way, Callable[[LongRun], None]] = {
    "every_row": every_row,
    "sampled_rows": sampled_rows,
    "identities": identities,
    "checksums": checksums,
    "alone": lambda run: None,
}
"""How results are verified."""


def verify(asked: LongTask) -> RankReport:
    """Run the implementation on this rank's shard, and verify what it returned.

    Raises:
        ContractError: it returned something other than the contract asks for.
    """
    with ours():
        run = LongRun(asked, dist.get_rank())
        before = _held_now(asked.device)
        dist.barrier()
        began = _clocks()
        run.run()
        inside = _since(began)
        after = _peak(asked.device)
        dist.barrier()  # a rank that is ahead would be in the others' way, and its time counted as theirs
        began = _clocks()
        VERIFY[asked.way](run)
        differences = tuple(run.compared.explained())
        verifying = _since(began)
        memory = None if before is None or after is None else (after - before, (_peak(asked.device) or 0) - before)
        run.note(everything=True)
        found = run.compared
        return RankReport(
            inside, verifying, memory, found.rows, found.margins, found.squares, differences, tuple(run.worth)
        )


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.thread_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    now = _clocks()
    return now[0] - began[0], now[1] - began[1]


def _held_now(device: str) -> int | None:
    """Return the bytes that are held now, from when on `_peak` counts; `None` if the system does not say."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak(device: str) -> int | None:
    """Return the most bytes that were held since `_held_now`: of a GPU by its tensors, else of this process."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def _status(name: str) -> int | None:
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) << 10
    return None
