"""Programs of ranks that leave processes behind, in every place where a process can hide from its process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HIDDEN = {
    "a child": "import time; print(os.getpid(), flush=True); time.sleep(3600)",
    "in a session of its own": "import time; os.setsid(); print(os.getpid(), flush=True); time.sleep(3600)",
    "a daemon": (
        "import time\n"
        "if os.fork(): os._exit(0)\n"
        "os.setsid()\n"
        "if os.fork(): os._exit(0)\n"
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "print(os.getpid(), flush=True); time.sleep(3600)"
    ),
}
"""Scripts that print where they have hidden, and stay there."""


def hides(_: Any) -> list[int]:
    """One of each; their processes."""
    found = []
    for script in HIDDEN.values():
        started = subprocess.Popen([sys.executable, "-S", "-c", f"import os\n{script}"], stdout=subprocess.PIPE)
        assert started.stdout is not None
        found.append(int(started.stdout.readline()))
        started.stdout.close()
    return found


def hides_and_dies(path: str) -> None:
    """The same, and then the rank's process ends."""
    Path(path).write_text(" ".join(map(str, hides(None))))
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGSEGV)
