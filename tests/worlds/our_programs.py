"""Programs of which some parts are ours and some are the user's, for the tests of whose doing the end of a run is."""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from ringverify.worlds.raising import Charge
from ringverify.worlds.whose import ours, theirs


def raises_in_ours(where: str) -> None:
    """An exception before, in and after the part that is the user's; "charge": what our code says of that part."""
    with ours():
        _raise_if(where == "before")
        with theirs():
            _raise_if(where == "inside")
        if where == "charge":
            raise Charge("the user's part returned nothing", rule="nothing")
        _raise_if(where == "after")


def _raise_if(raises: bool) -> None:
    if raises:
        raise KeyError("no such thing")


def ends_in_ours(where: str) -> None:
    """The same with an end of rank 1's process."""
    with ours():
        _end_if(where == "before")
        with theirs():
            _end_if(where == "inside")
        _end_if(where == "after")


def _end_if(ends: bool) -> None:
    if ends and dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(10)


def waits_in_ours(where: str) -> None:
    """The same with a rank that takes too long."""
    with ours():
        _wait_if(where == "before")
        with theirs():
            _wait_if(where == "inside")


def sends_late(seconds: float) -> None:
    """A thread sends to nobody, when the rank has returned; gloo ends a process that does."""

    def send() -> None:
        time.sleep(seconds)
        dist.send(torch.zeros(1), 2**30)

    thread = threading.Thread(target=send)
    thread.start()
    if not seconds:
        thread.join()


def sleeps_until_a_signal(_: None) -> None:
    """Inside the user's part; any signal wakes it, and then it is our turn for a long time."""
    with ours():
        with theirs():
            ctypes.CDLL(None).sleep(300)
        _wait_if(True)


def _wait_if(waits: bool) -> None:
    until = time.monotonic() + 20
    while waits and time.monotonic() < until:
        pass


def imports(module: str) -> None:
    """Import a module inside the user's part."""
    importlib.import_module(module)


def load(module: str) -> None:
    """Load a module, as what a run is about."""
    importlib.import_module(module)


def meets_a_limit(error: Exception) -> None:
    """Raise what a machine that lacks something makes a program raise."""
    raise error


def reads_with_a_child(_: Any) -> tuple[list[int], list[int]]:
    """What a DataLoader with a worker reads on a rank, and the numbers of the processes that read it."""
    loader = torch.utils.data.DataLoader(_Numbered(), num_workers=1)
    pairs = [batch.tolist()[0] for batch in loader]
    return [number for number, _ in pairs], sorted({process for _, process in pairs})


class _Numbered(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor([number, os.getpid()])
