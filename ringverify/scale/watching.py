"""How far a long run has come: what its ranks noted, and the bar that follows it."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringverify.reports.progress import Progress


def noted(notes: Path, rank: int) -> dict[str, Any]:
    """Return what a rank noted last; empty where it noted nothing, or on another machine."""
    with contextlib.suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((notes / f"{rank}.json").read_text())
        return found
    return {}


@contextlib.contextmanager
def shown(
    progress: Progress, name: str, way: str, rows: int, notes: Path, seconds: tuple[float, float] | None
) -> Iterator[None]:
    """Show how far rank 0 is.

    Args:
        progress: is told.
        name: of the implementation.
        way: how its results are verified.
        rows: how many rank 0 verifies.
        notes: folder in which ranks note how many they have verified.
        seconds: what the implementation and verification will take, about. The bar is then one of these seconds, and
            else one of rows, which stands still while the implementation runs.
    """
    over, began = threading.Event(), time.monotonic()
    total = rows if seconds is None else max(1, round(sum(seconds)))

    def done() -> int:
        verified: int = min(rows, sum(noted(notes, 0).get("rows", {}).values()))
        if seconds is None:
            return verified
        inside, verifying = seconds
        passed = inside + verifying * verified / rows if verified else min(time.monotonic() - began, inside)
        return min(total, int(passed))

    def watch() -> None:
        while not over.wait(0.5):
            progress.step(done())

    progress.start(name, way if seconds is None else f"{way}, in seconds", total)
    watching = threading.Thread(target=watch, name="ringverify-scale", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()
        progress.stop()
