"""A decoded token and a chunk of a prompt, each against a cache that lies sharded in pages: forward, without gradients.

A token's call is one of a growing cache: each has a length that none before it had, so that planning it is measured.
`own-keys` is torch's `scaled_dot_product_attention` of the same token and the keys of the rank, on all ranks at once:
what is above it, messages, merge and planning add. A chunk's queries lie on the ranks in turn, and either they travel
or the KV blocks do.

Shape letters: B batch, H heads, S this rank's queries, T its keys, D head_dim.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ringref.problem import Problem
from ringref.sharding import PageTable, QueryKeySharding, query_positions
from ringverify.bench.patching import patched
from ringverify.bench.sides import Side
from ringverify.bench.speed import VISIT_SECONDS
from ringverify.bench.timing import Seconds, interleaved, of_pass, ratios, spread
from ringverify.bench.workload import Shape
from ringverify.errors import Inconclusive
from ringverify.reports.progress import Progress
from ringverify.ring import method
from ringverify.ring.attention import ring_attention
from ringverify.ring.plan.plan import make_plan
from ringverify.worlds.world import World, WorldUnavailable

Kind = Literal["decode", "prefill"]
CHUNK = 512
"""Queries of a chunk."""
PAGE = 16
"""Positions of a page; pages are dealt out to the ranks in turn."""
GROWS = 1024
"""Tokens that a cache has room for beyond what is cached; then its length begins anew."""
SIDES: dict[Kind, tuple[str, ...]] = {"decode": ("own-keys", "ring", "allgather"), "prefill": ("pass-kv", "pass-q")}
"""Those of each kind. Ratios are to the first one."""
MEANING = {
    "own-keys": "scaled_dot_product_attention of the token and the rank's own keys, on all ranks at once",
    "ring": "our ring, queries on every rank",
    "allgather": "the same, partial results gathered by a collective",
    "pass-kv": "our ring, KV blocks travel",
    "pass-q": "our ring, queries and partial results travel",
}


@dataclasses.dataclass(frozen=True)
class Serving:
    """What is computed.

    Attributes:
        kind: decode: one token, on every rank. prefill: a chunk, contiguous over the ranks.
        cached: positions in the cache before it.
        world_size: number of ranks.
        shape: batch, heads, head_dim and dtype.
    """

    kind: Kind
    cached: int
    world_size: int
    shape: Shape

    @property
    def title(self) -> str:
        """In one line."""
        what = "one token" if self.kind == "decode" else f"{CHUNK} queries"
        of = f"{self.shape.heads} × {self.shape.head_dim} {self.shape.dtype}"
        return f"{self.kind}, {what} against {self.cached:,} cached, {self.world_size} ranks in pages of {PAGE}, {of}"

    @property
    def sharding(self) -> QueryKeySharding:
        """Queries as the kind has them, keys in pages."""
        pages = -(-(self.cached + max(GROWS, CHUNK)) // PAGE)
        table = PageTable(PAGE, tuple(tuple(range(rank, pages, self.world_size)) for rank in range(self.world_size)))
        return QueryKeySharding("replicated" if self.kind == "decode" else "contiguous", table)

    def problem(self, call: int) -> Problem:
        """What a call computes, counted from 0; a token's is one longer than that of the call before."""
        length = self.cached + (1 + call % GROWS if self.kind == "decode" else CHUNK)
        return Problem(
            batch=self.shape.batch,
            query_length=1 if self.kind == "decode" else CHUNK,
            key_length=length,
            heads=self.shape.heads,
            head_dim=self.shape.head_dim,
            dtype=self.shape.dtype,
            causal=True,
        )

    def held(self, rank: int, length: int) -> int:
        """Positions below a length that a rank holds."""
        full, rest = divmod(length, PAGE)
        return PAGE * len(range(rank, full, self.world_size)) + (rest if full % self.world_size == rank else 0)


@dataclasses.dataclass(frozen=True)
class CacheTurn:
    """One turn of a side."""

    side: str
    serving: Serving
    calls: int


class Cache:
    """This rank's queries and cache, and how many calls there have been: a side finds no plan that another has made."""

    def __init__(self, serving: Serving) -> None:
        self.serving, self.sharding, shape = serving, serving.sharding, serving.shape
        self.rank, self.called = dist.get_rank(), 0
        dtype = getattr(torch, shape.dtype)
        queries = len(query_positions(self.sharding, serving.problem(0).nq, serving.world_size)[self.rank])
        torch.manual_seed(0)
        self.q_BHSD = torch.randn(shape.batch, shape.heads, queries, shape.head_dim, dtype=dtype)
        torch.manual_seed(self.rank)
        room = serving.held(self.rank, serving.cached + max(GROWS, CHUNK))
        self.k_BHTD, self.v_BHTD = torch.randn(2, shape.batch, shape.heads, room, shape.head_dim, dtype=dtype)

    def call(self, side: str) -> Callable[[], Any]:
        """The next call of a side, ready to be timed."""
        problem = self.serving.problem(self.called)
        self.called += 1
        held = self.serving.held(self.rank, problem.nk)
        k, v = self.k_BHTD[:, :, :held], self.v_BHTD[:, :, :held]
        if side == "own-keys":
            return lambda: scaled_dot_product_attention(self.q_BHSD, k, v)
        return lambda: ring_attention(
            self.q_BHSD,
            k,
            v,
            sharding=self.sharding,
            layout="bhsd",
            query_length=problem.nq,
            key_length=problem.nk,
            causal=True,
            method="allgather" if side == "allgather" else "ring",
        )


_KEPT: list[Cache] = []
"""What this process prepared, for the latest `Serving`."""


def turn(of: CacheTurn) -> list[tuple[float, float]]:
    """Run a side's turn on this rank; return when each call began and ended."""
    torch.set_num_threads(1)
    if not _KEPT or _KEPT[0].serving != of.serving:
        _KEPT[:] = [Cache(of.serving)]
    found = []
    forced = patched(method, "passes_queries", lambda _: lambda plan: of.side == "pass-q")
    with torch.no_grad(), forced if of.serving.kind == "prefill" else contextlib.nullcontext():
        for _ in range(of.calls):
            call = _KEPT[0].call(of.side)
            dist.barrier()
            began = time.monotonic()
            call()
            found.append((began, time.monotonic()))
    return found


def measured(world: World, serving: Serving, rounds: int, progress: Progress) -> dict[str, Any]:
    """Measure one of them, and return its entry in the report.

    Raises:
        Inconclusive: a rank raised, died or hung, or could not be started.
    """
    sides = [Side(name, "ranks", "") for name in SIDES[serving.kind]]
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        progress.step(done)

    def take(side: Side, calls: int) -> list[Seconds]:
        given = CacheTurn(side.name, serving, calls)
        try:
            run = world.run(turn, given, world_size=serving.world_size, seed=0, deadline=VISIT_SECONDS)
        except WorldUnavailable as error:
            raise Inconclusive(str(error)) from None
        if run.failure is not None:
            raise Inconclusive(f"{side.name} on {serving.title}: {run.failure.message}")
        each = zip(*run.results, strict=True)
        return [Seconds(max(end for _, end in call) - min(begin for begin, _ in call), 0.0) for call in each]

    progress.start(serving.kind, f"n={serving.cached}", (rounds + 1) * len(sides))
    try:
        found = interleaved(sides, take, rounds, step)
    finally:
        progress.stop()
    rows = [
        {
            "side": name,
            "seconds": spread(of_pass(samples, "forward")),
            "rounds": of_pass(samples, "forward"),
            "to_first": spread(ratios(samples, found[sides[0].name], "forward")),
            "sent": _sent(serving, name),
        }
        for name, samples in found.items()
    ]
    return {"kind": serving.kind, "title": serving.title, "ranks": serving.world_size, "rows": rows}


def _sent(serving: Serving, side: str) -> int:
    """Return the bytes that a rank sends in a call, of the rank that sends the most."""
    problem, ranks = serving.problem(0), serving.world_size
    if serving.kind == "prefill":
        plan = make_plan(problem, serving.sharding, ranks, 0)
        return plan.sent.queries if side == "pass-q" else plan.sent.keys
    partial: int = problem.batch * problem.heads * (problem.dv + 1) * max(4, getattr(torch, problem.dtype).itemsize)
    hops = {"own-keys": 0, "allgather": ranks - 1, "ring": 2 * (ranks - 1) / ranks}
    return int(hops[side] * partial)
