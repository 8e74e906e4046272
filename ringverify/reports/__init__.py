"""Presenters of a run: terminal, JSON lines, page, JUnit, Markdown, badges. They see its events and nothing else."""
