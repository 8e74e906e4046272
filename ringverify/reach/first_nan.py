"""A mode of torch that sees where numbers become NaN: the function whose inputs have none, and its line."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ringverify.worlds.stacks import UserLine, place_of_user

Origin = tuple[str, UserLine]
"""The name of a function of torch, and the model's line that called it."""
SENDING = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Namespaces of operations whose results come from other ranks."""
UNWRITTEN = ("empty", "empty_like", "new_empty")
"""Functions whose results hold anything until they are written."""


class FirstNaN(TorchFunctionMode):
    """Notes each function whose result has NaN and whose inputs have none.

    Attributes:
        origins: of each place, in the order in which they came, what its inputs were like.
    """

    def __init__(self) -> None:
        super().__init__()
        self.origins: dict[Origin, str] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, and look at what it was given and returned."""
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        clean = not any(map(_has_nan, given))
        seen = _conditions(given) if clean else ""  # before the call, which may write into its inputs
        result = func(*args, **kwargs)
        if clean and _computes(func) and any(map(_has_nan, _tensors((result,)))):
            self.origins.setdefault((func.__name__, place_of_user(sys._getframe(1))), seen)
        return result


def _computes(func: Any) -> bool:
    """Whether the results of a function are its own numbers."""
    namespace = (getattr(func, "__module__", None) or "").rpartition(".")[2]
    return func.__name__ not in UNWRITTEN and namespace not in SENDING


def _tensors(values: Any) -> list[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        return [values]
    return [one for value in values for one in _tensors(value)] if isinstance(values, (tuple, list)) else []


def _has_nan(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.device.type != "meta" and bool(tensor.isnan().any())


def _conditions(given: list[torch.Tensor]) -> str:
    """Say what is special about inputs that have no NaN."""
    numbers = [one for one in given if one.is_floating_point() and one.numel()]
    if any(one.dim() and bool((one == -torch.inf).all(-1).any()) for one in numbers):
        return "inputs have rows that are all -inf, as a query without keys has"
    if any(bool(one.isinf().any()) for one in numbers):
        return "inputs are infinite in places"
    return "inputs are finite"
