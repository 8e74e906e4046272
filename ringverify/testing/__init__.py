"""The suite in a user's own tests: as items of pytest, as a decorator, as one call."""
