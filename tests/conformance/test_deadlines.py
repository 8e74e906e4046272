"""Deadlines: what one property does with them is no other property's affair, and loading has one of its own."""

import time

import pytest
import right

from ringverify import implementation
from ringverify.cases.running import Runner
from ringverify.check import hunting
from ringverify.check.hunting import hunt
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.processes.contained import ContainedWorld
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.world import LoadTooLong

pytestmark = pytest.mark.timeout(90)

SLOW, DEADLINE = 0.15, 1.5


@implementation(name="slow, and endless in backward", world_sizes=(2,), causal="never")
def slow_and_endless(q, k, v, call):
    """Right and slow; its backward does not end."""
    end = time.monotonic() + SLOW
    while time.monotonic() < end:
        pass
    out = right.attend.function(q, k, v, call)
    if out.requires_grad:
        out.register_hook(_endless)
    return out


def _endless(gradient):
    while True:
        pass


def verdict(property, runner):
    """Whether a property is found violated, and why."""
    shown = hunt(PROPERTIES[property], runner, examples=1, seed=0, progress=lambda done: None).counterexample
    return None if shown is None else shown.violation.reason[0]


@pytest.mark.parametrize("order", [("forward", "gradients"), ("gradients", "forward")], ids=" then ".join)
def test_the_order_of_properties_changes_no_verdict(order, monkeypatch):
    """One that hangs does not shorten the time of those that come after it."""
    monkeypatch.setattr(hunting, "HUNG_DEADLINE", SLOW / 3)
    runner = Runner(slow_and_endless, SimulatedWorld(), deadline=DEADLINE)
    found = {property: verdict(property, runner) for property in order}
    assert found == {"forward": None, "gradients": "deadline"}
    assert runner.deadline == DEADLINE


def test_a_target_that_loads_too_long_is_not_loaded_again(tmp_path):
    """Each further property would wait as long for the same."""
    file = tmp_path / "endless.py"
    file.write_text("while True: pass\n")
    told = []
    runner = Runner(
        right.attend, ContainedWorld(), target=f"{file}:attend", load_deadline=0.3, loading=told.append, deadline=30.0
    )
    for _ in range(2):
        with pytest.raises(LoadTooLong, match="more with --load-deadline"):
            hunt(PROPERTIES["forward"], runner, examples=1, seed=0, progress=lambda done: None)
    runner.world.close()
    assert told == [f"{file}:attend", None]


def test_a_right_implementation_that_imports_slowly_is_right(tmp_path):
    """Though its import takes longer than a case may."""
    file = tmp_path / "slow.py"
    file.write_text(
        f"import sys, time\nsys.path.insert(0, {right.__file__.rpartition('/')[0]!r})\n"
        "end = time.monotonic() + 1.6\nwhile time.monotonic() < end: pass\nfrom right import attend\n"
    )
    runner = Runner(right.attend, ContainedWorld(), target=f"{file}:attend", deadline=DEADLINE)
    assert verdict("forward", runner) is None
    runner.world.close()
