"""`ringverify vectors check`: damage of any kind is one clear line and exit code 2, and the oracle is asked again."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import ringref.attention
from ringverify.cases import tensorfile
from ringverify.cases.tensorfile import Tensor
from ringverify.cli.main import main
from ringverify.errors import UsageError
from ringverify.vectors import checking, generating, index, making
from ringverify.vectors.catalogue import STORIES

SOME = {id: STORIES[id] for id in ("V003", "V027", "V048", "V106")}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A folder of four vectors; nobody changes it."""
    folder = tmp_path_factory.mktemp("whole") / "vectors"
    generating.generate(folder, force=False, say=lambda text: None, stories=SOME)
    return folder


@pytest.fixture
def folder(whole, tmp_path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "vectors"))


def checked(capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, output and error of a check."""
    code = main(["vectors", "check", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_whole_vectors_pass(folder, capsys) -> None:
    """And nothing is written."""
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    code, out, err = checked(capsys, folder)
    assert (code, err) == (0, "")
    assert out.startswith(f"4 vectors in {folder}: files complete and unedited, results reproduced by the oracle")
    assert out.count("\n") == 1
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before


# -- damage ------------------------------------------------------------------------------------------------------------


def rewritten(folder: Path, change) -> None:
    """The index with a change, sealed again."""
    content = json.loads((folder / "index.json").read_text())
    change(content)
    content.pop("seal", None)
    content["seal"] = index.seal(content)
    (folder / "index.json").write_text(json.dumps(content))


def with_tensors(folder: Path, id: str, change) -> None:
    """A vector with a change of its tensors, its checksum right."""
    path = folder / f"{id}.safetensors"
    tensors, metadata = tensorfile.decode(path.read_bytes())
    change(tensors)
    data = tensorfile.encode(tensors, metadata)
    path.write_bytes(data)
    rewritten(folder, lambda content: _entry(content, id).update(index.entry(SOME[id], data)))


def _entry(content, id):
    return next(entry for entry in content["vectors"] if entry["id"] == id)


def _truncated(folder):
    path = folder / "V048.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _emptied(folder):
    (folder / "V048.safetensors").write_bytes(b"")


def _edited(folder):
    path = folder / "V048.safetensors"
    data = bytearray(path.read_bytes())
    data[-3000] ^= 1
    path.write_bytes(data)


def _missing(folder):
    (folder / "V027.safetensors").unlink()


def _unnamed(folder):
    (folder / "V200.safetensors").write_bytes((folder / "V003.safetensors").read_bytes())


def _not_in_the_index(folder):
    rewritten(folder, lambda content: content["vectors"].pop(1))


def _no_index(folder):
    (folder / "index.json").unlink()


def _no_schema(folder):
    (folder / "schema.json").unlink()


def _schema_emptied(folder):
    (folder / "schema.json").write_bytes(b"")


def _schema_not_text(folder):
    (folder / "schema.json").write_bytes(b"\xff\xfe\x00")


def _index_cut_off(folder):
    path = folder / "index.json"
    path.write_bytes(path.read_bytes()[:500])


def _index_edited(folder):
    path = folder / "index.json"
    path.write_text(path.read_text().replace('"batch": 1', '"batch": 2', 1))


def _index_of_the_future(folder):
    (folder / "index.json").write_text('{"schema": 2, "vectors": []}')


def _another_json(folder):
    (folder / "index.json").write_text("[1, 2, 3]")


def _not_text(folder):
    (folder / "index.json").write_bytes(b"\xff\xfe\x00")


def _no_vectors(folder):
    rewritten(folder, lambda content: content.update(vectors=[]))


def _twice(folder):
    rewritten(folder, lambda content: content["vectors"].append(content["vectors"][0]))


def _impossible(folder):
    rewritten(folder, lambda content: _entry(content, "V003")["problem"].update(heads=0))


def _exchanged(folder):
    """Two files change places, and so do their checksums."""
    one, other = folder / "V003.safetensors", folder / "V027.safetensors"
    data = one.read_bytes(), other.read_bytes()
    one.write_bytes(data[1])
    other.write_bytes(data[0])

    def change(content):
        for id, of in (("V003", data[1]), ("V027", data[0])):
            _entry(content, id).update({name: index.entry(SOME[id], of)[name] for name in ("bytes", "sha256")})

    rewritten(folder, change)


def _positions(folder):
    rewritten(folder, lambda content: _entry(content, "V048")["layouts"][0]["keys"].reverse())


def _flags(folder):
    rewritten(folder, lambda content: _entry(content, "V048").update(flags=[]))


def _no_safetensors(folder):
    data = b"dear diary, today nothing was attended"
    (folder / "V003.safetensors").write_bytes(data)
    rewritten(folder, lambda content: _entry(content, "V003").update(index.entry(SOME["V003"], data)))


def _a_tensor_less(folder):
    with_tensors(folder, "V048", lambda tensors: tensors.pop("dq"))


def _another_answer(folder):
    def change(tensors):
        values = tensors["dk"].values.copy()
        values.flat[3] = np.nextafter(values.flat[3], np.inf)
        tensors["dk"] = Tensor(values, "float64")

    with_tensors(folder, "V048", change)


def _another_input(folder):
    def change(tensors):
        values = tensors["q"].values.copy()
        values.flat[3] *= 2
        tensors["q"] = Tensor(values, "float32")

    with_tensors(folder, "V048", change)


def _a_wider_bound(folder):
    def change(tensors):
        tensors["allowed.accumulates.out"] = Tensor(8 * tensors["allowed.accumulates.out"].values, "bfloat16")

    with_tensors(folder, "V048", change)


DAMAGE = {
    _truncated: ["V048.safetensors is truncated", "bytes"],
    _emptied: ["V048.safetensors is truncated: 0 of"],
    _edited: ["V048.safetensors was edited", "SHA-256"],
    _missing: ["V027.safetensors is missing"],
    _unnamed: ["index.json does not name V200.safetensors"],
    _not_in_the_index: ["index.json does not name V027.safetensors"],
    _no_index: ["cannot read", "index.json", "ringverify vectors generate"],
    _no_schema: ["cannot read", "schema.json", "restore the folder"],
    _schema_emptied: ["schema.json differs from the schema of vectors that ringverify"],
    _schema_not_text: ["schema.json differs from the schema of vectors that ringverify"],
    _index_cut_off: ["index.json is truncated or not JSON"],
    _index_edited: ["index.json was edited"],
    _index_of_the_future: ["index.json has schema 2", "reads schema 1", "upgrade ringverify"],
    _another_json: ["index.json is not an index of vectors"],
    _not_text: ["index.json is truncated or not JSON"],
    _no_vectors: ["index.json lists no vectors"],
    _twice: ["two vectors are called V003"],
    _impossible: ["vector 1 does not describe a vector: heads=0"],
    _exchanged: ["V003.safetensors holds the vector"],
    _positions: ["V048: layouts is "],
    _flags: ["V048: flags is "],
    _no_safetensors: ["V003.safetensors is no vector"],
    _a_tensor_less: ["V048.safetensors has other tensors"],
    _another_answer: ["V048.safetensors: dk is not what the oracle gives"],
    _another_input: ["V048.safetensors: lse is not what the oracle gives"],
    _a_wider_bound: ["V048.safetensors: allowed.accumulates.out is not what the oracle gives"],
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__.strip("_"))
def test_damage_is_told_in_one_line(damage, folder, capsys) -> None:
    """Exit code 2, the file's name, and the way out."""
    damage(folder)
    code, out, err = checked(capsys, folder)
    assert (code, out) == (2, "")
    assert err.startswith("ringverify: ")
    assert err.count("\n") == 1
    if "--force" in err:
        assert f"ringverify vectors generate {folder} --force" in err
    for word in DAMAGE[damage]:
        assert word in err
    assert any(way in err for way in ("restore the folder", "upgrade", "generate", "vector 1", "called V003"))


@pytest.mark.parametrize("damage", [_truncated, _edited, _missing, _index_of_the_future, _not_in_the_index, _positions])
def test_no_implementation_is_judged_by_damaged_vectors(damage, folder, capsys) -> None:
    """The same line, and no verdict."""
    damage(folder)
    code, out, err = checked(capsys, folder, "--target", "ring")
    assert (code, out) == (2, "")
    assert DAMAGE[damage][0] in err


def test_an_unknown_id_is_refused(folder, capsys) -> None:
    """With those that there are."""
    for more in ([], ["--target", "ring"]):
        code, _, err = checked(capsys, folder, "--only", "V003,V999", *more)
        assert code == 2
        assert err == f"ringverify: no vector 'V999' in {folder}: it has V003 to V106\n"


def test_only_those_that_are_asked_for_are_looked_into(folder, capsys) -> None:
    """One vector may be damaged while another is looked at."""
    _edited(folder)
    code, out, _ = checked(capsys, folder, "--only", "V003")
    assert code == 0
    assert out.startswith("1 vectors")


def test_a_folder_that_is_not_there_is_refused(tmp_path, capsys, monkeypatch) -> None:
    """Where one is named; else there are those that the package brings along, in a folder without any too."""
    monkeypatch.chdir(tmp_path)
    code, _, err = checked(capsys, "fixtures")
    assert code == 2
    assert err.startswith("ringverify: cannot read fixtures/index.json: No such file or directory; name a folder")
    code, out, _ = checked(capsys, "--only", "V001")
    assert code == 0
    assert out.startswith("1 vectors in /")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--world", "gloo"], "--world is for a --target"),
        (["--device", "cpu"], "--device is for a --target"),
        (["--only", ","], "expected names separated by commas"),
        (["--target", "rung"], "unknown target 'rung'"),
        (["--target", "ring", "--device", "moon"], "unknown device 'moon'"),
        (["--target", "ring", "--target", "ring"], "'ring' is named twice"),
        (["--target", "ring", "--world", "nccl", "--device", "cpu"], "each rank has a GPU of its own"),
        (["--force"], "unrecognized arguments: --force"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments, words, folder, capsys) -> None:
    """One line, exit code 2."""
    code, out, err = checked(capsys, folder, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert words in err


ODD = (None, True, -1, 0, 10**40, 0.5, "", "odd", [], [[]], {}, {"a": None})


def test_no_edit_of_an_index_gets_past_its_reading(whole) -> None:
    """Every field of an index, replaced by every odd value or left out: read, or refused in one line.

    What the published schema refuses, the reader refuses too, there or when the vector is loaded.
    """
    original = json.loads((whole / "index.json").read_text())
    original["vectors"] = original["vectors"][2:3]  # V048, the one with a mask
    schema = json.loads(index.SCHEMA_FILE.read_text())
    vector = original["vectors"][0]
    places = [("vectors",), ("vectors", 0), ("vectors", 0, "layouts", 0), ("vectors", 0, "layouts", 0, "keys", 0)]
    places += [("vectors", 0, name) for name in vector]
    places += [("vectors", 0, "problem", name) for name in vector["problem"]]
    places += [("vectors", 0, "layouts", 0, name) for name in vector["layouts"][0]]
    validator = jsonschema.Draft202012Validator(schema)
    refused = 0
    for place in places:
        for odd in (*ODD, "left out"):
            edited = copy.deepcopy(original)
            inner = functools.reduce(lambda part, name: part[name], place[:-1], edited)
            if odd == "left out":
                del inner[place[-1]]
            else:
                inner[place[-1]] = odd
            line = refusal_of(whole, edited)
            refused += line is not None
            assert "\n" not in (line or "")
            if line is None:
                assert validator.is_valid(edited), (place, odd)
    assert refused > len(places) * 10


def refusal_of(whole: Path, content) -> str | None:
    """The line with which an index is refused, sealed as it should be; or its only vector when it is loaded."""
    content = {name: value for name, value in content.items() if name != "seal"}
    content["seal"] = index.seal(content)
    found_at = whole.parent / "edited"
    found_at.mkdir(exist_ok=True)
    (found_at / "index.json").write_text(json.dumps(content))
    shutil.copy(whole / "V048.safetensors", found_at)
    try:
        found = index.read(found_at)
        checking.look_at_files(found)
        for story in found.chosen(None):
            checking.load(found, story)
    except UsageError as error:
        return str(error)
    return None


def test_a_float64_oracle_that_is_wrong_is_noticed(folder, capsys, monkeypatch) -> None:
    """The files hold what two computations agree on; the second is asked too."""
    right = ringref.attention.attention

    def wrong(problem, *arrays):
        answer = right(problem, *arrays)
        answer.dv[...] *= 1 + 2**-20
        return answer

    monkeypatch.setattr(making, "attention", wrong)
    code, _, err = checked(capsys, folder, "--only", "V048")
    assert code == 2
    assert "not what the" in err
