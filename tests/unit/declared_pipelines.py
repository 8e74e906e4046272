"""Right pipelines of every declaration, emulated without a world: nothing here knows what error is allowed.

A declaration says in which dtype sums are kept, whether probabilities are rounded to the input dtype, and in which
dtype gradients are summed over ranks. Four ways to compute attention do what it says: every operation is rounded to the
dtype of the sums, long sums piece by piece, and the blocks of a ring are visited one after another, from a rank's own.

    python tests/unit/declared_pipelines.py --examples 2000 --jobs 2

tries every declaration on as many cases, the four ways in turn, and names what exceeds its bound.

Shape letters: B batch, S a rank's queries, T a block's keys, H query heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ringref.attention import attention
from ringref.pattern import multiplicity
from ringref.problem import DtypeName, Problem
from ringref.rounding import HOLDING, Pipeline, allowed_error, margins
from ringref.sharding import key_positions
from ringverify.cases.case import Case
from ringverify.cases.choices import SeededChoices
from ringverify.cases.inputs import Inputs, make_inputs, round_to
from ringverify.cases.strategies import GENERAL_VALUES, Scope, case_of
from ringverify.implementation import Capabilities
from ringverify.properties.extremes import LARGE

Tensor = torch.Tensor
TORCH: dict[DtypeName, torch.dtype] = {
    "float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16
}  # fmt: skip
TENSORS = ("out", "lse", "dq", "dk", "dv")
PIECE = 8
"""Terms of a sum that are added before the sum so far is rounded."""
CHUNK = 20
"""Cases that a process tries at once."""
TILE = 8
"""Keys that an online softmax takes at once."""

EVERYTHING = Capabilities(
    sharding=("contiguous", "zigzag", "striped"), dtypes=tuple(TORCH), lse=True, lse_gradient=True, gqa=True,
    value_dim=True, scale=True, window=True, documents=True, key_lengths=True, cross_lengths=True, softcap=True,
    dilation=("split", "shared"), uneven=True, empty_shards=True,
)  # fmt: skip
SCOPES = (
    Scope(values=LARGE, cotangents=("out", "both", "lse"), world_sizes=(1, 2, 3, 5), longest=12),
    Scope(values=GENERAL_VALUES, cotangents=("out", "both", "lse"), world_sizes=(1, 2, 3, 5), longest=12),
)
"""Every second case has scores that overflow what is narrow, the others anything."""
SMALL = 6
"""Of so many cases one has small inputs, whose products vanish in float16 and whose results are subnormal there."""

DECLARATIONS = tuple(
    Pipeline(
        dtype=dtype, accumulates=accumulates, probabilities=probabilities, reduces=reduces,
        lse_dtype="float64" if dtype == "float64" else "float32",
    )
    for dtype in TORCH
    for accumulates in HOLDING[dtype]
    for probabilities, reduces in itertools.product(("accumulates", "input"), repeat=2)
    if (probabilities, reduces) == ("accumulates", "accumulates")
    or (dtype in ("bfloat16", "float16") and accumulates != "float64")
    or (dtype, accumulates) == ("float32", "float64")
)  # fmt: skip
"""Every dtype with all sums that hold it, and the other two both ways where that rounds: 24 of them."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """What one rank starts from, in the dtype of the sums: its queries and their cotangents, by head."""

    q_BHSD: Tensor
    dout_BHSE: Tensor
    dlse_BHS: Tensor


@dataclasses.dataclass(frozen=True)
class Block:
    """The keys and values of one rank, each key head once for every query head that reads it, and who attends them."""

    k_BHTD: Tensor
    v_BHTE: Tensor
    m_BHST: Tensor


@dataclasses.dataclass(frozen=True)
class Found:
    """What a rank computes: its rows' results, and what each block is owed."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: tuple[Tensor, ...]
    dv: tuple[Tensor, ...]


class Arithmetic:
    """Operations that are rounded where a declaration says so.

    Args:
        pipeline: the declaration.
        problem: what is computed.
    """

    def __init__(self, pipeline: Pipeline, problem: Problem) -> None:
        self.sums, self.returned = TORCH[pipeline.sums], TORCH[pipeline.dtype]
        self.narrow = pipeline.probabilities == "input"
        self.scale, self.softcap = problem.scale_value, problem.softcap

    def narrowed(self, x: Tensor) -> Tensor:
        """In the input dtype, where probabilities are."""
        return x.to(self.returned).to(self.sums) if self.narrow else x

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """`a @ b`, a few terms at a time."""
        total = a.new_zeros((*a.shape[:-1], b.shape[-1]))
        for some in range(0, a.shape[-1], PIECE):
            total = total + a[..., some : some + PIECE] @ b[..., some : some + PIECE, :]
        return total

    def total(self, x: Tensor) -> Tensor:
        """The sum over the last axis, which stays, a few terms at a time."""
        total = x.new_zeros((*x.shape[:-1], 1))
        for some in range(0, x.shape[-1], PIECE):
            total = total + x[..., some : some + PIECE].sum(-1, keepdim=True)
        return total

    def capped(self, s: Tensor) -> Tensor:
        """Scores after the softcap, if there is one."""
        return s if self.softcap is None else self.softcap * torch.tanh(s / self.softcap)

    def slope(self, s: Tensor) -> Tensor | float:
        """The derivative of the softcap at capped scores."""
        return 1.0 if self.softcap is None else 1 - (s / self.softcap) ** 2


def finite(x: Tensor) -> Tensor:
    """0 in place of the minus infinity of a row without keys."""
    return torch.where(x == -math.inf, 0.0, x)


def masked(s: Tensor, m: Tensor) -> Tensor:
    """Minus infinity where nothing is attended."""
    return s.masked_fill(m == 0, -math.inf)


def parts(x: Arithmetic, rows: Rows, block: Block, s: Tensor, p: Tensor, delta: Tensor) -> tuple[Tensor, ...]:
    """What a block adds to dq, and what it is owed: dk and dv. `delta` is what a row's scores have in common."""
    dp = x.product(rows.dout_BHSE, block.v_BHTE.mT)
    ds = torch.where(p == 0, 0.0, x.narrowed(p * (dp - delta) * x.slope(s)))
    dq, dk = x.scale * x.product(ds, block.k_BHTD), x.scale * x.product(ds.mT, rows.q_BHSD)
    return dq, dk, x.product(x.narrowed(p).mT, rows.dout_BHSE)


def at_once(x: Arithmetic, rows: Rows, blocks: Sequence[Block]) -> Found:
    """All keys are gathered, and a softmax keeps its weights for the backward."""
    lengths = [block.m_BHST.shape[-1] for block in blocks]
    whole = Block(
        torch.cat([block.k_BHTD for block in blocks], 2),
        torch.cat([block.v_BHTE for block in blocks], 2),
        torch.cat([block.m_BHST for block in blocks], 3),
    )
    m = whole.m_BHST
    s = x.capped(x.product(rows.q_BHSD, whole.k_BHTD.mT) * x.scale)
    top = finite(torch.cat([masked(s, m), s.new_full((*s.shape[:-1], 1), -math.inf)], -1).amax(-1, keepdim=True))
    w = torch.where(m > 0, m * torch.exp(s - top), 0.0)
    total = x.total(w)
    p = w / torch.where(total == 0, 1.0, total)
    out = x.product(x.narrowed(p), whole.v_BHTE)
    lse = (top + total.log())[..., 0]
    inner = x.total(p * x.product(rows.dout_BHSE, whole.v_BHTE.mT)) - rows.dlse_BHS[..., None]
    dq, dk, dv = parts(x, rows, whole, s, p, inner)
    return Found(out, lse, dq, dk.split(lengths, 2), dv.split(lengths, 2))


def from_lse(
    x: Arithmetic, rows: Rows, blocks: Sequence[Block], out: Tensor, lse: Tensor, scores: Callable[[Block], Tensor]
) -> Found:
    """The backward that computes weights again, block by block, from the log-sum-exp and from out as it is returned."""
    returned = out.to(x.returned).to(x.sums)
    delta = x.total(rows.dout_BHSE * returned) - rows.dlse_BHS[..., None]
    found = []
    for block in blocks:
        s = scores(block)
        p = torch.where(block.m_BHST > 0, block.m_BHST * torch.exp(s - lse[..., None]), 0.0)
        found.append(parts(x, rows, block, s, p, delta))
    # Fused kernels that round probabilities return a block's part of a gradient in the input dtype.
    dq = functools.reduce(torch.add, [x.narrowed(one[0]) for one in found])
    return Found(out, lse, dq, tuple(x.narrowed(one[1]) for one in found), tuple(x.narrowed(one[2]) for one in found))


def online(x: Arithmetic, rows: Rows, blocks: Sequence[Block]) -> Found:
    """A running maximum, a sum and an accumulator over tiles of keys, divided at the end; the scale is on q."""

    def scores(block: Block, tile: slice = slice(None)) -> Tensor:
        return x.capped(x.product(rows.q_BHSD * x.scale, block.k_BHTD[:, :, tile].mT))

    shape = (*rows.q_BHSD.shape[:-1], 1)
    top, total = rows.q_BHSD.new_full(shape, -math.inf), rows.q_BHSD.new_zeros(shape)
    acc = torch.zeros_like(rows.dout_BHSE)
    for block in blocks:
        for start in range(0, block.m_BHST.shape[-1], TILE):
            tile = slice(start, start + TILE)
            m, s = block.m_BHST[..., tile], scores(block, tile)
            new = torch.maximum(top, masked(s, m).amax(-1, keepdim=True))
            w, decay = torch.where(m > 0, m * torch.exp(s - finite(new)), 0.0), torch.exp(top - finite(new))
            total = total * decay + x.total(w)
            acc = acc * decay + x.product(x.narrowed(w), block.v_BHTE[:, :, tile])
            top = new
    lse = (finite(top) + total.log())[..., 0]
    return from_lse(x, rows, blocks, acc / torch.where(total == 0, 1.0, total), finite(lse), scores)


def merged(x: Arithmetic, rows: Rows, blocks: Sequence[Block]) -> Found:
    """A block is attended to its end, and results are merged by a sigmoid of the difference of log-sum-exps."""

    def scores(block: Block) -> Tensor:
        return x.capped(x.product(rows.q_BHSD, block.k_BHTD.mT) * x.scale)

    out, lse = torch.zeros_like(rows.dout_BHSE), rows.q_BHSD.new_full((*rows.q_BHSD.shape[:-1], 1), -math.inf)
    for block in blocks:
        s, m = scores(block), block.m_BHST
        if not m.shape[-1]:
            continue
        top = finite(masked(s, m).amax(-1, keepdim=True))
        w = torch.where(m > 0, m * torch.exp(s - top), 0.0)
        total = x.total(w)
        new = x.narrowed(x.product(x.narrowed(w), block.v_BHTE) / torch.where(total == 0, 1.0, total))
        new_lse = top + total.log()
        gap = torch.where(new_lse == lse, 0.0, new_lse - lse)
        out = torch.where(new_lse == -math.inf, out, out - torch.sigmoid(gap) * (out - new))
        both = lse - torch.nn.functional.logsigmoid(-gap)
        lse = torch.where(new_lse == -math.inf, lse, torch.where(lse == -math.inf, new_lse, both))
    return from_lse(x, rows, blocks, out, finite(lse)[..., 0], scores)


def base_two(x: Arithmetic, rows: Rows, blocks: Sequence[Block]) -> Found:
    """The root of the scale on q and on k, exponentials to base 2, and two weights for each merge."""
    root = math.sqrt(abs(x.scale))

    def scores(block: Block) -> Tensor:
        return x.capped(x.product(rows.q_BHSD * math.copysign(root, x.scale), (block.k_BHTD * root).mT))

    out, lse = torch.zeros_like(rows.dout_BHSE), rows.q_BHSD.new_full((*rows.q_BHSD.shape[:-1], 1), -math.inf)
    for block in blocks:
        s, m = scores(block) * math.log2(math.e), block.m_BHST
        if not m.shape[-1]:
            continue
        top = finite(masked(s, m).amax(-1, keepdim=True))
        w = torch.where(m > 0, m * torch.exp2(s - top), 0.0)
        total = x.total(w)
        new = x.narrowed(x.product(x.narrowed(w / torch.where(total == 0, 1.0, total)), block.v_BHTE))
        new_lse = (top + total.log2()) * math.log(2)
        both = torch.logaddexp(lse, new_lse)
        out = out * torch.exp(lse - finite(both)) + new * torch.exp(new_lse - finite(both))
        lse = both
    return from_lse(x, rows, blocks, out, finite(lse)[..., 0], scores)


WAYS = (at_once, online, merged, base_two)


def shrunk(case: Case) -> Inputs:
    """The inputs of a case, each tensor times a power of two down to 2^-13, as gradients are without loss scaling."""
    inputs, rng = make_inputs(case), np.random.default_rng(case.seed)
    names = ("q", "k", "v", "dout")
    smaller = {
        name: round_to(getattr(inputs, name) * 2.0**-power, case.problem.dtype)
        for name, power in zip(names, rng.integers(0, 14, 4), strict=True)
    }
    return dataclasses.replace(inputs, **smaller)


def emulated(
    case: Case, inputs: Inputs, pipeline: Pipeline, way: Callable[..., Found]
) -> dict[str, NDArray[np.float64]]:
    """All results of a ring that computes one way, as float64."""
    p, size = case.problem, case.world_size
    x = Arithmetic(pipeline, p)

    def by_head(array: NDArray[np.float64], group: int = 1) -> Tensor:
        return torch.from_numpy(np.array(array)).to(x.sums).transpose(1, 2).repeat_interleave(group, dim=1)

    queries, keys = ([torch.from_numpy(rows) for rows in key_positions(case.sharding, n, size)] for n in (p.nq, p.nk))
    q, dout, dlse = by_head(inputs.q), by_head(inputs.dout), torch.from_numpy(np.array(inputs.dlse)).to(x.sums)
    k, v, m = by_head(inputs.k, p.group_size), by_head(inputs.v, p.group_size), torch.from_numpy(multiplicity(p))
    dq, out, lse = torch.zeros_like(q), torch.zeros_like(dout), dlse.new_full(dlse.shape, -math.inf)
    gradients = x.returned if pipeline.reduces == "input" else x.sums
    totals = [torch.zeros((p.batch, p.hk, p.nk, width), dtype=gradients) for width in (p.head_dim, p.dv)]
    for rank, mine in enumerate(queries):
        rows = Rows(q[:, :, mine], dout[:, :, mine], dlse[:, :, mine])
        order = [(rank - hop) % size for hop in range(size)]
        blocks = [Block(k[:, :, keys[r]], v[:, :, keys[r]], m[:, :, mine][..., keys[r]].to(x.sums)) for r in order]
        found = way(x, rows, blocks)
        out[:, :, mine], dq[:, :, mine] = found.out, found.dq
        empty = m[:, :, mine].sum(-1) == 0
        lse[:, :, mine] = found.lse.masked_fill(empty, -math.inf)
        for total, owed in zip(totals, (found.dk, found.dv), strict=True):
            for owner, part in zip(order, owed, strict=True):
                heads = x.total(part.unflatten(1, (-1, p.group_size)).movedim(2, -1))[..., 0]
                total[:, :, keys[owner]] += heads.to(gradients)
    lse_dtype = TORCH[pipeline.lse_dtype]
    returned = {"out": out, "dq": dq, "dk": totals[0], "dv": totals[1]}
    arrays = {name: tensor.to(x.returned).transpose(1, 2).double().numpy() for name, tensor in returned.items()}
    return arrays | {"lse": lse.to(lse_dtype).double().numpy()}


def largest_margins(case: Case, inputs: Inputs, pipeline: Pipeline, way: Callable[..., Found]) -> dict[str, float]:
    """The largest margin of each result of a right pipeline on a case, under its own declaration."""
    found = emulated(case, inputs, pipeline, way)
    right = attention(case.problem, inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse)
    declared = dataclasses.replace(pipeline, blocks=case.world_size)
    bound = allowed_error(case.problem, right, inputs.q, inputs.k, inputs.v, inputs.dout, inputs.dlse, declared)
    return {
        name: float(
            margins(
                found[name],
                getattr(right, name),
                getattr(bound, name),
                pipeline.lse_dtype if name == "lse" else pipeline.dtype,
            ).max(initial=0.0)
        )
        for name in TENSORS
    }


def described(pipeline: Pipeline) -> str:
    """A declaration in a few words."""
    return f"{pipeline.dtype}, sums {pipeline.accumulates}, P {pipeline.probabilities}, reduces {pipeline.reduces}"


def accusations(dtype: DtypeName, number: int, case: Case | None = None) -> Iterator[tuple[Pipeline, str]]:
    """What is held against right pipelines of the declarations for a dtype, on the case of that number, or another."""
    if case is None:
        scope = dataclasses.replace(SCOPES[number % 2], dtypes=(dtype,))
        case = case_of(SeededChoices(number), EVERYTHING, scope)
    small = number % SMALL == SMALL - 1
    inputs = shrunk(case) if small else make_inputs(case)
    for place, pipeline in enumerate(one for one in DECLARATIONS if one.dtype == dtype):
        way = WAYS[(number // 2 + place) % len(WAYS)]
        largest = largest_margins(case, inputs, pipeline, way)
        over = {name: margin for name, margin in largest.items() if not margin <= 1}
        if over:
            yield pipeline, f"{number} {way.__name__} {over}: {'small ' * small}{case.values}, {case.describe()}"


def _tried(task: tuple[DtypeName, range]) -> tuple[DtypeName, list[tuple[Pipeline, str]]]:
    torch.set_num_threads(1)
    dtype, numbers = task
    return dtype, [accusation for number in numbers for accusation in accusations(dtype, number)]


def main() -> int:
    """Try every declaration and say how many were accused; 1 if a right pipeline was."""
    parser = argparse.ArgumentParser(description="Hold right pipelines of every declaration to their own bounds.")
    parser.add_argument("--examples", type=int, default=2000, help="cases of each declaration")
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    asked = parser.parse_args()
    starts = range(asked.seed, asked.seed + asked.examples, CHUNK)
    numbers = [range(start, min(start + CHUNK, asked.seed + asked.examples)) for start in starts]
    tasks = [(dtype, some) for some in numbers for dtype in TORCH]
    accused = dict.fromkeys(DECLARATIONS, 0)
    tried = dict.fromkeys(TORCH, 0)
    with multiprocessing.get_context("spawn").Pool(asked.jobs) as pool:
        for (dtype, some), (_, found) in zip(tasks, pool.imap(_tried, tasks), strict=True):
            tried[dtype] += len(some)
            for pipeline, line in found:
                accused[pipeline] += 1
                print(f"{described(pipeline)}: {line}", flush=True)
            if dtype == tasks[-1][0]:
                print(f"{tried[dtype]} cases, {sum(accused.values())} accusations", flush=True)
    for pipeline, count in accused.items():
        print(f"{described(pipeline)}: {count} accused of {tried[pipeline.dtype]}")
    print(f"{len(DECLARATIONS)} declarations: {sum(accused.values())} accused")
    return int(any(accused.values()))


if __name__ == "__main__":
    sys.exit(main())
