"""How runs of the simulated world fail, what is said about it, and that the next run is healthy."""

import itertools
import os
import sys
import threading
import time
from functools import partial
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from simulated_runs import WORLD, failure, results
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.simulated.baton import Baton
from ringverify.worlds.world import WorldUnavailable

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def _the_next_run_is_healthy():
    """After every failure: no rank's thread is left running, and a run with messages and collectives succeeds."""
    yield
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]

    def program():
        rank, size = dist.get_rank(), dist.get_world_size()
        dist.isend(torch.tensor([rank]), (rank + 1) % size)
        dist.recv(buffer := torch.tensor([-1]), (rank - 1) % size)
        dist.all_reduce(buffer)
        return buffer.item()

    assert results(program, 3) == [3, 3, 3]


def test_a_deadlock_says_who_waits_for_whom():
    """A receive whose sender is at a barrier."""

    def program():
        if dist.get_rank() == 0:
            dist.recv(torch.empty(1), 1, tag=5)
        dist.barrier()

    found = failure(program, 2)
    assert (found.kind, found.rank) == ("deadlock", None)
    assert found.message == (
        "deadlock: rank 0 waits for a receive from rank 1, tag 5; "
        "rank 1 waits for barrier #0 of group [0, 1] (1 of 2 ranks missing: 0)"
    )


def test_a_deadlock_shows_where_each_rank_stands_and_what_lies_unreceived():
    """Lines of the program itself, and the message with the wrong tag."""

    def program():
        dist.send(torch.empty(2), 1 - dist.get_rank(), tag=dist.get_rank())
        dist.recv(torch.empty(2), 1 - dist.get_rank(), tag=dist.get_rank())

    found = failure(program, 2)
    lines = found.detail.splitlines()
    assert lines[:2] == [f"rank {rank} waits for a receive from rank {1 - rank}, tag {rank}" for rank in range(2)]
    for rank in range(2):
        place = lines[lines.index(f"rank {rank} at") + 1 :]
        assert any(__file__ in line and line.endswith(" in program") for line in place)
    assert "a message that nobody received: from rank 0 to rank 1, tag 0, group [0, 1], [2] float32" in lines
    assert "scheduler" not in found.detail
    assert os.path.join("ringverify", "worlds") not in found.detail
    assert os.path.join("torch", "distributed") not in found.detail


@pytest.mark.parametrize("seed", range(4))
def test_a_collective_that_a_rank_has_returned_without_is_a_deadlock(seed):
    """D10: an early return; the rank that returned is named as such."""

    def program():
        if dist.get_rank() != 1:
            dist.all_reduce(torch.empty(1))

    found = failure(program, 3, seed=seed)
    assert found.kind == "deadlock"
    assert found.message == (
        "deadlock: rank 0 waits for all_reduce(SUM) #0 of group [0, 1, 2] (1 of 3 ranks missing: 1); "
        "rank 1 has returned; "
        "rank 2 waits for all_reduce(SUM) #0 of group [0, 1, 2] (1 of 3 ranks missing: 1)"
    )


def test_a_deadlock_on_a_group_names_the_group():
    """Receives from one another on an offset group, and from anyone."""

    def program():
        group = dist.new_group([1, 2])
        if dist.get_rank() == 1:
            dist.recv(torch.empty(1), 2, group=group)
        if dist.get_rank() == 2:
            dist.recv(torch.empty(1), group=group)

    assert failure(program, 3).message == (
        "deadlock: rank 0 has returned; rank 1 waits for a receive from rank 2, tag 0, group [1, 2]; "
        "rank 2 waits for a receive from any rank, tag 0, group [1, 2]"
    )


def test_asking_for_ever_whether_a_receive_is_complete_is_a_deadlock():
    """A polling loop that nothing can end is reported without a timeout."""

    def program():
        work = dist.irecv(torch.empty(1), 1 - dist.get_rank())
        while not work.is_completed():
            pass

    found = failure(program, 2)
    assert found.kind == "deadlock"
    assert "rank 0 polls an operation that cannot complete" in found.message


def test_waiting_inside_a_functional_collective_is_unwound_too():
    """The wait is in C++ there."""

    def program():
        if dist.get_rank() == 0:
            functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).wait()

    assert "rank 0 waits for all_reduce(SUM) #0 of group [0, 1]" in failure(program, 2).message


def test_waiting_inside_backward_is_unwound_too():
    """A gradient that is not sent by the other rank."""

    class Lonely(torch.autograd.Function):
        @staticmethod
        def forward(ctx, tensor):
            return tensor * 2

        @staticmethod
        def backward(ctx, gradient):
            dist.recv(torch.empty(1), 1)

    def program():
        if dist.get_rank() == 0:
            Lonely.apply(torch.ones(1, requires_grad=True)).backward()

    assert failure(program, 2).message == "deadlock: rank 0 waits for a receive from rank 1, tag 0; rank 1 has returned"


@pytest.mark.parametrize("seed", range(4))
def test_ranks_that_call_different_collectives_are_told_both(seed):
    """A gather meets a reduction; a sum meets a maximum; root 0 meets root 1."""
    calls = [
        (lambda: dist.all_reduce(torch.empty(1)), "all_reduce(SUM)"),
        (lambda: dist.all_reduce(torch.empty(1), op=dist.ReduceOp.MAX), "all_reduce(MAX)"),
        (lambda: dist.broadcast(torch.empty(1), 0), "broadcast(from 0)"),
        (lambda: dist.broadcast(torch.empty(1), 1), "broadcast(from 1)"),
        (lambda: dist.barrier(), "barrier"),
    ]
    for pair in itertools.pairwise(calls):

        def program(pair=pair):
            dist.barrier()
            pair[dist.get_rank()][0]()

        found = failure(program, 2, seed=seed)
        assert found.kind == "raised"
        other = 1 - found.rank
        assert found.message == (
            f"rank {found.rank} raised RuntimeError: collective mismatch on group [0, 1], collective #1: "
            f"rank {found.rank} calls {pair[found.rank][1]}, but rank {other} called {pair[other][1]}"
        )


@pytest.mark.parametrize("seed", range(4))
def test_the_first_rank_to_raise_ends_the_run_with_its_own_traceback(seed):
    """User frames, chained causes, and none of the world's; the others are unwound."""
    unwound = []

    def deep():
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("first line\nsecond line") from error

    def program():
        if dist.get_rank() == 1:
            deep()
        try:
            dist.barrier()
        except Exception:  # the unwinding must not be caught here
            unwound.append("swallowed")
        finally:
            unwound.append(dist.get_rank())

    found = failure(program, 3, seed=seed)
    assert (found.kind, found.rank) == ("raised", 1)
    assert found.message == "rank 1 raised ValueError: first line"
    assert found.detail.splitlines()[-2:] == ["ValueError: first line", "second line"]
    assert "KeyError: 'inner'" in found.detail
    assert " in deep" in found.detail
    assert os.path.join("ringverify", "worlds") not in found.detail
    assert "swallowed" not in unwound
    assert set(unwound) <= {0, 2}


def test_an_exception_of_the_world_itself_shows_the_line_that_called():
    """A wrong buffer: the traceback ends in torch and the program, not in the world."""

    def program():
        if dist.get_rank() == 0:
            dist.send(torch.empty(1), 1)
        else:
            dist.recv(torch.empty(9), 0)

    found = failure(program, 2)
    assert "dist.recv(torch.empty(9), 0)" in found.detail
    assert os.path.join("ringverify", "worlds") not in found.detail


@pytest.mark.parametrize(
    ("leave", "message"),
    [
        (lambda: sys.exit(3), "rank 1 called sys.exit(3)"),
        (lambda: sys.exit(), "rank 1 called sys.exit()"),
        (lambda: sys.exit("why"), "rank 1 called sys.exit('why')"),
        (lambda: os._exit(3), "rank 1 called os._exit(3)"),
    ],
)
def test_a_rank_that_exits_is_a_failure_and_the_process_lives(leave, message):
    """Both exits, and `os._exit` is itself again afterwards."""
    real = os._exit

    def program():
        dist.barrier()
        if dist.get_rank() == 1:
            leave()
        dist.barrier()

    found = failure(program, 3)
    assert (found.kind, found.rank, found.message) == ("raised", 1, message)
    assert " in program" in found.detail
    assert os._exit is real


def test_an_exit_that_the_program_swallows_is_a_failure_all_the_same():
    """`os._exit` ends a process whatever catches what."""

    def program():
        try:
            os._exit(7)
        except BaseException:
            return "survived"

    assert failure(program, 1).message == "rank 0 called os._exit(7)"


def test_a_keyboard_interrupt_raised_by_a_rank_is_that_ranks_failure():
    """It is not the user's."""

    def program():
        raise KeyboardInterrupt

    assert failure(program, 2).message.endswith("raised KeyboardInterrupt")


def test_a_loop_without_end_is_ended_at_the_deadline():
    """The rank that holds the baton, the file and the line."""

    def program():
        if dist.get_rank() == 1:
            while True:
                pass
        dist.barrier()

    started = time.perf_counter()
    found = failure(program, 3, deadline=0.3)
    assert time.perf_counter() - started < 15
    assert (found.kind, found.rank) == ("deadline", 1)
    assert found.message.startswith(f"after 0.3 s rank 1 had not returned: it was at {__file__}:")
    assert found.message.endswith(" in program")


def test_a_loop_that_communicates_without_end_is_ended_at_the_deadline():
    """Every rank goes on for ever; whoever has the baton is named."""

    def program():
        while True:
            dist.barrier()

    assert failure(program, 2, deadline=0.3).kind == "deadline"


def test_whose_code_it_was_is_asked_before_ranks_unwind(monkeypatch):
    """A moment later they are in nobody's code, and a loop without end would be called our own."""
    stop = Baton.stop

    def slowly(baton, found):
        stop(baton, found)
        time.sleep(0.2)

    monkeypatch.setattr(Baton, "stop", slowly)

    def program():
        while True:
            dist.barrier()

    assert failure(program, 2, deadline=0.2).kind == "deadline"


def test_a_rank_that_sleeps_is_left_behind_and_later_runs_do_not_meet_it():
    """Its thread lives on; the run ends, others run, and it cannot communicate any more."""
    awake, said = threading.Event(), []

    def program():
        if dist.get_rank() == 0:
            try:
                awake.wait(20)  # in C, where no exception reaches it
            except BaseException:  # and when one does, it refuses
                said.append("woken")
            for attempt in (dist.barrier, dist.get_rank, lambda: dist.new_group([0]), lambda: os._exit(1)):
                try:
                    attempt()
                    said.append("alive")
                except BaseException as error:
                    said.append(type(error).__name__)
        dist.barrier()

    started = time.perf_counter()
    found = failure(program, 2, deadline=0.2)
    assert time.perf_counter() - started < 15
    assert (found.kind, found.rank) == ("deadline", 0)
    left = [thread for thread in threading.enumerate() if thread.name == "rank 0"]
    assert len(left) == 1
    assert results(dist.get_rank, 2) == [0, 1]
    assert not dist.is_initialized()
    awake.set()
    left[0].join(5)
    assert not left[0].is_alive()
    assert said[0] == "woken"
    assert len(said) == 5
    assert "alive" not in said
    assert results(dist.get_rank, 2) == [0, 1]


def test_a_rank_that_swallows_its_unwinding_is_left_behind():
    """`except BaseException` around every barrier."""
    enough = threading.Event()

    def program():
        if dist.get_rank() == 0:
            raise ValueError("first")
        while not enough.is_set():
            try:
                dist.barrier()
            except BaseException:
                time.sleep(0.01)

    assert failure(program, 2, seed=1).message == "rank 0 raised ValueError: first"
    left = [thread for thread in threading.enumerate() if thread.name == "rank 1"]
    enough.set()
    for thread in left:
        thread.join(5)


@pytest.mark.parametrize("waiting", [True, False])
def test_an_interrupt_in_the_main_thread_goes_through_and_unwinds_the_ranks(waiting):
    """Ctrl-C, while ranks wait for one another and while one computes."""
    import signal

    unwound = []

    def program(_):
        try:
            while True:
                if waiting:
                    dist.barrier()
        finally:
            unwound.append(1)

    threading.Timer(0.2, partial(os.kill, os.getpid(), signal.SIGINT)).start()
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        WORLD.run(program, None, world_size=2, seed=0, deadline=20)
    assert time.perf_counter() - started < 15
    assert unwound


def test_a_run_inside_a_rank_is_refused():
    """A world in a world is nobody's case."""

    def program():
        with pytest.raises(WorldUnavailable, match="a rank of a simulated world cannot start another simulated world"):
            SimulatedWorld().run(lambda _: None, None, world_size=1, seed=0, deadline=1)

    results(program, 2)


@pytest.mark.parametrize(("world_size", "deadline"), [(0, 1), (-2, 1), (2, 0), (2, -1), (2, float("nan"))])
def test_a_world_of_no_ranks_or_no_time_is_refused(world_size, deadline):
    """The value is named."""
    with pytest.raises(ValueError, match=f"={world_size if world_size < 1 else deadline}: expected"):
        WORLD.run(lambda _: None, None, world_size=world_size, seed=0, deadline=deadline)


@pytest.mark.parametrize("name", ["_set_thread_isolation_mode", "_register_process_group"])
def test_a_torch_that_lacks_an_interface_is_named_with_it(name, monkeypatch):
    """One line, which the caller can show, and nothing is changed."""
    with monkeypatch.context() as patch:
        patch.delattr(torch._C._distributed_c10d, name)
        with pytest.raises(WorldUnavailable, match=f"{name}, which torch .* lacks; use --world gloo"):
            WORLD.run(lambda _: None, None, world_size=1, seed=0, deadline=1)


class _LaterWorld(c10d._World):
    """The bookkeeping of a torch to come: something for each world, something for the process, and a number."""

    shared: ClassVar[dict[str, int]] = {}

    def __init__(self):
        super().__init__()
        self.hooks_of_later = {}
        self.count_of_later = 7

    @property
    def shared_of_later(self):
        return self.shared


def test_what_a_later_torch_keeps_begins_on_each_rank_as_it_does_in_torch(monkeypatch):
    """It is there, it is a rank's own, and the outer world's stays as it is."""
    monkeypatch.setattr(c10d, "_World", _LaterWorld)
    monkeypatch.setitem(_LaterWorld.shared, "the outer world's", 1)

    def program():
        world, rank = c10d._world, dist.get_rank()
        world.hooks_of_later[rank] = "mine"
        world.shared_of_later[rank] = "mine too"
        world.count_of_later += rank
        dist.barrier()
        return dict(world.hooks_of_later), dict(world.shared_of_later), world.count_of_later

    seen = results(program, 2)
    assert seen == [({0: "mine"}, {0: "mine too"}, 7), ({1: "mine"}, {1: "mine too"}, 8)]
    assert _LaterWorld.shared == {"the outer world's": 1}


def test_what_torch_itself_does_not_keep_is_missing_as_it_is_in_torch():
    """The rank raises what it would raise among processes; the world goes on."""
    found = failure(lambda: c10d._world.never_heard_of, 2)
    assert found.kind == "raised"
    assert "AttributeError" in found.message
    assert "never_heard_of" in found.message
