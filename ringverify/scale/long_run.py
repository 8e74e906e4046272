"""One rank's part at length: its shard, what the implementation returned, and what was found of it so far.

Between ranks goes what a piece of results depends on beyond inputs, which anyone can make: three numbers a query, or
the partial results of the sampled rows.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ringref.intervals import parts
from ringref.problem import Problem
from ringref.rounding import LongBounds, Pipeline
from ringverify.cases.inputs import DTYPE
from ringverify.cases.local import Local, backward, forward
from ringverify.cases.running import shards
from ringverify.events import TensorName
from ringverify.implementation import AttentionCall
from ringverify.scale.comparison import RankResults
from ringverify.scale.numbers import Kind, Numbers, Positions
from ringverify.scale.task import LongTask
from ringverify.targets import load
from ringverify.worlds.whose import theirs

Float = NDArray[np.float64]

ROWS = 1024
"""Rows that are answered and compared at a time."""
NOTE_SECONDS = 0.2


class LongRun:
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
        self.numbers = Numbers(self.problem, self.case.seed, kinds.get(asked.way, "free"))
        self.sampled = np.array(asked.sampled, dtype=np.int64)
        self.compared = RankResults(self.case, self.rank, self.shards, self.numbers)
        self.worth: list[str] = []
        self._noted = 0.0

    def blocks(self) -> list[Positions]:
        """Return the rows of the KV blocks that are held here, in the order of their positions."""
        return [np.argsort(self.keys, kind="stable")]

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
        if self.asked.way == "sampled_rows":
            others = torch.from_numpy(~np.isin(self.queries, self.sampled)).to(dout.device)
            dout[:, others], dlse[:, others] = 0.0, 0.0
        leaves = tuple(x.transpose(1, 2).contiguous() if swap else x for x in (q, k, v))
        dout = dout.transpose(1, 2).contiguous() if swap else dout
        del q, k, v
        assert dist.group.WORLD is not None
        at, key_at = (torch.from_numpy(x.copy()).to(self.asked.device) for x in (self.queries, self.keys))
        sinks = None
        if numbers.sinks is not None:
            sinks = torch.tensor(numbers.sinks, dtype=torch.float32, device=self.asked.device)
        sharding = c.sharding_named(self.case.sharding)
        call = AttentionCall(dist.group.WORLD, self.rank, self.case.world_size, p, sharding, at, key_at, sinks=sinks)
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
            local.require_gradients()
        out, lse = forward(self.implementation, local)
        gradients: tuple[torch.Tensor | None, ...] = backward(local, self.case, out, lse) if wanted else ()
        names: tuple[TensorName, ...] = ("out", "dq", "dk", "dv")
        with theirs():
            for name, tensor in zip(names, (out, *gradients[:3]), strict=False):
                if tensor is not None:
                    self.compared.returned[name] = tensor.detach().transpose(1, 2) if swap else tensor.detach()
            if len(gradients) > 3 and gradients[3] is not None:
                self.compared.dsinks = gradients[3].detach().to(device="cpu", dtype=torch.float64).numpy()
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

    def compare_dq(
        self,
        b: int,
        h: int,
        rows: Positions,
        at: Positions,
        keys: Float,
        out: Float,
        found: tuple[Float, Float, Float],
        bounds: LongBounds,
        variance: Sequence[Float] | None = None,
    ) -> None:
        """Verify dq: `found` is dq, the sums of sizes that it is made of, and y_i (`ringref.classes`)."""
        dout, (dq, size, least) = self.numbers.dout(b, h, at), found
        whole = bounds.whole(dout, self.dlse(b, h, at))
        allowed = bounds.dq(keys, whole, bounds.share(dout, out, least), size, dq)
        self.compared.compare("dq", b, h, rows, at, dq, allowed, variance)

    def compare_keys(
        self,
        b: int,
        kh: int,
        rows: Positions,
        at: Positions,
        found: Sequence[Float],
        most: float,
        queries: Float,
        bounds: LongBounds,
        variances: Sequence[Sequence[Float] | None] = (None, None),
    ) -> None:
        """Verify dk and dv: `found` is dk, dv, and the sums of sizes that dk is made of.

        Those that dv is made of add up to dv itself, since cotangents are positive (`Numbers.dout`).
        """
        dk, dv, size = found
        self.compared.compare("dk", b, kh, rows, at, dk, bounds.dk(most, queries, size, dv, dk), variances[0])
        self.compared.compare("dv", b, kh, rows, at, dv, bounds.dv(most, queries, dv, dv), variances[1])

    def bounds(self, products: float, scores: float, sizes: Any) -> LongBounds:
        """Return what may be wrong.

        Args:
            products: largest Σ_d |q_id k_jd| of a query and a key.
            scores: largest size of their product.
            sizes: arrays of numbers of queries and of keys that hold the largest.
        """
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
        sinks = np.zeros(0) if self.numbers.sinks is None else self.numbers.sinks
        return LongBounds(
            problem=self.problem,
            pipeline=pipeline,
            magnitude=scale * products,
            score=max(scale * scores, float(np.abs(sinks[np.isfinite(sinks)]).max(initial=0.0))),
            query_size=float(np.abs(sizes[0]).max()),
            key_size=float(np.abs(sizes[1]).max()),
            value_size=1.0,
        )

    def free_bounds(self, products: float) -> LongBounds:
        """Return what may be wrong on free inputs; `products`: largest sum of the sizes of a query's numbers."""
        largest = np.full((1, 1), 255 / 128)
        return self.bounds(products * 255 / 128, products * 255 / 128, (largest, largest))

    def sink(self, h: int) -> float:
        """Return the learned sink of a query head, −inf where it has none."""
        return -np.inf if self.numbers.sinks is None else float(self.numbers.sinks[h])

    def dlse(self, b: int, h: int, at: Positions) -> Float:
        """Return the cotangents of lse that count, 0 where it has none."""
        return self.numbers.dlse(b, h, at) if self.case.cotangent == "both" else np.zeros(len(at))

    def summed(self, x: Float) -> Float:
        """Return the sum of an array over all ranks."""
        tensor = torch.from_numpy(x.copy()).to(self.asked.device)
        dist.all_reduce(tensor)
        summed: Float = tensor.cpu().numpy()
        return summed

    def gathered(self, x: Float) -> list[Float]:
        """Return the arrays of all ranks."""
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


def counts_of(problem: Problem, b: int, h: int) -> tuple[Float, Float]:
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
