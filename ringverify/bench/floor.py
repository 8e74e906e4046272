"""The floor of a ring: the time of the tile work of each rank, with nothing else around it.

The kernel's calls are recorded while the ring runs once, with the tensors they were given and the masks that were built
for them, and are then repeated: the same tiles by the same kernel on the same memory. Left out is all that makes it a
ring: messages, merges, sums of gradients, packing, building masks, and looking for values that are not finite. When the
calls are repeated, the buffers of KV blocks hold other blocks than before, which changes no time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ringverify.bench.patching import patched
from ringverify.ring.kernels.choose import KERNELS

if TYPE_CHECKING:
    from ringverify.bench.visiting import Attending

KernelCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Floor:
    """This rank's tile work, recorded and ready to be repeated.

    Args:
        attending: our ring with its inputs, which runs once here, on all ranks.
    """

    def __init__(self, attending: Attending) -> None:
        with recorded() as self._forward:
            out = attending.forward()
        with recorded() as self._backward:
            attending.backward(out)

    def forward(self) -> None:
        """Repeat the forward call of every tile."""
        _repeat(self._forward)

    def backward(self, made: None) -> None:
        """Repeat the backward call of every tile."""
        del made
        _repeat(self._backward)


@contextlib.contextmanager
def recorded() -> Iterator[list[KernelCall]]:
    """Record the calls of all kernels within this context, in order."""
    calls: list[KernelCall] = []

    def keep(method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            calls.append((method, args, named))
            return method(*args, **named)

        return called

    with contextlib.ExitStack() as stack:
        for kernel in {type(kernel) for kernel in KERNELS}:
            for name in ("forward", "backward"):
                stack.enter_context(patched(kernel, name, keep))
        yield calls


def _repeat(calls: list[KernelCall]) -> None:
    with torch.no_grad():
        for method, args, named in calls:
            method(*args, **named)
