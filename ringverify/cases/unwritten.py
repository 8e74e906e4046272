"""Memory that nothing has been written to, filled so that reading it shows."""

from __future__ import annotations

import math
from typing import Any

import torch

from ringverify.worlds.torch_private import TorchDispatchMode, schema_of

_EMPTY = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
"""Operations that give memory without contents."""


class Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves its hooks untyped
    """Within, `torch.empty` and its kin give NaN, or the largest integer there is, on the calling thread.

    Mostly such memory holds zeros, and whoever forgets to write it does not notice. Torch can do the same by
    `torch.use_deterministic_algorithms`; but that is a setting of the process, and chooses other kernels.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # the same

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = schema_of(func)
        if schema is not None and schema.name.removeprefix("aten::") in _EMPTY and isinstance(result, torch.Tensor):
            if result.is_floating_point() or result.is_complex():
                result.fill_(math.nan)
            elif result.dtype is not torch.bool:
                result.fill_(torch.iinfo(result.dtype).max)
        return result
