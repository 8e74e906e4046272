"""Options of several values, as a person gives them: at once or one by one."""

import argparse

import pytest

from ringverify.check.option_table import add_to


@pytest.mark.parametrize(
    ("line", "only"),
    [
        ("", None),
        ("--only forward,lse", ("forward", "lse")),
        ("--only forward --only lse", ("forward", "lse")),
        ("--only forward,lse --only gradients", ("forward", "lse", "gradients")),
    ],
)
def test_an_option_that_is_given_twice_has_the_values_of_both(line, only):
    """The last one does not undo the first."""
    parser = argparse.ArgumentParser()
    add_to(parser)
    assert parser.parse_args(line.split()).only == only
