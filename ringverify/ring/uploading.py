"""What the host has made, on a device, without waiting for it."""

from __future__ import annotations

import torch


def uploaded(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on a device; on CPU the tensor itself.

    A CUDA device copies it when it comes to it, from memory that is pinned and kept until then. From other memory torch
    copies at once, and waits for all that is queued.
    """
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
