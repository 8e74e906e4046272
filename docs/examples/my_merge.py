"""A merge of partial results, as decoding over a split cache needs it: one declaration, and a verdict on it."""

import torch

from ringverify import merge


@merge(out_layout="thd", lse_layout="th", dtypes=("float32", "bfloat16"), gradients=True)
def merge_partials(out_a, lse_a, out_b, lse_b):
    """Two partials of the same tokens over different keys: out (tokens, heads, dim), lse (tokens, heads)."""
    top = torch.maximum(lse_a, lse_b)
    top = torch.where(top == float("-inf"), 0.0, top).detach()  # a token without keys in both: no -inf - (-inf)
    a, b = torch.exp(lse_a - top), torch.exp(lse_b - top)
    total = a + b
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    out = (a / total)[..., None] * out_a + (b / total)[..., None] * out_b
    lse = torch.where(empty, float("-inf"), torch.log(total) + top)
    return out.to(out_a.dtype), lse
