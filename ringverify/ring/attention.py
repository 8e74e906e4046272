"""Sequence-parallel attention to call: one function for every method, sharding and pattern.

Shape letters: B batch, S this rank's queries, T this rank's keys, H query heads, K key heads, D head_dim, E value_dim.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from jaxtyping import Float

from ringref.problem import Dilation, Problem
from ringref.sharding import Sharding
from ringverify.ring.agreement import (
    REFUSED,
    check_agreement,
    known_without_sinks,
    refusal_of,
    sharding_term,
    terms_of,
    terms_of_sinks,
)
from ringverify.ring.aligned import aligned, where_it_lies
from ringverify.ring.autograd import Attention
from ringverify.ring.calls import (
    Call,
    Engine,
    Inputs,
    SinkGradient,
    autocast_dtype,
    check_dropout,
    check_sharding,
    inputs_of,
    lengths_of,
    prepare,
    problem_of,
    warn_of_positions_without_a_document,
)
from ringverify.ring.compute import FEW_QUERIES
from ringverify.ring.group import Ring
from ringverify.ring.layouts import TensorLayout, check_not_mixed_up, hinted, relaid
from ringverify.ring.method import MethodName
from ringverify.ring.torch_private import disable_dynamo
from ringverify.ring.transport import TransportName

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

P = ParamSpec("P")
R = TypeVar("R")


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """For a model that is compiled: one graph break a call, where dynamo would trace the hops and compile pieces.

    `torch.compiler.disable` says the same, but imports dynamo, for seconds, in programs that never compile.
    """
    untraced: Callable[P, R] = disable_dynamo(function)

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
    layout: TensorLayout = "bshd",
    query_length: int | None = None,
    key_length: int | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    documents: Sequence[int] | torch.Tensor | None = None,
    key_lengths: Sequence[int] | torch.Tensor | None = None,
    dilation: Dilation | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[torch.Tensor, " H"] | None = None,
    sink_gradient: SinkGradient = "partial",
    dropout_p: float = 0.0,
    return_lse: bool = False,
    method: MethodName = "ring",
    transport: TransportName = "p2p",
    kernel: str = "auto",
    memory_budget: int | None = None,
    check_shards: bool | None = None,
    explain: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's queries to the keys of all ranks of a group, differentiable.

    Args:
        q: this rank's queries, `(B, S, H, D)` or as `layout` says, however they lie in memory.
        k: this rank's keys `(B, T, K, D)`, likewise; K divides H.
        v: this rank's values `(B, T, K, E)`, likewise.
        group: the process group that is the ring, or a one-dimensional `DeviceMesh`; `None` is the default group, or
            this process alone where torch.distributed is not initialised.
        sharding: which rank holds which positions: contiguous, zigzag, striped, replicated_query,
            zigzag_documents (balanced for packed documents), a function `(length, world_size) -> positions of each
            rank`, `ringverify.balancer` of a function `(documents, world_size) -> positions of each rank`, a
            `PageTable`, or a `QueryKeySharding` where queries lie otherwise than keys, as while decoding.
        layout: order of the axes of q, k, v and out: "bshd", or "bhsd" as in `scaled_dot_product_attention`. A view
            made by `transpose(1, 2)` of the other is not copied.
        query_length: queries over all ranks; `None` means that all ranks hold as many as this one, which is
            checked, see `check_shards`.
        key_length: keys over all ranks, likewise.
        causal: query i attends key j only if `j <= i + (key_length - query_length)`.
        window: `(left, right)`, both ends inclusive; `None` on a side is unbounded.
        documents: cumulative document lengths (`cu_seqlens`) of the whole sequence. Rank 0 warns where they do not
            start at 0 or end at its length: positions outside all of them attend nothing.
        key_lengths: number of valid keys of each batch element, of the whole sequence.
        dilation: branches of segment lengths and dilation rates.
        scale: factor on `q·k`; `None` means `D ** -0.5`.
        softcap: c turns a score s into `c · tanh(s / c)`.
        sinks: learned sinks `(H,)`, float32, the same on all ranks: a logit a query head that joins the denominator of
            each of its rows once and carries no value; −inf is none. NaN and +inf are refused on CPU. `check_shards`
            compares them, and whether a rank has any, by default on CPU and not on CUDA.
        sink_gradient: "partial": the gradient of sinks covers this rank's queries; training that sums gradients of all
            parameters over the ranks then gets the whole. "whole": the backward all-reduces it. The same on all
            ranks, and compared with the sinks.
        dropout_p: only 0.0 is supported.
        return_lse: return `(out, lse)` instead of out.
        method: ring passes keys and values on hop by hop, or in a forward pass queries and their partial results where
            these are fewer bytes; allgather gathers keys and values on every rank, which holds those of all ranks then.
            Where no query needs a key of another rank, nothing is sent.
        transport: p2p posts a hop's messages together and computes meanwhile; blocking uses plain send and recv.
        kernel: what computes a tile; auto chooses by device, dtype and shape.
        memory_budget: bytes for what is worked on at a time: a tile's scores, its mask and what it returns. Inputs,
            outputs, blocks and gradients on their way come on top. Tiles have at least 32 rows and keys, even where
            that takes more. Each rank may have its own.
        check_shards: compare the ranks' calls before anything else is sent, by gathering three integers of each rank,
            and raise on all of them if they differ in a length, a dtype, the pattern, the sharding, the sinks, the
            method or autocast, or if one of them refuses its call, for the shape of its shard say. `None` compares on
            CPU, but for calls without gradients (`torch.no_grad`), sinks and inferred lengths, such as those that
            decode, where a message is a part of the time, in a group that has compared calls, none of them with sinks;
            not on CUDA, where reading the answer would stall the device: there, ask for it with True, at least while
            you set things up, or else ranks that differ exchange garbage, hang, die, or compute with other sinks than
            one another. False never compares. The same on all ranks. If an input of some rank requires a gradient, out
            then requires one on every rank that was compared (not under `torch.no_grad`), so that every rank runs its
            part of backward; without the comparison some input of every rank has to.
        explain: say on standard error, on rank 0, what the method exchanges, and which kernel was chosen and why.

    Returns:
        out `(B, S, H, E)`, or as `layout` says, in the dtype of q, and with `return_lse` lse `(B, H, S)`, natural
        logarithm, float64 for float64 inputs and float32 otherwise. For bfloat16 inputs on CPU it is exact to 1e-4,
        because the fused op's exp is; `kernel="streaming"` computes it to float32's rounding. A query that attends
        nothing has out 0, lse −inf and gradients 0; one that only attends keys of score −inf, that out and lse. Under
        `torch.autocast` q, k and v are cast as for `scaled_dot_product_attention`: all but float64, to its dtype, in
        which out is; gradients are in the dtypes of what was given. The same inputs give the same bits on any schedule;
        gradients on CUDA, where torch's fused backwards add up in any order, only under
        `torch.use_deterministic_algorithms(True)`.

    Raises:
        ValueError: the inputs do not fit each other or the arguments, raised before any communication; or ranks that
            were compared differ, raised on all of them, the same everywhere.
        RuntimeError: on differentiating a gradient again, which is not supported.
    """
    ring = Ring.of(group)
    pattern: dict[str, Any] = {
        "causal": causal, "window": window, "documents": documents, "key_lengths": key_lengths, "dilation": dilation,
        "scale": scale, "softcap": softcap, "sinks": sinks is not None,
    }  # fmt: skip
    engine = Engine(method, transport, kernel, memory_budget, sink_gradient=sink_gradient)
    device = q.device if isinstance(q, torch.Tensor) else torch.device("cpu")
    if check_shards is None:
        complete = query_length is not None and key_length is not None and sinks is None
        quick = complete and not torch.is_grad_enabled() and known_without_sinks(ring)
        check_shards = device.type == "cpu" and not quick
    compared = check_shards and ring.world_size > 1
    gradient = torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v, sinks)
    )
    elsewhere = False
    refusal: Exception | None = None
    terms = {"method": str(method), "autocast": str(autocast_dtype(device.type) or "off")}
    try:
        check_dropout(dropout_p)
        inputs = inputs_of(q, k, v, layout)

        def prepared(inputs: Inputs, terms: dict[str, str]) -> Call:
            lengths = lengths_of(inputs, query_length, key_length, sharding, ring.world_size)
            terms |= {name: str(length) for name, length in lengths.items()}
            if query_length is None and key_length is None:
                check_not_mixed_up(inputs[0], inputs[1], layout)
            problem = problem_of(inputs, lengths, pattern)
            terms |= terms_of(problem)
            check_sharding(sharding)
            if compared:
                where = sharding, problem.nq, problem.nk, ring.world_size, problem.documents
                terms["sharding"] = sharding_term(*where)
            call = prepare(inputs, sinks, problem=problem, sharding=sharding, ring=ring, engine=engine, layout=layout)
            if compared and sinks is not None:
                terms |= terms_of_sinks(sinks, sink_gradient)
            return call

        try:
            call = prepared(inputs, terms)
        except ValueError as error:
            raise hinted(error, inputs, layout, lambda exchanged: prepared(exchanged, {})) from None
        if ring.rank == 0:
            warn_of_positions_without_a_document(call.job.plan.problem)
    except Exception as error:  # whatever keeps one rank from its call, the others have to hear of it
        refusal = error
        terms[REFUSED] = refusal_of(error)
    if compared:
        try:
            elsewhere = check_agreement(ring, terms, device, gradient=gradient)
        except ValueError as error:
            raise error from refusal
    if refusal is not None:
        raise refusal
    out, lse = _compute(call, explain=explain, takes_part=elsewhere and not gradient)
    out = relaid(out, layout)
    return (out, lse) if return_lse else out


def attend(
    q: Float[torch.Tensor, "B S H D"],
    k: Float[torch.Tensor, "B T K D"],
    v: Float[torch.Tensor, "B T K E"],
    *,
    problem: Problem,
    sharding: Sharding,
    ring: Ring,
    engine: Engine,
    sinks: Float[torch.Tensor, " H"] | None = None,
) -> tuple[Float[torch.Tensor, "B S H E"], Float[torch.Tensor, "B H S"]]:
    """`ring_attention` of a problem that is already written down; returns out and lse.

    Raises:
        ValueError: the inputs do not fit the problem; raised before any communication.
    """
    return _compute(prepare((q, k, v), sinks, problem=problem, sharding=sharding, ring=ring, engine=engine))


def _compute(call: Call, *, explain: bool = False, takes_part: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a call that has been checked; with `takes_part` they require a gradient although no input does."""
    job = call.job
    if explain and job.plan.rank == 0:
        for line in call.explanation:
            print(f"ring_attention: {line}", file=sys.stderr)
    q, k, v = call.inputs
    # So that the same numbers in another layout, or elsewhere in memory, give the same bits.
    differentiated = takes_part or (torch.is_grad_enabled() and any(x.requires_grad for x in call.inputs))
    read = where_it_lies if not differentiated and job.plan.problem.nq <= FEW_QUERIES else aligned
    inputs = aligned(q), read(k), read(v)
    for_others = torch.zeros((), requires_grad=True) if takes_part else None
    out, lse = Attention.apply(*inputs, call.sinks, for_others, job, call.method, call.whole)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return out, lse
