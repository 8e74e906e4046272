"""A target given by name is imported where it can do no harm: whatever it does there, the tool says so in a line."""

import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
from command_line import another_version_of, assert_one_line, miniature

from ringverify.describing import describe, lacking
from ringverify.errors import Inconclusive, UsageError

pytestmark = pytest.mark.timeout(60)

VIOLATIONS, USAGE, INCONCLUSIVE = 1, 2, 3

RIGHT = """
from ringverify import implementation

@implementation(name="it")
def attend(q, k, v, call):
    "Nothing of the kind."
    return q
"""


def written(*lines, name="it.py"):
    """The target of a right implementation in a file that begins with these lines."""
    Path(name).write_text("\n".join(lines) + RIGHT)
    return f"{name}:attend"


# What a file does when it is imported, the exit code of the tool, and what its line names.
MISBEHAVING = {
    "exits with 0": ("import os; os._exit(0)", USAGE, "ends its process while it is imported (exit code 0)"),
    "exits with 1": ("import os; os._exit(1)", USAGE, "ends its process while it is imported (exit code 1)"),
    "calls sys.exit": ("import sys; sys.exit(0)", USAGE, "it calls sys.exit(0) (at it.py:1)"),
    "calls sys.exit without a code": ("raise SystemExit", USAGE, "it calls sys.exit() (at it.py:1)"),
    "interrupts itself": ("raise KeyboardInterrupt", USAGE, "it.py:attend does not import: KeyboardInterrupt"),
    "raises what nobody catches": ("raise GeneratorExit('no')", USAGE, "GeneratorExit: no (at it.py:1)"),
    "recurses": ("def f(): f()\nf()", USAGE, "RecursionError: maximum recursion depth exceeded"),
    "says nothing": ("class E(Exception):\n def __str__(self): raise self\nraise E", USAGE, "import: E (its text"),
    "says a number": ("class E(Exception):\n def __str__(self): return 3\nraise E", USAGE, "import: E (its text"),
    "exits when it speaks": (
        "import os\nclass E(Exception):\n def __str__(self): os._exit(0)\nraise E",
        USAGE,
        "ends its process while it is imported (exit code 0)",
    ),
    "reads nowhere": ("import ctypes; ctypes.string_at(0)", USAGE, "by signal SIGSEGV while it is imported"),
    "aborts": ("import os; os.abort()", USAGE, "by signal SIGABRT while it is imported"),
    "ends itself": ("import os; os.kill(os.getpid(), 15)", USAGE, "by signal SIGTERM while it is imported"),
    "is killed": ("import os; os.kill(os.getpid(), 9)", INCONCLUSIVE, "SIGKILL while it was imported, as the kernel"),
    "asks for too much": ("raise MemoryError", INCONCLUSIVE, "it.py was not imported, this machine is out of memory"),
    "leaves it to its child": ("import os\nif os.fork(): os._exit(0)", USAGE, "(exit code 0)"),
    "is no module": ("import sys; sys.modules[__name__] = 3; raise ImportError('odd')", USAGE, "ImportError: odd"),
    "has no attributes": ("def __getattr__(name): raise ValueError(name)", USAGE, "could not be inspected: ValueError"),
}


@pytest.mark.parametrize("how", MISBEHAVING)
@pytest.mark.by_day(9)
def test_an_import_that_misbehaves_is_one_line_and_never_a_verdict(how, ringverify):
    """Neither conformant, which is what 0 means, nor violations, which is what 1 means; nothing is written."""
    lines, code, words = MISBEHAVING[how]
    target = written(lines)
    if how == "has no attributes":
        target = "it.py:another"
    outcome = ringverify("check", target)
    assert outcome.code == code
    assert_one_line(outcome.err, ["it.py", words])
    assert outcome.out == ""
    assert [one.name for one in ringverify.folder.iterdir() if one.name != "__pycache__"] == ["it.py"]


def test_an_import_that_closes_every_file_is_never_a_verdict(ringverify):
    """The process may end while it is imported or, once that is done, when it answers."""
    outcome = ringverify("check", written("import os; os.closerange(0, 256)"))
    assert outcome.code in (USAGE, INCONCLUSIVE)
    assert_one_line(outcome.err, ["it.py:attend"])
    assert outcome.out == ""


HARMLESS = {
    "prints megabytes": "import os; [os.write(1 + n % 2, b'x' * 2**20) for n in range(8)]",
    "says something at the end": "import atexit, os; atexit.register(os._exit, 0)",
    "has no exit": "import os, sys; sys.exit = os._exit = lambda code=0: None",
    "has a child": "import os; os.fork()",
    "goes elsewhere": "import os; os.chdir('/')",
    "catches signals": "import signal; [signal.signal(one, signal.SIG_IGN) for one in (2, 15)]",
    "closes what it reads and writes": "import os; os.closerange(0, 3)",
    "has another json": "import json; json.loads = None",
}


@pytest.mark.parametrize("how", HARMLESS)
@pytest.mark.by_day(4)
def test_what_an_import_does_to_its_process_is_not_seen_here(how, ringverify):
    """Name and place come back all the same."""
    found = describe(written(HARMLESS[how]))
    assert found.name == "it"
    assert found.function.file == str(Path("it.py").resolve())


def test_nothing_of_a_target_is_imported_here(ringverify):
    """Not even for the message to somebody who named a file alone, or mistyped what is in it."""
    before, path = set(sys.modules), list(sys.path)
    assert describe(written()).name == "it"
    for mistyped in ("it.py", "it.py:atend", "it", "it:atend"):
        with pytest.raises(UsageError, match="attend"):
            describe(mistyped)
    assert not [name for name in set(sys.modules) - before if name.rpartition(".")[2] == "it"]
    assert sys.path == path


def test_an_import_that_never_ends_is_inconclusive_and_the_next_target_is_checked(ringverify):
    """With the place where it was; the time for it is not that of a case."""
    target = written("import time", "time.sleep(100)")
    few = ("--only", "forward", "--max-examples", "2")
    outcome = ringverify.check(target, miniature("right:attend"), *few, "--load-deadline", "3")
    assert outcome.code == INCONCLUSIVE
    first, second = outcome.told("implementation")
    assert (first["implementation"], first["verdict"]) == (target, "inconclusive")
    assert second["verdict"] == "conformant"
    (why,) = outcome.told("property", implementation=target)
    assert "within 3 s: at it.py:2 in <module>; allow more with --load-deadline" in why["reason"]


def test_the_next_process_is_started_where_an_import_has_just_killed_what_starts_them(ringverify, monkeypatch):
    """For a moment the fork server is gone, and nobody has noticed."""
    start, refused = forkserver.connect_to_new_process, [ConnectionRefusedError("nobody there")]

    def connect(files):
        if refused:
            raise refused.pop()
        return start(files)

    monkeypatch.setattr(forkserver, "connect_to_new_process", connect)
    assert describe(written()).name == "it"
    assert not refused


def test_two_names_of_one_function_are_one_implementation(ringverify):
    """However they are written."""
    written()
    outcome = ringverify("check", "it.py:attend", "./it.py:attend")
    assert outcome.code == USAGE
    assert_one_line(outcome.err, ["the implementation 'it' is named twice"])


SHARDINGS = """
import os, time
from ringverify import implementation
from ringverify.ring.declared import ring

def turned(length, ranks):
    return [range(length)[rank::ranks] for rank in reversed(range(ranks))]

def raises(length, ranks):
    raise RuntimeError("not today")

def exits(length, ranks):
    os._exit(0)

def half(length, ranks):
    return [[0]] * ranks

@implementation(sharding=("contiguous", turned, raises, exits, half))
def attend(q, k, v, call):
    return q
"""


def test_a_sharding_function_is_called_elsewhere(ringverify):
    """What it returns is what it would have returned here; what it does instead is said."""
    Path("sharded.py").write_text(SHARDINGS)
    capabilities = describe("sharded.py:attend").capabilities
    first, *others = capabilities.shardings
    assert first == "contiguous"
    turned, raises, exits, half = (capabilities.sharding_named(name) for name in ("turned", "raises", "exits", "half"))
    assert others == [turned, raises, exits, half]
    assert turned(5, 2) == [[1, 3], [0, 2, 4]]
    with pytest.raises(ValueError, match=r"called with \(4, 2\), raised RuntimeError: not today"):
        raises(4, 2)
    with pytest.raises(ValueError, match=r"ends its process \(exit code 0\)"):
        exits(4, 2)
    assert half(4, 2) == [[0], [0]]
    assert turned(2, 1) == [[0, 1]]


def test_a_name_that_is_no_text_is_refused(ringverify):
    """Nothing that is not looked at comes back."""
    Path("odd.py").write_text(
        "from ringverify.implementation import Capabilities, Implementation\n"
        "attend = Implementation(lambda q, k, v, call: q, 3, Capabilities())\n"
    )
    with pytest.raises(UsageError, match="its name is 3"):
        describe("odd.py:attend")


def test_a_process_that_cannot_be_started_is_inconclusive(ringverify, monkeypatch):
    """It says nothing about the target."""

    def refused(*arguments):
        raise OSError("no more processes")

    monkeypatch.setattr("ringverify.worlds.processes.rank.LocalRank.__init__", refused)
    with pytest.raises(Inconclusive, match=r"could not be inspected.*no more processes"):
        describe(written())


def test_what_is_built_in_and_lacks_its_package_is_known_with_the_reason(tmp_path_factory, monkeypatch):
    """What is ours lacks nothing."""
    another_version_of("yunchang", tmp_path_factory.mktemp("path"), monkeypatch)
    (reason,) = lacking(("ring", "peer:yunchang-ring", "allgather")).values()
    assert reason.startswith("peer:yunchang-ring cannot be checked here: ")
    assert "found 0.0.0" in reason


def test_a_sharding_that_is_no_partition_is_a_violation(ringverify):
    """What is declared is wrong; that the judge cannot use it either is no error of ours."""
    Path("sharded.py").write_text(SHARDINGS.replace('("contiguous", turned, raises, exits, half)', "half"))
    outcome = ringverify.check("sharded.py:attend", "--only", "forward", "--max-examples", "1")
    assert outcome.code == VIOLATIONS
    (shown,) = outcome.told("counterexample")
    assert "is not a partition" in shown["summary"]
    assert "ringverify itself" not in outcome.out
