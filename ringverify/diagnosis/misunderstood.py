"""Hypotheses of a misunderstanding: arguments exchanged, or another layout than declared.

They are the first to be tried: the code may be right, and only its declaration or its adapter wrong.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.scene import Scene
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, multiplicity

Tensor = torch.Tensor

# -- q, k and v in another order ---------------------------------------------------------------------------------------

ORDERS = {"qvk": "k and v", "kqv": "q and k", "vkq": "q and v", "kvq": "q, k and v", "vqk": "q, k and v"}
"""The inputs that are used as q, as k and as v, in this order; and the names of those that are exchanged."""


def _possible(here: Here, order: str) -> bool:
    """Whether the exchanged inputs have the same shape, on every rank."""
    p = here.problem
    if order == "qvk" and p.head_dim == p.dv:
        return True
    return (p.nq, p.heads, p.head_dim) == (p.nk, p.hk, p.dv) and not here.replicated


def _reordered(order: str) -> Steps:
    places = ["qkv".index(name) for name in order]

    def used(here: Here, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(inputs[place] for place in places) if _possible(here, order) else inputs

    def forward(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
        return STEPS.forward(steps, here, *used(here, q, k, v))

    def backward(steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
        found = STEPS.backward(steps, here, (*used(here, *saved[:3]), *saved[3:]), dout, dlse)
        return tuple(found[places.index(place)] for place in range(3)) if _possible(here, order) else found

    return replace(STEPS, forward=forward, backward=backward)


ARGUMENTS: list[Hypothesis] = [
    Hypothesis(
        f"{what} are exchanged: {order[0]} is used as q, {order[1]} as k and {order[2]} as v",
        _reordered(order),
        advice="Check the argument order: attend is called as attend(q, k, v, call)",
    )
    for order, what in ORDERS.items()
]

# -- heads and tokens exchanged ----------------------------------------------------------------------------------------


def _predictable(here: Here) -> bool:
    """Whether an implementation that takes heads for tokens computes something that can be predicted."""
    p = here.problem
    alike = len({len(shard) for shard in here.shards}) == 1
    unmasked = p.window is None and p.documents is None and p.key_lengths is None and p.dilation is None
    return alike and p.nq == p.nk > 0 and p.heads == p.hk and unmasked and not here.replicated


def _as_read(here: Here) -> Here:
    """Return the rank as it is if tokens are read as heads, and the heads of all ranks as the sequence."""
    p, count = here.problem, here.problem.heads
    problem = p.replace(
        query_length=count * here.size,
        key_length=None,
        heads=len(here.call.positions),
        key_heads=None,
        scale=p.scale_value,
    )
    positions = here.rank * count + torch.arange(count)
    call = replace(here.call, problem=problem, sharding="contiguous", positions=positions, key_positions=positions)
    return replace(here, call=call)


def _forward(steps: Steps, here: Here, q: Tensor, k: Tensor, v: Tensor) -> Partial:
    if not _predictable(here):
        return STEPS.forward(steps, here, q, k, v)
    return STEPS.forward(steps, _as_read(here), *(x.transpose(1, 2) for x in (q, k, v)))


def _backward(steps: Steps, here: Here, saved: tuple[Tensor, ...], dout: Tensor, dlse: Tensor) -> tuple[Tensor, ...]:
    if not _predictable(here):
        return STEPS.backward(steps, here, saved, dout, dlse)
    turned = (*(x.transpose(1, 2) for x in saved[:3]), *saved[3:])
    found = STEPS.backward(steps, _as_read(here), turned, dout.transpose(1, 2), dlse.transpose(1, 2))
    return tuple(x.transpose(1, 2) for x in found)


def _returned(here: Here, whole: Partial) -> tuple[Tensor, Tensor]:
    out, lse = STEPS.returned(here, whole)
    return (out.transpose(1, 2) if _predictable(here) else out), lse


OTHER_LAYOUT = replace(
    STEPS,
    forward=_forward,
    backward=_backward,
    returned=_returned,
    pattern=lambda steps, here, hop, owner: multiplicity(steps, here, hop, owner),
)


def _layouts(scene: Scene) -> tuple[str, str]:
    """Return the declared layout and the other one."""
    return ("bhsd", "bshd") if scene.capabilities.tensor_layout == "bhsd" else ("bshd", "bhsd")


def _says_other_layout(scene: Scene) -> str:
    declared, other = _layouts(scene)
    return f'heads are taken for tokens: tensors are read as "{other}", but tensor_layout="{declared}" is declared'


def _turned(here: Here, x: Tensor) -> Tensor:
    """Exchange tokens and heads, if the rank has as many of each, so that the shape does not show it."""
    return x.transpose(1, 2) if len(here.call.positions) == here.problem.heads else x


def _returned_turned(here: Here, whole: Partial) -> tuple[Tensor, Tensor]:
    out, lse = STEPS.returned(here, whole)
    return _turned(here, out), lse


def _reshaped(name: str, backward: str) -> Steps:
    """Steps that bring a result to its layout by a reshape, where heads and tokens had to be transposed."""

    def turned(x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(x.shape)

    def back(x: Tensor) -> Tensor:
        b, first, second, *rest = x.shape
        return x.reshape(b, second, first, *rest).transpose(1, 2)

    def returned(here: Here, whole: Partial) -> tuple[Tensor, Tensor]:
        out, lse = STEPS.returned(here, whole)
        return (turned(out), lse) if name == "out" else (out, turned(lse))

    return replace(STEPS, returned=returned, cotangent=lambda here, of, x: back(x) if of == backward else x)


LAYOUT: list[Hypothesis] = [
    Hypothesis(
        _says_other_layout,
        OTHER_LAYOUT,
        advice=lambda scene: f'Declare tensor_layout="{_layouts(scene)[1]}", or call transpose(1, 2) on each tensor',
    ),
    Hypothesis(
        lambda scene: 'out is returned as "{1}", but tensor_layout="{0}" is declared'.format(*_layouts(scene)),
        replace(
            STEPS,
            returned=_returned_turned,
            cotangent=lambda here, name, x: _turned(here, x) if name == "dout" else x,
        ),
        advice="Return out.transpose(1, 2)",
    ),
    *(
        Hypothesis(
            f"{name} is brought from {layout} by a reshape instead of a transposition of heads and tokens",
            _reshaped(name, backward),
            advice=f"Return {name}.transpose(1, 2)",
        )
        for name, backward, layout in (
            ("lse", "dlse", "(batch, tokens, heads) to (batch, heads, tokens)"),
            ("out", "dout", "(batch, heads, tokens, dims) to (batch, tokens, heads, dims)"),
        )
    ),
]

MISUNDERSTOOD: list[Hypothesis] = [*ARGUMENTS, *LAYOUT]
