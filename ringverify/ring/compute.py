"""The work of one rank on one block, tile by tile: `Job` holds what all blocks of a call share.

Shape letters: B batch, S this rank's queries, T keys of one block, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch

from ringref.sharding import Sharding, key_positions, query_positions
from ringverify.ring.accumulate import Running, Sum
from ringverify.ring.gradients import Gradients, TileGradient
from ringverify.ring.kernels.kernel import Kernel, KernelTile, MergedRows, Setting, TileMask
from ringverify.ring.kernels.streaming import STREAMING
from ringverify.ring.masks import band_bias, position_bias
from ringverify.ring.plan.kv_slices import KVTensors
from ringverify.ring.plan.plan import Plan
from ringverify.ring.plan.rectangles import Rectangle
from ringverify.ring.plan.regions import Regions
from ringverify.ring.plan.rows import Span
from ringverify.ring.plan.tiles import Tile, tiles
from ringverify.ring.sides import Sides
from ringverify.ring.uploading import uploaded

if TYPE_CHECKING:
    from ringverify.ring.transport import Transport


FEW_QUERIES = 64
"""For up to so many queries, a copy of a block takes longer than kernels then save."""

Place = tuple[slice, slice, slice]
"""Rows of a tile among this rank's: batch, queries, heads."""


class Rows:
    """This rank's side of a backward pass, merged over all keys; see `MergedRows`.

    Args:
        q: `(B, S, H, D)`.
        dout: cotangent of out `(B, S, H, E)`, in the dtype of q.
        out: `(B, S, H, E)`, in the dtype of q.
        lse: `(B, H, S)`, −inf in rows that attend nothing.
        dlse: cotangent of lse `(B, H, S)`, or `None`.
    """

    def __init__(
        self, q: torch.Tensor, dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
    ) -> None:
        self.q, self.dlse = q, dlse
        self._dout_BHSE, self._out_BHSE = dout.transpose(1, 2), out.transpose(1, 2)
        self.lse = lse.masked_fill(lse == -torch.inf, torch.inf)

    @functools.cached_property
    def finite(self) -> bool:
        """Whether a mask may be left to a fused kernel, as far as these rows go."""
        return all_finite(self.q, self._dout_BHSE, self._out_BHSE)

    def at(self, place: Place) -> MergedRows:
        """Those of a tile."""
        batch, queries, heads = place
        here = batch, heads, queries
        dlse = None if self.dlse is None else self.dlse[here]
        return MergedRows(self._dout_BHSE[here], self._out_BHSE[here], self.lse[here], dlse)


class BlockTile(NamedTuple):
    """A tile of a block, and what computes it.

    Attributes:
        region: it is a piece of this.
        place: its rows among this rank's.
        keys: its keys within the region.
        kernel: what computes it.
        given: what the kernel reads of it.
    """

    region: Rectangle
    place: Place
    keys: slice
    kernel: Kernel
    given: KernelTile


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One call on one rank.

    Attributes:
        plan: who holds what, who needs whom.
        setting: what kernels have to know.
        kernel: what computes tiles that are finite or unmasked.
        sides: longest sides of tiles; forward, a kernel that cuts tiles itself takes a region without a window at once.
        transport: between the ranks.
        sharding: which rank holds which positions; only masks by position ask for it.
        sinks: learned sinks `(H,)`, without gradient, or `None`.
    """

    plan: Plan
    setting: Setting
    kernel: Kernel
    sides: Sides
    transport: Transport
    sharding: Sharding
    sinks: torch.Tensor | None = None
    _finite: dict[int, bool] = dataclasses.field(default_factory=dict, repr=False)
    _band: dict[tuple[int | None, ...], torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)

    def running(self, q: torch.Tensor) -> Running:
        """The partial of `q (B, S, H, D)` over no keys yet."""
        return Running((*q.shape[:3], self.setting.value_dim), self.setting.accumulates, q.device)

    def dq_sum(self, rows: Rows) -> Sum:
        """The gradient of q so far: nothing."""
        return Sum(rows.q.shape, self.setting.accumulates, rows.q.device)

    def own(self, k: torch.Tensor, v: torch.Tensor) -> KVTensors:
        """This rank's block, copied for the sake of speed where kernels gain by it: not if a budget bounds memory.

        Nor for few queries, as in decoding: kernels then read the block once, which copying it would do too.
        """
        block = KVTensors.of_tensors(self.plan.whole(self.plan.rank), k, v)
        gains = self.setting.dtype in self.kernel.packs and self.plan.query_count > FEW_QUERIES
        return block.packed() if gains and not self.sides.bounded else block

    @functools.cached_property
    def positions(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Positions of every rank's queries and keys, on CPU; only needed by regions `by_position`."""
        p, size = self.plan.problem, self.plan.world_size
        queries = query_positions(self.sharding, p.nq, size, p.documents)
        keys = key_positions(self.sharding, p.nk, size, p.documents)
        return list(map(torch.as_tensor, queries)), list(map(torch.as_tensor, keys))

    def attend(
        self, running: Running, q: torch.Tensor, block: KVTensors, owner: int, asking: int | None = None
    ) -> None:
        """Merge the attention of `q (B, S, H, D)` to a rank's block, or what of it is needed here, into a partial.

        The queries are this rank's, or those of the rank that is `asking` for attention to this rank's own block.
        """
        for tile in self.tiles(q, block, owner, asking=asking):
            running.merge(*tile.place, *tile.kernel.forward(self.setting, tile.given))

    def differentiate(self, rows: Rows, tile: BlockTile, dq: Sum) -> TileGradient:
        """Add to `dq (B, S, H, D)` what a tile contributes; returns what it adds to dk and dv."""
        dq_b, dk_b, dv_b = tile.kernel.backward(self.setting, tile.given, rows.at(tile.place))
        dq.add(*tile.place, dq_b)
        return TileGradient(tile.region, tile.keys, dk_b, dv_b)

    def tiles(
        self, q: torch.Tensor, block: KVTensors, owner: int, rows: Rows | None = None, asking: int | None = None
    ) -> Iterator[BlockTile]:
        """The tiles of a rank's block in which a query of this rank attends a key, each made when it is asked for.

        Args:
            q: `(B, S, H, D)`.
            block: what is here of it.
            owner: whose it is.
            rows: for a backward pass; `None` for a forward pass.
            asking: whose queries `q` are, if not this rank's; the block is this rank's then.
        """
        regions = self.plan.regions(owner) if asking is None else self.plan.visitors(asking)
        safe = self._safe(regions, block, owner)
        if rows is not None and regions.masked and not self.kernel.keeps_out:
            safe = safe and rows.finite
        q_BHSD = q.transpose(1, 2)
        for region in regions:
            batch, heads = slice(*region.batch), region.heads.slice()
            k_r, v_r = block.of(region)
            for tile in tiles(region, *self._buckets(region, safe, forward=rows is None), self.sides.band):
                mask, some = self._mask(region, tile, (asking, owner), k_r.device)
                if some:
                    keys, queries = slice(*tile.keys), region.queries.slice(*tile.rows)
                    cut = tile.keys != (0, region.keys.size)
                    k, v = (k_r[:, :, keys], v_r[:, :, keys]) if cut else (k_r, v_r)
                    given = KernelTile(q_BHSD[batch, heads, queries], k, v, mask)
                    yield BlockTile(region, (batch, queries, heads), keys, self._kernel(mask, safe), given)
        self._band.clear()

    def single_tile(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: Rows | None = None
    ) -> BlockTile | None:
        """All of this rank's queries and keys as one tile, where one call of the kernel does all the work.

        Its results then need no sum: they are as wide as sums, and nothing else is added to them.

        Args:
            q: `(B, S, H, D)`.
            k: `(B, T, K, D)`, all keys there are.
            v: `(B, T, K, E)`.
            rows: for a backward pass; `None` for a forward pass.
        """
        plan, problem = self.plan, self.plan.problem
        if not (self.kernel.blocked and self.sides.at_once):
            return None
        if not self.kernel.at_once(self.setting, backward=rows is not None):
            return None
        regions = tuple(islice(plan.regions(plan.rank), 2))
        every_query, every_key = Span(0, plan.query_count), Span(0, plan.key_count(plan.rank))
        everything = 0, (0, problem.batch), Span(0, problem.heads), Span(0, problem.hk), every_query, every_key
        if len(regions) != 1 or regions[0][:6] != everything or regions[0].by_position:
            return None
        region = regions[0]
        mask: TileMask = None
        if (region.low, region.high) != (None, None):
            if region.queries.size != region.keys.size or (region.low, region.high) != (None, 0):
                return None
            if not (self.kernel.keeps_out or (all_finite(k, v) and (rows is None or rows.finite))):
                return None
            mask = "causal"
        every = slice(None)
        given = KernelTile(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return BlockTile(region, (every,) * 3, every, self.kernel, given)

    def _buckets(self, region: Rectangle, safe: bool, *, forward: bool) -> tuple[int, int]:
        """Longest sides of this region's tiles. Forward, a kernel that cuts tiles itself takes all there is at once."""
        biased = region.low is not None or region.by_position  # a band with an upper side only has causal squares
        masked = biased or region.high is not None
        fused = self.kernel.blocked and (safe or not masked) and (self.kernel.takes_bias or not biased)
        bucket = self.sides.bucket if fused else self.sides.streaming
        if region.by_position:
            bucket = min(bucket, self.sides.positions)
        if not fused or region.by_position:
            return bucket, bucket
        at_once = self.kernel.at_once(self.setting, backward=not forward) and not (self.sides.bounded or biased)
        rows = region.queries.size if at_once else bucket
        if forward:
            return rows, (region.keys.size if self.sides.all_keys else bucket)
        return (bucket if masked else rows), bucket

    def _safe(self, regions: Regions, block: KVTensors, owner: int) -> bool:
        """Whether masked tiles may be left to fused kernels, which multiply what a mask excludes with weights of 0."""
        if not regions.masked or self.kernel.keeps_out:
            return True
        if owner not in self._finite:  # backward is sent the same blocks again
            self._finite[owner] = all_finite(*(x for pair in block.parts.values() for x in pair))
        return self._finite[owner]

    def _kernel(self, mask: TileMask, safe: bool) -> Kernel:
        """A masked tile is left to a fused kernel if nothing it excludes can matter, and if it takes such a mask."""
        if mask is None or (safe and (isinstance(mask, str) or self.kernel.takes_bias)):
            return self.kernel
        return STREAMING

    def _mask(
        self, region: Rectangle, tile: Tile, ranks: tuple[int | None, int], device: torch.device
    ) -> tuple[TileMask, bool]:
        """The mask of a tile, and whether it lets any pair through; `ranks` are whose queries and whose keys."""
        match tile.kind:
            case "full":
                return None, True
            case "causal":
                return "causal", True
            case "band":
                alike = tile.rows[1] - tile.rows[0], tile.keys[1] - tile.keys[0], tile.low, tile.high
                if alike not in self._band:  # the buckets of a window are alike, and their masks
                    self._band.clear()
                    self._band[alike] = band_bias(tile, self.setting.accumulates, device)
                return self._band[alike], True
        queries, keys = self.positions
        asking, owner = ranks
        bias = position_bias(
            self.plan.problem,
            queries[self.plan.rank if asking is None else asking][region.queries.slice(*tile.rows)],
            keys[owner][region.keys.slice(*tile.keys)],
            self.setting.accumulates,
            region.heads.slice(),
        )
        if bias is None:
            return None, True
        return uploaded(bias, device), bool((bias > -torch.inf).any())


class TileGradients:
    """What the tiles of a block add to its gradient, each computed when it is asked for, in the order of the tiles.

    Args:
        job: the call on this rank.
        rows: the queries' side.
        block: what is here of a rank's keys and values.
        owner: whose they are.
        dq: the gradient of the queries `(B, S, H, D)`, added to.
        computed: gradients of the first tiles, where these have been computed before; the list is emptied by `add_to`.
    """

    def __init__(
        self, job: Job, rows: Rows, block: KVTensors, owner: int, dq: Sum, computed: list[TileGradient] | None = None
    ) -> None:
        self._job, self._rows, self._dq = job, rows, dq
        self.computed = [] if computed is None else computed
        self._left = islice(job.tiles(rows.q, block, owner, rows), len(self.computed), None)

    def compute_one(self) -> None:
        """Compute the next one and keep it; work for a rank that would otherwise wait for a message."""
        for tile in islice(self._left, 1):
            self.computed.append(self._job.differentiate(self._rows, tile, self._dq))

    def add_to(self, gradients: Gradients) -> None:
        """Add all of them to the gradient of their block; each is let go before the next one is computed."""
        while self.computed:
            gradients.add(self.computed.pop(0))
        for tile in self._left:
            gradients.add(self._job.differentiate(self._rows, tile, self._dq))
        gradients.complete()


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. A sum that overflows counts as not finite, which costs time only."""
    wide = {torch.float16: torch.float32}  # bfloat16 has the range of float32
    return all(bool(torch.isfinite(x.sum(dtype=wide.get(x.dtype)))) for x in tensors)
