"""Hypotheses of a misunderstanding: arguments swapped, another layout or sharding than declared, an unasked-for mask.

They are the first to be tried: the code may be right, and only its declaration or its adapter wrong.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ringref import pattern
from ringref.sharding import Positions, ShardingName, key_positions, query_positions
from ringverify.cases.comparing import TensorName
from ringverify.diagnosis.masks import masked
from ringverify.diagnosis.model import STEPS, Block, Steps
from ringverify.diagnosis.positions import declare_or_heed, fitted, placed
from ringverify.diagnosis.scene import Array, Counts, Results, Scene, Visit
from ringverify.diagnosis.suspicion import Suspicion

# -- q, k and v in another order ---------------------------------------------------------------------------------------

ORDERS = {"qvk": "k and v", "kqv": "q and k", "vkq": "q and v", "kvq": "q, k and v", "vqk": "q, k and v"}
"""Which input is used as q, as k and as v, and the inputs that are not used as what they are."""


def _exchangeable(scene: Scene) -> bool:
    """Whether q, k and v have one shape on every rank."""
    p = scene.problem
    return (p.nq, p.heads, p.head_dim) == (p.nk, p.hk, p.dv) and not scene.replicated


def _possible(scene: Scene, order: str) -> bool:
    return _exchangeable(scene) or (order == "qvk" and scene.problem.head_dim == scene.problem.dv)


def _reordered(order: str) -> Steps:
    def input_as(scene: Scene, role: str, rank: int) -> Array:
        name = order["qkv".index(role)] if _possible(scene, order) else role
        whole: Array = getattr(scene.inputs, name)
        return whole[:, scene.shards[0 if name == "q" else 1][rank]]

    def home(scene: Scene, rank: int, results: Results) -> Results:
        if not _possible(scene, order):
            return results
        gradients: dict[str, TensorName] = {"q": "dq", "k": "dk", "v": "dv"}
        return {gradients[name]: results[gradients[role]] for role, name in zip("qkv", order, strict=True)}

    def block(at: Visit) -> Block:
        return input_as(at.scene, "k", at.owner), input_as(at.scene, "v", at.owner)

    return replace(STEPS, q=lambda scene, rank: input_as(scene, "q", rank), block=block, home=home)


ARGUMENTS: list[Suspicion] = [
    Suspicion(
        f"{what} are exchanged: {order[0]} is used as q, {order[1]} as k and {order[2]} as v",
        _reordered(order),
        advice="Compare the order of the arguments with attend(q, k, v, call)",
    )
    for order, what in ORDERS.items()
]

# -- heads and tokens exchanged ----------------------------------------------------------------------------------------


def _plain(scene: Scene) -> bool:
    """Whether an implementation that takes heads for tokens computes something that can be predicted."""
    p = scene.problem
    alike = all(len({len(shard) for shard in shards}) == 1 for shards in scene.shards)
    unmasked = p.window is None and p.documents is None and p.key_lengths is None and p.dilation is None
    return alike and p.nq == p.nk and p.heads == p.hk and unmasked and not scene.replicated and scene.problem.nq > 0


def _heads_as_tokens(at: Visit) -> Counts:
    """Every token is a head, and the heads of all ranks, in rank order, are its sequence."""
    if not _plain(at.scene):
        return STEPS.pattern(at)
    p, count = at.problem, at.problem.heads
    near = np.ones((count, count), dtype=np.int64)
    if p.causal:
        i, j = at.rank * count + np.arange(count), at.owner * count + np.arange(count)
        near = pattern.causal(i[:, None], j[None, :], diagonal=0).astype(np.int64)
    return np.broadcast_to(near, (p.batch, len(at.i), count, count))


def _turned_if_plain(scene: Scene, x: Array) -> Array:
    return x.swapaxes(1, 2) if _plain(scene) else x


def _other_layout() -> Steps:
    # `widen` does not know the case: where the prediction is impossible, its inputs are turned beforehand.
    def turned(scene: Scene, x: Array) -> Array:
        return x if _plain(scene) else x.swapaxes(1, 2)

    def block(at: Visit) -> Block:
        k, v = STEPS.block(at)
        return turned(at.scene, k), turned(at.scene, v)

    def heads(at: Visit) -> Counts:
        return np.arange(len(at.i)) if _plain(at.scene) else STEPS.heads(at)

    def per_key_head(at: Visit, x: Array) -> Array:
        return x if _plain(at.scene) else STEPS.per_key_head(at, x)

    def home(scene: Scene, rank: int, results: Results) -> Results:
        return {name: _turned_if_plain(scene, x) for name, x in results.items()}

    return replace(
        STEPS,
        q=lambda scene, rank: turned(scene, STEPS.q(scene, rank)),
        block=block,
        dout=lambda scene, rank: turned(scene, STEPS.dout(scene, rank)),
        dlse=lambda scene, rank: _turned_if_plain(scene, STEPS.dlse(scene, rank)),
        widen=lambda x: x,
        pattern=_heads_as_tokens,
        heads=heads,
        per_key_head=per_key_head,
        returned=lambda scene, rank, out, lse: (_turned_if_plain(scene, out), lse),
        home=home,
    )


def _layouts(scene: Scene) -> tuple[str, str]:
    """The declared layout, and the other one."""
    return ("bhsd", "bshd") if scene.capabilities.tensor_layout == "bhsd" else ("bshd", "bhsd")


def _says_other_layout(scene: Scene) -> str:
    declared, other = _layouts(scene)
    return f'heads are taken for tokens: tensors are read as "{other}", and tensor_layout="{declared}" is declared'


def _square(scene: Scene, rank: int) -> bool:
    return len(scene.shards[0][rank]) == scene.problem.heads


def _out_turned() -> Steps:
    """Where a rank has as many queries as heads, so that no shape tells."""

    def turned(scene: Scene, rank: int, x: Array) -> Array:
        return x.swapaxes(1, 2) if _square(scene, rank) else x

    return replace(
        STEPS,
        returned=lambda scene, rank, out, lse: (turned(scene, rank, out), lse),
        dout=lambda scene, rank: turned(scene, rank, STEPS.dout(scene, rank)),
    )


LAYOUT: list[Suspicion] = [
    Suspicion(
        _says_other_layout,
        _other_layout(),
        advice=lambda scene: f'Declare tensor_layout="{_layouts(scene)[1]}", or transpose(1, 2) q, k, v and out',
    ),
    Suspicion(
        lambda scene: 'out is returned as "{1}", and tensor_layout="{0}" is declared'.format(*_layouts(scene)),
        _out_turned(),
        advice="Return out.transpose(1, 2)",
    ),
]

# -- a mask that nobody asked for --------------------------------------------------------------------------------------


def _causal_unasked(at: Visit) -> Counts:
    if at.problem.causal:
        return STEPS.pattern(at)
    near = pattern.causal(at.i[:, None], at.j[None, :], diagonal=at.problem.diagonal)
    return STEPS.pattern(at) * near


UNASKED: list[Suspicion] = [
    replace(found, advice='Mask only where call.causal is true, or declare causal="always"')
    for found in masked("a causal mask is applied though the problem is not causal", _causal_unasked)
]

# -- positions of another sharding -------------------------------------------------------------------------------------


def _as_if(name: ShardingName, at: Visit, *, keys: bool) -> Positions:
    scene, mine = at.scene, at.j if keys else at.i
    if scene.replicated and not keys:
        return mine
    whose = key_positions(name, at.problem.nk, scene.size) if keys else query_positions(name, at.problem.nq, scene.size)
    return fitted(whose[at.owner if keys else at.rank], len(mine), mine)


def _meant(name: ShardingName) -> list[Suspicion]:
    found = placed(
        f"positions are those of {name} shards",
        i=lambda at: _as_if(name, at, keys=False),
        j=lambda at: _as_if(name, at, keys=True),
    )
    return [replace(one, advice=declare_or_heed(name)) for one in found]


SHARDING: list[Suspicion] = [*_meant("zigzag"), *_meant("striped")]

MISUNDERSTOOD: list[Suspicion] = [*ARGUMENTS, *LAYOUT, *UNASKED, *SHARDING]
