"""Plain attention on one device, for packages that distribute an attention function of the caller's.

Legend of shape suffixes: B batch, H heads, N queries, M keys, D head_dim.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def attention(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """Return out `(B, H, N, D)` in q's dtype, differentiable by autograd; query heads share key heads in equal groups.

    Args:
        q_BHND: queries.
        k_BHMD: keys, of as many heads or a divisor of them.
        v_BHMD: values, of as many heads as the keys.
        mask: True where a query attends a key, broadcastable to `(B, H, N, M)`, with a key in every row; or `None`.
        scale: the factor on q.k.
    """
    k_BHMD, v_BHMD = (x.repeat_interleave(q_BHND.shape[1] // max(1, x.shape[1]), dim=1) for x in (k_BHMD, v_BHMD))
    scores = q_BHND @ k_BHMD.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, dim=-1) @ v_BHMD


def causal_mask(queries: Tensor, keys: Tensor) -> Tensor:
    """Return a mask `(…, N, M)` of positions `(…, N)` and `(…, M)`: True where the key is not past the query."""
    return keys[..., None, :] <= queries[..., :, None]


def with_key_heads(tensors: tuple[Tensor, Tensor, Tensor], key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Append heads of zeros to q, k and v, `(…, heads, head_dim)`, up to `key_heads`; groups keep their size."""
    q, k, v = tensors
    lacking, group = key_heads - k.shape[-2], q.shape[-2] // k.shape[-2]
    if not lacking:
        return q, k, v
    widths = (group * lacking, lacking, lacking)
    q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, width)) for x, width in zip((q, k, v), widths, strict=True))
    return q, k, v
