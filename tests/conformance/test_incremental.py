"""Chunked prefill and decoding: right ones pass, faults do not, and what is declared decides what is asked."""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from pathlib import Path

import decoding
import numpy as np
import pytest
from hunts import hunted

from ringref.problem import Problem
from ringref.sharding import PageTable
from ringverify.cases.case import Case, why_unsupported
from ringverify.cases.choices import SeededChoices
from ringverify.cases.running import Runner, shards
from ringverify.cases.shrinking import shrink
from ringverify.check import explaining
from ringverify.cli.main import main
from ringverify.faults import incremental
from ringverify.faults.ring import EVERYTHING, PLAIN
from ringverify.implementation import Capabilities, Implementation, implementation
from ringverify.properties.catalogue import PROPERTIES
from ringverify.targets import load
from ringverify.worlds.simulated import SimulatedWorld

pytestmark = pytest.mark.timeout(120)

WORLD = SimulatedWorld()
WHOLE = dataclasses.replace(PLAIN, capabilities=incremental.CACHES)
PROPERTY = PROPERTIES["incremental"]
MINE = "docs/examples/my_decoder.py:attend"
DECLARED = {
    "all": incremental.CACHES,
    "even": dataclasses.replace(incremental.CACHES, uneven=False, empty_shards=False),
    "some on each rank": dataclasses.replace(incremental.CACHES, empty_shards=False),
    "multiples of 4": dataclasses.replace(incremental.CACHES, uneven=False, empty_shards=False, length_multiple=4),
    "2 heads a rank": dataclasses.replace(incremental.CACHES, heads_multiple="world_size"),
}


def drawn(capabilities, count):
    """The first cases that the property makes."""
    make = PROPERTY.cases(capabilities)
    return [make(SeededChoices(f"incremental {number}")) for number in range(count)]


def paged(**fields):
    """Seven positions on three ranks, in pages of two, whose order is that of nothing."""
    problem = Problem(query_length=7, heads=2, head_dim=4, causal=True)
    table = PageTable(2, ((3, 0), (), (2, 1)))
    return Case(problem=problem, sharding="replicated/pages", world_size=3, page_table=table, **fields)


@pytest.mark.parametrize("target", [WHOLE, load(MINE)], ids=["plain ring", "my_decoder"])
def test_right_implementations_pass(target):
    """Sixty sequences of calls each, on the shardings that they declare."""
    runner = Runner(target, WORLD)
    for case in drawn(target.capabilities, 60):
        judgement = PROPERTY.judge(case, runner)
        assert judgement.violation is None, (case.describe(), judgement.violation)
        assert judgement.margin < 1


@pytest.mark.parametrize("id", incremental.FAULTS.mutants)
def test_every_fault_of_caches_is_caught(id):
    """Within the cases of the quick suite, whichever other properties see it too."""
    runner = Runner(incremental.FAULTS.mutants[id].implementation, WORLD)
    cases = drawn(runner.capabilities, PROPERTY.examples)
    assert any(PROPERTY.judge(case, runner).violation for case in cases)


def test_a_decoder_that_sends_queries_round_passes():
    """Queries on all ranks and on some, keys contiguous, in stripes and by page."""
    assert hunted(decoding.attend, "incremental", 80).counterexample is None


@pytest.mark.parametrize(
    ("wrong", "cause", "needs"),
    [
        (decoding.forgets_the_prefix, "a chunk forgets the prefix", "a call of several queries after earlier tokens"),
        (decoding.pages_of_the_next_rank, "pages are taken to be those of the next rank", "pages keys"),
        (decoding.merges_in_base_2, "log-sum-exps of blocks are merged as base-2 ones", "on at least 2 ranks"),
        (
            decoding.single_tokens_one_earlier,
            "a single query is masked as if it were one position earlier",
            "a call of one query",
        ),
        (decoding.takes_the_cache_for_contiguous, "the cache is taken to lie contiguous", "what the cause says makes"),
    ],
    ids=lambda one: one.function.__name__ if isinstance(one, Implementation) else None,
)
@pytest.mark.by_day(1)
def test_what_a_decoder_does_wrongly_is_named(wrong, cause, needs, monkeypatch):
    """And what it takes to see it, however quick this machine is."""
    monkeypatch.setattr(explaining, "NEEDS_SECONDS", 30.0)
    found = hunted(wrong, "incremental", 80, explain=True).counterexample
    assert found is not None
    assert cause in (found.diagnosis.text or "")
    assert any(needs in one for one in found.needs.requires)


@pytest.mark.parametrize("declared", DECLARED.values(), ids=DECLARED)
def test_cases_are_within_what_is_declared(declared):
    """Whatever of uneven shards, empty ones and multiples is declared."""
    for case in drawn(declared, 150):
        assert why_unsupported(case, declared) is None, case.describe()
        assert PROPERTY.applies(case, declared)
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_cases_have_prefills_chunks_tokens_and_pages_out_of_order():
    """And every sharding of queries and of keys, on several ranks."""
    cases = drawn(incremental.CACHES, 200)
    shardings = collections.Counter(case.sharding for case in cases)
    assert len(shardings) == 16
    assert min(shardings.values()) >= 3
    assert sum(len(case.chunks) > 2 for case in cases) > 60
    assert sum(case.chunks[-1] == 1 for case in cases) > 100
    assert sum(any(count > 1 for count in case.chunks[1:]) for case in cases) > 40
    out_of_order = [case for case in cases if case.page_table is not None]
    out_of_order = [
        one for one in out_of_order if any((np.diff(rows) < 0).any() for rows in shards(one, incremental.CACHES)[1])
    ]
    assert len(out_of_order) > 15


def test_only_who_declares_it_is_asked_for_it():
    """And nobody else's property has a case of calls."""
    assert PROPERTY.unsupported(EVERYTHING) == "incremental=True is not declared"
    assert str(why_unsupported(paged(), EVERYTHING)) == "incremental is not declared"
    assert why_unsupported(paged(), incremental.CACHES) is None


def test_rows_of_all_calls_are_those_of_the_whole():
    """A rank's queries of one call follow those of the call before; keys are those of the last call."""
    queries, keys = shards(paged(chunks=(4, 2, 1)), incremental.CACHES)
    assert [rows.tolist() for rows in queries] == [list(range(7))] * 3
    assert [rows.tolist() for rows in keys] == [[6, 0, 1], [], [4, 5, 2, 3]]
    striped = paged(chunks=(4, 2, 1)).replace(sharding="striped/pages")
    assert [rows.tolist() for rows in shards(striped, incremental.CACHES)[0]] == [[0, 3, 4, 6], [1, 5], [2]]
    assert [call.problem.nk for call in striped.calls] == [4, 6, 7]


def test_calls_and_pages_follow_when_a_case_is_changed():
    """What goes beyond is cut off, what is new is one call more, and pages are dealt to ranks that there are."""
    case = paged(chunks=(4, 2, 1))
    assert case.replace(query_length=5).chunks == (4, 1)
    assert case.replace(query_length=9).chunks == (4, 2, 1, 2)
    assert case.replace(world_size=2).page_table == PageTable(2, ((3, 0, 2, 1), ()))
    assert case.replace(sharding="replicated/striped").page_table is None
    assert case.replace(causal=False).chunks == ()
    longer = case.replace(query_length=11)
    assert sorted(page for held in longer.page_table.pages for page in held) == list(range(6))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"chunks": (4, 2)}, "chunks=(4, 2): expected a causal problem of 6 queries and keys"),
        ({"chunks": (4, 0, 3)}, "chunks=(4, 0, 3): expected numbers of queries, each at least 1"),
        ({"sharding": "contiguous", "page_table": None, "chunks": (7,)}, 'expected one such as "replicated/pages"'),
        ({"page_table": None}, "a page table goes with keys in pages"),
        ({"page_table": PageTable(2, ((0,), (1,), (2,)))}, "page 3 (positions 6 to 6) is held by no rank"),
        ({"page_table": PageTable(2, ((0, 1), (2, 3)))}, "a page table of 2 ranks on a world of 3"),
    ],
)
def test_a_case_that_makes_no_sense_is_refused(fields, said):
    """In one line that names the value."""
    with pytest.raises(ValueError, match=f"^[^\n]*{re.escape(said)}[^\n]*$"):
        dataclasses.replace(paged(), **fields)


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"key_sharding": ("pages",)}, "key_sharding=('pages',) needs incremental=True"),
        ({"incremental": True, "query_sharding": ("pages",)}, "query_sharding contains 'pages'"),
        ({"incremental": True, "causal": "never"}, 'incremental=True contradicts causal="never"'),
        ({"incremental": "yes"}, "incremental='yes': expected True or False"),
    ],
)
def test_a_declaration_that_makes_no_sense_is_refused(declared, said):
    """Before anything runs."""
    with pytest.raises(ValueError, match=re.escape(said)):
        Capabilities(**declared)


def test_a_sequence_is_shrunk_to_one_call_unless_it_takes_several():
    """And pages to pages of one position in order, unless they matter."""
    case = paged(chunks=(4, 2, 1), values="normal", seed=3)
    assert shrink(case, lambda one: True, incremental.CACHES).case.chunks == ()
    several = shrink(case, lambda one: len(one.chunks) > 1, incremental.CACHES).case
    assert (several.chunks, several.sharding) == ((1, 1), "replicated/contiguous")
    pages = shrink(case, lambda one: one.page_table is not None, incremental.CACHES).case
    assert pages.page_table.page_size == 1


def test_state_that_an_earlier_call_leaves_is_told_as_such(tmp_path, monkeypatch, capsys):
    """Kept on the group, which is another one in each run: the call alone is right."""
    monkeypatch.chdir(tmp_path)
    text = open_text(MINE).replace("    k, v = (x.repeat", "    call = first_of(call)\n    k, v = (x.repeat", 1)
    text += '''

LENGTHS = {}


def first_of(call):
    """A stale offset: that of the call before."""
    kept = LENGTHS.setdefault(id(call.group), [])
    kept.append(call.offset)
    return type("Stale", (), {**{name: getattr(call, name) for name in dir(call) if name[0] != "_"}, "offset": kept[0]})
'''
    (tmp_path / "stale.py").write_text(text, encoding="utf-8")
    assert main(["check", "stale.py:attend", "--only", "incremental", "--jobs", "1"]) == 1
    said = capsys.readouterr().out
    assert "earlier call" in said


def open_text(target):
    """The source of a target of the documents."""
    return (Path(__file__).parents[2] / target.partition(":")[0]).read_text(encoding="utf-8")


def test_what_reads_past_the_end_of_the_cache_is_not_handed_more():
    """A rank's rows are those that the cache holds, and no others: the shapes of every call say so."""
    seen = []

    @implementation(incremental=True, key_sharding=("pages",), uneven=True, empty_shards=True, gradients=False)
    def attend(q, k, v, call):
        seen.append((call.rank, call.offset, q.shape[1], k.shape[1], call.key_positions.tolist()))
        assert call.page_table == paged().page_table
        return q.clone()

    Runner(attend, WORLD).run(paged(chunks=(4, 2, 1)), gradients=False)
    of_first = sorted(one for one in seen if one[0] == 0)
    assert of_first == [(0, 0, 4, 2, [0, 1]), (0, 4, 2, 2, [0, 1]), (0, 6, 1, 3, [6, 0, 1])]
