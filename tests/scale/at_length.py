"""Runs of the suite `scale` in a simulated world of this process."""

from __future__ import annotations

import tempfile

from ringverify.cases.case import Case
from ringverify.properties.suites import Method
from ringverify.scale.rank import verify
from ringverify.scale.sampling import rows_to_sample
from ringverify.scale.task import LongTask, RankReport
from ringverify.targets import load
from ringverify.worlds.simulated.world import SimulatedWorld


def reports(target: str, case: Case, method: Method = "every_row", count: int = 64) -> list[RankReport]:
    """What each rank found; `count` rows are sampled, about."""
    sampled = rows_to_sample(case, load(target).capabilities, count)
    with tempfile.TemporaryDirectory() as notes:
        asked = LongTask(target, case, method, "cpu", sampled, notes)
        run = SimulatedWorld().run(verify, asked, world_size=case.world_size, seed=0, deadline=200)
    assert run.failure is None, run.failure
    return list(run.results)
