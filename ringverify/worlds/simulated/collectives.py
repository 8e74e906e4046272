"""What each rank receives from a collective, computed from what all ranks put in. Pure functions of tensors.

Reductions add up in the order of ranks, in the dtype of the tensor, as a real transport does (whose order may differ).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ringverify.worlds.simulated.operations import Combine, Pieces, shown

Reduce = Callable[[Sequence[torch.Tensor]], torch.Tensor]


def all_reduce(reduce: Reduce) -> Combine:
    """Every rank receives the reduction over ranks of each of its tensors."""

    def combine(inputs: Sequence[Pieces]) -> list[Pieces]:
        totals = [reduce(_alike(pieces)) for pieces in _transposed(inputs)]
        return [totals] * len(inputs)

    return combine


def reduce_to(root: int, reduce: Reduce) -> Combine:
    """The root receives the reduction over ranks of each of its tensors; the others receive nothing."""

    def combine(inputs: Sequence[Pieces]) -> list[Pieces]:
        totals = [reduce(_alike(pieces)) for pieces in _transposed(inputs)]
        return [totals if place == root else [] for place in range(len(inputs))]

    return combine


def all_gather(inputs: Sequence[Pieces]) -> list[Pieces]:
    """Every rank receives the first tensor of every rank, then the second tensor of every rank, and so on."""
    gathered = [piece for pieces in _transposed(inputs) for piece in _alike(pieces)]
    return [gathered] * len(inputs)


def gather_to(root: int) -> Combine:
    """The root receives the tensor of every rank; the others receive nothing."""

    def combine(inputs: Sequence[Pieces]) -> list[Pieces]:
        gathered = _alike([piece for (piece,) in inputs])
        return [gathered if place == root else [] for place in range(len(inputs))]

    return combine


def broadcast_from(root: int) -> Combine:
    """Every rank receives the root's tensors; the others' inputs only tell their dtypes and numbers of elements."""

    def combine(inputs: Sequence[Pieces]) -> list[Pieces]:
        for pieces in _transposed(inputs):
            _alike(pieces)
        return [inputs[root]] * len(inputs)

    return combine


def scatter_from(root: int) -> Combine:
    """Rank i receives the root's i-th tensor."""

    def combine(inputs: Sequence[Pieces]) -> list[Pieces]:
        return [[piece] for piece in inputs[root]]

    return combine


def reduce_scatter(reduce: Reduce) -> Combine:
    """Rank i of P receives the reduction over ranks of their i-th tensors, and of their (i + P)-th, and so on."""

    def combine(inputs: Sequence[Pieces]) -> list[Pieces]:
        size = len(inputs)
        totals = [reduce(_alike(pieces)) for pieces in _transposed(inputs)]
        return [totals[place::size] for place in range(size)]

    return combine


def all_to_all(inputs: Sequence[Pieces]) -> list[Pieces]:
    """Rank i receives the i-th tensor of every rank."""
    return _transposed(inputs)


def nothing(inputs: Sequence[Pieces]) -> list[Pieces]:
    """No rank receives anything: a barrier."""
    return [()] * len(inputs)


def reduction(operator: object) -> tuple[str, Reduce]:
    """Return the name of a `ReduceOp` and the function that computes it.

    Raises:
        ValueError: the operator is one that only one vendor's library knows.
    """
    for name, step in _STEPS.items():
        if operator == getattr(dist.ReduceOp, name):
            return name, _folding(step)
    if operator == dist.ReduceOp.AVG:
        return "AVG", _average
    raise ValueError(f"the simulated world cannot reduce with {operator}; it knows {', '.join([*_STEPS, 'AVG'])}")


def _sum(total: torch.Tensor, one: torch.Tensor) -> object:
    return total.logical_or_(one) if total.dtype is torch.bool else total.add_(one)


def _product(total: torch.Tensor, one: torch.Tensor) -> object:
    return total.logical_and_(one) if total.dtype is torch.bool else total.mul_(one)


_STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "SUM": _sum,
    "PRODUCT": _product,
    "MIN": lambda total, one: torch.minimum(total, one, out=total),
    "MAX": lambda total, one: torch.maximum(total, one, out=total),
    "BAND": lambda total, one: total.bitwise_and_(one),
    "BOR": lambda total, one: total.bitwise_or_(one),
    "BXOR": lambda total, one: total.bitwise_xor_(one),
}


def _folding(step: Callable[[torch.Tensor, torch.Tensor], object]) -> Reduce:
    def reduce(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        total = pieces[0].clone()
        for piece in pieces[1:]:
            step(total, piece.view(total.shape))
        return total

    return reduce


def _average(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    # `div_` refuses integers, as torch's own transport does.
    return _folding(_sum)(pieces).div_(len(pieces))


def _transposed(inputs: Sequence[Pieces]) -> list[Pieces]:
    if len({len(pieces) for pieces in inputs}) > 1:
        counts = ", ".join(f"group rank {place} brings {len(pieces)}" for place, pieces in enumerate(inputs))
        raise ValueError(f"ranks bring different numbers of tensors: {counts}")
    return list(zip(*inputs, strict=True))


def _alike(pieces: Pieces) -> Pieces:
    first = pieces[0]
    if any(piece.numel() != first.numel() or piece.dtype != first.dtype for piece in pieces):
        forms = ", ".join(f"group rank {place} has {shown(piece)}" for place, piece in enumerate(pieces))
        raise ValueError(f"ranks bring tensors of different sizes or dtypes: {forms}")
    return pieces
