"""What is read: regular files within limits. Everything else is refused at once, in one line, with exit code 2."""

import argparse
import hashlib
import json
import os
import pickle
from pathlib import Path

import pytest
import sample_events

from ringverify import files
from ringverify.bench import run as bench
from ringverify.cases.case import LARGEST, Case
from ringverify.check import baseline, casefile
from ringverify.check.configuration import configured
from ringverify.cli.check import add_options
from ringverify.cli.main import main
from ringverify.confirm import confirming
from ringverify.errors import UsageError
from ringverify.events import CounterexampleEvent
from ringverify.lab import expected, kill_report, published
from ringverify.reports.jsonl import ReportError, read_report
from ringverify.reports.terminal import counterexample_text
from ringverify.vectors import checking, index
from ringverify.words import TEXT
from ringverify.worlds.processes.wire import Frames, NotAReport, NotReady, Ready, packed, unpacked
from ringverify.worlds.processes.worker import _raised

pytestmark = pytest.mark.timeout(60)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
CASES = FIXTURES.parent / "docs/published/cases"


def options_of(path):
    """What a project's file says."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    return configured(parser.parse_args([]), path.parent)


def vector_of(path):
    """A vector that a whole index names."""
    (path.parent / "index.json").write_bytes((FIXTURES / "index.json").read_bytes())
    found = index.read(path.parent)
    return checking.load(found, found.stories["V001"])


READERS = {
    "case": ("case.json", casefile.read),
    "report": ("report.jsonl", read_report),
    "baseline": ("known.toml", baseline.read_baseline),
    "options": ("pyproject.toml", options_of),
    "index of vectors": ("index.json", lambda path: index.read(path.parent)),
    "vector": ("V001.safetensors", vector_of),
    "confirmations": ("confirmed.json", confirming.read),
    "kills": ("kills.json", kill_report.read),
    "expected kills": ("expected.json", expected.read),
    "facts": ("packages.toml", published.read_facts),
    "verdicts": ("verdicts.json", published.read_verdicts),
    "benchmark": ("bench.json", bench.read),
}


def refusal(reader, path):
    """The words with which a file is refused."""
    with pytest.raises((UsageError, ReportError)) as refused:
        READERS[reader][1](path)
    assert str(path.name) in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("reader", READERS)
def test_a_fifo_is_refused_and_not_waited_for(reader, tmp_path):
    """Nobody writes to it."""
    path = tmp_path / READERS[reader][0]
    os.mkfifo(path)
    assert "it is a FIFO, and no regular file" in refusal(reader, path)


@pytest.mark.parametrize("reader", READERS)
def test_a_device_is_refused_and_fills_no_memory(reader, tmp_path):
    """It would give zeros without end."""
    path = tmp_path / READERS[reader][0]
    path.symlink_to("/dev/zero")
    assert "it is a device, and no regular file" in refusal(reader, path)


@pytest.mark.parametrize("reader", READERS)
def test_a_file_of_too_many_bytes_is_refused_unread(reader, tmp_path):
    """A terabyte of zeros, none of them on the disk."""
    path = tmp_path / READERS[reader][0]
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "it has 1,099,511,627,776 bytes, and at most" in refusal(reader, path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema":' * 3_000, "a = " + "[" * 3_000, "a." * 200_000 + "a = 1"])
def test_what_is_too_deep_is_refused(reader, text, tmp_path):
    """Whether or not it comes to an end."""
    path = tmp_path / READERS[reader][0]
    path.write_text(text)
    refusal(reader, path)


# -- JSON --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("9" * 41, "a number of 41 digits, and at most 40 are read"),
        ("[1, Infinity]", "Infinity is not a finite number"),
        ("NaN", "is not a finite number"),
        ("-1e999", "-1e999 is not a finite number"),
        ("[" * 65 + "]" * 65, "deeper than 64"),
        ('{"a":' * 65 + "1" + "}" * 65, "deeper than 64"),
        ("[" + "[]," * 600_000 + "1]", "about 1,200,001 values, and at most 500,000 are read"),
    ],
)
def test_json_beyond_its_limits_is_refused(text, words):
    """Before anything is made of it that calls itself, or fills memory."""
    with pytest.raises(ValueError, match=words):
        files.parsed(text)


def test_json_within_its_limits_is_what_it_says():
    """At the limits themselves."""
    assert files.parsed("9" * 40) == 10**40 - 1
    assert files.parsed("[" * 64 + "1.5" + "]" * 64) == json.loads("[" * 64 + "1.5" + "]" * 64)
    assert files.parsed('{"a": [null, true, -0.0, "\\ud800"]}') == {"a": [None, True, -0.0, "\ud800"]}


# -- cases -------------------------------------------------------------------------------------------------------------

LARGE = {
    "query_length": [("problem", "query_length", 70_000), "query_length=70000 and key_length=70000, batch="],
    "2**63 queries": [("problem", "query_length", 2**63), "query_length=9223372036854775808"],
    "keys": [("problem", "key_length", 10**30), "at most 16,777,216 are run"],
    "heads": [("problem", "heads", 10**9), "at most 16,777,216 are run"],
    "dims": [("problem", "head_dim", 10**12), "elements of q, and at most 16,777,216 are run"],
    "ranks": [("case", "world_size", 20_000), "world_size=20000: at most 1024 ranks are run"],
    "seed": [("case", "seed", LARGEST + 1), "seed=9223372036854775808: at most 2**63 - 1"],
    "window": [("problem", "window", [LARGEST + 1, 0]), "window=[9223372036854775808, 0]: at most 2**63 - 1"],
}


@pytest.mark.parametrize("what", LARGE)
def test_a_case_that_no_run_could_hold_is_refused(what, tmp_path, capsys):
    """In one line that says which field, before any of its tensors is made."""
    (place, name, value), words = LARGE[what]
    content = json.loads(next(iter(sorted(CASES.glob("*.json")))).read_text())
    inner = content["case"] if place == "case" else content["case"]["problem"]
    inner[name] = value
    (tmp_path / "case.json").write_text(json.dumps(content))
    assert main(["replay", str(tmp_path / "case.json"), "--edited"]) == 2
    line = capsys.readouterr().err
    assert line.startswith("ringverify: case ")
    assert line.count("\n") == 1
    assert words in line


def test_cases_that_were_published_are_read():
    """The limits are above all that is drawn."""
    for path in CASES.glob("*.json"):
        assert isinstance(casefile.read(path).case, Case)


# -- reports -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tensor", "index"), [("out", [0, 0, 0]), ("lse", [0, 0, 0, 0]), ("dk", [])])
def test_an_index_of_another_length_than_its_tensor_has_axes_is_refused(tensor, index, tmp_path, capsys):
    """No presenter meets it."""
    events = sample_events.everything()
    told = next(event for event in events if event["event"] == "counterexample")
    told |= {"tensor": tensor, "index": index}
    path = tmp_path / "report.jsonl"
    path.write_text(sample_events.sealed(events))
    assert main(["report", str(path), "--markdown", str(tmp_path / "m.md")]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert "counterexample field index: " in line


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"event":"x","a":[' + "1," * 30_000 + "1]}\n", "line 2: it has about 30,003 values, and at most 30,000"),
        ('{"event":"x","a":1e999}\n', "line 2: 1e999 is not a finite number"),
        ('{"event":"x"}\n' * 50_001, "has more than 50,000 events"),
    ],
)
def test_a_report_beyond_the_limits_is_refused(line, words, tmp_path):
    """Whatever its seal says."""
    path = tmp_path / "report.jsonl"
    path.write_text(sample_events.lines(sample_events.everything()[:1]) + line)
    assert words in refusal("report", path)


@pytest.mark.parametrize("line", ["reason." * 70 + "x = 1", "a = {" + "b." * 70 + "c = 1}", "a = " + "1" * 5_000])
def test_toml_that_takes_the_square_of_its_length_is_refused(line, tmp_path):
    """In time, and in memory."""
    path = tmp_path / "known.toml"
    path.write_text(f"[[violation]]\n{line}\n")
    assert "line 2 has " in refusal("baseline", path)
    path.write_text('[[violation]]\nreason = "' + "." * 3_000 + '"\n')
    assert "implementation is missing" in refusal("baseline", path)


NOT_ASKED_FOR = ("detail", "shrunk_from", "hints", "needs", "not_run", "undeclared", "world", "meaning")


@pytest.mark.parametrize("field", NOT_ASKED_FOR)
def test_a_field_that_the_schema_does_not_ask_for_may_be_missing(field, tmp_path):
    """Every presenter does without it: older reports lack some."""
    events = [{name: said for name, said in event.items() if name != field} for event in sample_events.everything()]
    path = tmp_path / "report.jsonl"
    path.write_text(sample_events.sealed(events))
    outputs = ("--markdown", tmp_path / "m.md", "--html", tmp_path / "p.html", "--junit", tmp_path / "j.xml")
    assert main(["report", str(path), *map(str, outputs)]) == 0
    told = [event for event in read_report(path) if isinstance(event, CounterexampleEvent)]
    assert all(counterexample_text(event, verbose=True) for event in told)


# -- what workers send -------------------------------------------------------------------------------------------------


def test_a_length_whose_bytes_never_come_is_not_waited_for():
    """A program wrote to a descriptor that is not its own: the tool goes on, and has its deadline."""
    frames = Frames()
    assert frames.messages(b"\x00\x10\x00\x00abc") == []
    assert frames.messages(b"") == []
    with pytest.raises(NotAReport, match="a message of 1,633,837,924 bytes"):
        Frames().messages(b"abcd")
    with pytest.raises(NotAReport, match="bytes"):
        Frames().messages(b"\xff\xff\xff\xff" + b"\x7f" * 8)


def test_messages_come_whole_however_they_are_cut():
    """As `multiprocessing` frames them, short ones and those with a long length."""
    said = (Ready(), NotReady("no"))
    data = b"".join(len(body).to_bytes(4, "big") + body for body in map(packed, said))
    frames = Frames()
    found = [message for at in range(len(data)) for message in frames.messages(data[at : at + 1])]
    assert tuple(map(unpacked, found)) == said
    body = packed(Ready())
    assert Frames().messages(b"\xff\xff\xff\xff" + len(body).to_bytes(8, "big") + body) == [body]


class Harm:
    """What a forged message would run."""

    def __reduce__(self):
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("forged", [pickle.dumps(Harm()), pickle.dumps({"a": 1}), b"", b"\x80\x05."])
def test_a_forged_message_runs_nothing(forged, tmp_path, monkeypatch):
    """Its digest fits, and what it names is no report."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotAReport):
        unpacked(hashlib.blake2b(forged, digest_size=16).digest() + forged)
    with pytest.raises(NotAReport, match="another digest"):
        unpacked(b"0" * 16 + forged)
    assert list(tmp_path.iterdir()) == []


def test_an_exception_of_megabytes_is_cut_before_it_is_sent():
    """By the rank; its beginning and its end are kept, in its message and in its traceback."""
    try:
        raise ValueError("begin" + "x" * (64 << 20) + "end")
    except ValueError as error:
        raised = _raised(error)
    assert raised.what.startswith("raised ValueError: beginx")
    assert raised.what.endswith("xend")
    assert raised.detail.startswith("Traceback")
    assert raised.detail.endswith("xend")
    assert "characters left out" in raised.what
    assert len(packed(raised)) < 2 * TEXT
