"""The ladder: attention computed four times, each way adding one idea to the way before.

    naive             every score at once
    blockwise         keys a block at a time, in two passes: first the log-sum-exp, then the sum it normalises
    online_softmax    one pass over tiles of queries and keys, with a running maximum, sum and output
    sequential_ring   the keys and values travel round a ring of virtual ranks that each own some of them

Every rung has the same two verbs, computes in the dtype of its inputs (float32 or float64), supposes that they are
finite, and is tested against the rung below it; the lowest is tested against the oracle, with which it shares the
multiplicity and no formula. `python -m ringref.ladder` shows them side by side.
"""
