"""What the kernels of CUDA devices share: what a mask excludes is kept out, and scales are made positive.

Shape letters: see `ringverify.ring.kernels.kernel`.
"""

from __future__ import annotations

import abc

import torch

from ringverify.ring.kernels.columns import as_given, positive
from ringverify.ring.kernels.excluded import spoilt, without_strange_keys, without_strange_rows
from ringverify.ring.kernels.kernel import KernelTile, MergedRows, QKVGradients, Setting


class OnCUDA(abc.ABC):
    """A kernel whose subclass says how its op is called.

    Attributes:
        longest: a good number of queries and keys a tile; launching and merging cost little beside such tiles.
    """

    blocked = True
    keeps_out = True
    takes_bias = False
    packs: tuple[torch.dtype, ...] = ()
    longest = 8192

    def why_not(self, setting: Setting) -> str | None:
        """See `Kernel.why_not`."""
        return self._refuses(setting) if setting.device == "cuda" else f"runs on cuda, not on {setting.device}"

    def bucket(self, setting: Setting, rows: int) -> int:
        """See `Kernel.bucket`: half of what a rank holds."""
        del setting
        return min(self.longest, max(256, -(-rows // 2)))

    def at_once(self, setting: Setting, *, backward: bool) -> bool:
        """See `Kernel.at_once`: sums are float32, those of dq in memory of their own."""
        del setting, backward
        return True

    def forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        tile, attending = without_strange_keys(tile)
        scaled, tile, _ = positive(setting, tile)
        out, lse = self._forward(scaled, tile)
        return spoilt(out[..., : setting.value_dim], *attending), spoilt(lse, attending.key)

    def backward(self, setting: Setting, tile: KernelTile, rows: MergedRows) -> QKVGradients:
        """See `Kernel.backward`."""
        tile, attending = without_strange_keys(tile)
        tile, rows, strange, attended = without_strange_rows(tile, rows)
        setting, tile, sign = positive(setting, tile)
        dq, dk, dv = as_given(setting, self._backward(setting, tile, rows), sign)
        return spoilt(dq, strange, *attending), spoilt(dk, attended), spoilt(dv, attended)

    @abc.abstractmethod
    def _refuses(self, setting: Setting) -> str | None:
        """As `why_not`, on a CUDA device."""

    @abc.abstractmethod
    def _forward(self, setting: Setting, tile: KernelTile) -> tuple[torch.Tensor, torch.Tensor]:
        """out `(B, H, S, at least E)` and lse, of a positive scale."""

    @abc.abstractmethod
    def _backward(self, setting: Setting, tile: KernelTile, rows: MergedRows) -> QKVGradients:
        """dq, dk and dv, whose last axes may be longer, of a positive scale."""
