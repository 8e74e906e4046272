"""A mode of torch that lets a model in one process count positions as its ranks might: from their own first tokens."""

from __future__ import annotations

import sys
from collections.abc import Set
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ringverify.worlds.stacks import UserLine, place_of_user


class Counting(TorchFunctionMode):
    """Replaces the numbers 0 … N−1, made by `arange` or as a slice `[:N]`, on some lines of the model.

    Args:
        local: what to put in their place, `(N)`: each token's place within its shard.
        lines: the lines where; `None`: nowhere.

    Attributes:
        seen: all lines where such numbers were made, in order.
    """

    def __init__(self, local: torch.Tensor, lines: Set[UserLine] | None) -> None:
        super().__init__()
        self._local, self._lines = local, lines
        self.seen: dict[UserLine, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, or return the replaced numbers."""
        kwargs = kwargs or {}
        if func is torch.arange:
            result = func(*args, **kwargs)
            whole = torch.arange(len(self._local))
            if result.shape == whole.shape and torch.equal(result.long(), whole) and self._replaces():
                return self._local.to(result.dtype)
            return result
        if func is torch.Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            sliced = [place for place, one in enumerate(index) if self._counts(one)]
            if sliced and not any(isinstance(one, torch.Tensor) for one in index) and self._replaces():
                tensor = func(args[0], index)
                for place in sliced:
                    tensor = tensor.index_select(_dimension(index, place), self._local)
                return tensor
        return func(*args, **kwargs)

    def _counts(self, index: Any) -> bool:
        return isinstance(index, slice) and index.start in (None, 0) and index.stop == len(self._local)

    def _replaces(self) -> bool:
        line = place_of_user(sys._getframe(2))
        self.seen[line] = None
        return self._lines is not None and line in self._lines


def _dimension(index: tuple[Any, ...], place: int) -> int:
    """The dimension of the result that an index has for its part at this place."""
    if any(one is Ellipsis for one in index[:place]):
        return -sum(not isinstance(one, int) for one in index[place:])
    return sum(not isinstance(one, int) for one in index[:place])
