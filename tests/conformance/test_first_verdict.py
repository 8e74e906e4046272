"""From an implementation to a verdict: the loop that everything hangs on, on implementations whose truth is known."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import MINIATURES, miniature
from report_lines import VALIDATOR, without_times

from ringverify import environments, targets
from ringverify.properties.catalogue import PROPERTIES

pytestmark = pytest.mark.timeout(120)

ALIKE = [pytest.param(fault, marks=pytest.mark.nightly) for fault in ("wrong_scale", "dropped_key")]
COMPARED_WITH_THE_ORACLE = "forward,gradients,overflow,dtypes,chunk_boundaries,strided_inputs"
QUICKLY = ("--only", "forward,gradients", "--max-examples", 6)


# -- right and wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [
        "ring",
        pytest.param("allgather", marks=pytest.mark.nightly),
        miniature("right:attend"),
        miniature("right:attend_with_lse"),
    ],
)
@pytest.mark.by_day(1)
def test_a_right_implementation_is_conformant(target, ringverify):
    """Every property that applies passes, each on some examples, with errors below what is allowed."""
    outcome = ringverify.check(target, "--max-examples", 3)
    assert outcome.code == 0
    assert outcome.err == ""
    assert list(outcome.verdicts()) == list(PROPERTIES)
    for event in outcome.told("property"):
        assert event["verdict"] in ("pass", "unsupported")
        if event["verdict"] == "pass":
            assert 0 < event["examples"] <= 3
            assert 0 <= event["margin"] <= 1
    assert outcome.told("implementation")[0]["verdict"] == "conformant"
    assert not (ringverify.folder / ".ringverify").exists()


def test_what_is_not_declared_is_unsupported_and_listed(ringverify):
    """Never a pass."""
    outcome = ringverify.check(miniature("right:attend"), "--max-examples", 2)
    unsupported = {event["property"]: event["reason"] for event in outcome.told("property", verdict="unsupported")}
    assert {"lse", "lse_gradient", "masked_rows"} <= set(unsupported)
    assert unsupported["lse"] == "lse=True is not declared"
    assert {"lse", "window", "dilation", "uneven"} <= set(outcome.told("implementation")[0]["undeclared"])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "fault", ["wrong_scale", "swapped_gradients", pytest.param("dropped_key", marks=pytest.mark.nightly)]
)
@pytest.mark.by_day(1)
@pytest.mark.usefixtures("unexplained")
def test_a_simple_fault_shrinks_to_two_ranks_and_four_tokens(fault, seed, ringverify):
    """In every property that compares with the oracle; those that compare wrong answers have other small cases."""
    outcome = ringverify.check(
        miniature(f"faulty_rings:{fault}"), "--only", COMPARED_WITH_THE_ORACLE, "--max-examples", 12, "--seed", seed
    )
    assert outcome.code == 1
    failed = {event["property"] for event in outcome.told("property", verdict="fail")}
    assert failed == {event["property"] for event in outcome.told("counterexample")}
    assert "gradients" in failed
    assert ("forward" in failed) == (fault != "swapped_gradients")
    for counterexample in outcome.told("counterexample"):
        assert counterexample["case"]["world_size"] <= 2, counterexample["case_text"]
        assert counterexample["case"]["problem"]["query_length"] <= 4, counterexample["case_text"]
        assert counterexample["smallest"] or counterexample["same_as"]  # then with what is special about it
        assert counterexample["repeats"]
        assert counterexample["error"] > counterexample["allowed"]
        assert counterexample["tensor"] in ("out", "dq", "dk", "dv")
        assert counterexample["replay"] == f"ringverify replay {counterexample['file']}"
        assert counterexample["replay"] in outcome.out


@pytest.mark.parametrize("fault", ["swapped_gradients", *ALIKE])
@pytest.mark.usefixtures("unexplained")
def test_replay_shows_the_same_bits_in_a_fresh_process(fault, ringverify):
    """And the same case on a right implementation does not fail."""
    outcome = ringverify.check(miniature(f"faulty_rings:{fault}"), "--only", "gradients", "--max-examples", 12)
    (counterexample,) = outcome.told("counterexample")
    process = ringverify.apart(*counterexample["replay"].split()[1:])
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err == ""
    assert "exactly the recorded bits" in out
    assert counterexample["summary"] in out
    assert counterexample["case_text"] in out
    healed = ringverify("replay", counterexample["file"], "--target", miniature("right:attend"))
    assert healed.code == 0
    assert "the property holds" in healed.out


# -- the same again ----------------------------------------------------------------------------------------------------


def forget():
    """Take away the cases of earlier runs, which would be tried first."""
    shutil.rmtree(".ringverify", ignore_errors=True)
    return True


def test_the_same_seed_tells_the_same_twice(ringverify):
    """Every event but for its seconds: examples, margins, counterexamples. Cases of earlier runs come on top."""
    properties = ("--only", "gradients,inputs_untouched")
    arguments = (miniature("faulty_rings:dropped_key"), *properties, "--max-examples", 6, "--seed", 7)
    first, second = (without_times(ringverify.check(*arguments).events) for _ in range(2) if forget())
    assert first == second


@pytest.mark.nightly
@pytest.mark.usefixtures("unexplained")
def test_another_seed_tries_other_cases(ringverify):
    """The first case that fails is mostly another one."""
    target = miniature("faulty_rings:wrong_scale")
    first = [
        ringverify.check(target, "--only", "chunk_boundaries", "--seed", seed).told("counterexample")[0]["shrunk_from"]
        for seed in range(5)
        if forget()
    ]
    assert len(set(first)) > 2


@pytest.mark.parametrize("name", ["wrong_at_times", "never_the_same"])
def test_a_failure_that_does_not_repeat_is_a_failure_that_says_so(name, ringverify):
    """Never a pass: it was seen."""
    outcome = ringverify.check(miniature(f"misbehaving:{name}"), "--only", "forward", "--max-examples", 20)
    assert outcome.code == 1
    assert outcome.verdicts()["forward"] == "fail"
    (counterexample,) = outcome.told("counterexample", property="forward")
    assert counterexample["repeats"] is False
    assert "not repeatable" in outcome.out


@pytest.mark.nightly
def test_what_is_wrong_in_a_fresh_process_only_repeats_because_each_replay_is_one(ringverify):
    """Shrinking goes nowhere, since the process is no longer fresh; the case is still shown, and fails again."""
    outcome = ringverify.check(miniature("misbehaving:wrong_at_first"), "--only", "forward", "--max-examples", 4)
    assert outcome.code == 1
    (counterexample,) = outcome.told("counterexample")
    assert counterexample["repeats"] is True
    assert counterexample["after"] == []
    assert ringverify.apart(*counterexample["replay"].split()[1:]).wait(timeout=60) == 1


@pytest.mark.nightly
def test_state_that_one_case_leaves_for_the_next_is_found_with_the_case_that_left_it(ringverify):
    """Alone, the smallest case does not fail; after another one, itself shrunk, it does, and so it does in a replay."""
    outcome = ringverify.check(miniature("stateful:remembers"), "--only", "forward", "--max-examples", 30)
    assert outcome.code == 1
    (counterexample,) = outcome.told("counterexample")
    assert len(counterexample["after"]) == 1
    assert counterexample["after"][0].startswith("1 rank")
    assert "without that, this case does not fail" in outcome.out
    process = ringverify.apart(*counterexample["replay"].split()[1:])
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "exactly the recorded bits" in out


# -- verdicts and exit codes -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unexplained")
def test_one_of_two_that_fails_decides_the_exit_code(ringverify):
    """Each has its own verdict, and the worst is the run's."""
    outcome = ringverify.check(miniature("faulty_rings:wrong_scale"), miniature("right:attend"), *QUICKLY)
    assert outcome.code == 1
    assert [event["verdict"] for event in outcome.told("implementation")] == ["violations", "conformant"]
    assert outcome.told("footer")[0] == {"event": "footer", "verdict": "violations", "exit_code": 1}


def test_nothing_applicable_is_inconclusive(ringverify):
    """Nothing was learned: not 0."""
    outcome = ringverify.check(miniature("right:attend"), "--only", "lse,lse_gradient")
    assert outcome.code == 3
    assert set(outcome.verdicts().values()) == {"unsupported"}
    assert outcome.told("footer")[0]["verdict"] == "inconclusive"
    assert "inconclusive: 2 unsupported" in outcome.out


def test_a_pass_beside_something_inconclusive_is_inconclusive(ringverify):
    """One implementation of two had nothing that applies."""
    outcome = ringverify.check("ring", miniature("right:attend"), "--only", "lse", "--max-examples", 2)
    assert outcome.code == 3
    assert [event["verdict"] for event in outcome.told("implementation")] == ["conformant", "inconclusive"]


def test_no_time_is_inconclusive_and_says_so(ringverify):
    """A budget that ends before the first example teaches nothing."""
    outcome = ringverify.check("ring", "--time-budget", "0.000001", "--only", "forward,chunk_boundaries")
    assert outcome.code == 3
    assert outcome.verdicts() == {"forward": "inconclusive", "chunk_boundaries": "inconclusive"}
    assert {event["reason"] for event in outcome.told("property")} == {
        "the time budget ended before the first example: raise --time-budget"
    }
    assert outcome.out.count("the time budget ended before the first example") == 2


def test_a_budget_that_cuts_a_property_short_says_how_far_it_came(ringverify):
    """Fewer examples than asked for is never silent."""
    outcome = ringverify.check(
        miniature("right:attend"), "--time-budget", "1", "--only", "forward", "--suite", "nightly"
    )
    (event,) = outcome.told("property")
    assert event["verdict"] == "pass"
    asked = PROPERTIES["forward"].examples_in("nightly")
    assert event["reason"] == f"the time budget ended after {event['examples']} of {asked} examples"
    assert event["reason"] in outcome.out


@pytest.mark.nightly
def test_a_budget_is_shared_among_properties_and_targets(ringverify):
    """The first does not eat the time of the others: each is tried, each is cut short, and each says so."""
    target = (miniature("right:attend"), miniature("right:attend_with_lse"))
    some = ("forward", "gradients", "inputs_untouched")
    budget = ("--time-budget", "24", "--only", ",".join(some), "--suite", "nightly")
    outcome = ringverify.check(*target, *budget)
    assert outcome.code == 0, outcome.out
    events = outcome.told("property")
    assert [event["property"] for event in events] == [*some, *some]
    for event in events:
        assert event["examples"] >= 1
        assert event["reason"].startswith("the time budget ended after ")


@pytest.mark.usefixtures("unexplained")
def test_exitfirst_stops_at_the_first_violation(ringverify):
    """The report is whole all the same, and says what was not run."""
    arguments = (miniature("faulty_rings:wrong_scale"), miniature("right:attend"), "--max-examples", 6, "-x")
    outcome = ringverify.check(*arguments)
    assert outcome.code == 1
    assert outcome.verdicts() == {"forward": "fail"}
    (implementation,) = outcome.told("implementation")
    assert implementation["not_run"] == len(PROPERTIES) - 1
    assert f"{len(PROPERTIES) - 1} not run (-x)" in outcome.out


@pytest.mark.parametrize("jobs", [1, 2])
def test_exitfirst_looks_at_all_properties_before_it_tries_any_whole(jobs, ringverify):
    """What a late property shows in its first case is not waited for; properties before it are not run, not passed."""
    outcome = ringverify.check("mutant:O125", "-x", "--only", "forward,gradients,inputs_untouched", "--jobs", jobs)
    assert outcome.code == 1
    assert outcome.verdicts() == {"inputs_untouched": "fail"}
    (implementation,) = outcome.told("implementation")
    assert (implementation["not_run"], implementation["properties"]["pass"]) == (2, 0)


def test_exitfirst_tries_properties_whole_in_their_order_where_a_first_look_shows_nothing(ringverify):
    """A first look changes no verdict and no count."""
    arguments = (miniature("right:attend"), "--only", "forward,inputs_untouched", "--max-examples", 12)
    names = ("property", "verdict", "examples", "margin")
    usual, first = (
        [[event[name] for name in names] for event in ringverify.check(*arguments, *also).told("property")]
        for also in ((), ("-x",))
    )
    assert first == usual


def test_only_and_skip_choose_properties(ringverify):
    """In the catalogue's order, whatever the order in which they are named."""
    target = miniature("right:attend")
    assert list(ringverify.check(target, "--only", "overflow,forward", "--max-examples", 1).verdicts()) == [
        "forward",
        "overflow",
    ]
    skipped = ringverify.check(target, "--skip", "forward,chunk_boundaries", "--max-examples", 1).verdicts()
    assert list(skipped) == [name for name in PROPERTIES if name not in ("forward", "chunk_boundaries")]


@pytest.mark.usefixtures("unexplained")
def test_world_sizes_choose_the_numbers_of_ranks(ringverify):
    """A fault that every world has shrinks to the only one allowed."""
    outcome = ringverify.check(miniature("faulty_rings:wrong_scale"), *QUICKLY, "--world-sizes", "3")
    assert {event["case"]["world_size"] for event in outcome.told("counterexample")} == {3}


# -- worlds ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["swapped_gradients", *ALIKE])
@pytest.mark.usefixtures("unexplained")
def test_processes_give_the_verdicts_of_the_simulated_world(fault, ringverify):
    """The same properties fail, and the counterexample replays in the world that it was found in."""
    options = (*QUICKLY, "--world-sizes", "1,2")
    simulated, gloo = (
        ringverify.check(miniature(f"faulty_rings:{fault}"), *options, "--world", world)
        for world in ("simulated", "gloo")
    )
    assert simulated.verdicts() == gloo.verdicts()
    assert (simulated.code, gloo.code) == (1, 1)
    (counterexample,) = gloo.told("counterexample", property="gradients")
    assert json.loads(Path(counterexample["file"]).read_text())["world"] == "gloo"
    replayed = ringverify("replay", counterexample["file"])
    assert replayed.code == 1
    assert "exactly the recorded bits" in replayed.out


def test_an_implementation_that_needs_processes_gets_them(ringverify):
    """Without being asked."""
    outcome = ringverify.check(miniature("right:attend_in_processes"), *QUICKLY)
    assert outcome.code == 0
    assert outcome.told("implementation")[0]["world"] == "gloo"


# -- the report --------------------------------------------------------------------------------------------------------

EVERY_KIND_OF_RUN = {
    "conformant": (miniature("right:attend"), "--max-examples", 2),
    "violations": (miniature("faulty_rings:dropped_key"), "--max-examples", 6),
    "raised": (miniature("misbehaving:raises_on_one_rank"), "--only", "forward"),
    "no number": (miniature("misbehaving:returns_nan"), "--only", "forward"),
    "not one rank's": (miniature("misbehaving:leaves_a_rank_waiting"), "--only", "forward"),
    "inconclusive": ("ring", "--time-budget", "0.000001"),
    "nothing applies": (miniature("right:attend"), "--only", "lse"),
}


@pytest.mark.parametrize("kind", EVERY_KIND_OF_RUN)
@pytest.mark.by_day(3)
def test_every_event_fits_the_published_schema(kind, ringverify):
    """A header first, a footer last, each line valid JSON without NaN or infinity."""
    outcome = ringverify.check(*EVERY_KIND_OF_RUN[kind])
    kinds = [event["event"] for event in outcome.events]
    assert kinds[0] == "header"
    assert kinds[-1] == "footer"
    assert kinds.count("header") == kinds.count("footer") == 1
    assert outcome.told("footer")[0]["exit_code"] == outcome.code
    (path,) = ringverify.folder.glob("report-*.jsonl")
    for line in path.read_text(encoding="utf-8").splitlines():
        assert list(VALIDATOR.iter_errors(json.loads(line, parse_constant=refuse))) == []


def refuse(constant):
    """JSON has no such number."""
    raise AssertionError(f"{constant} in a report")


def test_the_schema_refuses_what_is_no_event():
    """The gate can close: an unknown verdict, a field that is missing, a number as text."""
    good = {"event": "footer", "verdict": "conformant", "exit_code": 0, "seal": "of another report"}
    unsealed = {name: value for name, value in good.items() if name != "seal"}
    assert VALIDATOR.is_valid(good)
    for bad in ({**good, "verdict": "fine"}, {**good, "exit_code": 4}, unsealed, {**good, "event": "foot"}):
        assert not VALIDATOR.is_valid(bad)


# -- the other commands ------------------------------------------------------------------------------------------------


def test_list_names_what_there_is(ringverify):
    """Implementations, peers, and properties with their meaning."""
    names = [*targets.BUILT_IN, *targets.MERGES, *environments.ELSEWHERE]
    assert ringverify("list", "implementations").out.split() == names
    peers = ringverify("list", "peers").out.split()
    assert peers == [name for name in names if name.startswith("peer:")]
    assert {"peer:ring-attention-pytorch", "peer:ring-flash-attn-zigzag", "peer:ringattention"} < set(peers)
    lines = ringverify("list", "properties").out.splitlines()
    assert [line.split()[0] for line in lines] == list(PROPERTIES)


def test_doctor_says_in_three_lines_what_this_machine_can_run(ringverify):
    """Versions, worlds, and whether checks can run; how to see more."""
    outcome = ringverify("doctor")
    assert outcome.code == 0
    versions, worlds, summary = outcome.out.splitlines()
    assert "torch" in versions
    assert worlds.startswith("worlds: simulated works, gloo works, nccl ")
    assert summary.startswith("checks can run here")
    own = sum(bool(package.targets) for package in environments.PACKAGES)
    assert f"{own} of {own} packages lack an environment of their own" in summary  # in a new folder
    assert "ringverify doctor -v" in summary


@pytest.mark.nightly
def test_doctor_verbose_says_it_of_every_world_kernel_and_implementation(ringverify):
    """Behind the three lines."""
    lines = ringverify("doctor", "-v").out.splitlines()
    assert lines[2].startswith("checks can run here")
    assert {"world simulated works", "world gloo      works", "ring: can be checked"} < set(lines[3:])
    implementations = [*targets.BUILT_IN, *environments.ELSEWHERE]
    assert [line.split(": ")[0] for line in lines[-len(implementations) :]] == implementations
    assert lines[-1].endswith(": is not installed: ringverify peers install ejkernel")


def test_a_module_on_the_path_is_a_target_too(ringverify, monkeypatch):
    """`module:attribute`, found in the current directory as well."""
    monkeypatch.chdir(MINIATURES)
    outcome = ringverify.check("right:attend", *QUICKLY)
    assert outcome.code == 0
