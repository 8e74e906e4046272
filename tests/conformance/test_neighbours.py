"""What an implementation finds, others find after it: torch's settings, the call, process groups, and silence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import neighbours
import pytest
import torch

from ringverify.cases.running import Runner
from ringverify.check.hunting import hunt
from ringverify.check.searching import Hunt
from ringverify.implementation import Implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds import torch_settings
from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(90)

NEIGHBOURS = Path(neighbours.__file__)


@pytest.fixture(scope="module", params=["simulated", "gloo"])
def world(request):
    """One world of each kind for all tests: what one leaves behind would be blamed on the next."""
    opened = SimulatedWorld() if request.param == "simulated" else GlooWorld()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def _threads_end():
    """So that tests that come after find none of them."""
    yield
    neighbours.end_threads()


def hunted(attend: Implementation, property: str, world, *, examples: int = 4) -> Hunt:
    """What is found of one property, on two ranks."""
    capabilities = dataclasses.replace(attend.capabilities, world_sizes=(2,))
    attend = dataclasses.replace(attend, capabilities=capabilities)
    name = attend.name.replace(" ", "_")
    target = f"{NEIGHBOURS}:{name}" if world.name == "gloo" else None
    runner = Runner(attend, world, target=target)
    return hunt(PROPERTIES[property], runner, examples=examples, seed=0, progress=lambda done: None, shrinking=False)


@pytest.mark.parametrize("attend", neighbours.LEAVES, ids=lambda one: one.name)
def test_a_setting_that_is_not_put_back_is_found(attend, world):
    """By its name, what it is and what it was; and it is put back, so that nobody else is judged by it."""
    before = torch_settings.values(torch_settings.EVERY)
    shown = hunted(attend, "inputs_untouched", world).counterexample
    assert shown is not None
    assert shown.violation.reason == ("left", neighbours.LEAVES[attend])
    assert shown.violation.rank == 0
    assert "did not put back torch's settings after forward" in shown.violation.summary
    assert torch_settings.values(torch_settings.EVERY) == before
    assert hunted(neighbours.recomputes, "inputs_untouched", world, examples=1).counterexample is None


@pytest.mark.parametrize("attend", neighbours.CHANGES, ids=lambda one: one.name)
def test_a_field_of_the_call_that_is_changed_is_found(attend, world):
    """In place or by force; the case itself is not changed with it."""
    shown = hunted(attend, "inputs_untouched", world).counterexample
    assert shown is not None
    assert shown.violation.reason == ("changed", neighbours.CHANGES[attend])
    assert hunted(attend, "forward", world).counterexample is None


def test_a_process_group_more_a_call_is_found(world):
    """Where each call is right by itself."""
    assert hunted(neighbours.makes_a_group_a_call, "gradients", world).counterexample is None
    shown = hunted(neighbours.makes_a_group_a_call, "reentrancy", world).counterexample
    assert shown is not None
    assert shown.violation.reason == ("leaked", "groups")
    assert shown.violation.summary == "each call on rank 0 leaves a process group behind: 5 after 5 calls"


def test_a_thread_that_sends_when_its_call_has_returned_is_found(world):
    """What it sends would meet the messages of whatever comes next."""
    shown = hunted(neighbours.sends_afterwards, "reentrancy", world).counterexample
    assert shown is not None
    assert shown.violation.reason == ("late",)


@pytest.mark.parametrize("property", ["inputs_untouched", "reentrancy"])
@pytest.mark.parametrize("attend", neighbours.RIGHT, ids=lambda one: one.name)
@pytest.mark.by_day(6)
def test_what_puts_back_keeps_or_only_waits_is_accused_of_nothing(attend, property, world):
    """Also where ranks take turns in the middle of it."""
    found = hunted(attend, property, world)
    assert found.counterexample is None
    assert found.examples == 4


def test_ranks_that_are_threads_have_settings_of_their_own():
    """As processes have, and the thread that started them finds its own afterwards."""

    def program(_):
        import torch.distributed as dist

        rank, seen = dist.get_rank(), []
        for dtype in (torch.float64, torch.float16, torch.float32):
            torch.set_default_dtype(dtype if rank else torch.float32)
            dist.barrier()
            seen.append(torch.get_default_dtype() == (dtype if rank else torch.float32))
        torch.set_default_dtype(torch.bfloat16)
        return seen

    run = SimulatedWorld().run(program, None, world_size=3, seed=1, deadline=20)
    assert run.results == ([True] * 3,) * 3
    assert torch.get_default_dtype() is torch.float32
