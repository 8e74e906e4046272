"""The table of misbehaviour: every way of `ways.py` in every place where the tool runs other people's code.

    python tests/misbehaviour/table.py [--place simulated --place replay] [--only NAME …] [--jobs N]

Several ways share a run of the tool, each followed by a right implementation, which has to be found conformant. What is
not as it should be then is run again alone, and that counts. A way is right in a place if it gets its verdict and no
other rank is blamed, the exit code says the same, the next implementation is unharmed, nothing of ours is in the
errors, and no process, temporary file or shared memory is left.

The tool is forked from this process, which has imported torch already. It runs in a session, a folder and a `TMPDIR` of
its own; whatever is orphaned comes to this process, a sub-reaper, where it is found and ended.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import dataclasses
import itertools
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from ways import CONFORMANT, INCONCLUSIVE, OWN_FILE, PHASES, QUICK, USAGE, VIOLATIONS, WAYS, Way

MINIATURES = Path(__file__).resolve().parent.parent / "miniatures"
PLACES = ("simulated", "gloo", "replay", "plugin")
EXAMPLES = "3"
DEADLINE = "1"
"""Seconds for a run of what hangs."""
LOAD_DEADLINE = "5"
"""The same for what hangs as it is imported."""
GRACE = 10.0
"""Seconds that the system may take to bury what the tool has ended."""
PROMISED = 10.0
"""Seconds in which a verdict is promised; told, but no reason to fail where others use the machine too."""
LIMITS = {True: 45.0, False: 30.0}
"""Seconds for one way, by whether it hangs; then the tool is ended and that is wrong."""
START = 30.0
"""The same for what a run of the tool takes besides."""
PATIENCE = float(os.environ.get("PATIENCE", "1"))
"""Times the limits, where others use the machine too."""
TOGETHER = {True: 6, False: 12}
"""How many ways share a run of the tool, by whether they hang."""
CODES = {0: CONFORMANT, 1: VIOLATIONS, 2: USAGE, 3: INCONCLUSIVE}
PYTEST_USAGE = 4
NOT_OURS = (OWN_FILE, "torchinductor_")
"""Files that the implementation itself wrote, and the cache that torch keeps for all of a user's processes."""
SHARED_MEMORY = Path("/dev/shm")
SET_CHILD_SUBREAPER = 36

NEXT = """\
import sys

sys.path.insert(0, {miniatures!r})
from right import attention

from ringverify import implementation


@implementation(world_sizes=(2,))
def attend(q, k, v, call):
    return attention(q, k, v, call)
"""
WRONG = {
    "forward": "        return out + 1\n",
    "gradients": "        return out * 2\n",
    "inputs_untouched": "        with torch.no_grad(): q.add_(1)\n",
    "reentrancy": "        return out + 1\n",
}
"""What has to be recorded to have a case of a property."""


@dataclasses.dataclass
class Result:
    """What came of a way in a place.

    Attributes:
        way: its name.
        phase: when it misbehaves.
        place: where it ran.
        verdict: what was said.
        said: why, in the tool's words.
        seconds: what it took.
        wrong: what should not be so, a line each.
    """

    way: str
    phase: str
    place: str
    verdict: str
    said: str
    seconds: float
    wrong: list[str]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run of the tool ended: its exit code (negative: a signal; `None`: not at all), and what it left."""

    code: int | None
    errors: str
    seconds: float
    left: list[str]


# -- running the tool --------------------------------------------------------------------------------------------------


def ended(arguments: Sequence[str], *, folder: Path, limit: float, plugin: bool = False) -> Ended:
    """Run the tool in a folder, and look at what it leaves.

    Args:
        arguments: of `ringverify`, or of pytest.
        folder: where.
        limit: seconds after which it is ended.
        plugin: it is pytest that is run.
    """
    temporary, before, began = folder / "tmp", _inodes(), time.monotonic()
    temporary.mkdir(exist_ok=True)
    reading, writing = os.pipe()
    sys.stdout.flush()
    nurse = os.fork()
    if nurse == 0:  # between us and the tool, since there are ways to end the parent of one's process
        os.close(reading)
        os.setsid()
        tool = os.fork()
        if tool == 0:
            os.close(writing)
            _become_the_tool(arguments, folder, temporary, plugin)
        os.write(writing, f"{tool}\n".encode())
        _, status = os.waitpid(tool, 0)
        os.write(writing, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(writing)
    os.set_blocking(reading, False)
    told, until = "", began + limit
    while time.monotonic() < until:
        with contextlib.suppress(BlockingIOError):
            more = os.read(reading, 100)
            told += more.decode()
            if not more or told.count("\n") == 2:
                break
        time.sleep(0.02)
    os.close(reading)
    seconds, lines = time.monotonic() - began, told.split()
    code = int(lines[1]) if len(lines) == 2 else None
    left = _processes_left(killed_at_once=code is None)
    left += [f"temporary {path.name}" for path in temporary.iterdir() if not path.name.startswith(NOT_OURS)]
    left += _shared_memory_left(before)
    shutil.rmtree(temporary, ignore_errors=True)
    return Ended(code, (folder / "errors").read_text(errors="replace"), seconds, left)


def _become_the_tool(arguments: Sequence[str], folder: Path, temporary: Path, plugin: bool) -> NoReturn:
    """Be the command, as a shell would start it."""
    os.setsid()
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number, name in enumerate(("/dev/null", "output", "errors")):
        os.dup2(os.open(name, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, "r" if number == 0 else "w") for number in range(3))
    sys.path.insert(0, "")
    code: object = 1
    try:
        if plugin:
            import pytest

            code = pytest.main(list(arguments))
        else:
            from ringverify.cli.main import main

            code = main(arguments)
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    # What `sys.exit` comes to, but for the frames of this process that it would unwind.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(int(code) if isinstance(code, int) else int(code is not None))


def _descendants() -> dict[int, str]:
    """Live processes that descend from this one, with their commands."""
    parents, commands = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            head, _, tail = stat.read_text(errors="replace").rpartition(")")
            state, parent = tail.split()[:2]
            if state not in "ZX":
                number = int(stat.parent.name)
                command = (stat.parent / "cmdline").read_text(errors="replace").replace("\0", " ")
                parents[number], commands[number] = int(parent), command[-60:].strip() or head.partition("(")[2]
    family, size = {os.getpid()}, 0
    while len(family) > size:
        size = len(family)
        family |= {number for number, parent in parents.items() if parent in family}
    return {number: commands[number] for number in sorted(family - {os.getpid()})}


def _processes_left(*, killed_at_once: bool) -> list[str]:
    """Processes that are there after some grace; they are ended."""
    until = time.monotonic() + (0.0 if killed_at_once else GRACE)
    while (found := _descendants()) and time.monotonic() < until:
        _bury()
        time.sleep(0.02)
    left = [] if killed_at_once else [f"process {command}" for command in found.values()]
    while found := _descendants():
        for number in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)
        _bury()
    return left


def _shared_memory_left(before: set[int]) -> list[str]:
    """New pieces of shared memory that no process uses after some grace; others may have made some meanwhile."""
    for written in SHARED_MEMORY.glob(f"{OWN_FILE}*"):
        written.unlink(missing_ok=True)
    until = time.monotonic() + GRACE
    while found := _inodes() - before:
        for maps in Path("/proc").glob("[0-9]*/maps"):
            with contextlib.suppress(OSError):
                lines = (line.split() for line in maps.read_text(errors="replace").splitlines() if "/dev/shm" in line)
                found -= {int(line[4]) for line in lines}
        if not found or time.monotonic() > until:
            break
        time.sleep(0.2)
    return [f"shared memory {entry.name}" for entry in os.scandir(SHARED_MEMORY) if entry.inode() in found]


def _inodes() -> set[int]:
    """What there is of shared memory; a semaphore is mapped under another name than the one that it has."""
    return {entry.inode() for entry in os.scandir(SHARED_MEMORY)}


def _bury() -> None:
    """Collect children that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


# -- one way, or several -----------------------------------------------------------------------------------------------


def tried(ways: Sequence[Way], place: str, folder: Path) -> Iterator[Result]:
    """What came of ways of one kind (see `kind`) that share a run; alone again where something is wrong."""
    doubted = []
    for way, found in zip(ways, _tried(ways, place, folder), strict=True):
        if found.wrong and len(ways) > 1:
            doubted.append(way)
        else:
            yield found
    for way in doubted:
        yield from _tried([way], place, folder)


def _tried(ways: Sequence[Way], place: str, folder: Path) -> list[Result]:
    folder = Path(tempfile.mkdtemp(dir=folder))
    for way in ways:
        (folder / f"{way.name}.py").write_text(way.module(str(MINIATURES)))
        (folder / f"{way.name}-next.py").write_text(NEXT.format(miniatures=str(MINIATURES)))
    try:
        if place == "replay":
            (way,) = ways
            return [replayed(way, folder)]
        return checked(ways, place, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def checked(ways: Sequence[Way], place: str, folder: Path) -> list[Result]:
    """What `check`, or the plugin, says of some ways, each with a right implementation behind it."""
    plugin, prefix = place == "plugin", "--ringverify-" if place == "plugin" else "--"
    options = {"only": ",".join(ways[0].properties), "max-examples": EXAMPLES, "world-sizes": "2", "report": "r.jsonl"}
    options |= {"world": "simulated" if plugin else place} | ({"deadline": DEADLINE} if ways[0].hangs else {})
    targets = [f"{way.name}{which}.py:attend" for way in ways for which in ("", "-next")]
    if ways[0].hangs and ways[0].phase == "import":
        options["load-deadline"] = LOAD_DEADLINE
    arguments = [text for name, value in options.items() for text in (prefix + name, value)]
    if plugin:
        arguments += ["-q", "-p", "no:cacheprovider", *(text for one in targets for text in ("--ringverify", one))]
    else:
        arguments = ["check", *targets, *arguments]
    end = ended(arguments, folder=folder, limit=PATIENCE * (START + len(ways) * LIMITS[ways[0].hangs]), plugin=plugin)
    events = _events(folder / "r.jsonl")
    return [_result(way, place, end, events, alone=len(ways) == 1) for way in ways]


def _events(report: Path) -> list[dict[str, Any]]:
    """The events of a report, however far it got."""
    partial = report.with_name(report.name + ".partial")
    found: list[dict[str, Any]] = []
    with contextlib.suppress(OSError, ValueError):
        text = (report if report.exists() else partial).read_text(errors="replace")
        found += map(json.loads, text.splitlines())
    return found


def _result(way: Way, place: str, end: Ended, events: Sequence[dict[str, Any]], *, alone: bool) -> Result:
    """Compare what was said of a way with what is right."""
    verdict, seconds, said = _verdict(way.name, events), end.seconds, ""
    for event in events:
        if event.get("implementation") in _names(way.name):
            seconds = event["seconds"] if event["event"] == "implementation" else seconds
            said = said or event.get("summary") or event.get("reason") or ""
    usage = PYTEST_USAGE if place == "plugin" else 2
    if verdict is None and end.code == usage:
        verdict, said = USAGE, (end.errors.strip().splitlines() or [""])[-1]
    wrong = _wrong(way, place, verdict, end, events)
    after = _verdict(f"{way.name}-next", events)
    if after != CONFORMANT and not (verdict == USAGE and after is None and alone):
        wrong.append(f"the next implementation: {after or 'no verdict'}")
    zero = (end.code == 0) == (verdict == CONFORMANT)
    agrees = end.code == (usage if verdict == USAGE else next((c for c, v in CODES.items() if v == verdict), None))
    if alone and not (agrees or (place == "plugin" and zero)):
        wrong.append(_how(end.code))
    return Result(way.name, way.phase, place, verdict or "none", said[:200], round(seconds, 1), wrong)


def _how(code: int | None) -> str:
    """How the tool ended, in words."""
    if code is None:
        return "the tool did not end"
    return f"exit code {code}" if code >= 0 else f"the tool was ended by {signal.Signals(-code).name}"


def _names(way: str) -> tuple[str, str]:
    """How events name the implementation in a way's file: as declared, and as typed where it could not be imported."""
    return f"{way}.attend", f"{way}.py:attend"


def _verdict(name: str, events: Sequence[dict[str, Any]]) -> str | None:
    """The verdict on an implementation."""
    for event in events:
        if event["event"] == "implementation" and event["implementation"] in _names(name):
            return str(event["verdict"])
    return None


def _wrong(way: Way, place: str, verdict: str | None, end: Ended, events: Sequence[dict[str, Any]]) -> list[str]:
    """What is wrong in any place."""
    right, wrong = way.verdicts(place), []
    if verdict not in right:
        wrong.append(f"{verdict or 'no verdict'}, not {' or '.join(right)}")
    blamed = {e["rank"] for e in events if e["event"] == "counterexample" and e["implementation"] in _names(way.name)}
    if not blamed <= set(way.blames):
        wrong.append(f"blames rank {', '.join(map(str, sorted(blamed - set(way.blames))))}")
    if "Traceback" in end.errors:
        wrong.append("a traceback among the errors: " + end.errors.strip().splitlines()[-1][:100])
    if end.left:
        wrong.append(f"left: {', '.join(end.left[:5])}")
    return wrong


def replayed(way: Way, folder: Path) -> Result:
    """What `replay` says of a way on cases that another implementation got wrong: one of them has to show it."""
    for property in reversed(way.properties):
        result = _replayed(way, property, folder)
        if not result.wrong:
            break
    return result


def _replayed(way: Way, property: str, folder: Path) -> Result:
    if (case := recorded(property, folder.parent)) is None:
        return Result(way.name, way.phase, "replay", "none", "", 0.0, ["no case could be recorded"])
    arguments = ["replay", str(case), "--target", f"{way.name}.py:attend"]
    arguments += ["--trust"] if not way.hangs else ["--trust", "--deadline", DEADLINE, "--load-deadline", LOAD_DEADLINE]
    end = ended(arguments, folder=folder, limit=PATIENCE * LIMITS[way.hangs])
    verdict = None if end.code is None else CODES.get(end.code)
    wrong = _wrong(way, "replay", verdict, end, [])
    if verdict is None:
        wrong.insert(0, _how(end.code))
    said = "".join(end.errors.strip().splitlines()[-1:])
    return Result(way.name, way.phase, "replay", verdict or "none", said[:200], round(end.seconds, 1), wrong)


def recorded(property: str, folder: Path) -> Path | None:
    """The case file of a plainly wrong implementation, made once."""
    home = folder / f"recorded-{property}"
    if not home.is_dir():
        home.mkdir()
        source = NEXT.format(miniatures=str(MINIATURES)).replace("    return ", "    out = ")
        source += "    if call.rank == 1:\n" + WRONG[property] + "    return out\n"
        (home / "wrong.py").write_text(source.replace("import sys\n", "import sys\nimport torch\n", 1))
        arguments = ("check", "wrong.py:attend", "--only", property, "--max-examples", "20", "--world-sizes", "2")
        ended(arguments, folder=home, limit=PATIENCE * START * 4)
    return next((home / ".ringverify").glob("*.json"), None)


# -- the table ---------------------------------------------------------------------------------------------------------


def kind(way: Way) -> tuple[bool, str, bool]:
    """Ways that may share a run of the tool. What cannot be imported is alone: then no target is tried."""
    return way.phase == "import" and bool({USAGE, INCONCLUSIVE} & {*way.expected}), ",".join(way.properties), way.hangs


def batches(ways: Sequence[Way], place: str) -> Iterator[list[Way]]:
    """Ways by runs of the tool."""
    for (refused, _, hangs), alike in itertools.groupby(sorted(ways, key=kind), key=kind):
        several = list(alike)
        size = 1 if refused or place == "replay" else TOGETHER[hangs]
        for at in range(0, len(several), size):
            yield several[at : at + size]


def summary(results: Sequence[Result]) -> str:
    """The table in Markdown: ways that are right of those tried, by phase and place; then those that are not."""
    places = [place for place in PLACES if any(result.place == place for result in results)]
    lines = [f"| it misbehaves | {' | '.join(places)} |", "|---|" + "---|" * len(places)]
    for phase in (*PHASES, "all"):
        cells = []
        for place in places:
            seen = [one for one in results if one.place == place and phase in (one.phase, "all")]
            cells.append(f"{sum(not one.wrong for one in seen)} of {len(seen)}")
        lines.append(f"| {phase if phase in ('all', 'after return') else 'in ' + phase} | {' | '.join(cells)} |")
    wrong = [one for one in results if one.wrong]
    lines += ["", *(f"- {one.place}, {one.way}: {'; '.join(one.wrong)}" for one in wrong)]
    late = [f"{one.place} {one.way} {one.seconds:g} s" for one in results if one.seconds > PROMISED]
    if late:
        lines += ["", f"Later than {PROMISED:g} s: {', '.join(late)}"]
    return "\n".join(lines).replace("| in import |", "| at import |") + "\n"


def filled(ways: Sequence[Way], places: Sequence[str], *, told: Any = None) -> list[Result]:
    """Try ways in places, one run of the tool after the other."""
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    found = []
    folder = Path(tempfile.mkdtemp(prefix="misbehaviour-"))  # what removes itself would do so as a forked tool ends
    try:
        for place in places:
            for several in batches(ways, place):
                for result in tried(several, place, folder):
                    found.append(result)
                    if told is not None:
                        told(result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def latest(path: Path) -> list[Result]:
    """The results in a file, of each way in each place the latest."""
    read = [Result(**json.loads(line)) for line in path.read_text().splitlines()]
    return [*{(one.place, one.way): one for one in read}.values()]


def main() -> int:
    """Print the table; 1 if something in it is wrong."""
    parser = argparse.ArgumentParser(description="The table of misbehaviour, as Markdown.")
    parser.add_argument("--place", action="append", choices=PLACES)
    parser.add_argument("--only", action="append", choices=sorted(WAYS), metavar="NAME")
    parser.add_argument("--phase", action="append", choices=PHASES)
    parser.add_argument("--quick", action="store_true", help="the part that `make test` runs")
    parser.add_argument(
        "--shrink", action="store_true", help="also look for the smallest case, which has its own tests"
    )
    parser.add_argument("--results", type=Path, help="file of results, JSON lines; those that are there are kept, and "
                        "the table is that of all, the latest of each way and place")  # fmt: skip
    options = parser.parse_args()
    names = options.only or (QUICK if options.quick else WAYS)
    ways = [WAYS[name] for name in names if not options.phase or WAYS[name].phase in options.phase]
    import pytest  # noqa: F401 - so that a tool which is forked need not import it

    import ringverify.check.run
    import ringverify.testing.session  # noqa: F401 - the same
    from ringverify.cases.shrinking import Shrunk
    from ringverify.check import finishing

    if not options.shrink:
        finishing.shrink = lambda case, *_, **__: Shrunk(case, 0, complete=False)
    with contextlib.ExitStack() as stack:
        file = None if options.results is None else stack.enter_context(options.results.open("a"))

        def told(result: Result) -> None:
            print(f"{result.place:10} {result.way:40} {result.verdict:12} {result.seconds:5} {result.wrong or ''}",
                  file=sys.stderr, flush=True)  # fmt: skip
            if file is not None:
                print(json.dumps(dataclasses.asdict(result)), file=file, flush=True)

        results = filled(ways, options.place or PLACES, told=told)
    print(summary(results if options.results is None else latest(options.results)))
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    sys.exit(main())
