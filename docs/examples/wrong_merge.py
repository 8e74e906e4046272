"""The merge of `my_merge.py` as it is often first written: no shift by the maximum, no thought of empty partials."""

import torch

from ringverify import merge


@merge(out_layout="thd", lse_layout="th")
def merge_partials(out_a, lse_a, out_b, lse_b):
    """Right on ordinary numbers."""
    a, b = torch.exp(lse_a), torch.exp(lse_b)
    total = a + b
    return (a[..., None] * out_a + b[..., None] * out_b) / total[..., None], torch.log(total)
