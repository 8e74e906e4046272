"""Ways to misbehave: a right attention in which rank 1 of three goes wrong, each time in one other way.

Called before, in the middle of and after the communication that all ranks take part in. What hangs, hangs in naps, so
that a thread of a simulated world can be ended; what exhausts, exhausts in bounds.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from changed_settings import (
    changes_the_process,
    changes_torch_settings,
    fault,
    replaces_a_function_of_torch,
    seeds_random_numbers,
)
from right import attention

from ringverify import AttentionCall

LINGERING_SECONDS = 60.0
"""How long what is left behind would stay, if nobody ended it."""

MEGABYTE = 1 << 20

__all__ = [
    "changes_the_process",
    "changes_torch_settings",
    "replaces_a_function_of_torch",
    "seeds_random_numbers",
]  # defined next door, targets like the rest


def exchange(rows, call, *, to=1, source=-1, tag=0, receive=None):
    """What the left neighbour sent, this rank's rows sent to the right: one hop of a ring."""
    received = torch.empty_like(rows) if receive is None else receive
    size = call.world_size
    sending = dist.isend(rows, (call.rank + to) % size, tag=tag)
    dist.irecv(received, (call.rank + source) % size).wait()
    sending.wait()
    return received


def row(call):
    """A message of four numbers."""
    return torch.full((4,), float(call.rank))


# -- exceptions and exits ----------------------------------------------------------------------------------------------


@fault
def raises_before_communication(q, k, v, call: AttentionCall):
    """The others wait for it in a collective."""
    if call.rank == 1:
        raise ValueError("not even begun")
    return attention(q, k, v, call)


@fault
def raises_in_the_middle(q, k, v, call: AttentionCall):
    """Between two collectives."""
    dist.barrier(group=call.group)
    if call.rank == 1:
        raise ValueError("half way")
    return attention(q, k, v, call)


@fault
def raises_after_communication(q, k, v, call: AttentionCall):
    """The others have all they need."""
    out = attention(q, k, v, call)
    if call.rank == 1:
        raise ValueError("almost there")
    return out


@fault
def raises_in_backward(q, k, v, call: AttentionCall):
    """Right forward, and then nothing."""
    out = attention(q, k, v, call)
    if call.rank == 1 and out.requires_grad:
        out.register_hook(_refuse)
    return out


def _refuse(gradient):
    raise ValueError("no way back")


@fault
def raises_keyboard_interrupt(q, k, v, call: AttentionCall):
    """As if somebody had pressed Ctrl-C, which nobody did."""
    if call.rank == 1:
        raise KeyboardInterrupt
    return attention(q, k, v, call)


@fault
def recurses_for_ever(q, k, v, call: AttentionCall):
    """Until Python has had enough."""
    if call.rank == 1:
        _deeper()
    return attention(q, k, v, call)


def _deeper():
    _deeper()


@fault
def calls_sys_exit(q, k, v, call: AttentionCall):
    """Ends the interpreter politely."""
    if call.rank == 1:
        sys.exit(3)
    return attention(q, k, v, call)


@fault
def calls_os_exit(q, k, v, call: AttentionCall):
    """Ends the process rudely."""
    if call.rank == 1:
        os._exit(3)
    return attention(q, k, v, call)


@fault
def kills_itself(q, k, v, call: AttentionCall):
    """SIGKILL: as the kernel does when memory runs out."""
    if call.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attention(q, k, v, call)


@fault
def aborts(q, k, v, call: AttentionCall):
    """SIGABRT: as a failed assertion in C++."""
    if call.rank == 1:
        os.abort()
    return attention(q, k, v, call)


@fault
def reads_address_zero(q, k, v, call: AttentionCall):
    """SIGSEGV: as a kernel with a wrong index."""
    if call.rank == 1:
        ctypes.string_at(0)
    return attention(q, k, v, call)


# -- time --------------------------------------------------------------------------------------------------------------


@fault
def sleeps_for_ever(q, k, v, call: AttentionCall):
    """In naps."""
    while call.rank == 1:
        time.sleep(0.02)
    return attention(q, k, v, call)


@fault
def computes_for_ever(q, k, v, call: AttentionCall):
    """In Python."""
    while call.rank == 1:
        pass
    return attention(q, k, v, call)


@fault
def waits_for_its_own_lock(q, k, v, call: AttentionCall):
    """Taken twice. A thread cannot be ended in there, so it gives up after some seconds."""
    if call.rank == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=8)
    return attention(q, k, v, call)


# -- messages and collectives ------------------------------------------------------------------------------------------


@fault
def skips_a_collective(q, k, v, call: AttentionCall):
    """All but rank 1 meet at a barrier."""
    out = attention(q, k, v, call)
    if call.rank != 1:
        dist.barrier(group=call.group)
    return out


@fault
def joins_one_collective_too_many(q, k, v, call: AttentionCall):
    """Rank 1 alone waits at a barrier."""
    out = attention(q, k, v, call)
    if call.rank == 1:
        dist.barrier(group=call.group)
    return out


@fault
def starts_a_collective_that_nobody_joins(q, k, v, call: AttentionCall):
    """And does not wait for it: the results are right, the group is out of step."""
    out = attention(q, k, v, call)
    if call.rank == 1:
        dist.all_reduce(torch.zeros(1), group=call.group, async_op=True)
    return out


@fault
def other_collective(q, k, v, call: AttentionCall):
    """Rank 1 reduces where the others gather."""
    if call.rank == 1:
        dist.all_reduce(k.detach().clone(), group=call.group)
        dist.all_reduce(v.detach().clone(), group=call.group)
        return torch.zeros_like(q)
    return attention(q, k, v, call)


@fault
def gathers_another_shape(q, k, v, call: AttentionCall):
    """Rank 1 has more to gather than the others expect."""
    mine = torch.ones(6 if call.rank == 1 else 4)
    dist.all_gather([torch.empty_like(mine) for _ in range(call.world_size)], mine, group=call.group)
    return attention(q, k, v, call)


@fault
def sends_another_shape(q, k, v, call: AttentionCall):
    """Rank 1's message is longer than what its neighbour receives."""
    exchange(torch.ones(9) if call.rank == 1 else torch.ones(4), call, receive=torch.empty(4))
    return attention(q, k, v, call)


@fault
def sends_another_dtype(q, k, v, call: AttentionCall):
    """As many bytes as are expected, and other numbers."""
    wrong = torch.full((2,), 0.1, dtype=torch.float64)
    received = exchange(wrong if call.rank == 1 else torch.full((4,), 0.1), call, receive=torch.empty(4))
    return attention(q, k, v, call) + (received - 0.1).abs().sum()


@fault
def sends_with_another_tag(q, k, v, call: AttentionCall):
    """Rank 2 waits for tag 0."""
    exchange(row(call), call, tag=7 if call.rank == 1 else 0)
    return attention(q, k, v, call)


@fault
def sends_to_another_peer(q, k, v, call: AttentionCall):
    """Rank 1 sends to the left, where nobody listens; rank 2 waits for it."""
    exchange(row(call), call, to=-1 if call.rank == 1 else 1)
    return attention(q, k, v, call)


@fault
def sends_to_itself(q, k, v, call: AttentionCall):
    """Rank 1 counts ranks from one."""
    exchange(row(call), call, to=0 if call.rank == 1 else 1)
    return attention(q, k, v, call)


@fault
def sends_in_another_order(q, k, v, call: AttentionCall):
    """Values where keys are expected, and the reverse: a right ring but for what it adds."""
    first, second = torch.full((4,), 1.0), torch.full((4,), 2.0)
    if call.rank == 1:
        first, second = second, first
    received = exchange(first, call), exchange(second, call)
    return attention(q, k, v, call) + (received[1] - received[0] - 1).abs().sum()


@fault
def receives_what_nobody_sends(q, k, v, call: AttentionCall):
    """Rank 1 waits for a message from rank 0."""
    if call.rank == 1:
        dist.recv(torch.empty(1), 0)
    return attention(q, k, v, call)


@fault
def sends_what_nobody_receives(q, k, v, call: AttentionCall):
    """The next run must not receive it. A handle that is dropped would take the message back."""
    if call.rank == 1:
        KEPT.append(dist.isend(row(call), 2))
    return attention(q, k, v, call)


KEPT = []


@fault
def destroys_the_group_first(q, k, v, call: AttentionCall):
    """Rank 1 has no group to communicate in."""
    if call.rank == 1:
        dist.destroy_process_group()
    dist.barrier()
    return attention(q, k, v, call)


@fault
def destroys_the_group_afterwards(q, k, v, call: AttentionCall):
    """As every training script does at its end."""
    out = attention(q.detach(), k.detach(), v.detach(), call)
    dist.destroy_process_group()
    return out


# -- what is returned --------------------------------------------------------------------------------------------------


@fault
def returns_another_shape(q, k, v, call: AttentionCall):
    """One position short."""
    out = attention(q, k, v, call)
    return out[:, :-1] if call.rank == 1 else out


@fault
def returns_another_dtype(q, k, v, call: AttentionCall):
    """Wider than it went in."""
    out = attention(q, k, v, call)
    return out.double() if call.rank == 1 else out


# -- resources ---------------------------------------------------------------------------------------------------------


@fault
def leaves_a_child_behind(q, k, v, call: AttentionCall):
    """A fork that neither returns nor ends."""
    if call.rank == 1 and os.fork() == 0:
        time.sleep(LINGERING_SECONDS)
        os._exit(0)
    return attention(q, k, v, call)


@fault
def leaves_a_thread_behind(q, k, v, call: AttentionCall):
    """Not a daemon: Python would wait for it at its end."""
    if call.rank == 1:
        threading.Thread(target=_linger, name="left behind", daemon=False).start()
    return attention(q, k, v, call)


LEAVE = threading.Event()


def _linger():
    LEAVE.wait(LINGERING_SECONDS)


@fault
def asks_for_too_much_memory(q, k, v, call: AttentionCall):
    """More than there is: torch refuses at once."""
    if call.rank == 1:
        torch.empty(1 << 50, dtype=torch.uint8)
    return attention(q, k, v, call)


@fault
def raises_memory_error(q, k, v, call: AttentionCall):
    """As Python does."""
    if call.rank == 1:
        raise MemoryError
    return attention(q, k, v, call)


@fault
def uses_memory_up(q, k, v, call: AttentionCall):
    """Bit by bit, up to a limit that this rank's process sets itself."""
    if call.rank == 1:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + 256 * MEGABYTE
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        kept = []
        while True:
            kept.append(torch.ones(16 * MEGABYTE, dtype=torch.uint8))
    return attention(q, k, v, call)


@fault
def opens_files_until_none_is_left(q, k, v, call: AttentionCall):
    """Up to a limit that this rank's process sets itself."""
    if call.rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        while True:
            KEPT.append(os.open(os.devnull, os.O_RDONLY))
    return attention(q, k, v, call)


@fault
def floods_standard_output(q, k, v, call: AttentionCall):
    """Five megabytes, then a little on standard error."""
    if call.rank == 1:
        for _ in range(5):
            sys.stdout.write(("x" * 1023 + "\n") * 1024)
        print("a complaint", file=sys.stderr)
    return attention(q, k, v, call)


@fault
def closes_standard_streams(q, k, v, call: AttentionCall):
    """And then computes what it should."""
    if call.rank == 1:
        sys.stdin.close()
        sys.stdout.close()
        sys.stderr.close()
    return attention(q, k, v, call)


@fault
def closes_file_descriptors(q, k, v, call: AttentionCall):
    """The three that every process has, whatever Python thinks of it."""
    if call.rank == 1:
        for descriptor in range(3):
            os.close(descriptor)
    return attention(q, k, v, call)
