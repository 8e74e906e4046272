"""Right merges, in the ways in which people write them, are never accused."""

import pytest
from merges import RIGHT, violated

from ringverify.errors import Inconclusive
from ringverify.merging.properties import PROPERTIES
from ringverify.targets import MERGES, load_merge

TRIED = {name for merge in RIGHT for name, one in PROPERTIES.items() if one.lacks(merge.capabilities) is None}


@pytest.mark.parametrize("merge", RIGHT, ids=lambda merge: merge.name)
def test_a_right_merge_is_not_accused(merge):
    """A few examples of each property; every property is one of some merge here."""
    assert [(one.id, found.violation) for one, found in violated(merge, examples=10)] == []
    assert set(PROPERTIES) == TRIED


@pytest.mark.parametrize("target", MERGES)
def test_merges_that_are_built_in_are_conformant(target):
    """Ours, and the published ones that are installed."""
    try:
        merge = load_merge(target)
    except Inconclusive as error:
        pytest.skip(str(error))
    assert [(one.id, found.violation) for one, found in violated(merge, examples=10)] == []


@pytest.mark.nightly
@pytest.mark.parametrize("merge", RIGHT, ids=lambda merge: merge.name)
def test_a_right_merge_is_not_accused_in_two_thousand_examples(merge):
    """With another seed."""
    assert [(one.id, found.violation) for one, found in violated(merge, examples=250, seed=1)] == []
