"""Causes without a mutant: faults of the backward, of inputs and of messages that no report tells of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import permuted
from ringverify.faults.autograd import PARTS, blocks, counted, multiplied, own
from ringverify.faults.fault import Faults
from ringverify.faults.operators import if_alike
from ringverify.faults.place import Block, Here, like
from ringverify.faults.ring import STEPS, Steps, travel
from ringverify.faults.strides import Read, as_dense, given

FAULTS = Faults()
Tensor = torch.Tensor
# -- the formula -------------------------------------------------------------------------------------------------------


def _lse_taken_for(of: Callable[[Tensor], Tensor]) -> Steps:
    return replace(STEPS, probabilities=lambda s, m, lse: arithmetic.probabilities(s, m, of(lse)))


def _scaled(of_q: int, of_k: int) -> Steps:
    """Apply the scale so many times in dq and in dk."""
    return replace(
        STEPS,
        dq=lambda ds, k, scale, attended: arithmetic.dq(ds, k, scale**of_q, attended),
        dk=lambda ds, q, scale, attended: arithmetic.dk(ds, q, scale**of_k, attended),
    )


FORMULA: dict[str, Steps] = {
    "gradients use the block's own out and lse instead of the merged ones": own(out=True, lse=True),
    "gradients use the block's own out": own(out=True, lse=False),
    "the cotangent of lse is counted twice": given("dlse", lambda here, x: 2 * x),
    "delta is missing from ds, the cotangent of lse is there": replace(STEPS, delta=lambda dout, out, dlse: -dlse),
    "ds lacks the factor p": replace(STEPS, ds=lambda p, dp, delta: dp - delta[..., None]),
    "the backward takes an lse in base 2 for a natural one": _lse_taken_for(lambda lse: lse / math.log(2)),
    "the backward has no lse: it counts as 0": _lse_taken_for(torch.zeros_like),
    "scale is missing from dk": _scaled(1, 0),
    "scale is missing from dq and dk": _scaled(0, 0),
    "scale is applied twice in dq": _scaled(2, 1),
    "scale is applied twice in dq and dk": _scaled(2, 2),
    "the cotangent of out is ignored": given("dout", lambda here, x: torch.zeros_like(x)),
    "the cotangent of out is negated": given("dout", lambda here, x: -x),
    "the cotangent of out counts twice": given("dout", lambda here, x: 2 * x),
    "the cotangent of out is taken to be 1 everywhere": given("dout", lambda here, x: torch.ones_like(x)),
}
for says, steps in FORMULA.items():
    FAULTS.cause(says, steps)

# -- what is returned --------------------------------------------------------------------------------------------------

Gradients = tuple[Tensor, Tensor, Tensor]


def _returned(change: Callable[[Tensor, Tensor, Tensor], Gradients]) -> Steps:
    return replace(STEPS, returned_gradients=lambda here, dq, dk, dv: change(dq, dk, dv))


for says, steps in {
    "the returned dv holds the sum of the right dk and the right dv": if_alike(lambda dk, dv: (dk, dk + dv)),
    "the returned dk is the right dv": if_alike(lambda dk, dv: (dv, dv)),
    "the returned dv is the right dk": if_alike(lambda dk, dv: (dk, dk)),
    "the rows of dk and dv are shifted by one backwards": _returned(
        lambda dq, dk, dv: (dq, dk.roll(-1, dims=1), dv.roll(-1, dims=1))
    ),
    "dk's and dv's elements are permuted: heads and tokens are exchanged by a reshape": _returned(
        lambda dq, dk, dv: (dq, permuted(dk), permuted(dv))
    ),
}.items():
    FAULTS.cause(says, steps)

FACTORS: dict[str, Callable[[Here], float]] = {
    "is 0": lambda here: 0.0,
    "has the wrong sign": lambda here: -1.0,
    "is twice what it should be": lambda here: 2.0,
    "is half of what it should be": lambda here: 0.5,
    "is as many times too large as there are ranks": lambda here: here.size,
    "is divided by the number of ranks": lambda here: 1 / here.size,
    "is divided by the number of query heads of a group": lambda here: 1 / here.problem.group_size,
    "is as many times too large as a group has query heads": lambda here: here.problem.group_size,
    "is divided by the number of queries": lambda here: 1 / max(1, here.problem.nq),
    "is divided by log(2)": lambda here: 1 / math.log(2),
    "is multiplied by log(2)": lambda here: math.log(2),
}
TOGETHER: dict[str, tuple[bool, bool, bool]] = {
    "dq": (True, False, False),
    "dk": (False, True, False),
    "dv": (False, False, True),
    "each of dk and dv": (False, True, True),
    "each of dq and dk": (True, True, False),
    "each of dq, dk and dv": (True, True, True),
}


def _where_replicated(by: Callable[[Here], float]) -> Callable[[Here], float]:
    return lambda here: by(here) if here.replicated else 1


# -- what travels ------------------------------------------------------------------------------------------------------


def _sent_on(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Send dk and dv one hop past their owner."""
    home = travel(steps, here, hop, owner, carried, part)
    if hop + 1 < here.size or here.size == 1 or here.replicated:
        return home
    arrived = steps.arrive_gradients(steps.move(steps, here, home, (here.rank - 1) % here.size))
    return like(arrived, here, here.rank)


def _unpacked_as_a_pair(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Take two buffers that each hold dk and dv, the one sent and the one received, for dk and for dv."""
    home = travel(steps, here, hop, owner, carried, part)
    lasts = hop + 1 == here.size > 1 and not here.replicated
    if not lasts or part.k.shape[2:] != part.v.shape[2:] or here.problem.head_dim != here.problem.dv:
        return home
    both = Block(home.k + home.v, home.k + home.v)
    right, left = steps.right(here), steps.left(here)
    room = steps.buffers(here, both, right)
    of_right = steps.arrive_gradients(
        steps.post(here, steps.peer(here, left), steps.peer(here, right), steps.group(here), both, room)
    )
    return Block(both.k, like(of_right, here, here.rank).v)


def _the_same_way(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    """Send blocks and their gradients the same way: rank r adds its part of block r + hop to that of block r - hop."""
    if here.replicated:
        return travel(steps, here, hop, owner, carried, part)
    parts = here.notes.setdefault("parts", {})
    parts[owner] = part
    if hop + 1 < here.size:
        return part
    total: Block | None = None
    for step in range(here.size):
        met = like(parts[(here.rank + step) % here.size], here, steps.owner(here, step))
        total = travel(steps, here, step, steps.owner(here, step), total, met)
    del here.notes["parts"]
    assert total is not None
    return total


def summed_in_input_dtype(*, step_by_step: bool) -> Steps:
    """Round what each rank adds to dk and dv to the dtype of the inputs before these are summed over ranks."""

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
            for x in everyone.get(here.rank, [part[of]]):
                rounded = x.to(dtype).to(here.wide)
                total = rounded if total is None else total + rounded
                total = total.to(dtype).to(here.wide) if step_by_step else total
            assert total is not None
            found.append(total)
        return Block(*found)

    return replace(STEPS, travel=summed)


for says in PARTS:
    FAULTS.cause(f"dk and dv {says}", counted(says, "dk", "dv"))
for says in PARTS:
    FAULTS.cause(f"dq: its parts {says}", counted(says, "dq"))
for says in ("are those of the last hop alone: nothing is added up", "lack the parts of rank 0"):
    FAULTS.cause(f"dq, dk and dv {says}", counted(says, "dq", "dk", "dv"))
for says in PARTS:
    FAULTS.cause(f"dk: its parts {says}", counted(says, "dk"))
    FAULTS.cause(f"dv: its parts {says}", counted(says, "dv"))
for says, steps in {
    "dk and dv are those of rank r - 1: sent one hop too many": replace(STEPS, travel=_sent_on),
    "dk equals dk + dv, and dv is that sum of rank r + 1: the buffers sent and received are unpacked as dk and dv": (
        replace(STEPS, travel=_unpacked_as_a_pair)
    ),
    "blocks are taken from one side and their gradients sent to the same one: right on two ranks, on more dk and dv "
    "hold parts of other blocks": replace(STEPS, travel=_the_same_way),
}.items():
    FAULTS.cause(says, steps)
for what, by in FACTORS.items():
    for which, names in TOGETHER.items():
        FAULTS.cause(f"{which} {what}", multiplied(names, by))
        FAULTS.cause(f"replicated queries: {which} {what}", multiplied(names, _where_replicated(by)))

# -- blocks that arrive ------------------------------------------------------------------------------------------------


def _keys_are_zeros(here: Here, hop: int, owner: int, block: Block) -> Block:
    return block if hop == 0 else block._replace(k=torch.zeros_like(block.k))


FAULTS.cause(
    "keys of other ranks are zeros: they are read before they arrive", blocks(_keys_are_zeros), "always", "backward"
)
# -- inputs ------------------------------------------------------------------------------------------------------------


def _rounded(dtype: torch.dtype) -> Read:
    return lambda here, x: x.to(dtype).to(x.dtype)


for says, steps in {
    "strides of k ignored: its elements are read as they lie in memory": given("k", as_dense),
    "strides of v ignored: its elements are read as they lie in memory": given("v", as_dense),
    "strides of q, k and v ignored: elements are read as they lie in memory": given("q k v", as_dense),
}.items():
    FAULTS.cause(says, steps)
for narrow in ("bfloat16", "float16", "float32"):
    for what, inputs in {
        "all inputs": "q k v dout", "q": "q", "k and v": "k v", "the cotangent of out": "dout"
    }.items():  # fmt: skip
        FAULTS.cause(f"result as if {what} were rounded to {narrow}", given(inputs, _rounded(getattr(torch, narrow))))
