"""Problems: what is refused and in which words, what the defaults mean, and the way to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from drawing import problems
from hypothesis import given

from ringref import Dilation, Problem
from ringref.problem import DTYPES

DILATION = Dilation(((4, 2),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch": 0}, "batch=0: expected an integer of at least 1"),
        ({"batch": True}, "batch=True: expected an integer of at least 1"),
        ({"query_length": -1}, "query_length=-1: expected an integer of at least 0"),
        ({"query_length": 2.0}, "query_length=2.0: expected an integer of at least 0"),
        ({"query_length": "4"}, "query_length='4': expected an integer of at least 0"),
        ({"key_length": -2}, "key_length=-2: expected an integer of at least 0"),
        ({"heads": 0}, "heads=0: expected an integer of at least 1"),
        ({"key_heads": 0}, "key_heads=0: expected an integer of at least 1"),
        ({"head_dim": 0}, "head_dim=0: expected an integer of at least 1"),
        ({"value_dim": 0}, "value_dim=0: expected an integer of at least 1"),
        (
            {"heads": 4, "key_heads": 3},
            "heads=4, key_heads=3: key_heads must divide heads (grouped-query attention)",
        ),
        ({"dtype": "int8"}, "dtype='int8': expected one of float64, float32, bfloat16, float16"),
        ({"causal": 1}, "causal=1: expected True or False"),
        ({"window": 3}, "window=3: expected (left, right), each an integer of at least 0 or None"),
        ({"window": (1, 2, 3)}, "window=(1, 2, 3): expected (left, right), each an integer of at least 0 or None"),
        (
            {"window": (-1, 0)},
            "window=(-1, 0): each side is an integer of at least 0, both ends inclusive; None (not -1) is unbounded",
        ),
        ({"window": (True, 0)}, "window=(True, 0): each side is an integer of at least 0"),
        ({"window": (1.0, 0)}, "window=(1.0, 0): each side is an integer of at least 0"),
        ({"documents": ()}, "documents=(): expected cumulative lengths such as (0, 3, 7)"),
        ({"documents": 4}, "documents=4: expected cumulative lengths such as (0, 3, 7)"),
        (
            {"documents": (0, 3, 2)},
            "documents=(0, 3, 2): expected non-decreasing cumulative lengths of at most 4, the sequence length",
        ),
        (
            {"documents": (0, 5)},
            "documents=(0, 5): expected non-decreasing cumulative lengths of at most 4, the sequence length",
        ),
        ({"documents": (-1, 4)}, "documents entry=-1: expected an integer of at least 0"),
        (
            {"documents": (0, 4), "key_length": 6},
            "documents with query_length=4 and key_length=6 has no agreed meaning: one list of cumulative lengths "
            "cannot cut two sequences; use equal lengths",
        ),
        ({"key_lengths": (1, 2)}, "key_lengths=(1, 2): expected one length for each of 1 batch elements"),
        ({"key_lengths": 3}, "key_lengths=3: expected one length for each of 1 batch elements"),
        ({"key_lengths": (5,)}, "key_lengths=(5,): expected lengths of at most key_length=4"),
        ({"key_lengths": (-1,)}, "key_lengths entry=-1: expected an integer of at least 0"),
        ({"dilation": ((4, 2),)}, "dilation=((4, 2),): expected ringref.Dilation(branches=((w, r), ...))"),
        (
            {"dilation": DILATION, "documents": (0, 4)},
            "dilation with documents has no agreed meaning: segments could start at the document or at the sequence; "
            "leave one of them out",
        ),
        (
            {"dilation": DILATION, "key_length": 6},
            "dilation with query_length=4 and key_length=6 has no agreed meaning: segments of queries and keys would "
            "not line up; use equal lengths",
        ),
        ({"scale": math.inf}, "scale=inf: expected a finite number"),
        ({"scale": "1"}, "scale='1': expected a finite number"),
        ({"scale": True}, "scale=True: expected a finite number"),
        ({"softcap": math.nan}, "softcap=nan: expected a finite number"),
        ({"softcap": 0}, "softcap=0.0: expected a positive number, or None for no softcap"),
        ({"softcap": -1.0}, "softcap=-1.0: expected a positive number, or None for no softcap"),
    ],
    ids=str,
)
def test_a_problem_without_meaning_is_refused_and_the_message_says_which_value(
    fields: dict[str, Any], message: str
) -> None:
    """On construction, on `replace` and, where JSON can say it, on `from_json`."""
    values = {"query_length": 4, **fields}
    with pytest.raises(ValueError, match=re.escape(message)):
        Problem(**values)
    with pytest.raises(ValueError, match=re.escape(message)):
        Problem(query_length=4).replace(**values)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"branches": ()}, "dilation branches=(): expected at least one (segment_length, dilation_rate)"),
        ({"branches": "42"}, "dilation branches='42': expected at least one (segment_length, dilation_rate)"),
        ({"branches": 4}, "dilation branches=4: expected at least one (segment_length, dilation_rate)"),
        ({"branches": (4, 2)}, "dilation branch 4: expected a pair (segment_length, dilation_rate)"),
        ({"branches": ((4,),)}, "dilation branch (4,): expected a pair (segment_length, dilation_rate)"),
        ({"branches": ((0, 1),)}, "segment_length=0: expected an integer of at least 1"),
        ({"branches": ((4, 0),)}, "dilation_rate=0: expected an integer of at least 1"),
        ({"branches": ((4, 1.5),)}, "dilation_rate=1.5: expected an integer of at least 1"),
        ({"branches": ((4, 2),), "heads": "each"}, "dilation heads='each': expected one of split, shared"),
        (
            {"branches": ((4, 2),), "heads": "shared", "head_offset": "random"},
            "dilation head_offset='random': expected one of cyclic, block",
        ),
        (
            {"branches": ((4, 2),), "head_offset": "block"},
            "dilation head_offset='block' has no meaning with heads=\"split\", where the offset is that of the "
            'branch; use heads="shared" or leave head_offset out',
        ),
    ],
    ids=str,
)
def test_a_dilation_without_meaning_is_refused(arguments: dict[str, Any], message: str) -> None:
    """The message names the value and what was expected."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Dilation(**arguments)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "problem=[]: expected an object"),
        ({"heads": 2}, "a problem needs query_length"),
        ({"query_length": 4, "sequence": 4}, "unknown field 'sequence' of a problem; known: batch, causal, "),
        ({"query_length": None}, "query_length=None: expected an integer of at least 0"),
        ({"query_length": 4, "dilation": [[4, 2]]}, "dilation=[[4, 2]]: expected an object with branches, heads"),
        (
            {"query_length": 4, "dilation": {"branches": [[4, 2]], "rate": 2}},
            "expected an object with branches, heads, head_offset",
        ),
        ({"query_length": 4, "dilation": {}}, "dilation branches=(): expected at least one"),
        ({"query_length": 4, "window": [1]}, "window=(1,): expected (left, right)"),
    ],
    ids=str,
)
def test_json_that_is_no_problem_is_refused(data: Any, message: str) -> None:
    """An edited or foreign file gets a sentence, not a traceback out of a constructor."""
    with pytest.raises(ValueError, match=re.escape(message)):
        Problem.from_json(data)


@given(problem=problems())
def test_a_problem_survives_the_way_to_json_and_back(problem: Problem) -> None:
    """Equal, equally hashed, through real JSON text."""
    back = Problem.from_json(json.loads(json.dumps(problem.to_json())))
    assert back == problem
    assert hash(back) == hash(problem)


def test_json_leaves_out_what_is_at_its_default_and_says_the_rest_in_plain_values() -> None:
    """What a reader of a saved case sees."""
    assert Problem(query_length=4).to_json() == {"query_length": 4}
    problem = Problem(query_length=4, window=(None, 2), key_lengths=(3,), dilation=DILATION, scale=1)
    assert problem.to_json() == {
        "query_length": 4,
        "window": [None, 2],
        "key_lengths": [3],
        "dilation": {"branches": [[4, 2]], "heads": "split", "head_offset": "cyclic"},
        "scale": 1.0,
    }


def test_what_is_left_out_follows_from_what_is_given() -> None:
    """key_length from query_length, key_heads from heads, value_dim from head_dim, scale from head_dim."""
    plain = Problem(query_length=6, heads=4, head_dim=16)
    assert (plain.nq, plain.nk, plain.hk, plain.dv) == (6, 6, 4, 16)
    assert (plain.group_size, plain.scale_value, plain.diagonal) == (1, 0.25, 0)
    full = plain.replace(key_length=9, key_heads=2, value_dim=3, scale=-2)
    assert (full.nq, full.nk, full.hk, full.dv) == (6, 9, 2, 3)
    assert (full.group_size, full.scale_value, full.diagonal) == (2, -2.0, 3)
    assert [plain.replace(dtype=dtype).lse_dtype for dtype in DTYPES] == ["float64", *["float32"] * 3]


def test_numbers_of_other_kinds_become_python_numbers() -> None:
    """numpy integers and lists are welcome; what is stored is hashable and goes to JSON."""
    problem = Problem(
        batch=np.int64(1),
        query_length=np.int32(4),
        documents=[np.int64(0), np.int64(4)],
        key_lengths=[4],
        window=[1, None],
        scale=1,
    )
    assert (problem.documents, problem.key_lengths, problem.window, problem.scale) == ((0, 4), (4,), (1, None), 1.0)
    assert json.loads(json.dumps(problem.to_json()))["documents"] == [0, 4]
    assert Dilation([[4, 2]]).branches == ((4, 2),)
    hash(problem)


def test_a_problem_cannot_be_changed_in_place() -> None:
    """It is a value: a changed one is another, validated again."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        Problem(query_length=4).query_length = 5


def test_arrays_tensors_and_numpy_numbers_are_taken_as_what_they_hold():
    """Cumulative lengths come as int32 tensors in practice; the problem keeps plain integers, which JSON has."""
    problem = Problem(
        batch=2,
        query_length=np.int64(6),
        documents=torch.tensor([0, 2, 6], dtype=torch.int32),
        key_lengths=np.array([6, 3]),
        window=(np.int64(2), None),
        scale=np.float32(0.5),
        softcap=torch.tensor(2.0),
    )
    plain = Problem(
        batch=2, query_length=6, documents=(0, 2, 6), key_lengths=(6, 3), window=(2, None), scale=0.5, softcap=2.0
    )
    assert problem == plain
    assert json.dumps(problem.to_json()) == json.dumps(plain.to_json())
