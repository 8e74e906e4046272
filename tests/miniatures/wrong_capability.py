"""A capability that there is not."""

from ringverify import implementation


@implementation(shard="zigzag")
def attend(q, k, v, call):
    """`sharding` is meant."""
    return q
