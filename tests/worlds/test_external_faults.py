"""The fault matrix of the external world: every way of a worker to misbehave gets its verdict, and nothing is left."""

import dataclasses
import functools
import os
import shlex
import sys
import tempfile
from pathlib import Path

import pytest
from processes import becomes_true, orphans_come_to_us, processes
from verdicts import verdict_of

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.cases.shrinking import Shrunk
from ringverify.check.options import Options, Subject
from ringverify.describing import describe
from ringverify.errors import Inconclusive, UsageError
from ringverify.implementation import Capabilities, Implementation
from ringverify.programs import ProgramElsewhere
from ringverify.worlds.external.messages import Hello
from ringverify.worlds.external.process import ProgramProcess
from ringverify.worlds.external.world import ExternalWorld

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are counted in /proc"),
]

WORKER = Path(__file__).resolve().parent.parent / "miniatures" / "workers" / "faulty_worker.py"
PLENTY = 30.0
SHORT = 0.7


@dataclasses.dataclass(frozen=True)
class Expected:
    """What a way to misbehave comes to: a verdict, and what its summary or reason contains."""

    verdict: str
    says: str = ""
    property: str = "forward"
    hangs: bool = False


fails = functools.partial(Expected, "fail")
unknown = functools.partial(Expected, "inconclusive")
harmless = functools.partial(Expected, "pass")

MATRIX = {
    "right": harmless(),
    "hangs": fails("had not answered", hangs=True),
    "exits_well": fails("the program ended with exit code 0"),
    "exits": fails("the program ended with exit code 3"),
    "exits_when_asked_twice": fails("the program ended with exit code 3"),
    "aborts": fails("the program was ended by signal SIGABRT"),
    # The kernel ends by SIGKILL whom it picks when memory runs out, so nothing was learned.
    "is_killed": unknown("was ended by signal SIGKILL"),
    "kills_its_parent": unknown("was ended by signal SIGKILL"),
    "raises": fails("the program raised ValueError: no"),
    "raises_surrogates": fails(r"the program raised OSError: no \ud800"),
    "raises_memory_error": unknown("this machine is out of memory: the program raised MemoryError"),
    "refuses_all": Expected("unsupported", "refused 2 of 2 cases: no such length"),
    "refuses_some": harmless("refused 1 of 2 cases: no such length"),
    "another_shape": fails("the program returned out of shape ("),
    "another_dtype": fails("the program returned out in float16: float32 is expected"),
    "wrong_numbers": fails("out is wrong on rank"),
    "wrong_on_the_last_rank": fails("out is wrong on rank 2"),
    "without_lse": fails("the program wrote no lse"),
    "no_file": fails("wrote no file of results: No such file or directory"),
    "empty_file": fails("its header is cut off"),
    "garbage_file": fails("cannot be read: its header"),
    "nested_header": fails("its header is not a valid safetensors header"),
    "cut_file": fails("it is cut off within"),
    "longer_file": fails("bytes follow its last tensor"),
    "huge_file": fails("bytes of results, and"),
    "a_pipe": fails("has to be a plain file"),
    "a_link": fails("has to be a plain file"),
    "a_folder": fails("has to be a plain file"),
    "another_case": unknown("when asked for case"),
    "answers_twice": unknown("twice"),
    "answers_twice_later": unknown("twice"),
    "no_message_at_all": unknown("wrote a line that is no message"),
    "case_of_another_type": unknown("sent result with case="),
    "took_less_than_no_time": unknown("sent result with seconds='-5'"),
    "took_forever": unknown("sent result with seconds='1000"),
    "pads_to_the_longest_line": harmless(),
    "pads_by_one_too_many": unknown("more than 1 MiB without the end of a line"),
    "floods_the_protocol": unknown("more than 1 MiB without the end of a line"),
    "floods_the_log": harmless(),
    "prints_into_the_protocol": unknown("wrote a line that is no message: 'step 1 of 3'"),
    "closes_its_output": fails("had not answered", hangs=True),
    "changes_its_inputs": fails("changed its input k", property="inputs_untouched"),
    "changes_what_is_no_input": unknown("changed 'dout': its inputs are q, k, v", property="inputs_untouched"),
    "leaves_children": harmless(),
    "leaves_files": harmless(),
    "exits_afterwards": harmless(),
    # What it answered may be right, and no case has made it end, so that nobody's attention is accused.
    "exits_badly_afterwards": unknown("the program ended with exit code 1 after its answer, unasked: end with exit"),
    "exits_badly_a_while_afterwards": unknown("the program ended with exit code 3 after its answer, unasked"),
    "aborts_afterwards": unknown("the program was ended by signal SIGABRT after its answer, unasked"),
    "ignores_bye": harmless(),
}


@pytest.fixture(scope="module", autouse=True)
def _orphans_come_to_us():
    """As those of a rank or program that has ended."""
    with orphans_come_to_us():
        yield


@pytest.fixture(autouse=True)
def _as_it_was(tmp_path, monkeypatch):
    """A folder for temporary files that has to be empty afterwards, and no shrinking, which has its own tests."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("ringverify.check.finishing.shrink", lambda case, *_, **__: Shrunk(case, 0, complete=False))
    before = children()
    yield
    assert becomes_true(lambda: children() <= before), "processes are left"
    assert [path.name for path in folder.iterdir()] == [], "files are left"


def target_of(way, *more):
    """The target of a worker that misbehaves in a way."""
    return f"program: {shlex.join([sys.executable, str(WORKER), way, *more])}"


def children():
    """The live processes whose parent this one is, also those that came to it."""
    return {number for number, process in processes().items() if process.parent == os.getpid()}


def checked(target, *, property="forward", deadline=PLENTY, load_deadline=PLENTY):
    """Verdict and explanation of one property on two examples."""
    hello = Hello(kind="hello", protocol=1, name="worker", capabilities={}, reports_changes=True)
    declared = Capabilities(sharding="zigzag", lse=True)
    options = Options(
        world_sizes=(3,), max_examples=2, deadline=deadline, load_deadline=load_deadline, cases=Path("cases")
    )
    subject = Subject(target, Implementation(ProgramElsewhere(target, hello), "worker", declared))
    return verdict_of(property, subject, options)


@pytest.mark.parametrize("way", MATRIX)
@pytest.mark.by_day(12)
def test_every_way_gets_its_verdict_and_leaves_nothing(way, tmp_path):
    """The verdict, and the one line that says why; then neither a process nor a file is left."""
    expected = MATRIX[way]
    deadline = SHORT if expected.hangs else PLENTY
    note = tmp_path / "children"
    verdict, said = checked(target_of(way, str(note)), property=expected.property, deadline=deadline)
    assert (verdict, expected.says in said) == (expected.verdict, True), said
    for child in note.read_text().split() if note.exists() else ():
        assert becomes_true(lambda child=child: not Path(f"/proc/{child}").exists()), "a child is left"
    assert note.exists() == (way == "leaves_children")


BEGINNINGS = {
    "garbage_before_hello": (UsageError, "wrote a line that is no message: 'Loading weights: 100%'; standard output"),
    "another_version": (
        UsageError,
        "speaks version 2 of the worker protocol, and this ringverify version 1",
    ),
    "exits_at_once": (UsageError, "ended with exit code 1 before it said hello: no module named 'jax'"),
    "exits_well_at_once": (UsageError, "ended with exit code 0 before it said hello"),
    "killed_at_once": (Inconclusive, "was ended by signal SIGKILL before it said hello"),
    "never_says_hello": (Inconclusive, "did not say hello within 1.5 s; allow more with --load-deadline"),
    "unknown_keyword": (UsageError, "its hello declares the unknown capability 'shardign'; did you mean 'sharding'?"),
    "impossible_value": (UsageError, "its hello declares sharding='diagonal': expected one of contiguous, zigzag"),
    "unseen_claim": (UsageError, "its hello declares 'memory', which is not for programs: a program's ranks are not"),
    "contradicts_itself": (UsageError, "its hello declares lse_gradient=True needs lse=True"),
    "needs_huge_heads": (UsageError, "heads_multiple=100000000: 512 is the largest of which cases are made"),
    "needs_huge_dimensions": (UsageError, "head_dims=(64, 1000000000): 4096 is the largest of which cases are made"),
    "needs_huge_lengths": (UsageError, "length_multiple=1000000000: 4096 is the largest of which cases are made"),
    "hello_with_an_empty_name": (UsageError, "its hello declares name=' '"),
    "hello_without_a_name": (UsageError, "the program sent hello without 'name'"),
    "hello_of_another_type": (UsageError, "the program sent hello with protocol="),
    "begins_with_a_result": (UsageError, "the program began with result instead of hello"),
    "flood_before_hello": (UsageError, "wrote more than 1 MiB without the end of a line"),
}


@pytest.mark.parametrize("way", BEGINNINGS)
@pytest.mark.by_day(7)
def test_a_program_that_begins_badly_is_told_so_in_one_line(way):
    """Wrong usage where the program is wrong, inconclusive where nothing was learned."""
    kind, says = BEGINNINGS[way]
    seconds = 1.5 if way == "never_says_hello" else PLENTY
    with pytest.raises(kind) as raised:
        describe(target_of(way), seconds=seconds)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("seconds", ["0", "0.3"])
@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("says_hello_twice", "the program said hello twice"),
        ("answers_before_it_is_asked", "the program answered case 1 when asked for case"),
        ("prints_before_it_is_asked", "wrote a line that is no message: 'step 1 of 3'; standard output"),
    ],
)
def test_what_comes_without_being_asked_gets_one_verdict_whenever_it_comes(way, says, seconds):
    """Before the first case is sent, or between its sending and its being read; a hello before it counts."""
    assert describe(target_of(way, seconds)).name == way
    verdict, said = checked(target_of(way, seconds))
    assert (verdict, says in said) == ("inconclusive", True), said


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("", "no command follows: write 'program: python my_worker.py'"),
        ("   ", "no command follows"),
        ("python 'my_worker.py", "is no command: no closing quotation"),
        ("no-such-program worker.py", "'no-such-program' is no program here: give its path, or install it"),
        ("./text", "'./text' is not executable: name its interpreter first"),
        ("./script", "cannot be executed: Exec format error"),
    ],
)
def test_a_command_that_cannot_be_executed_is_wrong_usage(command, says, tmp_path):
    """Before anything is run, where that can be seen."""
    (tmp_path / "text").write_text("not a program")
    (tmp_path / "script").write_text("\0no interpreter")
    (tmp_path / "script").chmod(0o755)
    with pytest.raises(UsageError) as raised:
        describe(f"program:{command}")
    assert says in str(raised.value)


def test_inputs_that_nobody_compares_are_not_called_untouched():
    """A worker that does not say which inputs it changes gets no verdict on that."""
    found = describe(target_of("says_no_changes"))
    assert not found.function.hello.reports_changes
    subject = Subject(target_of("says_no_changes"), found)
    verdict, said = verdict_of("inputs_untouched", subject, Options(cases=Path("cases")))
    assert (verdict, "does not say which inputs it changes" in said) == ("unsupported", True)


def test_a_program_that_has_ended_is_started_anew(tmp_path):
    """The next case is answered, by another process."""
    target, world = target_of("exits_once", str(tmp_path / "note")), ExternalWorld()
    hello = Hello(kind="hello", protocol=1, name="worker", capabilities={})
    declared = Capabilities(sharding="zigzag", lse=True)
    runner = Runner(Implementation(ProgramElsewhere(target, hello), "worker", declared), world, target=target)
    case = Case(problem=Problem(query_length=4), sharding="zigzag", world_size=2)
    try:
        first, second = (runner.run(case, gradients=False) for _ in range(2))
    finally:
        world.close()
    assert (first.failure.kind, first.failure.exit_code, second.failure) == ("died", 3, None)
    assert len(second.ranks) == 2


def test_a_program_that_does_not_start_for_the_check_is_inconclusive():
    """It said hello when it was described, and says nothing now; it is not waited for again."""
    verdict, said = checked(target_of("never_says_hello"), load_deadline=1.0)
    assert (verdict, "the program did not say hello in time" in said) == ("inconclusive", True), said


def test_a_worker_ends_with_the_tool_even_when_the_tool_is_killed(tmp_path):
    """The keeper sees the lifeline end; the private folder goes too."""
    worker = ProgramProcess([sys.executable, str(WORKER), "right"])
    worker.hello(PLENTY)
    folder = worker._folder
    process = worker._process.pid
    os.close(worker._lifeline)
    assert becomes_true(lambda: not folder.exists())
    assert worker._process.wait(10) == -9
    assert not Path(f"/proc/{process}").exists()
    worker._lifeline = os.open(os.devnull, os.O_RDONLY)  # `end` closes it
    worker.end(kindly=False)
