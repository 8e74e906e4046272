"""Ways to make a mask, as functions of the pairs of a case: what an implementation lets through instead."""
