"""Adapters of published packages: each declares what its package claims and calls it, the package's code untouched."""
