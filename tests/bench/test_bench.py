"""`ringverify bench` from end to end, at sizes that take no time: reports, what the terminal shows, and errors."""

import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import assert_nobody_is_left, session
from rich.console import Console

from ringverify.bench import cuda, markdown, memory, serving, speed
from ringverify.bench.memory import COMPONENTS, GIVEN
from ringverify.bench.phases import PHASES
from ringverify.bench.table import Tables
from ringverify.bench.workload import Shape, workload
from ringverify.cli.main import main
from ringverify.errors import Inconclusive
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)

TINY = ("--heads", "1", "--head-dim", "8", "--repeat", "2")


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder: exit code, output, errors, and the report if one was asked for."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        path = tmp_path / "bench.json"
        code = main(["bench", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err, json.loads(path.read_text()) if path.exists() else None

    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One report with everything in it, with its page and its plot."""
    folder = tmp_path_factory.mktemp("bench")
    options = [*TINY, "--length", "64", "--pattern", "dense,window", "--phases", "--memory"]
    plot = ["--plot", str(folder / "plot.svg")] if importlib.util.find_spec("matplotlib") else []
    written = ["--json", str(folder / "bench.json"), "--markdown", str(folder / "bench.md")]
    assert main(["bench", *options, *written, *plot]) == 0
    return json.loads((folder / "bench.json").read_text()), folder


def test_a_report_says_what_where_and_how_long(whole):
    """Versions, machine, options, and for every workload each side with spreads and ratios of each pass."""
    report, _ = whole
    assert report["bench"] == 1
    assert {"ringverify", "torch", "python", "platform", "machine", "options"} <= set(report)
    assert {"cpu", "processors", "load_before", "load_after", "cuda"} <= set(report["machine"])
    assert [(one["pattern"], one["length"]) for one in report["speed"]] == [("dense", 64), ("window", 64)]
    for entry in report["speed"]:
        sides = {row["side"]: row for row in entry["rows"]}
        assert {"plain", "ring", "floor", "allgather", "world-of-1"} <= set(sides)
        for row in sides.values():
            for name in ("forward", "backward", "both"):
                assert 0 < row[name]["seconds"]["low"] <= row[name]["seconds"]["high"]
                assert len(row[name]["rounds"]) == 2
                assert row[name]["to_plain"]["median"] > 0
        assert sides["ring"]["both"]["to_floor"]["median"] > 0
        assert "to_floor" not in sides["world-of-1"]["both"]


def test_a_side_that_cannot_take_part_says_why(whole):
    """The published package declares no window; nothing is measured in its name."""
    pytest.importorskip("ring_attention_pytorch")
    left_out = {one["pattern"]: one["left_out"] for one in whole[0]["speed"]}
    assert left_out["dense"] == []
    assert left_out["window"] == [{"side": "peer:ring-attention-pytorch", "reason": "window is not declared"}]


def test_phases_add_up(whole):
    """Every phase of every rank is seen, and what is left of the pass is no less than nothing."""
    for entry in whole[0]["speed"]:
        for ranks in entry["phases"].values():
            assert len(ranks) == 2
            for one in ranks:
                assert one["compute"] > 0 < one["total"], one
                assert all(one[name] >= 0 for name in PHASES), one  # a single partial is not merged with anything


def test_memory_is_measured_and_predicted_by_component(whole):
    """On one to eight ranks, every byte in some component."""
    for found in whole[0]["memory"]:
        assert {entry["ranks"] for entry in found["entries"]} == set(range(1, 9))
        assert found["exponents"]["4"] is not None
        for entry in found["entries"]:
            assert set(entry["measured"]) == set(entry["predicted"]) == set(COMPONENTS)
            assert sum(entry["measured"].values()) == entry["peak"]


@pytest.mark.parametrize(("pattern", "ranks"), [("dense", 1), ("dense", 2), ("causal", 4)])
def test_no_component_of_the_ring_is_unknown(pattern, ranks):
    """A function of the ring that allocates and has no component would show here."""
    work = workload(pattern, 512, ranks, Shape(heads=2, head_dim=16))
    found = memory.measured(SimulatedWorld(), "ring", [work], lambda done: None)[0]
    assert found["measured"]["other"] == 0
    assert found["measured"]["q"] == found["predicted"]["q"] > 0
    positions = 2 * 8 * work.problem.nq // ranks
    assert found["measured"][GIVEN] == found["predicted"][GIVEN] + positions
    assert found["measured"]["KV buffers"] == found["predicted"]["KV buffers"]


def test_without_a_device_the_cuda_rows_stay_empty(whole):
    """And say so."""
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    report, folder = whole
    assert report["cuda"] == {"device": None, "reason": "no CUDA device here", "speed": []}
    assert "No CUDA device here" in (folder / "bench.md").read_text()


def test_the_cuda_rows_are_measured_where_there_is_a_device():
    """The same code on the CPU, where torch has a flash attention too."""
    found = cuda.report(1, lambda: None, device="cpu", length=64, shape=Shape(heads=2, head_dim=8, dtype="bfloat16"))
    assert [entry["pattern"] for entry in found["speed"]] == ["dense", "causal"]
    for entry in found["speed"]:
        assert [row["side"] for row in entry["rows"]] == ["flash", "world of 1", "4 ranks on one device"]
        assert all(row["both"]["to_plain"]["median"] > 0 for row in entry["rows"])


def test_a_plot_is_drawn(whole):
    """As its name says."""
    pytest.importorskip("matplotlib")
    assert (whole[1] / "plot.svg").read_text().startswith("<?xml")


def test_a_page_is_written(whole):
    """From the report alone."""
    report, folder = whole
    page = (folder / "bench.md").read_text()
    assert page == markdown.page(report)
    for words in ("## Speed", "## Memory, dense", "exposed communication", "× floor"):
        assert words in page


def test_a_report_is_shown_again_without_measuring(whole, capsys):
    """As it was shown the first time."""
    report, folder = whole
    assert main(["bench", "--saved", str(folder / "bench.json")]) == 0
    file = io.StringIO()
    Tables(Console(file=file, force_terminal=False)).everything(report)
    assert capsys.readouterr().out == file.getvalue()


def test_one_rank_alone_stands_beside_both_methods_at_every_length(bench):
    """From which length on several ranks pay is read off a table for each."""
    options = [*TINY, "--sides", "local,allgather,ring", "--length", "64,128", "--pattern", "dense"]
    code, out, _, report = bench(*options, "--json", "bench.json")
    assert code == 0
    assert [entry["length"] for entry in report["speed"]] == [64, 128]
    for entry in report["speed"]:
        assert [row["side"] for row in entry["rows"]] == ["local", "allgather", "ring"]
        assert entry["left_out"] == []
    assert "n=128, 2 ranks" in out


def test_no_side_that_decodes_finds_the_plan_of_another(monkeypatch):
    """Every call has a length of its own, whichever side makes it."""
    lengths = []
    monkeypatch.setattr(serving, "ring_attention", lambda *_, key_length, **how: lengths.append(key_length))

    def program(_):
        cache = serving.Cache(serving.Serving("decode", 40, 1, Shape(heads=1, head_dim=8)))
        for side in ("own-keys", "ring", "allgather") * 3:
            cache.call(side)()

    assert SimulatedWorld().run(program, None, world_size=1, seed=0, deadline=30).failure is None
    assert len(set(lengths)) == len(lengths) == 6


def test_a_token_and_a_chunk_are_measured_against_a_cache(bench, tmp_path):
    """Alone, if nothing else is asked for: times, ratios to the first side, and bytes, of which queries take fewer."""
    code, out, _, report = bench(
        *TINY, "--decode", "40", "--prefill", "4096", "--json", "bench.json", "--markdown", "b.md"
    )
    assert code == 0
    assert (report["speed"], report["cuda"]) == ([], None)
    token, chunk = report["serving"]
    assert [row["side"] for row in token["rows"]] == ["own-keys", "ring", "allgather"]
    assert [row["side"] for row in chunk["rows"]] == ["pass-kv", "pass-q"]
    for row in (*token["rows"], *chunk["rows"]):
        assert 0 < row["seconds"]["low"] <= row["seconds"]["high"]
        assert row["to_first"]["median"] > 0
    assert [row["sent"] for row in token["rows"]] == [0, 36, 36]
    assert chunk["rows"][1]["sent"] < chunk["rows"][0]["sent"]
    for text in (out, (tmp_path / "b.md").read_text()):
        assert "decode, one token against 40 cached, 2 ranks in pages of 16" in text
        assert "prefill, 512 queries against 4,096 cached" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sides", "peer:no-such-peer"], ["peer:no-such-peer", "unknown target"]),
        (["--sides", "rnig"], ["rnig", "sides of our own are plain, ring"]),
        (["--length", "3", "--ranks", "2"], ["--length 3 is too short for 2 ranks", "at least 4"]),
        (["--length", "0"], ["'0'", "at least 1"]),
        (["--length", "many"], ["'many'"]),
        (["--repeat", "0"], ["--repeat 0", "--memory"]),
        (["--ranks", "17"], ["--ranks 17", "at most 16"]),
        (["--length", str(1 << 40)], ["GiB are needed", "shorter length"]),
        (["--decode", str(1 << 40)], [f"--decode {1 << 40}", "GiB are needed", "shorter cache"]),
        (["--prefill", "--ranks", "1"], ["--prefill on one rank", "--ranks 2"]),
        (["--pattern", "diagonal"], ["'diagonal'", "uneven"]),
        (["--pattern", "dense", "--causal"], ["--pattern dense contradicts --causal"]),
        (["--pattern", "causal", "--no-causal"], ["--pattern causal contradicts --no-causal"]),
        (["--json", "nowhere/bench.json"], ["nowhere/bench.json", "no folder"]),
        (["--plot", "bench.gif"], ["bench.gif", ".svg or .png"]),
        (["--saved", "nothing.json"], ["nothing.json"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words, bench):
    """Found out before anything is measured."""
    code, out, err, _ = bench(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("ringverify: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_plot_without_matplotlib_says_what_to_install(bench, monkeypatch):
    """Before anything is measured."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err, _ = bench("--plot", "bench.svg")
    assert (code, out) == (3, "")
    assert err == "ringverify: --plot needs matplotlib: pip install 'ringverify[plots]'\n"


@pytest.mark.nightly
def test_no_rounds_leave_memory_alone(bench):
    """For long sequences, whose times nobody waits for."""
    code, out, _, report = bench(*TINY, "--repeat", "0", "--memory", "--length", "32", "--json", "bench.json")
    assert code == 0
    assert (report["speed"], report["cuda"]) == ([], None)
    assert [found["pattern"] for found in report["memory"]] == ["dense", "causal"]
    assert "÷ predicted" in out


def test_a_world_that_dies_is_inconclusive(bench, tmp_path):
    """A rank that ends its process: exit code 3, and who it was."""
    (tmp_path / "dies.py").write_text(
        "import os\nfrom ringverify import implementation\n"
        "@implementation()\ndef attend(q, k, v, call):\n    os._exit(7)\n"
    )
    code, _, err, _ = bench(*TINY, "--length", "64", "--sides", "dies.py:attend", "--pattern", "dense")
    assert code == 3
    assert err.count("\n") == 1
    assert "dies.py:attend" in err
    assert "exit code 7" in err


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are read from /proc")
def test_an_interrupt_ends_it_and_leaves_no_process(tmp_path):
    """Ctrl-C while ranks are at work: exit code 130, and nobody is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ringverify", "bench", *TINY, "--length", "512", "--repeat", "100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        process.stdout.readline()
        while len(session(process.pid)) < 7:  # the command, what multiprocessing adds, ranks and their keepers
            time.sleep(0.05)
        time.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "ringverify: interrupted\n")
    assert_nobody_is_left(process)


@pytest.mark.nightly
def test_dilations_are_compared_with_what_they_are_made_of(bench):
    """Both head modes with the branches that were named, beside the dense problems and a ring of all pairs."""
    options = [*TINY, "--dilation", "8:1,32:3", "--length", "64", "--heads", "2"]
    code, out, _, report = bench(*options, "--json", "bench.json")
    assert code == 0
    assert [one["pattern"] for one in report["speed"]] == ["dilation-split", "dilation-shared"]
    for entry in report["speed"]:
        assert "8:1,32:3" in entry["title"]
        assert [row["side"] for row in entry["rows"]] == ["plain", "ring", "floor", "dense-ring", "world-of-1"]
        found, rounds = entry["dilation"], {row["side"]: row["both"]["rounds"] for row in entry["rows"]}
        assert found["dense_pairs"] == 2 * 64 * 64
        by_hand = sorted(dense / ring for dense, ring in zip(rounds["dense-ring"], rounds["ring"], strict=True))
        assert by_hand[0] <= found["faster"]["median"] <= by_hand[1]
    assert "times fewer than dense" in out
    assert bench("--dilation", "8-1")[0] == 2


@pytest.mark.nightly
def test_sinks_are_compared_with_the_same_without_them(bench):
    """Our ring and all-gather, each within every round; torch's call has no sinks, and no other pattern has."""
    code, out, _, report = bench(*TINY, "--pattern", "sinks", "--length", "64", "--json", "bench.json")
    assert code == 0
    (entry,) = report["speed"]
    rounds = {row["side"]: row["both"]["rounds"] for row in entry["rows"]}
    assert list(rounds) == ["ring", "sinkless-ring", "floor", "allgather", "sinkless-allgather"]
    by_hand = sorted(a / b for a, b in zip(rounds["ring"], rounds["sinkless-ring"], strict=True))
    assert by_hand[0] <= entry["sinks"]["ring"]["both"]["median"] <= by_hand[1]
    assert out.count(" times what it takes without") == 2
    code, out, _, report = bench(*TINY, "--pattern", "dense,sinks", "--length", "64", "--sides", "plain,sinkless-ring")
    assert code == 0
    assert "scaled_dot_product_attention has no sinks" in out
    assert "there are no sinks to leave out" in out


def test_what_was_measured_before_a_world_died_is_kept(bench, monkeypatch):
    """The second workload's ranks die: exit code 3, and a report of the first one that says so."""
    measured = speed.measured

    def dies(world, workload, *others, **named):
        if workload.pattern == "causal":
            raise Inconclusive("rank 1 died")
        return measured(world, workload, *others, **named)

    monkeypatch.setattr(speed, "measured", dies)
    written = ["--json", "bench.json", "--markdown", "bench.md"]
    code, out, err, report = bench(*TINY, "--length", "64", "--sides", "plain,ring", *written)
    assert code == 3
    assert "rank 1 died" in err
    assert [one["pattern"] for one in report["speed"]] == ["dense"]
    assert report["remarks"] == ["ended early: rank 1 died"]
    assert "ended early: rank 1 died" in Path("bench.md").read_text()
    code, out, _, _ = bench("--saved", "bench.json")
    assert code == 0
    assert "ended early: rank 1 died" in out
