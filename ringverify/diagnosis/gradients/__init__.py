"""Hypotheses of gradients that are wrong after a right forward: sums over pairs in which a part is another."""
