"""Workers to fill in, as `ringverify worker --write` writes them: they need neither ringverify nor torch."""
