"""The package of whoever reads `docs/adapters.md`."""
