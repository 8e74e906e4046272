"""Gradients and rows that arrive in the wrong place, or not all of them, each by an exchange written by hand."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from mechanisms import case_of, explaining, library, of_all_ranks, of_gradients, seen

from ringref.problem import Dilation
from ringref.sharding import pieces
from ringverify.diagnosis import reading
from ringverify.diagnosis.gradients import carrying, sinks, stale
from ringverify.diagnosis.merging_branches import MERGED_BRANCHES
from ringverify.diagnosis.rearranging import REARRANGED
from ringverify.diagnosis.substituting import SUBSTITUTED
from ringverify.faults.ring import EVERYTHING, PLAIN, STEPS, multiplicity, ring_of
from ringverify.implementation import Capabilities, Implementation


class Gathered(torch.autograd.Function):
    """Contiguous shards of all ranks; their gradients are put together by hand."""

    @staticmethod
    def forward(ctx, x, call, together):
        """Shards have one length."""
        ctx.call, ctx.together = call, together
        return torch.cat(of_all_ranks(x, call), dim=1)

    @staticmethod
    def backward(ctx, gradient):
        """Of what each rank adds to each shard, by rank and owner."""
        every = [one.chunk(ctx.call.world_size, dim=1) for one in of_all_ranks(gradient, ctx.call)]
        return ctx.together(ctx.call, every), None, None


def attending(together):
    """Attention of gathered keys and values, whose gradients are put together so."""

    def attend(q, k, v, call):
        k, v = (Gathered.apply(x, call, together) for x in (k, v))
        i, j = call.positions[:, None], torch.arange(k.size(1))
        mask = torch.ones(len(i), len(j), dtype=torch.bool)
        if call.window is not None:
            mask &= (j >= i - call.window[0]) & (j <= i + call.window[1])
        if call.documents is not None:
            ends = torch.tensor(call.documents)
            number = [torch.bucketize(at, ends, right=True) for at in (i, j)]
            mask &= (number[0] == number[1]) & (number[0] > 0) & (number[0] < len(ends))
        if call.dilation is not None:
            ((w, _),) = call.dilation.branches
            mask &= i // w == j // w
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(~mask, -1e30)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1) * mask, v)

    declared = Capabilities(causal="never", window=True, documents=True, dilation=("split",))
    return Implementation(attend, "arriving", declared)


def of_the_last(call, every):
    """What the last rank adds that has queries in the segment of a row."""
    ((w, _),) = call.dilation.branches if call.dilation is not None else ((call.problem.nk, 1),)
    each = call.problem.nk // call.world_size
    segments = [{i // w for i in range(rank * each, rank * each + each)} for rank in range(call.world_size)]
    last = [max(n for n, those in enumerate(segments) if j // w in those) for j in call.key_positions.tolist()]
    return torch.stack([every[rank][call.rank][:, row] for row, rank in enumerate(last)], dim=1)


def test_gradients_of_the_last_rank_alone_are_told():
    """That are assigned to a row where they should be added to it."""
    dilation = Dilation(((8, 1),), heads="split")
    cases = [case_of(), case_of(size=2), case_of(dilation=dilation), case_of(dilation=dilation, size=4)]
    scenes, _ = seen(attending(of_the_last), cases, gradients=True)
    words = "the dk and dv of a row are what the last rank adds that has queries"
    found, *_ = [one for one in explaining(of_gradients(scenes), scenes) if "what the last rank adds" in one]
    assert found.startswith(words)
    right, _ = seen(Implementation(PLAIN.function, "right", EVERYTHING), [case_of(key_length=0)], gradients=True)
    assert explained(of_gradients(scenes), found, right[0])  # nobody adds to keys that are not there


def explained(hypotheses, sentence, scene):
    """Whether the hypotheses of a sentence explain a case."""
    return all(one.explains(scene) is not None for one in hypotheses if one.sentence() == sentence)


def at_an_end(last):
    """What another rank adds to a part of a shard goes to as many rows at one of its ends."""

    def together(call, every):
        found = every[call.rank][call.rank].clone()
        for rank in set(range(call.world_size)) - {call.rank}:
            part = every[rank][call.rank]
            rows = part.abs().sum((0, 2, 3)).nonzero()[:, 0]
            if len(rows):
                part = part[:, rows[0] : rows[-1] + 1]
                found[:, slice(-part.size(1), None) if last else slice(part.size(1))] += part
        return found

    return together


@pytest.mark.parametrize(("last", "end"), [(True, "last"), (False, "first")])
def test_gradients_of_a_part_of_a_shard_that_go_to_its_end_are_told(last, end):
    """Windows reach into the shards beside."""
    cases = [case_of(window=(1, 2)), case_of(window=(2, 1), size=4), case_of(window=(1, 1), size=2)]
    scenes, _ = seen(attending(at_an_end(last)), cases, gradients=True)
    assert (
        f"the dk and dv that come back from a rank that reads a part of a shard are added to its {end} rows, as many "
        "as that part has"
    ) in explaining(of_gradients(scenes), scenes)


def heaped(in_pairs):
    """A rank, or a pair of them, adds to each block what it has added to those before it too."""

    def together(call, every):
        members = 1 + in_pairs
        (mine, member), teams = divmod(call.rank, members), call.world_size // members
        found = torch.zeros_like(every[0][0])
        for rank in range(call.world_size):
            team = rank // members
            for hop in range((team - mine) % teams + 1):
                found += every[rank][(team - hop) % teams * members + member]
        return found

    return together


@pytest.mark.parametrize("in_pairs", [False, True])
def test_a_buffer_of_gradients_that_is_not_cleared_between_hops_is_told(in_pairs):
    """Of ranks, and of pairs that share out the heads."""
    cases = [
        case_of(size=4, heads=4),
        case_of(size=6, query_length=12, heads=2),
        case_of(size=4, window=(3, 2), heads=2),
    ]
    scenes, _ = seen(attending(heaped(in_pairs)), cases, gradients=True)
    says = "the buffer of dk and dv of a block is not cleared between hops: what went to the blocks before is in it too"
    teams = ", teams being of two ranks where their number and that of heads are even" if in_pairs else ""
    assert explaining(stale.hypotheses(), scenes) == [says + teams] * 2


class GatheredZigzag(torch.autograd.Function):
    """Zigzag shards of all ranks; what a rank adds to a late piece goes to where its own begins."""

    @staticmethod
    def forward(ctx, x, call):
        """Right."""
        every = [len(piece) for piece in pieces(call.problem.nk, 2 * call.world_size)]
        ctx.call, ctx.early = call, every[: call.world_size]
        ctx.counts = [every[rank] + every[-1 - rank] for rank in range(call.world_size)]
        room = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, max(ctx.counts) - x.size(1)))
        return torch.cat([one[:, :n] for one, n in zip(of_all_ranks(room, call), ctx.counts, strict=True)], dim=1)

    @staticmethod
    def backward(ctx, gradient):
        """Past the end of the shard it is lost."""
        mine, found = ctx.call.rank, 0
        for rank, every in enumerate(of_all_ranks(gradient.contiguous(), ctx.call)):
            part = every.split(ctx.counts, dim=1)[mine]
            early, late = part.tensor_split([ctx.early[mine]], dim=1)
            into = torch.zeros_like(part)
            into[:, : early.size(1)] = early
            room = into[:, ctx.early[rank] :][:, : late.size(1)]
            room += late[:, : room.size(1)]
            found = found + into
        return found, None


def test_gradients_of_late_pieces_that_go_behind_the_rows_of_the_rank_are_told():
    """Where early pieces differ in length."""

    def attend(q, k, v, call):
        k, v = (GatheredZigzag.apply(x, call) for x in (k, v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v)

    declared = Capabilities(causal="never", sharding="zigzag", uneven=True)
    cases = [case_of(sharding="zigzag", size=size, query_length=n) for size, n in ((2, 13), (2, 5), (3, 8))]
    scenes, _ = seen(Implementation(attend, "late", declared), cases, gradients=True)
    says = "what a rank adds to dk and dv of other late zigzag pieces goes to the rows of the shard from where its own"
    assert f"{says} late piece begins" in explaining(of_gradients(scenes), scenes)


def going_on(call, every):
    """What rank r adds to the shard of o arrives at r + (r − o), and not in padding."""
    found = torch.zeros_like(every[0][0])
    for rank, owner in itertools.product(range(call.world_size), repeat=2):
        if (2 * rank - owner) % call.world_size == call.rank:
            found += every[rank][owner]
    if call.documents is not None:
        inside = (call.key_positions >= call.documents[0]) & (call.key_positions < call.documents[-1])
        found *= inside[:, None, None]
    return found


def test_gradients_that_go_on_in_the_same_direction_are_told():
    """Where padding is cleared, none arrives in it."""
    cases = [case_of(), case_of(size=4), case_of(documents=(0, 7), size=4)]
    scenes, _ = seen(attending(going_on), cases, gradients=True)
    assert explaining(carrying.hypotheses(scenes), scenes) == [
        "gradients of k and v go on as far as their block has come, in the same direction, instead of back"
    ]


def of_the_other_piece(here, dq, dk, dv):
    """The slots of both zigzag pieces, padded to one length, are exchanged."""
    lengths = [len(piece) for piece in pieces(here.problem.nk, 2 * here.size)]
    early, late = lengths[here.rank], lengths[2 * here.size - 1 - here.rank]

    def exchanged(x):
        first, second = x[:, :early], x[:, early:]
        padded = torch.nn.functional.pad
        return torch.cat(
            [padded(second, (0, 0, 0, 0, 0, early - late))[:, :early], padded(first, (0, 0, 0, 0, 0, late - early))],
            dim=1,
        )

    return dq, exchanged(dk), exchanged(dv)


def test_gradients_of_the_other_zigzag_piece_are_told():
    """One that is a row longer has zeros in it."""
    cases = [case_of(sharding="zigzag"), case_of(sharding="zigzag", size=2, query_length=13)]
    steps = replace(STEPS, returned_gradients=of_the_other_piece)
    scenes, _ = seen(Implementation(ring_of(steps), "pieces", EVERYTHING), cases, gradients=True)
    words = "the rows of dk and dv that are returned are those at positions of the rank's other zigzag piece"
    assert words in explaining(of_gradients(scenes), scenes)


class Reordered(torch.autograd.Function):
    """The lse of all ranks in the order of positions, of which each takes its rows by the inverse of their order."""

    @staticmethod
    def forward(ctx, lse, call):
        """Of striped shards of one length."""
        order = torch.arange(call.problem.nq).reshape(-1, call.world_size).T.ravel()
        back = order.argsort()
        whole = torch.cat(of_all_ranks(lse, call), dim=2)[:, :, back]
        return whole[:, :, back].chunk(call.world_size, dim=2)[call.rank].contiguous()


def test_rows_of_lse_in_the_inverse_order_are_told():
    """Though those of out are right."""

    def attend(q, k, v, call):
        out, lse = PLAIN.function(q, k, v, call)[:2]
        return out, Reordered.apply(lse, call)

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    cases = [case_of(sharding="striped"), case_of(sharding="striped", size=2, query_length=8)]
    scenes, _ = seen(Implementation(attend, "reordered", declared), cases, gradients=False)
    assert explaining(REARRANGED, scenes) == [
        "the rows of lse, which go back shard by shard, are put in order by the inverse of the permutation that does"
    ]


def test_rows_of_all_in_the_inverse_order_are_told_where_padding_is_cleared_before():
    """Keys and values of padding are 0 where they come to be attended."""

    def attend(q, k, v, call):
        order = torch.arange(call.problem.nq).reshape(-1, call.world_size).T.ravel()
        ends = torch.tensor(call.problem.key_lengths)[:, None]
        k, v = (x.masked_fill((call.key_positions >= ends)[..., None, None], 0.0) for x in (k, v))
        q, k, v = (torch.cat(of_all_ranks(x, call), dim=1)[:, order] for x in (q, k, v))
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q[:, call.positions], k)
        s = s.masked_fill((order.sort().values >= ends)[:, None, None], -math.inf)
        return torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), v), s.logsumexp(-1)

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    cases = [case_of(sharding="striped", size=size, query_length=4 * size, batch=2, key_lengths=(5, 3 * size))
             for size in (2, 3)]  # fmt: skip
    scenes, _ = seen(Implementation(attend, "reordered", declared), cases, gradients=False)
    words = "the rows of q, k and v, which come shard by shard, are put in order by the inverse of the permutation that"
    assert explaining(REARRANGED, scenes) == [f"{words} does"]


class OfOnePiece(torch.autograd.Function):
    """Sinks that give the right out, and the gradient that one zigzag piece of queries adds."""

    @staticmethod
    def forward(ctx, sinks, out, lse, whole, late):
        """Right."""
        ctx.save_for_backward(sinks, out, lse)
        ctx.late = late
        return whole.clone()

    @staticmethod
    def backward(ctx, dout):
        """With `=` where `+=` should be."""
        sinks, out, lse = ctx.saved_tensors
        each = -(sinks[:, None] - lse).exp() * (dout * out).sum(-1).transpose(1, 2)
        return each.tensor_split(2, dim=2)[ctx.late].sum((0, 2)), None, None, dout, None


def test_a_gradient_of_sinks_without_queries_that_attend_no_key_is_told():
    """Whose lse is the sink."""

    def attend(q, k, v, call):
        seen_by = (torch.arange(k.size(1)) < torch.tensor(call.key_lengths)[:, None])[:, None, None]
        empty = ~seen_by.any(-1)
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(~seen_by, -1e30)
        lse = torch.logaddexp(s.logsumexp(-1), torch.where(empty, call.sinks.detach()[:, None], call.sinks[:, None]))
        return torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp() * seen_by, v), lse

    declared = Capabilities(causal="never", sinks=True, key_lengths=True, lse=True, lse_gradient=True, world_sizes=(1,))
    cases = [case_of(size=1, sinks=True, batch=2, query_length=n, key_lengths=(0, n - 1), cotangent="both", seed=n)
             for n in (3, 5, 8)]  # fmt: skip
    scenes, _ = seen(Implementation(attend, "empty", declared), cases, gradients=True)
    assert sinks.cause(scenes) == "the gradient of sinks leaves out queries that attend no key"


@pytest.mark.parametrize(("late", "which"), [(True, "late"), (False, "early")])
def test_a_gradient_of_sinks_of_one_zigzag_piece_is_told(late, which):
    """Of a rank that is alone."""

    def attend(q, k, v, call):
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
        lse = torch.logaddexp(s.logsumexp(-1), call.sinks.detach()[:, None])
        out = torch.einsum("bhqk,bkhd->bqhd", (s - lse[..., None]).exp(), v)
        return OfOnePiece.apply(call.sinks, out.detach(), lse.detach(), out, late)

    declared = Capabilities(causal="never", sinks=True, world_sizes=(1,), sharding="zigzag")
    cases = [case_of(size=1, sinks=True, sharding="zigzag", query_length=n, seed=n) for n in (6, 9, 11, 23)]
    scenes, _ = seen(Implementation(attend, "piece", declared), cases, gradients=True)
    assert sinks.cause(scenes) == f"the gradient of sinks is that of the {which} zigzag piece of each rank alone"


def test_a_sink_that_joins_with_every_merge_is_told():
    """Never on one rank, and rightly on two."""

    def attend(q, k, v, call):
        merges = math.log(call.world_size - 1) if call.world_size > 1 else -math.inf
        return ring_of(STEPS)(q, k, v, replace(call, sinks=call.sinks + merges))

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    cases = [case_of(sinks=True, size=size) for size in (1, 3, 4)]
    scenes, _ = seen(Implementation(attend, "merges", declared), cases, gradients=False)
    words = "the sink counts once for every merge of two blocks, of which there is one less than ranks"
    assert explaining(library(words), scenes) == [words]


def in_longest_pieces(steps, here, hop, owner):
    """The causal mask with queries of pieces that begin at their numbers times the longest."""
    lengths = [len(piece) for piece in pieces(here.problem.nq, 2 * here.size)]
    numbers = (here.rank, 2 * here.size - 1 - here.rank)
    i = torch.cat([number * max(lengths) + torch.arange(lengths[number]) for number in numbers])
    return (here.shards[owner] <= i[:, None]) * torch.ones_like(multiplicity(steps, here, hop, owner))


def test_pieces_that_are_all_taken_to_be_as_long_as_the_longest_are_told():
    """Where the pieces that are shorter come last."""
    cases = [
        case_of(sharding="zigzag", causal=True, query_length=n, size=size) for n, size in ((14, 3), (9, 2), (5, 2))
    ]
    right = case_of(sharding="zigzag", causal=True)
    attend = Implementation(ring_of(replace(STEPS, pattern=in_longest_pieces)), "longest", EVERYTHING)
    scenes, probe = seen(attend, [*cases, right], gradients=False)
    told = (one.sentence() for one in reading.hypotheses(scenes, probe, lambda: 1)
            if all(one.explains(scene) is not None for scene in scenes))  # fmt: skip
    assert (
        "the causal mask is made with queries at positions of zigzag pieces that are all as long as the longest" in told
    )


def test_an_lse_of_scores_of_0_in_rows_without_keys_is_told():
    """Of as many as the rank has fetched: those that its queries attend, and what lies between."""

    def attend(q, k, v, call):
        out, lse = PLAIN.function(q, k, v, call)[:2]
        p = call.problem
        keys = max(0, int(call.positions[-1]) + 1 + p.nk - p.nq)
        return out, lse.masked_fill(lse == -math.inf, math.log(max(1, keys)))

    declared = replace(EVERYTHING, gradients=False, lse_gradient=False)
    lengths = ((1, 6, 4), (2, 10, 8), (3, 9, 4))
    cases = [case_of(size=size, causal=True, query_length=n, key_length=m) for size, n, m in lengths]
    scenes, _ = seen(Implementation(attend, "scores of 0", declared), cases, gradients=False)
    assert explaining(SUBSTITUTED, scenes) == [
        "lse is log(number of keys from the first that the rank attends to the last) in rows without keys, or 0 "
        "without any"
    ]


def in_lanes(q, k, v, call, *, nothing, names):
    """Each branch of a shared dilation offset by offset, whose heads are left in that order."""
    outs, lses = [], []
    i = torch.arange(call.problem.nk)
    for w, r in call.dilation.branches:
        offset = torch.arange(call.problem.heads) % r
        there = (
            (i[:, None] // w == i // w)
            & (i[:, None] % w % r == offset[:, None, None])
            & (i % w % r == offset[:, None, None])
        )
        s = (call.scale * torch.einsum("bqhd,bkhd->bhqk", q, k)).masked_fill(~there, -math.inf)
        lse = s.logsumexp(-1)
        out = (s - torch.where(lse == -math.inf, 0.0, lse)[..., None]).exp() @ v.transpose(1, 2)
        order = offset.argsort(stable=True)
        outs.append(out[:, order] if "out" in names else out)
        lse = torch.where(lse == -math.inf, nothing, lse)
        lses.append(lse[:, order] if "lse" in names else lse)
    parts = torch.stack(lses)
    lse = parts.logsumexp(0)
    weights = (parts - lse.masked_fill(lse == -math.inf, 0.0)).exp()
    out = (weights[..., None] * torch.stack(outs)).sum(0).transpose(1, 2)
    return out, lse.masked_fill(lse < -1e29, -math.inf)


@pytest.mark.parametrize("names", [("lse",), ("out",), ("out", "lse")])
@pytest.mark.parametrize("nothing", [-math.inf, -1e30])
def test_heads_of_branches_that_are_left_in_the_order_of_their_offsets_are_told(names, nothing):
    """Merged with the weights of other heads, or with none."""
    shared = [Dilation(branches, heads="shared") for branches in (((4, 2), (8, 1)), ((3, 2), (6, 3)))]
    cases = [case_of(size=1, heads=heads, dilation=one) for one, heads in zip(shared, (3, 5), strict=True)]
    declared = Capabilities(world_sizes=(1,), causal="never", dilation=("shared",), lse=True, lse_gradient=True)
    attend = Implementation(lambda *x: in_lanes(*x, nothing=nothing, names=names), "lanes", declared)
    words = f"heads of the {' and '.join(names)} of a branch of a dilation are left in the order of their offsets"
    for gradients in (False, nothing > -math.inf):  # autograd makes NaN of -inf - (-inf)
        scenes, _ = seen(attend, cases, gradients=gradients)
        assert set(explaining(MERGED_BRANCHES, scenes)) == {words}


def lost_where_idle(streams):
    """A rank to whose queries a block adds nothing sends zeros on instead of what others have added."""

    def together(call, every):
        found = torch.zeros_like(every[0][0])
        for stream in streams(call.rank, call.world_size):
            carried = torch.zeros_like(found)
            for rank in stream:
                part = every[rank % call.world_size][call.rank]
                carried = carried + part if part.any() else torch.zeros_like(part)
            found += carried
        return found

    return together


@pytest.mark.parametrize(
    ("way", "streams"),
    [
        ("", lambda owner, size: [range(owner, owner + size)]),
        (", in a ring that sends to the left", lambda owner, size: [range(owner, owner - size, -1)]),
        (", in a ring both ways", lambda owner, size: [
            [owner], range(owner + 1, owner + size // 2 + 1), range(owner - 1, owner - (size + 1) // 2, -1),
        ]),
    ],
)  # fmt: skip
def test_gradients_that_are_lost_at_a_rank_that_attends_nothing_are_told(way, streams):
    """Windows hide whole blocks from ranks that they pass."""
    cases = [case_of(window=(3, 1), size=4), case_of(window=(5, 0), size=4), case_of(window=(1, 6), size=6)]
    scenes, _ = seen(attending(lost_where_idle(streams)), cases, gradients=True)
    says = f"the dk and dv that travel with a block are lost at a rank that attends nothing of it{way}"
    assert says in explaining(of_gradients(scenes), scenes)


BOTH_WAYS = (lambda owner, size: range(owner + 1, owner + size // 2 + 1),
             lambda owner, size: range(owner - 1, owner - (size + 1) // 2, -1))  # fmt: skip


@pytest.mark.parametrize(("end", "kept"), [("first", slice(1, None)), ("last", slice(None, -1))])
def test_what_is_lost_at_an_end_of_the_way_is_told(end, kept):
    """Half round the ring to either side: of two hops or more, the first, or the last, does not count."""

    def together(call, every):
        found = every[call.rank][call.rank].clone()
        for way in BOTH_WAYS:
            ranks = way(call.rank, call.world_size)
            for rank in ranks[kept] if len(ranks) > 1 else ranks:
                found += every[rank % call.world_size][call.rank]
        return found

    scenes, _ = seen(attending(together), [case_of(size=4), case_of(size=6)], gradients=True)
    says = f"what the {end} rank on a block's way adds to its dk and dv is lost, unless it is the only one"
    assert f"{says}, in a ring both ways" in explaining(of_gradients(scenes), scenes)


@pytest.mark.parametrize(("order", "way"), [("the next rank first", 1), ("the rank before first", -1)])
def test_what_other_ranks_write_over_one_another_is_told(order, way):
    """Beside the rank's own: the last that attends some of a block counts, with zeros where it attends none of it."""

    def together(call, every):
        others = [every[(call.rank + way * hop) % call.world_size][call.rank] for hop in range(1, call.world_size)]
        return every[call.rank][call.rank] + [torch.zeros_like(others[0]), *filter(torch.any, others)][-1]

    cases = [case_of(window=(5, 4), size=4), case_of(window=(3, 6), size=6), case_of(size=3)]
    scenes, _ = seen(attending(together), cases, gradients=True)
    says = (
        f"the dk and dv that come from other ranks, {order}, are written over one another, shard by shard, beside the"
    )
    assert f"{says} rank's own" in explaining(of_gradients(scenes), scenes)
