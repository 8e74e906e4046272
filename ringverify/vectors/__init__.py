"""Golden vectors: problems with their inputs and right answers as files, for implementations in any language."""
