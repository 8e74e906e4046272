"""Vectors at length: inputs follow from the documents, damage is one line, and a wrong ring is told from a right one.

What is tried here has 300 to 2,048 positions: the length is a number like another.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from test_vectors_check import checked

from ringref.attention import attention
from ringref.problem import Problem
from ringref.rounding import FLOAT64_SHARE
from ringverify.cases.case import Case
from ringverify.cli.main import main
from ringverify.errors import UsageError
from ringverify.scale.checksums import BLOCK, RESULTS
from ringverify.scale.golden import expected_checksums
from ringverify.scale.numbers import Numbers, words
from ringverify.vectors import generating, long, sealed
from ringverify.vectors.catalogue import STORIES

N = 2048
SHORT = {vector.id: vector for vector in long._vectors(N)}
WORD = 2**64


def mixed(seed: int, name: str, position: int, width: int) -> bytes:
    """The bytes that `docs/vectors.md` says a name has at a position, in whole numbers of Python."""
    count = -(-width // 8)
    start, found = seed * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode()) * 0xD1B54A32D192ED03, b""
    for number in range(position * count + 1, position * count + count + 1):
        x = (start + number * 0x9E3779B97F4A7C15) % WORD
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % WORD
        x = (x ^ x >> 27) * 0x94D049BB133111EB % WORD
        found += (x ^ x >> 31).to_bytes(8, "little")
    return found[:width]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder of one vector and both long ones, at a shorter length; nobody changes it."""
    folder = tmp_path_factory.mktemp("whole") / "vectors"
    generating.generate(folder, force=False, say=lambda text: None, stories={"V003": STORIES["V003"]})
    (folder / long.NAME).write_text(long.text(SHORT))
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to be damaged."""
    copied = tmp_path / "vectors"
    copied.mkdir()
    for path in whole.iterdir():
        (copied / path.name).write_bytes(path.read_bytes())
    return copied


def rewritten(folder: Path, change) -> None:
    """Change the content of the file, and seal it again."""
    content = json.loads((folder / long.NAME).read_text())
    del content["seal"]
    change(content)
    (folder / long.NAME).write_text(json.dumps({**content, "seal": sealed.seal(content)}))


def test_inputs_are_what_the_document_says() -> None:
    """Made once more as it is written, one number at a time."""
    seed, n, problem = 2, 300, Problem(query_length=300, head_dim=64)
    numbers, book = Numbers(problem, seed, "counted"), []
    for number in range(16):
        book.append([(2 * byte - 255) / 128 for byte in mixed(seed, "codebook", number, 64)])
    sign = [1 if byte % 2 else -1 for byte in mixed(seed, "signs", 0, 64)]
    for at in (0, 1, 77, 299):
        a = mixed(seed, "a 0 0", at, 1)[0] % 16
        word = int.from_bytes(mixed(seed, "c 0 0", at, 2), "little")
        c = next((zeros for zeros in range(15) if word >> zeros & 1), 15)
        place, level = 2 * (63 * at // n) - 62, mixed(seed, "v of classes 0 0", c, 1)[0]
        v = [
            (2 * (byte // 4) - 63 + 2 * (level // 2) - 126 + place * sign[e]) / 256
            for e, byte in enumerate(mixed(seed, "v 0 0", at, 64))
        ]
        dout = [(2 * (byte // 2) + 1) / 256 for byte in mixed(seed, "dout 0 0", at, 64)]
        position = np.array([at])
        np.testing.assert_array_equal(numbers.q(0, 0, position)[0], np.array(book[a]) * (a + 1) / 16)
        np.testing.assert_array_equal(numbers.k(0, 0, position)[0], book[c])
        np.testing.assert_array_equal(numbers.v(0, 0, position)[0], v)
        np.testing.assert_array_equal(numbers.dout(0, 0, position)[0], dout)
        assert numbers.dlse(0, 0, position)[0] == (2 * mixed(seed, "dlse 0 0", at, 1)[0] - 255) / 256
        assert bytes(words(seed, "sign dq 0", position, 64)[0]) == mixed(seed, "sign dq 0", at, 64)


@pytest.mark.parametrize("id", SHORT)
def test_sums_are_those_of_the_dense_oracle(id: str) -> None:
    """Of chosen rows and of blocks, the last of which is not full."""
    vector, n = SHORT[id], 1500
    problem = vector.problem.replace(query_length=n, key_length=None)
    case = Case(problem=problem, sharding="contiguous", world_size=3, cotangent=vector.cotangent, seed=5)
    made, every, numbers = expected_checksums(case, (0, 7, n - 1)), np.arange(n), Numbers(problem, 5, "counted")
    q, k, v, dout = (make(0, 0, every)[None, :, None] for make in (numbers.q, numbers.k, numbers.v, numbers.dout))
    dlse = numbers.dlse(0, 0, every)[None, None] * (vector.cotangent == "both")
    answer = attention(problem, q, k, v, dout, dlse)
    for name in RESULTS:
        rows = answer.lse[0, 0][:, None] if name == "lse" else getattr(answer, name)[0, :, 0]
        terms = ((1 - 2.0 * (words(5, f"sign {name} 0", every, rows.shape[1]) % 2)) * rows).sum(axis=1)
        expected = [*terms[[0, 7, n - 1]], terms[:BLOCK].sum(), terms[BLOCK:].sum()]
        error = np.abs(made.values[name] - expected)
        assert (error <= FLOAT64_SHARE * made.allowed(name)).all(), name


def test_whole_vectors_pass(folder, capsys) -> None:
    """With the others or named, and nothing is said of files that are there."""
    code, out, err = checked(capsys, folder)
    assert (code, err) == (0, "")
    assert out.startswith(f"3 vectors in {folder}: files complete")
    assert checked(capsys, folder, "--only", "L002")[1].startswith("1 vectors in")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:900]), ["long.json is truncated or not JSON"]),
        (lambda path: path.write_text(path.read_text().replace("-2.07", "-2.08")), ["long.json was edited"]),
        (lambda path: path.write_text(path.read_text().replace('"schema": 1', '"schema": 2')), ["not of schema 1"]),
    ],
    ids=["cut off", "edited", "another schema"],
)
def test_a_damaged_file_is_one_line(change, words, folder, capsys) -> None:
    """With the way out, in a check of the files and of a target alike."""
    change(folder / long.NAME)
    for arguments in ((folder,), (folder, "--target", "ring", "--only", "L001")):
        code, _, err = checked(capsys, *arguments)
        assert code == 2
        assert err.count("\n") == 1
        assert all(word in err for word in (*words, "ringverify vectors generate"))


def changed_sum(content) -> None:
    """One sum is off by a millionth."""
    content["vectors"][1]["results"]["dk"]["expected"][3] += 1e-6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed_sum, "L002: dk is not what the float64 oracle gives"),
        (lambda c: c["vectors"][0]["results"]["dq"]["allowed"].__setitem__(4, 9.0), "L001: the error allowed in dq"),
        (lambda c: c["vectors"][0]["results"]["lse"]["expected"].pop(), "other numbers for lse than"),
        (lambda c: c["vectors"][0].pop("cotangent"), "KeyError('cotangent')"),
        (lambda c: c["vectors"][0]["problem"].update(window=[3, 0]), "L001 has other fields than its problem"),
        (lambda c: c["vectors"][0].update(id="V001"), "id='V001'"),
    ],
)
def test_a_sealed_file_that_says_something_else_is_one_line(change, words, folder, capsys) -> None:
    """What it says is computed again."""
    rewritten(folder, change)
    code, _, err = checked(capsys, folder)
    assert code == 2
    assert err.count("\n") == 1
    assert words in err


def test_our_ring_returns_what_they_say(folder, capsys) -> None:
    """In float64, which it declares, on two ranks; only those that are named are run."""
    assert main(["vectors", "check", str(folder), "--target", "ring", "--only", "L001,L002", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert out.count("pass  ") == 2
    assert "L002" in out
    assert main(["vectors", "check", str(folder), "--target", "ring", "--jobs", "1"]) == 0
    assert "L001" not in capsys.readouterr().out


def test_a_wrong_ring_is_told(folder, capsys, tmp_path) -> None:
    """Which sum is off, by how much, and how to see it again; the report has it too."""
    target, report = "ringverify.faults.length:mask_off_by_one", tmp_path / "report.jsonl"
    asked = ["vectors", "check", str(folder), "--target", target, "--only", "L001", "--report", str(report)]
    assert main([*asked, "--jobs", "1"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "the signed sum of " in out
    assert f"ringverify vectors check {folder} --target {target} --only L001" in out
    events = [json.loads(line) for line in report.read_text().splitlines()]
    assert [event["property"] for event in events if event["event"] == "counterexample"] == ["L001"]


def test_what_is_not_there_is_named(folder, capsys) -> None:
    """An unknown id is told what there is."""
    code, _, err = checked(capsys, folder, "--only", "L003")
    assert code == 2
    assert "no vector 'L003'" in err
    assert "it has V003 to V003, and L001, L002" in err


def test_the_committed_file_is_that_which_is_generated(fixtures) -> None:
    """Its descriptions are ours, and it is computed again at its full length; it takes some kilobytes."""
    there = long.read(fixtures)
    ours = [vector.described() for vector in long.VECTORS.values()]
    assert [long.of(described).described() for described in there.values()] == ours
    assert (fixtures / long.NAME).stat().st_size < 64 << 10
    long.answer_again(fixtures, there["L002"])


def test_generating_again_says_what_differs(whole, folder, monkeypatch) -> None:
    """And changes nothing; with --force it is written."""
    monkeypatch.setattr(long, "VECTORS", SHORT)
    monkeypatch.setattr(generating, "STORIES", {"V003": STORIES["V003"]})
    said: list[str] = []
    generating.generate(folder, force=False, say=said.append)
    assert said[-1] == f"2 vectors at length in {folder / long.NAME}: unchanged"
    rewritten(folder, changed_sum)
    with pytest.raises(UsageError, match="L002: dk is not what the float64 oracle gives"):
        generating.generate(folder, force=False, say=said.append)
    generating.generate(folder, force=True, say=said.append)
    assert said[-1] == f"2 vectors at length in {folder / long.NAME}: written"
    assert (folder / long.NAME).read_bytes() == (whole / long.NAME).read_bytes()
