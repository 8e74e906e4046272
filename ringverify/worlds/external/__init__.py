"""The external world: an implementation is a program in an environment of its own, which answers one case at a time."""
