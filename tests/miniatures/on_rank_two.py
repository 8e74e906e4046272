"""Right on every rank but the third of four, which goes wrong in three ways: for worlds that several machines make."""

import os

from right import attention

from ringverify import AttentionCall, implementation


@implementation(name="raises on rank 2", world_sizes=(4,))
def raises(q, k, v, call: AttentionCall):
    """While the others wait for it."""
    if call.rank == 2:
        print("rank 2 has something to say")
        raise ValueError("two is too many")
    return attention(q, k, v, call)


@implementation(name="aborts on rank 2", world_sizes=(4,))
def aborts(q, k, v, call: AttentionCall):
    """Takes its process along."""
    if call.rank == 2:
        os.abort()
    return attention(q, k, v, call)


@implementation(name="never ends on rank 2", world_sizes=(4,))
def never_ends(q, k, v, call: AttentionCall):
    """Computes, and computes."""
    while call.rank == 2:
        pass
    return attention(q, k, v, call)
