"""Reproduce the violations of a report by stand-alone scripts, without the suite."""
