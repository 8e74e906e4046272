"""The ring of this project, held to what attention is."""

import pytest
from acme import prototype, ring

import ringverify


@ringverify.conformance(ring.attend, world="gloo", world_sizes=[2, 3], only="forward,gradients", max_examples=3)
def test_the_ring_is_attention_between_processes(result):
    """Real ones, on top of what `ringverify_targets` checks among threads."""
    assert result.margin < 1


def test_the_prototype_computes_what_the_ring_does():
    """All that it declares; that it leaves a message behind is known."""
    result = ringverify.run_conformance(prototype.attend, only=["forward", "lse"], max_examples=8)
    assert result.verdict == "conformant"
    assert result.properties["lse"].verdict == "unsupported"


def test_the_prototype_still_leaves_a_message_behind():
    """When it does no longer, known_violations.toml is to be shortened."""
    with pytest.raises(ringverify.ConformanceError, match="a message that nobody received"):
        ringverify.run_conformance(prototype.attend, only="progress", max_examples=8)
