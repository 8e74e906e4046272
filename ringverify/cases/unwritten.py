"""Fill uninitialised memory with NaN, so that reading it before writing shows in the results."""

from __future__ import annotations

import math
from typing import Any

import torch

from ringverify.worlds.torch_private import TorchDispatchMode, schema_of

_EMPTY = frozenset(("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"))
"""Operations of torch that return uninitialised memory, without "aten::"."""


class Unwritten(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves its hooks untyped
    """Context in which `torch.empty` and its variants return NaN, or the largest integer, on the calling thread.

    Fresh memory often holds zeros, which hides a missing write. `torch.use_deterministic_algorithms` can fill it too,
    but is a setting of the whole process and selects other kernels.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's guard against dynamo would import it, for over a second, and double the cost

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
