"""What the tests of vectors share."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ringverify.vectors.generating import contents
from ringverify.vectors.inputs import make
from ringverify.vectors.story import Story, written_out

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


@pytest.fixture(scope="session")
def fixtures() -> Path:
    """The committed folder of vectors; nobody writes there."""
    return FIXTURES


@pytest.fixture(scope="session")
def generated() -> dict[str, bytes]:
    """Every file of that folder, made again."""
    from ringverify.vectors.catalogue import STORIES

    return contents(STORIES)


@pytest.fixture(scope="session")
def stands_for() -> Callable[[Story], str]:
    """What the id of a vector stands for, as sixteen hexadecimal digits."""

    def digest(story: Story) -> str:
        inputs = make(story)
        said = hashlib.sha256(json.dumps([written_out(story.problem), story.cotangent], sort_keys=True).encode())
        sinks = () if inputs.sinks is None else (inputs.sinks,)
        for values in (inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, *sinks):
            said.update(values.astype("<f8").tobytes())
        return said.hexdigest()[:16]

    return digest
