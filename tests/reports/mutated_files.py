"""Files of every kind that is read, changed at random: by their structure and by their bytes. Each has a number.

The same seed and number give the same file. `python tests/reports/mutated_files.py 10000 SEED` tries as many of all
kinds together, prints a table, and keeps what was not refused as it should be in `.ringverify/mutated`.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import io
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import sample_events
from report_lines import resealed
from rich.console import Console

from ringverify.cases import tensorfile
from ringverify.check import baseline, casefile
from ringverify.check.configuration import configured
from ringverify.cli.check import add_options
from ringverify.confirm import confirming
from ringverify.errors import UsageError
from ringverify.lab import expected, kill_report, published
from ringverify.reports.badge import badges
from ringverify.reports.jsonl import ReportError
from ringverify.reports.junit import junit
from ringverify.reports.markdown import markdown
from ringverify.reports.page import page
from ringverify.reports.results import Source, read_results
from ringverify.reports.terminal import Terminal
from ringverify.vectors import checking, index
from ringverify.worlds.processes.wire import (
    Frames,
    NotAReport,
    NotReady,
    Raised,
    Ready,
    Residue,
    Returned,
    packed,
    unpacked,
)

ROOT = Path(__file__).resolve().parents[2]
KEPT = Path(".ringverify/mutated")
SECONDS, MEGABYTES = 1.0, 200
"""What reading a file, and showing what it says, may take of a processor's time and of memory."""

AGAIN = 2
"""How often a file that took more is read again: the least counts."""

REFUSED = "refused"

LARGEST = 200_000
"""Bytes, about, of what is repeated."""

RAW = "@raw@"
"""Stands in a structure for text that no structure gives."""

ODD = (
    None, True, False, -1, 0, 1, 7, 70_000, 2**31, 2**63, 10**40, 0.5, -0.0, 1e308, "", "inf", "nan", "C:\\users",
    "\x1b[2J", "\n::error::x", "##[error]x", "\u202egnp", "\x85\u2028\r", "\ud800", "</script><b>", "x" * 300_000, [],
    {}, [[]], {"a": None}, [None] * 3, [0] * 100_000, [[0, 0, 0]] * 2_000, {str(n): n for n in range(1_000)},
)  # fmt: skip
DEEP = ("[" * 100_000, "[" * 500 + "]" * 500, '{"a":' * 300 + "1" + "}" * 300)
RAWS = ("9" * 5_000, "1e999", "Infinity", "NaN", "", *DEEP)


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of file.

    Attributes:
        seeds: files that are right.
        attempt: reads a file, and shows what it says.
        sealed: seals a changed file anew, where that is needed to be looked into.
        structured: whether a file is JSON, or JSON a line.
        file: how it has to be called.
    """

    seeds: tuple[bytes, ...]
    attempt: Callable[[Path], None]
    sealed: Callable[[bytes], bytes] | None = None
    structured: bool = True
    file: str = "mutated"


# -- changing ----------------------------------------------------------------------------------------------------------


def mutated(kind: Kind, chance: random.Random) -> bytes:
    """One of the seeds, changed."""
    data = chance.choice(kind.seeds)
    if kind.structured and chance.random() < 0.7:
        data = _by_structure(data, chance)
    if not kind.structured or chance.random() < 0.4:
        for _ in range(chance.choice((1, 1, 2, 5))):
            data = _by_bytes(data, kind.seeds, chance)
    return kind.sealed(data) if kind.sealed is not None and chance.random() < 0.8 else data


def _by_structure(data: bytes, chance: random.Random) -> bytes:
    lines = data.decode().splitlines() if data.count(b"\n{") > 1 else [data.decode()]
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        at = chance.randrange(len(lines))
        match chance.randrange(12):
            case 0 if len(lines) > 1:
                lines.insert(chance.randrange(len(lines)), lines[at])
            case 1 if len(lines) > 1:
                del lines[at]
            case _:
                with contextlib.suppress(ValueError, RecursionError):
                    lines[at] = _changed(json.loads(lines[at]), chance)
    return "".join(f"{line}\n" for line in lines).encode(errors="surrogatepass")


def _changed(content: object, chance: random.Random) -> str:
    """A JSON value with one of its parts changed, as text."""
    holder = {"": content}
    inner, key = holder, ""
    while isinstance(inner[key], (dict, list)) and inner[key] and chance.random() < 0.85:
        inner = inner[key]
        key = chance.choice(list(inner)) if isinstance(inner, dict) else chance.randrange(len(inner))
    match chance.randrange(8):
        case 0:
            del inner[key]
        case 1 if isinstance(inner, dict):
            inner[chance.choice(("unknown", *inner))] = inner.pop(key)
        case 2 if isinstance(inner, list):
            inner.append(inner[key])
        case 3:
            size = len(json.dumps(inner[key]))
            inner[key] = [inner[key]] * chance.choice((2, max(2, LARGEST // size)))
        case 4:
            inner[key] = RAW
        case _:
            inner[key] = chance.choice(ODD)
    return json.dumps(holder.get("", {})).replace(f'"{RAW}"', chance.choice(RAWS))


def _by_bytes(data: bytes, seeds: tuple[bytes, ...], chance: random.Random) -> bytes:
    a, b = sorted(chance.randrange(len(data) + 1) for _ in range(2))
    match chance.randrange(7):
        case 0:
            return data[:a]
        case 1:
            return data[:a] + data[b:]
        case 2:
            return data[:a] + chance.randbytes(chance.choice((1, 4, 100))) + data[a:]
        case 3:
            return data[:b] + data[a:b] * chance.choice((1, 2, max(1, LARGEST // (b - a + 1)))) + data[b:]
        case 4:
            return data[:a] + chance.choice(seeds)[a:]
        case 5:
            return (
                data[:a]
                + chance.choice((b"\0", b"\xff", b"\r", b'"', b"{", b"]", b"[" * 9_999, b"9" * 9_999))
                + data[a:]
            )
        case _:
            changed = bytearray(data or b"?")
            for _ in range(chance.choice((1, 3, 30))):
                changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
            return bytes(changed)


def _sealed_report(data: bytes) -> bytes:
    """A report with the seal that fits the rest of it, if it ends with an object."""
    *lines, last = data.rstrip(b"\n").split(b"\n")
    with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError, UnicodeDecodeError):
        footer = {name: value for name, value in json.loads(last).items() if name != "seal"}
        before = b"".join(line + b"\n" for line in lines)
        seal = hashlib.sha256(before + _line(footer)).hexdigest()
        return before + _line({**footer, "seal": seal})
    return data


def _line(event: dict) -> bytes:
    return json.dumps(event, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _sealed_object(data: bytes) -> bytes:
    """A JSON object with the seal that fits its other fields."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
        return resealed(json.loads(data)).encode()
    return data


# -- reading -----------------------------------------------------------------------------------------------------------


def _case(path: Path) -> None:
    found = casefile.read(path)
    for case in (found.case, *found.after):
        case.describe()


def _report(path: Path) -> None:
    results = read_results([Source(path)])
    junit(results), markdown(results), badges(results), page(results)
    terminal = Terminal(Console(file=io.StringIO(), width=120), verbose=True)
    for one in results.implementations:
        for outcome in one.failures:
            if outcome.counterexample is not None:
                terminal.tell(outcome.counterexample)


def _verdicts(path: Path) -> None:
    published.unexplained(published.read_verdicts(path), published.read_facts(ROOT / "docs/published/packages.toml"))


def _vectors(path: Path) -> None:
    """An index, laid beside the vectors that it is about."""
    found = index.read(path.parent)
    for story in found.chosen(None):
        checking.load(found, story)


def _pyproject(path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    configured(parser.parse_args([]), path.parent)


def _tensors(path: Path) -> None:
    try:
        tensorfile.decode(path.read_bytes())
    except tensorfile.NotSafetensors as error:
        raise UsageError(str(error)) from None


def _messages(path: Path) -> None:
    frames, data = Frames(), path.read_bytes()
    try:
        for start in range(0, len(data), 1 << 16):
            for message in frames.messages(data[start : start + (1 << 16)]):
                unpacked(message)
    except NotAReport as error:
        raise UsageError(str(error)) from None


def _framed(*messages: bytes) -> bytes:
    return b"".join(len(message).to_bytes(4, "big") + message for message in messages)


def _redigested(data: bytes) -> bytes:
    """Messages whose digests fit what follows them, as far as there are messages."""
    try:
        messages = Frames().messages(data)
    except NotAReport:
        return data
    return _framed(*(hashlib.blake2b(one[16:], digest_size=16).digest() + one[16:] for one in messages))


def _json(content: object) -> bytes:
    return json.dumps(content, indent=1).encode()


def kinds() -> dict[str, Kind]:
    """All kinds of files, by name."""
    cases = tuple(path.read_bytes() for path in sorted((ROOT / "docs/published/cases").glob("*.json"))[:12])
    events = sample_events.everything()
    report = _sealed_report(b"".join(_line(event) for event in events))
    whole = (ROOT / "fixtures/index.json").read_bytes()
    few = {**json.loads(whole), "vectors": json.loads(whole)["vectors"][:3]}
    confirmed = {
        "schema": 1,
        "confirmations": [
            {"implementation": "a", "property": "forward", "case": "a.json", "outcome": "shown", "said": ["wrong: out"]}
        ],
    }
    residue = Residue(True, 1, {"default": 3}, {("default", None, 1, 0): 1})
    reports = (
        Ready(),
        NotReady("no"),
        Returned(b"bytes" * 40, residue),
        Raised("raised ValueError: x", "…", at=1.5, consequence=False),
    )
    known = (ROOT / "docs/published/packages.toml").read_bytes()
    violation = (
        b'[[violation]]\nimplementation = "wrong_ring.attend"\nproperty = "forward"\nreason = """two\nlines"""\n'
        b'link = "https://example.org/issues/12"\nfound = "sometimes"\n'
    )
    table = b'[tool.ringverify]\ntargets = ["a:b"]\nsuite = "smoke"\nworld-sizes = [2, 3]\nverbose = true\nseed = 7\n'
    return {
        "case": Kind(cases, _case, _sealed_object),
        "report": Kind((report,), _report, _sealed_report),
        "baseline": Kind(
            (violation, violation + violation.replace(b"forward", b"lse")),
            lambda path: baseline.read_baseline(path) and None,
            structured=False,
        ),
        "pyproject": Kind((b"[project]\nname = 'x'\n" + table,), _pyproject, structured=False, file="pyproject.toml"),
        "facts": Kind((known,), lambda path: published.read_facts(path) and None, structured=False),
        "vectors' index": Kind((_sealed_object(_json(few)),), _vectors, _sealed_object, file="index.json"),
        "vector": Kind(
            tuple((ROOT / f"fixtures/V00{n}.safetensors").read_bytes() for n in (1, 2, 3)), _tensors, structured=False
        ),
        "confirmations": Kind((_json(confirmed),), lambda path: confirming.read(path) and None),
        "verdicts": Kind(((ROOT / "docs/published/verdicts.json").read_bytes(),), _verdicts),
        "kills": Kind(((ROOT / "docs/kills.json").read_bytes(),), lambda path: kill_report.read(path) and None),
        "expected kills": Kind(
            (_json({"M001": {"property": "forward", "seed": 0, "examples": 1}}),),
            lambda path: expected.read(path, ["M001"]) and None,
        ),
        "worker's messages": Kind((_framed(*map(packed, reports)),), _messages, _redigested, structured=False),
    }


# -- trying ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Tally:
    """What became of the mutants of one kind.

    Attributes:
        files: how many there were.
        refused: how many were refused in one line; the others were read.
        seconds: the most that one took of a processor.
        megabytes: the most that one took of memory beyond what was taken before.
        wrong: by number, what was neither read nor refused, or took too much.
    """

    files: int = 0
    refused: int = 0
    seconds: float = 0.0
    megabytes: float = 0.0
    wrong: dict[int, str] = dataclasses.field(default_factory=dict)


def tried(name: str, kind: Kind, folder: Path, *, seed: str, first: int, count: int) -> Tally:
    """Try so many mutants of a kind, from that number on."""
    tally = Tally()
    path = folder / kind.file
    for number in range(first, first + count):
        data = mutated(kind, random.Random(f"{seed} {name} {number}"))
        path.write_bytes(data)
        outcome, seconds, megabytes = _attempted(kind, path)
        for _ in range(AGAIN):  # what a whole process happens to do meanwhile is no work of the reader's
            if seconds > SECONDS or megabytes > MEGABYTES:
                outcome, *took = _attempted(kind, path)
                seconds, megabytes = min(seconds, took[0]), min(megabytes, took[1])
        tally.refused += outcome is REFUSED
        wrong = None if outcome is REFUSED else outcome
        if seconds > SECONDS or megabytes > MEGABYTES:
            wrong = wrong or f"took {seconds:.1f} s and {megabytes:.0f} MB"
        if wrong is not None:
            tally.wrong[number] = wrong
            KEPT.mkdir(parents=True, exist_ok=True)
            (KEPT / f"{name.replace(' ', '-')}-{seed}-{number}").write_bytes(data)
        tally.files += 1
        tally.seconds, tally.megabytes = max(tally.seconds, seconds), max(tally.megabytes, megabytes)
    return tally


def _attempted(kind: Kind, path: Path) -> tuple[str | None, float, float]:
    """None for a file that was read, REFUSED, or what was raised instead; seconds of a processor; megabytes."""
    before = _memory(reset=True)
    began = time.process_time()
    outcome = None
    try:
        kind.attempt(path)
    except (UsageError, ReportError):
        outcome = REFUSED
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"[:300]
    return outcome, time.process_time() - began, _memory() - before


def _memory(*, reset: bool = False) -> float:
    """Megabytes of memory at their peak since the last reset; what is taken now, with one. 0 where nothing says so."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    except OSError:
        return 0.0
    return int(lines["VmHWM"].split()[0]) / 1000


def beside(folder: Path) -> None:
    """Lay vectors into a folder, for an index to be about."""
    for path in (ROOT / "fixtures").glob("V00[123].safetensors"):
        (folder / path.name).write_bytes(path.read_bytes())


def main(count: int, seed: str) -> int:
    """Try that many of all kinds together, and print what became of them."""
    every = kinds()
    began = time.monotonic()
    print(f"seed {seed}\n\n| kind | files | refused in one line | read | longest, s | most memory, MB | wrong |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    wrong: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        beside(folder)
        for name, kind in every.items():
            one = tried(name, kind, folder, seed=seed, first=0, count=-(-count // len(every)))
            read = one.files - one.refused - len(one.wrong)
            print(
                f"| {name} | {one.files} | {one.refused} | {read} | {one.seconds:.2f} | {one.megabytes:.0f} | "
                f"{len(one.wrong)} |",
                flush=True,
            )
            wrong.update(f"{name} {number}: {what}" for number, what in one.wrong.items())
    print(f"\n{time.monotonic() - began:.0f} s")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "0"))
