"""Faults that are there only in inference, or only where some of q, k and v require no gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, gradients, multiplicity, returning

Tensor = torch.Tensor
FAULTS = Faults()


def _not_rescaled(steps: Steps, here: Here, hop: int, running: Any, new: Any) -> Any:
    """Add a block without the factor exp(old lse - new lse) of what was summed before."""
    merged = STEPS.accumulate(steps, here, hop, running, new)
    if here.wanted is not None or running is None:
        return merged
    attended = new.lse > -torch.inf  # of (B, H, S)
    weight = torch.exp(new.lse - merged.lse).masked_fill(~attended, 0.0)[..., None]
    return Partial(torch.where(attended[..., None], running.out + weight * new.out, running.out), merged.lse)


FAULTS.add(
    "O140",
    "under no_grad what was summed before is not rescaled when a block is added",
    replace(STEPS, accumulate=_not_rescaled),
    kind="mode",
)

FAULTS.add(
    "O141",
    "without gradients lse is not computed: zeros are returned",
    returning(lambda here, out, lse: (out, lse if here.wanted else torch.zeros_like(lse))),
    kind="mode",
)


def _unless_k(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    """Skip dv together with dk on blocks from other ranks."""
    dq, part = gradients(steps, here, hop, owner, rows, block)
    if here.wanted is not None and "k" not in here.wanted and owner != here.rank:
        part = Block(part.k, torch.zeros_like(part.v))
    return dq, part


FAULTS.add(
    "O142",
    "where k requires no gradient, dv has only the part of the own queries",
    replace(STEPS, gradients=_unless_k),
    kind="mode",
)


def _without_values(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    """Take the values of other ranks for 0 in the backward."""
    if here.wanted is not None and "v" not in here.wanted and owner != here.rank:
        block = Block(block.k, torch.zeros_like(block.v))
    return gradients(steps, here, hop, owner, rows, block)


FAULTS.add(
    "O143",
    "where v requires no gradient, values do not travel in the backward: dq and dk lack them",
    replace(STEPS, gradients=_without_values),
    kind="mode",
)


_LATEST: dict[tuple[object, ...], Tensor] = {}


def _kept_for_training(here: Here, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Keep the out of a training step, one a rank and shape, and return it in inference."""
    key = (here.rank, tuple(out.shape), out.dtype)
    if torch.is_inference_mode_enabled():
        return _LATEST.get(key, out).clone(), lse
    if here.wanted:
        _LATEST[key] = out.detach().clone()
    return out, lse


FAULTS.add(
    "O144",
    "under inference_mode the out of the latest training step of the same shape is returned",
    returning(_kept_for_training),
    kind="mode",
)


def _unmasked(steps: Steps, here: Here, hop: int, owner: int) -> Tensor:
    now = replace(steps, causal=lambda problem, i, j: torch.ones_like(i + j, dtype=torch.bool))
    return multiplicity(now if torch.is_inference_mode_enabled() else steps, here, hop, owner)


FAULTS.add(
    "O145",
    "under inference_mode the causal mask is left out, as for a single query that decodes",
    replace(STEPS, pattern=_unmasked),
    kind="mode",
)


FAULTS.add(
    "O146",
    "k is set to require gradients: dk is made although nobody asks for it",
    replace(STEPS, given=lambda here, name, x: x.requires_grad_() if name == "k" and here.wanted else x),
    kind="mode",
)
