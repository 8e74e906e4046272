"""Attention over a sequence that no single device holds."""
