"""From positions to work: rectangles that attend, tiles, and which keys and values move on which hop."""
