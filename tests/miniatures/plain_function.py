"""A function that nobody declared an implementation, beside one that is."""

from ringverify import implementation


def attend(q, k, v, call):
    """Not decorated."""
    return q


@implementation()
def decorated(q, k, v, call):
    """Decorated."""
    return q
