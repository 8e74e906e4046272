"""An ordinary test of this project, which knows nothing of RingVerify."""

import acme


def test_the_package_says_what_it_is_for():
    """In a sentence."""
    assert acme.__doc__.endswith(".")
