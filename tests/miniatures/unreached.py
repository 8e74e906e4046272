"""Declares more than a few examples reach."""

from right import attention

from ringverify import AttentionCall, implementation


@implementation(name="unreached", dtypes=("float32", "bfloat16"), softcap=True, window=True, world_sizes=(1, 2))
def attend(q, k, v, call: AttentionCall):
    """Right as long as nobody asks for a window or a softcap."""
    if call.window is not None or call.softcap is not None:
        raise NotImplementedError("not yet")
    return attention(q.float(), k.float(), v.float(), call).to(q.dtype)
