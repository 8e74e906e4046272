"""The processes of a session, as the kernel has them."""

import time
from pathlib import Path


def session(number):
    """Processes of a session that are not zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the command's name, which may hold spaces: state, parent, process group, session.
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_session) == number and state != "Z":
            found.append(int(stat.parent.name))
    return found


def assert_nobody_is_left(process):
    """A process was started in a session of its own; what it started ends within seconds of it."""
    until = time.monotonic() + 20
    while session(process.pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert session(process.pid) == []
