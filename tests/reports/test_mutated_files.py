"""Files that were changed at random are read, or refused in one line: no traceback, no time, no memory.

`RINGVERIFY_MUTATED_FILES` is how many are tried of all kinds together, `RINGVERIFY_MUTATED_SEED` which.
"""

import os

import mutated_files
import pytest

COUNT = int(os.environ.get("RINGVERIFY_MUTATED_FILES", "330"))
SEED = os.environ.get("RINGVERIFY_MUTATED_SEED", "0")
KINDS = mutated_files.kinds()


@pytest.fixture
def folder(tmp_path):
    """Where a file lies, with the vectors that an index is about."""
    mutated_files.beside(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", KINDS)
def test_what_mutants_are_made_of_is_read(name, folder):
    """Or else a file would be refused for what it was before it was changed."""
    for data in KINDS[name].seeds:
        path = folder / KINDS[name].file
        path.write_bytes(data)
        KINDS[name].attempt(path)


@pytest.mark.timeout(max(120, COUNT // 5))
@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_read_or_refused_in_one_line(name, folder):
    """By an error that ends a command with exit code 2, whatever it says and however it is damaged."""
    tally = mutated_files.tried(name, KINDS[name], folder, seed=SEED, first=0, count=-(-COUNT // len(KINDS)))
    assert tally.wrong == {}, f"seed {SEED}"
    assert 0 < tally.refused < tally.files


@pytest.mark.parametrize("name", KINDS)
def test_the_same_seed_gives_the_same_file(name):
    """A night's mutant can be made again."""
    chances = [mutated_files.random.Random("0 a 5") for _ in range(2)]
    first, second = (mutated_files.mutated(KINDS[name], chance) for chance in chances)
    assert first == second


def lacks_a_check(path):
    """A reader that trusts a file."""
    mutated_files.json.loads(path.read_text())["confirmations"][0]["said"]


def test_a_reader_that_trusts_a_file_is_found(folder, monkeypatch):
    """What the numbers above would be worth otherwise."""
    monkeypatch.setattr(mutated_files, "KEPT", folder / "kept")
    kind = mutated_files.dataclasses.replace(KINDS["confirmations"], attempt=lacks_a_check)
    tally = mutated_files.tried("confirmations", kind, folder, seed="0", first=0, count=20)
    assert len(tally.wrong) > 5
    assert len(list((folder / "kept").iterdir())) == len(tally.wrong)


def test_a_reader_that_takes_long_each_time_is_found_and_once_is_forgiven(folder, monkeypatch):
    """What else the process did meanwhile is not the reader's."""
    monkeypatch.setattr(mutated_files, "KEPT", folder / "kept")
    taken = iter([(None, 2.0, 0.0)] * 3 + [(None, 2.0, 0.0), (None, 0.1, 900.0), (None, 0.2, 0.0)])
    monkeypatch.setattr(mutated_files, "_attempted", lambda kind, path: next(taken))
    tally = mutated_files.tried("confirmations", KINDS["confirmations"], folder, seed="0", first=0, count=2)
    assert tally.wrong == {0: "took 2.0 s and 0 MB"}
