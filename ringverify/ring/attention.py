"""Sequence-parallel attention to call: one function for every method, sharding and pattern.

Shape letters: B batch, S this rank's queries, T this rank's keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from jaxtyping import Float
from torch._compile import _disable_dynamo

from ringref.problem import DTYPES, Dilation, Problem
from ringref.sharding import SHARDINGS, Sharding, key_positions, query_positions
from ringverify.ring import allgather, passes, replicated
from ringverify.ring.agreement import check_agreement, terms_of
from ringverify.ring.aligned import aligned
from ringverify.ring.autograd import Attention
from ringverify.ring.choosing import METHODS, Method, choose_method
from ringverify.ring.compute import Job
from ringverify.ring.group import Ring
from ringverify.ring.kernels.choose import choose_kernel
from ringverify.ring.kernels.kernel import Setting
from ringverify.ring.plan import Plan, make_plan
from ringverify.ring.sides import make_sides
from ringverify.ring.transport import Transport, TransportName

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

TRANSPORTS = ("p2p", "blocking")
P = ParamSpec("P")
R = TypeVar("R")


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """For a model that is compiled: one graph break a call, where dynamo would trace the hops and compile pieces.

    `torch.compiler.disable` says the same, but imports dynamo, for seconds, in programs that never compile.
    """
    untraced: Callable[P, R] = _disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return (untraced if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


@_untraced
def ring_attention(
    q: Float[torch.Tensor, "B S H D"],
    k: Float[torch.Tensor, "B T K D"],
    v: Float[torch.Tensor, "B T K E"],
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    sharding: Sharding = "contiguous",
    query_length: int | None = None,
    key_length: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    documents: Sequence[int] | torch.Tensor | None = None,
    key_lengths: Sequence[int] | torch.Tensor | None = None,
    dilation: Dilation | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    method: Method = "ring",
    transport: TransportName = "p2p",
    kernel: str = "auto",
    memory_budget: int | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
    check_shards: bool | None = None,
    explain: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks of a group, differentiable.

    Args:
        q: this rank's queries `(B, S, H, D)`, in any memory layout.
        k: this rank's keys `(B, T, K, D)`; K divides H.
        v: this rank's values `(B, T, K, E)`.
        group: the process group that is the ring, or a one-dimensional `DeviceMesh`; `None` is the default group, or
            this process alone where torch.distributed is not initialised.
        sharding: which rank holds which positions: contiguous, zigzag, striped, replicated_query, or a function
            `(length, world_size) -> positions of each rank`.
        query_length: queries over all ranks; `None` means that all ranks hold as many as this one, which is
            checked, see `check_shards`.
        key_length: keys over all ranks, likewise.
        causal: query i attends key j only if `j <= i + (key_length - query_length)`.
        window: `(left, right)`, both ends inclusive; `None` on a side is unbounded.
        documents: cumulative document lengths (`cu_seqlens`) of the whole sequence.
        key_lengths: number of valid keys of each batch element, of the whole sequence.
        dilation: branches of segment lengths and dilation rates.
        scale: factor on `q·k`; `None` means `D ** -0.5`.
        softcap: c turns a score s into `c · tanh(s / c)`.
        dropout_p: only 0.0 is supported.
        return_lse: return `(out, lse)` instead of out.
        method: ring, allgather, local, or auto, which chooses.
        transport: p2p posts a hop's messages together and computes meanwhile; blocking uses plain send and recv.
        kernel: what computes a tile; auto chooses by device, dtype and shape.
        memory_budget: bytes for what is worked on at a time: a tile's scores, its mask and what it returns; and for
            keys that `method="auto"` may gather, for which it is the same on all ranks. Inputs, outputs, blocks and
            gradients on their way come on top. Tiles have at least 32 rows and keys, even where that takes more.
        bandwidth: bytes a second between two neighbours, for `method="auto"`, the same on all ranks; `None` assumes it.
        latency: seconds of a hop that carries next to nothing, likewise.
        check_shards: compare the ranks' calls before anything else is sent, by gathering two integers a rank, and raise
            on all of them if they differ in a length, the pattern, the sharding or what `method="auto"` depends on.
            `None` compares on CPU where a length is not given or the method is auto; not on CUDA, where reading the
            answer would stall the device: there, ask for it with True, at least while you set things up, or else ranks
            that differ exchange garbage, hang or die. False never compares. The same on all ranks.
        explain: say on standard error, on rank 0, which method and kernel were chosen and why.

    Returns:
        out `(B, S, H, E)` in the dtype of q, and with `return_lse` lse `(B, H, S)`, natural logarithm, float64 for
        float64 inputs and float32 otherwise. A query that attends nothing has out 0, lse −inf and gradients 0. The same
        inputs give the same bits on any schedule; gradients on CUDA, where torch's fused backwards add up in any order,
        only under `torch.use_deterministic_algorithms(True)`.

    Raises:
        ValueError: the inputs do not fit each other or the arguments, raised before any communication; or ranks that
            were compared differ, raised on all of them, the same everywhere.
        RuntimeError: on differentiating a gradient again, which is not supported.
    """
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p!r}: ring attention has no dropout, because its mask would have to be the same on "
            "every rank, forward and backward; use dropout_p=0.0 and drop in the layers around it"
        )
    ring = Ring.of(group)
    lengths: dict[str, int] = {}
    call: Problem | ValueError
    try:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != 4:
                raise ValueError(f"{name} has shape {tuple(x.shape)}: expected (batch, sequence, heads, head_dim)")
            if x.dtype not in ACCUMULATES:
                raise ValueError(f"{name} is {x.dtype}: expected one of {', '.join(DTYPES)}")
        everywhere = 1 if sharding == "replicated_query" else ring.world_size
        lengths["query_length"] = q.size(1) * everywhere if query_length is None else query_length
        lengths["key_length"] = k.size(1) * ring.world_size if key_length is None else key_length
        call = Problem(
            batch=q.size(0),
            query_length=lengths["query_length"],
            key_length=lengths["key_length"],
            heads=q.size(2),
            key_heads=k.size(2),
            head_dim=q.size(3),
            value_dim=v.size(3),
            dtype=str(q.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # checked above
            causal=causal,
            window=window,
            documents=documents,  # type: ignore[arg-type]  # Problem takes any sequence
            key_lengths=key_lengths,  # type: ignore[arg-type]  # likewise
            dilation=dilation,
            scale=scale,
            softcap=softcap,
        )
    except ValueError as error:  # what one rank refuses another may not: they have to hear of it
        call = error
    if check_shards is None:
        check_shards = q.is_cpu and (query_length is None or key_length is None or method == "auto")
    if check_shards and ring.world_size > 1:
        settings: dict[str, object] = {"method": method}
        if method == "auto":
            settings |= {"memory_budget": memory_budget, "bandwidth": bandwidth, "latency": latency}
        check_agreement(ring, terms_of(call, lengths, sharding, settings), q.device)
    if isinstance(call, ValueError):
        raise call
    out, lse = attend(
        q,
        k,
        v,
        problem=call,
        sharding=sharding,
        ring=ring,
        method=method,
        transport=transport,
        kernel=kernel,
        memory_budget=memory_budget,
        bandwidth=bandwidth,
        latency=latency,
        explain=explain,
    )
    return (out, lse) if return_lse else out


ACCUMULATES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""Input dtype to the dtype of running sums, log-sum-exps and travelling gradients."""


def attend(
    q: Float[torch.Tensor, "B S H D"],
    k: Float[torch.Tensor, "B T K D"],
    v: Float[torch.Tensor, "B T K E"],
    *,
    problem: Problem,
    sharding: Sharding,
    ring: Ring,
    method: Method = "ring",
    transport: TransportName = "p2p",
    kernel: str = "auto",
    memory_budget: int | None = None,
    bandwidth: float | None = None,
    latency: float | None = None,
    deterministic: bool = False,
    explain: bool = False,
) -> tuple[Float[torch.Tensor, "B S H E"], Float[torch.Tensor, "B H S"]]:
    """`ring_attention` of a problem that is already written down; returns out and lse.

    With `deterministic` the same inputs give the same bits on every device, whatever torch is set to.

    Raises:
        ValueError: the inputs do not fit the problem; raised before any communication.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r}: expected {' or '.join(TRANSPORTS)}")
    if method not in METHODS:
        raise ValueError(f"method={method!r}: expected {', '.join(METHODS)}")
    _check_settings(sharding, memory_budget)
    plan = make_plan(problem, sharding, ring.world_size, ring.rank)
    _check(q, k, v, plan)
    setting = Setting(
        q.device.type,
        q.dtype,
        ACCUMULATES[q.dtype],
        problem.head_dim,
        problem.dv,
        problem.scale_value,
        problem.softcap,
        deterministic,
    )
    chosen, why = choose_kernel(kernel, setting)
    chosen_method = choose_method(plan, setting, method, memory_budget, bandwidth, latency)
    if explain and ring.rank == 0:
        print(f"ring_attention: method {chosen_method.method}: {chosen_method.reason}", file=sys.stderr)
        print(f"ring_attention: kernel {chosen.name}: {why}", file=sys.stderr)
    sides = make_sides(problem, setting, chosen, plan.query_count, plan.key_count(ring.rank), memory_budget)
    job = Job(
        plan,
        setting,
        chosen,
        sides,
        Transport(ring.group, ring.rank, ring.world_size, transport),
        _positions(plan, sharding, q.device),
    )
    if chosen_method.method == "allgather":
        module: Any = allgather
    else:
        module = replicated if plan.replicated else passes
    # So that the same numbers in another layout, or elsewhere in memory, give the same bits.
    out, lse = Attention.apply(aligned(q), aligned(k), aligned(v), job, module)  # type: ignore[no-untyped-call]  # torch leaves apply untyped
    return out, lse


def _check_settings(sharding: object, memory_budget: object) -> None:
    """Refuse what would be a bare TypeError from within."""
    try:
        hash(sharding)
    except TypeError:
        raise ValueError(
            f"sharding of type {type(sharding).__name__}: expected {', '.join(SHARDINGS)}, or a function, and one that "
            "can be hashed, because plans are kept by it"
        ) from None
    if memory_budget is not None and (isinstance(memory_budget, bool) or not isinstance(memory_budget, Integral)):
        raise ValueError(f"memory_budget={memory_budget!r}: expected a positive number of bytes, an integer, or None")


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan) -> None:
    problem, rank, size = plan.problem, plan.rank, plan.world_size
    for name, tensor, shape in (
        ("q", q, (problem.batch, plan.query_count, problem.heads, problem.head_dim)),
        ("k", k, (problem.batch, plan.key_count(rank), problem.hk, problem.head_dim)),
        ("v", v, (problem.batch, plan.key_count(rank), problem.hk, problem.dv)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} on rank {rank} of {size}: expected {shape}, that is (batch, "
                f"positions of this rank, heads, head_dim) for {problem.nq} queries and {problem.nk} keys in all; "
                "shards of unequal length need query_length and key_length"
            )
        # Checked against the problem, which all ranks share: were two ranks to differ, messages would not fit.
        if str(tensor.dtype) != f"torch.{problem.dtype}":
            raise ValueError(f"{name} is {tensor.dtype} on rank {rank}: expected {problem.dtype}, as the problem says")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: expected one device")


def _positions(
    plan: Plan, sharding: Sharding, device: torch.device
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """Positions of this rank's queries and of every rank's keys, where a mask has to be looked up by them."""
    if not plan.by_position:
        return None
    queries = query_positions(sharding, plan.problem.nq, plan.world_size)[plan.rank]
    keys = key_positions(sharding, plan.problem.nk, plan.world_size)
    return torch.as_tensor(queries, device=device), tuple(torch.as_tensor(one, device=device) for one in keys)
