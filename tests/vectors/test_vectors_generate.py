"""`ringverify vectors generate`: the same bits anywhere, whole or not at all, nothing behind an old id."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from safetensors.numpy import load as load_safetensors

from ringref.rounding import FLOAT64_SHARE
from ringverify.cases.tensorfile import NotSafetensors, decode
from ringverify.cli.main import main
from ringverify.errors import UsageError
from ringverify.vectors import generating, index, long, making, merges
from ringverify.vectors.catalogue import STORIES

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 4_000_000
SOME = {id: STORIES[id] for id in ("V003", "V027", "V106")}

ANOTHER_MACHINE = {
    "OMP_NUM_THREADS": "4",
    "OPENBLAS_NUM_THREADS": "4",
    "OPENBLAS_CORETYPE": "Prescott",
    "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX2 FMA3 AVX512F AVX512_SKX",
}
"""Other numbers of threads, another BLAS kernel, another exp: with these the float64 oracle has other last bits."""


def test_the_committed_vectors_are_those_that_are_generated(fixtures, generated) -> None:
    """File by file, bit by bit, and no file besides but those of merges and at length, which are tested apart."""
    there = {path.name: path.read_bytes() for path in fixtures.iterdir() if path.name not in (long.NAME, merges.NAME)}
    assert sorted(there) == sorted(generated)
    assert [name for name, data in generated.items() if there[name] != data] == []


@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_the_bits_are_the_same_on_a_machine_that_computes_otherwise(fixtures, tmp_path) -> None:
    """All vectors, in a process that sums and exponentiates in another way."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "ringverify", "vectors", "generate", "out"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), **ANOTHER_MACHINE},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    differing = [
        path.name for path in fixtures.iterdir() if path.read_bytes() != (tmp_path / "out" / path.name).read_bytes()
    ]
    assert set(differing) <= {long.NAME}  # sums in float64, which agree as `vectors check` says
    for described in long.read(fixtures).values():
        made = long.read(tmp_path / "out")[described["id"]]
        for result, sums in described["results"].items():
            exact, bound = (np.array(sums[name]) for name in ("expected", "allowed"))
            assert (np.abs(made["results"][result]["expected"] - exact) <= FLOAT64_SHARE * bound).all()


def test_there_are_enough_of_them_and_they_are_small(fixtures) -> None:
    """At least 120 vectors in under 4 MB, no file over a tenth of that, and fit for git."""
    files = list(fixtures.iterdir())
    assert sum(path.suffix == ".safetensors" for path in files) >= 120
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    assert max(path.stat().st_size for path in files) < MOST_BYTES / 10


def test_the_index_is_as_its_published_schema_says(fixtures) -> None:
    """The schema lies beside it, and is the one that comes with the package."""
    schema = json.loads((fixtures / "schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(json.loads((fixtures / "index.json").read_text()), schema)
    assert (fixtures / "schema.json").read_bytes() == index.SCHEMA_FILE.read_bytes()


def test_every_file_is_one_of_safetensors(fixtures) -> None:
    """Its own library reads the same numbers of the same dtypes, metadata aside."""
    for id in index.read(fixtures).stories:
        data = (fixtures / f"{id}.safetensors").read_bytes()
        ours, _ = decode(data)
        theirs = load_safetensors(_without_bfloat16(data))
        assert set(theirs) == set(ours)
        for name, tensor in theirs.items():
            mine = ours[name]
            assert tensor.shape == mine.values.shape
            if mine.dtype != "bfloat16":
                assert str(tensor.dtype) == mine.dtype
                assert tensor.astype("f8").tobytes() == mine.values.tobytes()
            else:  # numpy has none: the sixteen bits are those of a float32
                assert (tensor.astype("<u4") << 16).view("<f4").astype("f8").tobytes() == mine.values.tobytes()


def _without_bfloat16(data: bytes) -> bytes:
    """The file with its bfloat16 tensors declared as whole numbers of as many bits, for a reader that has none."""
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(b'"BF16"', b'"U16" ')
    return data[:8] + header + data[8 + length :]


def test_tensors_lie_where_their_elements_are_aligned(fixtures) -> None:
    """So that a reader can map the file."""
    sizes = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
    for path in fixtures.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                assert entry["data_offsets"][0] % sizes[entry["dtype"]] == 0


def test_a_file_that_ends_too_soon_or_too_late_is_none(generated) -> None:
    """Wherever it is cut, and whatever follows it."""
    data = generated["V003.safetensors"]
    assert decode(data)[1]["id"] == "V003"
    for cut in range(0, len(data), 7):
        with pytest.raises(NotSafetensors):
            decode(data[:cut])
    with pytest.raises(NotSafetensors, match="1 bytes follow"):
        decode(data + b"\0")


@pytest.mark.parametrize(
    ("shape", "end", "says"),
    [
        ("[1.0]", "4", "not a valid"),
        ("[true]", "4", "not a valid"),
        ("[1e999]", "4", "not a valid"),
        ('["1"]', "4", "not a valid"),
        ("[1]", "4.0", "not a valid"),
        ("[" * 1500, "4", "not a valid"),
        (str([1] * 99), "4", "impossible shape"),
        (f"[0, {10**30}]", "0", "impossible shape"),
    ],
)
def test_a_header_of_what_no_tensor_has_is_none(shape, end, says) -> None:
    """Whatever Python would make of it."""
    header = f'{{"x": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, {end}]}}}}'
    with pytest.raises(NotSafetensors, match=says):
        decode(len(header).to_bytes(8, "little") + header.encode() + b"\0" * 4)


# -- writing -----------------------------------------------------------------------------------------------------------


def contents_of(folder: Path) -> dict[str, bytes]:
    """Every file by name."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def generate(folder: Path, stories=SOME, *, force: bool = False) -> str:
    """Generate a few vectors, and say what was said."""
    said: list[str] = []
    assert generating.generate(folder, force=force, say=said.append, stories=stories) == 0
    (line,) = said
    return line


def test_a_second_time_nothing_is_written(tmp_path) -> None:
    """And it says so."""
    assert generate(tmp_path / "v").endswith("3 new, 0 overwritten")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "v").iterdir()}
    assert generate(tmp_path / "v").endswith("unchanged, bit for bit")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "v").iterdir()} == before


def test_new_vectors_join_those_that_are_there(tmp_path) -> None:
    """No force is needed, and the old files stay as they are."""
    folder = tmp_path / "v"
    generate(folder, {"V003": SOME["V003"]})
    assert generate(folder).endswith("2 new, 0 overwritten")
    assert contents_of(folder) == generating.contents(SOME)
    assert list(index.read(folder).stories) == list(SOME)
    assert [path.name for path in tmp_path.iterdir()] == ["v"]


def _edited(folder: Path) -> None:
    path = folder / "V003.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")


def _another(folder: Path) -> None:
    (folder / "V900.safetensors").write_bytes(b"")


def _told_otherwise(folder: Path) -> None:
    stories = {**SOME, "V003": dataclasses.replace(SOME["V003"], note="Another note.")}
    entries = [index.entry(story, (folder / index.file_name(id)).read_bytes()) for id, story in stories.items()]
    (folder / "index.json").write_text(index.write(entries, {}))


def _renumbered(folder: Path) -> None:
    """The third vector under the second's id."""
    os.replace(folder / "V106.safetensors", folder / "V027.safetensors")


def _no_index(folder: Path) -> None:
    (folder / "index.json").write_text("dear diary")


CHANGES = {
    _edited: "V003.safetensors differs from the vector that is generated for this id",
    _another: "V900.safetensors: ringverify ",
    _told_otherwise: "index.json: the entry of V003 differs from the generated one",
    _renumbered: "V027.safetensors differs from the vector that is generated for this id",
    _no_index: "index.json is truncated or not JSON",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_nothing_different_is_written_over_unless_that_is_asked_for(change, tmp_path) -> None:
    """One line that names the file and --force; with it the folder is as generated."""
    folder = tmp_path / "v"
    generate(folder)
    change(folder)
    before = contents_of(folder)
    with pytest.raises(UsageError, match=CHANGES[change]) as refusal:
        generate(folder)
    assert "--force" in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert contents_of(folder) == before
    generate(folder, force=True)
    assert contents_of(folder) == generating.contents(SOME)


def test_a_folder_of_other_things_is_left_alone(tmp_path) -> None:
    """A mistyped folder is not filled with vectors."""
    (tmp_path / "diary.txt").write_text("dear diary")
    with pytest.raises(UsageError, match="holds other files and no vectors: name a new folder, or pass --force"):
        generate(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]


def test_a_file_in_the_way_is_refused_before_any_work(tmp_path, capsys, monkeypatch) -> None:
    """Exit code 2."""
    monkeypatch.setattr(making, "make", None)
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        assert main(["vectors", "generate", str(folder)]) == 2
        assert "file is not a folder; name another" in capsys.readouterr().err


def test_a_run_that_is_cut_off_leaves_nothing(tmp_path, monkeypatch) -> None:
    """Neither a new folder nor its beginnings, and an old one as it was."""
    folder = tmp_path / "v"
    generate(folder, {"V003": SOME["V003"]})
    before = contents_of(folder)

    def cut(self, data):
        if self.name == "V106.safetensors":
            raise KeyboardInterrupt
        return write(self, data)

    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", cut)
    for place in (folder, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            generate(place)
    assert [path.name for path in tmp_path.iterdir()] == ["v"]
    assert contents_of(folder) == before


def test_a_disk_that_is_full_is_one_line(tmp_path, monkeypatch) -> None:
    """Exit code 2, with the system's word for it."""

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match=r"cannot write vectors to .*: No space left on device; name another folder"):
        generate(tmp_path / "v")
    assert list(tmp_path.iterdir()) == []
