"""The gloo world: every rank a process of its own, with `torch.distributed` over gloo on the loopback interface.

Ranks are forked from a server that has imported torch, join their group once and are kept warm for many runs; a case
is sent to them as data. A rank that raises, exits, aborts or hangs costs its pool of processes and nothing else: the
next run gets fresh ones. Importing this module does not import torch.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from ringverify.worlds.processes.pool import Pool
from ringverify.worlds.processes.rank import RankHost, ThisMachine
from ringverify.worlds.world import Failure, Load, Run, World, WorldRequest

MOST_PROCESSES = 16
"""How many ranks of all world sizes are kept warm at once, the most recently used sizes first."""


class GlooWorld(World):
    """A world of processes. One run at a time: a second thread waits for the first.

    A rank has one thread for torch, the seeds and settings of a fresh process, and the variables that torchrun sets
    (`RANK`, `WORLD_SIZE`, …). The default group is the same in run after run, as in a training job, unless a run has
    left it damaged, out of step or with messages that nobody received. Starting and loading do not count towards a
    deadline. Numpy arrays travel faster than tensors.

    Args:
        place: where ranks are started and with what; by default on this machine, with gloo.
        heard: called with a rank and a piece of its output in bytes, as it comes.
        called: what messages call this world; by default it is called by its name.
    """

    def __init__(
        self,
        place: RankHost | None = None,
        heard: Callable[[int, bytes], None] | None = None,
        called: str | None = None,
    ) -> None:
        self._place = place or ThisMachine()
        self.name = self._place.name
        self._heard = heard
        self._called = called or f"the {self.name} world"
        self._pools: OrderedDict[int, Pool] = OrderedDict()
        self._lock = threading.Lock()
        # Also at interpreter exit, and for a world that nobody closed.
        self._finalizer = weakref.finalize(self, _end_all, self._pools)

    def run_request(self, asked: WorldRequest) -> Run:
        """Run the program on processes that are kept for the next run, if this one leaves them usable."""
        began = time.monotonic()
        program, world_size = asked.program, asked.world_size
        body = _packed(program, asked.argument)
        load = asked.load or Load("", str)  # the program's own module is loaded in any case
        with self._lock:
            pool = self._pool(world_size, program.__module__)
            try:
                if not pool.has_loaded(name := f"{program.__module__}.{program.__qualname__}", load.what):
                    pool.load(_packed(_load, (program, load.call, load.what)), name, load)
                outcome = pool.run(body, asked.deadline)
            finally:
                if not pool.usable:
                    del self._pools[world_size]
                    pool.end()
        if isinstance(outcome, Failure):
            return Run((None,) * world_size, outcome, time.monotonic() - began, printed=pool.printed())
        results = tuple(pickle.loads(result) for result in outcome)
        return Run(results, None, time.monotonic() - began, printed=pool.printed())

    def _pool(self, world_size: int, program_module: str) -> Pool:
        if world_size in self._pools and not self._pools[world_size].is_alive():
            self._pools.pop(world_size).end()
        if world_size not in self._pools:
            while self._pools and sum(self._pools) + world_size > MOST_PROCESSES:
                self._pools.popitem(last=False)[1].end()
            self._pools[world_size] = Pool(self._place, world_size, program_module, self._called, self._heard)
        self._pools.move_to_end(world_size)
        return self._pools[world_size]

    @property
    def processes(self) -> Sequence[int]:
        """The ids of the processes on this machine that run ranks."""
        return [process for pool in self._pools.values() for process in pool.processes]

    def close(self) -> None:
        """End all processes. The world may be used again and then starts new ones."""
        with self._lock:
            _end_all(self._pools)


def _end_all(pools: OrderedDict[int, Pool]) -> None:
    while pools:
        pools.popitem()[1].end()


def _load(argument: tuple[Callable[[Any], Any], Callable[[str], Any], str]) -> None:
    """Load what a rank needs. The program's module was imported when the argument was unpickled."""
    _, call, what = argument
    call(what)
    gc.freeze()  # what was loaded stays: to look through it again and again took 6 % of a check


def _packed(program: Callable[[Any], Any], argument: Any) -> bytes:
    name = f"{getattr(program, '__module__', '?')}.{getattr(program, '__qualname__', repr(program))}"
    if getattr(program, "__module__", None) == "__main__":
        raise TypeError(f"program {name} cannot be sent to a process: move it out of the main script into a module")
    with contextlib.suppress(pickle.PicklingError, AttributeError, TypeError):
        return pickle.dumps((program, argument), protocol=5)
    raise TypeError(f"program {name} or its argument cannot be sent to a process: both have to be picklable")
