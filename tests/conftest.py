"""What every test runs under: shapes checked at run time, examples that repeat, one thread."""

import signal
from pathlib import Path

import hypothesis
import torch
from jaxtyping import install_import_hook

# Only the modules whose signatures carry shapes: those that validate at the door must reach their own messages.
install_import_hook(
    ["ringref.attention", "ringref.attention_decimal", "ringref.attention_loops", "ringref.pattern", "ringref.ladder"],
    "beartype.beartype",
)

hypothesis.settings.register_profile("ci", derandomize=True, deadline=None)
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

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell's job in the background ignores Ctrl-C, and so would every process that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
