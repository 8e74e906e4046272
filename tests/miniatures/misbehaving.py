"""Implementations that break the contract, each in one way, on two or three ranks: rank 1 is the one that differs."""

import functools
import os
import sys
import time

import torch
import torch.distributed as dist
from right import attention

from ringverify import AttentionCall, implementation

declared = functools.partial(implementation, world_sizes=(2, 3))


@declared(name="wrong shape")
def wrong_shape(q, k, v, call: AttentionCall):
    """One position short."""
    return attention(q, k, v, call)[:, :-1]


@declared(name="wrong dtype")
def wrong_dtype(q, k, v, call: AttentionCall):
    """Wider than it went in."""
    return attention(q, k, v, call).double()


@declared(name="wrong device")
def wrong_device(q, k, v, call: AttentionCall):
    """On a device without data."""
    return attention(q, k, v, call).to("meta")


@declared(name="returns None")
def returns_none(q, k, v, call: AttentionCall):
    """A forgotten return."""
    attention(q, k, v, call)


@declared(name="returns a tuple")
def returns_a_tuple(q, k, v, call: AttentionCall):
    """(out, lse), though no lse is declared."""
    out = attention(q, k, v, call)
    return out, out[..., 0].transpose(1, 2)


@declared(name="returns only out", lse=True)
def returns_only_out(q, k, v, call: AttentionCall):
    """The lse that is declared is missing."""
    return attention(q, k, v, call)


@declared(name="raises on one rank")
def raises_on_one_rank(q, k, v, call: AttentionCall):
    """The others wait in a collective for rank 1."""
    if call.rank == 1:
        raise ValueError("rank 1 cannot go on")
    return attention(q, k, v, call)


@declared(name="sys.exit on one rank")
def exits_on_one_rank(q, k, v, call: AttentionCall):
    """Ends the interpreter, politely."""
    if call.rank == 1:
        sys.exit(5)
    return attention(q, k, v, call)


@declared(name="os._exit on one rank")
def ends_its_process_on_one_rank(q, k, v, call: AttentionCall):
    """Ends the process, rudely."""
    if call.rank == 1:
        os._exit(7)
    return attention(q, k, v, call)


@declared(name="loops for ever")
def loops_for_ever(q, k, v, call: AttentionCall):
    """Rank 1 computes without end."""
    while call.rank == 1:
        pass
    return attention(q, k, v, call)


@declared(name="sleeps")
def sleeps(q, k, v, call: AttentionCall):
    """Rank 1 is in a call that does not return, at least not while anyone waits."""
    if call.rank == 1:
        time.sleep(15)
    return attention(q, k, v, call)


@declared(name="leaves a rank waiting")
def leaves_a_rank_waiting(q, k, v, call: AttentionCall):
    """Rank 0 waits for a message that rank 1 does not send."""
    if call.rank == 0:
        dist.recv(torch.empty(1), src=1)
    return attention(q, k, v, call)


@declared(name="returns NaN")
def returns_nan(q, k, v, call: AttentionCall):
    """One element of rank 1's output is no number."""
    out = attention(q, k, v, call)
    if call.rank == 1:
        spoiled = torch.zeros(out.shape)
        spoiled.view(-1)[0] = float("nan")
        out = out + spoiled
    return out


@declared(name="detaches")
def detaches(q, k, v, call: AttentionCall):
    """Right numbers, cut off from autograd."""
    return attention(q, k, v, call).detach()


@declared(name="changes its input")
def changes_its_input(q, k, v, call: AttentionCall):
    """Scales rank 1's queries where they lie, out of autograd's sight."""
    out = attention(q, k, v, call)
    if call.rank == 1:
        with torch.no_grad():
            q.add_(1.0)
    return out


@declared(name="prints a lot")
def prints_a_lot(q, k, v, call: AttentionCall):
    """Right, and noisy: more than any pipe holds."""
    for line in range(60):
        print(f"rank {call.rank} says line {line} " + "and so on " * 100)
        print(f"rank {call.rank} complains", file=sys.stderr)
    return attention(q, k, v, call)


@declared(name="raises backward")
def raises_backward(q, k, v, call: AttentionCall):
    """Forward is right; backward raises on rank 1."""
    out = attention(q, k, v, call)
    if call.rank == 1 and out.requires_grad:
        out.register_hook(_refuse)
    return out


def _refuse(gradient):
    raise RuntimeError("no way back")


calls = 0


@declared(name="wrong at first")
def wrong_at_first(q, k, v, call: AttentionCall):
    """Wrong in the first run of a process, right ever after."""
    global calls
    calls += 1
    out = attention(q, k, v, call)
    return out + 1 if calls <= call.world_size else out


@declared(name="wrong at times")
def wrong_at_times(q, k, v, call: AttentionCall):
    """Wrong in about one run of two, and never by the same amount."""
    error = int.from_bytes(os.urandom(3), "big")
    return attention(q, k, v, call) + (error if error % 2 else 0)


@declared(name="never the same")
def never_the_same(q, k, v, call: AttentionCall):
    """Wrong by another amount each time."""
    return attention(q, k, v, call) + int.from_bytes(os.urandom(3), "big")


@declared(name="odd [bold]name[/] :ring:")
def raises_odd_text(q, k, v, call: AttentionCall):
    """Its message has what terminals, markup and encodings stumble over."""
    raise ValueError("[bold]no[/bold] :ring: \N{GREEK CAPITAL LETTER SIGMA} \udc80 [/] \\")
