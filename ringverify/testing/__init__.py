"""The suite in somebody's own tests: as items of pytest, as a decorator, as one call."""
