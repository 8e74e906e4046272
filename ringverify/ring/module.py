"""Sequence-parallel attention as a module: configured once, called like a function, without parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ringref.problem import Dilation, Problem
from ringref.sharding import Sharding, key_positions
from ringverify.ring.attention import ring_attention
from ringverify.ring.calls import SinkGradient, check_dropout
from ringverify.ring.layouts import TensorLayout, check_layout
from ringverify.ring.method import MethodName
from ringverify.ring.transport import TransportName

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEFAULTS = {name: parameter.default for name, parameter in inspect.signature(ring_attention).parameters.items()}
"""What is left out of a module's text: settings at the default of `ring_attention`."""

_LEFT_BEHIND = object()
"""In place of the group in a module that came out of a pickle."""


class RingAttention(nn.Module):
    """Attention of this rank's queries to the keys of all ranks of a group: `ring_attention`, configured once.

    It has no parameters and no buffers, and its state dict is empty, so that it can be put in place of the attention of
    a trained model. All ranks of the group call it together, forward and backward.

    A copy (`copy.deepcopy` included) shares the process group, which is a set of connections and cannot be doubled. A
    pickle, `torch.save` of a whole model included, keeps the settings and leaves the group behind: the module that
    comes out raises until its `group` has been set, rather than run in another one. A module of the default group
    (`group=None`) is pickled whole, and then means the default group of the process that loads it.

    Args:
        group: the process group that is the ring, or a one-dimensional `DeviceMesh`; `None` is the default group, or
            this process alone where torch.distributed is not initialised.
        sharding: which rank holds which positions: contiguous, zigzag, striped, replicated_query,
            zigzag_documents (balanced for packed documents), a function `(length, world_size) -> positions of each
            rank`, `ringverify.balancer` of a function `(documents, world_size) -> positions of each rank`, a
            `PageTable`, or a `QueryKeySharding` where queries lie otherwise than keys, as while decoding.
        layout: order of the axes of q, k, v and out: "bshd", or "bhsd" as in `scaled_dot_product_attention`.
        causal: query i attends key j only if `j <= i + (key_length - query_length)`.
        window: `(left, right)`, both ends inclusive; `None` on a side is unbounded.
        dilation: branches of segment lengths and dilation rates.
        scale: factor on `q·k`; `None` means `D ** -0.5`.
        softcap: c turns a score s into `c · tanh(s / c)`.
        sink_gradient: "partial": the gradient of sinks covers this rank's queries; "whole": it is summed over ranks.
        dropout_p: only 0.0 is supported.
        return_lse: return `(out, lse)` instead of out.
        method: ring passes keys and values, or few queries, on hop by hop; allgather gathers keys and values on every
            rank.
        transport: p2p posts a hop's messages together and computes meanwhile; blocking uses plain send and recv.
        kernel: what computes a tile; auto chooses by device, dtype and shape.
        memory_budget: bytes for a tile, its mask and results, beside inputs, outputs and what is on its way.
        check_shards: compare the ranks' calls before anything else is sent, and raise on all of them if they differ or
            one of them refuses its call, for the shape or the dtype of its shard say; `None` does so on CPU, but for
            calls without gradients, sinks and inferred lengths after a first one. On CUDA it stalls the device.
        explain: say on standard error, on rank 0, what the method exchanges, and which kernel was chosen and why.

    Raises:
        ValueError: the sharding or the layout is unknown, the pattern has no meaning, dropout is asked for, or the mesh
            has several dimensions; raised on construction. Settings of the engine (method, transport, kernel, …) are
            judged by the first call.
    """

    def __init__(
        self,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        sharding: Sharding = "contiguous",
        layout: TensorLayout = "bshd",
        causal: bool = False,
        window: tuple[int | None, int | None] | None = None,
        dilation: Dilation | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sink_gradient: SinkGradient = "partial",
        dropout_p: float = 0.0,
        return_lse: bool = False,
        method: MethodName = "ring",
        transport: TransportName = "p2p",
        kernel: str = "auto",
        memory_budget: int | None = None,
        check_shards: bool | None = None,
        explain: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(sharding, str):
            key_positions(sharding, 0, 1)  # raises for a name that is none
        check_layout(layout)
        check_dropout(dropout_p)
        Problem(query_length=1, causal=causal, window=window, dilation=dilation, scale=scale, softcap=softcap)
        if isinstance(group, DeviceMesh) and group.ndim != 1:
            raise ValueError(
                f"a DeviceMesh of {group.ndim} dimensions {group.mesh_dim_names}: the ring needs one; "
                "pass the mesh of that dimension, mesh[name]"
            )
        self._group: Any = group
        self.settings: dict[str, Any] = {
            "sharding": sharding, "layout": layout, "causal": causal, "window": window, "dilation": dilation,
            "scale": scale, "softcap": softcap, "sink_gradient": sink_gradient, "dropout_p": dropout_p,
            "return_lse": return_lse, "method": method, "transport": transport, "kernel": kernel,
            "memory_budget": memory_budget, "check_shards": check_shards, "explain": explain,
        }  # fmt: skip

    @property
    def group(self) -> ProcessGroup | DeviceMesh | None:
        """The ring. To be set on a module that came out of a pickle.

        Raises:
            RuntimeError: it was left behind in the process that pickled this module.
        """
        if self._group is _LEFT_BEHIND:
            raise RuntimeError(
                "this RingAttention came out of a pickle, which cannot hold its process group: set module.group to the "
                "group (or DeviceMesh) that is the ring in this process, or to None for the default group"
            )
        group: ProcessGroup | DeviceMesh | None = self._group
        return group

    @group.setter
    def group(self, group: ProcessGroup | DeviceMesh | None) -> None:
        self._group = group

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        query_length: int | None = None,
        key_length: int | None = None,
        documents: Sequence[int] | torch.Tensor | None = None,
        key_lengths: Sequence[int] | torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of this rank's queries to the keys of all ranks.

        Args:
            q: this rank's queries, `(B, S, H, D)` or as `layout` says, however they lie in memory.
            k: this rank's keys `(B, T, K, D)`, likewise; K divides H.
            v: this rank's values `(B, T, K, E)`, likewise.
            query_length: queries over all ranks; `None` means that all ranks hold as many as this one, which is
                checked, see `check_shards`.
            key_length: keys over all ranks, likewise.
            documents: cumulative document lengths (`cu_seqlens`) of the whole sequence.
            key_lengths: number of valid keys of each batch element, of the whole sequence.
            sinks: learned sinks `(H,)`, float32, the same on all ranks; a parameter of the model around this module.

        Returns:
            out `(B, S, H, E)`, or as `layout` says, in the dtype of q (under autocast, in its dtype), and with
            `return_lse` lse `(B, H, S)`, natural logarithm, float64 for float64 inputs and float32 otherwise; for
            bfloat16 inputs on CPU it is exact to 1e-4. A query that attends nothing has out 0, lse −inf and gradients
            0; one that only attends keys of score −inf, that out and lse.

        Raises:
            ValueError: the inputs do not fit each other or the settings, raised before any communication; or ranks that
                were compared differ, raised on all of them.
            RuntimeError: this module came out of a pickle and its group has not been set.
        """
        return ring_attention(
            q,
            k,
            v,
            group=self.group,
            query_length=query_length,
            key_length=key_length,
            documents=documents,
            key_lengths=key_lengths,
            sinks=sinks,
            **self.settings,
        )

    def extra_repr(self) -> str:
        """The settings that are not the default, and the ring if it is not the default group."""
        shown = {name: value for name, value in self.settings.items() if value != DEFAULTS[name]}
        match self._group:
            case None:
                pass
            case group if group is _LEFT_BEHIND:
                shown["group"] = "left behind by a pickle"
            case DeviceMesh() as mesh:
                shown["group"] = f"DeviceMesh of {mesh.size()} ranks"
            case group:
                shown["group"] = f"{type(group).__name__} of {group.size()} ranks"
        return ", ".join(f"{name}={value}" for name, value in shown.items())

    def __copy__(self) -> RingAttention:
        twin = self.__class__.__new__(self.__class__)
        twin.__dict__.update(self.__dict__, settings=dict(self.settings))
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> RingAttention:
        memo[id(self._group)] = self._group  # connections are shared, not doubled
        twin = memo[id(self)] = self.__class__.__new__(self.__class__)
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_group": None, "_has_group": self._group is not None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("_has_group"):
            state["_group"] = _LEFT_BEHIND
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
