"""Bad input: each gets one line that says what and how to mend it, its exit code, and nothing lost or half-written."""

import functools
import importlib.metadata
import json
import os
import sys
from pathlib import Path

import pytest
from command_line import miniature

from ringverify.check import casefile, hunting, run
from ringverify.cli import main
from ringverify.errors import UsageError
from ringverify.reports.jsonl import ReportError, read_report

pytestmark = pytest.mark.timeout(60)

USAGE, INCONCLUSIVE = 2, 3

# What is typed, and what the line has to name: the value, and the way out.
WRONG_USAGE = {
    "no command": ([], ["COMMAND", "--help"]),
    "no target": (["check"], ["TARGET", "ringverify check --help"]),
    "unknown command": (["chek", "ring"], ["'chek'", "'check'", "--help"]),
    "unknown option": (["check", "ring", "--speed", "9"], ["--speed 9", "--help"]),
    "unknown target": (["check", "rng"], ["'rng'", "did you mean 'ring'?"]),
    "unknown peer": (["check", "peer:flash"], ["'peer:flash'", "built in are ring, allgather, peer:"]),
    "module that is not there": (["check", "no_such_module:attend"], ["'no_such_module'", "PYTHONPATH"]),
    "submodule that is not there": (["check", "json.no_such:attend"], ["'json.no_such'", "PYTHONPATH"]),
    "file that is not there": (["check", "nothing.py:attend"], ["'nothing.py'", "the whole path"]),
    "attribute that is not there": (
        ["check", miniature("plain_function:nothing")],
        ["'nothing'", "implementations there: decorated"],
    ),
    "attribute that is not an implementation": (
        ["check", miniature("plain_function:attend")],
        ["is a function, not an implementation", "@ringverify.implementation(...)"],
    ),
    "wrong signature": (
        ["check", miniature("wrong_signature:attend")],
        ["wrong_signature.attend(q, k)", "attend(q, k, v, call)", "wrong_signature.py:6"],
    ),
    "unknown capability": (["check", miniature("wrong_capability:attend")], ["'shard'", "known: sharding"]),
    "missing dependency": (
        ["check", miniature("missing_dependency:attend")],
        ["'a_package_that_nobody_has'", "is it installed"],
    ),
    "module that ends the interpreter": (
        ["check", miniature("exits_at_import:attend")],
        ["sys.exit(4)", "exits_at_import.py:5", "__main__"],
    ),
    "module that raises several lines": (
        ["check", miniature("raises_at_import:attend")],
        ["RuntimeError: the first line", "raises_at_import.py:3"],
    ),
    "one target twice": (["check", "ring", "ring"], ["'ring'", "name="]),
    "unknown property": (["check", "ring", "--only", "forwad"], ["'forwad'", "did you mean 'forward'?"]),
    "unknown property to skip": (["check", "ring", "--skip", "zzz"], ["'zzz'", "known: forward, lse"]),
    "no property left": (["check", "ring", "--only", "lse", "--skip", "lse"], ["--skip", "--only"]),
    "no property named": (["check", "ring", "--only", ","], ["','", "separated by commas"]),
    "world size 0": (["check", "ring", "--world-sizes", "0"], ["'0'", "at least 1"]),
    "world size -1": (["check", "ring", "--world-sizes=2,-1"], ["'2,-1'", "at least 1"]),
    "world size one": (["check", "ring", "--world-sizes", "one"], ["'one'", "at least 1"]),
    "world size not declared": (
        ["check", miniature("right:attend_in_processes"), "--world-sizes", "5"],
        ["(1, 2)", "--world-sizes 5", "ask for one of them"],
    ),
    "unknown world": (["check", "ring", "--world", "mars"], ["mars", "simulated", "gloo"]),
    "processes in one process": (
        ["check", miniature("right:attend_in_processes"), "--world", "simulated"],
        ["processes=True", "--world gloo"],
    ),
    "unknown device": (["check", "ring", "--device", "abacus"], ["'abacus'", "expected cpu, cuda"]),
    "no examples": (["check", "ring", "--max-examples", "0"], ["'0'", "at least 1"]),
    "negative seed": (["check", "ring", "--seed=-1"], ["'-1'", "at least 0"]),
    "no time": (["check", "ring", "--time-budget", "0"], ["'0'", "positive number of seconds"]),
    "endless time": (["check", "ring", "--deadline", "inf"], ["'inf'", "positive number of seconds"]),
    "report that is a folder": (["check", "ring", "--report", "."], ["report .", "is a folder", "name a file"]),
    "report in no folder": (["check", "ring", "--report", "a/b.jsonl"], ["a/b.jsonl", "name another file"]),
    "case that is not there": (["replay", "nothing.json"], ["nothing.json", "name a file that check wrote"]),
    "case that is a folder": (["replay", "."], ["case .", "name a file that check wrote"]),
}


@pytest.mark.parametrize("mistake", WRONG_USAGE)
def test_wrong_usage_is_one_line_and_exit_code_2(mistake, ringverify):
    """The line names the value and the way out; nothing runs and nothing is written."""
    arguments, words = WRONG_USAGE[mistake]
    outcome = ringverify(*arguments)
    assert outcome.code == USAGE
    assert_one_line(outcome.err, words)
    assert outcome.out == ""
    assert list(ringverify.folder.iterdir()) == []


def test_a_file_with_a_syntax_error_is_named_with_its_line(ringverify):
    """The parser's own message, in one line."""
    Path("broken.py").write_text("def attend(q, k, v, call:\n    return q\n")
    outcome = ringverify("check", "broken.py:attend")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["broken.py does not import", "SyntaxError", "line 1"])


def test_a_report_in_a_read_only_place_is_refused_before_any_work(ringverify, tmp_path):
    """Root may write anywhere but into the kernel's own folder."""
    place = tmp_path / "locked"
    place.mkdir(mode=0o500)
    if os.geteuid() == 0:
        place = Path("/proc")
        if not place.is_dir():
            pytest.skip("no place here that root may not write to")
    outcome = ringverify("check", "ring", "--report", place / "report.jsonl")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, [str(place / "report.jsonl"), "name another file"])
    assert outcome.out == ""


@pytest.mark.parametrize("folder", ["taken", "taken/cases"])
def test_a_folder_for_cases_that_cannot_be_made_is_refused_before_any_work(ringverify, folder):
    """Found out at the end, it would cost the counterexample."""
    Path("taken").write_text("a file")
    outcome = ringverify("check", "ring", "--cases", folder)
    assert outcome.code == USAGE
    assert_one_line(outcome.err, [folder, "not a folder", "--cases"])
    assert outcome.out == ""


INFRASTRUCTURE = {
    "no such device": (["--device", "cuda"], ["no cuda device", "--device cpu"]),
    "no such world yet": (["--world", "nccl"], ["nccl", "--world gloo"]),
}


@pytest.mark.parametrize("lacking", INFRASTRUCTURE)
def test_what_this_machine_lacks_is_inconclusive(lacking, ringverify, monkeypatch):
    """Exit code 3 and one line: never a pass, never a violation."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments, words = INFRASTRUCTURE[lacking]
    outcome = ringverify.check("ring", *arguments)
    assert outcome.code == INCONCLUSIVE
    assert_one_line(outcome.err, words)
    assert list(ringverify.folder.iterdir()) == []


def test_a_missing_peer_package_is_inconclusive_and_says_what_to_install(ringverify, monkeypatch):
    """Whether or not the package is here: its metadata is hidden."""
    peer = "ringverify.peers.ring_attention_pytorch"

    def not_there(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.delitem(sys.modules, peer, raising=False)
    monkeypatch.setattr(importlib.metadata, "version", not_there)
    outcome = ringverify("check", "peer:ring-attention-pytorch")
    assert outcome.code == INCONCLUSIVE
    assert_one_line(outcome.err, ["ring-attention-pytorch==0.5.20", "pip install 'ringverify[peers]'"])


# -- implementations that misbehave ------------------------------------------------------------------------------------

JUDGED = ("forward", "gradients", "inputs_untouched")

# Which properties fail, on which rank (None: not one rank's doing), and what the summary of each says.
MISBEHAVING = {
    "wrong_shape": (JUDGED, {0, 1}, "returned out of shape (1, 0, 1, 1): (1, 1, 1, 1) is expected"),
    "wrong_dtype": (JUDGED, {0, 1}, "returned out in float64: float32 is expected"),
    "wrong_device": (JUDGED, {0, 1}, "returned out on device meta: cpu is expected"),
    "returns_none": (JUDGED, {0, 1}, "returned None for out: a tensor is expected"),
    "returns_a_tuple": (JUDGED, {0, 1}, "returned a tuple of 2 for out: a tensor is expected"),
    "returns_only_out": (JUDGED, {0, 1}, "returned a Tensor: with lse=True declared, (out, lse) is expected"),
    "raises_on_one_rank": (JUDGED, {1}, "rank 1 raised ValueError: rank 1 cannot go on"),
    "raises_backward": (JUDGED[1:], {1}, "rank 1 raised RuntimeError: no way back"),
    "exits_on_one_rank": (JUDGED, {1}, "rank 1 called sys.exit(5)"),
    "ends_its_process_on_one_rank": (JUDGED, {1}, "rank 1 called os._exit(7)"),
    "loops_for_ever": (JUDGED, {1}, "rank 1 was still at work after"),
    "sleeps": (JUDGED, {1}, "rank 1 was still at work after"),
    "leaves_a_rank_waiting": (JUDGED, {None}, "deadlock: rank 0 waits for a receive from rank 1"),
    "returns_nan": (JUDGED[:1], {1}, "wrong on rank 1"),
    "detaches": (JUDGED[1:], {0, 1}, "not attached to q, k and v by autograd: make it differentiable, or declare"),
    "changes_its_input": (JUDGED[2:], {1}, "rank 1 changed its input q during forward"),
}


@pytest.fixture
def impatient(monkeypatch):
    """Little time for shrinking what hangs: every attempt costs its deadline."""
    monkeypatch.setattr(hunting, "HUNG_DEADLINE", 0.2)
    monkeypatch.setattr(hunting, "HUNG_SHRINKING", 0.2)
    monkeypatch.setattr(hunting, "SECOND_CHANCE", 1.0)


@pytest.mark.parametrize("name", MISBEHAVING)
def test_misbehaviour_is_a_violation_with_its_rank_in_words(name, ringverify, impatient):
    """Every property is still judged, and the process stays fit to judge others."""
    properties, ranks, words = MISBEHAVING[name]
    options = ("--only", ",".join(JUDGED), "--max-examples", "4", "--deadline", "0.4")
    outcome = ringverify.check(miniature(f"misbehaving:{name}"), *options)
    assert outcome.code == 1
    assert outcome.err == ""
    assert set(outcome.verdicts()) == set(JUDGED)
    assert set(outcome.verdicts().values()) <= {"pass", "fail"}
    for property in properties:
        (counterexample,) = outcome.told("counterexample", property=property)
        assert counterexample["rank"] in ranks
        assert words in counterexample["summary"]
        assert words in outcome.out
        assert Path(counterexample["file"]).is_file()
    assert_right_is_conformant(ringverify)


def test_a_breach_of_the_contract_is_told_without_our_own_traceback(ringverify):
    """The message says all; lines of the harness would send the reader the wrong way."""
    outcome = ringverify.check(miniature("misbehaving:wrong_dtype"), "--only", "forward")
    assert outcome.told("counterexample")[0]["detail"] == ""


def test_an_exception_is_told_with_the_line_that_raised_it(ringverify):
    """The implementation's own traceback is what its author needs."""
    outcome = ringverify.check(miniature("misbehaving:raises_on_one_rank"), "--only", "forward")
    assert "in raises_on_one_rank" in outcome.told("counterexample")[0]["detail"]
    assert "| ValueError: rank 1 cannot go on" in outcome.out
    assert outcome.told("property")[0]["margin"] is None


def test_a_message_is_told_as_it_is(ringverify):
    """Neither markup, emoji codes, half a surrogate pair nor a backslash at its end disturbs the verdict."""
    outcome = ringverify.check(miniature("misbehaving:raises_odd_text"), "--only", "forward")
    said = "rank 1 raised ValueError: [bold]no[/bold] :ring: \N{GREEK CAPITAL LETTER SIGMA} \udc80 [/] \\"
    assert outcome.code == 1
    (counterexample,) = outcome.told("counterexample")
    assert counterexample["summary"] == said
    assert said.replace("\udc80", r"\udc80") in outcome.out
    assert "odd [bold]name[/] :ring:" in outcome.out.splitlines()


def test_an_implementation_that_prints_is_judged_like_any_other(ringverify):
    """Its output stays with its process, the verdict and the report are not disturbed."""
    outcome = ringverify.check(
        miniature("misbehaving:prints_a_lot"), "--only", "forward,gradients", "--max-examples", 2
    )
    assert outcome.code == 0
    assert set(outcome.verdicts().values()) == {"pass"}
    assert "says line" not in outcome.out


IN_PROCESSES = {
    "raises_on_one_rank": ({1}, "rank 1 raised ValueError: rank 1 cannot go on"),
    "exits_on_one_rank": ({1}, "rank 1 called sys.exit(5)"),
    "ends_its_process_on_one_rank": ({1}, "rank 1's process ended with exit code 7"),
    "loops_for_ever": ({None, 1}, "in loops_for_ever"),
    "leaves_a_rank_waiting": ({None, 0}, "in leaves_a_rank_waiting (recv)"),
    "wrong_shape": ({0, 1}, "returned out of shape"),
    "prints_a_lot": (set(), ""),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", IN_PROCESSES)
def test_misbehaviour_in_processes_is_told_alike(name, ringverify, monkeypatch):
    """A rank's process may end; the harness stays, and so do the worlds after it."""
    ranks, words = IN_PROCESSES[name]
    monkeypatch.setattr(hunting, "shrink", functools.partial(hunting.shrink, budget=1))
    hangs = name in ("loops_for_ever", "leaves_a_rank_waiting")
    options = ("--world", "gloo", "--world-sizes", "2", "--only", "forward", "--max-examples", "2")
    deadline = ("--deadline", "1") if hangs else ()
    outcome = ringverify.check(miniature(f"misbehaving:{name}"), *options, *deadline)
    assert outcome.err == ""
    assert outcome.told("implementation")[0]["world"] == "gloo"
    if ranks:
        (counterexample,) = outcome.told("counterexample")
        assert counterexample["rank"] in ranks
        assert words in counterexample["summary"]
    assert outcome.code == (1 if ranks else 0)
    assert ringverify.check(miniature("right:attend"), *options).code == 0


def test_out_of_memory_is_inconclusive(ringverify):
    """The machine gave up, not the implementation."""
    Path("hungry.py").write_text(
        "from ringverify import implementation\n"
        "@implementation(world_sizes=(2,))\n"
        "def attend(q, k, v, call):\n"
        "    raise MemoryError('no more')\n"
    )
    outcome = ringverify.check("hungry.py:attend", "--only", "forward")
    assert outcome.code == INCONCLUSIVE
    assert "out of memory" in outcome.told("property")[0]["reason"]
    assert outcome.told("implementation")[0]["implementation"] == "hungry.attend"


# -- reports of runs that were refused or cut off ----------------------------------------------------------------------


def test_a_refused_run_leaves_an_older_report_as_it_was(ringverify):
    """Refused after the report's path was looked at, before anything was said."""
    report = Path("report.jsonl")
    assert ringverify("check", "ring", "--only", "forward", "--max-examples", 1, "--report", report).code == 0
    before = report.read_bytes()
    target = miniature("right:attend_in_processes")
    assert ringverify("check", target, "--world", "simulated", "--report", report).code == USAGE
    assert report.read_bytes() == before
    assert not Path("report.jsonl.partial").exists()


def test_a_refused_run_leaves_the_remains_of_an_earlier_one(ringverify):
    """What a cut-off run had found out is not lost to a typing mistake."""
    Path("report.jsonl.partial").write_text("what was known\n")
    target = miniature("right:attend_in_processes")
    assert ringverify("check", target, "--world", "simulated", "--report", "report.jsonl").code == USAGE
    assert Path("report.jsonl.partial").read_text() == "what was known\n"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (RuntimeError("a bug of ours"), INCONCLUSIVE)])
def test_a_run_that_is_cut_off_keeps_what_it_knew_apart(error, code, ringverify, monkeypatch):
    """The older report stays, and what was known is in a partial file that no reader takes for a report."""
    arguments = ("check", "ring", "--only", "forward,lse", "--max-examples", 1, "--report", "report.jsonl")
    assert ringverify(*arguments).code == 0
    before = Path("report.jsonl").read_bytes()
    hunt = run.hunt

    def cut(property, *rest, **options):
        if property.id == "lse":
            raise error
        return hunt(property, *rest, **options)

    monkeypatch.setattr(run, "hunt", cut)
    outcome = ringverify(*arguments)
    assert outcome.code == code
    assert outcome.err.splitlines()[-1].startswith("ringverify: ")
    assert Path("report.jsonl").read_bytes() == before
    with pytest.raises(ReportError, match="incomplete: it has no footer"):
        read_report(Path("report.jsonl.partial"))
    kept = [json.loads(line)["event"] for line in Path("report.jsonl.partial").read_text().splitlines()]
    assert kept == ["header", "property"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not a report"),
        ('{"event":"property"}\n', "does not begin with a header"),
        ('{"event":"header","schema":1}\n', "no footer"),
        ('{"event":"header","schema":1}\n{"event":"foo', "cut off or damaged at line 2"),
        ('{"event":"header","schema":2}\n{"event":"footer"}\n', "schema 2, this reads 1: upgrade"),
        ("[1, 2]\n", "line 1: not an event"),
    ],
)
def test_what_is_not_a_whole_report_is_refused_as_such(text, words, tmp_path):
    """In one line that names the file."""
    path = tmp_path / "report.jsonl"
    path.write_text(text)
    with pytest.raises(ReportError, match=words) as refusal:
        read_report(path)
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


# -- case files --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The text of a case file, as `check` writes it."""
    folder = tmp_path_factory.mktemp("cases")
    target = miniature("faulty_rings:wrong_scale")
    assert main(["check", target, "--only", "forward", "--max-examples", "5", "--cases", str(folder)]) == 1
    (path,) = folder.iterdir()
    return path.read_text()


def cut_short(text):
    """The first half."""
    return text[: len(text) // 2]


def with_another_seed(text):
    """The seed of the inputs, changed by hand."""
    content = json.loads(text)
    content["case"]["seed"] += 1
    return json.dumps(content)


def from_the_future(text):
    """A schema that there is not yet."""
    return json.dumps({"schema": 2, "something": "new"})


BAD_CASES = {
    "truncated": (cut_short, ["truncated or not JSON", "run check again"]),
    "edited": (with_another_seed, ["was edited", "--edited"]),
    "newer": (from_the_future, ["schema 2", "reads schema 1", "upgrade ringverify"]),
    "not JSON": (lambda text: "dear diary", ["not JSON", "get the whole file"]),
    "other JSON": (lambda text: "[1, 2, 3]", ["not a case file"]),
    "not text": (lambda text: b"\xff\xfe\x00", ["not UTF-8 text"]),
    "empty": (lambda text: "", ["truncated or not JSON"]),
}


@pytest.mark.parametrize("damage", BAD_CASES)
def test_a_damaged_case_file_is_refused_in_one_line(damage, ringverify, recorded):
    """Exit code 2, the file's name, and the way out."""
    spoil, words = BAD_CASES[damage]
    spoiled = spoil(recorded)
    Path("case.json").write_bytes(spoiled if isinstance(spoiled, bytes) else spoiled.encode())
    outcome = ringverify("replay", "case.json")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["case.json", *words])
    assert outcome.out == ""


def test_an_edited_case_file_runs_when_that_is_asked_for(ringverify, recorded):
    """The edit decides what runs: other inputs, other bits."""
    Path("case.json").write_text(with_another_seed(recorded))
    outcome = ringverify("replay", "case.json", "--edited")
    assert outcome.code == 1
    assert "other bits than recorded" in outcome.out


def test_an_edited_case_that_its_target_does_not_declare_is_refused(ringverify, recorded):
    """Not a violation: nobody claimed that it works."""
    content = json.loads(recorded)
    content["case"]["sharding"] = "zigzag"
    Path("case.json").write_text(json.dumps(content))
    outcome = ringverify("replay", "case.json", "--edited")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["case.json", "sharding zigzag is not declared"])


def test_a_case_for_a_device_that_is_not_here_is_inconclusive(ringverify, recorded, monkeypatch):
    """The recorded failure may be there or not; this machine cannot tell."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    content = json.loads(recorded) | {"device": "cuda"}
    Path("case.json").write_text(json.dumps(content))
    outcome = ringverify("replay", "case.json", "--edited")
    assert outcome.code == INCONCLUSIVE
    assert_one_line(outcome.err, ["no cuda device"])


def test_a_case_of_an_unknown_world_or_property_is_refused(ringverify, recorded):
    """Names that this version does not know."""
    for field, words in (("world", "unknown world 'moon'"), ("property", "unknown property 'moon'")):
        Path("case.json").write_text(json.dumps(json.loads(recorded) | {field: "moon"}))
        outcome = ringverify("replay", "case.json", "--edited")
        assert outcome.code == USAGE
        assert_one_line(outcome.err, [words])


ODD = (None, True, -1, 0, 10**40, 0.5, float("nan"), float("inf"), "", "odd", [], [[]], {}, {"a": None})


def test_no_edit_of_a_case_file_gets_past_its_reading(recorded, tmp_path):
    """Every field of the file, replaced by every odd value or left out: read, or refused in one line."""
    path = tmp_path / "case.json"
    content = json.loads(recorded)
    refused = 0
    places = [(name,) for name in content] + [("case", name) for name in content["case"]]
    places += [("case", "problem", name) for name in content["case"]["problem"]]
    for place in places:
        for odd in (*ODD, "left out"):
            edited = json.loads(recorded)
            inner = functools.reduce(dict.__getitem__, place[:-1], edited)
            if odd == "left out":
                del inner[place[-1]]
            else:
                inner[place[-1]] = odd
            path.write_text(json.dumps(edited))
            refused += refusal_of(path) is not None
    assert refused > len(places)


def refusal_of(path):
    """The line with which an edited case file is refused, if it is."""
    try:
        casefile.read(path, edited=True)
    except UsageError as error:
        line = str(error)
        assert "\n" not in line, line
        return line
    return None


def assert_one_line(err, words):
    """One line, of ringverify's, that has all the words."""
    assert err.startswith("ringverify: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def assert_right_is_conformant(ringverify):
    """The process has not suffered."""
    outcome = ringverify.check(miniature("right:attend"), "--only", ",".join(JUDGED), "--max-examples", 3)
    assert outcome.code == 0, outcome.out
    assert outcome.told("implementation")[0]["verdict"] == "conformant"
