"""Sizes that a message names are told for what they are in every case that fails with it."""

import dataclasses

import pytest

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import shards
from ringverify.diagnosis.sizes import FEWEST, SizedError, of_sizes
from ringverify.faults.ring import EVERYTHING
from ringverify.worlds.foreign_text import sizes_in

LENGTHS = (5, 6, 7, 9, 10, 11)


def raised(message, lengths=LENGTHS, sharding="zigzag", rank=1):
    """Exceptions on three ranks, with what a message says of the numbers of keys that ranks hold."""
    found = []
    for heads, n in enumerate(lengths, 1):
        problem = Problem(query_length=n, heads=heads, head_dim=2)
        case = Case(problem=problem, sharding=sharding, world_size=3)
        held = [len(rows) for rows in shards(case, EVERYTHING)[1]]
        found.append(SizedError(case, rank, *sizes_in(message(held, rank, heads))))
    return found


def against(held, rank, heads):
    """Rank 0's number of tokens, which is expected, and the rank's own."""
    return f"{held[0]} against {held[rank]}"


@pytest.mark.parametrize(
    ("expected", "there", "told"),
    [
        (lambda held, rank: held[0], lambda held, rank: held[rank], "rank 0's number of tokens"),
        (lambda held, rank: sum(held[:2]), lambda held, rank: held[rank], "the number of tokens of two neighbours"),
        (lambda held, rank: sum(held[:2]) // 2, lambda held, rank: held[rank],
         "half of the number of tokens of two neighbours"),
    ],
)  # fmt: skip
def test_two_sizes_are_told_by_what_they_are(expected, there, told):
    """Of the rank that raises, of others, and of several together."""

    def message(held, rank, heads):
        return f"target [1, {expected(held, rank)}, {heads}] of float32 has size {there(held, rank)} at dimension 1"

    seen = raised(message, lengths=(7, 8, 10, 11, 5, 13))
    said = of_sizes(seen, EVERYTHING)
    held = [len(rows) for rows in shards(seen[0].case, EVERYTHING)[1]]
    assert said.startswith(f"of the sizes in its message, {expected(held, 1)} is ")
    assert told in said
    assert said.endswith(f", and {held[1]} is the rank's own number of tokens")


def test_sizes_are_told_of_the_message_that_names_them():
    """The smallest case may be told in another one."""
    seen = raised(against)
    first = raised(lambda held, rank, heads: f"no shape {heads}", lengths=(3,))
    said = of_sizes(first + seen, EVERYTHING)
    assert said.startswith("of the sizes in its message on 3 ranks with n=5, 1 is rank 0's number of tokens")


def test_sizes_that_any_tensor_has_are_no_news():
    """Heads vary too, and mean nothing."""
    assert of_sizes(raised(lambda held, rank, heads: f"size {heads} against {held[rank]}"), EVERYTHING) is None


def test_nothing_is_said_of_few_cases_or_of_sizes_that_mean_nothing():
    """A single other case, and a number that is that of a rank in most cases, but not in all."""
    assert of_sizes(raised(against), EVERYTHING) is not None
    assert of_sizes(raised(against)[: FEWEST - 1], EVERYTHING) is None
    odd = raised(against)
    odd[-1] = dataclasses.replace(odd[-1], sizes=(17, 1))
    assert of_sizes(odd, EVERYTHING) is None


def test_messages_in_other_words_do_not_count():
    """They are of another mistake."""
    other = raised(lambda held, rank, heads: "index 1 is out of bounds")
    assert of_sizes(raised(against) + other, EVERYTHING) == of_sizes(raised(against), EVERYTHING) is not None
    assert of_sizes(other, EVERYTHING) is None
