"""The nccl world, without a GPU: everything but the device is exercised with gloo, and what needs a GPU says so."""

import dataclasses

import gloo_programs as programs
import pytest
import torch

from ringverify.check import run as running
from ringverify.check.planning import RunPlan
from ringverify.cli import main as cli
from ringverify.events import ImplementationEvent, PropertyEvent
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import load
from ringverify.worlds.processes import rank
from ringverify.worlds.processes.nccl import my_devices, nccl_world, share, visible_devices
from ringverify.worlds.processes.rank import ThisMachine, too_few_gpus
from ringverify.worlds.world import WorldUnavailable

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def two_gpus(monkeypatch):
    """A machine that says it has two GPUs, whose ranks run over gloo and do without."""
    monkeypatch.setattr("ringverify.worlds.processes.nccl.my_devices", lambda: ("0", "1"))
    monkeypatch.setattr(running, "open_world", lambda name: nccl_world(("0", "1"), backend="gloo"))
    monkeypatch.setattr(running, "find_device", lambda device: None)


def test_ranks_run_as_in_the_gloo_world():
    """The same programs, by the same protocol, under the name of this world."""
    world = nccl_world(("0", "1"), backend="gloo")
    try:
        assert world.name == "nccl"
        run = world.run(programs.collectives, None, world_size=2, seed=0, deadline=30)
        assert run.results == (1.0, 1.0)
        failed = world.run(programs.misbehave, "SIGKILL", world_size=2, seed=0, deadline=30)
        assert failed.failure.message == "rank 1's process was ended by signal SIGKILL"
        assert world.run(programs.collectives, None, world_size=2, seed=0, deadline=30).results == (1.0, 1.0)
    finally:
        world.close()


def test_more_ranks_than_gpus_are_refused_before_any_is_started():
    """In one line that says what would fit."""
    world = nccl_world(("0", "1"), backend="gloo")
    with pytest.raises(WorldUnavailable) as refused:
        world.run(programs.collectives, None, world_size=3, seed=0, deadline=30)
    assert str(refused.value) == (
        "world size 3 needs 3 GPUs, this machine has 2: "
        "use --world-sizes 1,2, --world gloo, or torchrun on more machines"
    )
    assert too_few_gpus(1, 0) == (
        "world size 1 needs 1 GPU, this machine has 0: use --world gloo, or torchrun on more machines"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(("options", "size"), [((), 1), (("--world-sizes", "2,4"), 4)])
def test_without_gpus_a_check_ends_with_3_before_any_work(options, size, tmp_path, monkeypatch, capsys):
    """One line, no output, no report, no folder for cases."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "ring", "--world", "nccl", "--report", "report.jsonl", *options]) == 3
    assert capsys.readouterr() == ("", f"ringverify: {too_few_gpus(size, 0)}\n")
    assert list(tmp_path.iterdir()) == []


def test_a_cpu_is_no_device_for_this_world(tmp_path, monkeypatch, capsys):
    """Asking for both is a mistake, told as one."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "ring", "--world", "nccl", "--device", "cpu"]) == 2
    assert "--device cpu: in the nccl world each rank has a GPU of its own; leave it out" in capsys.readouterr().err


def test_a_check_uses_the_world_sizes_that_fit(two_gpus, tmp_path):
    """Of those that every world of processes tries; no case needs more ranks than there are GPUs."""
    from ringverify.check.options import Options, Subject
    from ringverify.check.run import check
    from ringverify.properties.catalogue import select
    from ringverify.reports.progress import HIDDEN
    from ringverify.targets import load

    events = []

    options = Options(world="nccl", max_examples=4, cases=tmp_path / "cases")
    subjects = [Subject("ring", load("ring"))]
    assert check(subjects, select(["forward", "subgroups"], ()), options, events.append, HIDDEN) in (0, 3)
    told = {event.property: event for event in events if isinstance(event, PropertyEvent)}
    assert told["forward"].verdict == "pass"
    assert told["subgroups"].verdict in ("pass", "inconclusive"), told["subgroups"]
    (implementation,) = [event for event in events if isinstance(event, ImplementationEvent)]
    assert implementation.world == "nccl"


def test_where_there_is_one_gpu_sub_groups_are_unsupported():
    """Nothing could be drawn, and that is no reason for a run to be inconclusive: so it was on a machine with one."""
    plan = RunPlan("ring", load("ring"), load("ring").capabilities, "nccl", most_ranks=1)
    expected = "a sub-group leaves at least one rank out, and there is one in all"
    assert running.why_not(PROPERTIES["subgroups"], plan, "cuda") == expected
    assert running.why_not(PROPERTIES["subgroups"], dataclasses.replace(plan, most_ranks=2), "cuda") is None
    assert running.why_not(PROPERTIES["forward"], plan, "cuda") is None


def test_a_device_has_the_time_that_a_first_launch_takes():
    """Kernels are loaded, and some compiled, when they are first met: 10 s, as for threads on a CPU, were too few."""
    assert [running.usual_deadline(world) for world in ("simulated", "gloo", "nccl")] == [10, 30, 60]
    assert {running.usual_deadline(world, "cuda") for world in ("simulated", "gloo", "nccl")} == {60}
    assert running.usual_deadline("external", "cuda:1") == 120


def test_each_rank_sees_the_devices_of_its_world_and_takes_its_own(monkeypatch):
    """So that `cuda:0` is a rank's first GPU whichever part of the machine its world was given."""
    seats = []
    monkeypatch.setattr(rank, "LocalRank", lambda seat, directory, module: seats.append(seat))
    list(ThisMachine("nccl", "nccl", ("4", "5", "6")).start(2, "module"))
    assert [(seat.rank, seat.device, seat.visible, seat.backend) for seat in seats] == [
        (0, 0, "4,5", "nccl"),
        (1, 1, "4,5", "nccl"),
    ]
    assert seats[0].store is None


def test_names_of_devices_are_those_that_the_environment_gives():
    """Or numbers, where it gives none; never more than can be used."""
    assert visible_devices(3, {}) == ("0", "1", "2")
    assert visible_devices(2, {"CUDA_VISIBLE_DEVICES": "GPU-a, GPU-b"}) == ("GPU-a", "GPU-b")
    assert visible_devices(1, {"CUDA_VISIBLE_DEVICES": "3,7"}) == ("3",)
    assert visible_devices(0, {"CUDA_VISIBLE_DEVICES": ""}) == ()


@pytest.mark.parametrize("devices", range(9))
@pytest.mark.parametrize("workers", range(1, 6))
def test_pytest_workers_share_the_devices_among_them(devices, workers):
    """Every device is exactly one worker's, and the shares differ by one at most."""
    everyone = [str(number) for number in range(devices)]
    shares = [share(everyone, worker, workers) for worker in range(workers)]
    assert [device for part in shares for device in part] == everyone
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_worker_of_pytest_is_given_its_share(monkeypatch):
    """By the variables of pytest-xdist; anything else has all devices."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert my_devices({}) == ("0", "1", "2", "3")
    assert my_devices({"PYTEST_XDIST_WORKER": "gw1", "PYTEST_XDIST_WORKER_COUNT": "2"}) == ("2", "3")
    for replaced, theirs in (("gw2", ("0", "1")), ("gw5", ("2", "3"))):  # of two workers, as one after another died
        assert my_devices({"PYTEST_XDIST_WORKER": replaced, "PYTEST_XDIST_WORKER_COUNT": "2"}) == theirs
    assert my_devices({"PYTEST_XDIST_WORKER": "master", "PYTEST_XDIST_WORKER_COUNT": "2"}) == ("0", "1", "2", "3")
    with pytest.raises(ValueError, match="worker=2 of workers=2"):
        share(("0",), 2, 2)
