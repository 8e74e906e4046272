"""Violations of a report, shown once more by scripts that have nothing of the suite."""
