"""The ladder: four implementations of attention, each adding one idea to the one before.

    naive             every score at once
    blockwise         one block of keys at a time, in two passes: first the log-sum-exp, then the sum it normalises
    online_softmax    one pass over tiles of queries and keys, with a running maximum, sum and output
    sequential_ring   the KV blocks travel round a ring of virtual ranks, each of which owns one of them

Every rung has the functions `forward` and `backward`, computes in the dtype of its inputs (float32 or float64), assumes
that they are finite, and is tested against the rung below it. The lowest is tested against the oracle, with which it
shares the multiplicity and no formula. `python -m ringref.ladder` prints their errors side by side.
"""
