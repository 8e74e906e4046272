"""A problem computed tile by tile by one kernel, beside what the oracle says and what rounding allows."""

import math
from typing import NamedTuple

import numpy as np
import torch

from ringref.attention import attention
from ringref.pattern import multiplicity
from ringref.rounding import Pipeline, allowed_error, margins
from ringverify.ring.accumulate import Running, merge_
from ringverify.ring.calls import ACCUMULATES
from ringverify.ring.kernels.kernel import KernelTile, MergedRows, Setting

NAMES = ("out", "lse", "dq", "dk", "dv")


class Inputs(NamedTuple):
    """Tensors of one problem by position, in the dtypes in which kernels are given them; dlse may be `None`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None

    def arrays(self):
        """The very same numbers for the oracle."""
        return tuple(None if x is None else x.double().cpu().numpy() for x in self)


def inputs_of(problem, *, seed=0, size=1.0, dlse=True, device="cpu"):
    """Normal values; `size` multiplies queries and keys."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def normal(length, heads, width, size=1.0):
        drawn = torch.randn(problem.batch, length, heads, width, generator=generator, dtype=torch.float64)
        return (size * drawn).to(device, dtype)

    return Inputs(
        q=normal(problem.nq, problem.heads, problem.head_dim, size),
        k=normal(problem.nk, problem.hk, problem.head_dim, size),
        v=normal(problem.nk, problem.hk, problem.dv),
        dout=normal(problem.nq, problem.heads, problem.dv),
        dlse=normal(problem.nq, problem.heads, 1)[..., 0].transpose(1, 2).to(ACCUMULATES[dtype]) if dlse else None,
    )


def setting_of(problem, device="cpu"):
    """What a kernel is told of a problem."""
    dtype = getattr(torch, problem.dtype)
    return Setting(
        device, dtype, ACCUMULATES[dtype], problem.head_dim, problem.dv, problem.scale_value, problem.softcap
    )


def tiles_of(problem, cuts, device="cpu"):
    """`(rows, keys, mask)` of every tile that holds a pair; `cuts` are the rows and the keys at which tiles end."""
    m = multiplicity(problem)
    rows_at, keys_at = ([0, *ends, total] for ends, total in zip(cuts, m.shape[2:], strict=True))
    for i in range(len(rows_at) - 1):
        for j in range(len(keys_at) - 1):
            rows, keys = slice(rows_at[i], rows_at[i + 1]), slice(keys_at[j], keys_at[j + 1])
            part = m[:, :, rows, keys]
            square = np.tril(np.ones(part.shape[2:], dtype=np.int64))
            if (part == 1).all():
                yield rows, keys, None
            elif part.shape[2] == part.shape[3] and (part == square).all():
                yield rows, keys, "causal"
            elif part.any():
                bias = torch.from_numpy(part).to(device, ACCUMULATES[getattr(torch, problem.dtype)]).log()
                same = (bias == bias[:1, :1]).all()
                yield rows, keys, bias[0, 0] if same else bias


def computed(kernel, problem, inputs, cuts=((), ())):
    """out, lse, dq, dk, dv from the tiles, merged; also the kinds of masks that were used."""
    device = inputs.q.device
    setting = setting_of(problem, device.type)
    by_head = [x.transpose(1, 2) for x in inputs[:4]]
    q, k, v, dout = by_head
    shape = problem.batch, problem.nq, problem.heads, problem.dv
    sums = Running(shape, setting.accumulates, device).partial
    out, lse = sums.out.transpose(1, 2), sums.lse
    tiles = list(tiles_of(problem, cuts, device))
    for rows, keys, mask in tiles:
        tile = KernelTile(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask)
        out_b, lse_b = kernel.forward(setting, tile)
        assert lse_b.dtype == setting.accumulates
        assert out_b.dtype in (setting.dtype, setting.accumulates)
        merge_(out[:, :, rows], lse[:, :, rows], out_b, lse_b)
    found = [torch.zeros(x.shape, dtype=setting.accumulates, device=device) for x in (q, k, v)]
    merged = out.to(setting.dtype)
    known = lse.masked_fill(lse == -math.inf, math.inf)
    for rows, keys, mask in tiles:
        dlse = None if inputs.dlse is None else inputs.dlse[:, :, rows]
        tile = KernelTile(q[:, :, rows], k[:, :, keys], v[:, :, keys], mask)
        of_rows = MergedRows(dout[:, :, rows], merged[:, :, rows], known[:, :, rows], dlse)
        gradients = kernel.backward(setting, tile, of_rows)
        for total, part, where in zip(found, gradients, (rows, keys, keys), strict=True):
            total[:, :, where] += part
    results = [merged.transpose(1, 2), lse, *(x.to(setting.dtype).transpose(1, 2) for x in found)]
    return results, {"causal" if isinstance(mask, str) else "none" if mask is None else "bias" for *_, mask in tiles}


def worst_margin(problem, inputs, results):
    """The largest error over what is allowed, of all results."""
    answer = attention(problem, *inputs.arrays())
    sums = "float64" if problem.dtype == "float64" else "float32"
    pipeline = Pipeline(problem.dtype, sums, probabilities="input", lse_dtype=sums, blocks=4)
    allowed = allowed_error(problem, answer, *inputs.arrays(), pipeline)
    return max(
        float(
            margins(
                result.double().cpu().numpy(),
                getattr(answer, name),
                getattr(allowed, name),
                sums if name == "lse" else problem.dtype,
            ).max(initial=0.0)
        )
        for name, result in zip(NAMES, results, strict=True)
    )
