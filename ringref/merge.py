"""The merge of partial results of attention, and its gradients, in float64.

A partial is the attention of the same queries over some of the keys. `lse_i` is the log of its sum of exponentials, so

```
lse = log Σ_i exp(lse_i)            w_i = exp(lse_i − lse)            out = Σ_i w_i · out_i
```

is the attention over the keys of all of them. An empty partial has `lse_i = −inf`, so `w_i = 0`; where all are empty,
out is 0 and lse is −inf. With cotangents dout and dlse,

```
dout_i = w_i · dout                 dlse_i = w_i · (dout · (out_i − out) + dlse)
```

Shape letters: P partials, B batch, S queries, H heads, D value_dim.
"""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Merged:
    """The merge of partials, and what led to it.

    Attributes:
        out: `(B, S, H, D)`.
        lse: `(B, H, S)`, −inf where all partials are empty.
        weights: `(P, B, H, S)`, the w_i; 0 where all partials are empty.
        dout: gradients of the partials' outs `(P, B, S, H, D)`, or `None`.
        dlse: gradients of their log-sum-exps `(P, B, H, S)`, or `None`.
    """

    out: Array
    lse: Array
    weights: Array
    dout: Array | None = None
    dlse: Array | None = None


def merged(out: Array, lse: Array, cotangent: Array | None = None, lse_cotangent: Array | None = None) -> Merged:
    """Merge partials.

    Args:
        out: `(P, B, S, H, D)`; 0 in empty rows.
        lse: `(P, B, H, S)`, natural logarithm; −inf in empty rows.
        cotangent: cotangent of the merged out `(B, S, H, D)`, or `None` for no gradients.
        lse_cotangent: cotangent of the merged lse `(B, H, S)`, or `None` for 0.
    """
    top = np.max(lse, axis=0)
    shift = np.where(top == -np.inf, 0.0, top)
    sums = np.exp(lse - shift).sum(axis=0)
    some = sums != 0  # of NaN too
    with np.errstate(divide="ignore"):
        total = np.where(some, np.log(sums) + shift, -np.inf)
    weights = np.exp(lse - shift) / np.where(some, sums, 1.0)
    whole = (_by_query(weights) * out).sum(axis=0)
    if cotangent is None:
        return Merged(whole, total, weights)
    along = ((out - whole) * cotangent).sum(axis=-1).swapaxes(-1, -2)  # (P, B, H, S)
    change = 0.0 if lse_cotangent is None else lse_cotangent
    return Merged(whole, total, weights, _by_query(weights) * cotangent, weights * (along + change))


def _by_query(lse_like: Array) -> Array:
    """Return `(…, H, S)` as `(…, S, H, 1)`, to be multiplied with an out."""
    return lse_like.swapaxes(-1, -2)[..., None]
