"""The distributed ring: sequence-parallel attention over a process group, a product in its own right.

`ringverify.ring.ring` holds the functions to call, `ringverify.ring.declared` the same two as implementations that the
suite can check. The problem and the sharding come from `ringref`; masks and attention are written here a second time,
because what is shared with the oracle could not be caught by it.

Two promises about communication. Which messages are sent depends on the problem, the sharding and the world size
alone: never on values, timing, or which inputs require a gradient on a rank. And sums are formed in an order fixed by
rank, so that the same inputs give the same bits on any schedule.
"""
