"""One run of the suite: judge properties of implementations on cases, and report the results as events."""
