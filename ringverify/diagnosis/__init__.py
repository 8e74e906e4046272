"""Where a counterexample is wrong, and which known fault explains its numbers."""
