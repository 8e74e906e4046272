"""One rank's part in one case: make its shards, call the implementation, take gradients, copy the results."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ringref.problem import Problem
from ringref.rounding import UNIT_ROUNDOFF
from ringref.sharding import Positions
from ringverify.cases.case import Case, sharding_of
from ringverify.cases.inputs import DTYPE, Inputs, lay_out
from ringverify.implementation import AttentionCall, Capabilities, Implementation, TensorLayout
from ringverify.worlds import torch_settings
from ringverify.worlds.raising import Charge
from ringverify.worlds.watch.hazards import only_group
from ringverify.worlds.watch.memory import measured
from ringverify.worlds.whose import theirs

Array = NDArray[np.float64]


class ContractError(Charge):
    """A rank broke the plug-in contract; the message says what it returned or did, and what was expected."""


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank returned: float64 copies, exact, in the canonical layout.

    Attributes:
        out: `(B, n_local, Hq, Dv)`.
        lse: `(B, Hq, n_local)`, or `None` if the implementation declares none.
        dq: `(B, n_local, Hq, D)`, or `None` without gradients.
        dk: `(B, m_local, Hk, D)`, or `None` without gradients.
        dv: `(B, m_local, Hk, Dv)`, or `None` without gradients.
        dsinks: `(Hq,)`, or `None` without gradients or sinks.
        lse_dtype: name of the dtype in which lse came back, without "torch."; "" if there is none.
        changed: names of the inputs and of the call's fields ("call.window") that the implementation changed.
        left: torch settings that it did not restore, by name: "float64, was float32".
        seconds: CPU time of this rank's thread inside the implementation, forward and backward.
        factors: by what an input was multiplied that the implementation changed, by name, if by one number.
    """

    out: Array
    lse: Array | None
    dq: Array | None
    dk: Array | None
    dv: Array | None
    lse_dtype: str
    changed: tuple[str, ...]
    left: dict[str, str]
    seconds: float
    dsinks: Array | None = None
    factors: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Local:
    """One rank's part in one case, before the implementation is called.

    Attributes:
        call: the `AttentionCall` that the implementation is given.
        leaves: q, k and v.
        cotangents: of out and of lse.
        buffers: the buffer that each of q, k, v, dout and dlse is a view of, by name.
        views: shape, strides, dtype and address of each tensor before the call, by name.
        before: copies of the buffers before the call, by name.
        told: an equal `AttentionCall` that the implementation cannot reach, to compare `call` with afterwards.
        device: device of the tensors.
        left: torch settings that were not restored so far, as in `RankResult`.
    """

    call: AttentionCall
    leaves: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    cotangents: tuple[torch.Tensor, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    views: dict[str, tuple[object, ...]]
    before: dict[str, torch.Tensor]
    told: AttentionCall
    device: str
    left: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The leaves, and the sinks where there are some."""
        return self.leaves if self.call.sinks is None else (*self.leaves, self.call.sinks)

    def require_gradients(self, requiring: str = "qkv") -> None:
        """Let some of q, k and v require gradients, and sinks with q."""
        for name, leaf in zip("qkvq", self.inputs, strict=False):
            leaf.requires_grad_(name in requiring)


def local_part(
    case: Case,
    capabilities: Capabilities,
    inputs: Inputs,
    rows: tuple[Positions, Positions],
    group: dist.ProcessGroup,
    rank: int,
    device: str,
) -> Local:
    """Make one rank's shards in the memory layout of the case; `rows` are the positions of its queries and its keys."""
    dtype = DTYPE[case.problem.dtype]
    queries, keys = rows

    def local(values: Array, rows: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        piece = values[:, rows].swapaxes(1, 2) if capabilities.tensor_layout == "bhsd" else values[:, rows]
        return lay_out(piece, dtype, case.memory, device)

    q, q_buffer = local(inputs.q, queries)
    k, k_buffer = local(inputs.k, keys)
    v, v_buffer = local(inputs.v, keys)
    dout, dout_buffer = local(inputs.dout, queries)
    dlse, dlse_buffer = lay_out(inputs.dlse[:, :, queries], DTYPE[case.problem.lse_dtype], case.memory, device)
    buffers = {"q": q_buffer, "k": k_buffer, "v": v_buffer, "dout": dout_buffer, "dlse": dlse_buffer}
    views = {name: _view(tensor) for name, tensor in zip(buffers, (q, k, v, dout, dlse), strict=True)}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    positions, key_pos = (torch.from_numpy(rows.copy()).to(device) for rows in (queries, keys))
    sinks = None if inputs.sinks is None else torch.tensor(inputs.sinks, dtype=torch.float32, device=device)
    told = AttentionCall(
        group=group,
        rank=rank,
        world_size=case.world_size,
        problem=case.problem,
        sharding=sharding_of(case, capabilities),
        positions=positions,
        key_positions=key_pos,
        sinks=sinks,
    )
    call = dataclasses.replace(
        told,
        problem=_apart(case.problem),
        positions=positions.clone(),
        key_positions=key_pos.clone(),
        sinks=None if sinks is None else sinks.clone(),
    )
    return Local(call, (q, k, v), (dout, dlse), buffers, views, before, told, device)


def _apart(problem: Problem) -> Problem:
    """Return an equal problem that shares nothing that can be changed; a deep copy would take ten times as long."""
    mine = copy.copy(problem)
    object.__setattr__(mine, "dilation", copy.copy(problem.dilation))
    return mine


def forward(implementation: Implementation, local: Local) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Call the implementation on this rank.

    Raises:
        ContractError: it returned something other than the contract asks for.
    """
    problem, capabilities = local.told.problem, implementation.capabilities
    with _noting_settings(local), theirs(), only_group(local.told.group), measured():
        returned = implementation(*local.leaves, local.call)
    rows = len(local.told.positions)
    shape = (problem.batch, rows, problem.heads, problem.dv)
    swapped = (shape[0], shape[2], shape[1], shape[3])
    dtype = DTYPE[problem.dtype]
    wide = (dtype,) if dtype is torch.float64 else (torch.float32, torch.float64)
    with theirs():  # a tensor subclass may run the implementation's code here
        out, lse = _unpack(returned, capabilities)
        layout = capabilities.tensor_layout
        _check_tensor("out", out, swapped if layout == "bhsd" else shape, (dtype,), local.device, layout)
        if lse is not None:
            _check_tensor("lse", lse, (problem.batch, problem.heads, rows), wide, local.device, layout)
    return out, lse


def backward(
    local: Local,
    case: Case,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    *,
    keep: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """Take the gradients of q, k, v, and sinks if any, for the case's cotangents; `None` where none is required.

    What the implementation itself has put into `grad` of an input is returned as its gradient too.

    Args:
        local: this rank's part.
        case: says which results have a cotangent.
        out: the out that the forward returned.
        lse: the lse that it returned, or `None`.
        keep: keep the graph for another backward.

    Raises:
        ContractError: a result is not attached to q, k and v by autograd.
    """
    dout, dlse = local.cotangents
    results, cotangents = [], []
    if case.cotangent != "lse":
        results, cotangents = [out], [dout]
    of_lse = local.leaves[0].requires_grad or local.leaves[1].requires_grad
    if case.cotangent != "out" and lse is not None and (of_lse or lse.requires_grad):  # lse does not depend on v
        results.append(lse)
        cotangents.append(dlse.to(lse.dtype))
    wanted = tuple(leaf for leaf in local.inputs if leaf.requires_grad)
    with _noting_settings(local), theirs(), only_group(local.told.group), measured():
        found = iter(_gradients(results, wanted, cotangents, keep))
    return tuple(next(found) if leaf.requires_grad else leaf.grad for leaf in local.inputs)


def result_of(
    local: Local,
    capabilities: Capabilities,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    gradients: tuple[torch.Tensor | None, ...] = (None, None, None),
    seconds: float = 0.0,
) -> RankResult:
    """Copy what a rank returned, and note which inputs, fields of the call and torch settings it changed."""
    swap = capabilities.tensor_layout == "bhsd"
    with theirs():  # a tensor subclass may run the implementation's code, and a CUDA error may surface only here
        changed = [
            name
            for (name, buffer), tensor in zip(local.buffers.items(), (*local.leaves, *local.cotangents), strict=True)
            if not _same_bits(buffer, local.before[name]) or _view(tensor) != local.views[name]
        ]
        for field in dataclasses.fields(AttentionCall):
            if not _same(getattr(local.call, field.name), getattr(local.told, field.name)):
                changed.append(f"call.{field.name}")
        of_inputs = {name: _factor(local.buffers[name], local.before[name]) for name in changed if "." not in name}
        dq, dk, dv = (_copy(gradient, swap) for gradient in gradients[:3])
        dsinks = _copy(gradients[3], False) if len(gradients) > 3 else None
        copied, copied_lse = _copy(out, swap), _copy(lse, False)
    assert copied is not None
    lse_name = "" if lse is None else str(lse.dtype).removeprefix("torch.")
    factors = {name: factor for name, factor in of_inputs.items() if factor is not None}
    return RankResult(
        copied, copied_lse, dq, dk, dv, lse_name, tuple(changed), dict(local.left), seconds, dsinks, factors
    )


def joined(parts: list[RankResult]) -> RankResult:
    """Join what a rank returned of several calls, the rows of the first one first; of forward passes alone."""
    lse = [part.lse for part in parts if part.lse is not None]
    return dataclasses.replace(
        parts[-1],
        out=np.concatenate([part.out for part in parts], axis=1),
        lse=np.concatenate(lse, axis=2) if lse else None,
        changed=tuple(dict.fromkeys(name for part in parts for name in part.changed)),
        left={name: value for part in parts for name, value in part.left.items()},
        seconds=sum(part.seconds for part in parts),
        factors={name: factor for part in parts for name, factor in part.factors.items()},
    )


@contextlib.contextmanager
def _noting_settings(local: Local) -> Iterator[None]:
    """Note the torch settings that the implementation does not restore, and restore them.

    Otherwise a later call would be judged under the settings that this one left.
    """
    before = torch_settings.values(torch_settings.EVERY)
    yield
    local.left.update(torch_settings.put_back(torch_settings.EVERY, before))


def _view(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return shape, strides, dtype and address of a tensor: they change if the implementation replaces its data."""
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr()


def _unpack(returned: Any, capabilities: Capabilities) -> tuple[Any, Any]:
    if not capabilities.lse:
        return returned, None
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ContractError(f"returned {_kind(returned)}: with lse=True declared, (out, lse) is expected", rule="pair")
    return returned[0], returned[1]


def _check_tensor(
    name: str,
    tensor: Any,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    device: str,
    layout: TensorLayout,
) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ContractError(f"returned {_kind(tensor)} for {name}: a tensor is expected", rule="type", tensor=name)
    if tuple(tensor.shape) != shape:
        raise ContractError(
            f"returned {name} of shape {tuple(tensor.shape)}: {shape} is expected{_swapped(tensor, shape, layout)}",
            rule="shape",
            tensor=name,
        )
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ContractError(
            f"returned {name} in {str(tensor.dtype).removeprefix('torch.')}: {wanted} is expected",
            rule="dtype",
            tensor=name,
        )
    if tensor.device.type != torch.device(device).type:
        raise ContractError(
            f"returned {name} on device {tensor.device}: {device} is expected", rule="device", tensor=name
        )


def _swapped(tensor: torch.Tensor, shape: tuple[int, ...], layout: TensorLayout) -> str:
    """Return a hint for the message if the axes of heads and tokens are swapped, else an empty string."""
    if len(shape) != 4 or tuple(tensor.shape) != (shape[0], shape[2], shape[1], shape[3]):
        return ""
    other = "bshd" if layout == "bhsd" else "bhsd"
    return f'. Heads and tokens are swapped: return out.transpose(1, 2), or declare tensor_layout="{other}"'


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _gradients(
    results: list[torch.Tensor], leaves: tuple[torch.Tensor, ...], cotangents: list[torch.Tensor], keep: bool
) -> tuple[torch.Tensor, ...]:
    """Take gradients by autograd; an input that no result depends on has gradient zero."""
    attached = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    if len(attached) < len(results) and any(leaf.numel() for leaf in leaves if leaf.dim() > 1):  # sinks are no tokens
        raise ContractError(
            "returned a result that is not attached to q, k and v by autograd: make it differentiable, or declare "
            "gradients=False",
            rule="detached",
        )
    if not attached:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    found = torch.autograd.grad(
        [r for r, _ in attached], leaves, [c for _, c in attached], allow_unused=True, retain_graph=keep
    )
    return tuple(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True))


def _copy(tensor: torch.Tensor | None, swap: bool) -> Array | None:
    if tensor is None:
        return None
    exact = tensor.detach().to(device="cpu", dtype=torch.float64)
    copied: Array = np.array((exact.transpose(1, 2) if swap else exact).numpy())
    return copied


def _same(now: Any, told: Any) -> bool:
    """Return whether a field of the call is unchanged; objects whose `==` cannot be trusted must be identical."""
    if isinstance(told, torch.Tensor):
        return isinstance(now, torch.Tensor) and now.dtype is told.dtype and torch.equal(now, told)
    return now is told or (type(now) is type(told) and isinstance(told, (int, str, Problem)) and bool(now == told))


ROUNDED = 2 * UNIT_ROUNDOFF["bfloat16"]
"""Relative difference up to which factors are one, in any dtype."""


def _factor(now: torch.Tensor, before: torch.Tensor) -> float | None:
    """Return the one number by which the elements of a buffer that are others now were multiplied, if there is one."""
    if now.shape != before.shape:
        return None
    there = (now != before) & (before != 0) & before.isfinite() & now.isfinite()
    if not there.any():
        return None
    ratios = now[there].detach().double() / before[there].double()
    middle = float(ratios.median())
    return middle if bool(((ratios - middle).abs() <= ROUNDED * abs(middle)).all()) else None


def _same_bits(now: torch.Tensor, before: torch.Tensor) -> bool:
    if torch.equal(now, before):
        return True
    same = (now == before) | (now.isnan() & before.isnan())
    return bool(same.all())
