"""Shardings by documents: right ones are not accused, faults are caught, and what is claimed of work is counted."""

from __future__ import annotations

import dataclasses
import itertools
import json

import balanced
import numpy as np
import pytest
from hunts import hunted

from ringref.problem import Problem
from ringverify import balancer, implementation
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.cli.main import main
from ringverify.implementation import Capabilities
from ringverify.properties.catalogue import PROPERTIES
from ringverify.ring.declared import allgather, ring
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(60)

RIGHT = (balanced.right, balanced.right_dealt, balanced.right_backwards, balanced.right_long_first)
FAULTS = (
    balanced.causal_by_index,
    balanced.window_in_shard_order,
    balanced.documents_in_shard_order,
    balanced.pieces_of_the_whole,
    balanced.without_documents,
    balanced.order_within_a_document,
)


def name_of(attend):
    """Its function's name."""
    return attend.function.__name__


@pytest.mark.parametrize("attend", FAULTS, ids=name_of)
def test_a_fault_of_positions_is_caught(attend):
    """Each is right on a single document or without the constraint concerned."""
    found = hunted(attend, "forward", 120).counterexample
    assert found is not None
    assert found.violation.reason == ("value", "out")


@pytest.mark.parametrize("attend", RIGHT, ids=name_of)
@pytest.mark.parametrize("property", ["forward", "gradients", "chunk_boundaries", "exact_selection", "balance"])
@pytest.mark.by_day(7)
def test_a_right_attention_is_not_accused(attend, property):
    """Whatever its balancer does to the order of positions."""
    found = hunted(attend, property, 25)
    assert found.counterexample is None
    assert found.examples >= 15


@pytest.mark.parametrize("attend", [ring, allgather], ids=lambda one: one.name)
@pytest.mark.parametrize("sharding", ["zigzag_documents", balanced.long_first], ids=["ours", "a balancer"])
def test_our_rings_are_right_under_shardings_by_documents(attend, sharding):
    """With gradients, in all declared patterns."""
    declared = dataclasses.replace(attend.capabilities, sharding=sharding)
    found = hunted(dataclasses.replace(attend, capabilities=declared), "gradients", 25)
    assert found.counterexample is None


def test_our_ring_keeps_what_it_claims():
    """Within 1.05 times the mean, and the figure says by how much."""
    found = hunted(ring, "balance", 40)
    assert found.counterexample is None
    assert 0.5 < found.margin <= 1
    (figure,) = PROPERTIES["balance"].figures(ring.capabilities)
    assert figure.startswith("zigzag_documents: of 8 ranks, the busiest has 1.00")


@balancer
def whole_zigzag(documents, world_size):
    """Balanced for one document only."""
    cut = np.array_split(np.arange(documents[-1]), 2 * world_size)
    return [np.concatenate([cut[rank], cut[-1 - rank]]) for rank in range(world_size)]


@balancer
def twice(documents, world_size):
    """Position 0 is on all ranks."""
    return [[0, *range(rank or 1, documents[-1], world_size)] for rank in range(world_size)]


@balancer
def raises(documents, world_size):
    """Ends with an error."""
    raise KeyError("no such plan")


def zigzag_of_documents(documents, world_size):
    """Head and tail of every document for each rank."""
    cut = [np.array_split(np.arange(*one), 2 * world_size) for one in itertools.pairwise(documents)]
    return [np.concatenate([part for of in cut for part in (of[rank], of[-1 - rank])]) for rank in range(world_size)]


def in_rank_order(documents, world_size):
    """The positions of all ranks."""
    return np.concatenate(zigzag_of_documents(documents, world_size))


INVERSES = {
    "right": lambda documents, world_size: np.argsort(in_rank_order(documents, world_size)),
    "not inverted": in_rank_order,
    "not moved": lambda documents, world_size: np.arange(documents[-1]),
    "of one rank less": lambda documents, world_size: np.argsort(in_rank_order(documents, world_size - 1)),
    "too short": lambda documents, world_size: np.arange(documents[-1] - 1),
    "twice": lambda documents, world_size: [0, *range(documents[-1])][: documents[-1]],
    "no numbers": lambda documents, world_size: np.zeros(documents[-1]),
    "raises": lambda documents, world_size: {}[world_size],
}

CALLS = iter(range(1_000_000))


@balancer
def fickle(documents, world_size):
    """Another rank begins at each call."""
    first = next(CALLS)
    return [range((first + rank) % world_size, documents[-1], world_size) for rank in range(world_size)]


def declared(sharding, **claims):
    """An implementation that is not run."""
    attend = implementation(sharding=sharding, documents=True, uneven=True, empty_shards=True, **claims)
    return attend(lambda q, k, v, call: q)


@pytest.mark.parametrize(
    ("attend", "reason", "summary"),
    [
        (declared(whole_zigzag, balance=1.05), "balance", "times the mean of"),
        (declared(twice), "sharding", "is not a partition: every position of range("),
        (declared(fickle), "sharding", "returned other positions when it was called again: ranks would not agree"),
        (declared(raises), "sharding", "KeyError: 'no such plan'"),
    ],
    ids=["unbalanced", "twice", "fickle", "raises"],
)
def test_a_wrong_balancer_is_found(attend, reason, summary):
    """By its positions alone."""
    found = hunted(attend, "balance", 40).counterexample
    assert found is not None
    assert found.violation.reason == (reason,)
    assert summary in found.violation.summary


@pytest.mark.parametrize(
    ("name", "what", "summary"),
    [
        ("not inverted", "order", "of zigzag_of_documents does not restore the order: in place of position"),
        ("not moved", "order", "it puts position"),
        ("of one rank less", "order", "are wrong"),
        ("too short", "rows", "returned 0 rows of dtype int64: expected 1 integers"),
        ("twice", "rows", "is not a permutation: every row of range("),
        ("no numbers", "rows", "returned 1 rows of dtype float64: expected 1 integers"),
        ("raises", "rows", "KeyError: "),
    ],
)
def test_an_inverse_that_does_not_restore_the_order_is_found(name, what, summary):
    """By its rows alone, and in one line."""
    found = hunted(declared(balancer(zigzag_of_documents, inverse=INVERSES[name])), "balance", 40).counterexample
    assert found is not None
    assert found.violation.reason == ("inverse", what)
    assert summary in found.violation.summary
    assert "\n" not in found.violation.summary


def test_an_inverse_that_restores_the_order_is_not_accused():
    """That of a sharding whose shards are of unequal length."""
    right = balancer(inverse=INVERSES["right"])(zigzag_of_documents)
    assert hunted(declared(right), "balance", 40).counterexample is None


def test_what_is_not_claimed_is_told_and_not_judged():
    """A figure, and no margin."""
    attend = declared(whole_zigzag)
    found = hunted(attend, "balance", 20)
    assert found.counterexample is None
    assert found.margin == 0
    (figure,) = PROPERTIES["balance"].figures(attend.capabilities)
    assert "whole_zigzag: of 8 ranks, the busiest has 1." in figure


def test_a_balancer_of_a_target_is_asked_in_the_process_that_imported_it(tmp_path, monkeypatch, capsys):
    """Documents get there and positions come back; the report has the figure, and a fickle one is a violation."""
    monkeypatch.chdir(tmp_path)
    text = """
        import itertools
        from ringverify import balancer, implementation
        CALLS = itertools.count()

        @balancer
        def in_turn(documents, world_size):
            assert documents[0] == 0
            return [range(rank, documents[-1], world_size) for rank in range(world_size)]

        @balancer
        def fickle(documents, world_size):
            first = next(CALLS)
            return [range((first + rank) % world_size, documents[-1], world_size) for rank in range(world_size)]

        @implementation(sharding=(in_turn, "zigzag"), documents=True)
        def attend(q, k, v, call):
            return q

        @implementation(sharding=fickle, documents=True)
        def unstable(q, k, v, call):
            return q

        def backwards(documents, world_size):
            return range(documents[-1])[::-1]

        @implementation(sharding=balancer(in_turn.function, inverse=backwards), documents=True)
        def not_restored(q, k, v, call):
            return q
    """
    (tmp_path / "mine.py").write_text("\n".join(line[8:] for line in text.splitlines()))
    arguments = ["--only", "balance", "--jobs", "1", "--report", "out.jsonl"]
    assert main(["check", "mine.py:attend", *arguments]) == 0
    events = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    (told,) = [event for event in events if event["event"] == "property"]
    assert told["figures"][0].startswith("in_turn: of 8 ranks, the busiest has ")
    assert "figures in_turn: of 8 ranks" in capsys.readouterr().out
    assert main(["check", "mine.py:unstable", *arguments]) == 1
    assert "returned other positions when it was called again" in capsys.readouterr().out
    assert main(["check", "mine.py:not_restored", *arguments]) == 1
    assert "the inverse of in_turn does not restore the order: in place of position 0" in capsys.readouterr().out


def test_documents_reach_a_case_s_positions():
    """Those that ranks are told are those of the problem's documents."""
    case = Case(
        problem=Problem(query_length=6, documents=(0, 2, 6), causal=True), sharding="zigzag_documents", world_size=2
    )
    seen = []

    @implementation(sharding="zigzag_documents", documents=True, gradients=False)
    def attend(q, k, v, call):
        seen.append((call.rank, call.positions.tolist()))
        return q

    Runner(attend, SimulatedWorld()).run(case, gradients=False)
    assert sorted(seen) == [(0, [1, 2, 5]), (1, [0, 3, 4])]


@pytest.mark.parametrize(
    ("capabilities", "message"),
    [
        ({"balance": 0.9}, r"balance=0\.9: expected a number of at least 1"),
        ({"balance": True}, "balance=True: expected a number of at least 1"),
        ({"balance": "1.05"}, r"balance='1\.05': expected a number of at least 1"),
        ({"balance": float("inf")}, "balance=inf: expected a number of at least 1"),
        ({"sharding": "zigzag", "balance": 1.05}, r"balance=1\.05 needs a sharding that depends on documents"),
    ],
)
def test_a_claim_that_nothing_can_keep_or_break_is_refused(capabilities, message):
    """Below 1, no number, or of shardings that it is not about."""
    with pytest.raises(ValueError, match=message):
        Capabilities(**{"sharding": "zigzag_documents", **capabilities})


def test_where_no_sharding_depends_on_documents_the_property_is_unsupported():
    """It says so."""
    reason = "no sharding that depends on documents is declared"
    assert PROPERTIES["balance"].unsupported(Capabilities(documents=True)) == reason
