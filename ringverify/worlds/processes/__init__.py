"""Ranks that are processes: over gloo, over NCCL, under torchrun; and the simulated world in a process of its own."""
