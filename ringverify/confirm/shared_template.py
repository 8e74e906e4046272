"""What all stand-alone scripts have: the start, the processes of a ring, and the end.

`<<names>>` are replaced by literals.
"""

HEAD = r'''"""A failing case of sequence-parallel attention as a stand-alone script; ABOUT, below, says which.

Needs numpy, torch and the implementation. Exits with 0 if every result is within the allowed error, with 1 if a result
is off by more than rounding allows, a rank fails or not all ranks end in time, and with 2 if the implementation cannot
be imported. Optional argument: seconds that ranks may take after importing the implementation (default 120). What ranks
print goes to standard error. The last line of the output is the result as JSON, for programs.
"""

import base64
import faulthandler
import importlib
import importlib.util
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import threading
import time
import traceback
import zlib
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from numpy import inf, nan  # noqa: F401  # as arrays below have them

ABOUT = <<about>>
IMPLEMENTATION = <<implementation>>  # where it is: a file or a module, and the attribute in it
DEADLINE = float(sys.argv[1]) if len(sys.argv) > 1 else 120.0
LOADING = 120.0  # seconds for importing torch and the implementation
SETTLING = 1.0  # seconds that other ranks are given to say that they failed first, and that stacks are shown early


class Fields(SimpleNamespace):
    """Named values; as a key of a cache they are what they hold."""

    def __hash__(self):
        return hash(tuple(sorted(vars(self).items(), key=lambda field: field[0])))


try:  # an implementation that asks a cache's sharding who holds what needs ringref, and its own classes
    from ringref.sharding import PageTable, QueryKeySharding
except ModuleNotFoundError:
    PageTable = QueryKeySharding = Fields


class ContractError(Exception):
    """What was returned is not what the contract asks for."""


def unpacked(text, dtype, shape):
    """An array from its bytes."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype).reshape(shape)


'''

IMPORTED = r'''def imported():
    """The function under test."""
    try:
        import ringverify  # noqa: F401
    except ModuleNotFoundError:  # the implementation is declared with it, and nothing else of it is needed
        ringverify = ModuleType("ringverify")
        ringverify.AttentionCall = SimpleNamespace
        ringverify.implementation = lambda **declared: lambda function: function
        sys.modules["ringverify"] = ringverify
    sys.path.insert(0, os.getcwd())
    file = IMPLEMENTATION["file"]
    if file is None:
        found = importlib.import_module(IMPLEMENTATION["module"])
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
        spec = importlib.util.spec_from_file_location("implementation_under_test", file)
        found = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found)
    for name in IMPLEMENTATION["attribute"].split("."):
        found = getattr(found, name)
    return getattr(found, "function", found)


'''

RANKS = r'''def take_part(world_rank, folder):
    """What one process does; it shows where it is when time is about to run out."""
    faulthandler.dump_traceback_later(LOADING - SETTLING)
    function = imported()
    faulthandler.dump_traceback_later(max(0.1, DEADLINE - SETTLING))
    say(folder, world_rank, kind="running")
    store = dist.FileStore(f"{folder}/meet", WORLD)
    dist.init_process_group("gloo", store=store, rank=world_rank, world_size=WORLD)
    group = dist.group.WORLD if len(RING) == WORLD else dist.new_group(list(RING))
    if world_rank in RING:
        rank = RING.index(world_rank)
        for number, (mode, requiring) in enumerate(WAYS):
            with getattr(torch, mode)():
                np.savez(f"{folder}/{rank}-{number}.npz", **results_of(function, rank, group, requiring))
    dist.barrier()
    dist.destroy_process_group()


def run_rank(world_rank, folder):
    """One process, which says in a file how it ended, if it can."""
    os.dup2(2, 1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    faulthandler.enable()
    say(folder, world_rank, kind="importing")
    try:
        take_part(world_rank, folder)
        say(folder, world_rank, kind="done")
    except BaseException as error:
        traceback.print_exception(type(error), error, error.__traceback__)
        importing = heard(folder, world_rank)["kind"] == "importing"
        kind = "not imported" if importing else "exited" if isinstance(error, SystemExit) else "raised"
        say(folder, world_rank, kind=kind, exception=plain(type(error).__name__), message=text_of(error))
        threading.Event().wait()  # to be ended: with this process gone, other ranks would fail as well
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def end_with_parent():
    """End this process when the one that started it has ended."""
    multiprocessing.parent_process().join()
    os._exit(1)


def text_of(error):
    """The first line of an exception's text."""
    try:
        return plain("".join(str(error).splitlines()[:1]))
    except BaseException:
        return "(its text cannot be read: __str__ fails)"


def plain(text):
    """A text for a terminal."""
    return ascii(text)[1:-1][:200]


def say(folder, rank, **fields):
    """Have a rank say where it is, or how it ended."""
    with open(f"{folder}/{rank}.partial", "w") as file:
        json.dump({"rank": rank, "at": time.monotonic(), **fields}, file)
    os.replace(f"{folder}/{rank}.partial", f"{folder}/{rank}.json")


def heard(folder, rank):
    """What a rank said last."""
    try:
        with open(f"{folder}/{rank}.json") as file:
            return json.load(file)
    except FileNotFoundError:
        return {"rank": rank, "at": time.monotonic(), "kind": "importing"}


def run_ranks(folder):
    """Run all ranks, and end them: how they failed, the first failure first; nothing, if all are done."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, folder)) for rank in range(WORLD)]
    until, loaded, ended, failures = time.monotonic() + LOADING, False, set(), []
    try:
        for process in ranks:
            process.start()
        while len(ended) < WORLD and time.monotonic() < until:
            multiprocessing.connection.wait([ranks[rank].sentinel for rank in range(WORLD) if rank not in ended], 0.05)
            if not loaded and all(heard(folder, rank)["kind"] != "importing" for rank in set(range(WORLD)) - ended):
                until, loaded = time.monotonic() + (SETTLING if failures else DEADLINE), True
            for rank in set(range(WORLD)) - ended:
                code, last = ranks[rank].exitcode, heard(folder, rank)
                if last["kind"] in ("importing", "running"):
                    if code is None:
                        continue
                    how = f"exit code {code}" if code >= 0 else f"signal {-code}"
                    last = {"rank": rank, "at": time.monotonic(), "kind": "died", "exception": None, "message": how}
                ended.add(rank)
                if last["kind"] != "done":
                    failures.append(last)
                    until = min(until, time.monotonic() + SETTLING)
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()
    if len(ended) < WORLD and not failures:
        late = [rank for rank in range(WORLD) if rank not in ended]
        kind, message = "not imported", f"not all ranks had imported the implementation after {LOADING:g} s"
        if loaded:
            who = f"rank{'s' if late[1:] else ''} {', '.join(map(str, late))}"
            kind, message = "deadline", f"{who} had not ended after {DEADLINE:g} s"
        failures.append({"rank": late[0], "kind": kind, "exception": None, "message": message})
    failures = [one for one in failures if one["kind"] == "died"] or failures  # what others raise then is a consequence
    return sorted(failures, key=lambda failure: failure.pop("at", 0.0))


'''

MAIN = r'''def in_words(failure):
    """A failure in a line."""
    rank, message = f"rank {failure['rank']}", failure["message"]
    if failure["kind"] == "died":
        return f"{rank}'s process ended with {message}"
    if failure["kind"] != "died" and failure["exception"] is None:
        return message
    exception = f"{failure['exception']}: {message}" if message else failure["exception"]
    did = "could not import the implementation:" if failure["kind"] == "not imported" else "raised"
    return f"{rank} {did} {exception}"


def main():
    """Run all ranks, compare, and say what is wrong."""
    if sys.platform.startswith("linux"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    off, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        failures = run_ranks(folder)
        if not failures:
            off, lines = compare(folder)
    lines = [f"wrong: {', '.join(off)}", *lines] if off else list(map(in_words, failures))
    print("\n".join(lines[:1] if off else lines) or "every result is within the allowed error on this machine")
    print(json.dumps({"wrong": off, "failures": failures, "lines": lines}), flush=True)
    return 2 if any(failure["kind"] == "not imported" for failure in failures) else int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
'''
