"""Ranks that are threads of one process and take turns: every order of events can be had, and had again."""

from ringverify.worlds.simulated.world import SimulatedWorld

__all__ = ["SimulatedWorld"]
