"""Call a merge on the partials of a case, in a process of its own or in this one, and hold it to its contract.

A merge may have any layout, dtype and base; what comes back is float64, in the layout of `ringref.merge` and base e.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from ringverify.cases.inputs import DTYPE, lay_out
from ringverify.cases.local import ContractError
from ringverify.merge_contract import MergeCapabilities, MergeImplementation, layout_of
from ringverify.merging.case import LN2, Array, MergeCase, Partials, lse_dtype_of, partials_of
from ringverify.targets import load_merge
from ringverify.worlds.raising import raising_of
from ringverify.worlds.whose import ours, theirs
from ringverify.worlds.world import Failure, OurError

Grouping: TypeAlias = "int | tuple[Grouping, ...]"
"""A partial by its number, or several groups that are merged in one call: `((0, 1), 2)` merges 0 and 1 first."""

Pair = tuple[torch.Tensor, Any]
"""Out and lse of a partial, or of merged ones; lse is `None` where the merge returns none."""


@dataclasses.dataclass(frozen=True)
class MergeTask:
    """What is to be merged.

    Attributes:
        merge: the merge, or the target that names it.
        case: the case.
        grouping: how its partials are merged.
        gradients: whether gradients are taken too.
        device: device of the tensors.
    """

    merge: MergeImplementation | str
    case: MergeCase
    grouping: Grouping
    gradients: bool = False
    device: str = "cpu"


@dataclasses.dataclass(frozen=True, eq=False)
class MergeResult:
    """What a merge returned, in float64, canonical layout and base e.

    Attributes:
        out: `(B, S, H, D)`.
        lse: `(B, H, S)`, or `None` if it returns none. The mark of an empty partial is left as it is.
        dout: gradients of the partials' outs `(P, B, S, H, D)`, or `None`.
        dlse: gradients of their log-sum-exps `(P, B, H, S)`, or `None`.
        changed: names of the inputs that were changed, such as `lse_b`.
    """

    out: Array
    lse: Array | None
    dout: Array | None
    dlse: Array | None
    changed: tuple[str, ...]


def name_of_partial(number: int, partials: int) -> str:
    """Name a partial in messages: a or b of two, else its number."""
    return "ab"[number] if partials == 2 else str(number)


def run_merge(task: MergeTask) -> MergeResult | Failure:
    """Merge the partials of a case; return how the merge failed if it raised or broke its contract.

    Raises:
        OurError: something else than the merge raised.
    """
    try:
        return _run(task)
    except OurError:
        raise
    except (Exception, SystemExit) as error:
        raised = raising_of(error)
        return dataclasses.replace(Failure.of(0, raised), message=f"the merge {raised.what}")  # it is no rank


def _run(task: MergeTask) -> MergeResult:
    with ours():
        found = load_merge(task.merge) if isinstance(task.merge, str) else task.merge
        return _Called(found, task).result()


class _Called:
    """The calls of a merge for one case."""

    def __init__(self, merge: MergeImplementation, task: MergeTask) -> None:
        self.merge, self.task, self.case = merge, task, task.case
        self.capabilities: MergeCapabilities = merge.capabilities
        self.dtype = DTYPE[self.case.dtype]
        self.lse_dtype = DTYPE[lse_dtype_of(self.case, self.capabilities)]
        self.partials: Partials = partials_of(self.case, self.capabilities)

    def result(self) -> MergeResult:
        """Merge, take gradients and see which inputs were changed."""
        made = {}
        for i in range(self.case.partials):
            name = name_of_partial(i, self.case.partials)
            made[f"out_{name}"] = self._tensor(
                _from_canonical(self.partials.out[i], "bshd", self._out_axes), self.dtype
            )
            lse = _from_canonical(self.partials.lse[i], "bhs", self._lse_axes)
            made[f"lse_{name}"] = self._tensor(lse[..., None] if self._ends_in_one else lse, self.lse_dtype)
        leaves = [view for view, _ in made.values()]
        before = {name: buffer.clone() for name, (_, buffer) in made.items()}
        for leaf in leaves if self.task.gradients else ():
            leaf.requires_grad_()
        out, lse = self._merged(self.task.grouping, list(zip(leaves[::2], leaves[1::2], strict=True)))
        changed = tuple(name for name, (_, buffer) in made.items() if not _same_bits(buffer, before[name]))
        dout, dlse = self._gradients(leaves, out, lse) if self.task.gradients else (None, None)
        with theirs():  # a tensor subclass may run the merge's own code
            return MergeResult(self._out(out), None if lse is None else self._lse(lse), dout, dlse, changed)

    @property
    def _out_axes(self) -> str:
        return layout_of(self.capabilities.out_layout).axes

    @property
    def _lse_axes(self) -> str:
        return layout_of(self.capabilities.lse_layout).axes

    @property
    def _ends_in_one(self) -> bool:
        return layout_of(self.capabilities.lse_layout).ends_in_one

    def _tensor(self, values: Array, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        memory = "strided" if self.case.memory == "transposed" and values.ndim < 3 else self.case.memory
        return lay_out(values, dtype, memory, self.task.device)

    def _merged(self, grouping: Grouping, pairs: Sequence[Pair]) -> Pair:
        if isinstance(grouping, int):
            return pairs[grouping]
        group = []
        for part in grouping:
            out, lse = self._merged(part, pairs)
            # The result of a merge is a partial like any other, in the dtypes that partials have.
            group.append((out.to(self.dtype), None if lse is None else lse.to(self.lse_dtype)))
        if self.capabilities.stacked:
            outs, lses = (torch.stack(list(one)) for one in zip(*group, strict=True))
            with theirs():
                returned = self.merge(outs, lses)
        else:
            with theirs():
                returned = self.merge(*group[0], *group[1])
        with theirs():
            return self._checked(returned, group[0])

    def _checked(self, returned: Any, first: Pair) -> Pair:
        """Hold what a call returned to the contract; `first` is its first partial."""
        c = self.capabilities
        if returned is None and c.in_place:
            returned = first if c.lse else first[0]
        if c.lse and (not isinstance(returned, (tuple, list)) or len(returned) != 2):
            got = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else _kind(returned)
            raise ContractError(
                f"returned {got}: (out, lse) is expected; a merge that returns out alone declares lse=False",
                rule="pair",
            )
        out, lse = returned if c.lse else (returned, None)
        self._check("out", out, first[0], self.dtype if c.out_dtype is None else DTYPE[c.out_dtype])
        if c.lse:
            self._check("lse", lse, first[1], None)
        if c.in_place:
            for name, result, given in (("out", out, first[0]), ("lse", lse, first[1])):
                if result is not None and (result.data_ptr(), result.stride()) != (given.data_ptr(), given.stride()):
                    raise ContractError(
                        f"returned an {name} in memory of its own: in_place=True is declared, so the result is the "
                        "first partial itself",
                        rule="in place",
                        tensor=name,
                    )
        return out, lse

    def _check(self, name: str, tensor: Any, like: torch.Tensor, dtype: torch.dtype | None) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise ContractError(f"returned {_kind(tensor)} for {name}: a tensor is expected", rule="type", tensor=name)
        if tensor.shape != like.shape:
            layout = self.capabilities.out_layout if name == "out" else self.capabilities.lse_layout
            raise ContractError(
                f"returned {name} of shape {tuple(tensor.shape)}: {tuple(like.shape)} is expected, "
                f'{name}_layout="{layout}"',
                rule="shape",
                tensor=name,
            )
        if dtype is None:  # wider is no loss
            wrong = not tensor.is_floating_point() or torch.finfo(tensor.dtype).eps > torch.finfo(like.dtype).eps
        else:
            wrong = tensor.dtype != dtype
        if wrong:
            wanted = f"{_name(like.dtype)} or wider" if dtype is None else _name(dtype)
            raise ContractError(
                f"returned {name} in {_name(tensor.dtype)}: {wanted} is expected; another one is "
                f"declared with {name}_dtype",
                rule="dtype",
                tensor=name,
            )
        if tensor.device != like.device:
            raise ContractError(
                f"returned {name} on device {tensor.device}: {like.device} is expected", rule="device", tensor=name
            )

    def _gradients(self, leaves: list[torch.Tensor], out: torch.Tensor, lse: Any) -> tuple[Array, Array]:
        results = [(out, self.partials.cotangent, "bshd", self._out_axes, False)]
        if lse is not None:
            results.append((lse, self.partials.lse_cotangent, "bhs", self._lse_axes, self._ends_in_one))
        cotangents = []
        for name, (result, values, canonical, axes, one) in zip(("out", "lse"), results, strict=False):
            if not result.requires_grad:
                raise ContractError(
                    f"returned an {name} that is not attached to the partials by autograd: make it differentiable, or "
                    "declare gradients=False",
                    rule="detached",
                    tensor=name,
                )
            told = torch.from_numpy(np.ascontiguousarray(_from_canonical(values, canonical, axes)))
            cotangents.append((told[..., None] if one else told).to(result))
        with theirs():
            found = torch.autograd.grad([one[0] for one in results], leaves, cotangents, allow_unused=True)
            filled = [torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
            # The derivative by an lse in base 2 is ln 2 times that by one in base e.
            factor = 1.0 if self.capabilities.base == "e" else 1 / LN2
            dlse = np.stack([self._canonical_lse(one) for one in filled[1::2]]) * factor
            return np.stack([self._out(one) for one in filled[::2]]), dlse

    def _out(self, tensor: torch.Tensor) -> Array:
        return _to_canonical(_copy(tensor), self._out_axes, "bshd")

    def _canonical_lse(self, tensor: torch.Tensor) -> Array:
        values = _copy(tensor)
        return _to_canonical(values[..., 0] if self._ends_in_one else values, self._lse_axes, "bhs")

    def _lse(self, tensor: torch.Tensor) -> Array:
        values = self._canonical_lse(tensor)
        return values if self.capabilities.base == "e" else values * LN2


def _from_canonical(values: Array, canonical: str, axes: str) -> Array:
    """Return values with their axes in another order; a batch that the order lacks has one element."""
    if "b" not in axes:
        values, canonical = values[0], canonical.removeprefix("b")
    return values.transpose([canonical.index(axis) for axis in axes])


def _to_canonical(values: Array, axes: str, canonical: str) -> Array:
    if "b" not in axes:
        values, axes = values[None], f"b{axes}"
    return values.transpose([axes.index(axis) for axis in canonical])


def _copy(tensor: torch.Tensor) -> Array:
    return np.array(tensor.detach().to(device="cpu", dtype=torch.float64).numpy())


def _same_bits(now: torch.Tensor, before: torch.Tensor) -> bool:
    return bool(((now == before) | (now.isnan() & before.isnan())).all())


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
