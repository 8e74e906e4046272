"""Global settings of torch: code that changes one has to restore it, or the next layer computes with it.

A setting belongs to the process or to the thread. Ranks of the simulated world are threads of one process, and yet each
has process settings of its own: the baton swaps them at each turn (`ringverify.worlds.simulated.baton`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch


class TorchSetting(NamedTuple):
    """One setting.

    Attributes:
        name: how messages call it.
        read: its value now.
        write: sets it; `None` where torch can only change it by leaving a context.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any] | None


def _attention_kernels() -> tuple[bool, ...]:
    kernels: Any = torch.backends.cuda  # its functions are not typed
    return (
        kernels.flash_sdp_enabled(),
        kernels.mem_efficient_sdp_enabled(),
        kernels.math_sdp_enabled(),
        kernels.cudnn_sdp_enabled(),
    )


def _enable_attention_kernels(enabled: tuple[bool, ...]) -> None:
    kernels: Any = torch.backends.cuda
    kernels.enable_flash_sdp(enabled[0])
    kernels.enable_mem_efficient_sdp(enabled[1])
    kernels.enable_math_sdp(enabled[2])
    kernels.enable_cudnn_sdp(enabled[3])


def _autocast(device: str) -> TorchSetting:
    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def write(value: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, value[0])
        torch.set_autocast_dtype(device, value[1])

    return TorchSetting(f"autocast on {device}", read, write)


OF_PROCESS: tuple[TorchSetting, ...] = (
    TorchSetting("default dtype", torch.get_default_dtype, torch.set_default_dtype),
    TorchSetting("deterministic algorithms", torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    TorchSetting("float32 matmul precision", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    TorchSetting("attention kernels", _attention_kernels, _enable_attention_kernels),
    TorchSetting("anomaly detection", torch.is_anomaly_enabled, torch.set_anomaly_enabled),
)
"""Settings of the whole process."""

EVERY: tuple[TorchSetting, ...] = (
    *OF_PROCESS,
    TorchSetting("grad mode", torch.is_grad_enabled, torch.set_grad_enabled),
    TorchSetting("inference mode", torch.is_inference_mode_enabled, None),
    _autocast("cpu"),
    _autocast("cuda"),
    TorchSetting("default device", torch.get_default_device, torch.set_default_device),
    TorchSetting("number of threads", torch.get_num_threads, torch.set_num_threads),
)
"""Settings of the process and of the calling thread."""


def values(settings: Sequence[TorchSetting]) -> tuple[Any, ...]:
    """Return the current values of settings."""
    return tuple([setting.read() for setting in settings])


def put_back(settings: Sequence[TorchSetting], before: tuple[Any, ...]) -> dict[str, str]:
    """Restore the settings that have changed, and return each one's change by name: "float64, was float32"."""
    now = values(settings)
    if now == before:
        return {}
    changed = {}
    for setting, is_now, was in zip(settings, now, before, strict=True):
        if is_now != was:
            changed[setting.name] = f"{_shown(is_now)}, was {_shown(was)}"
            if setting.write is not None:
                with contextlib.suppress(RuntimeError):  # torch may refuse the change
                    setting.write(was)
    return changed


def _shown(value: Any) -> str:
    values = value if isinstance(value, tuple) else (value,)
    return " ".join(str(value).removeprefix("torch.") for value in values)
