"""The distributed ring: sequence-parallel attention over a process group, a product in its own right.

`ringverify.ring.attention.ring_attention` is the function to call, `ringverify.ring.module.RingAttention` the same as a
module, `ringverify.ring.shards` cuts tensors and puts them together again. `ringverify.ring.declared` shows the suite
what both methods, `ring` and `allgather`, declare.

From a call to a result: `runs` writes the positions of every rank as progressions, `regions` turns the pattern into
rectangles with a band, `joining` makes few of many, `tiles` cuts them for a kernel, `schedule` says which block travels
where, and `plan` keeps all that. `passes` moves blocks and gradients by `transport`, `compute` does the work on one
block with one of `kernels`, and `accumulate` merges what they return. The problem and the sharding come from `ringref`;
the pattern is written here a second time, because what is shared with the oracle could not be caught by it.

Two promises about communication. Which messages are sent depends on the problem, the sharding and the world size
alone: never on values, timing, or which inputs require a gradient on a rank. And sums are formed in an order fixed by
rank, so that the same inputs give the same bits on any schedule.
"""
