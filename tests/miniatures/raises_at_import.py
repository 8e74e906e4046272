"""Raises an error of several lines."""

raise RuntimeError("the first line\nthe second line\nthe third line")
