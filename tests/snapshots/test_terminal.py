"""What people see, compared to the letter with the text files in this folder.

To change them: `UPDATE_SNAPSHOTS=1 python -m pytest tests/snapshots`, then read the difference and commit it.
"""

import io
import os
from pathlib import Path

import pytest
from rich.console import Console

from ringverify.cli.main import main
from ringverify.events import KINDS, from_json
from ringverify.reports.terminal import Terminal

FOLDER = Path(__file__).parent
WIDTH = 100

HEADER = {
    "event": "header", "schema": 1, "ringverify": "1.2.3", "torch": "2.11.0", "python": "3.11.0",
    "platform": "Linux x86_64", "device": "cpu", "suite": "quick", "seed": 0,
}  # fmt: skip
CASE = {
    "problem": {"query_length": 2}, "sharding": "contiguous", "world_size": 2, "values": "normal",
    "memory": "contiguous", "cotangent": "out", "group": "world", "transport": "buffered", "delayed": [], "seed": 0,
    "schedule": 0,
}  # fmt: skip


def row(property, verdict, **fields):
    """An event of a property."""
    plain = {"implementation": "my_package.ring.attend", "examples": 0, "seconds": 0.0, "margin": None}
    return {"event": "property", **plain, "property": property, "verdict": verdict, **fields}


def typed(event):
    """The event of these JSON values."""
    return from_json(KINDS[event["event"]], event)


def end(verdict, counts, **fields):
    """The events that end an implementation and the run."""
    plain = {
        "implementation": "my_package.ring.attend", "world": "simulated", "not_run_in": ["gloo"], "undeclared": [],
        "not_run": 0,
        "examples": 0, "runs": 0, "seconds": 0.0, "seconds_inside": 0.0,
    }  # fmt: skip
    codes = {"conformant": 0, "violations": 1, "inconclusive": 3}
    counts = {kind: counts.get(kind, 0) for kind in ("pass", "fail", "unsupported", "inconclusive")}
    return [
        {"event": "implementation", **plain, "verdict": verdict, "properties": counts, **fields},
        {"event": "footer", "verdict": verdict, "exit_code": codes[verdict]},
    ]


def counterexample(property, **fields):
    """An event of a counterexample; by default nothing numeric was wrong."""
    file = f".ringverify/my-package-ring-attend-{property}-0a1b2c3d.json"
    return {
        "event": "counterexample",
        "implementation": "my_package.ring.attend",
        "property": property,
        "case": CASE,
        "case_text": "2 ranks n=2 batch=1 heads=1 dim=1 float32 contiguous causal values=normal seed=0 schedule=0",
        **dict.fromkeys(("rank", "hop", "tensor", "index", "error", "allowed", "diagnosis")),
        "detail": "",
        "shrunk_from": "7 ranks n=21 batch=2 heads=4/2 dim=16 float32 zigzag causal values=normal seed=9 schedule=5",
        "tried": 17,
        "smallest": True,
        "repeats": True,
        "file": file,
        "replay": f"ringverify replay {file}",
        **fields,
    }


NOWHERE = {"tensor": "dk", "rows": {}, "heads": [], "pairs": []}
VALUE = counterexample(
    "gradients", rank=1, tensor="dk", index=[0, 0, 0, 2], position=1, actual=0.25, expected=0.125, error=0.125,
    allowed=2.5e-6, margin=50000.0, wrong={"0": 3, "1": 4}, of=8, summary="dk is wrong on ranks 0, 1: 7 of 8 elements",
    diagnosis="the returned dk holds the sum of the right dk and the right dv (residual 3e-07)",
    where=NOWHERE | {"text": ["dk, all keys of every rank", "on rank 0 the part of rank 1's queries (hop 1) is wrong"]},
)  # fmt: skip
NAN = counterexample(
    "lse", rank=0, tensor="lse", index=[0, 1, 0], position=0, actual="nan", expected="-inf", error="nan",
    allowed=0.0, margin="inf", wrong={"0": 1}, of=2, summary="lse is wrong on rank 0: 1 of 2 elements", repeats=False,
)  # fmt: skip
EXACT = counterexample(
    "masked_rows", rank=0, tensor="out", index=[0, 1, 0, 0], position=1, actual=1e-8, expected=0.0, error=1e-8,
    allowed=0.0, margin="inf", wrong={"0": 1}, of=2, summary="out is wrong on rank 0: 1 of 2 elements",
    needs={"requires": ["causal", "at least 2 ranks"], "irrelevant": ["dtype", "shapes"], "complete": True},
    first_margin=120.0,
    where=NOWHERE | {"text": ["out, rank 0 query 1 (position 1), head 0 of 2"]},
)  # fmt: skip
BESIDE = counterexample(
    "forward", rank=0, tensor="out", index=[0, 0, 0, 0], position=0, actual=-0.5, expected=0.0, error=0.5,
    allowed=1.1e-5, margin=44300.0, wrong={"0": 1, "1": 1}, of=2, summary="out is wrong on ranks 0, 1: 2 of 2 elements",
    hints=[{"property": "hazards", "text": "rank 1 read the buffer of its receive from rank 0 before it completed"}],
    needs={"requires": [], "irrelevant": ["ranks"], "complete": False}, first_margin=1.5e36,
    printed=[{"rank": 1, "text": "shape [1, 2]\nhop 1\n"}],
)  # fmt: skip
AGAIN = BESIDE | {"property": "chunk_boundaries", "same_as": "forward"}
BOTH_NAN = NAN | {"expected": "nan"}
RAISED = counterexample(
    "forward",
    rank=1,
    summary="rank 1 raised ValueError: shapes [2, 3] and [3, 2] do not match",
    detail="\n".join(
        ["Traceback (most recent call last):"]
        + [f'  File "my_package/ring.py", line {n}, in step_{n}\n    return step_{n + 1}(x)' for n in range(1, 10)]
        + ["ValueError: shapes [2, 3] and [3, 2] do not match"]
    ),
)
DEADLOCK = counterexample(
    "forward",
    summary="deadlock: rank 0 waits for a receive from rank 1, tag 0; rank 1 has returned",
    detail="rank 0 waits for a receive from rank 1, tag 0\nrank 0 at\n  my_package/ring.py:41 in attend",
)

KNOWN = {"reason": "dk and dv are unpacked from the wrong pair", "link": "https://example.org/issues/12"}
SURPRISE = (
    "baseline known.toml: lse of my_package.ring.attend passes, but is listed as violated (log2 for ln); "
    'remove the entry, or write found = "sometimes" if not every run finds it'
)

REFUSED = {
    "summary": "rank 0 raised RuntimeError: rank 0 sends to itself: gloo refuses that",
    "case": CASE,
    "case_text": "1 rank n=2 batch=1 heads=1 dim=1 float32 contiguous values=normal seed=0 schedule=0",
}
STACKED = "a gathered tensor that does not lie along the first axis: all_gather_into_tensor of [2, 3] into [2, 2, 3]"

TRIED = {
    "event": "tried", "implementation": "my_package.ring.attend",
    "features": {
        "world size": {"1": 10, "2": 30}, "sharding": {"zigzag": 40}, "causal": {"no": 16, "yes": 24},
        "window": {"left": 6, "no": 32, "right": 2}, "key_lengths": {"no": 25, "yes": 15}, "property": {"forward": 40},
    },
    "pairs": [
        "", "", "10 30", "4 12 16", "6 18 24", "0 6 6 0 6", "10 22 32 16 16", "0 2 2 0 2",
        "5 20 25 12 13 6 18 1", "5 10 15 4 11 0 14 1", "10 30 40 16 24 6 32 2 25 15",
    ],
}  # fmt: skip
UNTRIED = [
    "world size 3-4", "world size 5-8", "dtype bfloat16", "dilation split", "dilation shared", "gqa", "value_dim",
    "scale", "documents", "softcap", "uneven", "empty_shards", "subgroups", "lse_gradient",
]  # fmt: skip

RUNS = {
    "conformant": [
        HEADER,
        row("forward", "pass", examples=200, seconds=4.25, margin=0.0123),
        row("gradients", "pass", examples=350, seconds=12.5, margin=0.998),
        *end("conformant", {"pass": 2}, examples=550, runs=561, seconds=16.75, seconds_inside=8.375),
    ],
    "conformant_over_gloo": [
        HEADER,
        row("forward", "pass", examples=200, seconds=4.25, margin=0.0123),
        *end("conformant", {"pass": 1}, world="gloo", not_run_in=[], examples=200, runs=200, seconds=4.25),
    ],
    "gloo_refuses": [
        HEADER,
        row("forward", "pass", examples=200, seconds=4.25, margin=0.0123),
        row("gradients", "fail", examples=41, seconds=1.9, margin=310000.0),
        VALUE | {"refused": REFUSED},
        *end("violations", {"pass": 1, "fail": 1}, gloo_refuses=[STACKED], examples=241, runs=260, seconds=6.5),
    ],
    "wrong_values": [
        HEADER,
        row("lse", "fail", examples=3, seconds=0.5, margin="inf"),
        NAN,
        row("gradients", "fail", examples=41, seconds=1.9, margin=310000.0),
        VALUE,
        row("masked_rows", "fail", examples=1, seconds=0.1, margin="inf"),
        EXACT,
        *end("violations", {"fail": 3}, examples=45, runs=99, seconds=2.5, seconds_inside=1.25),
    ],
    "same": [
        HEADER,
        row("forward", "fail", examples=1, seconds=0.1, margin=1.5e36),
        BESIDE,
        row("chunk_boundaries", "fail", examples=1, seconds=0.1, margin="inf"),
        AGAIN,
        row("invariants", "fail", examples=1, seconds=0.1, margin="inf"),
        BOTH_NAN,
        *end("violations", {"fail": 3}, examples=3, runs=19, seconds=0.3, seconds_inside=0.1),
    ],
    "raised": [
        HEADER,
        row("forward", "fail", examples=1, seconds=0.1),
        RAISED,
        *end("violations", {"fail": 1}, not_run=10, examples=1, runs=19, seconds=0.1, seconds_inside=0.05),
    ],
    "deadlock": [
        HEADER,
        row("forward", "fail", examples=1, seconds=0.1),
        DEADLOCK,
        *end("violations", {"fail": 1}, examples=1, runs=19, seconds=0.1, seconds_inside=0.05),
    ],
    "unsupported": [
        HEADER,
        row("forward", "pass", examples=200, seconds=4.25, margin=0.0123),
        row("lse", "unsupported", reason="lse=True is not declared"),
        row("gradients", "unsupported", reason="gradients=False is declared"),
        *end(
            "conformant",
            {"pass": 1, "unsupported": 2},
            undeclared=["gradients", "lse", "window"],
            examples=200,
            runs=200,
            seconds=4.25,
            seconds_inside=1.0,
        ),
    ],
    "untried": [
        HEADER,
        row("forward", "pass", examples=40, seconds=4.25, margin=0.0123),
        TRIED,
        *end("conformant", {"pass": 1}, examples=40, runs=40, seconds=4.25, seconds_inside=1.0, untried=UNTRIED),
    ],
    "inconclusive": [
        HEADER,
        row("forward", "pass", examples=57, seconds=3.0, margin=0.5, reason="the time budget ended after 57 of 200"),
        row("lse", "inconclusive", reason="the time budget ended before the first example: raise --time-budget"),
        row("gradients", "inconclusive", reason="the gloo world could not start: rank 1: no interface [lo]"),
        *end("inconclusive", {"pass": 1, "inconclusive": 2}, examples=57, runs=57, seconds=3.0, seconds_inside=2.0),
    ],
    "baseline": [
        HEADER,
        row("forward", "pass", examples=200, seconds=4.25, margin=0.0123),
        row("lse", "pass", examples=100, seconds=1.0, margin=0.5, unexpected=SURPRISE),
        row("gradients", "fail", examples=41, seconds=1.9, margin=310000.0, known=KNOWN),
        VALUE,
        row("masked_rows", "fail", examples=1, seconds=0.1, margin="inf"),
        EXACT,
        *end("violations", {"pass": 2, "fail": 2}, known=1, examples=342, runs=399, seconds=7.5, seconds_inside=5.5),
    ],
}  # fmt: skip
RUNS["baseline"][-1] |= {"known": 1, "unexpected": [SURPRISE]}


def printed(events, *, verbose=False):
    """What the terminal shows of a run where it is no terminal: no colour, no progress."""
    file = io.StringIO()
    terminal = Terminal(Console(file=file, width=WIDTH, force_terminal=False, color_system=None), verbose=verbose)
    for event in events:
        terminal.tell(typed(event))
    return file.getvalue()


def assert_as_recorded(name, text):
    """The text is that of the file, or becomes it if that is asked for."""
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_SNAPSHOTS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), "after a change that is meant: UPDATE_SNAPSHOTS=1"


@pytest.mark.parametrize("run", RUNS)
def test_a_run_looks_as_recorded(run):
    """Every kind of row, and every kind of counterexample."""
    assert_as_recorded(run, printed(RUNS[run]))


def test_verbose_shows_the_whole_traceback():
    """And nothing that the short form has not."""
    text = printed(RUNS["raised"], verbose=True)
    assert_as_recorded("raised_verbose", text)
    assert "more lines with -v" not in text


def test_verbose_shows_every_failure_in_full_and_what_ranks_printed():
    """Each rank's lines under its name."""
    text = printed(RUNS["same"], verbose=True)
    assert_as_recorded("same_verbose", text)
    assert text.count("printed by rank 1\n        | shape [1, 2]\n        | hop 1\n") == 2


def test_verbose_shows_what_was_tried_and_names_all_that_was_not():
    """A table of features by layout, and one of constraints by one another."""
    text = printed(RUNS["untried"], verbose=True)
    assert_as_recorded("untried_verbose", text)
    assert " more" not in text


def test_lines_are_not_wrapped_where_a_reader_would_cut_them():
    """A case and a replay line are copied whole, however narrow the terminal."""
    file = io.StringIO()
    Terminal(Console(file=file, width=20, force_terminal=False, color_system=None)).tell(typed(VALUE))
    assert VALUE["replay"] in file.getvalue()
    assert VALUE["case_text"] in file.getvalue()


COMMANDS = {
    "": [],
    "check": ["check"],
    "replay": ["replay"],
    "confirm": ["confirm"],
    "init": ["init"],
    "worker": ["worker"],
    "list": ["list"],
    "bench": ["bench"],
    "plan": ["plan"],
    "report": ["report"],
    "vectors": ["vectors"],
    "vectors_check": ["vectors", "check"],
    "vectors_generate": ["vectors", "generate"],
    "reach": ["reach"],
    "doctor": ["doctor"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_looks_as_recorded(command, capsys, monkeypatch):
    """Options are a contract: a change of one shows here."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("NO_COLOR", "1")
    with pytest.raises(SystemExit) as end_of_command:
        main([*COMMANDS[command], "--help"])
    assert end_of_command.value.code == 0
    assert_as_recorded(f"help_{command or 'ringverify'}", capsys.readouterr().out)
