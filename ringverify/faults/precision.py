"""Faults of rounding: what is kept, sent or summed in a narrower dtype (A12 in the reports)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import rounded
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, gradients, returning, travel
from ringverify.faults.tensors import Read, given

Tensor = torch.Tensor
FAULTS = Faults()

FAULTS.add(
    "A12a",
    "out is rounded to the input dtype after every hop",
    replace(STEPS, between=lambda here, whole: whole._replace(out=rounded(here, whole.out))),
    kind="precision",
)
FAULTS.add(
    "A12b",
    "dq is rounded to the input dtype after every hop",
    replace(STEPS, add_dq=lambda here, hop, total, part: rounded(here, total + part)),
    kind="precision",
)


def _narrow_travel(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    total = part if carried is None else STEPS.add_part(hop, carried, part)
    return STEPS.travel(steps, here, hop, owner, carried, Block(*(rounded(here, x) for x in total)))


FAULTS.add(
    "A12c",
    "dk and dv travel in the input dtype: they are rounded at every hop",
    replace(STEPS, travel=_narrow_travel, add_part=lambda hop, carried, part: part),
    kind="precision",
)
FAULTS.add(
    "A12d",
    "lse is rounded to the input dtype after every hop",
    replace(STEPS, between=lambda here, whole: whole._replace(lse=rounded(here, whole.lse))),
    kind="precision",
)


def _rounded_scores(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    return rounded(here, STEPS.capped(steps, here, q, k))


FAULTS.add(
    "O75",
    "scores are rounded to the input dtype before the softmax",
    replace(STEPS, capped=_rounded_scores),
    kind="precision",
)


def _scaled_before_the_cast(steps: Steps, here: Here, q: Tensor, k: Tensor) -> Tensor:
    return STEPS.capped(replace(steps, scale=lambda here: 1.0), here, rounded(here, q * steps.scale(here)), k)


FAULTS.add(
    "O76",
    "q is scaled in the input dtype before it meets the keys",
    replace(STEPS, capped=_scaled_before_the_cast),
    kind="precision",
)


def _rounded_weights(steps: Steps, here: Here) -> Steps:
    """Round P to the input dtype before it is multiplied with V, forward and backward."""

    def partial(s: Tensor, m: Tensor, v: Tensor) -> Partial:
        found = arithmetic.partial(s, m, v)
        p = rounded(here, arithmetic.probabilities(s, m, found.lse))
        return found._replace(out=arithmetic.weighted_sum(p, v, m > 0))

    return replace(steps, partial=partial, dv=lambda p, dout, attended: arithmetic.dv(rounded(here, p), dout, attended))


FAULTS.add(
    "O77",
    "probabilities are rounded to the input dtype, which is not declared",
    replace(
        STEPS,
        attend=lambda steps, here, hop, owner, q, block: STEPS.attend(
            _rounded_weights(steps, here), here, hop, owner, q, block
        ),
    ),
    kind="precision",
)
FAULTS.add(
    "O78",
    "the returned lse is rounded to the input dtype",
    returning(lambda here, out, lse: (out, rounded(here, lse))),
    kind="precision",
)
FAULTS.add(
    "O79",
    "the lse saved for the backward is rounded to the input dtype",
    replace(STEPS, kept=lambda here, saved: (*saved[:-1], rounded(here, saved[-1]))),
    kind="precision",
)
FAULTS.add(
    "O106",
    "bfloat16: the lse saved for the backward is rounded to it",
    replace(
        STEPS,
        kept=lambda here, saved: (*saved[:-1], rounded(here, saved[-1])) if here.dtype is torch.bfloat16 else saved,
    ),
    kind="precision",
)


def _rounded_ds(
    steps: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
) -> tuple[Tensor, Block]:
    rounding = replace(steps, ds=lambda p, dp, delta: rounded(here, arithmetic.ds(p, dp, delta)))
    return gradients(rounding, here, hop, owner, rows, block)


FAULTS.add("O80", "ds is rounded to the input dtype", replace(STEPS, gradients=_rounded_ds), kind="precision")
FAULTS.add(
    "O83",
    "delta is rounded to the input dtype",
    replace(
        STEPS,
        gradients=lambda steps, here, hop, owner, rows, block: gradients(
            steps, here, hop, owner, (*rows[:2], rounded(here, rows[2]), rows[3]), block
        ),
    ),
    kind="precision",
)


def _as_wide_as(here: Here, lse: Tensor) -> Tensor:
    return lse.to(torch.promote_types(here.dtype, torch.float32))


FAULTS.add(
    "O81",
    "sums are kept in float32 for float64 inputs",
    replace(
        STEPS,
        wide=lambda dtype: torch.float32,
        returned=lambda here, whole: (arithmetic.narrow(here, whole.out), _as_wide_as(here, whole.lse)),
    ),
    recognised=False,
)
FAULTS.add(
    "O82",
    "everything is computed in the input dtype",
    replace(
        STEPS,
        wide=lambda dtype: dtype,
        returned=lambda here, whole: (arithmetic.narrow(here, whole.out), _as_wide_as(here, whole.lse)),
    ),
    kind="precision",
)


def _sum_in_input_dtype(here: Here, x: Tensor) -> Tensor:
    b, _, t, d = x.shape
    grouped = x.view(b, here.problem.hk, here.problem.group_size, t, d)
    return grouped.to(here.dtype).sum(dim=2).to(here.wide) if here.problem.group_size > 1 else grouped[:, :, 0]


FAULTS.add(
    "O122",
    "grouped heads: dk and dv are summed over query heads in the input dtype",
    replace(STEPS, per_key_head=_sum_in_input_dtype),
    kind="precision",
)


def by_rank(here: Here) -> list[int]:
    """Return all ranks in order."""
    return list(range(here.size))


def back_through_the_ring(here: Here) -> list[int]:
    """Return the ranks to which the rank's block came, the last one first."""
    return [(here.rank + hop) % here.size for hop in reversed(range(here.size))]


def summed_in_input_dtype(*, step_by_step: bool, order: Callable[[Here], list[int]] = by_rank) -> Steps:
    """Round what each rank adds to dk and dv to the dtype of the inputs before these are summed over ranks.

    Args:
        step_by_step: whether every sum is rounded, not only the last one.
        order: in which order ranks add to what the rank in hand holds.
    """

    def summed(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
        dtype = getattr(torch, here.problem.dtype)
        if dtype not in (torch.bfloat16, torch.float16):
            return travel(steps, here, hop, owner, carried, part)
        parts = here.notes.setdefault("parts", {})
        parts[owner] = part
        if hop + 1 < here.size and not here.replicated:
            return part
        del here.notes["parts"]
        found = []
        for of in (0, 1):
            total: Tensor | None = None
            everyone = (
                {rank: steps.gather(here, parts[rank][of]) for rank in range(here.size)} if len(parts) > 1 else {}
            )
            given = everyone.get(here.rank)
            for x in [part[of]] if given is None else [given[rank] for rank in order(here)]:
                rounded = x.to(dtype).to(here.wide)
                total = rounded if total is None else total + rounded
                total = total.to(dtype).to(here.wide) if step_by_step else total
            assert total is not None
            found.append(total)
        return Block(*found)

    return replace(STEPS, travel=summed)


def _rounded(dtype: torch.dtype) -> Read:
    return lambda here, x: x.to(dtype).to(x.dtype)


for dtype in ("bfloat16", "float16", "float32"):
    for what, inputs in {
        "all inputs": "q k v dout", "q": "q", "k and v": "k v", "the cotangent of out": "dout"
    }.items():  # fmt: skip
        FAULTS.cause(f"result as if {what} were rounded to {dtype}", given(inputs, _rounded(getattr(torch, dtype))))
