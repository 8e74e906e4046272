"""Faults of a ring in hybrids, where the ring is one of teams of ranks that exchange heads."""

import math

import pytest
import torch
import torch.distributed as dist
from mechanisms import case_of, explaining, seen

from ringverify.diagnosis.catalogue import HYPOTHESES
from ringverify.diagnosis.fitting import in_ring_of_teams
from ringverify.diagnosis.grids import GRIDS, IN_PAIRS, OF, as_teams_see
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.neighbours import NEIGHBOURS
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import STEPS
from ringverify.implementation import Capabilities, Implementation

DECLARED = Capabilities(causal="never", gqa=True, uneven=True, gradients=False, lse=False)
LIES = {"neighbours": lambda rank, count, each: rank // each, "apart": lambda rank, count, each: rank % count}


def hybrid(number_of_members, lies):
    """A ring of teams whose running sums are not rescaled where the maximum grows.

    Every rank fetches all blocks: which of them exchange heads for positions is of no consequence for what comes out.
    """

    def attend(q, k, v, call):
        size, group = call.world_size, call.problem.group_size
        each = number_of_members(call)
        count = size // each
        longest = -(-call.problem.nk // size)
        blocks = []
        for x in (k, v):
            padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, longest - x.size(1))).contiguous()
            dist.all_gather(every := [torch.empty_like(padded) for _ in range(size)], padded, group=call.group)
            lengths = [call.problem.nk // size + (rank < call.problem.nk % size) for rank in range(size)]
            blocks.append([one[:, :n].repeat_interleave(group, dim=2) for one, n in zip(every, lengths, strict=True)])
        total = top = weighted = None
        for hop in range(count):
            team = (lies(call.rank, count, each) - hop) % count
            members = [rank for rank in range(size) if lies(rank, count, each) == team]
            keys, values = (torch.cat([one[rank] for rank in members], dim=1) for one in blocks)
            s = call.scale * torch.einsum("bqhd,bkhd->bhqk", q, keys)
            top = s.amax(-1) if top is None else torch.maximum(top, s.amax(-1))
            w = (s - top[..., None]).exp()
            new, more = w.sum(-1), torch.einsum("bhqk,bkhd->bhqd", w, values)
            total, weighted = (new, more) if total is None else (total + new, weighted + more)
        return (weighted / total[..., None]).transpose(1, 2)

    return Implementation(attend, "hybrid", DECLARED)


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("by", ["heads", "key heads"])
@pytest.mark.by_day(1)
def test_a_fault_of_the_ring_is_told_of_a_ring_of_teams(by, lies):
    """Of how many ranks a team is, and whether they are neighbours, is told too, by cases with other heads."""
    number = (lambda p: p.heads) if by == "heads" else (lambda p: p.hk)
    implementation = hybrid(lambda call: math.gcd(call.world_size, number(call.problem)), LIES[lies])
    shapes = ((4, 9, 2, 2), (6, 14, 6, 2), (6, 13, 2, 1), (4, 12, 6, 1), (6, 12, 2, 2))
    cases = [case_of(size=size, query_length=n, heads=h, key_heads=k) for size, n, h, k in shapes]
    scenes, _ = seen(implementation, cases, gradients=False)
    wrong = [scene for scene in scenes if wrong_tensors(scene)]
    assert len(wrong) > 2
    merging = [one for one in HYPOTHESES if one.steps.changed & {"merge", "accumulate"}]
    asked = [one for alike in in_ring_of_teams(merging, [], wrong[0]) for one in alike]
    right = [scene for scene in scenes if scene not in wrong]
    told = set(explaining([one for one in asked if all(one.explains(x) is not None for x in right)], wrong))
    whose = f", blocks being those of teams of as many ranks as divide ranks and {by}"
    whose += ", members lying apart" if lies == "apart" else ""
    assert f"running sums are not rescaled where the maximum grows{whose}" in told
    assert all(text.endswith(whose) for text in told)


def to_the_next_rank(q, k, v, call):
    """Two teams of two ranks that each have half of the heads; what comes from the other team is the next rank's."""
    size, heads, team = 4, call.problem.hk // 2, call.rank // 2
    every = []
    for x in (q, k, v):
        dist.all_gather(parts := [torch.empty_like(x) for _ in range(size)], x.contiguous(), group=call.group)
        every.append(torch.stack([torch.cat(parts[at : at + 2], dim=1) for at in (0, 2)]))
    out = []
    for member in (0, 1):
        source = (2 * team + member - 1) % size
        own = slice(member * heads, (member + 1) * heads)
        other = slice(source % 2 * heads, (source % 2 + 1) * heads)
        keys, values = (torch.cat([x[team][:, :, own], x[source // 2][:, :, other]], dim=1) for x in every[1:])
        s = call.scale * torch.einsum("bqhd,bkhd->bhqk", every[0][team][:, :, own], keys)
        out.append(torch.einsum("bhqk,bkhd->bqhd", s.softmax(-1), values))
    rows = q.size(1)
    return torch.cat(out, dim=2)[:, call.rank % 2 * rows :][:, :rows]


def test_a_ring_of_teams_that_leads_to_the_next_rank_is_told():
    """Whose block comes from its own team, or has other heads."""
    implementation = Implementation(to_the_next_rank, "next", DECLARED)
    scenes, _ = seen(implementation, [case_of(size=4, query_length=n, heads=2) for n in (8, 12)], gradients=False)
    assert explaining(NEIGHBOURS, scenes) == [
        "the ring of teams leads to the rank next to it, whose heads are others, instead of the same member of the "
        f"next team, teams being {of}"
        for of in OF
    ]


def test_of_an_odd_number_of_ranks_the_last_is_a_team_by_itself():
    """Its ring has as many ranks as there are pairs, the last of which holds less."""
    case = case_of(size=5, query_length=12)
    assert IN_PAIRS.teams(case) == [[0, 1], [2, 3], [4]]
    ((scene,), _) = seen(hybrid(lambda call: 1, LIES["apart"]), [case], gradients=False)
    assert [len(held) for held in as_teams_see(scene, IN_PAIRS).shards[1]] == [6, 4, 2]


def test_where_every_rank_is_a_team_nothing_is_tried_but_what_explains_it():
    """And where all ranks are one team there is no ring."""
    cases = [case_of(size=3), case_of(size=2)]
    (alone, two), _ = seen(hybrid(lambda call: 1, LIES["apart"]), cases, gradients=False)
    assert {as_teams_see(alone, grid).size for grid in GRIDS} == {1, 3}
    right = Hypothesis("all is right", STEPS)
    told = [one for alike in in_ring_of_teams(HYPOTHESES, [right], alone) for one in alike]
    assert {one.says for one in told if not one.more.endswith(IN_PAIRS.whose)} == {right.says}
    (alike,) = in_ring_of_teams(HYPOTHESES, [right], two)
    assert all("the square root of their number" in one.more for one in alike)  # the others make one team of two ranks
