"""`ringverify bench`: speed and memory of our ring beside everything it can be compared with, in one run.

`workload` says what is computed, and `sides` lists the contenders that compute it, each called a side. `visiting` is
what a process does when it is its side's turn; `plain` and `floor` are the two sides that a ring is compared with.
`timing` runs the sides in turn, round by round, and forms ratios; `phases` divides the time of one pass; `memory`
predicts and measures peaks; `cuda` holds the rows that need a device. `run` puts all that into one report, plain JSON
values, and `table`, `markdown` and `plots` show it.
"""
