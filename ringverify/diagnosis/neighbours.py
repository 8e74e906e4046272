"""Hypotheses of hybrids whose rings take the next rank for the same member of the next team, or the other way round.

Members of a team hold heads of their own. So what a rank gets from a wrong neighbour are keys and values of other
heads, and often of its own team, in the place of those of another team.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ringref.attention import per_query_head
from ringref.sharding import Positions
from ringverify.diagnosis.grids import GRIDS, Grid, joined
from ringverify.diagnosis.hypothesis import Hypothesis, agree_but_for
from ringverify.diagnosis.reading import finite
from ringverify.diagnosis.scene import Array, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.ring import STEPS


def _judge(grid: Grid, way: int) -> Callable[[Scene], float | None]:
    """Return the judge of a ring in which a block comes from the rank before, or behind, hop by hop.

    Args:
        grid: how ranks are parted into teams.
        way: 1 where a ring leads to later ranks, −1 where it leads to earlier ones.
    """

    def judge(scene: Scene) -> float | None:
        p, teams = scene.problem, grid.teams(scene.case)
        members = len(teams[0])
        if members == 1 or len(teams) == 1:
            return None if wrong_tensors(scene) else 0.0
        if p.hk % members or "dq" in scene.tensors or scene.replicated:
            return None
        held = joined(scene.shards[1], teams)
        if len({len(keys) for keys in held}) > 1:
            return None  # rows of one team do not fit where those of another are meant
        place = {rank: (team, member) for team, ranks in enumerate(teams) for member, rank in enumerate(ranks)}
        out, lse = scene.truth.out.copy(), scene.truth.intermediates.lse.copy()
        for team, queries in enumerate(joined(scene.shards[0], teams)):
            for member in range(members):
                blocks = [
                    (held[(team - way * hop) % len(teams)], *place[_source(grid, teams, team, member, way * hop)])
                    for hop in range(len(teams))
                ]
                heads = _of(member, members, p.heads)
                found = _attended(scene, queries, heads, [(at, held[of], whose) for at, of, whose in blocks], members)
                out[:, queries, heads], lse[:, heads, queries] = found
        return agree_but_for(scene, {"out": out, "lse": lse})

    return judge


def _source(grid: Grid, teams: list[list[int]], team: int, member: int, hops: int) -> int:
    """Return from which rank a block comes after so many hops, if the step is that of the other kind of grid."""
    step = len(teams[0]) if grid.apart else 1
    size = len(teams) * len(teams[0])
    return (teams[team][member] - step * hops) % size


def _of(member: int, members: int, heads: int) -> slice:
    """Return the heads that a member of a team has."""
    each = heads // members
    return slice(member * each, (member + 1) * each)


def _attended(
    scene: Scene, queries: Positions, heads: slice, blocks: list[tuple[Positions, Positions, int]], members: int
) -> tuple[Array, Array]:
    """Return out and lse of queries that attend other blocks than are meant.

    Args:
        scene: the case.
        queries: their positions.
        heads: their heads.
        blocks: the positions for which the keys of a block are taken, those that they have, and whose heads they are.
        members: ranks of a team.
    """
    p, x, m = scene.problem, finite(scene.inputs), scene.truth.intermediates.m[:, heads][:, :, queries]
    scores, values = np.full(m.shape, -np.inf), np.zeros((*m.shape[:2], p.nk, p.dv))
    q = x.q[:, queries, heads].swapaxes(1, 2)
    for taken_for, at, whose in blocks:
        k, v = (per_query_head(rows[:, at, _of(whose, members, p.hk)], p.group_size) for rows in (x.k, x.v))
        s = p.scale_value * (q @ k.swapaxes(2, 3))
        scores[..., taken_for] = s if p.softcap is None else p.softcap * np.tanh(s / p.softcap)
        values[:, :, taken_for] = v
    scores = np.where(m > 0, scores, -np.inf)
    sinks = np.full(p.heads, -np.inf) if x.sinks is None else x.sinks
    top = np.maximum(scores.max(axis=-1, initial=-np.inf), sinks[heads, None])
    safe = np.where(np.isfinite(top), top, 0.0)
    weights = m * np.exp(scores - safe[..., None])
    total = weights.sum(axis=-1) + np.exp(sinks[heads, None] - safe)
    whole = np.where(total > 0, total, 1.0)
    out = (weights @ values) / whole[..., None]
    return out.swapaxes(1, 2), np.where(total > 0, safe + np.log(whole), -np.inf)


NEIGHBOURS: list[Hypothesis] = [
    Hypothesis(
        f"the ring of teams leads to the rank {'that is as far as there are members' if grid.apart else 'next to it'}, "
        f"whose heads are others, instead of the same member of the next team, teams being {grid.text}",
        STEPS,
        judge=_judge(grid, way),
    )
    for grid in GRIDS
    for way in (1, -1)
]
