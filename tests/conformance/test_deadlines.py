"""Deadlines: what one property does with them is no other property's affair, and loading has one of its own."""

import dataclasses
import time

import pytest
import right

from ringverify import implementation
from ringverify.cases.running import Runner
from ringverify.check import finishing, run
from ringverify.check.hunting import hunt
from ringverify.check.options import Options, Subject
from ringverify.events import PropertyEvent
from ringverify.properties.catalogue import PROPERTIES
from ringverify.reports.progress import HIDDEN
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


ORDER = ("forward", "gradients")
"""A property that holds and takes its time, and one that hangs."""


@pytest.mark.parametrize("order", [ORDER, ORDER[::-1]], ids=" then ".join)
@pytest.mark.by_day(1)
def test_the_order_of_properties_changes_no_verdict(order, monkeypatch, tmp_path):
    """A property that hangs shortens the time of none that come after it, in one run of `check`."""
    monkeypatch.setattr(finishing, "HUNG_DEADLINE", SLOW / 3)
    monkeypatch.setattr(run, "open_world", lambda name: SimulatedWorld())
    events = []
    options = Options(deadline=DEADLINE, max_examples=1, cases=tmp_path)
    subject = Subject(f"{__file__}:slow_and_endless", slow_and_endless)
    run.check([subject], [PROPERTIES[id] for id in order], options, events.append, HIDDEN)
    verdicts = {event.property: event.verdict for event in events if isinstance(event, PropertyEvent)}
    assert verdicts == {id: "fail" if id == "gradients" else "pass" for id in order}


def test_a_runner_cannot_be_changed_and_another_propertys_log_begins_empty():
    """What a property could leave behind for the next one has no place to stay."""
    runner = Runner(right.attend, SimulatedWorld())
    with pytest.raises(dataclasses.FrozenInstanceError):
        runner.deadline = 1.0
    runner.log.notes.append("what one property saw")
    runner.log.runs = 3
    another = runner.for_another_property()
    assert (another.log.notes, another.log.runs) == ([], 0)
    assert runner.within(1.0).log is runner.log


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
