"""Golden vectors of merges: two oracles agree, damage is one line, and a wrong merge is told from a right one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from test_vectors_check import checked

from ringref.merge import merged
from ringref.rounding import witness_bound
from ringverify.cli.main import main
from ringverify.errors import UsageError
from ringverify.merge_contract import MergeCapabilities
from ringverify.merging.case import rounded
from ringverify.merging.faults import FAULTS
from ringverify.vectors import generating, merges, sealed
from ringverify.vectors.catalogue import STORIES
from ringverify.vectors.merge_trial import lacking

ROOT = Path(__file__).resolve().parents[2]
IDS = Path(__file__).with_name("merge_ids.txt")
"""Each id that was ever given, and the SHA-256 of its inputs; lines are added, never changed."""

ROUNDINGS = 1000
"""Of float64, in which the two oracles may differ."""


@pytest.fixture
def folder(fixtures, tmp_path) -> Path:
    """A folder of one vector of attention and all of merges, to be damaged."""
    where = tmp_path / "vectors"
    generating.generate(where, force=False, say=lambda text: None, stories={"V003": STORIES["V003"]})
    (where / merges.NAME).write_bytes((fixtures / merges.NAME).read_bytes())
    return where


def rewritten(folder: Path, change) -> None:
    """Change the content of the file, and seal it again."""
    content = json.loads((folder / merges.NAME).read_text())
    del content["seal"]
    change(content["vectors"])
    (folder / merges.NAME).write_text(json.dumps({**content, "seal": sealed.seal(content)}))


@pytest.mark.parametrize("id", merges.VECTORS)
def test_the_float64_oracle_gives_the_results(id: str) -> None:
    """Which shares nothing with the decimal one; inputs are numbers that the dtypes hold."""
    vector = merges.VECTORS[id]
    x = merges.given(vector)
    found, expected = merges.answer(x), merged(x.out, x.natural, x.cotangent, x.lse_cotangent)
    lse_dtype = "float64" if vector.dtype == "float64" else "float32"
    for name, field in merges.RESULTS.items():
        np.testing.assert_allclose(
            found[name], getattr(expected, field), rtol=0, atol=witness_bound("float64", ROUNDINGS), err_msg=name
        )
    for values, dtype in (
        (x.out, vector.dtype),
        (x.cotangent, vector.dtype),
        (x.lse, lse_dtype),
        (x.lse_cotangent, lse_dtype),
    ):
        np.testing.assert_array_equal(rounded(values, dtype), values)


def test_an_id_stands_for_what_it_stood_for() -> None:
    """Every bit of the inputs."""

    def digest(vector: merges.MergeVector) -> str:
        x = merges.given(vector)
        parts = (x.out, x.lse, x.cotangent, x.lse_cotangent)
        return hashlib.sha256(b"".join(np.ascontiguousarray(one).tobytes() for one in parts)).hexdigest()[:16]

    listed = dict(line.split() for line in IDS.read_text().splitlines())
    assert listed == {id: digest(vector) for id, vector in merges.VECTORS.items()}
    assert [int(id[1:]) for id in merges.VECTORS] == list(range(1, len(merges.VECTORS) + 1))


def test_the_committed_file_is_that_which_is_generated(fixtures) -> None:
    """Computed again, inputs and results bit for bit."""
    there = merges.read(fixtures)
    assert list(there) == list(merges.VECTORS)
    for described in there.values():
        merges.answer_again(fixtures, described)


def test_whole_vectors_pass_beside_those_of_attention(folder, capsys) -> None:
    """All, or those that are named."""
    code, out, err = checked(capsys, folder)
    assert (code, err) == (0, "")
    assert out.startswith(f"{1 + len(merges.VECTORS)} vectors in {folder}: files complete")
    assert checked(capsys, folder, "--only", "M002,V003")[1].startswith("2 vectors in")


def number(values, value) -> None:
    """Replace the first number of nested lists."""
    while isinstance(values[0], list):
        values = values[0]
    values[0] = value


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda v: number(v[0]["inputs"]["lse"], 0.25), "M001: lse is not what is made for this id"),
        (lambda v: number(v[4]["results"]["grad_lse"]["expected"], 0.5), "M005: grad_lse is not what"),
        (lambda v: number(v[0]["results"]["out"]["allowed"], 1.0), "M001: the error allowed in out"),
        (lambda v: v[0]["results"]["out"]["expected"].append(0.0), "does not describe vectors"),
        (lambda v: v[0]["shape"].update(tokens=5), "numbers of another shape"),
        (lambda v: v[0].update(values="other"), "values='other'"),
        (lambda v: v[0].pop("inputs"), "KeyError('inputs')"),
    ],
)  # fmt: skip
def test_a_sealed_file_that_says_something_else_is_one_line(change, words, folder, capsys) -> None:
    """What it says is computed again; a report names the vector too."""
    rewritten(folder, change)
    code, _, err = checked(capsys, folder)
    assert code == 2
    assert err.count("\n") == 1
    assert words in err


def test_a_report_has_a_line_for_each_and_the_one_that_is_wrong(folder, capsys, tmp_path) -> None:
    """A merge has no case and no ranks."""
    rewritten(folder, lambda v: number(v[4]["results"]["out"]["expected"], 0.5))
    report = tmp_path / "report.jsonl"
    assert checked(capsys, folder, "--report", report)[0] == 2
    events = [json.loads(line) for line in report.read_text().splitlines()]
    verdicts = {event["property"]: event["verdict"] for event in events if event["event"] == "property"}
    assert [id for id, verdict in verdicts.items() if verdict == "fail"] == ["M005"]
    assert len(verdicts) == 1 + len(merges.VECTORS)
    (shown,) = (event for event in events if event["event"] == "counterexample")
    assert shown["case"] is None
    assert "M005: out is not what the oracle gives" in shown["summary"]


def test_an_edited_file_is_one_line(folder, capsys) -> None:
    """Before anything is computed."""
    path = folder / merges.NAME
    path.write_text(path.read_text().replace('"two partials"', '"2 partials"'))
    code, _, err = checked(capsys, folder)
    assert code == 2
    assert "merges.json was edited" in err


def test_generating_again_says_what_differs(folder, monkeypatch) -> None:
    """And changes nothing; with --force it is written."""
    monkeypatch.setattr(generating.long, "VECTORS", {})
    monkeypatch.setattr(generating, "STORIES", {"V003": STORIES["V003"]})
    said: list[str] = []
    generating.generate(folder, force=False, say=said.append)
    assert f"12 vectors of merges in {folder / merges.NAME}: unchanged" in said
    before = (folder / merges.NAME).read_bytes()
    rewritten(folder, lambda v: v.pop())
    with pytest.raises(UsageError, match="M012 differs; pass --force"):
        generating.generate(folder, force=False, say=said.append)
    generating.generate(folder, force=True, say=said.append)
    assert (folder / merges.NAME).read_bytes() == before


def test_our_merge_and_that_of_the_documents_return_what_they_say(fixtures, capsys) -> None:
    """In processes of their own."""
    example = str(ROOT / "docs" / "examples" / "my_merge.py") + ":merge_partials"
    assert main(["vectors", "check", str(fixtures), "--target", "merge:ring", "--target", example]) == 0
    out = capsys.readouterr().out
    assert out.count("conformant: 10 pass, 2 unsupported") == 2
    assert "unsupported  M010                   not declared: bfloat16" in out


def test_a_wrong_merge_is_told_with_its_cause_and_how_to_see_it_again(fixtures, capsys, tmp_path) -> None:
    """In the terminal and in the report."""
    target, report = str(ROOT / "docs" / "examples" / "wrong_merge.py") + ":merge_partials", tmp_path / "report.jsonl"
    asked = ["vectors", "check", str(fixtures), "--target", target, "--only", "M003,M008", "--report", str(report)]
    assert main(asked) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "cause the weights are exp(lse), without a shift: they overflow or vanish" in out
    assert f"replay ringverify vectors check {fixtures} --target {target} --only M003" in out
    assert "violations: 1 pass, 1 fail" in out
    events = [json.loads(line) for line in report.read_text().splitlines()]
    assert [event["property"] for event in events if event["event"] == "counterexample"] == ["M003"]


@pytest.mark.parametrize("id", [id for id in FAULTS if id != "nan_hidden"])
def test_every_fault_of_merges_is_told_by_a_vector(id: str) -> None:
    """But that which hides NaN: no vector has any. The numbers of a fault are not within what is allowed."""
    from ringverify.merging.judging import faulty_result
    from ringverify.merging.properties import compared, right_merge

    c = MergeCapabilities(dtypes=("float32",), gradients=True, stacked=id == "two_only")
    wrong = []
    for vector in merges.VECTORS.values():
        if vector.dtype == "float32":
            case = vector.case(merges.given(vector))
            result = faulty_result(FAULTS[id], case, c, gradients=True)
            right = right_merge(case, c, gradients=True)
            wrong += [vector.id] if compared(case, c, ("out", "lse", "dout", "dlse"), [result], right)[1] else []
    assert wrong


NOT_HELD = {
    "M001": [({"base": 2}, "base=2 is declared"), ({"head_dims": (64,)}, "this has 2")],
    "M002": [({"devices": ("cuda",)}, "device cpu is not declared")],
    "M003": [({"lse_dtype": "bfloat16"}, "cannot hold")],
    "M005": [({"empty": None}, "empty=None is declared")],
    "M008": [({"lse": False}, "cannot be merged once more")],
    "M010": [({}, "not declared: bfloat16")],
}  # fmt: skip


@pytest.mark.parametrize("id", NOT_HELD)
def test_why_a_merge_is_not_held_to_a_vector_is_said(id: str) -> None:
    """Each reason; and none where nothing lacks."""
    vector = merges.VECTORS[id]
    for declared, words in NOT_HELD[id]:
        assert words in str(lacking(vector, MergeCapabilities(**declared), "cpu"))
    assert lacking(vector, MergeCapabilities(dtypes=("float32", "bfloat16")), "cpu") is None


def test_what_is_not_for_merges_is_refused(fixtures, capsys) -> None:
    """In a line: a vector of attention, an option of ranks, attention and a merge in one run."""
    for arguments, words in (
        (["--target", "merge:ring", "--only", "V001"], "no vector 'V001' of merges"),
        (["--target", "merge:ring", "--jobs", "2"], "--jobs is for implementations of attention"),
        (["--target", "merge:ring", "--target", "ring"], "check them in two runs"),
        (["--target", "ring", "--only", "M001"], "no vector 'M001'"),
    ):
        assert main(["vectors", "check", str(fixtures), *arguments]) == 2
        err = capsys.readouterr().err
        assert words in err
        assert err.count("\n") == 1


def test_a_merge_that_raises_fails_and_one_without_vectors_is_refused(folder, capsys, tmp_path, monkeypatch) -> None:
    """A folder that is older than merges has none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raising.py").write_text(
        "from ringverify import merge\n\n\n@merge()\ndef both(a, lse_a, b, lse_b):\n    raise ValueError('no')\n"
    )
    assert main(["vectors", "check", str(folder), "--target", "raising.py:both", "--only", "M001"]) == 1
    assert "the merge raised ValueError: no" in " ".join(capsys.readouterr().out.split())
    (folder / merges.NAME).unlink()
    assert main(["vectors", "check", str(folder), "--target", "raising.py:both", "--only", "M001"]) == 2
    assert "it has none" in capsys.readouterr().err
