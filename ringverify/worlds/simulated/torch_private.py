"""The private interfaces of torch that the simulated world needs, in one place.

`torch.distributed` keeps its bookkeeping in a module variable, its groups in a registry in C++, and builds the backends
of a new group itself. For ranks that are threads, the bookkeeping must be the thread's own, the registry isolated by
thread, and the backends ours. None of that is public. Each name is looked up here when a run begins, and
`WorldUnavailable` says in one line which of them this version of torch lacks. What a version of torch keeps beyond
that, such as the flight recorder's hooks since 2.14, starts on each rank as it starts in torch itself.

| interface | for what |
|---|---|
| `distributed_c10d._world`, an object with the attributes of `RankBookkeeping` | a default group for each thread |
| `distributed_c10d._World`, its class, made without arguments | attributes that `RankBookkeeping` does not name |
| `distributed_c10d._new_process_group_helper(size, rank, ranks, backend, store, name, …)` | what `new_group` builds |
| `distributed_c10d._find_pg_by_ranks_and_tag` | groups that functional collectives ask for by tag |
| `_register_process_group`, `_unregister_all_process_groups` | resolving groups by name, from C++ |
| `_set_thread_isolation_mode` | a registry for each thread |
| `_set_global_rank` | the rank in torch's log lines, which a rank may have changed |
| `_push_on_torch_dispatch_stack`, `_pop_…`, `_len_…`, `_get_dispatch_stack_at` | a dispatch mode in and out any time |
| subclasses of `ProcessGroup` and `Work` in Python | `ringverify.worlds.simulated.process_group` |
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

# At its first import, its functions bind the default group of that moment as the default of `group`. Here that is no
# rank's.
import torch.distributed.nn.functional
from torch.distributed import distributed_c10d as c10d

from ringverify.worlds import refusals
from ringverify.worlds.world import WorldUnavailable

_COMMUNICATES = (
    *("send", "recv", "isend", "irecv", "batch_", "all_", "broadcast", "reduce", "gather", "scatter", "barrier"),
)
"""Name prefixes of the functions of `torch.distributed` that communicate."""

MakeGroup = Callable[[str, "tuple[int, ...]", str], dist.ProcessGroup]


class RankBookkeeping:
    """The bookkeeping of `torch.distributed` for one rank: the attributes of torch's `_World`, shared with no rank.

    An attribute that is not named here begins as in a new `_World` of this version of torch, apart for each rank.

    Attributes:
        make_group: builds this rank's handle of a group from its name, its global ranks and its description.
        exited: called with the status when this rank calls `os._exit`.
    """

    def __init__(self, rank: int, world_size: int, make_group: MakeGroup, exited: Callable[[int], None]) -> None:
        self.rank = rank
        self.world_size = world_size
        self.make_group = make_group
        self.exited = exited
        self._defaults = c10d._World()
        self.default_pg: Any = None
        self.pg_map: dict[Any, Any] = {}
        self.pg_names: dict[Any, str] = {}
        self.pg_group_ranks: dict[Any, dict[int, int]] = {}
        self.pg_backend_config: dict[Any, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[Any]] = {}
        self.pg_to_tag: dict[Any, str] = {}
        self.pg_coalesce_state: dict[Any, list[Any]] = {}
        self.closed = False

    @property
    def pg_config_info(self) -> list[dict[str, Any]]:
        """One dictionary a group, in the form that `torch.distributed` reports."""
        return [
            {
                "pg_name": name,
                "pg_desc": group.group_desc,
                "backend_config": self.pg_backend_config[group],
                "ranks": list(self.pg_group_ranks[group]),
                "group_size": len(self.pg_group_ranks[group]),
                "group_count": self.group_count,
            }
            for group, name in self.pg_names.items()
        ]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_defaults":
            raise AttributeError(name)
        value = getattr(self._defaults, name)
        if isinstance(value, (dict, list, set)):
            value = type(value)()  # torch keeps some of them for the whole process
        setattr(self, name, value)
        return value

    def register(self, group: dist.ProcessGroup, name: str, ranks: tuple[int, ...], backend: str, store: Any) -> None:
        """Make a group known to `torch.distributed` on the calling thread."""
        self.pg_map[group] = (backend, store)
        self.pg_names[group] = name
        self.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        self.pg_backend_config[group] = _backend_config(backend)
        _interface("_register_process_group")(name, group)

    def tag(self, group: dist.ProcessGroup, tag: str) -> None:
        """File a group under a user's tag, or under its own name if the tag is empty."""
        if tag:
            tag = f"user:{tag}"
        else:
            self.tags_to_pg.setdefault("", []).append(group)
            tag = f"ptd:{self.pg_names[group]}"
        self.tags_to_pg.setdefault(tag, []).append(group)
        self.pg_to_tag[group] = tag

    def close(self) -> None:
        """Forget every group, so that a thread that outlives its run finds `torch.distributed` not initialised."""
        self.closed = True
        self.default_pg = None
        for kept in (self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config, self.pg_coalesce_state):
            kept.clear()
        self.tags_to_pg.clear()
        self.pg_to_tag.clear()


def _no_rank(*_: Any) -> NoReturn:
    """Stand for what only a rank does, in the bookkeeping of threads that are none."""
    raise RuntimeError("this thread is no rank")


class _BookkeepingByThread:
    """Stands in for `distributed_c10d._world`, see `RankThreads`."""

    def __init__(self, outer: Any, of_thread: threading.local, threads: RankThreads) -> None:
        object.__setattr__(self, "outer", outer)
        object.__setattr__(self, "_of_thread", of_thread)
        object.__setattr__(self, "_threads", threads)

    @property
    def strange_calls(self) -> int:
        """How often a thread that is no rank's has tried to communicate since the run began."""
        calls: int = self._threads.strange_calls
        return calls

    @property
    def default_pg(self) -> Any:
        """The default group; asked thousands of times in a run, and found sooner here."""
        try:
            return self._of_thread.bookkeeping.default_pg
        except AttributeError:
            return self.__getattr__("default_pg")

    def __getattr__(self, name: str) -> Any:
        try:  # asked hundreds of times in a run
            world = self._of_thread.bookkeeping
        except AttributeError:
            self._threads.strange()
            world = self._threads.of_no_rank(self.outer)
        return getattr(world, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._threads.mine() or self._threads.of_no_rank(self.outer), name, value)


class RankThreads:
    """Gives ranks' threads their own `torch.distributed` while installed, and threads that were there before the outer.

    Any other thread finds it not initialised, for it may be one that a rank has started. The outer world has other
    ranks: gloo does not check to which of them a message goes, and may end the process.

    Attributes:
        strangers: whether a thread that is no rank's has used `torch.distributed` since the run began.
        strange_calls: how often such a thread has tried to communicate.
    """

    def __init__(self) -> None:
        self.strangers, self.strange_calls = False, 0
        self._known: frozenset[threading.Thread] = frozenset()
        self._outer_threads = self._known
        self._not_initialised = RankBookkeeping(0, 0, _no_rank, _no_rank)
        self._of_thread = threading.local()
        self._outer_helper: Callable[..., Any] | None = None
        self._leaving = threading.Lock()

    def mine(self) -> RankBookkeeping | None:
        """The calling thread's bookkeeping, or `None` if it is not a rank."""
        return getattr(self._of_thread, "bookkeeping", None)

    def install(self) -> None:
        """Put the per-thread bookkeeping in place.

        Raises:
            WorldUnavailable: this version of torch lacks an interface of the table above.
        """
        isolate = _interface("_set_thread_isolation_mode")
        for name in ("_register_process_group", "_unregister_all_process_groups", "_set_global_rank"):
            _interface(name)
        for name in ("_world", "_World", "_find_pg_by_ranks_and_tag", "_new_process_group_helper"):
            if not hasattr(c10d, name):
                raise WorldUnavailable(_lacking(f"distributed_c10d.{name}"))
        isolate(True)
        self.strangers, self.strange_calls, self._known = False, 0, frozenset(threading.enumerate())
        if self._outer_helper is None:
            self._outer_threads, self._not_initialised = self._known, RankBookkeeping(0, 0, _no_rank, _no_rank)
            self._outer_helper = c10d._new_process_group_helper
            c10d._new_process_group_helper = self._new_process_group_helper  # type: ignore[assignment] # fewer types
            c10d._world = _BookkeepingByThread(c10d._world, self._of_thread, self)  # type: ignore[assignment] # a stand-in
        self._outer_threads |= {threading.current_thread()}

    def of_no_rank(self, outer: Any) -> Any:
        """Return the bookkeeping that the calling thread finds, which is no rank's."""
        return outer if threading.current_thread() in self._outer_threads else self._not_initialised

    def strange(self) -> None:
        """Note that a thread that is no rank's uses `torch.distributed`, if the thread began after the run."""
        if threading.current_thread() in self._known:
            return
        self.strangers = True
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == c10d.__file__ and frame.f_code.co_name.startswith(_COMMUNICATES):
                self.strange_calls += 1  # calls that only ask for a rank, say, do not count
                return
            frame = frame.f_back

    def remove(self, ranks: Iterable[RankBookkeeping]) -> bool:
        """Give the outer `torch.distributed` back, unless a thread lives on that must not see it.

        Args:
            ranks: the ranks of the run that ends. One that still runs finds `torch.distributed` not initialised.

        Returns:
            Whether the outer one is back. If not, the per-thread bookkeeping stays until a later run ends.
        """
        with self._leaving:
            for bookkeeping in ranks:
                bookkeeping.close()
            _interface("_set_thread_isolation_mode")(False)
        outer = c10d._world.outer if isinstance(c10d._world, _BookkeepingByThread) else c10d._world
        alone = not any(map(_lives, set(threading.enumerate()) - self._outer_threads))
        if self._outer_helper is not None and alone:
            c10d._world = outer
            c10d._new_process_group_helper = self._outer_helper
            self._outer_helper = None
        _interface("_set_global_rank")(-1 if outer.default_pg is None else outer.default_pg.rank())
        return alone

    def enter(self, bookkeeping: RankBookkeeping, store: Any) -> None:
        """Make the calling thread a rank, with its default group initialised and backward on the same thread."""
        self._of_thread.bookkeeping = bookkeeping
        # Backward would otherwise run on threads of autograd's own, which are no rank's.
        torch.autograd.set_multithreading_enabled(False)
        everyone = tuple(range(bookkeeping.world_size))
        name = "simulated"  # never the name of a group of the outer world, whose registry a late thread might reach
        group = bookkeeping.make_group(name, everyone, "default_pg")
        bookkeeping.register(group, name, everyone, "gloo", store)
        bookkeeping.tag(group, "")
        bookkeeping.default_pg = group

    def leave(self) -> None:
        """Forget the groups of the calling thread. It stays a rank's thread, whose world is closed."""
        bookkeeping = self.mine()
        with self._leaving:
            # A thread that comes after its run has ended would forget the groups of the outer world.
            if bookkeeping is not None and not bookkeeping.closed:
                _interface("_unregister_all_process_groups")()
                bookkeeping.close()

    def _new_process_group_helper(
        self, size: int, rank: int, ranks: list[int], backend: Any, store: Any, name: str, *args: Any, **options: Any
    ) -> tuple[Any, Any]:
        bookkeeping = self.mine()
        if bookkeeping is None:
            assert self._outer_helper is not None
            made: tuple[Any, Any] = self._outer_helper(size, rank, ranks, backend, store, name, *args, **options)
            return made
        if name in bookkeeping.pg_names.values():
            raise ValueError(f"new_group: this rank has a group named {name!r} already")
        tag = options.get("pg_tag") or ""
        if tag and (existing := c10d._find_pg_by_ranks_and_tag(tag, ranks)):
            return existing, bookkeeping.pg_map[existing][1]
        members = tuple(ranks) or tuple(range(bookkeeping.world_size))
        if bookkeeping.rank not in members:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        refusals.check_backend(str(backend))
        group: Any = bookkeeping.make_group(name, members, options.get("group_desc") or "undefined")
        group.meet()
        bookkeeping.register(group, name, members, str(backend), c10d.PrefixStore(f"{name}/", store))
        bookkeeping.tag(group, tag)
        return group, bookkeeping.pg_map[group][1]


_TASKS = Path("/proc/self/task")
"""A folder for each thread of this process, where the system has it."""


def _lives(thread: threading.Thread) -> bool:
    """Return whether a thread lives that `threading` counts as alive.

    One that it did not start is counted from when it first asked who it is, before Python 3.13 for ever.
    """
    foreign = isinstance(thread, threading._DummyThread)
    return not foreign or not _TASKS.exists() or (_TASKS / str(thread.native_id)).exists()


_MODES = (
    "_push_on_torch_dispatch_stack",
    "_pop_torch_dispatch_stack",
    "_len_torch_dispatch_stack",
    "_get_dispatch_stack_at",
)


def check_modes() -> None:
    """Check that torch has the private interfaces that a watched run needs.

    Raises:
        WorldUnavailable: this version of torch lacks it.
    """
    for name in _MODES:
        if not hasattr(torch._C, name):
            raise WorldUnavailable(_lacking(f"torch._C.{name}"))


def push_mode(mode: object) -> None:
    """Push a dispatch mode on the calling thread's stack of modes.

    Torch's own `with mode:` keeps state for the whole process, which ranks that enter and leave in turns would mix up.
    """
    torch._C._push_on_torch_dispatch_stack(mode)  # type: ignore[arg-type] # typed as torch's own class


def pop_mode() -> None:
    """Pop the mode on top of the calling thread's stack."""
    torch._C._pop_torch_dispatch_stack(None)


def top_mode() -> object | None:
    """Return the mode on top of the calling thread's stack, which sees operations first, or `None`."""
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None


def make_store() -> Any:
    """A key-value store that the ranks of one run share."""
    return torch._C._distributed_c10d.HashStore()


def _interface(name: str) -> Callable[..., Any]:
    """Return a function of `torch._C._distributed_c10d`.

    Raises:
        WorldUnavailable: this version of torch lacks it.
    """
    found = getattr(torch._C._distributed_c10d, name, None)
    if found is None:
        raise WorldUnavailable(_lacking(f"torch._C._distributed_c10d.{name}"))
    function: Callable[..., Any] = found
    return function


def _lacking(what: str) -> str:
    return f"the simulated world needs {what}, which torch {torch.__version__} lacks; use --world gloo"


@functools.lru_cache(maxsize=16)
def _backend_config(backend: str) -> str:
    return str(c10d.BackendConfig(c10d.Backend(backend)))
