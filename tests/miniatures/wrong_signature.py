"""A function that cannot be called as `attend(q, k, v, call)`."""

from ringverify import implementation


@implementation()
def attend(q, k):
    """Two arguments where four are handed over."""
    return q
