"""Where and how a counterexample is wrong."""
