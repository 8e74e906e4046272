"""Programs under the suite: the written worker, what is wrong with a worker, what it refuses, and its messages."""

import dataclasses
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import assert_one_line
from jsonschema import Draft202012Validator
from safetensors.numpy import load_file

from ringref.problem import Problem
from ringverify import programs
from ringverify.cases.case import Case
from ringverify.cases.comparing import worst
from ringverify.cases.inputs import make_inputs
from ringverify.cases.outside import fields_of
from ringverify.cases.running import Runner
from ringverify.check.outside import UNSEEN, of_refusals
from ringverify.cli.worker import FLAVOURS, FOLDER
from ringverify.describing import describe
from ringverify.properties.catalogue import PROPERTIES
from ringverify.worlds.external import messages
from ringverify.worlds.external.world import ExternalWorld

pytestmark = pytest.mark.timeout(240)

FAULTY = Path(__file__).resolve().parent.parent / "miniatures" / "workers" / "faulty_worker.py"
SINKS = FAULTY.with_name("sinks_worker.py")
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "worker.md"
SCHEMA = Path(messages.__file__).parent / "schema" / f"worker-{messages.PROTOCOL}.json"
FIRST = "    batch, length, heads, _ = q.shape\n"
"""The first line of `attend` in the written worker."""


def program(*command):
    """The target of a Python program."""
    return f"program: {shlex.join([sys.executable, *map(str, command)])}"


@pytest.fixture
def worker(ringverify):
    """A worker as it is written, and its text with parts replaced."""

    def written(*replaced):
        assert ringverify("worker", "--write", "mine.py").code == 0
        text = Path("mine.py").read_text()
        for before, after in replaced:
            assert text.count(before) == 1
            text = text.replace(before, after)
        Path("mine.py").write_text(text)
        return program("mine.py")

    return written


def test_what_is_written_gets_a_verdict_as_it_is(ringverify):
    """By the command that is printed: every property is tried, or is unsupported with a reason."""
    outcome = ringverify("worker", "--write", "mine.py")
    assert outcome.code == 0
    (line,) = [line for line in outcome.out.splitlines() if line.startswith("  ringverify ")]
    assert shlex.split(line) == ["ringverify", "check", "program: python mine.py", "--suite", "smoke"]
    assert f"  {line.strip().removesuffix(' --suite smoke')}\n" in Path("mine.py").read_text()
    checked = ringverify.check(program("mine.py"), "--max-examples", 3)
    assert checked.code == 0, checked.out
    (told,) = checked.told("implementation")
    assert (told["implementation"], told["world"], told["not_run_in"]) == ("mine.py", "external", [])
    assert told["versions"] == {"numpy": np.__version__}
    assert f"\n  it runs on numpy {np.__version__}\n" in checked.out
    verdicts = checked.verdicts()
    passed = {id for id, verdict in verdicts.items() if verdict == "pass"}
    undeclared = {"masked_rows", "precision", "balance", "determinism"}
    assert passed == set(PROPERTIES) - set(UNSEEN) - undeclared
    assert set(verdicts.values()) == {"pass", "unsupported"}
    for event in checked.told("property", verdict="unsupported"):
        assert event["reason"] == UNSEEN.get(event["property"], event["reason"])


def test_every_property_that_needs_to_see_ranks_is_a_property():
    """The table of what cannot be tried on a program names no other."""
    assert set(UNSEEN) < set(PROPERTIES)


def test_the_document_names_every_property_that_is_not_tried():
    """With the reason that a report gives."""
    text, _, _ = DOCUMENT.read_text(encoding="utf-8").partition("## The protocol")
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", text, re.MULTILINE)
    told = {id: why for ids, why in rows for id in re.findall(r"`(\w+)`", ids) if id in PROPERTIES}
    assert told == UNSEEN


def test_the_document_names_every_field_of_every_message():
    """As code; what the table of cases leaves out is no field."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for kind in (*messages.FROM_WORKER.values(), *messages.TO_WORKER.values()):
        for field in dataclasses.fields(kind):
            assert f"`{field.name}`" in text
    assert all(f"`{name}`" in text for name in fields_of(Problem(query_length=1)))


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_what_is_written_is_clean(flavour, ringverify):
    """By the rules of this project, as a file of somebody else's; and it imports neither ringverify nor torch."""
    assert ringverify("worker", "--write", "worker.py", "--flavour", flavour).code == 0
    ruff = shutil.which("ruff", path=Path(sys.executable).parent)
    for arguments in (("check", "--isolated", "--select", "F,W,B,D1"), ("format", "--check")):
        ended = subprocess.run(
            [ruff, *arguments, "--config", "line-length=120", "worker.py"], capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not re.search(r"^\s*(import|from) (torch|ringverify)", Path("worker.py").read_text(), re.MULTILINE)


def test_every_flavour_has_its_file():
    """And no file is there that no flavour names."""
    assert {path.stem for path in FOLDER.glob("*.py")} == {"__init__", *(f"{name}_worker" for name in FLAVOURS)}


def test_the_jax_worker_passes_where_jax_is(ringverify):
    """The written ring over host devices, with the gradients of `jax.vjp`."""
    pytest.importorskip("jax")
    pytest.importorskip("ml_dtypes")
    assert ringverify("worker", "--write", "mine.py", "--flavour", "jax").code == 0
    outcome = ringverify.check(program("mine.py"), "--only", "forward,gradients", "--max-examples", 2)
    assert outcome.code == 0, outcome.out


def test_what_was_there_is_not_written_over(ringverify):
    """One line, exit code 2."""
    Path("mine.py").write_text("precious\n")
    outcome = ringverify("worker", "--write", "mine.py")
    assert outcome.code == 2
    assert_one_line(outcome.err, ["mine.py exists and was not changed", "name another file"])
    assert Path("mine.py").read_text() == "precious\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--write", "worker.txt"), ["worker.txt", "FILE.py"]),
        (("--write", "nowhere/worker.py"), ["nowhere/worker.py"]),
        (("--write", "worker.py", "--flavour", "fortran"), ["fortran", "numpy", "jax"]),
        ((), ["--write"]),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(arguments, words, ringverify):
    """Exit code 2."""
    outcome = ringverify("worker", *arguments)
    assert outcome.code == 2
    assert_one_line(outcome.err, words)


def test_a_wrong_worker_is_caught_and_its_ranks_named(worker, ringverify):
    """A causal mask that is off by one: the violation is shrunk, explained and saved, and replays."""
    target = worker(("np.array(keys, int)[None, :] <= ", "np.array(keys, int)[None, :] < "))
    outcome = ringverify.check(target, "--only", "forward", "--max-examples", 20)
    assert outcome.code == 1, outcome.out
    (told,) = outcome.told("counterexample")
    assert (told["tensor"], told["case"]["problem"]["causal"], told["repeats"]) == ("out", True, True)
    assert told["rank"] is not None
    assert told["region"] is not None
    assert "causal" in told["needs"]["requires"]
    assert not {"strides", "schedule"} & set(told["needs"]["irrelevant"])
    again = ringverify("replay", told["file"])
    assert again.code == 1, again.err
    assert "still violated, with exactly the recorded bits" in again.out
    ours = ringverify("replay", told["file"], "--target", "ring")
    assert (ours.code, ours.err) == (0, ""), ours.err
    assert "the property holds now" in ours.out
    for option in ("--in-process", "--snippet=alone.py"):
        refused = ringverify("replay", told["file"], option)
        assert refused.code == 2
        assert_one_line(refused.err, [option.partition("=")[0], "program", "leave it out"])


def test_a_plain_call_that_differs_from_one_with_gradients_is_caught(worker, ringverify):
    """Although each call takes another code path that no other rank or mode of torch shows."""
    target = worker((FIRST, f'    q = q if case["gradients"] else 0 * q\n{FIRST}'))
    outcome = ringverify.check(target, "--only", "modes", "--max-examples", 5)
    assert outcome.code == 1, outcome.out
    (told,) = outcome.told("counterexample")
    assert " without gradients differs from that of a training step" in told["summary"]


def test_a_program_without_gradients_has_one_mode(worker, ringverify):
    """So there is nothing to compare."""
    target = worker(('"lse": True, "lse_gradient": True', '"lse": True, "gradients": False'))
    outcome = ringverify.check(target, "--only", "forward,modes", "--max-examples", 1)
    assert outcome.code == 0, outcome.out
    assert outcome.verdicts() == {"forward": "pass", "modes": "unsupported"}


@pytest.mark.nightly
def test_what_a_worker_prints_is_shown_and_is_no_message(worker, ringverify):
    """By Python or by a child, before a case and within one."""
    said = 'print("a step"); os.system("echo of a child")'
    target = worker((FIRST, f"    {said}\n{FIRST}"), ("sums, logs\n", "sums * 2, logs\n"))
    outcome = ringverify.check(target, "--only", "forward", "--max-examples", 3)
    assert outcome.code == 1, outcome.out
    (told,) = outcome.told("counterexample")
    assert [line for one in told["printed"] for line in set(one["text"].split("\n"))].count("a step") == 1
    assert "of a child" in told["printed"][0]["text"]


@pytest.mark.usefixtures("unexplained")
def test_what_a_worker_raises_is_shown_with_its_traceback(worker, ringverify):
    """As of a rank."""
    target = worker((FIRST, f"    raise IndexError('third of two')\n{FIRST}"))
    outcome = ringverify.check(target, "--only", "forward", "--max-examples", 3)
    assert outcome.code == 1, outcome.out
    (told,) = outcome.told("counterexample")
    assert told["summary"] == "the program raised IndexError: third of two"
    assert "in attend" in told["detail"]
    assert told["failure"] == {"kind": "raised", "exception": "IndexError"}


def test_cases_that_a_worker_refuses_are_counted_and_no_pass(worker, ringverify):
    """The verdict of what is left says so, and where nothing is left it is unsupported."""
    refusal = '    if case["gradients"] or case["world_size"] == 3:\n        raise Unsupported("not like this")\n'
    target = worker((FIRST, refusal + FIRST))
    outcome = ringverify.check(target, "--only", "forward,gradients", "--world-sizes", "2,3", "--max-examples", 10)
    forward, gradients = outcome.told("property")
    assert forward["verdict"] == "pass"
    assert 0 < forward["examples"] < 10
    assert forward["reason"] == f"the program refused {10 - forward['examples']} of 10 cases: not like this"
    assert (gradients["verdict"], gradients["examples"]) == ("unsupported", 0)
    assert gradients["reason"] == "the program refused 10 of 10 cases: not like this"


def test_a_layout_of_heads_first_is_honoured(worker, ringverify):
    """Tensors are written in the declared layout, and results are read in it."""
    swap = "{n: a if 'lse' in n else a.swapaxes(1, 2) for n, a in %s.items()}"
    target = worker(
        ('"lse_gradient": True}', '"lse_gradient": True, "tensor_layout": "bhsd"}'),
        ("    out, lse = attend(case", f"    inputs = {swap % 'inputs'}\n    out, lse = attend(case"),
        ("    return results\n", f"    return {swap % 'results'}\n"),
    )
    outcome = ringverify.check(target, "--only", "forward,gradients", "--max-examples", 4)
    assert outcome.code == 0, outcome.out


def test_several_values_of_a_capability_are_a_list(worker, ringverify):
    """As JSON has no tuples; each sharding is tried. Without `seconds` in its results no share of them is told."""
    several = '"sharding": ["striped", "zigzag"], "world_sizes": [2, 3]'
    target = worker(('"sharding": "zigzag"', several), (', "seconds": seconds', ""))
    outcome = ringverify.check(target, "--only", "forward", "--max-examples", 12)
    assert outcome.code == 0, outcome.out
    (tried,) = outcome.told("tried")
    assert set(tried["features"]["sharding"]) == {"striped", "zigzag"}
    assert "inside the implementation" not in outcome.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("program:",), ["no command follows"]),
        (("program: no-such-program",), ["'no-such-program' is no program here"]),
        ((program(FAULTY, "garbage_before_hello"),), ["no message: 'Loading weights: 100%'", "docs/worker.md"]),
        ((program(FAULTY, "another_version"),), ["speaks version 2"]),
        ((program(FAULTY, "exits_at_once"),), ["before it said hello: no module named 'jax'"]),
        ((program(FAULTY, "right"), "--world", "gloo"), ["--world gloo", "leave it out"]),
    ],
)
def test_a_bad_program_is_said_in_one_line(arguments, words, ringverify):
    """Exit code 2."""
    outcome = ringverify("check", *arguments)
    assert outcome.code == 2
    assert_one_line(outcome.err, words)


@pytest.mark.usefixtures("unexplained")
def test_a_violation_of_a_program_is_confirmed_by_no_script(worker, ringverify):
    """It is said why, and how to see it again."""
    target = worker(("sums, logs\n", "sums * 2, logs\n"))
    ringverify.check(target, "--only", "forward", "--max-examples", 2)
    outcome = ringverify("confirm", "report-1.jsonl")
    assert "a script can only call a function, and this is a program" in outcome.out
    assert outcome.code != 0


# -- the messages ------------------------------------------------------------------------------------------------------


def test_the_published_schema_is_derived_from_the_messages():
    """Committed to the letter; to change it: write `programs.schema()` there."""
    assert SCHEMA.read_text(encoding="utf-8") == json.dumps(programs.schema(), indent=2, ensure_ascii=False) + "\n"
    Draft202012Validator.check_schema(programs.schema())


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("result", "case", -1),
        ("result", "case", True),
        ("result", "seconds", -5),
        ("result", "seconds", math.inf),
        ("result", "seconds", 10**30),
        ("result", "seconds", 2e6),
        ("result", "changed", "q"),
        ("hello", "protocol", -1),
        ("hello", "protocol", 1.5),
    ],
)
def test_what_the_schema_refuses_the_reader_refuses(kind, field, value):
    """And neither refuses the same message with a value that can be."""
    right = {"hello": {"protocol": 1, "name": "x", "capabilities": {}}, "result": {"case": 1, "seconds": 1e6}}
    message, schema = {"kind": kind, **right[kind]}, Draft202012Validator(programs.schema())
    schema.validate(message)
    messages.read(json.dumps(message).encode())
    wrong = message | {field: value}
    assert not schema.is_valid(wrong)
    with pytest.raises(messages.Breach, match=f"sent {kind} with {field}="):
        messages.read(json.dumps(wrong).encode())


def test_a_time_that_is_no_number_is_refused():
    """Python writes and reads one, and JSON has none."""
    with pytest.raises(messages.Breach, match="sent result with seconds='NaN'"):
        messages.read(b'{"kind": "result", "case": 1, "seconds": NaN}')


def test_a_message_nested_too_deeply_is_none():
    """Whichever step of reading it that is too deep for."""
    deep = '{"a": ' * 700 + "0" + "}" * 700
    for line in ("[" * 10**5, f'{{"kind": "hello", "protocol": 1, "name": "x", "capabilities": {deep}}}'):
        with pytest.raises(messages.Breach, match="no message"):
            messages.read(line.encode())


def recorder(folder):
    """A program that hands on what it is told and what a worker answers, and keeps both."""
    path = folder / "recorder.py"
    path.write_text(
        "import json, shutil, subprocess, sys\n"
        "worker = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "log = open(sys.argv[1], 'wb')\n"
        "def hand_on(line, there):\n"
        "    log.write(line); log.flush(); there.write(line); there.flush()\n"
        "hand_on(worker.stdout.readline(), sys.stdout.buffer)\n"
        "for line in sys.stdin.buffer:\n"
        "    case = json.loads(line)\n"
        "    if case['kind'] == 'case': shutil.copy(case['inputs'], 'kept.safetensors')\n"
        "    hand_on(line, worker.stdin)\n"
        "    if case['kind'] == 'case': hand_on(worker.stdout.readline(), sys.stdout.buffer)\n"
    )
    return path


def test_messages_are_as_the_schema_says_and_files_hold_the_exact_inputs(worker, tmp_path):
    """Every line in either direction; every field of a problem has a value; positions are those of the sharding."""
    worker()
    target = program(recorder(tmp_path), "log.jsonl", sys.executable, "mine.py")
    implementation, world = describe(target), ExternalWorld()
    problem = Problem(query_length=5, heads=2, head_dim=3, causal=True)
    case = Case(problem=problem, sharding="zigzag", world_size=2, values="integers")
    try:
        observed = Runner(implementation, world, target=target).run(case, gradients=True)
    finally:
        world.close()
    assert observed.failure is None, observed.failure
    assert [rank.out.shape for rank in observed.ranks] == [(1, 3, 2, 3), (1, 2, 2, 3)]
    lines = [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["hello", "case", "result", "bye"]
    for line in lines:
        Draft202012Validator(programs.schema()).validate(line)
    assert lines[1]["positions"] == lines[1]["key_positions"] == [[0, 1, 4], [2, 3]]
    plain = {"batch": 1, "query_length": 5, "key_length": 5, "heads": 2, "key_heads": 2, "head_dim": 3, "value_dim": 3}
    absent = dict.fromkeys(("window", "documents", "key_lengths", "softcap", "dilation"))
    said = {"dtype": "float32", "causal": True, "scale": 3**-0.5, "sinks": False}
    assert lines[1]["problem"] == {**plain, **absent, **said}
    kept, right = load_file("kept.safetensors"), make_inputs(case)
    assert {name: array.dtype for name, array in kept.items()} == dict.fromkeys(
        ("q", "k", "v", "dout", "dlse"), np.float32
    )
    assert all(np.array_equal(kept[name], getattr(right, name)) for name in kept)


@pytest.mark.parametrize(
    ("way", "wrong"),
    [("right", None), ("missing", "wrote no dsinks"), ("wide", "returned dsinks in float64: float32 is expected")],
)
def test_a_program_is_given_sinks_and_returns_their_gradient(way, wrong):
    """The whole one, as every rank would; a worker that leaves it out, or widens it, breaks the contract."""
    target, world = program(SINKS, way), ExternalWorld()
    implementation = describe(target)
    problem = Problem(query_length=5, heads=3, causal=True, sinks=True)
    case = Case(problem=problem, sharding="zigzag", world_size=2, cotangent="both", seed=3)
    try:
        observed = Runner(implementation, world, target=target).run(case, gradients=True)
    finally:
        world.close()
    if wrong is not None:
        assert wrong in observed.failure.message
        return
    assert observed.failure is None, observed.failure
    margin, found = worst(case, implementation.capabilities, observed, ("out", "lse", "dq", "dk", "dv", "dsinks"))
    assert found is None
    assert 0 < margin <= 1


def test_a_program_has_no_part_of_a_gradient():
    """Its ranks are not seen, so nobody could say which queries a part covers."""
    with pytest.raises(Exception, match="sinks='partial': expected true, since a program returns whole gradients"):
        describe(program(SINKS, "partial"))


def test_bfloat16_is_exact_both_ways(tmp_path, monkeypatch):
    """What a worker returns as it came comes back with the same bits."""
    (tmp_path / "echo.py").write_text(
        "import json, sys\n"
        "say = lambda **m: print(json.dumps(m), flush=True)\n"
        "say(kind='hello', protocol=1, name='echo', capabilities={'dtypes': ['bfloat16'], 'gradients': False})\n"
        "for line in sys.stdin:\n"
        "    case = json.loads(line)\n"
        "    if case['kind'] == 'bye': break\n"
        "    data = open(case['inputs'], 'rb').read()\n"
        "    size = int.from_bytes(data[:8], 'little')\n"
        "    head = json.loads(data[8:8 + size]); head['out'] = head.pop('v')\n"
        "    text = json.dumps(head).encode()\n"
        "    open(case['outputs'], 'wb').write(len(text).to_bytes(8, 'little') + text + data[8 + size:])\n"
        "    say(kind='result', case=case['case'])\n"
    )
    monkeypatch.chdir(tmp_path)
    target, world = program("echo.py"), ExternalWorld()
    case = Case(problem=Problem(query_length=4, heads=2, dtype="bfloat16"), world_size=2, values="float16_limits")
    try:
        observed = Runner(describe(target), world, target=target).run(case, gradients=False)
    finally:
        world.close()
    assert observed.failure is None, observed.failure
    whole = np.concatenate([rank.out for rank in observed.ranks], axis=1)
    assert np.array_equal(whole, make_inputs(case).v)


@pytest.mark.parametrize(
    ("reasons", "words"),
    [
        ("aa", "2 of 5 cases: a"),
        ("ab", "2 of 5 cases: a, and for 1 other reason"),
        ("abc", ", and for 2 other reasons"),
    ],
)
def test_refusals_for_several_reasons_are_counted(reasons, words):
    """The first is told, and how many others there are."""
    verdict, said = of_refusals(reasons, 3)
    assert verdict == "pass"
    assert said.endswith(words)
