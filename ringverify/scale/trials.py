"""Runs at length of one implementation in one world."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.running import shards
from ringverify.check.options import Options
from ringverify.check.planning import RunPlan, WorldName, open_world
from ringverify.events import PropertyEvent, Verdict
from ringverify.reports.progress import Progress
from ringverify.scale.growth import Growth
from ringverify.scale.rank import verify
from ringverify.scale.request import PROPERTIES
from ringverify.scale.sampling import rows_to_sample, sampled_count
from ringverify.scale.task import LongTask, RankReport, Way
from ringverify.scale.watching import noted, shown
from ringverify.targets import from_anywhere, load
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.processes.rank import ThisMachine
from ringverify.worlds.world import Load, Run, World

SECONDS = 6 * 3600.0
"""Default deadline of a run."""


def open_fast(name: WorldName) -> World:
    """Return a world in which bits need not be the same on every run."""
    return GlooWorld(ThisMachine(reproducible=False)) if name == "gloo" else open_world(name)


class Trials:
    """Runs cases at length, and shows how far each has come.

    Args:
        plan: of the implementation.
        world: where its ranks run.
        options: of the run.
        progress: is told how far a run has come.

    Attributes:
        capabilities: what the implementation declares.
        reports: of each case, what the ranks reported last, but for runs of which nothing is verified.
        peaks: of each case, the most bytes that the implementation took on a rank, in any run so far.
        grown: what its runs at short lengths took, if there were any.
    """

    def __init__(self, plan: RunPlan, world: World, options: Options, progress: Progress) -> None:
        self.plan, self.world, self.options, self.progress = plan, world, options, progress
        self.capabilities = plan.implementation.capabilities
        self.reports: dict[Case, Sequence[RankReport]] = {}
        self.peaks: dict[Case, int] = {}
        self.grown: Growth | None = None

    def run(self, way: Way, case: Case, *, deadline: float = SECONDS) -> tuple[Run, dict[int, Any]]:
        """Run the case on all ranks, showing how far rank 0 is; return also what each rank noted last."""
        sampled = rows_to_sample(case, self.capabilities, sampled_count(case))
        target, name = from_anywhere(self.plan.target), self.plan.implementation.name
        with tempfile.TemporaryDirectory(prefix="ringverify-scale-") as notes:
            task = LongTask(target, case, way, self.options.device, sampled, notes)
            with shown(self.progress, name, way, self._rows(way, case), Path(notes), self._seconds(case)):
                run = self.world.run(
                    verify,
                    task,
                    world_size=case.world_size,
                    seed=case.schedule,
                    deadline=self.options.deadline or deadline,
                    load=Load(target, load, self.options.load_deadline, self.progress.loading),
                )
            if run.failure is None:
                peaks = [one.memory[0] for one in run.results if one.memory is not None]
                self.peaks[case] = max([self.peaks.get(case, 0), *peaks])
                if way != "alone":
                    self.reports[case] = run.results
            return run, {rank: noted(Path(notes), rank) for rank in range(case.world_size)}

    def _seconds(self, case: Case) -> tuple[float, float] | None:
        """Return how long the implementation and verification will take, about; `None` if nothing is known."""
        if case in self.reports:
            inside, verifying = (
                [getattr(one, name)[0] for one in self.reports[case]] for name in ("inside", "verifying")
            )
            return max(inside), max(verifying)
        return None if self.grown is None else self.grown.seconds_at(case.problem)

    def event(
        self,
        property: str,
        verdict: Verdict,
        rows: int,
        began: float,
        *,
        margin: float | None = None,
        reason: str | None = None,
        figures: Sequence[str] = (),
    ) -> PropertyEvent:
        """Return the event of a property."""
        return PropertyEvent(
            implementation=self.plan.implementation.name,
            property=property,
            meaning=PROPERTIES[property],
            verdict=verdict,
            examples=rows,
            seconds=round(time.monotonic() - began, 3),
            margin=margin,
            reason=reason,
            figures=tuple(figures) or None,
        )

    def _rows(self, way: Way, case: Case) -> int:
        """Return how many rows of results rank 0 verifies, about."""
        p, c = case.problem, self.capabilities
        queries, keys = (len(of[0]) for of in shards(case, c))
        of_queries = 1 + c.lse + c.gradients if way == "every_row" else int(c.gradients)
        return p.batch * (p.heads * queries * of_queries + p.hk * keys * 2 * c.gradients)

    def shorter(self, case: Case, length: int) -> Case | None:
        """Return the case at a length; `None` if it is no shorter, or its implementation cannot do it."""
        p = case.problem
        if not 0 < length < p.nq or p.documents is not None or p.key_lengths is not None:
            return None
        problem = p.replace(query_length=length, key_length=None if p.nq == p.nk else length)
        small = dataclasses.replace(case, problem=problem)
        return small if why_unsupported(small, self.capabilities) is None else None
