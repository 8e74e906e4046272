"""The files that `ringverify init` writes, one for each kind: adapters that pass as they are, to be filled in."""
