"""The cause of failures without wrong values has a name: deadlocks, hazards, inputs that are changed, state."""

import dataclasses
import functools
import math
import re
import time

import careless
import hazardous
import pytest
import torch
import torch.distributed as dist

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.check import accounting, finishing, following, keeping, sameness
from ringverify.check.beside import beside
from ringverify.check.budget import ENDLESS
from ringverify.check.drawing import drawn
from ringverify.check.explaining import judged
from ringverify.check.hunting import hunt
from ringverify.check.sameness import ToldFailure
from ringverify.check.searching import Counterexample, Found
from ringverify.diagnosis.conduct import differing, of_deadlock, of_state, untied
from ringverify.diagnosis.diagnose import Diagnosis
from ringverify.diagnosis.when.conditions import SKIPPING, conditions, features
from ringverify.events import Needed
from ringverify.faults.ring import STEPS, ring_of
from ringverify.implementation import Capabilities, Implementation
from ringverify.properties.adversity import HAZARDS
from ringverify.properties.buffers import INPUTS_UNTOUCHED
from ringverify.properties.catalogue import PROPERTIES
from ringverify.properties.incremental import INCREMENTAL
from ringverify.properties.property import Judgement, Violation
from ringverify.properties.subgroups import SUBGROUPS
from ringverify.properties.uninitialised import UNINITIALISED
from ringverify.properties.values import FORWARD, GRADIENTS_OF_OUT, LSE
from ringverify.properties.world_size_invariance import WORLD_SIZE_INVARIANCE
from ringverify.targets import load
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.world import Failure

PLAIN = Capabilities(gradients=False, lse=False, window=True)


SHARED = (
    "ranks share memory, which they cannot in processes of their own: if a buffer is kept in a module or an object for "
    "the whole process, declare processes=True"
)


def test_wrong_numbers_of_ranks_that_share_memory_come_with_what_to_declare():
    """Right code, if each rank has a process: nothing else is its fault."""
    case = Case(problem=Problem(query_length=6), world_size=3)
    runner = Runner(hazardous.shared, SimulatedWorld())
    wrong = Violation(("value", "out"), 0, "out is wrong")
    found = {hint.property: hint.text for hint in beside(FORWARD, runner, runner, case, wrong)}
    assert found["hazards"].endswith(f"; {SHARED}")


def shown(property, attend, capabilities=PLAIN, *, examples=8):
    """The counterexample to a property of a function."""
    runner = Runner(Implementation(attend, "subject", capabilities), SimulatedWorld())
    found = hunt(property, runner, examples=examples, seed=0, progress=lambda number: None)
    assert found.mishaps == []
    return found.counterexample


def plain(q, k, v, call):
    """The right out."""
    return ring_of(STEPS)(q, k, v, call)[0]


@pytest.mark.parametrize(
    ("attend", "cause"),
    [
        (hazardous.zeroed, "a buffer is written to while a send of it is in flight"),
        (hazardous.early, "a buffer is read while a receive into it is in flight"),
        (hazardous.shared, SHARED),
    ],
)
def test_a_hazard_has_a_cause(attend, cause):
    """In the words of the hazard, not of the message."""
    runner = Runner(attend, SimulatedWorld())
    found = hunt(HAZARDS, runner, examples=8, seed=0, progress=lambda number: None).counterexample
    assert found.diagnosis.text == cause


def impatient(q, k, v, call):
    """Attention to all blocks, of which only the sends are waited for."""
    blocks = [torch.stack((k, v))]
    for _ in range(call.world_size - 1):
        right, left = hazardous.peers(call)
        blocks.append(torch.full_like(blocks[0], 0.7))
        sends = dist.P2POp(dist.isend, blocks[-2], right, call.group)
        receives = dist.P2POp(dist.irecv, blocks[-1], left, call.group)
        dist.batch_isend_irecv([sends, receives])[0].wait()
    k, v = torch.cat(blocks, dim=2)
    return torch.einsum("bhqk,bkhd->bqhd", (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).softmax(-1), v)


def test_numbers_that_are_read_before_they_arrive_have_that_as_their_cause():
    """With who reads what and where: no other cause is known of numbers that are whatever was in memory."""
    case = Case(problem=Problem(query_length=4), world_size=2)
    declared = dataclasses.replace(PLAIN, causal="never", window=False)
    runner = Runner(Implementation(impatient, "impatient", declared), SimulatedWorld())
    even = dataclasses.replace(FORWARD, cases=lambda capabilities: [case])
    found = hunt(even, runner, examples=1, seed=0, progress=lambda number: None).counterexample
    cause, _, where = found.diagnosis.text.partition(": ")
    assert cause == "a buffer is read while a receive into it is in flight"
    assert "before it completed, at test_conduct.py:" in where


def test_a_collective_on_the_default_group_is_the_cause_of_a_deadlock():
    """And a world that is the ring is right: the group matters."""

    def attend(q, k, v, call):
        dist.all_reduce(torch.zeros(1))
        return plain(q, k, v, call)

    found = shown(SUBGROUPS, attend, dataclasses.replace(PLAIN, subgroups=True))
    assert found.violation.kind == "deadlock"
    assert found.diagnosis.text.startswith("communication of the ring runs on the default group")
    assert found.needs.requires == ("a group smaller than the world",)
    assert "group" not in found.needs.irrelevant


@pytest.mark.parametrize(
    ("peer", "says"),
    [
        (lambda call, other: other, "ranks of the group are used where torch takes those of the world"),
        (
            lambda call, other: dist.get_global_rank(
                call.group, other if dist.get_world_size() == call.world_size else 0
            ),
            "the default group, or its size, is used",
        ),
    ],
)
@pytest.mark.by_day(1)
def test_what_fails_only_in_a_group_of_a_larger_world_is_named_by_it(peer, says):
    """Where the first ranks of a larger world are right, it is the numbers; where they are wrong, it is the world."""

    def attend(q, k, v, call):
        others = [rank for rank in range(call.world_size) if rank != call.rank]
        ops = [
            dist.P2POp(op, torch.zeros(1), peer(call, other), call.group)
            for other in others
            for op in (dist.isend, dist.irecv)
        ]
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        return plain(q, k, v, call)

    found = shown(SUBGROUPS, attend, dataclasses.replace(PLAIN, subgroups=True), examples=20)
    assert found.diagnosis.text.startswith(says)


def sending(q, k, v, call, *, meets):
    """A right call after a row or none was sent to the next rank, as far as `meets` says."""
    rows = len(call.positions)
    after, before = ((call.rank + step) % call.world_size for step in (1, -1))
    sent, room = meets(rows, call)
    works = []
    if sent is not None:
        works.append(dist.isend(torch.zeros(sent), group=call.group, group_dst=after))
    if room is not None:
        works.append(dist.irecv(torch.zeros(room), group=call.group, group_src=before))
    for work in works:
        work.wait()
    return plain(q, k, v, call)


@pytest.mark.parametrize(
    ("meets", "kind", "says"),
    [
        (lambda rows, call: (rows or None, call.problem.nq // call.world_size), "deadlock",
         "a message without elements is received, and not sent: rank "),
        (lambda rows, call: (rows, call.problem.nq // call.world_size), "raised",
         "sender and receiver do not mean the same rows, or the same dtype: rank "),
    ],
)  # fmt: skip
@pytest.mark.by_day(1)
def test_messages_of_other_lengths_than_are_received_are_named(meets, kind, says):
    """Or of none, which are not sent."""

    def attend(q, k, v, call):
        alone = call.world_size == 1 or (kind == "deadlock" and call.problem.nq >= call.world_size)
        return plain(q, k, v, call) if alone else sending(q, k, v, call, meets=meets)

    capabilities = dataclasses.replace(PLAIN, uneven=True, empty_shards=True)
    found = shown(FORWARD, attend, capabilities, examples=60)
    assert found.violation.kind == kind
    assert found.diagnosis.text.startswith(says)


def written_to_in_flight(call):
    """A number to which a rank adds one before it has arrived."""
    after, before = ((call.rank + step) % call.world_size for step in (1, -1))
    room = torch.zeros(1)
    send = dist.isend(torch.zeros(1), group=call.group, group_dst=after)
    receive = dist.irecv(room, group=call.group, group_src=before)
    room += 1
    found = room.clone()
    send.wait()
    receive.wait()
    return found


@pytest.mark.nightly
def test_a_buffer_that_is_written_to_before_it_arrives_is_the_cause_of_wrong_values():
    """What is computed from it is not what arrives."""

    def attend(q, k, v, call):
        return plain(q, k, v, call) + (q.sin() + v.cos()) * written_to_in_flight(call)

    found = shown(FORWARD, attend)
    assert found.violation.kind == "value"
    assert found.diagnosis.text.startswith("a buffer is written to while a receive into it is in flight: rank ")


def test_a_hazard_is_told_before_what_comes_of_it():
    """Numbers may have a cause by themselves, such as keys that are left out; they are so because of the hazard."""

    def attend(q, k, v, call):
        written_to_in_flight(call)
        out = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).softmax(-1) @ v.transpose(1, 2)
        return out.transpose(1, 2)

    found = shown(FORWARD, attend, dataclasses.replace(PLAIN, causal="never", window=False))
    hazard, _, numbers = found.diagnosis.text.partition("; what comes of it: ")
    assert numbers.startswith("each rank attends its own block only")
    assert hazard.startswith("a buffer is written to while a receive into it is in flight: rank ")


@pytest.mark.nightly
def test_when_a_hazard_is_there_is_no_matter_of_the_values_that_show_it():
    """What is read too early spoils some results, by chance; that it is read so early is what is varied."""

    def attend(q, k, v, call):
        if call.world_size < 3:
            return plain(q, k, v, call)
        shows = int(64 * q.detach().sum().abs()) % 3 == 0
        return plain(q, k, v, call) + q.sin() * written_to_in_flight(call) * shows

    found = shown(FORWARD, attend)
    assert found.violation.kind == "value"
    assert found.needs.requires == ("at least 3 ranks",)
    assert "values" in found.needs.irrelevant


@pytest.mark.nightly
def test_a_handle_that_nobody_waits_for_is_the_cause_of_wrong_values():
    """Of a receive rather than of a send, where both are not waited for."""

    def attend(q, k, v, call):
        after, before = ((call.rank + step) % call.world_size for step in (1, -1))
        room = torch.zeros(1)
        dist.isend(torch.zeros(1), group=call.group, group_dst=after)
        dist.irecv(room, group=call.group, group_src=before)
        return plain(q, k, v, call) + q.sin() + v.cos() * (call.world_size > 1)

    found = shown(FORWARD, attend)
    assert found.diagnosis.text.startswith(
        "a send or receive is not waited for, so that what arrives may not be there when it is read: rank 0 never "
        "waited for its receive from rank "
    )


@pytest.mark.nightly
def test_two_messages_into_one_buffer_are_the_cause_of_wrong_values():
    """What arrives last is there twice."""

    def attend(q, k, v, call):
        both, size = torch.stack((k, v)), call.world_size
        buffer, blocks, works = torch.empty_like(both), [both], []
        for rank in range(size):
            if rank != call.rank:
                works.append(dist.irecv(buffer, group=call.group, group_src=rank))
                works.append(dist.isend(both, group=call.group, group_dst=rank))
                blocks.append(buffer)
        for work in works:
            work.wait()
        k, v = torch.cat(blocks, dim=2)
        return torch.einsum("bhqk,bkhd->bqhd", (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).softmax(-1), v)

    found = shown(FORWARD, attend, dataclasses.replace(PLAIN, causal="never", window=False, gradients=False))
    assert found.diagnosis.text.startswith("a buffer is received into while a receive into it is in flight: rank ")


@pytest.mark.nightly
def test_an_input_that_is_changed_in_place_is_the_cause_of_wrong_gradients():
    """The backward reads what the forward has made of it."""

    def attend(q, k, v, call):
        out = plain(q, k, v, call)
        q.data.mul_(3)
        return out

    found = shown(PROPERTIES["gradients"], attend, dataclasses.replace(PLAIN, gradients=True))
    assert found.violation.kind == "value"
    assert found.diagnosis.text == "q is multiplied by 3 in place: rank 0 changed its input q during forward"


def test_a_rank_whose_queries_attend_nothing_and_that_returns_early_is_named():
    """It holds keys that others attend."""
    case = Case(problem=Problem(query_length=4, key_length=2, causal=True), world_size=2)
    failure = Failure("deadlock", None, "", "", waits=((1, "a receive from rank 0, tag 0"),), returned=(0,))
    told = of_deadlock(case, dataclasses.replace(PLAIN, cross_lengths=True), failure, ())
    assert told.startswith("rank 0, whose queries attend no key, takes no part in")
    condition = next(one for one in conditions({}, PLAIN) if "whose queries attend no key" in one.text)
    assert condition.meets(features(case, PLAIN))
    assert not condition.meets(features(case.replace(query_length=2), PLAIN))


def test_a_rank_that_returns_early_is_named_with_what_it_lacks():
    """It holds no tokens, so it takes no part."""

    def attend(q, k, v, call):
        return plain(q, k, v, call) if q.size(1) else q * v.sum()

    capabilities = dataclasses.replace(PLAIN, uneven=True, empty_shards=True)
    found = shown(FORWARD, attend, capabilities, examples=60)
    assert found.violation.kind == "deadlock"
    told = found.diagnosis.text
    assert "which holds no tokens, takes no part in" in told or "which holds no queries, takes no part in" in told


def test_a_rank_that_has_gone_on_to_a_collective_is_named():
    """It has left the ring, in which another still waits for it."""

    def attend(q, k, v, call):
        if call.rank:
            dist.recv(torch.empty(1), group=call.group, group_src=0)
        dist.all_reduce(torch.zeros(1), group=call.group)
        return plain(q, k, v, call)

    found = shown(FORWARD, attend)
    assert found.violation.kind == "deadlock"
    assert found.diagnosis.text.startswith("rank 0 leaves an exchange of messages before others do: it waits for all_")
    assert found.diagnosis.text.endswith("and rank 1 for a receive from rank 0, tag 0")


class Spoiling(torch.autograd.Function):
    """Returns what it is given, which its backward sets to 0."""

    @staticmethod
    def forward(ctx, out):
        """Right."""
        ctx.out = out.clone()
        return ctx.out

    @staticmethod
    def backward(ctx, dout):
        """In place."""
        ctx.out.data.zero_()
        return dout


@pytest.mark.nightly
def test_a_result_that_the_backward_changes_is_told():
    """Without a backward it is right."""

    def attend(q, k, v, call):
        return Spoiling.apply(plain(q, k, v, call))

    found = shown(PROPERTIES["overflow"], attend, dataclasses.replace(PLAIN, gradients=True))
    assert found.violation.finding.tensor == "out"
    assert found.diagnosis.text == "out is right until the backward runs, which changes what the forward has returned"


def test_of_a_deadlock_of_ranks_that_nothing_tells_apart_no_cause_is_named():
    """Every rank holds queries and keys."""
    case = Case(problem=Problem(query_length=4), world_size=2)
    failure = Failure("deadlock", None, "", "", waits=((0, "a receive from rank 1, tag 0"),), returned=(1,))
    assert of_deadlock(case, PLAIN, failure, ()) is None


def test_ranks_that_wait_where_all_hold_tokens_do_not_for_what_holds_none():
    """Whatever the smallest case is."""
    case = Case(problem=Problem(query_length=0), world_size=3)
    waits = ((2, "a receive from rank 1, tag 0"),)
    failure = Failure("deadlock", None, "", "", waits=waits, returned=(0, 1), for_nothing=(2,))
    declared = dataclasses.replace(PLAIN, uneven=True, empty_shards=True)
    assert of_deadlock(case, declared, failure, ()).startswith("a message without elements is received, and not sent")
    assert of_deadlock(case, declared, failure, (), full=True) is None


@pytest.mark.nightly
def test_a_deadlock_whatever_the_length_is_not_laid_to_messages_without_elements():
    """The last of an odd number of ranks waits for a partner that it has not."""

    def attend(q, k, v, call):
        if call.world_size % 2 and call.rank == call.world_size - 1 > 0:
            dist.recv(torch.empty_like(k), group=call.group, group_src=0)
        return plain(q, k, v, call)

    declared = dataclasses.replace(PLAIN, uneven=True, empty_shards=True)
    found = shown(FORWARD, attend, declared, examples=60)
    assert (found.violation.kind, found.case.problem.nq) == ("deadlock", 0)
    assert found.diagnosis.text.startswith("ranks do not agree on who sends to whom, or how often: rank 2 waits")


def test_ranks_that_wait_for_each_other_are_told_as_a_circle():
    """All of them receive before they send."""

    def attend(q, k, v, call):
        right, left = hazardous.peers(call)
        if call.world_size > 1:
            dist.recv(torch.empty_like(k), left, call.group)
            dist.send(k.contiguous(), right, call.group)
        return plain(q, k, v, call)

    found = shown(FORWARD, attend)
    assert found.violation.kind == "deadlock"
    assert found.diagnosis.text == (
        "ranks wait for each other in a circle: rank 0 for a receive from rank 1, tag 0, rank 1 for a receive from "
        "rank 0, tag 0"
    )


def test_what_raises_has_the_line_that_raised_for_its_cause():
    """Where no wrong number of a case like it tells more; and what the sizes are that do not fit."""

    def attend(q, k, v, call):
        torch.empty(call.problem.nk // call.world_size).copy_(torch.empty(k.size(1)))
        return plain(q, k, v, call)

    found = shown(FORWARD, attend, dataclasses.replace(PLAIN, uneven=True), examples=60)
    assert found.violation.kind == "raised"
    what, _, line = found.diagnosis.text.partition(", by ")
    assert what.startswith("raised at test_conduct.py:")
    line, sizes = line.split("; ")
    assert line == "`torch.empty(call.problem.nk // call.world_size).copy_(torch.empty(k.size(1)))`"
    told = r"(\d+) is the last rank's number of tokens or .*, and (\d+) is the rank's own number of tokens"
    short, long = re.search(told, sizes).groups()
    assert int(short) < int(long)


@pytest.mark.nightly
def test_what_torch_raises_of_a_gradient_has_no_line_of_the_users():
    """It is found where gradients are asked for, which is no line of theirs."""

    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad.flatten()

    declared = dataclasses.replace(PLAIN, gradients=True, window=False)
    found = shown(GRADIENTS_OF_OUT, lambda q, k, v, call: plain(Cut.apply(q), k, v, call), declared)
    assert found.violation.kind == "raised"
    assert found.diagnosis.text == "raised by autograd, of what a backward has returned"


@pytest.mark.nightly
def test_what_raises_is_explained_by_wrong_numbers_of_a_case_like_it():
    """A block that is taken for another rank's: it does not fit where shards differ, and has wrong positions else."""

    def attend(q, k, v, call):
        n, size = call.problem.nk, call.world_size
        right, left = hazardous.peers(call)
        blocks, positions = [torch.stack((k, v))], [call.key_positions]
        for hop in range(1, size):
            positions.append(torch.arange(n).tensor_split(size)[(call.rank + hop) % size])
            blocks.append(k.new_empty(2, k.size(0), len(positions[-1]), *k.shape[2:]))
            sends = dist.P2POp(dist.isend, blocks[-2], right, call.group)
            receives = dist.P2POp(dist.irecv, blocks[-1], left, call.group)
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()
        k, v = torch.cat(blocks, dim=2)
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        s = s.masked_fill(torch.cat(positions) > call.positions[:, None], -torch.inf)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)

    declared = dataclasses.replace(PLAIN, causal="always", window=False, uneven=True)
    case = Case(problem=Problem(query_length=7, causal=True), world_size=3)
    found = shown(dataclasses.replace(FORWARD, cases=lambda c: [case]), attend, declared)
    assert found.violation.kind == "raised"
    assert "as wrong numbers tell where nothing is raised: " in found.diagnosis.text
    assert "; what comes of it here: sender and receiver do not mean the same rows" in found.diagnosis.text


def test_a_deadlock_in_some_groups_alone_is_laid_to_the_numbers_of_ranks():
    """Who sends first is told by the parity of the rank in the world."""

    def attend(q, k, v, call):
        right, left = (dist.get_global_rank(call.group, (call.rank + by) % call.world_size) for by in (1, -1))
        room = torch.empty_like(k)
        first = functools.partial(dist.send, k.contiguous(), right, call.group)
        second = functools.partial(dist.recv, room, left, call.group)
        if dist.get_rank() % 2:
            first, second = second, first
        if call.world_size > 1 and q.numel():
            first()
            second()
        return plain(q, k, v, call)

    declared = dataclasses.replace(PLAIN, subgroups=True)
    found = shown(SUBGROUPS, attend, declared)
    assert found.violation.kind == "deadlock"
    assert found.diagnosis.text.startswith("who sends first, or goes before others, is decided by ranks of the world")


@pytest.mark.parametrize(("idle", "says"), [((1,), "rank 1, which holds no "), ((), "a message without")])
def test_an_empty_rank_that_took_part_has_not_returned_early(idle, says):
    """It has received, and did not send what has no elements."""
    case = Case(problem=Problem(query_length=1), world_size=2)
    waits = ((0, "a receive from rank 1, tag 0"),)
    failure = Failure("deadlock", None, "", "", waits=waits, returned=(1,), for_nothing=(0,), idle=idle)
    told = of_deadlock(case, dataclasses.replace(PLAIN, uneven=True, empty_shards=True), failure, ())
    assert told.startswith(says)


@pytest.mark.parametrize(("sends", "idle"), [(True, (1,)), (False, ())])
def test_a_rank_that_leaves_a_message_unreceived_took_no_part(sends, idle):
    """Though it communicated before; one to which nothing was sent since may be done."""

    def attend(q, k, v, call):
        dist.all_reduce(torch.ones(1), group=call.group)
        if call.rank == 0:
            works = [dist.isend(k.contiguous(), 1)] if sends else []
            works.append(dist.irecv(torch.empty_like(k), 1))
            for work in works:
                work.wait()
        return plain(q, k, v, call)

    runner = Runner(Implementation(attend, "subject", PLAIN), SimulatedWorld())
    failure = runner.run(Case(problem=Problem(query_length=4), world_size=2), gradients=False).failure
    assert (failure.kind, failure.idle) == ("deadlock", idle)


def test_a_block_that_is_skipped_with_its_messages_is_told():
    """Where some rank attends nothing of a block, whatever the reason."""
    case = Case(problem=Problem(query_length=1), world_size=2)
    failure = Failure("deadlock", None, "", "", waits=((0, "a receive from rank 1, tag 0"),), returned=(1,))
    for requires in SKIPPING:
        told = of_deadlock(case, PLAIN, failure, ("causal", requires))
        assert told.startswith("a rank that skips a block of which it attends nothing, or that needs no further one, ")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda q, call: q.mul_(call.scale), "q is multiplied by the scale ("),
        (lambda q, call: q.mul_(3), "q is multiplied by 3 in place"),
        (lambda q, call: q.add_(1), None),
    ],
)
@pytest.mark.by_day(1)
def test_an_input_that_is_scaled_in_place_is_told_with_its_factor(change, says):
    """The scale by its name; nothing is said of another change. The dtype matters where a 16-bit input is copied."""

    def attend(q, k, v, call):
        wide = q.float()
        with torch.no_grad():
            change(wide, call)
        return plain(q, k, v, call)

    found = shown(INPUTS_UNTOUCHED, attend, dataclasses.replace(PLAIN, dtypes=("float32", "bfloat16")))
    assert "changed its input q" in found.violation.summary
    assert "float32" in found.needs.requires
    assert found.diagnosis.text is None if says is None else found.diagnosis.text.startswith(says)


def test_documents_that_are_kept_by_their_number_are_told_so(monkeypatch):
    """An earlier call with one more of them, which is empty, lets the later one pass."""
    kept = {}

    def attend(q, k, v, call):
        documents = call.documents
        if documents is not None:
            documents = kept.setdefault((call.rank, call.problem.nq, len(documents)), documents)
        told = call.problem.replace(documents=documents)
        return plain(q, k, v, dataclasses.replace(call, problem=told))

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(following, "afresh", afresh)
    monkeypatch.setattr(keeping, "afresh", afresh)
    runner = Runner(Implementation(attend, "subject", dataclasses.replace(PLAIN, documents=True)), SimulatedWorld())
    late = Case(problem=Problem(query_length=8, documents=(0, 3, 8)), world_size=2)
    early = late.replace(documents=(0, 6, 8))
    needs, _ = of_state(("documents",))
    told = Needed(requires=(needs,), irrelevant=(), complete=True)
    violation = afresh(FORWARD, runner, [early, late]).violation
    found = Counterexample(late, violation, "", late, 0, True, True, (early,), needs=told)
    (said,) = keeping.with_what_is_alike(FORWARD, runner, found).needs.requires
    assert said == f"{needs} and the same length and number of documents"


def test_other_masks_that_do_instead_are_told(monkeypatch):
    """What is kept is made of causal mask, window and documents, by the length alone; heads do not come into it."""
    kept = {}

    def attend(q, k, v, call):
        p = call.problem
        masks = kept.setdefault((call.rank, p.nq), (p.causal, p.window, p.documents))
        told = p.replace(**dict(zip(("causal", "window", "documents"), masks, strict=True)))
        return plain(q, k, v, dataclasses.replace(call, problem=told))

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(following, "afresh", afresh)
    monkeypatch.setattr(keeping, "afresh", afresh)
    declared = dataclasses.replace(PLAIN, documents=True, key_lengths=True)
    runner = Runner(Implementation(attend, "subject", declared), SimulatedWorld())
    late = Case(problem=Problem(query_length=8), world_size=2)
    early = late.replace(causal=True)
    needs, cause = of_state(("causal",))
    violation = afresh(FORWARD, runner, [early, late]).violation
    told = Needed(requires=(needs,), irrelevant=(), complete=True)
    found = Counterexample(late, violation, "", late, 0, True, True, (early,), Diagnosis(cause), needs=told)
    more = keeping.with_what_is_alike(FORWARD, runner, found)
    other = "another causal mask, another window or other documents"
    assert more.needs.requires == (f"an earlier call in the same process with {other} and the same length",)
    assert more.diagnosis.text == f"what an earlier call with {other} leaves behind in the process is used again"


@pytest.mark.parametrize(
    ("key", "same"),
    [
        pytest.param(lambda call: (call.rank, call.problem.nq), "length", id="lengths"),
        pytest.param(lambda call: (call.rank, tuple(call.positions.tolist())), "positions on a rank", id="positions"),
        pytest.param(
            lambda call: (call.rank, call.problem.nq, call.causal, call.problem.heads),
            "length, causal mask and heads",
            id="more",
        ),
    ],
)
def test_state_is_told_by_what_its_key_lacks(monkeypatch, key, same):
    """A window of an earlier call serves a later one with the same key: the two calls differ in the window alone."""
    kept = {}

    def attend(q, k, v, call):
        told = call.problem.replace(window=kept.setdefault(key(call), call.window))
        return plain(q, k, v, dataclasses.replace(call, problem=told))

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(following, "afresh", afresh)
    monkeypatch.setattr(keeping, "afresh", afresh)
    runner = Runner(Implementation(attend, "subject", PLAIN), SimulatedWorld())
    late = Case(problem=Problem(query_length=12, heads=2, head_dim=4), world_size=2)
    early = late.replace(window=(2, 0), seed=7)
    other = late.replace(query_length=8)
    after, case, judgement = following.what_it_follows(FORWARD, runner, late, (other, early), ENDLESS, until=math.inf)
    assert [{*differing(case, one)} for one in after] == [{"window"}]
    assert case.problem.nq < late.problem.nq
    assert judgement.violation is not None
    needs, cause = of_state(tuple(differing(case, after[0])))
    assert needs == "an earlier call in the same process with another window"
    told = Needed(requires=(needs,), irrelevant=(), complete=True)
    found = Counterexample(case, judgement.violation, "", case, 0, True, True, after, needs=told)
    (said,) = keeping.with_what_is_alike(FORWARD, runner, found).needs.requires
    assert said == f"{needs} and the same {same}"
    several = dataclasses.replace(found, after=(after[0].replace(seed=99),))
    assert keeping.with_what_is_alike(FORWARD, runner, several).needs == told
    assert cause.startswith("what an earlier call with another window leaves behind")


def test_an_earlier_call_is_made_like_the_one_that_it_spoils(monkeypatch):
    """But for what it takes: lengths are told apart by halves, so that one of them only serves another."""
    kept = {}

    def attend(q, k, v, call):
        length = call.problem.nq
        return plain(q, k, v, call) + kept.setdefault(-(-length // 2), length) - length

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(following, "afresh", afresh)
    monkeypatch.setattr(keeping, "afresh", afresh)
    declared = dataclasses.replace(PLAIN, uneven=True)
    runner = Runner(Implementation(attend, "subject", declared), SimulatedWorld())
    late = Case(problem=Problem(query_length=12, heads=2, head_dim=4), world_size=2)
    before = (late.replace(query_length=8), late.replace(query_length=11, heads=3, seed=7, window=(2, 0)))
    (after,), case, _ = following.what_it_follows(FORWARD, runner, late, before, ENDLESS, until=math.inf)
    assert differing(case, after) == {"query_length": 11}


def test_an_earlier_call_is_found_among_many_and_told_without_what_is_tied(monkeypatch):
    """By halves; numbers of heads and of key heads are changed together, as one of them is not legal alone."""
    kept = {}

    def attend(q, k, v, call):
        return plain(q, k, v, call) + (0 if kept.setdefault(call.problem.nq, call.window) == call.window else 1)

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(following, "afresh", afresh)
    monkeypatch.setattr(keeping, "afresh", afresh)
    declared = dataclasses.replace(PLAIN, uneven=True, gqa=True)
    runner = Runner(Implementation(attend, "subject", declared), SimulatedWorld())
    late = Case(problem=Problem(query_length=12, heads=1, head_dim=4), world_size=2)
    others = tuple(late.replace(query_length=n) for n in range(13, 60))
    before = (*others, late.replace(window=(2, 0), heads=3, key_heads=3, seed=7), *others[:9])
    monkeypatch.setattr(following, "STATE_SHRINKING", 0.0)
    (after,), case, _ = following.what_it_follows(FORWARD, runner, late, before, ENDLESS, until=-math.inf)
    assert case == late
    assert differing(case, after) == {"window": (2, 0)}


def test_state_that_was_told_is_not_searched_for_again(monkeypatch):
    """A case that passes alone, and fails after one of those before it; not where it fails alone, or after none."""
    kept = {}

    def attend(q, k, v, call):
        return plain(q, k, v, call) + kept.setdefault("seed", call.problem.nq) - call.problem.nq

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(following, "afresh", afresh)
    monkeypatch.setattr(keeping, "afresh", afresh)
    runner = Runner(Implementation(attend, "subject", PLAIN), SimulatedWorld())
    case = Case(problem=Problem(query_length=6), world_size=2)
    before = case.replace(query_length=8)
    failing = afresh(FORWARD, runner, [before, case])
    shown = Counterexample(case, failing.violation, "", case, 0, True, True, (before,), diagnosis=Diagnosis("kept"))
    stories = [ToldFailure(LSE, shown)]

    def again(*history):
        return following.follows_again(stories, FORWARD, runner, Found(case, failing, (), history))

    found = again(case.replace(seed=3), before)
    assert (found.after, found.same_as, found.diagnosis.text) == ((before,), LSE, "kept")
    assert again().after == (before,)  # it differs as the one that was told does
    stories = [ToldFailure(LSE, dataclasses.replace(shown, after=(case,)))]
    assert again(case.replace(seed=3), before, case.replace(seed=4)).after == (before,)
    assert again(case.replace(seed=3)) is None
    assert following.follows_again([], FORWARD, runner, Found(case, failing, (), (before,))) is None
    monkeypatch.setattr(following, "afresh", lambda *_: failing)
    assert again(before) is None


def test_state_of_calls_that_differ_in_more_is_not_laid_to_one_of_these():
    """Nor where they do not differ at all."""
    assert of_state(("window", "seed"))[0] == "an earlier call in the same process"
    assert of_state(("seed", "values"))[0].endswith("with other input values")
    assert of_state(())[0].endswith("with the same arguments")
    assert of_state((), [])[0] == "an earlier call in the same process"


def test_state_that_any_earlier_call_leaves_is_told_by_what_it_is_kept_by(monkeypatch):
    """The calls before have other masks too, which is no matter: a sum is kept by length and heads, and not cleared."""
    kept = {}

    def attend(q, k, v, call):
        found = plain(q, k, v, call)
        total = kept.setdefault((call.rank, call.problem.nq, call.problem.heads), torch.zeros_like(found))
        total += found
        return total.clone()

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(following, "afresh", afresh)
    monkeypatch.setattr(keeping, "afresh", afresh)
    runner = Runner(Implementation(attend, "subject", PLAIN), SimulatedWorld())
    late = Case(problem=Problem(query_length=12, heads=2), world_size=2)
    before = (late.replace(query_length=8), late.replace(causal=True, seed=7), late)
    after, case, judgement = following.what_it_follows(FORWARD, runner, late, before, ENDLESS, until=math.inf)
    assert after == (case,)
    assert case.problem.nq < late.problem.nq
    told = Needed(requires=of_state(())[:1], irrelevant=(), complete=True)
    found = Counterexample(case, judgement.violation, "", case, 0, True, True, after, needs=told)
    (said,) = keeping.with_what_is_alike(FORWARD, runner, found).needs.requires
    assert said == "an earlier call in the same process, with the same length and heads"


def test_what_the_first_call_leaves_is_found_though_most_calls_before_leave_what_is_right(monkeypatch):
    """The right end of a window is kept by its left end: calls without a window do no harm."""
    kept = {}

    def attend(q, k, v, call):
        left, right = call.window or (None, None)
        kept_right = kept.setdefault((call.rank, call.problem.nq, call.causal, left), right)
        return plain(q, k, v, dataclasses.replace(call, problem=call.problem.replace(window=(left, kept_right))))

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(following, "afresh", afresh)
    runner = Runner(Implementation(attend, "subject", PLAIN), SimulatedWorld())
    late = Case(problem=Problem(query_length=6, heads=2), world_size=2)
    before = tuple(late.replace(seed=seed, heads=1 + seed % 3) for seed in range(1, 30))
    (after,), case, _ = following.what_it_follows(FORWARD, runner, late, before, ENDLESS, until=math.inf)
    assert {*differing(case, after)} == {"window"}
    assert after.problem.window[0] is None


def spoilt(monkeypatch, spoils, early, late):
    """Return what is said of two calls, of which the earlier one leaves its problem to `spoils(kept, now)`."""
    kept = []

    def attend(q, k, v, call):
        out = plain(q, k, v, call)
        wrong = any(spoils(one, call.problem, size, call.world_size) for one, size in kept)
        kept.append((call.problem, call.world_size)) if call.rank == call.world_size - 1 else None
        return out + 1 if wrong else out

    def afresh(property, runner, cases):
        kept.clear()
        return [judged(property, case, runner) for case in cases][-1]

    monkeypatch.setattr(keeping, "afresh", afresh)
    declared = dataclasses.replace(PLAIN, uneven=True, gqa=True)
    runner = Runner(Implementation(attend, "subject", declared), SimulatedWorld())
    violation = afresh(FORWARD, runner, [early, late]).violation
    needs, cause = of_state(untied(differing(late, early)))
    told = Needed(requires=(needs,), irrelevant=(), complete=True)
    found = Counterexample(late, violation, "", late, 0, True, True, (early,), Diagnosis(cause), needs=told)
    more = keeping.with_what_is_alike(FORWARD, runner, found)
    return more.needs.requires, more.diagnosis.text


def test_an_earlier_call_that_has_to_be_longer_is_told_so(monkeypatch):
    """And the cause says it too; in the other order the two pass."""
    late = Case(problem=Problem(query_length=4), world_size=2)
    requires, cause = spoilt(monkeypatch, lambda was, now, *_: was.nq > now.nq, late.replace(query_length=6), late)
    assert requires == ("an earlier call in the same process with more positions",)
    assert cause == "what an earlier call with more positions leaves behind in the process is used again"


def test_an_earlier_call_that_has_to_be_as_large_is_told_so(monkeypatch):
    """It may be the same call; what is as small as it can be is made larger to learn this."""
    late = Case(problem=Problem(query_length=1), world_size=1)
    requires, _ = spoilt(monkeypatch, lambda was, now, *_: was.nq >= now.nq and was.heads <= now.heads, late, late)
    said = "an earlier call in the same process, with at least as many positions and at most as many heads"
    assert requires == (said,)


def test_a_mask_that_does_instead_of_one_that_both_calls_need_is_told(monkeypatch):
    """A window or a causal mask; of masks that the two do not have, those are tried that are declared."""
    late = Case(problem=Problem(query_length=4, heads=2, window=(1, None)), world_size=2)

    def spoils(was, now, *_):
        return was.heads != now.heads and all(bool(one.causal or one.window) for one in (was, now))

    requires, _ = spoilt(monkeypatch, spoils, late.replace(heads=3), late)
    assert requires[1:] == ("window or causal",)


def test_a_mask_that_the_earlier_call_alone_has_is_told(monkeypatch):
    """Not a mask that both have, nor one that the later one alone has."""
    late = Case(problem=Problem(query_length=4), world_size=2)

    def spoils(was, now, *_):
        return was.causal > now.causal and was.nq == now.nq

    requires, cause = spoilt(monkeypatch, spoils, late.replace(causal=True), late)
    same = "with the same length"
    assert requires == (f"an earlier call in the same process with a causal mask, before one without, {same}",)
    assert cause == "what an earlier call with another causal mask leaves behind in the process is used again"


def test_two_fields_of_which_one_follows_the_other_are_told_as_one(monkeypatch):
    """Another number of heads has other key heads too, which is no matter."""
    late = Case(problem=Problem(query_length=4, heads=3), world_size=2)

    def spoils(was, now, *_):
        return was.heads != now.heads and was.nq == now.nq

    requires, cause = spoilt(monkeypatch, spoils, late.replace(heads=4, key_heads=2), late)
    assert requires == ("an earlier call in the same process with other heads and the same length",)
    assert cause == "what an earlier call with other heads leaves behind in the process is used again"


def test_what_both_calls_need_is_told(monkeypatch):
    """A causal mask, fewer key heads, three ranks; not a window, though both have one."""
    problem = Problem(query_length=6, heads=2, key_heads=1, causal=True, window=(3, 0))
    late = Case(problem=problem, world_size=3)

    def spoils(was, now, *ranks):
        return now.causal and was.causal and now.group_size > 1 and min(ranks) > 2

    requires, _ = spoilt(monkeypatch, spoils, late, late)
    assert requires[1:] == ("causal", "fewer key heads than heads (GQA)", "at least 3 ranks")


@pytest.mark.parametrize("unwritten", [True, False])
def test_unwritten_memory_is_no_state(unwritten):
    """What lies in new memory is mostly what an earlier call left there: filled with NaN, it is wrong by itself."""

    def attend(q, k, v, call):
        out = plain(q, k, v, call)
        return out + (torch.empty_like(out) if unwritten else torch.zeros_like(out)).clamp(0, 0)

    runner = Runner(Implementation(attend, "subject", PLAIN), SimulatedWorld())
    case = Case(problem=Problem(query_length=4), world_size=2)
    assert (accounting._of_unwritten(case, runner) is not None) == unwritten
    assert accounting._of_unwritten(case, None) is None


def test_what_arrives_too_late_is_not_called_unwritten():
    """A receive that nobody waits for: its memory is unwritten as well, but that is not why."""
    runner = Runner(Implementation(careless.forgotten, "subject", PLAIN), SimulatedWorld())
    case = Case(problem=Problem(query_length=4), world_size=2)
    assert judged(UNINITIALISED, case, runner).violation is not None
    assert accounting._of_unwritten(case, runner) is None


def test_what_arrives_too_late_is_not_sought_in_earlier_calls(monkeypatch):
    """Whether it passes is chance, after any call and after none."""
    runner = Runner(Implementation(careless.forgotten, "subject", PLAIN), SimulatedWorld())
    case = Case(problem=Problem(query_length=4), world_size=2)
    failing = judged(UNINITIALISED, case, runner)
    monkeypatch.setattr(finishing, "afresh", lambda *_: Judgement(0.0, None))
    monkeypatch.setattr(finishing, "what_it_follows", lambda *_, **__: pytest.fail("an earlier call is sought"))
    found = Found(case, failing, (), ())
    mishaps = []
    shown, _ = finishing._smallest(UNINITIALISED, runner, found, [], ENDLESS, lambda: None, [], mishaps, own=True)
    assert not mishaps
    assert (shown.repeats, shown.after) == (False, ())
    assert "receive" in shown.diagnosis.text


def test_a_call_that_is_wrong_when_it_is_made_again_is_no_matter_of_messages():
    """Though it is made again where they are watched."""
    made = []

    def attend(q, k, v, call):
        made.append(call.rank)
        return plain(q, k, v, call) + (made.count(call.rank) > 1)

    runner, case = (
        Runner(Implementation(attend, "subject", PLAIN), SimulatedWorld()),
        Case(problem=Problem(query_length=4)),
    )
    assert judged(FORWARD, case, runner).violation is None
    assert not accounting.depends_on_messages(case, runner)
    late = Runner(Implementation(careless.forgotten, "subject", PLAIN), SimulatedWorld())
    assert accounting.depends_on_messages(case.replace(world_size=2), late)


@pytest.mark.nightly
def test_a_hang_names_the_deadline_of_the_case_found_first(monkeypatch):
    """Smaller cases are waited for less long."""
    monkeypatch.setattr(finishing, "HUNG_DEADLINE", 0.2)

    def attend(q, k, v, call):
        while q.size(2) > 1:
            time.sleep(0.01)
        return plain(q, k, v, call)

    runner = Runner(Implementation(attend, "subject", PLAIN), SimulatedWorld(), deadline=0.5)
    found = hunt(FORWARD, runner, examples=20, seed=0, progress=lambda done: None).counterexample
    assert found.case != found.first
    assert found.violation.summary.startswith("after 0.2 s rank 0 had not returned: ")
    assert found.violation.summary.endswith(" (the case it was shrunk from, after 0.5 s)")


def test_a_case_of_calls_on_a_cache_is_compared_with_others_without_the_cache():
    """A property of others has no results of several calls to judge."""
    runner = Runner(load("ring"), SimulatedWorld())
    on_a_cache = next(one for one in drawn(INCREMENTAL, runner.capabilities, 9, seed=0) if one.chunks)
    case, violation = Case(problem=Problem(query_length=4), world_size=2), Violation(("value", "out"), 0, "wrong")
    told = ToldFailure(WORLD_SIZE_INVARIANCE, Counterexample(case, violation, "", case, 0, True, True))
    assert sameness._plain(told, INCREMENTAL, on_a_cache, runner, runner) is None  # our ring breaks neither
