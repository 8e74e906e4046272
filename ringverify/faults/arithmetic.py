"""What the plain ring computes of one block, step by step, forward and backward.

    s = scale · q·k,  softcap: c · tanh(s / c)         p  = m · exp(s − lse), lse of all blocks
    w = m · exp(s − max),  out = Σ w v / Σ w           ds = p · (dout·v − delta),  delta = dout·out − dlse
    lse = max + log Σ w                                dq = scale · Σ ds k,  dk = scale · Σ ds q,  dv = Σ p dout

All tensors are in the wide dtype, keys and values repeated for the query heads that read them. Shape letters: B batch,
H query heads, S queries, T keys, D head_dim, E value_dim, K key heads.
"""

from __future__ import annotations

import math

import torch

from ringverify.faults.place import Here, Partial


def widen(here: Here, x: torch.Tensor) -> torch.Tensor:
    """`(B, S, H, D)` as it came to `(B, H, S, D)` in the wide dtype."""
    return x.to(here.wide).transpose(1, 2).contiguous()


def narrow(here: Here, x: torch.Tensor) -> torch.Tensor:
    """`(B, H, S, D)` to `(B, S, H, D)` in the dtype of the inputs."""
    return x.transpose(1, 2).to(here.dtype).contiguous()


def per_query_head(here: Here, x: torch.Tensor) -> torch.Tensor:
    """`(B, K, T, D)` to `(B, H, T, D)`: query head h reads key head h // (H // K)."""
    return x.repeat_interleave(here.problem.group_size, dim=1)


def per_key_head(here: Here, x: torch.Tensor) -> torch.Tensor:
    """`(B, H, T, D)` to `(B, K, T, D)`: the sum over the query heads that read a key head."""
    b, _, t, d = x.shape
    return x.view(b, here.problem.hk, here.problem.group_size, t, d).sum(dim=2)


def scale(here: Here) -> float:
    """The factor on q·k."""
    return here.problem.scale_value


def scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """`(B, H, S, T)`."""
    return q @ k.transpose(2, 3) * scale


def cap(s: torch.Tensor, softcap: float) -> torch.Tensor:
    """Scores within ± softcap."""
    return softcap * torch.tanh(s / softcap)


def cap_slope(s: torch.Tensor, softcap: float) -> torch.Tensor:
    """The derivative of `cap`, from what it returned."""
    return 1 - (s / softcap) ** 2


def weighted_sum(w: torch.Tensor, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """`Σ_c w[a, c] · x[c, d]` over attended pairs; w is 0 elsewhere, but 0 · NaN is not."""
    if bool(torch.isfinite(x).all()):
        return w @ x
    terms = w[..., :, :, None] * x[..., None, :, :]
    return torch.where(attended[..., None], terms, 0.0).sum(dim=-2)


def partial(s: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> Partial:
    """Attention over one block."""
    attended = m > 0
    s = s.masked_fill(~attended, -math.inf)
    top = s.amax(dim=-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)  # −inf − (−inf) is NaN
    w = m * torch.exp(s - top)
    total = w.sum(dim=-1, keepdim=True)
    out = weighted_sum(w, v, attended) / torch.where(total == 0, 1.0, total)
    return Partial(out, (top + total.log()).squeeze(-1))


def merge(first: Partial, second: Partial) -> Partial:
    """Attention over the keys of both."""
    lse = torch.logaddexp(first.lse, second.lse)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    out = weight(first.lse, shift) * first.out + weight(second.lse, shift) * second.out
    return Partial(out, lse)


def weight(lse: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """The share of a part in the whole, `(B, H, S, 1)`."""
    return torch.exp(lse - shift)[..., None]


def delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    """What every score's cotangent has in common, `(B, H, S)`."""
    return (dout * out).sum(dim=-1) - dlse


def probabilities(s: torch.Tensor, m: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Weights of the whole row, `(B, H, S, T)`; 0 where nothing is attended, whatever lse is there."""
    return torch.where(m > 0, m * torch.exp(s - lse[..., None]), 0.0)


def dp(dout: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Cotangent of the probabilities, `(B, H, S, T)`."""
    return dout @ v.transpose(2, 3)


def ds(p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Cotangent of the capped scores."""
    return p * (dp - delta[..., None])


def dq(ds: torch.Tensor, k: torch.Tensor, scale: float, attended: torch.Tensor) -> torch.Tensor:
    """A block's part in dq."""
    return weighted_sum(ds, k, attended) * scale


def dk(ds: torch.Tensor, q: torch.Tensor, scale: float, attended: torch.Tensor) -> torch.Tensor:
    """These queries' part in dk."""
    return weighted_sum(ds.transpose(2, 3), q, attended.transpose(2, 3)) * scale


def dv(p: torch.Tensor, dout: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """These queries' part in dv."""
    return weighted_sum(p.transpose(2, 3), dout, attended.transpose(2, 3))
