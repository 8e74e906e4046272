"""`merge_attentions` of the package `natten` (PyPI, 0.21.7), on a CPU: it is written in torch, and n-way.

What is declared is what its docstring says: outs "with the heads last layout (`[batch, seqlen, heads, head_dim]`)", and
contiguous; log-sum-exps `[batch, seqlen, heads]`; any number of them from two. Nothing is said of empty partials. By
default its backward is for outs of its own GPU kernels ("must be disabled when using unfused Attention"), so
`use_autograd_fix=False`, and autograd differentiates the formula.

Without a GPU the package installs without its kernels; it needs torch to be there when it is built.

Importing this module imports the package.

Raises:
    Inconclusive: the package is missing, is of another version, or does not import.
"""

from __future__ import annotations

from typing import Any

import torch

from ringverify.merge_contract import merge
from ringverify.peers.package import imported

NAME = "merge:natten"
PACKAGE = "natten"
VERSION = "0.21.7"
INSTALL = f"pip install --no-build-isolation {PACKAGE}=={VERSION}"

_module: Any = imported("natten.functional", peer=NAME, package=PACKAGE, version=VERSION, install=INSTALL)


@merge(
    name=NAME,
    lse_layout="bsh",
    dtypes=("float32", "bfloat16", "float16"),
    empty=None,
    stacked=True,
    gradients=True,
    strided=False,
)
def merged(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """All partials at once, which the package merges one after another."""
    found = _module.merge_attentions([*out], [*lse], torch_compile=False, use_autograd_fix=False)
    return found[0], found[1]
