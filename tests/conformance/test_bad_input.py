"""Bad input: each gets one line that says what and how to mend it, its exit code, and nothing lost or half-written."""

import os
import re
from pathlib import Path

import pytest
from command_line import another_version_of, assert_one_line, miniature

pytestmark = pytest.mark.timeout(60)

VIOLATIONS, USAGE, INCONCLUSIVE = 1, 2, 3

# What is typed, and what the line has to name: the value, and the way out.
WRONG_USAGE = {
    "no command": ([], ["COMMAND", "--help"]),
    "no target": (["check"], ["TARGET", "ringverify check --help"]),
    "unknown command": (["chek", "ring"], ["'chek'", "'check'", "--help"]),
    "unknown option": (["check", "ring", "--speed", "9"], ["--speed 9", "--help"]),
    "unknown target": (["check", "rng"], ["'rng'", "did you mean 'ring'?"]),
    "a dot for the colon": (["check", "ringverify.ring.attend"], ["did you mean 'ringverify.ring:attend'?"]),
    "unknown peer": (["check", "peer:flash"], ["'peer:flash'", "a built-in name (ringverify list implementations)"]),
    "module that is not there": (["check", "no_such_module:attend"], ["'no_such_module'", "PYTHONPATH"]),
    "submodule that is not there": (["check", "json.no_such:attend"], ["'json.no_such'", "PYTHONPATH"]),
    "file that is not there": (["check", "nothing.py:attend"], ["'nothing.py'", "the whole path"]),
    "module without an attribute": (
        ["check", "ringverify.ring.declared"],
        ["ringverify.ring.declared holds 2 implementations", "use one or several of ringverify.ring.declared:ring "],
    ),
    "file without an attribute": (
        ["check", miniature("plain_function:")[:-1]],
        ["plain_function.py holds one implementation: use ", "plain_function.py:decorated"],
    ),
    "module without an implementation": (
        ["check", "json"],
        ["json holds no implementation", "@ringverify.implementation(...)", "ringverify init"],
    ),
    "file that is not there, without an attribute": (["check", "nothing.py"], ["'nothing.py'", "the whole path"]),
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
    "one target twice": (["check", "ring", "ring"], ["the target 'ring' is named twice: leave one out"]),
    "one target under two names": (
        ["check", "ring", "ringverify.ring.declared:ring"],
        ["the implementation 'ring' is named twice: leave one out"],
    ),
    "unknown property": (["check", "ring", "--only", "forwad"], ["'forwad'", "did you mean 'forward'?"]),
    "unknown property to skip": (["check", "ring", "--skip", "zzz"], ["'zzz'", "known: forward, lse"]),
    "no property left": (["check", "ring", "--only", "lse", "--skip", "lse"], ["--skip names all", "remove a name"]),
    "no property named": (["check", "ring", "--only", ","], ["','", "separated by commas"]),
    "world size 0": (["check", "ring", "--world-sizes", "0"], ["'0'", "at least 1"]),
    "world size -1": (["check", "ring", "--world-sizes=2,-1"], ["'2,-1'", "at least 1"]),
    "world size one": (["check", "ring", "--world-sizes", "one"], ["'one'", "at least 1"]),
    "world size not declared": (
        ["check", miniature("right:attend_in_processes"), "--world-sizes", "5"],
        ["(1, 2)", "and not 5 of --world-sizes 5", "ask for declared ones"],
    ),
    "some of the world size not declared": (
        ["check", miniature("right:attend_in_processes"), "--world-sizes", "2,5"],
        ["(1, 2)", "and not 5 of --world-sizes 2,5", "ask for declared ones"],
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


SLIPS = {
    "implementation without parentheses": (
        "from ringverify import implementation\n\n\n@implementation\ndef attend(q, k, v, call):\n    return q\n",
        ["slip.py does not import", "@implementation without parentheses: write @implementation()", "slip.py:4"],
    ),
    "merge without parentheses": (
        "from ringverify import merge\n\n\n@merge\ndef attend(out_a, lse_a, out_b, lse_b):\n    return out_a\n",
        ["@merge without parentheses: write @merge()", "slip.py:4"],
    ),
    "merge of three": (
        "from ringverify import merge\n\n\n@merge()\ndef attend(out_a, lse_a, out_b):\n    return out_a\n",
        ["cannot be called as merge(out_a, lse_a, out_b, lse_b)", "slip.py:4"],
    ),
    "model": (
        "import ringverify\n\n\n@ringverify.model()\ndef attend(group):\n    return None\n",
        ["'slip.py:attend' is a model, not an implementation: ringverify reach slip.py:attend is for it"],
    ),
    "model with an unknown declaration": (
        "import ringverify\n\n\n@ringverify.model(shards=2)\ndef attend(group):\n    return None\n",
        ["unknown declaration 'shards' of a model; known: vocabulary", "slip.py:4"],
    ),
    "model without parentheses": (
        "import ringverify\n\n\n@ringverify.model\ndef attend(group):\n    return None\n",
        ["@model without parentheses: write @model()", "slip.py:4"],
    ),
    "number": ("attend = 3\n", ["'slip.py:attend' is an int, not an implementation"]),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_a_declaration_is_one_line_at_the_users_own(slip, ringverify):
    """Where it was written, not where it was found out."""
    text, words = SLIPS[slip]
    Path("slip.py").write_text(text)
    outcome = ringverify("check", "slip.py:attend")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, words)


def test_a_report_that_is_replayed_is_told_from_a_damaged_case(ringverify):
    """And what to do with it."""
    Path("all.jsonl").write_text('{"event": "header", "schema": 1}\n{"event": "footer"}\n')
    outcome = ringverify("replay", "all.jsonl")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["all.jsonl is a report, not a case file: ringverify report all.jsonl shows it"])


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
    "no GPU for a rank": (["--world", "nccl"], ["world size 1 needs 1 GPU", "--world gloo"]),
}


def test_two_implementations_of_one_name_are_told_how_to_be_told_apart(ringverify):
    """They are not one that is named twice."""
    other = ringverify.folder / "another.py"
    other.write_bytes(Path(miniature("right:attend").rpartition(":")[0]).read_bytes())
    outcome = ringverify("check", miniature("right:attend"), f"{other}:attend")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["two implementations are named 'right'", "name="])


@pytest.mark.parametrize("lacking", INFRASTRUCTURE)
def test_what_this_machine_lacks_is_inconclusive(lacking, ringverify, monkeypatch):
    """Exit code 3 and one line: never a pass, never a violation."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    arguments, words = INFRASTRUCTURE[lacking]
    outcome = ringverify.check("ring", *arguments)
    assert outcome.code == INCONCLUSIVE
    assert_one_line(outcome.err, words)
    assert list(ringverify.folder.iterdir()) == []


def test_a_missing_peer_package_is_inconclusive_and_says_what_to_install(ringverify, tmp_path_factory, monkeypatch):
    """Whether or not the package is here: of two versions the first on the module path counts."""
    another_version_of("ring-attention-pytorch", tmp_path_factory.mktemp("path"), monkeypatch)
    outcome = ringverify("check", "peer:ring-attention-pytorch")
    assert outcome.code == INCONCLUSIVE
    assert_one_line(outcome.err, ["ring-attention-pytorch==0.5.20, found 0.0.0", "pip install 'ringverify[peers]'"])


@pytest.mark.parametrize(("other", "code"), [("right:attend", INCONCLUSIVE), ("faulty_rings:wrong_scale", VIOLATIONS)])
def test_what_can_be_checked_is_checked_beside_what_cannot(other, code, ringverify, tmp_path_factory, monkeypatch):
    """The target that cannot is told of as it was typed, with the reason, on the terminal and in every report."""
    missing = "peer:yunchang-ring"
    another_version_of("yunchang", tmp_path_factory.mktemp("path"), monkeypatch)
    pages = [f"--{kind}={ringverify.folder / name}" for kind, name in (("junit", "j.xml"), ("html", "p.html"))]
    outcome = ringverify.check(missing, miniature(other), "--only", "forward", "--max-examples", "4", *pages)
    assert outcome.code == outcome.events[-1]["exit_code"] == code, outcome.err
    first, second = outcome.told("implementation")
    assert (first["implementation"], first["verdict"]) == (missing, "inconclusive")
    assert second["verdict"] == {INCONCLUSIVE: "conformant", VIOLATIONS: "violations"}[code]
    (why,) = outcome.told("property", implementation=missing)
    assert re.match(rf"{missing} cannot be checked here: .*yunchang==[\d.]+, found 0\.0\.0: pip install", why["reason"])
    for told in (outcome.out, *((ringverify.folder / name).read_text("utf-8") for name in ("j.xml", "p.html"))):
        assert f"{missing} cannot be checked here" in told
