"""When a case fails is said truly: conditions are planted, and found again by variants of the smallest case."""

import dataclasses
import itertools
import random
import re
import zlib
from zlib import crc32

import numpy as np
import pytest
import torch

from ringref.problem import Dilation, Problem
from ringref.sharding import PageTable
from ringverify.cases.case import Case
from ringverify.cases.choices import SeededChoices
from ringverify.cases.inputs import has_ordinary_sinks, lay_out, selectable
from ringverify.cases.running import Runner
from ringverify.cases.shrinking import shrink
from ringverify.cases.strategies import Scope, case_of, cases
from ringverify.check.explaining import when_it_fails
from ringverify.check.hunting import hunt
from ringverify.diagnosis.when.conditions import features
from ringverify.diagnosis.when.needs import GEOMETRY, needs
from ringverify.diagnosis.when.scores import of_scores
from ringverify.diagnosis.when.varying import Varying
from ringverify.events import Needed
from ringverify.faults.incremental import CACHES
from ringverify.faults.ring import EVERYTHING, STEPS, ring_of
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.values import FORWARD, GRADIENTS_OF_OUT
from ringverify.worlds.simulated import SimulatedWorld

MIXED = 60
SCOPE = Scope(memory=("contiguous", "strided"), cotangents=("out", "both", "lse"), groups=("world", "strided"))
TOKENS = Capabilities(sharding=("contiguous", "zigzag"), uneven=True, window=True)
SCALED = dataclasses.replace(TOKENS, scale=True, softcap=True)
PLANTED = [
    ("at least 3 ranks", lambda one: one["ranks"] >= 3),
    ("exactly 3 ranks", lambda one: one["ranks"] == 3),
    ("an even number of ranks", lambda one: one["ranks"] % 2 == 0),
    ("4, 6 or 8 ranks, or more such", lambda one: one["ranks"] in (4, 6, 8)),
    ("causal", lambda one: one["causal"]),
    ("not causal", lambda one: not one["causal"]),
    ("causal, at least 3 ranks", lambda one: one["causal"] and one["ranks"] >= 3),
    ("causal, at least 2 ranks, 5 keys or more on a rank",
     lambda one: one["causal"] and one["keys_here"] >= 5 and one["ranks"] >= 2),
    ("4 queries or more on a rank", lambda one: one["queries_here"] >= 4),
    ("at least 17 keys", lambda one: one["keys"] > 16),
    ("an odd number of keys", lambda one: one["keys"] % 2 == 1),
    ("bfloat16", lambda one: one["dtype"] == "bfloat16"),
    ("a 16-bit dtype", lambda one: one["dtype"] in ("bfloat16", "float16")),
    ("head_dim at least 9", lambda one: one["head_dim"] > 8),
    ("head_dim not a multiple of 8", lambda one: one["head_dim"] % 8 != 0),
    ("value_dim other than head_dim", lambda one: one["value_dim"] != one["head_dim"]),
    ("at least 2 heads", lambda one: one["heads"] > 1),
    ("fewer key heads than heads (GQA)", lambda one: one["group_size"] > 1),
    ("at least 2 batch entries", lambda one: one["batch"] > 1),
    ("shards of different lengths", lambda one: one["uneven"]),
    ("a window narrower than a rank's shard", lambda one: one["narrow"]),
    ("a document on several ranks", lambda one: one["crossing"]),
    ("dilation rate at least 3", lambda one: one.get("rate", 0) >= 3),
    ("softcap", lambda one: one["softcap"]),
    ("a scale of its own", lambda one: one["scale"]),
    ("large or dominating scores", lambda one: one["large"]),
    ("inputs that are not contiguous in memory", lambda one: one["strides"]),
    ("a cotangent of lse", lambda one: one["of_lse"]),
    ("a group smaller than the world", lambda one: one["group"] != "world"),
    ("a group whose ranks have other numbers in the world", lambda one: one["group"] in ("offset", "strided")),
    ("causal, zigzag sharding", lambda one: one["causal"] and one["sharding"] == "zigzag"),
    ("causal or window", lambda one: one["causal"] or one["window"]),
    ("more keys than queries", lambda one: one["more_keys"]),
    ("nothing", lambda one: True),
]  # fmt: skip


def found(planted, capabilities, **how):
    """What is said of a fault that is there under a condition, and cases as the suite draws them."""
    scope = SCOPE if capabilities is EVERYTHING else dataclasses.replace(SCOPE, cotangents=("out",), groups=("world",))

    def fails(case):
        return min(case.problem.nq, case.problem.nk) > 0 and bool(planted(features(case, capabilities)))

    choices = SeededChoices(1)
    drawn = [case_of(choices, capabilities, scope) for _ in range(300)]
    first = next(case for case in drawn if fails(case))
    smallest = shrink(first, fails, capabilities).case
    whole = [case for case in drawn if min(case.problem.nq, case.problem.nk) >= case.world_size]
    other = SeededChoices(-1)
    mixed = [case_of(other, capabilities, scope) for _ in range(how.pop("mixed", 0))]
    return needs(smallest, how.pop("fails", fails), capabilities, drawn=mixed, **how), fails, whole


@pytest.mark.parametrize(("text", "planted"), PLANTED, ids=[text for text, _ in PLANTED])
@pytest.mark.by_day(16)
def test_a_planted_condition_is_found_again(text, planted):
    """In its words, and so that it holds on drawn cases exactly where the fault is; few runs are enough."""
    said, fails, drawn = found(planted, EVERYTHING)
    assert ", ".join(one.text for one in said.requires) == ("" if text == "nothing" else text)
    assert all(all(one.holds(case) for one in said.requires) == fails(case) for case in drawn)
    assert said.complete
    assert said.tried <= 165


RELATED = [
    ("value_dim equal to head_dim", lambda one: one["value_dim"] == one["head_dim"]),
    ("a window that reaches past the next shard", lambda one: one["far"]),
    ("a number of heads that the branches of a dilation do not divide", lambda one: one["uneven_branches"]),
    ("two branches of a dilation with the same rate", lambda one: one["rate_again"]),
    ("two branches of a dilation with segments of the same length", lambda one: one["segment_again"]),
    ("at least 2 ranks, a segment length that does not divide a rank's shard",
     lambda one: one["cut_segment"] and one["ranks"] > 1),
    ("numbers of heads and of dims a head that differ", lambda one: one["heads"] != one["head_dim"]),
    ("a scale other than 1", lambda one: one["scaled"]),
    ("causal or softcap", lambda one: one["causal"] or one["softcap"]),
    ("an odd number of ranks", lambda one: one["ranks"] % 2 == 1),
    ("causal, no window", lambda one: one["causal"] and not one["window"]),
    ("at least 2 ranks, a window whose left side is no multiple of a rank's shard",
     lambda one: one["cut_left"] and one["ranks"] > 1),
    ("at least 2 key heads, a number of key heads that the ranks do not divide",
     lambda one: one["cut_key_heads"] and one["key_heads"] > 1),
    ("at least 2 keys for a query, softcap", lambda one: one["choice"] and one["softcap"]),
    ("at least 2 ranks, a document that begins or ends inside a rank's shard",
     lambda one: one["inner_boundary"] and one["ranks"] > 1),
    ("a query with keys on at least 3 ranks", lambda one: one["blocks"] >= 3),
    ("documents, a query with keys at least 2 ranks away", lambda one: one["documents"] and one["distance"] >= 2),
    ("a query with keys on the opposite rank, half of the ranks away", lambda one: one["opposite"]),
    ("softcap, a query from which a mask hides some of its keys", lambda one: one["softcap"] and one["hidden"]),
    ("a query without keys in a batch entry that has keys", lambda one: one["keyless"]),
    ("causal, ranks with different numbers of keys", lambda one: one["causal"] and one["uneven_keys"]),
    ("a dilation rate that does not divide its segment, and a second segment", lambda one: one["cut_segments"]),
    ('head_offset "block", a dilation rate below the number of heads that does not divide it',
     lambda one: one["by_blocks"] and one["cut_offsets"]),
    ("a query that one branch of a dilation covers and another does not", lambda one: one["covered_by_some"]),
    ("a block of keys that a mask hides from a whole rank", lambda one: one["hidden_block"]),
    ("softcap, a block of keys that a mask hides from a rank in part", lambda one: one["softcap"] and one["cut_block"]),
    ("a query with keys on some ranks only", lambda one: one["some_ranks"]),
    ("a query with keys on other ranks only", lambda one: one["elsewhere"]),
    ("a query from which a mask hides the last key", lambda one: one["hidden_last"]),
    ("a query with a single key", lambda one: one["single"]),
    ("numbers of ranks and of key heads with a common divisor", lambda one: one["common_key_heads"]),
    ("a number of key heads that the ranks do not divide, numbers of ranks and of key heads with a common divisor",
     lambda one: one["cut_key_heads"] and one["common_key_heads"]),
    ("a number of keys in the longest shard that is not a multiple of 4, at least 2 ranks, or not causal",
     lambda one: one["keys_here"] % 4 and one["below_diagonal"]),
    ("at least 2 ranks, a window that hides something", lambda one: one["hiding_window"] and one["ranks"] > 1),
    ("at least 2 ranks with fewer keys than another one", lambda one: one["several_shorter"]),
    ("causal, a document, or the sequence, that begins before a rank's shard and ends after it",
     lambda one: one["causal"] and one["through"]),
    ("positions before the first document", lambda one: one["before_documents"]),
    ("positions after the last document", lambda one: one["after_documents"]),
    ("numbers of ranks and of key heads of which none divides the other", lambda one: one["apart_key_heads"]),
    ("a query with keys on another rank", lambda one: one["abroad"]),
    ("causal, a query with keys on a later rank", lambda one: one["causal"] and one["of_later"]),
    ("a block that a query of a rank attends, and the rank's last query does not", lambda one: one["last_blind"]),
    ("at least 2 heads a rank, of a number that the ranks divide", lambda one: one["heads_a_rank"]),
    ("fewer key heads than heads (GQA), at least 2 key heads a rank, of a number that the ranks divide",
     lambda one: one["gqa"] and one["key_heads_a_rank"]),
    ("a block that a query of a rank attends, and another query of it does not", lambda one: one["blind_beside"]),
    ("at least 2 ranks that hold keys, and fewer than another one", lambda one: one["several_short"]),
    ("causal, numbers of queries and keys that differ by no multiple of the ranks",
     lambda one: one["causal"] and one["other_remainder"]),
    ("a rank that attends no key of some rank", lambda one: one["idle_block"]),
    ("a key that some batch entry attends, and the first one does not", lambda one: one["beyond_first"]),
    ("a window that is 0 on the left", lambda one: one["zero_left"]),
    ("a rank without queries, or without keys", lambda one: one["empty_shard"]),
    ("a key length that ends inside a rank's shard", lambda one: one["inner_end"]),
    ("a segment of the dilation that begins inside a rank's shard", lambda one: one["inner_segment"]),
    ("a dilation rate that does not divide a rank's shard", lambda one: one["cut_by_rate"]),
    ("at least 2 ranks, of a number that divides the heads", lambda one: one["dealt_heads"]),
    ("at least 2 ranks, of a number that divides the key heads", lambda one: one["dealt_key_heads"]),
    ("a rank whose queries attend keys, and none of its own", lambda one: one["own_hidden"]),
    ("a window whose left side the ranks do not divide", lambda one: one["cut_by_ranks_left"]),
    ("a window whose right side the ranks do not divide", lambda one: one["cut_by_ranks_right"]),
    ("a window shorter to the left than the number of ranks", lambda one: one["below_ranks_left"]),
    ("a window shorter to the right than the number of ranks", lambda one: one["below_ranks_right"]),
    ("a window that reaches past the next shard to the left", lambda one: one["far_left"]),
    ("a window that reaches past the next shard to the right", lambda one: one["far_right"]),
    ("3 documents or more on a rank", lambda one: one.get("documents_here", 0) >= 3),
    ("causal, a query with keys that a ring which sends to the left brings at hop 2 or later",
     lambda one: one["causal"] and one["hop_left"] >= 2),
    ("a window bounded on the left, a query with keys that a ring which sends to the right brings at hop 2 or later",
     lambda one: one["left"] and one["hop_right"] >= 2),
    ("causal, a document on several ranks that does not begin on the first",
     lambda one: one["causal"] and one["crossing_later"]),
    ("a document that begins or ends where the shard of a rank other than the first begins",
     lambda one: one["bordering"]),
    ("a rank that holds keys, and fewer than another one", lambda one: one["short"]),
    ('dilation with shared heads and head_offset "cyclic"', lambda one: one["cyclic"]),
    ("causal, at least 3 ranks of an odd number, or 3 pairs of an even one",
     lambda one: one["causal"] and one["ring_of_pairs"]),
    ("at least 2 ranks, 3 keys or more on every rank", lambda one: one["keys_everywhere"] >= 3 and one["ranks"] > 1),
    ("a query without keys on a rank other than the first", lambda one: one["keyless_after_first"]),
    ("at least 3 ranks, a last rank that holds keys, and fewer than the one before it",
     lambda one: one["ranks"] > 2 and one["shorter_than_before"]),
    ("a segment length that neither divides a rank's shard nor is a multiple of it",
     lambda one: one["unaligned_segment"]),
    ("a block of keys at least 2 ranks away, either way round, that a mask hides from a rank in part",
     lambda one: one["cut_far"]),
    ("a query with keys at least 2 ranks before its own", lambda one: one["back"] >= 2),
    ("a query with keys at least 2 ranks after its own", lambda one: one["ahead"] >= 2),
    ("a query with keys past the shortest of key_lengths", lambda one: one["past_shortest"]),
    ("a key that queries of at least 2 ranks attend", lambda one: one["readers"] >= 2),
    ("a rank that holds a single key", lambda one: one["single_key"]),
    ("a rank that holds a single query", lambda one: one["single_query"]),
    ("a rank whose queries attend no key", lambda one: one["blind_rank"]),
    ("a number of ranks other than 2", lambda one: one["ranks"] != 2),
    ("dilation with shared heads, more of them than a rate above 1", lambda one: one["above_rate"]),
    ("tokens on every rank, an odd number of keys", lambda one: one["keys"] % 2 == 1 and one["full"]),
    ("ranks 0 and 1, 2 and 3, or the next two, with different numbers of keys", lambda one: one["uneven_pairs"]),
    ("contiguous or zigzag shards that torch.chunk would cut otherwise", lambda one: one["cut_by_chunk"]),
    ("a window that ends fewer shards to the left by the longest shard than by the shortest",
     lambda one: one["unlike_hops_left"]),
    ("a rank of whose positions a branch of the dilation keeps none", lambda one: one["idle_branch"]),
    ("a branch of the dilation that keeps no position in some head", lambda one: one["void_branch"]),
    ("a group of ranks that are all odd, or all even, in the world", lambda one: one["one_parity"]),
    ("a last segment of the dilation that is shorter than one before it", lambda one: one["shorter_last"]),
    ("a last segment of the dilation with fewer positions that count than one before it",
     lambda one: one["fewer_last"]),
    ("softcap, a key that no query attends", lambda one: one["unattended"] and one["softcap"]),
    ("a document that begins at a position that is no multiple of the ranks", lambda one: one["uneven_begin"]),
]  # fmt: skip


@pytest.mark.parametrize("masks", [{}, {"documents": True, "key_lengths": True}], ids=["a window", "more"])
def test_what_another_cotangent_makes_idle_is_not_said(masks):
    """With that of lse it shows on two ranks whatever is attended, with that of out only if keys are elsewhere."""
    declared = dataclasses.replace(TOKENS, lse=True, lse_gradient=True, **masks)

    def fails(case):
        seen = features(case, declared)
        return bool(case.problem.nq and seen["ranks"] > 1 and (seen["abroad"] or seen["cotangent"] == "lse"))

    said = needs(Case(problem=Problem(query_length=2, head_dim=1), world_size=2), fails, declared)
    assert [one.text for one in said.requires] == ["at least 2 ranks"]


@pytest.mark.parametrize(("size", "left", "past"), [(3, 9, True), (3, 8, False), (3, None, False), (1, 20, False)])
def test_a_window_reaches_past_all_other_shards_or_not(size, left, past):
    """Twelve positions: on three ranks the other two have eight."""
    case = Case(problem=Problem(query_length=12, head_dim=1, window=(left, 0)), sharding="contiguous", world_size=size)
    assert features(case, TOKENS)["past_all"] == past


@pytest.mark.parametrize("sharding", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", range(1, 5))
def test_a_length_that_chunk_deals_out_otherwise_is_known(sharding, size):
    """Held against torch's own, and what its pieces leave to each rank; one that has fewer pieces has no last ones."""
    pieces = size * (1 + (sharding == "zigzag"))
    for n in range(1, 20):
        sizes = [[len(one) for one in of(torch.arange(n), pieces)] for of in (torch.chunk, torch.tensor_split)]
        case = Case(problem=Problem(query_length=n, head_dim=1), sharding=sharding, world_size=size)
        assert features(case, TOKENS)["cut_by_chunk"] == (sizes[0] != sizes[1])


@pytest.mark.parametrize(
    ("documents", "bordering", "later"),
    [((0, 3, 8), True, True), ((0, 2, 5), False, False), ((1, 4), False, False), ((0, 1, 8), False, False),
     ((4, 8), False, True), ((3, 3, 3), False, False), ((0, 6), True, False), (None, False, False)],
)  # fmt: skip
def test_documents_border_on_shards_or_begin_on_later_ones(documents, bordering, later):
    """Three ranks hold positions 0 to 2, 3 to 5, and 6 and 7."""
    case = Case(problem=Problem(query_length=8, head_dim=1, documents=documents), sharding="contiguous", world_size=3)
    seen = features(case, dataclasses.replace(TOKENS, documents=True))
    assert (seen["bordering"], seen["crossing_later"]) == (bordering, later)


@pytest.mark.parametrize(
    ("documents", "window", "causal", "hides"),
    [((0, 2, 4), None, False, True), ((0, 4), None, False, False), ((1, 4), None, True, True),
     (None, None, True, False), ((0, 1, 2, 3, 4), (0, 0), False, False),
     ((0, 2, 4), (1, 0), False, True), ((0, 2, 4), (0, 3), True, False)],
)  # fmt: skip
def test_documents_hide_what_nothing_else_does_or_not(documents, window, causal, hides):
    """Where each position attends itself alone, they hide nothing if all of them lie in one."""
    case = Case(problem=Problem(query_length=4, documents=documents, window=window, causal=causal), world_size=2)
    assert features(case, dataclasses.replace(TOKENS, documents=True))["hiding_documents"] == hides


@pytest.mark.parametrize("memory", ["contiguous", "transposed", "strided", "offset", "packed"])
def test_inputs_that_are_not_contiguous_are_those_that_torch_calls_so(memory):
    """Axes of one element do not count, nor do inputs without any."""
    for batch, heads, n in itertools.product((1, 2), (1, 2), (0, 1, 2)):
        case = Case(problem=Problem(query_length=n, batch=batch, heads=heads, head_dim=2), memory=memory)
        tensor, _ = lay_out(np.zeros((batch, n, heads, 2)), torch.float32, memory, "cpu")
        assert features(case, TOKENS)["strides"] == (not tensor.is_contiguous())


@pytest.mark.parametrize(
    ("pages", "early"),
    [(((2, 0), (1,)), True), (((0, 2), (1,)), False), (((3, 0, 1), (2,)), True), (((0, 1, 3), (2,)), False)],
)
def test_a_page_that_is_not_full_is_early_if_its_rank_holds_more(pages, early):
    """Also one that is not yet in use; what lies on another rank does not count."""
    problem = Problem(query_length=11, head_dim=1)
    case = Case(problem=problem, sharding="replicated/pages", world_size=2, page_table=PageTable(4, pages))
    assert features(case, CACHES)["early_page"] == early


@pytest.mark.parametrize("dilated", [False, True])
def test_heads_that_decide_which_branch_runs_are_not_called_no_matter(dilated):
    """Where it takes a dilation, whose heads may be split: with fewer of them, branches run that are right."""
    problem = Problem(query_length=6, heads=2, dilation=Dilation(((6, 1), (6, 2)), "split"))

    def fails(case):
        return case.problem.dilation is not None or not dilated

    said = needs(Case(problem=problem, world_size=2, values="normal"), fails, EVERYTHING, most_ranks=4)
    assert ("shapes" in said.irrelevant, "other shapes" in said.irrelevant) == (not dilated, dilated)


@pytest.mark.parametrize(("text", "planted"), RELATED, ids=[text for text, _ in RELATED])
@pytest.mark.by_day(12)
def test_a_condition_that_relates_factors_is_found_again(text, planted):
    """By other cases mixed with the failing one: in these, all but a few factors differ at once."""
    said, fails, drawn = found(planted, EVERYTHING, mixed=MIXED)
    assert ", ".join(one.text for one in said.requires) == text
    assert all(all(one.holds(case) for one in said.requires) == fails(case) for case in drawn)
    assert said.tried <= 215


@pytest.mark.parametrize(
    ("text", "planted"),
    [
        ("a query whose running maximum grows at a later hop", lambda one: one["rising"]),
        ("a query whose scores are all below about −", lambda one: one.get("lowest", 0) < -90),
        ("a score above about ", lambda one: one.get("highest", 0) > 90),
        ("a query with scores that lie ", lambda one: one.get("spread", 0) > 90),
        (
            "a query from which a mask hides a key w",
            lambda one: one.get("hidden_above", 0) > 90,
        ),
        ("scores that are not small beside the softcap", lambda one: one.get("capped", 0) > 0.3),
    ],
)
def test_a_condition_on_scores_is_found_again(text, planted):
    """Those that are far from 0 with the limit, to a tenth of it, where the scale may be chosen."""

    def fails(case):
        return bool(planted(of_scores(case, SCALED)))

    choices = SeededChoices(1)
    drawn = [case_of(choices, SCALED, Scope(values=("dominating_key", "large_scores", "normal"))) for _ in range(100)]
    smallest = shrink(next(case for case in drawn if fails(case)), fails, SCALED).case
    said = needs(smallest, fails, SCALED, drawn=drawn[-MIXED:])
    (told,) = [one.text for one in said.requires]
    assert told.startswith(text)
    assert all(90 <= int(number) <= 100 for number in re.findall(r"\d+", told))


@pytest.mark.parametrize("most", [70, 260])
def test_of_a_condition_that_has_no_words_its_factor_is_told(most, monkeypatch):
    """By examples, and nothing that is not true, whether or not the time ends first."""
    monkeypatch.setattr("ringverify.diagnosis.when.exploring.MOST_RUNS", most)
    said, fails, drawn = found(lambda one: one.get("left_side", 0) % 2 == 1, EVERYTHING, mixed=MIXED)
    fails_with, passes_with = said.requires[-1].text.removeprefix("certain window (fails with ").split("; passes with ")
    assert set() < set(re.findall(r"window=\((\w+),", fails_with)) <= {"1", "3", "5", "7"}
    assert set() < set(re.findall(r"window=\((\w+),", passes_with)) <= {"None", "0", "2"}
    assert all(one.holds(case) for case in said.failing for one in said.requires)
    assert all(one.holds(case) for case in drawn if fails(case) for one in said.requires)
    # Nor of anything else that decides which keys a query attends.
    assert not {"masks", *GEOMETRY} & set(said.irrelevant)


@pytest.mark.parametrize(
    ("factor", "planted"),
    [
        ("window", lambda one: one["left_side"] != 3 if one["causal"] and one["left"] else True),
        ("documents", lambda one: not (one["documents"] and one["causal"])),
        ("causal", lambda one: not (one["causal"] and one["ranks"] == 1 and not one["gqa"])),
        ("ranks", lambda one: not (one["causal"] and one["ranks"] == 1 and not one["gqa"])),
    ],
)
def test_what_hides_a_fault_in_other_cases_is_not_said_to_be_no_matter(factor, planted):
    """Though it does not in the generous case: other cases that failed are changed in it too."""
    said, fails, drawn = found(planted, EVERYTHING, mixed=MIXED)
    assert all(one.holds(case) for case in drawn if fails(case) for one in said.requires)
    assert not {factor, "masks"} & set(said.irrelevant)


def test_what_follows_from_lengths_is_put_to_the_test_by_changing_them():
    """No factor is called so; it is said only where cases pass that were changed in it alone."""
    said, _, _ = found(lambda one: one["uneven_queries"], EVERYTHING, mixed=MIXED)
    (condition,) = said.exploration.explanation()
    assert condition.text == "ranks with different numbers of queries"
    assert condition.factors.isdisjoint(said.exploration.varying.factors)
    assert said.exploration.tested(condition)


def test_a_limit_on_a_side_of_a_window_is_held_against_windows_that_are_not_bounded():
    """They have no number there, and lie beyond every limit."""
    said, fails, drawn = found(lambda one: one.get("right_side", 99) <= 2, EVERYTHING, mixed=MIXED)
    assert all(one.holds(case) for case in drawn if fails(case) for one in said.requires)


def test_what_was_not_tried_is_not_said_to_be_no_matter(monkeypatch):
    """Not a mask, and not the masks, where the runs ended before they were all varied."""
    for most in (10, 40):
        monkeypatch.setattr("ringverify.diagnosis.when.exploring.MOST_RUNS", most)
        said, _, _ = found(lambda one: one["ranks"] > 1 and not one["documents"], EVERYTHING, mixed=MIXED)
        assert not said.complete
        assert not {"documents", "masks", "ranks"} & set(said.irrelevant)


def test_where_keys_are_as_many_as_queries_they_are_called_tokens():
    """And nothing is said of factors that are not declared."""
    said, _, _ = found(lambda one: one["keys_here"] >= 5, TOKENS)
    assert [one.text for one in said.requires] == ["5 tokens or more on a rank"]
    assert set(said.irrelevant) == {"ranks", "masks", "sharding", "shapes", "values", "strides", "schedule"}


def test_factors_that_do_not_matter_are_named_together():
    """As others, where one of them matters."""
    said, _, _ = found(lambda one: one["causal"] and one["heads"] > 1, EVERYTHING)
    assert {"other masks", "other shapes", "dtype", "ranks"} <= set(said.irrelevant)
    assert not {"window", "documents", "masks", "dims", "causal", "heads"} & set(said.irrelevant)


def test_a_condition_that_only_other_values_refute_is_not_said():
    """Float64 fails too, at the largest scores alone: cases of all values are changed in the dtype."""
    said, fails, drawn = found(
        lambda one: one["large"] and (one["dtype"] != "float64" or one["values"] == "float16_limits"),
        EVERYTHING, mixed=MIXED,
    )  # fmt: skip
    assert [one.text for one in said.requires] == [
        "large or dominating scores",
        "certain dtype (fails with float32, bfloat16, float16; passes with float64)",
    ]
    assert all(one.holds(case) for case in drawn if fails(case) for one in said.requires)


def test_values_are_a_matter_where_those_of_the_smallest_case_decide():
    """In a larger one some row shows the fault whatever the values."""
    said, _, _ = found(lambda one: one["ranks"] > 1 and (one["keys"] > 8 or one["values"] == "integers"), EVERYTHING)
    assert not {"values", "length"} & set(said.irrelevant)


def test_a_fault_that_some_seeds_hide_is_a_matter_of_values():
    """A case that passes is run with another seed, and that may fail."""
    seeds = random.Random(3)
    said, _, _ = found(lambda one: True, EVERYTHING, fails=lambda case: seeds.random() < 0.9)
    assert "values" not in said.irrelevant


@pytest.mark.parametrize("ordinary", [True, False])
def test_what_small_integers_and_odd_sinks_hide_is_no_matter_of_values(ordinary):
    """Other seeds are tried with normal numbers, and with sinks that are neither far above all scores nor far below."""

    def fails(case):
        there = case.problem.sinks and case.world_size > 1
        shown = case.values != "integers" or crc32(repr(case).encode()) % 8 == 0
        return there and (has_ordinary_sinks(case) if ordinary else shown)

    declared = dataclasses.replace(TOKENS, sinks=True)
    small = Case(problem=Problem(query_length=2, sinks=True), world_size=2, values="integers")
    said = needs(next(one for one in (small.replace(seed=n) for n in range(99)) if fails(one)), fails, declared)
    assert {one.text for one in said.requires} == {"learned sinks", "at least 2 ranks"}


def test_an_error_that_a_16_bit_dtype_allows_does_not_make_float32_a_condition():
    """It passes there, which proves nothing."""

    def attend(q, k, v, call):
        out, lse = ring_of(STEPS)(q, k, v, call)
        return out * (1 + 1e-4 * (call.world_size > 1)), lse

    declared = dataclasses.replace(PLAIN, dtypes=("float32", "bfloat16"))
    runner = Runner(Implementation(attend, "a little off", declared), SimulatedWorld())
    case = Case(problem=Problem(query_length=6, heads=2, head_dim=4), world_size=2, values="normal")
    said = when_it_fails(FORWARD, runner, case, FORWARD.judge(case, runner).violation)
    assert [one.text for one in said.requires] == ["at least 2 ranks"]
    assert "dtype" not in said.irrelevant


def test_keys_on_the_own_rank_are_told_from_keys_on_any():
    """Under a causal mask alone every query has its own key; with padding, those of a later rank have none there."""
    declared = dataclasses.replace(TOKENS, causal="both", key_lengths=True)
    case = Case(problem=Problem(query_length=4, causal=True), world_size=2)
    seen = [features(one, declared) for one in (case, case.replace(key_lengths=(2,)), case.replace(key_lengths=(3,)))]
    assert [one["hidden_own"] for one in seen] == [False, True, False]
    assert all(one["hidden_rank"] for one in seen)


def test_what_cannot_be_made_is_no_variant():
    """Selectors need a dimension for every key; that a case without sinks has a head without one needs no inputs."""
    case = Case(problem=Problem(query_length=4, head_dim=4), world_size=2, values="selectors")
    declared = dataclasses.replace(TOKENS, sinks=True, world_sizes=(1, 2, 3), cross_lengths=True)
    longer = [one for factor in ("length", "ranks", "dims") for one in Varying(declared, 3).of(case, factor)]
    assert longer
    assert all(map(selectable, longer))
    assert features(case.replace(query_length=9), declared)["sinkless"]


def test_sinks_without_a_gradient_are_no_news():
    """Beside large scores most sinks have no weight, and a gradient of 0 is right though nothing sums it over ranks."""
    attend = ring_of(dataclasses.replace(STEPS, sum_sinks=lambda here, part: part * (here.rank == 0)))
    declared = dataclasses.replace(PLAIN, sinks=True, gradients=True, gqa=True)
    runner = Runner(Implementation(attend, "of rank 0 alone", declared), SimulatedWorld())
    small = Problem(query_length=1, heads=2, head_dim=2, sinks=True)
    case = next(
        one
        for one in (Case(problem=small, world_size=2, values="large_scores", seed=n) for n in range(99))
        if GRADIENTS_OF_OUT.judge(one, runner).violation
    )
    said = when_it_fails(GRADIENTS_OF_OUT, runner, case, GRADIENTS_OF_OUT.judge(case, runner).violation)
    assert [one.text for one in said.requires] == ["learned sinks", "at least 2 ranks"]


def test_dtypes_and_ranks_are_no_matter_only_where_the_extremes_fail():
    """Both widths of dtype, and one rank, where runs of them taught something."""

    def fails(case):
        return None if case.world_size == 1 or case.problem.dtype in ("float32", "float64") else True

    choices = SeededChoices(1)
    case = next(one for one in (case_of(choices, EVERYTHING, SCOPE) for _ in range(300)) if fails(one))
    said = needs(case, fails, EVERYTHING)
    assert {"causal", "length"} & {*said.irrelevant, *(("causal",) if "masks" in said.irrelevant else ())}
    assert not {"dtype", "ranks"} & set(said.irrelevant)


def test_nothing_is_said_that_a_run_contradicts():
    """A fault by chance has no condition: every one that is named was met by all runs that failed."""
    luck, failed = random.Random(7), []

    def fails(case):
        seen = luck.random() < 0.5
        failed.extend([case] if seen else [])
        return seen

    said, _, _ = found(lambda one: True, EVERYTHING, fails=fails)
    assert failed
    assert all(one.holds(case) for one in said.requires for case in failed)


def test_a_factor_that_makes_a_case_fail_otherwise_is_a_matter():
    """Its variants are none of those that fail alike."""
    case = Case(problem=Problem(query_length=6, head_dim=2), world_size=2)
    otherwise = set()

    def fails(other):
        if other.problem.nq % other.world_size == 0:
            return True
        otherwise.add(other)
        return None

    def said(**how):
        return needs(case, fails, dataclasses.replace(TOKENS, window=False), most_ranks=4, **how)

    assert "length" in said().irrelevant
    assert "length" not in said(otherwise=otherwise).irrelevant


@pytest.mark.parametrize(("empty", "said"), [(True, "length with tokens on every rank"), (False, "length")])
def test_sequences_that_leave_a_rank_empty_are_no_part_of_what_is_no_matter(empty, said):
    """Where ranks may be empty, the shortest ones pass, as of most faults."""
    declared = dataclasses.replace(TOKENS, window=False, empty_shards=empty)
    case = Case(problem=Problem(query_length=4), world_size=2)
    found = needs(case, lambda other: other.problem.nq >= other.world_size > 1, declared, most_ranks=4)
    assert said in found.irrelevant


def test_under_causal_alone_it_is_named_and_not_what_it_hides():
    """Of a zigzag shard, the first query attends no block of a later rank that others attend: that is causality."""
    declared = dataclasses.replace(TOKENS, sharding=("zigzag",), window=False)
    case = Case(problem=Problem(query_length=4, causal=True), world_size=2, sharding="zigzag")
    found = needs(case, lambda other: other.problem.causal and other.world_size > 1, declared, most_ranks=4)
    assert [one.text for one in found.requires] == ["causal", "at least 2 ranks"]


def test_runs_that_teach_nothing_are_no_evidence():
    """Neither for a condition nor against one."""
    said, _, _ = found(lambda one: True, EVERYTHING, fails=lambda case: None)
    assert (said.requires, said.irrelevant, said.complete) == ((), (), True)


def test_an_end_of_the_time_is_told():
    """What was found until then stands."""
    said, _, _ = found(lambda one: one["ranks"] >= 3, EVERYTHING, left=lambda: 0)
    assert (said.requires, said.complete, said.tried) == ((), False, 0)
    assert str(said.told()) == "nothing that was found; the time ended before all was tried"


def test_it_is_told_in_a_line():
    """Conditions first, then what does not matter."""
    told = Needed(requires=("causal", "at least 3 ranks"), irrelevant=("dtype", "shapes"), complete=True)
    assert str(told) == "causal, at least 3 ranks; not a matter of dtype, shapes"


# -- faults of a ring --------------------------------------------------------------------------------------------------

PLAIN = dataclasses.replace(Capabilities(sharding="contiguous", lse=True), gradients=False)


def faulty(there):
    """A ring whose out is wrong on the ranks, and in the calls, where `there` is true."""

    def attend(q, k, v, call):
        out, lse = ring_of(STEPS)(q, k, v, call)
        return (out * 1.01 if there(q, call) else out), lse

    return Runner(Implementation(attend, "faulty", PLAIN), SimulatedWorld())


@pytest.mark.parametrize(
    ("there", "says"),
    [
        pytest.param(
            lambda q, call: call.rank == 2, ["at least 3 ranks", "wrong on rank 2 only"], marks=pytest.mark.nightly
        ),
        (lambda q, call: call.rank == call.world_size - 1, ["wrong on the last rank only"]),
        (lambda q, call: call.causal and call.rank, ["causal", "at least 2 ranks"]),  # the cause says which ranks
        (
            lambda q, call: call.rank > 1 and call.rank % 2 == 0,
            ["at least 3 ranks", "wrong on every second rank, from rank 2 on"],
        ),
        (
            lambda q, call: call.world_size > 1 and call.rank >= (call.world_size - 1) * call.causal,
            ["at least 2 ranks", "where causal, wrong on the last rank only"],
        ),
        (lambda q, call: not q.is_contiguous(), ["inputs that are not contiguous in memory"]),
        (lambda q, call: q.size(1) > 3 and call.world_size > 1, ["at least 2 ranks", "4 tokens or more on a rank"]),
    ],
)
@pytest.mark.by_day(1)
def test_a_fault_of_a_ring_is_told_with_its_condition(there, says, monkeypatch):
    """On wrong values, whether or not the cause has a name; the property's own cases are not the limit."""
    monkeypatch.setattr("ringverify.check.explaining.NEEDS_SECONDS", 60.0)
    runner = faulty(there)
    drawn = dataclasses.replace(FORWARD, cases=lambda c: cases(c, Scope(memory=("contiguous", "strided"))))
    seen = hunt(drawn, runner, examples=40, seed=0, progress=lambda number: None)
    assert seen.mishaps == []
    assert seen.counterexample is not None
    assert list(seen.counterexample.needs.requires) == says


def test_every_rank_but_the_first_is_said_where_no_cause_says_it():
    """Of as many runs and worlds as it takes for the last one alone."""
    case = Case(problem=Problem(query_length=6), world_size=2)
    said = needs(
        case, lambda one: one.world_size > 1, TOKENS, most_ranks=6, wrong_ranks=lambda one: range(1, one.world_size)
    )
    assert [one.text for one in said.requires] == ["at least 2 ranks", "wrong on every rank but the first"]


def test_a_failure_without_values_is_varied_too():
    """It has to fail in the same manner."""

    def attend(q, k, v, call):
        if q.size(2) > 1:
            raise RuntimeError("one head at a time")
        return ring_of(STEPS)(q, k, v, call)

    runner = Runner(Implementation(attend, "one head", PLAIN), SimulatedWorld())
    seen = hunt(FORWARD, runner, examples=40, seed=0, progress=lambda number: None, shrinking=False).counterexample
    said = when_it_fails(FORWARD, runner, seen.case, seen.violation)
    assert [one.text for one in said.requires] == ["at least 2 heads"]


@pytest.mark.parametrize("lengths", [(0, 0), (0, 3), (3, 0)])
def test_a_failure_without_queries_or_keys_is_varied_too(lengths):
    """In every factor: none is made that has no meaning."""
    varying = Varying(EVERYTHING, 8)
    case = Case(problem=Problem(query_length=lengths[0], key_length=lengths[1]), world_size=2)
    assert {factor for factor in varying.factors if varying.of(case, factor)} >= {"window", "ranks", "dims"}


def test_a_failure_that_does_not_repeat_is_varied_too():
    """It fails in a fresh process too, though with other values."""

    def attend(q, k, v, call):
        out, lse = ring_of(STEPS)(q, k, v, call)
        return (out + random.SystemRandom().random() + 1 if q.size(2) > 1 else out), lse

    runner = Runner(Implementation(attend, "noisy", PLAIN), SimulatedWorld())
    seen = hunt(FORWARD, runner, examples=40, seed=0, progress=lambda number: None).counterexample
    assert not seen.repeats
    assert "at least 2 heads" in seen.needs.requires


def test_cases_in_sixteen_bits_that_pass_on_one_rank_count_though_each_may_hide_an_error():
    """One alone proves nothing where the errors that fail are hardly larger than what is allowed."""
    doubtful = set()

    def fails(case):
        if case.problem.dtype != "bfloat16":
            return False
        if case.world_size > 1:
            return True
        doubtful.add(case)
        return None

    capabilities = dataclasses.replace(TOKENS, dtypes=("float32", "bfloat16"))
    case = Case(problem=Problem(query_length=4, dtype="bfloat16"), world_size=2)
    told = needs(case, fails, capabilities, doubtful=doubtful)
    assert {one.text for one in told.requires} == {"a 16-bit dtype", "at least 2 ranks"}


def test_what_chance_decides_is_neither_a_condition_nor_no_matter():
    """A 16-bit error that shows with some seeds only, and with none where the scale is a power of two."""
    doubtful = set()

    def fails(case):
        p = case.problem
        if p.dtype != "bfloat16":
            return False
        if p.head_dim in (1, 4, 16):
            doubtful.add(case)
            return None
        if zlib.crc32(f"{case.seed} {p.nq} {p.heads}".encode()) % 3:
            doubtful.add(case)
            return None
        return True

    capabilities = dataclasses.replace(TOKENS, dtypes=("float32", "bfloat16"))
    case = next(
        one
        for seed in range(9)
        if fails(one := Case(problem=Problem(query_length=4, head_dim=2, dtype="bfloat16"), world_size=2, seed=seed))
    )
    told = needs(case, fails, capabilities, doubtful=doubtful, chancy=True)
    assert [one.text for one in told.requires] == ["a 16-bit dtype"]
    assert not {"shapes", "dims", "other shapes"} & set(told.irrelevant)
    assert "ranks" in told.irrelevant


def test_one_rank_alone_is_said_so():
    """It is no group of ranks that are all odd, or all even."""
    seen = features(Case(problem=Problem(query_length=4), world_size=1), TOKENS)
    assert seen["alone"]
    assert not seen["one_parity"]
