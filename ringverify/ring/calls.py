"""A call as it is made: inputs, problem and settings, and all that is refused before anything is sent.

Shape letters: B batch, S this rank's queries, T this rank's keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

import torch

from ringref.problem import DTYPES, Problem
from ringref.sharding import SHARDING_NAMES, Sharding, replicates_queries
from ringverify.ring.compute import Job
from ringverify.ring.group import Ring
from ringverify.ring.kernels.choose import choose_kernel
from ringverify.ring.kernels.kernel import Setting
from ringverify.ring.layouts import AXES, TensorLayout, check_layout, in_layout, relaid
from ringverify.ring.method import METHODS, Method, MethodName, method_of
from ringverify.ring.plan.plan import Plan, make_plan
from ringverify.ring.sides import make_sides
from ringverify.ring.transport import TRANSPORTS, Transport, TransportName

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q `(B, S, H, D)`, k `(B, T, K, D)` and v `(B, T, K, E)`."""
SinkGradient = Literal["partial", "whole"]
"""Whether a rank's gradient of sinks covers its own queries, or those of all ranks."""
ACCUMULATES = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}
"""Input dtype to the dtype of running sums, log-sum-exps and travelling gradients."""


def check_dropout(dropout_p: float) -> None:
    """Refuse dropout.

    Raises:
        ValueError: a probability other than 0.
    """
    if dropout_p:
        raise ValueError(
            f"dropout_p={dropout_p!r}: ring attention has no dropout, because its mask would have to be the same on "
            "every rank, forward and backward; use dropout_p=0.0 and drop in the layers around it"
        )


def inputs_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: TensorLayout) -> Inputs:
    """q, k and v of a layout as the ring computes with them: in "bshd", and cast where autocast is on.

    Raises:
        ValueError: the layout is unknown, or one of them is no dense tensor of four axes and a supported dtype.
    """
    check_layout(layout)
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} is of type {type(x).__name__}: expected a tensor")
        if x.layout != torch.strided:
            raise ValueError(f"{name} is {x.layout}: expected a dense tensor")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: expected ({AXES[layout]})")
        if x.dtype not in ACCUMULATES:
            raise ValueError(f"{name} is {x.dtype}: expected one of {', '.join(DTYPES)}")
    lower = autocast_dtype(q.device.type)

    def cast(x: torch.Tensor) -> torch.Tensor:
        # As autocast does for scaled_dot_product_attention: all floating-point arguments but float64.
        return relaid(x if lower is None or x.dtype == torch.float64 else x.to(lower), layout)

    return cast(q), cast(k), cast(v)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of autocast on devices of a type; `None` if it is off there."""
    on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if on else None


def lengths_of(
    inputs: Inputs, query_length: int | None, key_length: int | None, sharding: Sharding, world_size: int
) -> dict[str, int]:
    """Both lengths over all ranks, by the names of the arguments: as given, or taken to be that of equal shards."""
    q, k, _ = inputs
    everywhere = 1 if replicates_queries(sharding) else world_size
    return {
        "query_length": q.size(1) * everywhere if query_length is None else query_length,
        "key_length": k.size(1) * world_size if key_length is None else key_length,
    }


def problem_of(inputs: Inputs, lengths: Mapping[str, int], pattern: Mapping[str, Any]) -> Problem:
    """What is to be computed; `pattern` holds the fields that the tensors do not say.

    Raises:
        ValueError: a value is out of range, or a combination has no meaning.
    """
    q, k, v = inputs
    return Problem(
        batch=q.size(0),
        heads=q.size(2),
        key_heads=k.size(2),
        head_dim=q.size(3),
        value_dim=v.size(3),
        dtype=str(q.dtype).removeprefix("torch."),  # type: ignore[arg-type]  # checked before
        query_length=lengths["query_length"],
        key_length=lengths["key_length"],
        **pattern,
    )


def warn_of_positions_without_a_document(problem: Problem) -> None:
    """Warn, saying which positions no document holds, unless `key_lengths` says that they are padding."""
    if problem.documents is None or not problem.nq:
        return
    start, end, length = problem.documents[0], problem.documents[-1], problem.nq
    padding = problem.key_lengths is not None and max(problem.key_lengths) <= end
    said = [f"start at {start}: positions 0 to {start - 1}"] * (start > 0)
    said += [f"end at {end} and the sequence at {length}: positions {end} to {length - 1}"] * (
        end < length and not padding
    )
    if said:
        warnings.warn(
            f"documents {', and '.join(said)} lie in no document, attend nothing and have out 0; documents are "
            f"cumulative lengths from 0 to query_length, such as (0, …, {length}); key_lengths says what is padding",
            stacklevel=4,
        )


class Call(NamedTuple):
    """A call that nothing keeps from being computed.

    Attributes:
        inputs: q, k and v.
        job: what is to be computed, and by which kernel.
        method: how the ranks compute it together.
        explanation: a line on the method and one on the kernel.
        sinks: learned sinks `(H,)`, or `None`.
        whole: whether their gradient is summed over the ranks.
    """

    inputs: Inputs
    job: Job
    method: Method
    explanation: tuple[str, str]
    sinks: torch.Tensor | None = None
    whole: bool = False


class Engine(NamedTuple):
    """How a call is computed; see `ring_attention`.

    Attributes:
        method: ring or allgather.
        transport: p2p or blocking.
        kernel: what computes a tile, or auto.
        memory_budget: bytes.
        deterministic: the same inputs give the same bits on every device, whatever torch is set to.
        sink_gradient: partial or whole.
    """

    method: MethodName = "ring"
    transport: TransportName = "p2p"
    kernel: str = "auto"
    memory_budget: int | None = None
    deterministic: bool = False
    sink_gradient: SinkGradient = "partial"


def prepare(
    inputs: Inputs,
    sinks: torch.Tensor | None = None,
    *,
    problem: Problem,
    sharding: Sharding,
    ring: Ring,
    engine: Engine,
    layout: TensorLayout = "bshd",
) -> Call:
    """The call, with all that can be refused without communication refused.

    Args:
        inputs: this rank's shards.
        sinks: learned sinks `(H,)`, where the problem has them.
        problem: what to compute.
        sharding: which rank holds which positions.
        ring: the group.
        engine: how to compute it.
        layout: in which messages show shapes.

    Raises:
        ValueError: the inputs do not fit the problem, or a setting is unknown or out of range.
    """
    if engine.transport not in TRANSPORTS:
        raise ValueError(f"transport={engine.transport!r}: expected {' or '.join(TRANSPORTS)}")
    if engine.method not in METHODS:
        raise ValueError(f"method={engine.method!r}: expected {' or '.join(METHODS)}")
    if engine.sink_gradient not in get_args(SinkGradient):
        raise ValueError(f"sink_gradient={engine.sink_gradient!r}: expected {' or '.join(get_args(SinkGradient))}")
    check_sharding(sharding)
    plan = make_plan(problem, sharding, ring.world_size, ring.rank)
    q, k, v = inputs
    _check(q, k, v, plan, layout)
    _check_sinks(sinks, plan, q.device)
    setting = Setting(
        q.device.type,
        q.dtype,
        ACCUMULATES[q.dtype],
        problem.head_dim,
        problem.dv,
        problem.scale_value,
        problem.softcap,
        engine.deterministic,
        plan.query_count * plan.key_count(ring.rank),
    )
    kernel, why = choose_kernel(engine.kernel, setting)
    method, exchanged = method_of(engine.method, plan)
    job = Job(
        plan,
        setting,
        kernel,
        make_sides(problem, setting, kernel, plan.query_count, plan.key_count(ring.rank), engine.memory_budget),
        Transport(ring.group, ring.rank, ring.world_size, engine.transport, q.device),
        sharding,
        None if sinks is None else sinks.detach(),
    )
    explanation = f"method {engine.method}: {exchanged}", f"kernel {kernel.name}: {why}"
    return Call(inputs, job, method, explanation, sinks, engine.sink_gradient == "whole")


def check_sharding(sharding: object) -> None:
    """Refuse a sharding that cannot be hashed.

    Raises:
        ValueError: plans could not be kept by it.
    """
    try:
        hash(sharding)
    except TypeError:
        raise ValueError(
            f"sharding of type {type(sharding).__name__}: expected {', '.join(SHARDING_NAMES)}, or a function, and one "
            "that can be hashed, because plans are kept by it"
        ) from None


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, layout: TensorLayout) -> None:
    problem, rank, size = plan.problem, plan.rank, plan.world_size
    for name, tensor, shape in (
        ("q", q, (problem.batch, plan.query_count, problem.heads, problem.head_dim)),
        ("k", k, (problem.batch, plan.key_count(rank), problem.hk, problem.head_dim)),
        ("v", v, (problem.batch, plan.key_count(rank), problem.hk, problem.dv)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} has shape {in_layout(tuple(tensor.shape), layout)} on rank {rank} of {size}: expected "
                f"{in_layout(shape, layout)}, that is ({AXES[layout].replace('sequence', 'positions of this rank')}) "
                f"for {problem.nq} queries and {problem.nk} keys in all; shards of unequal length need query_length "
                "and key_length"
            )
        # Checked against the problem, which all ranks share: were two ranks to differ, messages would not fit.
        if str(tensor.dtype) != f"torch.{problem.dtype}":
            reason = "as the problem says" if name == "q" else "the dtype of q"
            if autocast_dtype(q.device.type) is not None:
                reason += "; autocast casts all but float64"
            raise ValueError(f"{name} is {tensor.dtype} on rank {rank}: expected {problem.dtype}, {reason}")
        if tensor.device != q.device:
            raise ValueError(f"{name} is on {tensor.device} and q on {q.device}: expected one device")


def _check_sinks(sinks: torch.Tensor | None, plan: Plan, device: torch.device) -> None:
    heads, where = plan.problem.heads, f"on rank {plan.rank} of {plan.world_size}"
    if sinks is None:
        if plan.problem.sinks:
            raise ValueError(f"sinks=None {where}: the problem has learned sinks, a tensor ({heads},)")
        return
    if not isinstance(sinks, torch.Tensor):
        raise ValueError(f"sinks is of type {type(sinks).__name__} {where}: expected a tensor")
    if tuple(sinks.shape) != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)} {where}: expected ({heads},), one for each query head")
    if sinks.dtype != torch.float32:
        raise ValueError(f"sinks is {sinks.dtype} {where}: expected float32; sinks.float() has the gradient too")
    if sinks.device != device:
        raise ValueError(f"sinks is on {sinks.device} and q on {device}: expected one device")
    if device.type == "cpu":  # elsewhere, reading them would wait for the device
        for head, sink in enumerate(sinks.tolist()):
            if not sink < math.inf:
                raise ValueError(
                    f"sinks[{head}] is {sink} {where}: expected finite numbers, or -inf for a head without a sink"
                )
