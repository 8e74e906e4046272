"""One rank's part at length: make its shard, run the implementation, and verify what it returned where it lies.

Expected values are computed a piece at a time, by each rank for its own rows. Between ranks goes what a piece depends
on beyond inputs, which anyone can make: three numbers a query, or the partial results of the sampled rows.

Shape letters: B batch, S sampled rows, T keys of a piece, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ringref.classes import ClassHead, pieces_of
from ringref.intervals import Part, parts
from ringref.problem import Problem
from ringref.rounding import LongBounds, Pipeline
from ringref.sampled import SampledRows, merged
from ringverify.cases.case import Case
from ringverify.cases.inputs import DTYPE
from ringverify.cases.local import Local, backward, forward
from ringverify.cases.running import shards
from ringverify.events import TensorName
from ringverify.implementation import AttentionCall, Capabilities
from ringverify.scale.checksums import RESULTS, Checksums, GoldenSums
from ringverify.scale.comparison import Difference, RankResults, stacked
from ringverify.scale.identities import IDENTITIES, identity_sums
from ringverify.scale.numbers import Kind, Numbers, Positions
from ringverify.targets import load
from ringverify.worlds.whose import ours, theirs

Float = NDArray[np.float64]
Method = Literal["every_row", "sampled_rows", "identities"]

PIECE = 512
"""Keys that all sampled rows are compared with at a time."""
ROWS = 1024
"""Rows that the class oracle answers, and that are compared, at a time."""
STRETCHES = (1, 256)
"""Neighbouring keys that are left out in thought, to say what a pass is worth."""
TRIED = 128
"""How often, at random places."""
NOTE_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class LongTask:
    """The argument of a rank's program.

    Attributes:
        target: the implementation, as any process can load it.
        case: what is computed on which ranks, and the seed of the inputs.
        method: how it is verified; "checksums": by the sums of a golden vector.
        device: device of the tensors.
        sampled: global positions of the rows that are sampled.
        notes: folder in which each rank notes how far it has come; "" for none.
        golden: the sums of a golden vector.
        gradients: whether gradients are computed, if they are declared.
    """

    target: str
    case: Case
    method: Method | Literal["checksums"]
    device: str
    sampled: tuple[int, ...] = ()
    notes: str = ""
    golden: GoldenSums | None = None
    gradients: bool = True


@dataclasses.dataclass(frozen=True)
class RankReport:
    """What one rank found.

    Attributes:
        inside: seconds in the implementation, forward and backward, and of processor time of this rank's thread.
        verifying: likewise, after that.
        memory: peak bytes of the process in the implementation and in verification, above what it had before the call.
        rows: number of rows verified, by result.
        margins: the largest margin, by result.
        squares: as in `RankResults`.
        differences: what is wrong.
        worth: what a pass says, a sentence each.
    """

    inside: tuple[float, float]
    verifying: tuple[float, float]
    memory: tuple[int, int] | None
    rows: dict[TensorName, int]
    margins: dict[TensorName, float]
    squares: dict[TensorName, Float]
    differences: tuple[Difference, ...]
    worth: tuple[str, ...]


def verify(asked: LongTask) -> RankReport:
    """Run the implementation on this rank's shard, and verify what it returned.

    Raises:
        ContractError: it returned something other than the contract asks for.
    """
    with ours():
        part = _LongRun(asked, dist.get_rank())
        before = _peak()
        dist.barrier()
        began = _clocks()
        part.run()
        inside = _since(began)
        after = _peak()
        dist.barrier()  # a rank that is ahead would be in the others' way, and its time counted as theirs
        began = _clocks()
        {
            "every_row": part.every_row,
            "sampled_rows": part.sampled_rows,
            "identities": part.identities,
            "checksums": part.checksums,
        }[asked.method]()
        differences = tuple(part.compared.explained())
        verifying = _since(began)
        memory = None if before is None or after is None else (after - before, (_peak() or 0) - before)
        part.note(everything=True)
        found = part.compared
        return RankReport(
            inside, verifying, memory, found.rows, found.margins, found.squares, differences, tuple(part.worth)
        )


def expected_checksums(case: Case, rows: Sequence[int]) -> Checksums:
    """Return the oracle's sums, and the errors allowed in them on as many ranks as the case has."""
    run = _LongRun(LongTask("ring", case, "checksums", "cpu"), 1)
    run.queries = run.keys = np.arange(case.problem.nq)
    run.shared = False
    run.compared = collected = _Collected(case, run.shards, run.numbers, rows)
    run.every_row()
    return collected.sums


class _Collected(RankResults):
    """Adds up what each row has to be, instead of comparing."""

    def __init__(self, case: Case, shards: Any, numbers: Numbers, rows: Sequence[int]) -> None:
        super().__init__(case, 1, shards, numbers)
        self.returned = {name: torch.empty(0) for name in RESULTS}
        self.sums = Checksums(case.seed, case.problem, rows)

    def compare(
        self, name: TensorName, b: int, h: int, rows: Positions, at: Positions, expected: Float, allowed: Float
    ) -> None:
        """Add rows of the oracle's results to the sums."""
        self.sums.add(name, h, at, expected, allowed)


def _clocks() -> tuple[float, float]:
    return time.monotonic(), time.thread_time()


def _since(began: tuple[float, float]) -> tuple[float, float]:
    now = _clocks()
    return now[0] - began[0], now[1] - began[1]


def _peak() -> int | None:
    """Return the most memory that this process has had since this was last asked; `None` if the system does not say."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        status = Path("/proc/self/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")
        return int(line.split()[1]) << 10
    return None


def rows_to_sample(case: Case, capabilities: Capabilities, count: int) -> tuple[int, ...]:
    """Return positions of queries, some for every purpose.

    They are the ends of every rank's runs of positions, both sides of powers of two, where tiles may end, ends of
    documents (of many, some all along), others at random, and for each two ranks a query of one that attends a key of
    the other, if there is one.
    """
    n, rng = case.problem.nq, np.random.default_rng(case.seed)
    powers = 2 ** np.arange(max(n, 1).bit_length())
    chosen: list[Any] = [powers, powers - 1, rng.integers(0, max(n, 1), count // 2)]
    queries, keys = shards(case, capabilities)
    for own in queries:
        if len(own):
            ascending = np.sort(own)
            chosen += [ascending[[0, -1]], rng.choice(ascending, -(-count // (2 * case.world_size)))]
            breaks = np.flatnonzero(np.diff(ascending) > 1)
            if len(breaks) < case.world_size:  # a striped shard has breaks everywhere
                chosen += [ascending[breaks], ascending[breaks + 1]]
    edges = np.array(case.problem.documents or (), dtype=np.int64)
    edges = edges[np.linspace(0, len(edges) - 1, min(len(edges), count)).astype(np.int64)] if len(edges) else edges
    chosen += [edges - 1, edges]
    found = np.unique(np.concatenate(chosen).astype(np.int64))
    found = found[(found >= 0) & (found < n)]
    for attends in _attending(case.problem, keys):
        for own in queries:
            if not attends[found[np.isin(found, own)]].any() and len(candidates := own[attends[own]]):
                found = np.append(found, rng.choice(candidates))
    return tuple(np.unique(found).tolist())


def _attending(problem: Problem, keys: Sequence[Positions]) -> Iterator[NDArray[np.bool_]]:
    """Yield, for each rank's keys, which queries attend one of them in some head of some element."""
    cut = [part for b, h in np.ndindex(problem.batch, problem.heads) for part in parts(problem, b, h)]
    for of_owner in keys:
        owned = np.zeros(problem.nk, dtype=np.int64)
        owned[of_owner] = 1
        attends = np.zeros(problem.nq, dtype=bool)
        for part in cut:
            before = np.concatenate([[0], np.cumsum(owned[part.keys])])
            attends[part.queries] |= before[np.maximum(part.first, part.last)] > before[part.first]
        yield attends


class _LongRun:
    """This rank's part: inputs, what came back, and what was found so far."""

    def __init__(self, asked: LongTask, rank: int) -> None:
        self.asked, self.case = asked, asked.case
        self.shared = self.case.world_size > 1 and self.case.sharding != "replicated_query"  # the queries, by all ranks
        self.problem: Problem = asked.case.problem
        self.implementation = load(asked.target)
        self.capabilities = self.implementation.capabilities
        self.rank = rank
        with theirs():
            self.shards = shards(self.case, self.capabilities)
        self.queries, self.keys = (of[self.rank] for of in self.shards)
        kinds: dict[str, Kind] = {"every_row": "classes", "checksums": "counted"}
        self.numbers = Numbers(self.problem, self.case.seed, kinds.get(asked.method, "free"))
        self.sampled = np.array(asked.sampled, dtype=np.int64)
        self.compared = RankResults(self.case, self.rank, self.shards, self.numbers)
        self.worth: list[str] = []
        self._noted = 0.0

    # -- the implementation --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Make the shard, run forward and backward, and keep what came back."""
        p, c = self.problem, self.capabilities
        dtype, swap = DTYPE[p.dtype], c.tensor_layout == "bhsd"
        numbers = self.numbers
        q = self._tensor(numbers.q, self.queries, p.heads, p.head_dim, dtype)
        k = self._tensor(numbers.k, self.keys, p.hk, p.head_dim, dtype)
        v = self._tensor(numbers.v, self.keys, p.hk, p.dv, dtype)
        dout = self._tensor(numbers.dout, self.queries, p.heads, p.dv, dtype)
        wide = DTYPE[p.lse_dtype]
        dlse = self._tensor(lambda b, h, at: numbers.dlse(b, h, at)[:, None], self.queries, p.heads, 1, wide)
        if self.asked.method == "sampled_rows":
            others = torch.from_numpy(~np.isin(self.queries, self.sampled)).to(dout.device)
            dout[:, others], dlse[:, others] = 0.0, 0.0
        leaves = tuple(x.transpose(1, 2).contiguous() if swap else x for x in (q, k, v))
        dout = dout.transpose(1, 2).contiguous() if swap else dout
        del q, k, v
        assert dist.group.WORLD is not None
        at, key_at = (torch.from_numpy(x.copy()).to(self.asked.device) for x in (self.queries, self.keys))
        sharding = c.sharding_named(self.case.sharding)
        call = AttentionCall(dist.group.WORLD, self.rank, self.case.world_size, p, sharding, at, key_at)
        local = Local(
            call,
            (leaves[0], leaves[1], leaves[2]),
            (dout, dlse[..., 0].transpose(1, 2).contiguous()),
            {},
            {},
            {},
            call,
            self.asked.device,
        )
        wanted = c.gradients and self.asked.gradients
        if wanted:
            for leaf in local.leaves:
                leaf.requires_grad_()
        out, lse = forward(self.implementation, local)
        gradients: tuple[torch.Tensor | None, ...] = backward(local, self.case, out, lse) if wanted else ()
        names: tuple[TensorName, ...] = ("out", "dq", "dk", "dv")
        with theirs():
            for name, tensor in zip(names, (out, *gradients), strict=False):
                if tensor is not None:
                    self.compared.returned[name] = tensor.detach().transpose(1, 2) if swap else tensor.detach()
            if lse is not None:
                self.compared.returned["lse"] = lse.detach().transpose(1, 2)[..., None]

    def _tensor(self, make: Any, positions: Positions, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty((self.problem.batch, len(positions), heads, width), dtype=dtype)
        for b in range(self.problem.batch):
            for h in range(heads):
                for start in range(0, len(positions), 1 << 14):
                    piece = slice(start, start + (1 << 14))
                    tensor[b, piece, h] = torch.from_numpy(make(b, h, positions[piece])).to(dtype)
        return tensor.to(self.asked.device)

    # -- every row -----------------------------------------------------------------------------------------------------

    def every_row(self) -> None:
        """Hold every row of every result to the class oracle."""
        p, group = self.problem, self.problem.group_size
        queries, keys = np.argsort(self.queries, kind="stable"), np.argsort(self.keys, kind="stable")
        every, every_key = np.arange(p.nq), np.arange(p.nk)
        books = self.numbers.codebooks
        bounds = self._bounds(
            float((np.abs(books[0]) @ np.abs(books[1]).T).max()), float(np.abs(books[0] @ books[1].T).max()), books
        )
        for b in range(p.batch):
            for kh in range(p.hk):
                heads, counts = [], []
                key_classes = self.numbers.key_classes(b, kh, every_key)
                for h in range(kh * group, (kh + 1) * group):
                    counts.append(_counts(p, b, h))
                    heads.append(self._class_head(b, h, kh, (self.numbers.query_classes(b, h, every), key_classes)))
                    self._check_rows(heads[-1], b, h, queries, counts[-1][0], bounds)
                    self.compared.rows_known[b, h] = np.stack([heads[-1].lse, heads[-1].towards])
                if "dk" in self.compared.returned:
                    self._check_keys(heads, b, kh, keys, counts, bounds)
                if self.rank == 0 and b == kh == 0 and "lse" in self.compared.returned:
                    self.worth.append(self._seen(heads[0], key_classes, counts[0][0], bounds))

    def _class_head(self, b: int, h: int, kh: int, classes: tuple[Positions, Positions]) -> ClassHead:
        p, numbers = self.problem, self.numbers
        queries, keys = zip(numbers.codebooks, classes, strict=True)
        dout = partial(numbers.dout, b, h) if "dq" in self.compared.returned else None
        return ClassHead(p, b, h, queries, keys, partial(numbers.v, b, kh), dout, self._dlse(b, h, np.arange(p.nq)))

    def _check_rows(self, head: ClassHead, b: int, h: int, order: Positions, keys: Float, bounds: LongBounds) -> None:
        """Verify rows of this rank; afterwards `head` knows what gradients of keys need of all rows."""
        for piece in pieces_of(order, ROWS):
            at = self.queries[piece]
            out, lse, dq, size = head.rows(at)
            self.compared.compare("out", b, h, piece, at, out, bounds.out(keys[at], out))
            self.compared.compare("lse", b, h, piece, at, lse[:, None], bounds.lse(keys[at], lse)[:, None])
            if "dq" in self.compared.returned:
                self._compare_dq(b, h, piece, at, keys[at], out, (dq, size, head.sizes[at]), bounds)
            self.note()
        if self.shared:
            others = np.ones(self.problem.nq, dtype=bool)
            others[self.queries] = False
            head.lse[others] = 0.0
            found = np.stack([head.lse, head.towards, head.sizes])
            head.lse[:], head.towards[:], head.sizes[:] = self._summed(found)

    def _check_keys(
        self,
        heads: Sequence[ClassHead],
        b: int,
        kh: int,
        order: Positions,
        counts: Sequence[tuple[Float, Float]],
        bounds: LongBounds,
    ) -> None:
        most, queries = max(float(of[0].max(initial=0)) for of in counts), np.sum([of[1] for of in counts], axis=0)
        for piece in pieces_of(order, ROWS):
            at = self.keys[piece]
            of_keys = [np.sum(of, axis=0) for of in zip(*(head.gradients_of_keys(at) for head in heads), strict=True)]
            self._compare_keys(b, kh, piece, at, of_keys, most, queries[at], bounds)
            self.note()

    def _compare_dq(
        self,
        b: int,
        h: int,
        rows: Positions,
        at: Positions,
        keys: Float,
        out: Float,
        found: tuple[Float, Float, Float],
        bounds: LongBounds,
    ) -> None:
        """Verify dq: `found` is dq, the sums of sizes that it is made of, and y_i (`ringref.classes`)."""
        dout, (dq, size, least) = self.numbers.dout(b, h, at), found
        whole = bounds.whole(dout, self._dlse(b, h, at))
        allowed = bounds.dq(keys, whole, bounds.share(dout, out, least), size, dq)
        self.compared.compare("dq", b, h, rows, at, dq, allowed)

    def _compare_keys(
        self,
        b: int,
        kh: int,
        rows: Positions,
        at: Positions,
        found: Sequence[Float],
        most: float,
        queries: Float,
        bounds: LongBounds,
    ) -> None:
        """Verify dk and dv: `found` is dk, dv, and the sums of sizes that dk is made of.

        Those that dv is made of add up to dv itself, since cotangents are positive (`Numbers.dout`).
        """
        dk, dv, size = found
        self.compared.compare("dk", b, kh, rows, at, dk, bounds.dk(most, queries, size, dv, dk))
        self.compared.compare("dv", b, kh, rows, at, dv, bounds.dv(most, queries, dv, dv))

    def _bounds(self, products: float, scores: float, sizes: Any) -> LongBounds:
        c, scale = self.capabilities, abs(self.problem.scale_value)
        lse = self.compared.returned.get("lse")
        pipeline = Pipeline(
            dtype=self.problem.dtype,
            accumulates=c.accumulates,
            probabilities=c.probabilities,
            lse_dtype="float64" if lse is not None and lse.dtype is torch.float64 else "float32",
            blocks=self.case.world_size,
            reduces=c.reduces,
        )
        return LongBounds(
            problem=self.problem,
            pipeline=pipeline,
            magnitude=scale * products,
            score=scale * scores,
            query_size=float(np.abs(sizes[0]).max()),
            key_size=float(np.abs(sizes[1]).max()),
            value_size=1.0,
        )

    def _seen(self, head: ClassHead, key_classes: Positions, keys: Float, bounds: LongBounds) -> str:
        """Say how many stretches of keys, had they been left out by the forward, would have moved an lse too far."""
        p, rng = self.problem, np.random.default_rng(self.case.seed + 1)
        allowed, seekers = bounds.lse(keys, head.lse), self.numbers.query_classes(0, 0, np.arange(p.nq))
        limit = np.log(np.where(allowed > 0, allowed, np.inf)) + np.where(keys > 0, head.lse, np.inf)
        exps, said = np.exp(head.scores), []
        cut = list(parts(p, 0, 0))
        for length in sorted({min(one, max(p.nk, 1)) for one in STRETCHES}):
            seen = 0
            for start in rng.integers(0, max(p.nk - length, 0) + 1, TRIED):
                for part in cut:
                    first, last = np.searchsorted(part.keys, [start, start + length])
                    if first < last and _moved(part, (first, last), key_classes, exps, seekers, limit):
                        seen += 1
                        break
            said.append(f"{seen} of {TRIED} {'single keys' if length == 1 else f'runs of {length} keys'}")
        return f"had the forward left out keys at a random place, lse would have shown {' and '.join(said)}"

    # -- sampled rows --------------------------------------------------------------------------------------------------

    def sampled_rows(self) -> None:
        """Hold sampled rows, and all gradients of keys, which are sums over these rows, to the dense oracle."""
        p, at, numbers = self.problem, self.sampled, self.numbers
        q = stacked(numbers.q, p.batch, p.heads, at)
        bounds = self._free_bounds(float(np.abs(q).sum(axis=-1).max(initial=0.0)))
        dout = stacked(numbers.dout, p.batch, p.heads, at)
        dlse = np.stack([np.stack([self._dlse(b, h, at) for h in range(p.heads)]) for b in range(p.batch)])
        found = SampledRows(p, at, q, dout, dlse)
        order = np.argsort(self.keys, kind="stable")
        for _, positions, k, v in self._own_keys(order):
            found.see(positions, k, v)
        self._merge(found)
        counts = [[_counts(p, b, h) for h in range(p.heads)] for b in range(p.batch)]
        most = max(float(one[0].max(initial=0)) for of in counts for one in of)
        if "dk" in self.compared.returned:
            for rows, positions, k, v in self._own_keys(order):
                of_keys, queries = (
                    found.differentiate(positions, k, v),
                    np.full(len(rows), float(len(at) * p.group_size)),
                )
                for b, kh in np.ndindex(p.batch, p.hk):
                    one = [x[b, :, kh] for x in of_keys]
                    self._compare_keys(b, kh, rows, positions, one, most, queries, bounds)
                self.note()
            found.dq, found.dq_size = self._summed(np.stack([found.dq, found.dq_size]))
            towards = dlse - (found.dout * found.out).sum(axis=-1).swapaxes(1, 2)
            for b, h in np.ndindex(p.batch, p.heads):
                known = self.compared.rows_known[b, h] = np.stack([np.full(p.nq, np.inf), np.zeros(p.nq)])
                known[:, at] = found.lse[b, h], towards[b, h]
        own = np.flatnonzero(np.isin(self.queries, at))
        place = np.searchsorted(at, self.queries[own])
        for b in range(p.batch):
            for h in range(p.heads):
                keys = counts[b][h][0][at][place]
                out, lse = found.out[b, place, h], found.lse[b, h, place]
                self.compared.compare("out", b, h, own, at[place], out, bounds.out(keys, out))
                self.compared.compare("lse", b, h, own, at[place], lse[:, None], bounds.lse(keys, lse)[:, None])
                if "dq" in self.compared.returned:
                    of_query = found.dq[b, place, h], found.dq_size[b, place, h], found.sizes[b, h, place]
                    self._compare_dq(b, h, own, at[place], keys, out, of_query, bounds)
                    self._compare_zero(b, h, np.setdiff1d(np.arange(len(self.queries)), own))
        if self.rank == 0:
            self.worth.append(sampled_worth(at, p.nq))

    def _compare_zero(self, b: int, h: int, rows: Positions) -> None:
        """Rows whose cotangents are zero have a dq of zero, exactly."""
        for piece in pieces_of(rows, ROWS):
            zeros = np.zeros((len(piece), self.problem.head_dim))
            self.compared.compare("dq", b, h, piece, self.queries[piece], zeros, zeros)

    def _own_keys(self, order: Positions) -> Iterator[tuple[Positions, Positions, Float, Float]]:
        p = self.problem
        for rows in pieces_of(order, PIECE):
            at = self.keys[rows]
            k, v = (stacked(make, p.batch, p.hk, at) for make in (self.numbers.k, self.numbers.v))
            yield rows, at, k, v

    def _merge(self, found: SampledRows) -> None:
        """Put together what each rank saw of its own keys."""
        of_rows = [x.swapaxes(1, 2)[..., None] for x in (found.values, found.lse)]
        everyone = np.stack(self._gathered(np.concatenate([found.out, *of_rows], axis=-1)))
        together, lse = everyone[..., :-1], everyone[..., -1].swapaxes(2, 3)
        together, found.lse = merged(together, lse, np.ones(len(lse)))
        found.out, found.values = together[..., :-1], together[..., -1].swapaxes(1, 2)

    # -- golden vectors ------------------------------------------------------------------------------------------------

    def checksums(self) -> None:
        """Hold sums of rows and of blocks of rows to those of a golden vector."""
        p, golden = self.problem, self.asked.golden
        assert golden is not None
        found = Checksums(self.case.seed, p, golden.rows)
        of_queries = self.queries if self.case.sharding != "replicated_query" or self.rank == 0 else self.queries[:0]
        for name in self.compared.returned:
            at, heads = (self.keys, p.hk) if name in ("dk", "dv") else (of_queries, p.heads)
            for b, h in np.ndindex(p.batch, heads):
                for piece in pieces_of(np.arange(len(at)), ROWS):
                    found.add(name, h, at[piece], self.compared.actual(name, b, h, piece))
            self.compared.rows[name] = p.batch * heads * len(at)
            total = self._summed(found.values[name])
            if self.rank == 0:
                self.compared.compare_sums(name, total, golden.expected[name], golden.allowed[name], found.names(name))

    # -- sums over all rows --------------------------------------------------------------------------------------------

    def identities(self) -> None:
        """Hold sums over all rows to one another, and to sums of inputs."""
        p, numbers = self.problem, self.numbers
        queries = self.queries if self.case.sharding != "replicated_query" or self.rank == 0 else self.queries[:0]
        largest, whole_of = [[0.0, -float(p.dv), 0.0]], self._free_bounds(0.0).whole
        for b, h in np.ndindex(p.batch, p.heads):
            for at in pieces_of(queries, PIECE):
                dout = numbers.dout(b, h, at)
                q, whole = np.abs(numbers.q(b, h, at)).sum(axis=-1), whole_of(dout, self._dlse(b, h, at))
                largest.append([float(one.max()) for one in (q, -dout.sum(axis=-1), whole)])
        products, least, whole = np.max(self._gathered(np.max(largest, axis=0)), axis=0)
        bounds = self._free_bounds(products)
        for b, kh in np.ndindex(p.batch, p.hk):
            counts = [_counts(p, b, h) for h in range(kh * p.group_size, (kh + 1) * p.group_size)]
            found = identity_sums(
                self.compared,
                numbers,
                bounds,
                (b, kh),
                counts,
                (queries, self.keys),
                partial(self._dlse, b),
                least=-least,
                whole=whole,
            )
            self.note()
            for which, sums in enumerate(found):
                left, right, squares, rows = self._summed(sums)
                if self.rank == 0 and (which != 3 or p.softcap is None):  # the last holds without softcap
                    (name, says), allowed = IDENTITIES[which], bounds.sums(squares, rows)
                    whose = [f"{says}, of element {b}, key head {kh}, dimension {d}" for d in range(len(left))]
                    self.compared.compare_sums(name, right, left, allowed, whose)
                    if which == 1 and b == kh == 0 and left.all():
                        share = float((allowed / left).min())
                        shown = f"sums of dv would have shown it from {share:.2g} of all rows on"
                        self.worth.append(f"had some rows given no gradients, {shown}")
        of_queries, of_keys = p.batch * p.heads * len(queries), p.batch * p.hk * len(self.keys)
        self.compared.rows |= {"out": of_queries, "dq": of_queries, "dk": of_keys, "dv": of_keys}

    def _free_bounds(self, products: float) -> LongBounds:
        largest = np.full((1, 1), 255 / 128)
        return self._bounds(products * 255 / 128, products * 255 / 128, (largest, largest))

    def _dlse(self, b: int, h: int, at: Positions) -> Float:
        return self.numbers.dlse(b, h, at) if self.case.cotangent == "both" else np.zeros(len(at))

    # -- other ranks ---------------------------------------------------------------------------------------------------

    def _summed(self, x: Float) -> Float:
        tensor = torch.from_numpy(x.copy()).to(self.asked.device)
        dist.all_reduce(tensor)
        summed: Float = tensor.cpu().numpy()
        return summed

    def _gathered(self, x: Float) -> list[Float]:
        tensor = torch.from_numpy(np.ascontiguousarray(x)).to(self.asked.device)
        everyone = [torch.empty_like(tensor) for _ in range(self.case.world_size)]
        dist.all_gather(everyone, tensor)
        return [one.cpu().numpy() for one in everyone]

    def note(self, *, everything: bool = False) -> None:
        """Note how far this rank has come, for the bar and in case that it does not come to the end."""
        now = time.monotonic()
        if not self.asked.notes:
            return
        if everything or now - self._noted > NOTE_SECONDS:
            self._noted = now
            noted = {"rows": self.compared.rows, "wrong": self.compared.wrong}
            path = Path(self.asked.notes) / f"{self.rank}.json"
            with contextlib.suppress(OSError):  # of a rank on another machine
                path.with_suffix(".new").write_text(json.dumps(noted))
                path.with_suffix(".new").replace(path)


def _moved(
    part: Part, stretch: tuple[int, int], key_classes: Positions, exps: Float, seekers: Positions, limit: Float
) -> bool:
    """Whether an lse would be off by more than is allowed without a stretch of keys, of which a row may attend a part.

    Args:
        part: what attends what.
        stretch: the first of its keys, and the one after the last.
        key_classes: class of each key.
        exps: exponentials of scores by class of query and of key.
        seekers: class of each query.
        limit: log of the largest sum of exponentials that may be missing, by query.
    """
    first, last = stretch
    counts = np.zeros((last - first + 1, exps.shape[1]))
    counts[np.arange(1, last - first + 1), key_classes[part.keys[first:last]]] = 1.0
    counts = counts.cumsum(axis=0)
    with np.errstate(divide="ignore"):
        # Rows that attend all of it have one answer a class; few attend a part of it.
        begin, end = np.searchsorted(part.last, last), np.searchsorted(part.first, first, side="right")
        at = part.queries[begin:end]
        if (np.log(exps @ counts[-1])[seekers[at]] > limit[at]).any():
            return True
        begin, end = np.searchsorted(part.last, first, side="right"), np.searchsorted(part.first, last)
        some = np.flatnonzero((part.last[begin:end] < last) | (part.first[begin:end] > first)) + begin
        rows = part.queries[some]
        attended = (
            counts[np.minimum(part.last[some], last) - first] - counts[np.maximum(part.first[some], first) - first]
        )
        left_out = np.log(np.einsum("rc,rc->r", exps[seekers[rows]], np.maximum(attended, 0.0)))
    return bool((left_out > limit[rows]).any())


def sampled_worth(sampled: Positions, length: int) -> str:
    """Say which faults the sampled rows would have shown, at a random place, and with which probability."""
    tile = min(256, length)
    between = np.diff(np.concatenate([[-1], sampled, [length]])) - 1
    missed = np.maximum(between - tile + 1, 0).sum() / (length - tile + 1)
    in_a_hundred, in_twenty = (1 - (1 - share) ** len(sampled) for share in (0.01, 0.05))
    return (
        f"{len(sampled)} rows were computed again, of every rank some: a fault in all rows of a rank would have been "
        f"seen, in 1 % of all rows with probability {in_a_hundred:.2f}, in 5 % {in_twenty:.2f}, in {tile} neighbours "
        f"{1 - missed:.2f}; and gradients of every key, as far as these rows give it any"
    )


def _counts(problem: Problem, b: int, h: int) -> tuple[Float, Float]:
    """Return how many keys each query attends, and how many queries each key, with multiplicity."""
    of_query, of_key = np.zeros(problem.nq), np.zeros(problem.nk)
    for part in parts(problem, b, h):
        some = part.first < part.last
        of_query[part.queries] += np.where(some, part.last - part.first, 0)
        steps = np.zeros(len(part.keys) + 1)
        np.add.at(steps, part.first[some], 1.0)
        np.add.at(steps, part.last[some], -1.0)
        of_key[part.keys] += np.cumsum(steps)[:-1]
    return of_query, of_key
