"""What a search finds of one property of an implementation."""

import pytest

from ringverify.cases.running import Runner
from ringverify.check import accounting
from ringverify.check.hunting import hunt
from ringverify.errors import Inconclusive
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import load
from ringverify.worlds.simulated import SimulatedWorld

EXPLAINING = {"when_it_fails": None, "explained": None, "would_pass": None, "suggested": None, "beside": []}
"""The steps that explain a violation, by name, and what each returns that finds nothing."""


def unexplained(patch):
    """Violations are shrunk and run afresh, but not explained: that has its own tests, and takes half of the time."""
    for name, nothing in EXPLAINING.items():
        patch.setattr(accounting, name, lambda *_, nothing=nothing, **__: nothing)


def hunted(attend, property, examples=20, *, seed=0, explain=False, world=None, target=None):
    """The outcome of a search on so many examples, in a simulated world unless another one is given."""
    runner = Runner(attend, SimulatedWorld() if world is None else world, target=target)
    with pytest.MonkeyPatch.context() as patch:
        if not explain:
            unexplained(patch)
        return hunt(PROPERTIES[property], runner, examples=examples, seed=seed, progress=lambda done: None)


def loaded(target):
    """The adapter of a package, or skipped with the line that says why it cannot be used here."""
    try:
        return load(target)
    except Inconclusive as error:
        pytest.skip(str(error))
