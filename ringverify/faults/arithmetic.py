"""What the plain ring computes of one block, step by step, forward and backward.

    s = scale · q·k,  softcap: c · tanh(s / c)         p  = m · exp(s − lse), lse of all blocks
    w = m · exp(s − max),  out = Σ w v / Σ w           ds = p · (dout·v − delta),  delta = dout·out − dlse
    lse = max + log Σ w                                dq = scale · Σ ds k,  dk = scale · Σ ds q,  dv = Σ p dout

All tensors are in the wide dtype, keys and values repeated for the query heads that read them. Shape letters: B batch,
H query heads, S queries, T keys, D head_dim, E value_dim, K key heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ringverify.faults.place import Here, Partial

Shift = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What is subtracted from the scores of a row, by scores and by which are attended."""


def widen(here: Here, x: torch.Tensor) -> torch.Tensor:
    """Turn an input `(B, S, H, D)` into `(B, H, S, D)` in the wide dtype."""
    return x.to(here.wide).transpose(1, 2).contiguous()


def narrow(here: Here, x: torch.Tensor) -> torch.Tensor:
    """Turn a result `(B, H, S, D)` into `(B, S, H, D)` in the dtype of the inputs."""
    return x.transpose(1, 2).to(here.dtype).contiguous()


def rounded(here: Here, x: torch.Tensor) -> torch.Tensor:
    """Rounded to the dtype of the inputs, and back to the wide dtype."""
    return x.to(here.dtype).to(here.wide)


def scrambled(x: torch.Tensor) -> torch.Tensor:
    """`(B, S, H, D)` reshaped to `(B, H, S, D)`: as many elements, each in the wrong place."""
    b, s, h, d = x.shape
    return x.contiguous().view(b, h, s, d)


def permuted(x: torch.Tensor) -> torch.Tensor:
    """Tokens and heads exchanged, and reshaped back: each element in the wrong place."""
    return x.transpose(1, 2).reshape(x.shape)


def reread(x: torch.Tensor) -> torch.Tensor:
    """Reshaped to tokens and heads exchanged, and these exchanged back: each element in the wrong place."""
    return x.reshape(x.size(0), x.size(2), x.size(1), *x.shape[3:]).transpose(1, 2)


def per_query_head(here: Here, x: torch.Tensor) -> torch.Tensor:
    """Expand key heads `(B, K, T, D)` to query heads `(B, H, T, D)`: query head h reads key head h // (H // K)."""
    return x.repeat_interleave(here.problem.group_size, dim=1)


def per_key_head(here: Here, x: torch.Tensor) -> torch.Tensor:
    """Sum `(B, H, T, D)` over the query heads that read each key head, to `(B, K, T, D)`."""
    b, _, t, d = x.shape
    return x.view(b, here.problem.hk, here.problem.group_size, t, d).sum(dim=2)


def scale(here: Here) -> float:
    """Return the factor by which q·k is multiplied."""
    return here.problem.scale_value


def scores(q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the scores `(B, H, S, T)`, before any softcap."""
    return q @ k.transpose(2, 3) * scale


def cap(s: torch.Tensor, softcap: float) -> torch.Tensor:
    """Apply the softcap to scores: c · tanh(s / c)."""
    return softcap * torch.tanh(s / softcap)


def cap_slope(s: torch.Tensor, softcap: float) -> torch.Tensor:
    """Return the derivative of `cap`, computed from the capped scores."""
    return 1 - (s / softcap) ** 2


def weighted_sum(w: torch.Tensor, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """`Σ_c w[a, c] · x[c, d]` over attended pairs; w is 0 elsewhere, but 0 · NaN is not."""
    if bool(torch.isfinite(x).all()):
        return w @ x
    terms = w[..., :, :, None] * x[..., None, :, :]
    return torch.where(attended[..., None], terms, 0.0).sum(dim=-2)


def highest(s: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Return the largest score of each row that is attended, `(B, H, S, 1)`."""
    return s.masked_fill(~attended, -math.inf).amax(dim=-1, keepdim=True)


def partial(s: torch.Tensor, m: torch.Tensor, v: torch.Tensor, shift: Shift = highest) -> Partial:
    """Return attention over the keys of one block, its scores shifted by `shift` before exp."""
    attended = m > 0
    top = shift(s, attended)
    s = s.masked_fill(~attended, -math.inf)
    top = torch.where(top == -math.inf, 0.0, top)  # −inf − (−inf) is NaN
    w = m * torch.exp(s - top)
    total = w.sum(dim=-1, keepdim=True)
    out = weighted_sum(w, v, attended) / torch.where(total == 0, 1.0, total)
    return Partial(out, (top + total.log()).squeeze(-1))


def merge(first: Partial, second: Partial) -> Partial:
    """Merge two partials: attention over the keys of both."""
    lse = torch.logaddexp(first.lse, second.lse)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    out = weight(first.lse, shift) * first.out + weight(second.lse, shift) * second.out
    return Partial(out, lse)


def with_sink(here: Here, whole: Partial) -> Partial:
    """Let the sink of each head join the denominator of its rows, once all keys are merged."""
    sinks = sinks_of(here)
    return merge(whole, Partial(torch.zeros_like(whole.out), sinks.expand_as(whole.lse)))


def sinks_of(here: Here) -> torch.Tensor:
    """Return the sinks in the wide dtype, `(H, 1)`."""
    assert here.call.sinks is not None
    return here.call.sinks.detach().to(here.wide)[:, None]


def sink_gradient(here: Here, lse: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return what these queries add to the gradient of the sinks, `(H,)`."""
    sinks = sinks_of(here)
    return -torch.where(sinks == -math.inf, 0.0, torch.exp(sinks - lse) * delta).sum(dim=(0, 2))


def weight(lse: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return the weight of a partial in the merged result, `(B, H, S, 1)`."""
    return torch.exp(lse - shift)[..., None]


def delta(dout: torch.Tensor, out: torch.Tensor, dlse: torch.Tensor) -> torch.Tensor:
    """Return delta `(B, H, S)`, the term that the cotangents of all scores of a row share."""
    return (dout * out).sum(dim=-1) - dlse


def probabilities(s: torch.Tensor, m: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return the attention weights `(B, H, S, T)`; 0 where nothing is attended, whatever lse is there."""
    return torch.where(m > 0, m * torch.exp(s - lse[..., None]), 0.0)


def dp(dout: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the cotangent of the attention weights, `(B, H, S, T)`."""
    return dout @ v.transpose(2, 3)


def ds(p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return the cotangent of the capped scores."""
    return p * (dp - delta[..., None])


def dq(ds: torch.Tensor, k: torch.Tensor, scale: float, attended: torch.Tensor) -> torch.Tensor:
    """Return what one block adds to dq."""
    return weighted_sum(ds, k, attended) * scale


def dk(ds: torch.Tensor, q: torch.Tensor, scale: float, attended: torch.Tensor) -> torch.Tensor:
    """Return what these queries add to the dk of a block."""
    return weighted_sum(ds.transpose(2, 3), q, attended.transpose(2, 3)) * scale


def dv(p: torch.Tensor, dout: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    """Return what these queries add to the dv of a block."""
    return weighted_sum(p.transpose(2, 3), dout, attended.transpose(2, 3))
