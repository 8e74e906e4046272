"""Ranks that are threads of one process and take turns, so that any order of events can be produced and repeated."""

from ringverify.worlds.simulated.world import SimulatedWorld

__all__ = ["SimulatedWorld"]
