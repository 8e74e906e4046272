"""Divide the time of one pass of our ring on one rank into computing, communication, merging, and the rest.

The ring's code stays as it is: the functions that do these things are wrapped with timers for a while. Such passes are
kept apart from the times from which ratios are formed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from ringverify.bench.patching import patched
from ringverify.ring.accumulate import Running, Sum
from ringverify.ring.kernels.choose import KERNELS
from ringverify.ring.transport import Transport

PHASES = ("compute", "communication", "merge", "other")
"""compute: in a kernel. communication: exposed, that is posting messages and waiting for them. merge: of partials, and
adding tiles' gradients to their blocks. other: whatever is left of the pass, packing and planning among it."""

MERGES = ((Running, "merge"), (Sum, "add"))
"""Methods that merge partial results, and that add tiles' gradients to those of their block."""


@dataclasses.dataclass
class Phases:
    """Seconds of one pass on one rank.

    Attributes:
        compute: in kernels.
        communication: posting messages and blocked in waits.
        merge: in merges and in sums of gradients.
    """

    compute: float = 0.0
    communication: float = 0.0
    merge: float = 0.0

    def timed(self, phase: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a wrapper that adds the seconds of each call to a phase."""

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **named: Any) -> Any:
                began = time.perf_counter()
                try:
                    return function(*args, **named)
                finally:
                    setattr(self, phase, getattr(self, phase) + time.perf_counter() - began)

            return called

        return wrap

    def started(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function that posts messages and returns a function that waits for them; both are timed."""
        post = self.timed("communication")(start)
        return lambda *args, **named: self.timed("communication")(post(*args, **named))


@contextlib.contextmanager
def taken_apart(*, wanted: bool) -> Iterator[Phases]:
    """Context that collects the phases of what runs in it, if that is wanted."""
    phases = Phases()
    with contextlib.ExitStack() as stack:
        if wanted:
            for kernel in {type(kernel) for kernel in KERNELS}:
                for name in ("forward", "backward"):
                    stack.enter_context(patched(kernel, name, phases.timed("compute")))
            stack.enter_context(patched(Transport, "start", phases.started))
            for owner, name in MERGES:
                stack.enter_context(patched(owner, name, phases.timed("merge")))
        yield phases
