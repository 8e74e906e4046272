"""Right merges, in the ways in which people write them, are never accused."""

import pytest
from merges import RIGHT, violated

from ringverify.merging.properties import PROPERTIES

TRIED = {name for merge in RIGHT for name, one in PROPERTIES.items() if one.lacks(merge.capabilities) is None}


@pytest.mark.parametrize("merge", RIGHT, ids=lambda merge: merge.name)
def test_a_right_merge_is_not_accused(merge):
    """A few examples of each property; every property is one of some merge here."""
    assert [(one.id, found.violation) for one, found in violated(merge, examples=10)] == []
    assert set(PROPERTIES) == TRIED


@pytest.mark.nightly
@pytest.mark.parametrize("merge", RIGHT, ids=lambda merge: merge.name)
def test_a_right_merge_is_not_accused_in_two_thousand_examples(merge):
    """With another seed."""
    assert [(one.id, found.violation) for one, found in violated(merge, examples=250, seed=1)] == []
