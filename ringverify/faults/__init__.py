"""Broken on purpose: a plain ring with one step replaced, by every bug that was reported of real ones, and more.

`ring` is the plain ring, made of named steps; `fault` says what a fault is. A file a theme holds the faults, `reports`
where they were seen, `catalogue` lists them all. Nothing here comes from `ringverify.ring` or from the oracle: the
problem and the sharding are all that is shared.
"""
