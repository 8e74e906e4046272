"""Broken on purpose: a plain ring with one step replaced, by every bug that was reported of real ones; and, beside
them, correct rings that look wrong.

`plain` is the ring, made of named steps; a file a letter of the field's reports holds its mutants, `operators` those
that no report tells of, `variants` what the suite must not reject; `catalogue` lists them all. Nothing here comes from
`ringverify.ring` or from the oracle: the problem and the sharding are all that is shared.
"""
