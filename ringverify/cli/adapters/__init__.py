"""What `ringverify init` writes, a file a kind: adapters that pass as they are, to be filled in."""
