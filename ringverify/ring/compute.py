"""The work of one rank on one block, tile by tile: `Job` holds what all blocks of a call share.

Shape letters: B batch, S this rank's queries, T keys of one block, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Literal

import torch

from ringverify.ring.accumulate import Running, Sum
from ringverify.ring.gradients import TileGradient
from ringverify.ring.kernels.choose import STREAMING
from ringverify.ring.kernels.kernel import Kernel, Setting, TileMask
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


class Rows:
    """This rank's side of a backward pass, merged over all keys; see `Kernel.backward`.

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
        self.q, self.dout, self.out, self.dlse = q, dout, out, dlse
        self.lse = lse.masked_fill(lse == -torch.inf, torch.inf)

    @functools.cached_property
    def finite(self) -> bool:
        """Whether a mask may be left to a fused kernel, as far as these rows go."""
        return all_finite(self.q, self.dout, self.out)


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One call on one rank.

    Attributes:
        plan: who holds what, who needs whom.
        setting: what kernels have to know.
        kernel: what computes tiles that are finite or unmasked.
        sides: longest sides of tiles; forward, a kernel that cuts tiles itself takes a region without a window at once.
        transport: between the ranks.
        positions: queries' positions, and each owner's keys' positions; on CPU; only needed by regions `by_position`.
    """

    plan: Plan
    setting: Setting
    kernel: Kernel
    sides: Sides
    transport: Transport
    positions: tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None
    _finite: dict[int, bool] = dataclasses.field(default_factory=dict, repr=False)
    _band: dict[tuple[int | None, ...], torch.Tensor] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def packs(self) -> bool:
        """Whether this rank's own keys are copied for the sake of speed: not if a budget bounds memory."""
        return self.setting.dtype in self.kernel.packs and not self.sides.bounded

    @property
    def at_most_two(self) -> bool:
        """Whether forward comes to two partials here at most, which may wait for one another."""
        plan, moves = self.plan, self.plan.schedule
        if self.sides.bounded or (plan.replicated and plan.world_size > 1):
            return False
        met = (plan.regions(moves.owner(step)) for step in range(moves.steps) if moves.computes[step])
        return sum(map(len, met)) <= 2

    def whole(self, *tensors: torch.Tensor, backward: bool) -> Literal["causal", False] | None:
        """The mask if a single call of the kernel does all the work, as on a world of one; False if it does not.

        Args:
            *tensors: what has to be finite for a mask to be left to a fused kernel.
            backward: asked of backward, or of forward.
        """
        plan, problem = self.plan, self.plan.problem
        if plan.schedule.steps > 1 or (plan.replicated and plan.world_size > 1) or not self.kernel.blocked:
            return False
        if not (self.sides.at_once and self.kernel.at_once(self.setting, backward=backward)):
            return False
        everything = (
            0,
            (0, problem.batch),
            Span(0, problem.heads),
            Span(0, problem.hk),
            Span(0, plan.query_count),
            Span(0, plan.key_count(plan.rank)),
        )
        regions = tuple(islice(plan.regions(plan.rank), 2))
        if len(regions) != 1 or regions[0][:6] != everything or regions[0].by_position:
            return False
        region = regions[0]
        if region.low is None and region.high is None:
            return None
        square = region.queries.size == region.keys.size
        if not square or (region.low, region.high) != (None, 0):
            return False
        return "causal" if self.kernel.keeps_out or all_finite(*tensors) else False

    def attend(self, running: Running, q: torch.Tensor, block: KVTensors, owner: int) -> None:
        """Merge the attention of `q (B, S, H, D)` to a rank's block, or what of it is needed here, into a partial."""
        regions = self.plan.regions(owner)
        safe = self._safe(regions, block, owner)
        for region in regions:
            q_r, (k_r, v_r) = _of_queries(region, q), block.of(region)
            for tile in tiles(region, *self._buckets(region, safe, forward=True), self.sides.band):
                mask, some = self._mask(region, tile, owner, q.device)
                if not some:
                    continue
                kernel = self._kernel(mask, safe)
                rows, keys = slice(*tile.rows), slice(*tile.keys)
                out_b, lse_b = kernel.forward(self.setting, q_r[:, :, rows], k_r[:, :, keys], v_r[:, :, keys], mask)
                running.merge(*_place(region, tile), out_b, lse_b)
        self._band.clear()

    def differentiate(
        self, rows: Rows, block: KVTensors, owner: int, dq: Sum, after: int = 0
    ) -> Iterator[TileGradient]:
        """Add to `dq (B, S, H, D)` what this block contributes, and yield what its tiles add to dk and dv.

        The block and its owner are those of `attend`; the first `after` tiles have been computed already.
        """
        regions = self.plan.regions(owner)
        safe = self._safe(regions, block, owner) and (not regions.masked or self.kernel.keeps_out or rows.finite)
        for region in regions:
            q_r, (k_r, v_r) = _of_queries(region, rows.q), block.of(region)
            dout_r, out_r = _of_queries(region, rows.dout), _of_queries(region, rows.out)
            lse_r = _lse(region, rows.lse)
            dlse_r = None if rows.dlse is None else _lse(region, rows.dlse)
            for tile in tiles(region, *self._buckets(region, safe, forward=False), self.sides.band):
                mask, some = self._mask(region, tile, owner, rows.q.device)
                if not some:
                    continue
                if after:
                    after -= 1
                    continue
                kernel = self._kernel(mask, safe)
                i, j = slice(*tile.rows), slice(*tile.keys)
                dq_b, dk_b, dv_b = kernel.backward(
                    self.setting,
                    dout_r[:, :, i],
                    q_r[:, :, i],
                    k_r[:, :, j],
                    v_r[:, :, j],
                    out_r[:, :, i],
                    lse_r[:, :, i],
                    None if dlse_r is None else dlse_r[:, :, i],
                    mask,
                )
                dq.add(*_place(region, tile), dq_b)
                part = TileGradient(region, j, dk_b, dv_b)
                del dq_b, dk_b, dv_b  # while the next tile is computed, this one is gone
                yield part
                del part
        self._band.clear()

    def _buckets(self, region: Rectangle, safe: bool, *, forward: bool) -> tuple[int, int]:
        """Longest sides of this region's tiles. Forward, a kernel that cuts tiles itself takes all there is at once."""
        biased = region.low is not None or region.by_position  # a band with an upper side only has causal squares
        masked = biased or region.high is not None
        fused = self.kernel.blocked and (safe or not masked) and (self.kernel.takes_bias or not biased)
        bucket = self.sides.bucket
        if not fused:
            bucket = self.sides.streaming
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

    def _mask(self, region: Rectangle, tile: Tile, owner: int, device: torch.device) -> tuple[TileMask, bool]:
        """The mask of a tile, and whether it lets any pair through."""
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
        assert self.positions is not None
        queries, keys = self.positions
        bias = position_bias(
            self.plan.problem,
            queries[slice(*tile.rows)],
            keys[owner][slice(*tile.keys)],
            self.setting.accumulates,
            region.heads.slice(),
        )
        if bias is None:
            return None, True
        return uploaded(bias, device), bool((bias > -torch.inf).any())


def all_finite(*tensors: torch.Tensor) -> bool:
    """Whether no element is NaN or infinite. A sum that overflows counts as not finite, which costs time only."""
    wide = {torch.float16: torch.float32}  # bfloat16 has the range of float32
    return all(bool(torch.isfinite(x.sum(dtype=wide.get(x.dtype)))) for x in tensors)


def _of_queries(region: Rectangle, x: torch.Tensor) -> torch.Tensor:
    """The region's part of `(B, S, H, ...)`, as `(B, H, S, ...)`."""
    return x[slice(*region.batch), region.queries.slice(), region.heads.slice()].transpose(1, 2)


def _place(region: Rectangle, tile: Tile) -> tuple[slice, slice, slice]:
    """A tile's rows within this rank's: batch, rows, heads."""
    return slice(*region.batch), region.queries.slice(*tile.rows), region.heads.slice()


def _lse(region: Rectangle, x: torch.Tensor) -> torch.Tensor:
    """The region's part of `(B, H, S)`."""
    return x[slice(*region.batch), region.heads.slice(), region.queries.slice()]
