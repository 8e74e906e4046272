"""What every test runs under: shapes checked at run time, examples that repeat, one thread."""

import signal
import threading
import time
from pathlib import Path

import hypothesis
import pytest
import torch
from jaxtyping import install_import_hook
from torch.distributed import distributed_c10d as c10d

from ringverify.worlds.simulated import SimulatedWorld

# Only the modules whose signatures carry shapes: those that validate at the door must reach their own messages.
install_import_hook(
    ["ringref.attention", "ringref.attention_decimal", "ringref.attention_loops", "ringref.pattern", "ringref.ladder"],
    "beartype.beartype",
)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)  # 100 examples, and by night 400
hypothesis.settings.register_profile(
    "nightly",  # --hypothesis-profile nightly: other examples each time; those that fail are kept, and tried first
    derandomize=False,
    deadline=None,
    max_examples=400,
    print_blob=True,
    database=hypothesis.database.DirectoryBasedExampleDatabase(Path.cwd() / ".hypothesis" / "examples"),
)
hypothesis.settings.load_profile("ci")

collect_ignore = ["somebody_elses_project"]
"""Its tests are its owners'; `tests/pytest_plugin/test_somebody_else.py` runs them as they would."""

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _every_thread_of_a_rank_has_ended():
    """The simulated world gives `torch.distributed` back after the first run that no thread of its ranks outlives.

    It has to before the next test begins, for which pytest starts a thread that may, for all it knows, be theirs.
    """
    before, until = c10d._world, time.monotonic() + 10
    yield
    while c10d._world is not before and time.monotonic() < until:
        time.sleep(0.01)
        SimulatedWorld().run(lambda _: None, None, world_size=1, seed=0, deadline=20)
    assert c10d._world is before, f"one of these lives on: {threading.enumerate()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Leaves to the night what a test marked `by_day` does not do by day: the same cases each time."""
    cases = {}
    for item in items:
        mark = item.get_closest_marker("by_day")
        if mark is not None and item.get_closest_marker("nightly") is None:
            cases.setdefault((item.parent, item.originalname, *mark.args), []).append(item)
    for (*_, count), those in cases.items():
        by_day = {number * len(those) // count for number in range(count)}
        for number, item in enumerate(those):
            if number not in by_day:
                item.add_marker(pytest.mark.nightly)


def pytest_terminal_summary(terminalreporter):
    """Says how to run the tests that pyproject.toml leaves to the night, where there are any among those chosen."""
    left = [one for one in terminalreporter.stats.get("deselected", ()) if one.get_closest_marker("nightly")]
    if left and terminalreporter.config.option.markexpr == "not nightly":
        terminalreporter.write_line(f"{len(left)} tests are marked nightly: `-m nightly` runs them, `make nightly` all")


if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell's job in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
