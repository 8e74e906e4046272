"""A dispatch mode that sees the torch operations of a rank's thread, and so who touches a buffer in flight.

Torch shows each operation, those of a backward pass included, to the dispatch mode of its thread. That costs more than
most operations on small tensors take; so the mode is in place only while a buffer is in flight, unless memory is
counted too.

What it does not see: memory touched through numpy or by pointer; `tolist()`; the inside of an operation that is written
in Python, except for what its schema says; a node of a backward pass, while what is in flight was posted in another
node of the same pass; what happens under another dispatch mode of the program's own. Changes made there are found
later, by the poison in a receive buffer and by the copy of a send buffer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ringverify.worlds.simulated.torch_private import pop_mode, push_mode, top_mode
from ringverify.worlds.stacks import UserLine, place_of_caller
from ringverify.worlds.torch_private import TorchDispatchMode, direct_call, schema_of
from ringverify.worlds.watch.extents import covers, overlap, span
from ringverify.worlds.watch.hazards import HazardKind
from ringverify.worlds.watch.memory_meter import MemoryMeter

Touched = Callable[[Any, HazardKind, UserLine], None]
"""Called when a buffer in flight is touched: with the key it was announced with, the kind of hazard and the line."""


class _Busy(NamedTuple):
    """A buffer in flight: its key, the buffer, whether it may be read, and between which addresses a view can begin."""

    key: Any
    buffer: torch.Tensor
    readable: bool
    low: int
    high: int


class _Role(NamedTuple):
    """What an operation does with its arguments, and what its results are.

    Attributes:
        operation: the operation, kept alive so that no other one gets its address.
        call: calls it.
        touches: whether it uses elements of its arguments, and not their shapes alone.
        positions: positions of the arguments that it writes.
        keywords: names of the keyword-only arguments that are tensors, each with whether it is written.
        partial: it may touch only some elements of an argument, and which ones depends on data.
        makes: whether its results are new tensors, neither views nor arguments.
    """

    operation: Any
    call: Callable[..., Any]
    touches: bool
    positions: frozenset[int]
    keywords: Mapping[str, bool]
    partial: bool
    makes: bool


class RankMode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves its hooks untyped
    """The dispatch mode of one rank.

    Args:
        touched: see `Touched`.
        memory: counts what is allocated, if anything does.
    """

    # Dispatch operations that take functions like any other; torch would raise an error.
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that torch does not count this mode as one of the user's."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's guard against dynamo would double the cost of each operation

    def __init__(self, touched: Touched, memory: MemoryMeter | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # the same
        self._touched = touched
        self._memory = memory
        self._busy: list[_Busy] = []
        self._low, self._high = 0, 0  # bounds of the addresses of all of them
        self._inside = 0

    def add(self, key: Any, buffers: Sequence[torch.Tensor], *, readable: bool) -> None:
        """Announce buffers in flight, of a send (`readable`) or of a receive."""
        for buffer in buffers:
            if buffer.numel():
                low, high = buffer.untyped_storage().data_ptr(), span(buffer)[1]
                self._low, self._high = (min(low, self._low), max(high, self._high)) if self._busy else (low, high)
                self._busy.append(_Busy(key, buffer, readable, low, high))

    def remove(self, key: Any) -> None:
        """Forget the buffers announced with this key, which are no longer in flight."""
        # The bounds stay wider than they need be until nothing is in flight.
        self._busy = [busy for busy in self._busy if busy.key is not key]

    def in_the_way(self, buffer: torch.Tensor, *, readable: bool) -> Any:
        """Return the key of a buffer in flight that a send (`readable`) or receive buffer conflicts with, or `None`."""
        if self._busy and buffer.numel():
            at = buffer.data_ptr()
            for busy in self._busy:
                if busy.low <= at < busy.high and not (readable and busy.readable) and overlap(busy.buffer, buffer):
                    return busy.key
        return None

    def sync(self, *, over: bool = False) -> None:
        """Push the mode on the calling thread's stack of modes if it has something to watch, and pop it if not.

        The stack is inspected each time, since a backward pass restores it after each of its nodes.

        Args:
            over: the program has ended, so there is nothing more to watch.
        """
        if self._inside:
            return  # within `__torch_dispatch__` torch has popped the mode, and pushes it again
        wanted = not over and (bool(self._busy) or self._memory is not None)
        top = top_mode()
        if wanted and top is None:  # above a mode of the program's own, it would be popped when that one leaves
            push_mode(self)
        elif not wanted and top is self:
            pop_mode()

    def hide(self) -> None:
        """Pop the mode until the next `sync`, because the world itself is about to use torch."""
        if not self._inside and top_mode() is self:
            pop_mode()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        role = _ROLES.get(id(func)) or _learn(func)  # hashing the operation itself takes longer
        if role.touches and self._busy:
            self._look(role, args, kwargs)
        self._inside += 1
        try:
            result = role.call(*args, **kwargs) if kwargs else role.call(*args)
        finally:
            self._inside -= 1
        if role.makes and self._memory is not None:
            self._memory.made(result, sys._getframe(1))
        return result

    def _look(self, role: _Role, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> None:
        low, high = self._low, self._high
        try:
            for arg in args:
                if isinstance(arg, torch.Tensor):
                    at = arg.data_ptr()
                    if low <= at < high:
                        for _, _, _, start, end in self._busy:
                            if start <= at < end:
                                self._compare(arg, role.partial, any(arg is args[one] for one in role.positions))
                                break
                elif isinstance(arg, (list, tuple)):
                    for one in arg:
                        if isinstance(one, torch.Tensor) and low <= one.data_ptr() < high:
                            self._compare(one, role.partial, any(arg is args[one] for one in role.positions))
            for name, written in role.keywords.items():
                arg = kwargs.get(name) if kwargs else None
                for one in arg if isinstance(arg, (list, tuple)) else (arg,):
                    if isinstance(one, torch.Tensor) and low <= one.data_ptr() < high:
                        self._compare(one, role.partial, written)
        except RuntimeError:
            pass  # a tensor without memory of its own

    def _compare(self, tensor: torch.Tensor, partial: bool, written: bool) -> None:
        at = tensor.data_ptr()
        for key, buffer, readable, low, high in self._busy:
            if low <= at < high and (written or not readable):
                if not (covers(buffer, tensor) if partial else overlap(buffer, tensor)):
                    continue
                place = place_of_caller(sys._getframe(3))
                if place is not None:
                    changed: HazardKind = "send_changed" if readable else "receive_changed"
                    self._touched(key, changed if written else "receive_read", place)


_HARMLESS = frozenset(
    [
        *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"),
        *("is_same_size", "_has_same_storage_numel", "_unsafe_view", "record_stream", "set_", "resize_"),
    ]
)
"""Operations that use no element of their arguments, though their schemas do not say so."""

_WAITS = ("wait_tensor", "_wrap_tensor")
"""Name prefixes of the operations by which functional collectives wait for a tensor, now or later."""

_PARTIAL = (
    *("index", "_index", "_unsafe_index", "gather", "take", "put", "scatter", "embedding", "_embedding"),
    *("masked", "_unsafe_masked"),
)
"""Name prefixes of operations that may leave some elements of an argument untouched."""

_ROLES: dict[int, _Role] = {}
"""Roles by the `id` of the operation."""


def _learn(func: Any) -> _Role:
    role = _ROLES[id(func)] = _role(func)
    return role


def _role(func: Any) -> _Role:
    schema = schema_of(func)
    if schema is None:  # an operation that takes functions; what those do is not seen
        return _Role(func, func, touches=False, positions=frozenset(), keywords={}, partial=False, makes=True)
    name = schema.name.split("::")[-1]
    waits = name.startswith(_WAITS)
    views = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    writes = [one.alias_info is not None and one.alias_info.is_write for one in schema.arguments]
    return _Role(
        func,
        direct_call(func),
        touches=not views and name not in _HARMLESS and not waits,
        positions=frozenset(at for at, written in enumerate(writes) if written and not schema.arguments[at].kwarg_only),
        keywords={
            one.name: written
            for one, written in zip(schema.arguments, writes, strict=True)
            if one.kwarg_only and "Tensor" in str(one.type)
        },
        partial=name.startswith(_PARTIAL),
        makes=name == "lift_fresh"
        or (any(one.alias_info is None for one in schema.returns) and not waits and name != "_unsafe_view"),
    )
