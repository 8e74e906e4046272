"""Right numbers, and what is not the implementation's is changed; and those that only seem to change it."""

import contextlib
import functools
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from right import attention

from ringverify import AttentionCall, implementation


def named(function):
    """An implementation, named like its function in plain words."""
    return implementation(name=function.__name__.replace("_", " "), causal="both")(function)


# -- settings of torch -------------------------------------------------------------------------------------------------


@named
def leaves_another_default_dtype(q, k, v, call: AttentionCall):
    """For a constant of its own, and for everybody's from now on."""
    torch.set_default_dtype(torch.float64)
    return attention(q, k, v, call)


@named
def leaves_deterministic_algorithms_on(q, k, v, call: AttentionCall):
    """Other kernels, slower ones, and errors where there are none."""
    torch.use_deterministic_algorithms(True)
    return attention(q, k, v, call)


@named
def leaves_a_lower_matmul_precision(q, k, v, call: AttentionCall):
    """TF32 for all that is multiplied after it."""
    torch.set_float32_matmul_precision("medium")
    return attention(q, k, v, call)


@named
def leaves_an_attention_kernel_off(q, k, v, call: AttentionCall):
    """For every layer of the process."""
    torch.backends.cuda.enable_flash_sdp(False)
    return attention(q, k, v, call)


@named
def leaves_gradients_off(q, k, v, call: AttentionCall):
    """Whatever comes after it is not trained."""
    out = attention(q, k, v, call)
    torch.set_grad_enabled(False)
    return out


@named
def leaves_autocast_on(q, k, v, call: AttentionCall):
    """Entered and never left."""
    out = attention(q, k, v, call)
    torch.autocast("cpu", dtype=torch.bfloat16).__enter__()
    return out


@named
def leaves_another_default_device(q, k, v, call: AttentionCall):
    """Where new tensors have no data."""
    out = attention(q, k, v, call)
    torch.set_default_device("meta")
    return out


@named
def leaves_another_number_of_threads(q, k, v, call: AttentionCall):
    """More than it was given."""
    torch.set_num_threads(torch.get_num_threads() + 1)
    return attention(q, k, v, call)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out):
        return out.clone()

    @staticmethod
    def backward(ctx, gradient):
        torch.set_default_dtype(torch.float64)
        return gradient


@named
def leaves_another_default_dtype_in_backward(q, k, v, call: AttentionCall):
    """The forward is without fault."""
    return _InBackward.apply(attention(q, k, v, call))


LEAVES = {
    leaves_another_default_dtype: "default dtype",
    leaves_deterministic_algorithms_on: "deterministic algorithms",
    leaves_a_lower_matmul_precision: "float32 matmul precision",
    leaves_an_attention_kernel_off: "attention kernels",
    leaves_gradients_off: "grad mode",
    leaves_autocast_on: "autocast on cpu",
    leaves_another_default_device: "default device",
    leaves_another_number_of_threads: "number of threads",
    leaves_another_default_dtype_in_backward: "default dtype",
}
"""What each does not put back."""


# -- the call ----------------------------------------------------------------------------------------------------------


@named
def changes_positions(q, k, v, call: AttentionCall):
    """Shifts them where they lie."""
    out = attention(q, k, v, call)
    call.positions.add_(1)
    return out


@named
def changes_the_rank(q, k, v, call: AttentionCall):
    """Frozen, but not for everybody."""
    out = attention(q, k, v, call)
    object.__setattr__(call, "rank", call.rank + 1)
    return out


@named
def changes_the_problem(q, k, v, call: AttentionCall):
    """As if there were one head more."""
    out = attention(q, k, v, call)
    object.__setattr__(call.problem, "causal", not call.problem.causal)
    return out


CHANGES = {changes_positions: "call.positions", changes_the_rank: "call.rank", changes_the_problem: "call.problem"}
"""Which field of the call each changes."""


# -- groups and threads ------------------------------------------------------------------------------------------------


@named
def makes_a_group_a_call(q, k, v, call: AttentionCall):
    """With its sockets and threads, and never destroys it."""
    dist.new_group(dist.get_process_group_ranks(call.group))
    return attention(q, k, v, call)


STARTED, POOLS = [], []
"""Threads with what wakes each, and a pool of threads, if any."""


def start(target, wake):
    """Start a thread, which may live on."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    STARTED.append((thread, wake))


def end_threads():
    """End those of the calling process, which a test that comes after would find."""
    while STARTED:
        thread, wake = STARTED.pop()
        wake()
        thread.join()
    while POOLS:
        POOLS.pop().shutdown()


@named
def sends_afterwards(q, k, v, call: AttentionCall):
    """A thread goes on when the call has returned: what it sends meets the next layer's messages."""
    returned, neighbour = threading.Event(), dist.get_global_rank(call.group, (call.rank + 1) % call.world_size)

    def later():
        returned.wait()
        time.sleep(0.01)
        with contextlib.suppress(ValueError):  # the simulated world's group is known to its ranks' threads only
            dist.isend(torch.ones(1), neighbour, group=call.group)

    if call.world_size > 1:
        start(later, returned.set)
    out = attention(q, k, v, call)
    returned.set()
    return out


# -- right -------------------------------------------------------------------------------------------------------------


@named
def computes_with_another_default_dtype(q, k, v, call: AttentionCall):
    """Communication included, so that other ranks run meanwhile; and puts it back."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.ones(1).dtype == torch.float64
        out = attention(q, k, v, call)
        assert torch.ones(1).dtype == torch.float64
        return out
    finally:
        torch.set_default_dtype(before)


GROUPS = {}
"""A group of its own for each group that it is given."""


@named
def keeps_one_group(q, k, v, call: AttentionCall):
    """Made in the first call, for all that follow."""
    if call.group not in GROUPS:
        GROUPS[call.group] = dist.new_group(dist.get_process_group_ranks(call.group))
    dist.barrier(group=GROUPS[call.group])
    return attention(q, k, v, call)


@named
def destroys_its_groups(q, k, v, call: AttentionCall):
    """One a call, and none is left."""
    group = dist.new_group(dist.get_process_group_ranks(call.group))
    out = attention(q, k, v, call)
    dist.destroy_process_group(group)
    return out


@named
def keeps_a_thread_pool(q, k, v, call: AttentionCall):
    """Its threads compute, and wait for more."""
    if not POOLS:
        POOLS.append(ThreadPoolExecutor(max_workers=2))
    scaled = POOLS[0].submit(torch.mul, q.detach(), 1.0).result()
    return attention(q + (scaled - q.detach()), k, v, call)


@named
def leaves_an_idle_thread(q, k, v, call: AttentionCall):
    """A new one each time, that waits for what does not come."""
    anything = queue.SimpleQueue()
    start(anything.get, functools.partial(anything.put, "the end"))
    return attention(q, k, v, call)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call):
        ctx.save_for_backward(q, k, v)
        ctx.call = call
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return attention(q, k, v, call)

    @staticmethod
    def backward(ctx, gradient):
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = attention(*leaves, ctx.call)
        return *torch.autograd.grad(out, leaves, gradient), None


@named
def recomputes(q, k, v, call: AttentionCall):
    """Modes of torch, entered and left."""
    return _Recomputed.apply(q, k, v, call)


RIGHT = (
    computes_with_another_default_dtype,
    keeps_one_group,
    destroys_its_groups,
    keeps_a_thread_pool,
    leaves_an_idle_thread,
    recomputes,
)
