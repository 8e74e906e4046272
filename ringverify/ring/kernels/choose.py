"""Which kernel computes the tiles of a call."""

from __future__ import annotations

from ringverify.ring.kernels.flex import Flex
from ringverify.ring.kernels.fused_cpu import FusedCPU
from ringverify.ring.kernels.fused_cuda import EfficientCUDA, FlashCUDA
from ringverify.ring.kernels.kernel import Kernel, Setting
from ringverify.ring.kernels.streaming import STREAMING

KERNELS: tuple[Kernel, ...] = (FusedCPU(), FlashCUDA(), EfficientCUDA(), Flex(), STREAMING)
"""In order of preference; the last one computes everything."""


def choose_kernel(name: str, setting: Setting) -> tuple[Kernel, str]:
    """The kernel of that name, however many pairs there are, or for `auto` the first that can, and why.

    Raises:
        ValueError: there is no such kernel, or it cannot compute this call.
    """
    named = {kernel.name: kernel for kernel in KERNELS}
    if name != "auto":
        if name not in named:
            raise ValueError(f"kernel={name!r}: expected auto, {', '.join(named)}")
        if (reason := named[name].why_not(setting._replace(pairs=None))) is not None:
            raise ValueError(f"kernel={name!r} {reason}; kernel='auto' chooses one that can")
        return named[name], "asked for"
    refused: list[str] = []
    for kernel in KERNELS:
        if (reason := kernel.why_not(setting)) is None:
            return kernel, "; ".join(refused) or "the first choice"
        refused.append(f"{kernel.name} {reason}")
    raise AssertionError(refused)  # the last one computes everything
