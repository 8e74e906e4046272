"""`ringverify bench`: speed and memory of our ring beside everything it can be compared with, in one run.

`workload` says what is computed and `sides` who computes it; `visiting` is what a process does when its side's turn
comes, with `plain` and `floor` as the two measures that a ring is held to. `timing` interleaves the sides round by
round and forms ratios, `phases` takes one pass apart, `memory` predicts and measures peaks, `crossover` finds where the
choice between methods should change, `cuda` holds the rows that need a device. `run` puts all that into one report,
plain JSON values, and `table`, `markdown` and `plots` show it.
"""
