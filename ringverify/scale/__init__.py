"""Whether an implementation is right at the lengths at which it is used."""
