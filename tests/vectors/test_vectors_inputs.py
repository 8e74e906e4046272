"""Inputs of vectors: the named generator, values that every dtype holds as they are, families that do what they say."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ringref.problem import DTYPES, Problem
from ringverify.cases.inputs import Inputs
from ringverify.cases.tensorfile import Tensor, decode, encode
from ringverify.vectors import making
from ringverify.vectors.catalogue import STORIES
from ringverify.vectors.inputs import SIGNIFICANT, bell, make, splitmix64
from ringverify.vectors.making import upwards


def test_the_generator_is_splitmix64() -> None:
    """The numbers that others publish for this seed."""
    assert splitmix64(1234567, 5).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_the_generator_is_ten_operations_on_whole_numbers() -> None:
    """Written once more, with Python's own integers."""

    def one(seed: int, n: int) -> int:
        z = (seed + n * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    for seed in (0, 8, 2**64 - 1):
        assert splitmix64(seed, 50).tolist() == [one(seed, n) for n in range(1, 51)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_fill_the_dtype_and_are_no_wider(dtype: str) -> None:
    """Mean 0, variance 1, and the last bit of the significand in use."""
    bits = SIGNIFICANT[dtype]
    values = bell(3, (4000,), bits)
    assert abs(values.mean()) < 0.05
    assert abs(values.var() - 1) < 0.1
    assert np.abs(values).max() <= 3
    whole = np.ldexp(values, bits - 2)
    assert (whole == np.round(whole)).all()
    assert (whole % 2 == 1).any()
    decoded, _ = decode(encode({"x": Tensor(values, dtype)}, {}))
    np.testing.assert_array_equal(decoded["x"].values, values)


def arrays(inputs: Inputs) -> tuple[np.ndarray, ...]:
    """q, k, v, dout, dlse, and sinks if there are any."""
    made = (getattr(inputs, field.name) for field in dataclasses.fields(inputs))
    return tuple(values for values in made if values is not None)


def test_inputs_are_read_only_and_zero_where_there_is_no_cotangent() -> None:
    """Of every vector."""
    for story in STORIES.values():
        inputs = make(story)
        assert not any(values.flags.writeable for values in arrays(inputs)), story.id
        assert (inputs.dlse != 0).any() == (story.cotangent != "out" and inputs.dlse.size > 0), story.id
        assert (inputs.dout != 0).any() == (story.cotangent != "lse" and inputs.dout.size > 0), story.id


def test_no_two_vectors_share_numbers() -> None:
    """Streams are apart, between vectors and between the tensors of one."""
    seen: set[float] = set()
    for story in STORIES.values():
        if story.values == "bell" and story.problem.dtype in ("float32", "float64"):
            for values in arrays(make(story))[:3]:
                numbers = set(np.abs(values.ravel()[:8]).tolist())
                assert not numbers & seen, story.id
                seen |= numbers
    assert len(seen) > 1000


def test_selectors_need_room() -> None:
    """A dimension for each key."""
    story = STORIES["V123"]
    with pytest.raises(ValueError, match="V123: selectors need head_dim >= key_length"):
        make(dataclasses.replace(story, problem=Problem(query_length=9, head_dim=8)))


def test_selected_values_come_out_as_they_are() -> None:
    """In every exact vector: out is made of the values, dv of whole numbers, and nothing is allowed to differ."""
    for story in (story for story in STORIES.values() if story.exact):
        tensors = making.make(story)
        values = set(tensors["v"].values.ravel())
        assert set(tensors["out"].values.ravel()) <= values | {0.0}, story.id
        assert (tensors["dv"].values == np.round(tensors["dv"].values)).all(), story.id
        assert (tensors["dv"].values != 0).any(), story.id
        for name in ("out", "dv"):
            assert (tensors[f"allowed.accumulates.{name}"].values == 0).all()


def test_allowed_errors_are_rounded_up() -> None:
    """To eight bits, and never down."""
    values = np.array([0.0, 1.0, 1.0 + 2**-30, 1e-300, 3e-40, np.pi, 60000.0])
    rounded = upwards(values)
    assert (rounded >= values).all()
    assert rounded[0] == 0
    assert rounded[1] == 1
    assert rounded[2] == 1 + 2**-7
    assert (rounded[4:] <= values[4:] * (1 + 2**-7) + 2.0**-133).all()
    for number in (np.inf, np.nan, 1e300):
        with pytest.raises(ValueError, match="not finite"):
            upwards(np.array([number]))


@pytest.mark.parametrize(("dtype", "value"), [("bfloat16", 1 + 2**-9), ("float16", 1e6), ("float32", 1 + 2**-40)])
def test_a_value_that_its_dtype_does_not_hold_is_not_stored(dtype: str, value: float) -> None:
    """Rather than rounded in silence."""
    with pytest.raises(ValueError, match=f"x has values that {dtype} does not represent"), np.errstate(over="ignore"):
        encode({"x": Tensor(np.array([value]), dtype)}, {})
