"""What the kernels of CUDA devices share: what a mask excludes is kept out, and scales are made positive.

Shape letters: see `ringverify.ring.kernels.kernel`.
"""

from __future__ import annotations

import torch

from ringverify.ring.kernels.columns import positive
from ringverify.ring.kernels.excluded import TileRows, spoilt, without_strange_keys, without_strange_rows
from ringverify.ring.kernels.kernel import Gradients, Setting, TileMask


class OnCUDA:
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

    def forward(
        self, setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Kernel.forward`."""
        k, v, attending = without_strange_keys(mask, q.size(1), k, v)
        q, scale, _ = positive(q, setting.scale)
        out, lse = self._forward(setting, q, k, v, mask, scale)
        return spoilt(out[..., : setting.value_dim], *attending), spoilt(lse, attending.key)

    def backward(
        self,
        setting: Setting,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        dlse: torch.Tensor | None,
        mask: TileMask,
    ) -> Gradients:
        """See `Kernel.backward`."""
        k, v, attending = without_strange_keys(mask, q.size(1), k, v)
        rows, strange, attended = without_strange_rows(mask, k.size(1), TileRows(dout, q, out, lse, dlse))
        q, scale, sign = positive(rows.q, setting.scale)
        dq, dk, dv = self._backward(setting, rows._replace(q=q), k, v, mask, scale)
        if sign != 1:
            dq = dq * sign
        dq, dk, dv = dq[..., : setting.head_dim], dk[..., : setting.head_dim], dv[..., : setting.value_dim]
        return spoilt(dq, strange, *attending), spoilt(dk, attended), spoilt(dv, attended)

    def _refuses(self, setting: Setting) -> str | None:
        """As `why_not`, on a CUDA device."""
        raise NotImplementedError

    def _forward(
        self, setting: Setting, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out `(B, H, S, at least E)` and lse, of a positive scale."""
        raise NotImplementedError

    def _backward(
        self, setting: Setting, rows: TileRows, k: torch.Tensor, v: torch.Tensor, mask: TileMask, scale: float
    ) -> Gradients:
        """dq, dk and dv, whose last axes may be longer, of a positive scale."""
        raise NotImplementedError
