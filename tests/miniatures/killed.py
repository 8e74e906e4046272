"""An implementation whose process is killed, as by a machine that is out of memory."""

import os
import signal
import sys
import threading
import time

from right import attention

from ringverify import AttentionCall, implementation


@implementation(name="is killed on one rank", world_sizes=(2,))
def attend(q, k, v, call: AttentionCall):
    """The last rank does not return."""
    if call.rank == call.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attention(q, k, v, call)


def _end_while_keys_are_verified():
    """Kill this process once some thread of it holds dk and dv to the oracle."""
    while True:
        for frame in sys._current_frames().values():
            while frame is not None:
                if frame.f_code.co_name == "_check_keys":
                    os.kill(os.getpid(), signal.SIGKILL)
                frame = frame.f_back
        time.sleep(0.001)


@implementation(name="is killed after it returned", world_sizes=(2,), causal="always")
def later(q, k, v, call: AttentionCall):
    """The last rank's process ends while its results are verified."""
    if call.rank == call.world_size - 1:
        threading.Thread(target=_end_while_keys_are_verified, daemon=True).start()
    return attention(q, k, v, call)
