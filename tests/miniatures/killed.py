"""An implementation whose process is killed, as by a machine that is out of memory."""

import os
import signal

from right import attention

from ringverify import AttentionCall, implementation


@implementation(name="is killed on one rank", world_sizes=(2,))
def attend(q, k, v, call: AttentionCall):
    """The last rank does not return."""
    if call.rank == call.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return attention(q, k, v, call)
