"""The suite `scale` on the command line: verdicts, figures, what a failure says, and all that can be typed wrong."""

import contextlib
import re
import shlex

import pytest
from command_line import assert_one_line, miniature

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.check.options import CheckRequest
from ringverify.check.planning import planned
from ringverify.errors import UsageError
from ringverify.ring.declared import ring
from ringverify.scale import estimating, memory, trials

pytestmark = pytest.mark.timeout(120)

SCALE = ("--suite", "scale", "--seed", "0")
FAULT = "ringverify.faults.length:mask_off_by_one"


def test_a_right_ring_gets_a_verdict_with_figures(ringverify):
    """Three ranks share 1,000 positions unevenly; times, memory and what a pass is worth are told and reported."""
    ran = ringverify.check("ring", *SCALE, "--length", 1000, "--world-sizes", 3)
    assert ran.code == 0
    assert ran.verdicts() == dict.fromkeys(("every_row", "sampled_rows", "identities", "memory"), "pass")
    assert ran.events[0]["suite"] == "scale"
    every, sampled, sums, memory = (event["figures"] for event in ran.told("property"))
    assert every[0].startswith("3 ranks n=1000 ")
    for words in ("implementation", "verification", "processor time", "peak memory"):
        assert words in every[1]
    assert re.search(r"peak memory of the process of all ranks [1-9]\d* MiB", every[1])
    assert " cotangent=both " in every[0]
    assert "128 of 128 single keys and 128 of 128 runs of 256 keys" in every[-1]
    assert "with probability" in sampled[-1]
    assert "of all rows on" in sums[-1]
    assert every[-1] in " ".join(ran.out.split())
    assert "conformant in the simulated world" in ran.out
    assert memory[0].endswith("twice the ranks and twice as long, in a simulated world")
    (event,) = ran.told("implementation")
    assert event["examples"] == sum(one["examples"] for one in ran.told("property")[:3])  # `memory` verifies no rows
    (last,) = re.findall(r"(\d+) rows in 6 runs of the simulated world, .* rows a second; (\d+) % of", ran.out)
    assert int(last[0]) == event["examples"]
    assert 0 < int(last[1]) < 100


def test_classes_are_drawn_anew_in_each_run_and_can_be_drawn_again(ringverify):
    """Keys of a class are exchangeable, so the next run has other classes; the seed is printed and in the report."""
    asked = ("--suite", "scale", "--length", 256, "--only", "every_row", "--problem", '{"head_dim": 8}')
    first, other = (ringverify.check("ring", *asked) for _ in range(2))
    seeds = [ran.events[0]["seed"] for ran in (first, other)]
    assert seeds[0] != seeds[1]
    assert f"seed {seeds[0]}" in first.out
    again = ringverify.check("ring", *asked, "--seed", seeds[0])
    margins = [ran.told("property")[0]["margin"] for ran in (first, again, other)]
    assert margins[0] == margins[1] != margins[2]


def test_without_gradients_and_lse_the_rest_is_verified(ringverify):
    """And a length that its ranks cannot share evenly is shortened to one that they can."""
    ran = ringverify.check(miniature("lenses:padding_cleared"), *SCALE, "--length", 301, "--only", "every_row")
    assert ran.code == 0
    (event,) = ran.told("property")
    assert event["examples"] == 300
    assert event["figures"][0].partition("largest margins: ")[2].startswith("out ")
    assert "300 of 301 positions: the rest would not divide as is declared" in event["figures"]


def test_a_failure_says_what_is_wrong_and_how_to_see_it_again(ringverify):
    """Result, ranks, rows, and the length that it needs; the file that it names is replayed, and so is the case."""
    ran = ringverify.check(FAULT, *SCALE, "--length", 1200, "--only", "every_row", "--problem", '{"head_dim": 16}')
    assert ran.code == 1
    (event,) = ran.told("counterexample")
    assert event["tensor"] == "out"
    assert event["position"] >= 1024
    assert event["where"]["text"][0].startswith("out is wrong on rank 0, 1")
    assert " rows, positions 1024-" in event["where"]["text"][0]
    assert event["hints"][0]["text"] == "it needs more than 600 positions"
    line = next(line for line in ran.out.splitlines() if line.split()[:1] == ["replay"])
    again = shlex.split(line.split(maxsplit=1)[1])
    assert again == ["ringverify", "replay", event["file"]]
    assert ringverify.check(*event["scale"]).told("counterexample")[0]["margin"] == event["margin"]
    replayed = ringverify("replay", event["file"])
    assert replayed.code == 1
    assert "still violated, with exactly the recorded bits" in replayed.out
    assert " rows, positions 1024-" in replayed.out
    right = ringverify("replay", event["file"], "--target", "ring")
    assert right.code == 0
    assert "the property holds now" in right.out
    refused = ringverify("replay", event["file"], "--snippet", "script.py")
    assert refused.code == 2
    assert_one_line(refused.err, ["--snippet", "suite scale", "leave it out"])


def test_the_length_that_a_fault_needs_is_found_by_halving(ringverify):
    """Of a fault that begins at 1,024, 2,048 positions show it, and 1,024 do not."""
    asked = (*SCALE, "--length", 4096, "--only", "every_row", "--problem", '{"head_dim": 8}', "--world-sizes", 1)
    (event,) = ringverify.check(FAULT, *asked).told("counterexample")
    assert event["hints"][0]["text"] == "it shows at 2,048 positions too; it needs more than 1,024 positions"


@pytest.mark.nightly
def test_a_fault_that_shows_at_small_lengths_too_is_said_to(ringverify):
    """The ordinary suite then finds a smaller case."""
    asked = (*SCALE, "--length", 600, "--only", "sampled_rows", "--problem", '{"head_dim": 16}')
    ran = ringverify.check("ringverify.faults.catalogue:B3", *asked)
    assert ran.code == 1
    text = ran.told("counterexample")[0]["hints"][0]["text"]
    assert text.startswith("it shows at 64 positions too")
    (again,) = re.findall("`(.*)`", text)
    assert ringverify(*shlex.split(again)[1:]).code == 1


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("killed:attend", 3, "until then 0 rows were verified, 0 of them wrong"),
        ("misbehaving:raises_on_one_rank", 1, "until then 0 rows were verified, 0 of them wrong"),
    ],
)
def test_a_rank_that_does_not_return(name, code, words, ringverify):
    """One that dies is nothing learned, one that raises is a violation; both say what was verified before."""
    ran = ringverify.check(miniature(name), *SCALE, "--length", 64, "--only", "every_row")
    assert ran.code == code
    assert words in " ".join(ran.out.split())


def test_a_rank_that_dies_later_leaves_what_was_verified(ringverify):
    """Its process ends while dk and dv are verified: rows of queries are told, and the run decides nothing."""
    asked = (*SCALE, "--length", 4096, "--only", "every_row", "--problem", '{"head_dim": 8}', "--world", "gloo")
    ran = ringverify.check(miniature("killed:later"), *asked)
    assert ran.code == 3
    (rows,) = re.findall(r"until then ([\d,]+) rows were verified, 0 of them wrong", " ".join(ran.out.split()))
    assert int(rows.replace(",", "")) >= 1024


def test_memory_that_is_claimed_to_stream_is_held_to_it(ringverify):
    """A rank that gathers all keys needs more with every rank; what is not claimed is no verdict."""
    asked = (*SCALE, "--length", 512, "--problem", '{"head_dim": 32}', "--only", "memory")
    ran = ringverify.check(miniature("long_faults:gathered"), *asked)
    assert ran.code == 1
    (event,) = ran.told("counterexample")
    assert "the peak memory of rank" in event["summary"]
    assert [*event["scale"][1:5]] == ["--suite", "scale", "--only", "memory"]
    assert ringverify.check(miniature("right:attend"), *asked).verdicts() == {"memory": "unsupported"}


@pytest.mark.parametrize(("name", "code"), [(miniature("long_faults:hoards"), 1), ("ring", 0)])
def test_memory_is_held_to_the_claim_at_the_length_of_the_run(name, code, ringverify, monkeypatch):
    """By the peaks of processes, at the length and at half of it: what begins above the watched lengths is seen."""
    monkeypatch.setattr(memory, "LONGEST", 1024)
    asked = (*SCALE, "--length", 4096, "--problem", '{"head_dim": 32}', "--only", "memory")
    ran = ringverify.check(name, *asked)
    assert ran.code == code
    watched, at_length = ran.told("property")[0]["figures"]
    assert " n=512 " in watched
    assert re.search(
        r"the peak of a rank at 4,096 positions is \d+ MiB, at 2,048 positions \d+ MiB: \d+ MiB", at_length
    )
    if code:
        (event,) = ran.told("counterexample")
        assert event["summary"] == at_length
        assert event["case"]["problem"]["query_length"] == 4096
        assert [*event["scale"][1:7]] == ["--suite", "scale", "--only", "memory", "--length", "4096"]


def test_the_peak_of_a_run_that_was_verified_is_not_measured_again(ringverify, monkeypatch):
    """One run more, of half the length."""
    monkeypatch.setattr(memory, "LONGEST", 1024)
    asked = (*SCALE, "--length", 2048, "--problem", '{"head_dim": 16}', "--only", "every_row,memory")
    ways = []
    run = trials.Trials.run
    monkeypatch.setattr(trials.Trials, "run", lambda self, way, case: ways.append((way, case)) or run(self, way, case))
    assert ringverify.check("ring", *asked).code == 0
    assert [(way, case.problem.nq) for way, case in ways] == [("every_row", 2048), ("alone", 1024)]


def test_scores_that_will_not_fit_are_foreseen(ringverify, monkeypatch):
    """From runs at short lengths, before the long one starts; a ring that holds no scores is let through."""
    monkeypatch.setattr(estimating, "available_memory", lambda: 3 << 30)
    asked = (
        *SCALE,
        "--length",
        60_000,
        "--deadline",
        60,
        "--problem",
        '{"head_dim": 16, "causal": false}',
        "--only",
        "every_row",
    )
    ran = ringverify.check(miniature("right:attend"), *asked)
    assert ran.code == 2
    assert ran.out == ""
    assert_one_line(ran.err, ["--length 6", "GiB are needed for 2 ranks", "MiB at 4,096", "GiB are available"])


def test_known_violations_are_accepted(ringverify):
    """As in the other suites: a listed one is no failure, a listed one that passes ends the run with 2."""
    listed = """
    [[violation]]
    implementation = "%s"
    property = "every_row"
    reason = "a query from 1,024 on does not attend its own key"
    link = "https://example.org/1"
    """
    asked = (
        *SCALE,
        "--length",
        1200,
        "--only",
        "every_row",
        "--problem",
        '{"head_dim": 16}',
        "--baseline",
        "known.toml",
    )
    (ringverify.folder / "known.toml").write_text(listed % "mutant:mask_off_by_one")
    ran = ringverify.check(FAULT, *asked)
    assert ran.code == 0
    assert ran.told("property")[0]["known"]["link"] == "https://example.org/1"
    assert ran.told("footer")[0]["known"] == 1
    other = ringverify.check("ring", *asked)
    assert other.code == 0
    assert "in the baseline, but not checked in this run: mutant:mask_off_by_one" in other.out
    (name,) = {event["implementation"] for event in other.told("property")}
    (ringverify.folder / "known.toml").write_text(listed % name)
    gone = ringverify.check("ring", *asked)
    assert gone.code == 2
    assert "remove the entry" in gone.out


def test_in_bfloat16_mean_errors_are_told(ringverify):
    """Beside those of the oracle's results, rounded once: a ring that sums in float32 rounds no more than that."""
    asked = (*SCALE, "--length", 600, "--problem", '{"head_dim": 16, "dtype": "bfloat16"}', "--only", "every_row")
    (event,) = ringverify.check("ringverify.faults.ring:PLAIN", *asked).told("property")
    told, _, errors = event["figures"][1].partition(": ")
    assert told == "root mean square errors in u (of right results, rounded once)"
    found = re.findall(r"(\w+) (0\.\d+) \((0\.\d+)\)", errors)
    assert [name for name, _, _ in found] == ["out", "dq", "dk", "dv"]
    assert all(0.3 < float(rho) < 0.5 and abs(float(rho) - float(right)) < 0.01 for _, rho, right in found)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["mask_off_by_one", "far_block_lost"])
def test_the_quick_suite_lets_faults_pass_that_need_length(name, ringverify):
    """All of its properties, on as many cases as users give it; `docs/scale.md` says it of all eleven."""
    ran = ringverify.check(f"ringverify.faults.length:{name}", "--jobs", 1)
    assert ran.code == 0
    assert {"forward", "lse", "gradients", "chunk_boundaries", "world_size_invariance"} <= ran.verdicts().keys()


WRONG = {
    "no such property": (["--only", "forward"], ["'forward'", "every_row, sampled_rows, identities, memory"]),
    "nothing left": (["--skip", "every_row,sampled_rows,identities,memory"], ["--only and --skip leave no property"]),
    "no JSON": (["--problem", "causal"], ["--problem causal", "JSON object"]),
    "no such field": (["--problem", '{"dims": 3}'], ["'dims'", "known:"]),
    "no yes or no": (["--problem", '{"sinks": [1.5]}'], ["sinks=[1.5]", "True or False"]),
    "no such sharding": (["--sharding", "zigzagged"], ["zigzagged", "zigzag", "did you mean"]),
    "examples": (["--max-examples", "3"], ["--max-examples", "suite scale", "leave it out"]),
    "two lengths": (["--length", "8", "--problem", '{"query_length": 9}'], ["--length 8", "query_length=9"]),
    "too long": (["--length", "100000000000"], ["GiB are needed for 2 ranks", "GiB are available", "shorter length"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_usage_is_one_line(name, ringverify):
    """With the value and the way out, before anything is run."""
    asked, words = WRONG[name]
    ran = ringverify.check("ring", *SCALE, *asked)
    assert ran.code == 2
    assert_one_line(ran.err, words)


def test_memory_that_is_needed_is_estimated(monkeypatch):
    """At least the tensors of a call, and little for each rank that is a thread."""
    c = ring.capabilities
    long = Problem(query_length=1 << 20, heads=8, head_dim=64)
    case = Case(problem=long, sharding="zigzag", world_size=2)
    tensors = 8 * long.nq * long.heads * long.head_dim * 4
    for available, world_size, length, refused in (
        (tensors, 2, 1 << 20, True),
        (8 * tensors, 2, 1 << 20, False),
        (4 << 30, 128, 4096, False),
        (4 << 30, 128, 1 << 20, True),
    ):
        monkeypatch.setattr(estimating, "available_memory", lambda found=available: found)
        one = case.replace(query_length=length, world_size=world_size)
        plan = planned("ring", ring, world="simulated", world_sizes=(world_size,), crew=None)
        with pytest.raises(UsageError, match="GiB are needed") if refused else contextlib.nullcontext():
            estimating.refuse_too_long(one, plan, world_size)
    assert "zigzag" in c.shardings


def test_another_sharding_than_the_first_can_be_asked_for(ringverify):
    """And the line that shows it again asks for it too."""
    ran = ringverify.check(FAULT, *SCALE, "--length", 1200, "--only", "every_row", "--sharding", "striped")
    (event,) = ran.told("counterexample")
    assert event["case"]["sharding"] == "striped"
    assert "--sharding striped" in shlex.join(event["scale"])


def test_the_first_violation_ends_it(ringverify):
    """With -x; a length for which nothing is left to share is refused."""
    ran = ringverify.check(FAULT, *SCALE, "--length", 1200, "--only", "every_row,sampled_rows", "-x")
    assert ran.verdicts() == {"every_row": "fail"}
    short = ringverify.check(miniature("lenses:padding_cleared"), *SCALE, "--length", 1)
    assert short.code == 2
    assert_one_line(short.err, ["--length 1", "multiple of"])


def test_a_rank_that_holds_all_queries_waits_for_no_other(ringverify):
    """One query is on one of two ranks, and the other one waits for nothing."""
    ran = ringverify.check("ring", *SCALE, "--length", 1, "--only", "every_row", "--problem", '{"key_length": 40}')
    assert ran.code == 0


def test_its_options_belong_to_it(ringverify):
    """Other suites have no length, and pytest does not have this suite."""
    ran = ringverify.check("ring", "--length", 8)
    assert ran.code == 2
    assert_one_line(ran.err, ["--suite scale", "leave them out"])
    with pytest.raises(UsageError, match="suite scale: it is one of ringverify check alone"):
        CheckRequest(suite="scale").properties()


@pytest.mark.parametrize("world", ["simulated", pytest.param("gloo", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("target", ["ring", "allgather"])
def test_right_rings_are_conformant_with_learned_sinks(target, world, ringverify):
    """By all properties; the figures have a margin of the gradient of sinks."""
    ran = ringverify.check(
        target, *SCALE, "--length", 512, "--world", world, "--problem", '{"sinks": true, "heads": 2, "head_dim": 16}'
    )
    assert ran.code == 0, ran.out
    assert ran.out.count("dsinks") >= 3


@pytest.mark.nightly
def test_rounding_more_than_declared_is_a_violation_that_is_shown_again(ringverify):
    """No element is off by more than its bound; the mean is. By `replay`, and by a script without the suite."""
    asked = ("--only", "sampled_rows", "--world-sizes", 8, "--problem", '{"head_dim": 16, "dtype": "bfloat16"}')
    ran = ringverify.check("ringverify.faults.catalogue:A12b", *SCALE, "--length", 1500, *asked)
    assert ran.code == 1
    (event,) = ran.told("counterexample")
    assert "dq in bfloat16 is rounded more than declared: root mean square error 0." in ran.out
    (told,) = ran.told("property")
    assert told["margin"] > 1.1
    assert any(
        line.startswith("root mean square errors that the declared pipeline may have") for line in told["figures"]
    )
    again = ringverify("replay", event["file"], "--trust")
    assert again.code == 1, again.out
    shown = ringverify("confirm", "report-1.jsonl", "--json", "seen.json", "--trust")
    assert shown.code == 0, shown.out
    assert "wrong: dq in the mean" in shown.out


def test_what_is_not_declared_is_unsupported(ringverify):
    """A problem that the implementation does not claim is no violation."""
    ran = ringverify.check(miniature("right:attend"), *SCALE, "--length", 64, "--problem", '{"softcap": 2.0}')
    assert ran.verdicts() == dict.fromkeys(("every_row", "sampled_rows", "identities", "memory"), "unsupported")
    assert ran.code == 3
