"""What a declaration of a merge says about itself, and the one line for a bad one."""

import dataclasses
import math
import re
from pathlib import Path

import pytest
import torch
from merges import violated

from ringverify import merge
from ringverify.merge_contract import MergeCapabilities, layout_of
from ringverify.merging.properties import PROPERTIES


def test_a_declared_merge_can_still_be_called():
    """And has a name, its own or the one that it is given."""

    @merge(lse=False)
    def first(out_a, lse_a, out_b, lse_b):
        return out_a

    assert first(1, 2, 3, 4) == 1
    assert first.name.endswith("first")
    assert merge(name="mine")(first.function).name == "mine"


@pytest.mark.parametrize(
    ("out", "lse"), [("bshd", "bhs"), ("bhsd", "bsh1"), ("thd", "th"), ("shd", "ht"), ("hsd", "hs1")]
)
def test_layouts_of_serving_and_of_training_are_taken(out, lse):
    """With a batch and without, with s or t for tokens, with an axis of length 1."""
    assert MergeCapabilities(out_layout=out, lse_layout=lse).out_layout == out
    assert layout_of("tbh1") == ("sbh", True)


@pytest.mark.parametrize(
    ("declared", "words"),
    [
        ({"out_layout": "bhd"}, "out_layout='bhd': expected the order of axes, such as bshd"),
        ({"out_layout": "bshd1"}, "out_layout='bshd1'"),
        ({"lse_layout": "bhsd"}, "lse_layout='bhsd': expected the order of axes, such as bhs"),
        ({"lse_layout": 3}, "lse_layout=3"),
        ({"out_layout": "thd"}, "lse_layout='bhs' contradicts out_layout='thd': one has a batch axis"),
        ({"base": 10}, "base=10: expected one of e, 2"),
        ({"dtypes": "float32"}, "dtypes='float32': expected a tuple"),
        ({"dtypes": ("half",)}, "dtypes contains 'half'"),
        ({"lse_dtype": "float"}, "lse_dtype='float'"),
        ({"empty": 0.0}, "empty=0.0: lse of ordinary partials comes near it"),
        ({"empty": math.nan}, "empty=nan: expected a number"),
        ({"empty": -1e10, "lse_dtype": "float16"}, "contradicts lse_dtype='float16'"),
        ({"in_place": True, "gradients": True}, "in_place=True contradicts gradients=True"),
        ({"in_place": True, "stacked": True}, "in_place=True contradicts stacked=True"),
        ({"in_place": True, "out_dtype": "float32", "dtypes": ("bfloat16",)}, "contradicts out_dtype='float32'"),
        ({"lse": "yes"}, "lse='yes': expected True or False"),
        ({"head_dims": (0,)}, "head_dims contains 0"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(declared, words):
    """In one line that shows the value."""
    with pytest.raises(ValueError, match=re.escape(words)) as told:
        merge(**declared)
    assert "\n" not in str(told.value)


def test_an_unknown_capability_and_a_wrong_signature_are_refused():
    """With the names that there are, and with how it is going to be called."""
    with pytest.raises(TypeError, match="unknown capability 'layout' of a merge; known: out_layout"):
        merge(layout="bshd")
    with pytest.raises(TypeError, match=r"as merge\(out_a, lse_a, out_b, lse_b\).*; merge\(out, lse\) is stacked=True"):
        merge()(lambda out, lse: (out, lse))
    with pytest.raises(TypeError, match=r"as merge\(out, lse\): .*, out_b, lse_b\) is stacked=False"):
        merge(stacked=True)(lambda out_a, lse_a, out_b, lse_b: out_a)
    with pytest.raises(TypeError, match=r"too many positional arguments$"):
        merge()(lambda out: out)


def test_the_page_on_merges_lists_every_capability_and_every_property():
    """In its two tables, each once."""
    page = (Path(__file__).resolve().parent.parent.parent / "docs" / "merge.md").read_text(encoding="utf-8")
    declared, judged = (page.split(head)[1].split("\n\n")[0] for head in ("| capability |", "| property |"))

    def named(table):
        return [
            name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
        ]

    assert sorted(named(declared)) == sorted(field.name for field in dataclasses.fields(MergeCapabilities))
    assert named(judged) == list(PROPERTIES)


@pytest.mark.parametrize(
    ("empty", "said"), [(-math.inf, ("nan", "nan")), (math.inf, ("inf", "nan")), (-1e10, ("0", None))]
)
def test_what_the_page_says_of_published_merges_and_empty_partials_is_so(empty, said):
    """The formula that they share, on a first partial that is empty and on two."""

    @merge(out_layout="thd", lse_layout="th", empty=empty)
    def published(out_a, lse_a, out_b, lse_b):
        w = torch.sigmoid(lse_b - lse_a)[..., None]
        return out_a - w * (out_a - out_b), lse_a - torch.nn.functional.logsigmoid(lse_a - lse_b)

    found = {one.id: search.violation.wrong for one, search in violated(published, only=["empty_partial", "all_empty"])}
    assert f"{found['empty_partial'].actual:g}" == said[0]
    assert ("all_empty" in found) == (said[1] is not None)
