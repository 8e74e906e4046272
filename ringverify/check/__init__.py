"""One run of the suite: implementations, properties and cases in, events out."""
