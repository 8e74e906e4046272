"""The table of misbehaviour: a part of it on every day, and that the table can tell right from wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TABLE = Path(__file__).resolve().parent / "table.py"
sys.path.insert(0, str(TABLE.parent))
import table  # noqa: E402
from ways import CONFORMANT, PHASES, QUICK, USAGE, VIOLATIONS, WAYS  # noqa: E402

WAY = WAYS["segfaults"]
SAID = [
    {"event": "counterexample", "implementation": "segfaults.attend", "rank": 1, "summary": "ended by SIGSEGV"},
    {"event": "implementation", "implementation": "segfaults.attend", "verdict": VIOLATIONS, "seconds": 1.0},
    {"event": "implementation", "implementation": "segfaults-next.attend", "verdict": CONFORMANT, "seconds": 1.0},
]
"""What has to be said of that way."""


@pytest.mark.timeout(600)
def test_the_quick_part_of_the_table_is_right(tmp_path):
    """One way of each kind, in one run of the tool in the simulated world; every night has all of them everywhere."""
    results = tmp_path / "results.jsonl"
    command = [sys.executable, TABLE, "--quick", "--place", "simulated", "--results", results]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    found = [json.loads(line) for line in results.read_text().splitlines()]
    assert [one["way"] for one in found if one["wrong"]] == [], ran.stdout
    assert (ran.returncode, {one["way"] for one in found}) == (0, set(QUICK)), ran.stderr


def test_there_are_ways_of_every_phase_and_the_quick_part_has_one_of_each():
    """None of the quick ones hangs."""
    assert {way.phase for way in WAYS.values()} == set(PHASES)
    assert {WAYS[name].phase for name in QUICK} == set(PHASES)
    assert not any(WAYS[name].hangs for name in QUICK)


@pytest.mark.parametrize("phase", PHASES)
def test_a_way_is_a_module_whose_lines_run_when_they_should(phase):
    """Each can be compiled, but for the one that is not meant to be, and its lines are in the function of its phase."""
    for way in (way for way in WAYS.values() if way.phase == phase and "does-not-parse" not in way.name):
        compile(way.module("miniatures"), way.name, "exec")
    assert "def broken(:" in WAYS["import-does-not-parse"].module("miniatures")
    assert "def child():\n    os.setsid(); time.sleep(600)\n" in WAYS["child-session"].module("miniatures")
    assert "def before(q, k, v, call):\n    ctypes.string_at(0)\n" in WAY.module("miniatures")


def test_what_is_as_it_should_be_is_right():
    """Verdict, rank, exit code and the next implementation; the same with a process a rank."""
    for place in ("simulated", "gloo"):
        assert said_of(SAID, place=place).wrong == []
    unread = said_of([], WAYS["import-_exit-0"], code=2, errors="ringverify: it ends its process\n")
    assert (unread.verdict, unread.said, unread.wrong) == (USAGE, "ringverify: it ends its process", [])


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"events": [{**SAID[1], "verdict": CONFORMANT}, SAID[2]], "code": 0}, "conformant, not violations"),
        ({"events": SAID[2:], "code": -9}, "no verdict, not violations"),
        ({"events": [{**SAID[0], "rank": 0}, *SAID[1:]]}, "blames rank 0"),
        ({"events": SAID[:2]}, "the next implementation: no verdict"),
        ({"events": [*SAID[:2], {**SAID[2], "verdict": VIOLATIONS}]}, "the next implementation: violations"),
        ({"code": 3}, "exit code 3"),
        ({"code": None}, "the tool did not end"),
        ({"code": -11}, "the tool was ended by SIGSEGV"),
        ({"errors": "Traceback (most recent call last):\nKeyError: 5\n"}, "a traceback among the errors: KeyError: 5"),
        ({"left": ["process sleep 600"]}, "left: process sleep 600"),
    ],
)  # fmt: skip
def test_what_is_not_as_it_should_be_is_wrong(changed, complaint):
    """Each kind of it, by itself."""
    wrong = said_of(changed.pop("events", SAID), **changed).wrong
    assert complaint in wrong


def said_of(events, way=WAY, *, place="simulated", code=1, errors="", left=()):
    """The result of a way that was run alone."""
    return table._result(way, place, table.Ended(code, errors, 1.0, list(left)), events, alone=True)


def test_what_the_tool_leaves_is_found_and_ended(tmp_path):
    """A process in a session of its own, a temporary folder and shared memory; its own file is the implementation's."""
    script = (
        "import ctypes, json, os, sys, tempfile, time\n"
        f"sys.path.insert(0, {str(TABLE.parent)!r})\n"
        "import table\n"
        "from pathlib import Path\n"
        "def tool(arguments, folder, temporary, plugin):\n"
        "    if os.fork() == 0:\n"
        "        os.setsid()\n"
        "        time.sleep(600)\n"
        "    tempfile.mkdtemp(prefix='pymp-', dir=temporary)\n"
        "    tempfile.mkdtemp(prefix='misbehaved-', dir=temporary)\n"
        "    Path('/dev/shm', 'left-' + Path.cwd().name).write_text('')\n"
        "    (folder / 'errors').write_text('')\n"
        "    os._exit(7)\n"
        "table._become_the_tool, table.GRACE = tool, 0.1\n"
        "ctypes.CDLL(None).prctl(table.SET_CHILD_SUBREAPER, 1, 0, 0, 0)\n"
        "end = table.ended([], folder=Path.cwd(), limit=60)\n"
        "print(json.dumps([end.code, [one.split()[0] for one in end.left], len(table._descendants())]))\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path)
    for made in Path("/dev/shm").glob(f"left-{tmp_path.name}*"):
        made.unlink()
    assert json.loads(ran.stdout) == [7, ["process", "temporary", "shared"], 0]


def test_of_a_file_of_results_the_latest_of_each_way_and_place_counts(tmp_path):
    """So that a table can be made in parts, and what was wrong tried again."""
    results = [
        table.Result("quit", "forward", place, verdict, "", 1.0, wrong)
        for place, verdict, wrong in (
            ("gloo", "none", ["no verdict"]),
            ("replay", VIOLATIONS, []),
            ("gloo", VIOLATIONS, []),
        )
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(vars(one)) + "\n" for one in results))
    assert table.latest(path) == [results[2], results[1]]


def test_the_table_counts_what_is_right_by_phase_and_place():
    """And names what is not, and what was late."""
    results = [
        table.Result("segfaults", "forward", "simulated", VIOLATIONS, "", 1.0, []),
        table.Result("quit", "forward", "simulated", CONFORMANT, "", 12.0, ["conformant, not violations"]),
        table.Result("child-hangs", "child", "gloo", CONFORMANT, "", 1.0, []),
    ]
    text = table.summary(results)
    assert "| in forward | 1 of 2 | 0 of 0 |\n" in text
    assert "| all | 1 of 2 | 1 of 1 |\n" in text
    assert "\n- simulated, quit: conformant, not violations\n" in text
    assert "Later than 10 s: simulated quit 12 s\n" in text
