"""`DilatedAttention` of the package `dilated-attention-pytorch` (PyPI, 0.2.0), on a CPU stand-in for xformers.

What is declared is what the README and the docstring of the class say:

- dilated attention as in LongNet, one branch per group of heads: "(potentially) unequally sized groups", the first ones
  a head larger. A problem without a dilation is run as one branch of the whole length at rate 1, because the package is
  "a drop-in replacement" for attention;
- lengths that every segment length divides: "'seq_len' must be a multiple of … the largest segment length";
- `softmax_scale`: "the temperature to use for the softmax attention";
- `is_causal`; one process: nothing in it communicates;
- float32: what the stand-in computes in, and xformers takes as well.

The package is made for xformers before 0.0.22, which is made for torch 2.0: it is installed with `--no-deps`.

Importing this module imports the package.

Raises:
    Inconclusive: the package is missing, is of another version, or does not import.
"""

from __future__ import annotations

from typing import Any

import torch

from ringverify.implementation import AttentionCall, implementation
from ringverify.peers.package import imported
from ringverify.peers.xformers_ops import standing_in

NAME = "peer:dilated-attention-pytorch"
PACKAGE = "dilated-attention-pytorch"
VERSION = "0.2.0"
INSTALL = f"pip install einops && pip install --no-deps {PACKAGE}=={VERSION}"

with standing_in():
    _module: Any = imported(
        "dilated_attention_pytorch.dilated_attention", peer=NAME, package=PACKAGE, version=VERSION, install=INSTALL
    )


@implementation(
    name=NAME,
    causal="both",
    scale=True,
    dilation=("split",),
    uneven_segments=False,
    world_sizes=(1,),
)
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """The output; the one process holds the whole sequence."""
    branches = ((call.problem.nq, 1),) if call.dilation is None else call.dilation.branches
    segments, rates = zip(*branches, strict=True)
    module = _module.DilatedAttention(segments, rates, softmax_scale=call.scale)
    out: torch.Tensor = module(q, k, v, is_causal=call.causal)
    return out
