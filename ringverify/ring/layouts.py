"""How the axes of q, k and v are ordered: (batch, sequence, heads, head_dim), or heads before the sequence as in SDPA.

The ring computes in "bshd"; the other layout is a view of it, so that inputs which a model made by `transpose(1, 2)`
are not copied. Both layouts have four axes, so that one given as the other often has shapes that fit: what tells them
apart is refused here, and the rest by `query_length` and `key_length`, where they are given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch

TensorLayout = Literal["bshd", "bhsd"]
LAYOUTS: tuple[TensorLayout, ...] = get_args(TensorLayout)
AXES: dict[TensorLayout, str] = {
    "bshd": "batch, sequence, heads, head_dim",
    "bhsd": "batch, heads, sequence, head_dim",
}


def check_layout(layout: object) -> None:
    """Refuse a layout that there is not.

    Raises:
        ValueError: it is not among `LAYOUTS`.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: expected {' or '.join(LAYOUTS)}")


def relaid(tensor: torch.Tensor, layout: TensorLayout) -> torch.Tensor:
    """A tensor of this layout in "bshd", or the reverse: a view."""
    return tensor if layout == "bshd" else tensor.transpose(1, 2)


def in_layout(shape: tuple[int, ...], layout: TensorLayout) -> tuple[int, ...]:
    """A shape in "bshd" as the axes are ordered in this layout."""
    return shape if layout == "bshd" else (shape[0], shape[2], shape[1], *shape[3:])


def hinted(
    error: ValueError,
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: TensorLayout,
    prepared: Callable[[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], object],
) -> ValueError:
    """The error of a call that is refused; where the call would be right in the other layout, it says so.

    Args:
        error: why it is refused.
        inputs: q, k and v in "bshd", as the declared layout has it.
        layout: the declared one.
        prepared: raises a ValueError if the call is refused with these inputs.
    """
    q, k, v = (x.transpose(1, 2) for x in inputs)
    if q.shape == inputs[0].shape and k.shape == inputs[1].shape:
        return error
    try:
        prepared((q, k, v))
    except ValueError:
        return error
    return ValueError(f"{error}; these shapes fit layout={LAYOUTS[layout == 'bshd']!r}")


def check_not_mixed_up(q: torch.Tensor, k: torch.Tensor, layout: TensorLayout) -> None:
    """Refuse shapes that are grouped-query attention in the other layout and hardly anything in this one.

    Fewer keys than queries, by a whole factor, of more heads than there are queries: that is what one rank's shard of
    grouped-query attention looks like with its two middle axes exchanged. Only asked where no length is given.

    Args:
        q: queries in "bshd", as the declared layout has it.
        k: keys, likewise.
        layout: the declared one.

    Raises:
        ValueError: they do.
    """
    (_, queries, heads, _), (_, keys, key_heads, _) = q.shape, k.shape
    if heads == key_heads > queries > keys > 0 and queries % keys == 0:
        raise ValueError(
            f"q {in_layout(tuple(q.shape), layout)} and k {in_layout(tuple(k.shape), layout)} with layout={layout!r} "
            f"are {queries} queries and {keys} keys of {heads} heads on this rank: if that is meant, give "
            "query_length= and key_length="
        )
