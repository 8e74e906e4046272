"""Turns the ends of a run's ranks into one failure: the rank in which it began, and why.

When one rank fails, its neighbours lose their connections to it and fail too; the failure names the first cause.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sysconfig
from collections.abc import Iterable, Sequence

from ringverify.worlds.foreign_text import Frame
from ringverify.worlds.processes.wire import Died, Raised, Whereabouts
from ringverify.worlds.stacks import whose_file
from ringverify.worlds.world import Failure, OurError, TooEarly

_WORKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "worker.py")
_IMPORTING = "<frozen importlib._bootstrap>"
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


def doubt(end: Raised | Died) -> int:
    """Rate how likely a rank's end is the consequence of another rank's: 0 not likely, 2 very likely.

    The neighbours of a failed rank lose their connections to it, and gloo may abort their processes for that.
    """
    match end:
        case Raised(consequence=consequence):
            return 2 if consequence else 0
        case Died(exit_code=exit_code):
            return 1 if exit_code == -signal.SIGABRT else 0


def first_cause(ends: dict[int, Raised | Died], outputs: Sequence[str]) -> Failure:
    """Return the failure of a run in which the ranks in `ends` raised or died; `outputs` is what each rank printed.

    Raises:
        OurError: it began where none of the implementation's code was running.
    """
    rank, end = min(ends.items(), key=lambda item: (doubt(item[1]), item[1].at))
    others = [
        f"rank {other} then {end.what}" if isinstance(end, Raised) else f"rank {other}'s process then {end.what}"
        for other, end in sorted(ends.items())
        if other != rank
    ]
    match end:
        case Raised(ours=True, what=what, detail=detail):
            raise OurError(f"rank {rank}: {what}", detail)
        case Raised(rule=None, detail=detail):
            return dataclasses.replace(Failure.of(rank, end), detail=_detail([detail, *others], rank, outputs))
        case Raised():  # a breach of the contract: how other ranks then failed is no part of it
            return Failure.of(rank, end)
        case Died(what=what, exit_code=exit_code, ours=ours):
            message = f"rank {rank}'s process {what}"
            told = _detail([message, *others], rank, outputs)
            killed = exit_code == -signal.SIGKILL  # as the kernel does when memory runs out
            if ours and not killed:
                raise OurError(f"{message} while nothing of the implementation ran in it", told)
            return Failure("died", rank, message, told, limit="memory" if killed else None, exit_code=exit_code)


def out_of_time(
    deadline: float, returned: Sequence[int], found: dict[int, Whereabouts | None], outputs: Sequence[str]
) -> Failure:
    """Return the failure of a run in which the ranks in `found` had not ended in time; `None` is an unknown place.

    Raises:
        TooEarly: one of them was in the middle of an import, or in code of ringverify; others may wait for it.
    """
    places = tuple((rank, _place(() if one is None else one.frames)) for rank, one in sorted(found.items()))
    where = ", ".join(f"rank {rank} {place}" for rank, place in places)
    for rank, one in sorted(found.items()):
        if one is not None and (one.importing or one.ours):
            detail = _detail([where], None, outputs)
            raise TooEarly.at(deadline, rank, detail, importing=one.importing, places=places)
    message = f"after {deadline:g} s {_ranks(sorted(found))} had not returned: {where}"
    if returned:
        message += f"; {_ranks(sorted(returned))} had"
    stacks = {rank: "\n".join(map(str, one.frames)) for rank, one in sorted(found.items()) if one is not None}
    parts = [message, *(f"rank {rank}:\n{stack}" for rank, stack in stacks.items())]
    only = next(iter(found)) if len(found) == 1 else None
    return Failure("deadline", only, message, _detail(parts, None, outputs), places=places)


def is_importing(files: Iterable[str]) -> bool:
    """Whether a stack, given by the files of its frames, is in the middle of an import."""
    return _IMPORTING in files


def main_thread(stacks: Sequence[tuple[Frame, ...]]) -> tuple[Frame, ...] | None:
    """Return the program's own frames, innermost first, out of the stacks of a rank's threads; `None` if not found."""
    for frames in stacks:
        own = [at for at, frame in enumerate(frames) if frame.file == _WORKER]
        if own and frames[own[-1]].function == "serve":
            return frames[: own[0]]
    return None


def _place(frames: Sequence[Frame]) -> str:
    """Describe the innermost frame that is neither torch's nor Python's, as "at ring.py:41 in attend (recv)"."""
    inside = None
    for frame in frames:
        if _is_users(frame.file):
            place = f"at {os.path.basename(frame.file)}:{frame.line} in {frame.function}"
            return place if inside is None else f"{place} ({inside})"
        # The function that the user's line calls: the outermost of torch's frames, less its logging wrapper.
        if frame.function != "wrapper":
            inside = frame.function
    return "at an unknown place"


def _is_users(file: str) -> bool:
    if file.startswith("<") or whose_file(file) != "user":
        return False
    # Installed packages may lie below the standard library's directory.
    return not file.startswith(_LIBRARY) or "site-packages" in file or "dist-packages" in file


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _detail(parts: Sequence[str], rank: int | None, outputs: Sequence[str]) -> str:
    """Join what is known with what the rank printed, or with what every rank printed if `rank` is `None`."""
    shown = list(parts)
    for printed_by, text in enumerate(outputs):
        if text.strip() and rank in (None, printed_by):
            shown.append(f"rank {printed_by} printed:\n{text.rstrip()}")
    return "\n".join(part.rstrip() for part in shown) + "\n"
