"""The interface of kernels: attention of some queries to some keys, as a partial that can be merged, and its gradients.

    forward:  out_b = softmax over this tile,  lse_b = log Σ_j exp(s + bias)
    backward: p = exp(s + bias − lse),  ds = p · (dout·v − Σ_e dout·out + dlse)

In backward `out` and `lse` are the merged ones of the whole row, never the tile's own: with them p is the tile's part
of the whole softmax and the parts of all tiles add up to the gradient (Dao 2023, arXiv:2307.08691, algorithm 2).

What a row is worth in a tile is one rule for all kernels and all tiles, with a mask and without. A key whose score is
−inf weighs `exp(−inf) = 0`, whether a mask excludes it or the score is −inf by itself, as of a product that overflows:

- A row whose keys all weigh 0 is the empty partial, out 0 and lse −inf: it leaves what it is merged with as it is.
- A row that attends a score of NaN or +inf is NaN, in out and lse.
- A row that the mask empties is the empty partial whatever its query holds, NaN included.

So answers the oracle in float64. Where a fused op says otherwise, its kernel mends that, or says here that it cannot:
on CUDA devices, `excluded.py`, and 9. of `fused_cuda.py`.

Shape letters: B batch, S queries, T keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import torch

QKVGradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq, dk and dv."""
TileMask = torch.Tensor | Literal["causal"] | None
"""What restricts a tile: nothing; causal, on a square whose row x attends keys 0 to x; or a bias added to scores.

A bias is `(S, T)`, or with batch and heads, or 1s, before that: −inf where a pair is excluded, the logarithm of the
multiplicity elsewhere."""


class Setting(NamedTuple):
    """What a kernel has to know beside its tensors, the same for all tiles of a call.

    Attributes:
        device: type of the device.
        dtype: dtype of q, k and v.
        accumulates: dtype of scores, sums and lse.
        head_dim: D.
        value_dim: E.
        scale: factor on `q·k`.
        softcap: c of `c · tanh(s / c)`, or `None`.
        deterministic: whether the same inputs have to give the same bits. Without it a kernel may add up in any order,
            unless `torch.use_deterministic_algorithms` forbids that.
        pairs: of a query and a key that a rank holds; `None` where they are not known, or do not matter.
    """

    device: str
    dtype: torch.dtype
    accumulates: torch.dtype
    head_dim: int
    value_dim: int
    scale: float
    softcap: float | None
    deterministic: bool = False
    pairs: int | None = None


class Extent(NamedTuple):
    """How large a tile is.

    Attributes:
        batch: B.
        heads: H.
        key_heads: K.
        rows: S.
        keys: T.
    """

    batch: int
    heads: int
    key_heads: int
    rows: int
    keys: int

    def of_rows(self, width: int) -> int:
        """Elements of so many columns for every query."""
        return self.batch * self.heads * self.rows * width

    def of_keys(self, width: int) -> int:
        """Elements of so many columns for every key."""
        return self.batch * self.key_heads * self.keys * width


class KernelTile(NamedTuple):
    """What a kernel reads of a tile, forward and backward. No side of a tile is ever empty.

    Attributes:
        q: `(B, H, S, D)`, any strides but of the last axis.
        k: `(B, K, T, D)`, likewise.
        v: `(B, K, T, E)`, likewise.
        mask: what restricts it.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: TileMask = None

    @property
    def causal(self) -> bool:
        """Whether the mask is causal."""
        return isinstance(self.mask, str)

    @property
    def bias(self) -> torch.Tensor | None:
        """The mask, if it is a bias."""
        return None if isinstance(self.mask, str) else self.mask

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KernelTile:
        """The same with q, k and v changed."""
        return KernelTile(change(self.q), change(self.k), change(self.v), self.mask)


class MergedRows(NamedTuple):
    """What a backward pass knows of the rows of a tile beside q: results merged over all keys, and their cotangents.

    Attributes:
        dout: cotangent of out `(B, H, S, E)`, in the dtype of q.
        out: `(B, H, S, E)`, in the dtype of q.
        lse: `(B, H, S)`, +inf (sic) in rows that attend nothing, so that every p of theirs is 0.
        dlse: cotangent of lse `(B, H, S)`, or `None` for none.
    """

    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dlse: torch.Tensor | None = None

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> MergedRows:
        """The same with dout and out changed."""
        return MergedRows(change(self.dout), change(self.out), self.lse, self.dlse)


class Kernel(Protocol):
    """One way to compute a tile.

    Attributes:
        name: how users ask for it.
        blocked: whether it cuts tiles itself and never forms their scores, so that they may be of any size.
        takes_bias: whether it computes tiles whose mask is a bias.
        keeps_out: whether what a mask excludes cannot matter whatever it holds, NaN included. Callers of other kernels
            see to it that a tile with a mask is finite.
        packs: dtypes in which keys whose rows lie together head by head save it more time than copying them takes.
    """

    name: str
    blocked: bool
    takes_bias: bool
    keeps_out: bool
    packs: tuple[torch.dtype, ...]

    def bucket(self, setting: Setting, rows: int) -> int:
        """A good number of queries and of keys a tile.

        Large enough for a call to cost little beside its work. In proportion to what a rank holds, where no cache sets
        a limit, so that memory is linear in that.

        Args:
            setting: of the call.
            rows: the queries of a rank, or its keys if they are more.
        """

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """Whether a call may be of any size: its sums are as wide as those between calls, and it converts no input.

        Args:
            setting: of the call.
            backward: asked of backward, or of forward.
        """

    def held(self, setting: Setting, tile: Extent) -> int:
        """Bytes that a forward or a backward has alive at most beside its arguments, what it returns included.

        For inputs that are finite and without a cotangent of lse. Sums to which results are added are not counted, but
        what has to be converted for it is.

        Args:
            setting: of the call.
            tile: what is computed.
        """

    def why_not(self, setting: Setting) -> str | None:
        """Why it cannot compute such tiles, as the end of a sentence; `None` if it can."""

    def forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        """The partial over the keys of a tile.

        Returns:
            out `(B, H, S, E)` in the dtype of q or wider, and lse `(B, H, S)` in the accumulation dtype, −inf where a
            row attends nothing.
        """

    def backward(self, setting: Setting, tile: KernelTile, rows: MergedRows) -> QKVGradients:
        """What a tile adds to the gradients: dq `(B, H, S, D)`, dk `(B, K, T, D)`, dv `(B, K, T, E)`."""
