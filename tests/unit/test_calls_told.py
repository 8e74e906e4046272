"""How a function has to be called in order to fail is said in the fewest words that hold of all calls."""

import pytest

from ringverify.diagnosis.when.calls import WAYS, how_it_is_called

PLANTED = {
    "torch.no_grad or torch.inference_mode": lambda mode, some: not some,
    "torch.no_grad": lambda mode, some: mode == "no_grad",
    "torch.inference_mode": lambda mode, some: mode == "inference_mode",
    "k that requires no gradient": lambda mode, some: bool(some) and "k" not in some,
    "q that requires no gradient, whether or not others do": lambda mode, some: "q" not in some,
    "an input that requires no gradient": lambda mode, some: len(some) in (1, 2),
    "a call that is no training step": lambda mode, some: some != "qkv",
    "v that requires a gradient, and k that requires none": lambda mode, some: "v" in some and "k" not in some,
    "a call where only q and v require gradients": lambda mode, some: some == "qv",
    "a call where only k requires gradients": lambda mode, some: some == "k",
}


@pytest.mark.parametrize("words", PLANTED)
def test_calls_that_fail_are_told(words):
    """Each by its own words."""
    assert how_it_is_called(PLANTED[words]) == words


def test_a_gradient_that_is_not_asked_for_tells_nothing():
    """dv is wrong where k is frozen: of calls that ask for no dv, nothing is known."""
    found = how_it_is_called(lambda mode, some: "k" not in some if "v" in some else None)
    assert found == "k that requires no gradient"


def test_calls_without_common_words_are_not_told():
    """Two that have nothing in common which others lack."""
    assert how_it_is_called(lambda mode, some: (mode, some) in (WAYS[0], WAYS[3])) is None
