"""The reference: what sequence-parallel attention has to return, in float64.

The problem is data (`ringref.problem`), which rank holds what is a function (`ringref.sharding`), the pattern is a
multiplicity (`ringref.pattern`), the answer is in closed form (`ringref.attention`). Importing this package imports
neither numpy nor torch; its modules import what they compute with.
"""

from ringref.problem import Dilation, Problem

__all__ = ["Dilation", "Problem"]
