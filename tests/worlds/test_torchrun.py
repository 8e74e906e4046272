"""Under torchrun: one verdict from four processes, and a rank that goes wrong costs its run and no more."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from report_lines import report_lines

from ringverify.worlds.processes.torchrun import Placement, placement, too_few

pytestmark = pytest.mark.timeout(240)  # a dozen imports of torch, on cores that others use too

MINIATURES = Path(__file__).resolve().parent.parent / "miniatures"


def torchrun(folder, *arguments, ranks=4):
    """`torchrun -m ringverify check`, in a folder of its own: its exit status, output and errors."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    launched = subprocess.Popen(
        [*launcher, "-m", "ringverify", "check", *map(str, arguments)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        out, err = launched.communicate(timeout=200)
    finally:
        if launched.poll() is None:
            os.killpg(launched.pid, signal.SIGKILL)
    return launched.returncode, out, err


def exit_codes(err):
    """Exit codes by rank, as torchrun reports those that are not 0."""
    found = re.findall(r"rank +: (\d+) .*\n +exitcode +: (-?\d+)", err)
    return {int(rank): int(code) for rank, code in found}


@pytest.mark.nightly
def test_the_ring_conforms_and_says_so_once(tmp_path):
    """Rank 0 drives and tells; the others print nothing; everybody ends with 0."""
    code, out, err = torchrun(tmp_path, "ring", "--max-examples", 3, "--only", "forward,gradients")
    assert code == 0, out + err
    lines = out.splitlines()
    assert lines[0] == "under torchrun: 4 ranks on 1 machine, over gloo: rank 0 has no GPU of its own"
    assert [line.split()[:2] for line in lines if line.startswith("  pass")] == [
        ["pass", "forward"],
        ["pass", "gradients"],
    ]
    assert out.count("conformant in the gloo world: 2 pass") == 1
    assert out.count("ringverify 0.") == 1
    assert "runs of the gloo world" in out


@pytest.mark.nightly
def test_all_its_processes_are_ranks_of_the_suite_scale(tmp_path):
    """Each verifies its own rows; rank 0 tells the verdict, with figures of all four."""
    asked = ("--suite", "scale", "--length", 8192, "--problem", '{"head_dim": 16}', "--report", "report.jsonl")
    code, out, err = torchrun(tmp_path, "ring", *asked)
    assert code == 0, out + err
    told = [event for event in report_lines(tmp_path / "report.jsonl") if event["event"] == "property"]
    assert [event["property"] for event in told] == ["every_row", "sampled_rows", "identities", "memory"]
    assert all(event["figures"][0].startswith("4 ranks n=8192 ") for event in told[:3])
    assert "peak memory of a rank" in told[0]["figures"][1]
    assert told[0]["examples"] == 5 * 8192


@pytest.mark.nightly
def test_what_goes_wrong_on_a_rank_is_told_of_that_rank_and_costs_no_other_run(tmp_path):
    """Four in one run: one raises, one aborts, one hangs, each on rank 2; the last is wrong in value."""
    targets = [f"{MINIATURES}/on_rank_two.py:{name}" for name in ("raises", "aborts", "never_ends")]
    targets.append(f"{MINIATURES}/faulty_rings.py:wrong_scale")
    code, out, err = torchrun(tmp_path, *targets, "--only", "forward", "--deadline", 4, "--report", "report.jsonl")
    assert code == 1, out + err
    assert exit_codes(err)[0] == 1
    found = [event for event in report_lines(tmp_path / "report.jsonl") if event["event"] == "counterexample"]
    raised, died, hung, wrong = found
    assert (raised["rank"], raised["summary"]) == (2, "rank 2 raised ValueError: two is too many")
    assert "rank 2 printed:\nrank 2 has something to say" in raised["detail"]
    assert (died["rank"], died["summary"]) == (2, "rank 2's process was ended by signal SIGABRT")
    assert re.search(r"had not returned: .*rank 2 at on_rank_two\.py:\d+ in never_ends", hung["summary"])
    assert wrong["tensor"] == "out"
    assert Path(tmp_path / wrong["file"]).exists()


@pytest.mark.nightly
def test_without_gpus_the_nccl_world_ends_with_3_before_any_work(tmp_path):
    """Rank 0's exit code is in torchrun's account of the failure."""
    code, out, err = torchrun(tmp_path, "ring", "--world", "nccl", "--report", "report.jsonl", ranks=2)
    assert code != 0
    assert exit_codes(err)[0] == 3, err
    assert out == ""
    line = (
        "ringverify: rank 0 has no GPU of its own (its machine has 0): start fewer ranks a machine, or use --world gloo"
    )
    assert line in err.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_a_process_knows_whether_torchrun_started_it():
    """All that is needed has to be there; what other launchers leave out is made up for."""
    environment = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}
    torchruns = {"LOCAL_RANK": "1", "GROUP_RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    known = {"rank": 3, "world_size": 8, "address": "first", "port": 29500, "hosts_store": False, "attempt": "0"}
    assert placement({**environment, **torchruns}) == Placement(local_rank=1, machine="1", **known)
    assert placement(environment).local_rank == 3
    assert placement({**environment, "RANK": "0"}).hosts_store
    assert not placement({**environment, **torchruns, "RANK": "0"}).hosts_store
    for name in environment:
        assert placement({key: value for key, value in environment.items() if key != name}) is None
    assert placement({**environment, "RANK": "first"}) is None


def test_too_large_a_world_says_what_would_fit():
    """One line: the size, what there is, and what to type."""
    assert too_few(8, 4) == (
        "world size 8 needs 8 ranks, torchrun started 4: use --world-sizes up to 4, or torchrun --nproc-per-node 8"
    )
