"""One case for a program outside: what its worker is asked, and its global results cut into those of each rank.

The program shards tensors itself and shows no rank of its own, so a rank here is the part of a result that the sharding
gives to it. Properties, diagnosis and reports then speak of ranks as in every other world.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ringref.problem import DtypeName, Problem
from ringref.sharding import Positions, key_positions, query_positions
from ringverify.cases.case import sharding_of
from ringverify.cases.inputs import make_inputs
from ringverify.cases.local import Array, ContractError, RankResult
from ringverify.cases.tensorfile import NotSafetensors, Tensor, decode, encode
from ringverify.words import cut
from ringverify.worlds.external.messages import Breach, CaseMessage, Result
from ringverify.worlds.external.world import Question

if TYPE_CHECKING:
    from ringverify.cases.running import Task

HEADER = 1 << 16
"""Bytes that the header of a file of results may have."""

HEADED = ("out", "dq", "dk", "dv")
"""Results with axes of positions and heads, which a layout orders."""
SHAPED = (*HEADED, "lse", "dsinks")
Shape = tuple[int, ...]


def question(task: Task) -> Question:
    """Return what a worker is asked about a task, whose implementation is given as an object."""
    assert not isinstance(task.implementation, str)
    case, p, c = task.case, task.case.problem, task.implementation.capabilities
    swap = (task.layout or c.tensor_layout) == "bhsd"
    x = make_inputs(case) if task.inputs is None else task.inputs
    sharding = sharding_of(case, c)
    queries = query_positions(sharding, p.nq, case.world_size, p.documents)
    keys = key_positions(sharding, p.nk, case.world_size, p.documents)
    names = ("q", "k", "v", "dout") if task.gradients else ("q", "k", "v")
    tensors = {name: Tensor(_swapped(getattr(x, name), swap), p.dtype) for name in names}
    if task.gradients:
        tensors["dlse"] = Tensor(x.dlse, p.lse_dtype)
    if x.sinks is not None:
        tensors["sinks"] = Tensor(x.sinks, "float32")
    results: tuple[str, ...] = ("out", "lse") if c.lse else ("out",)
    gradients = ("dq", "dk", "dv", "dsinks") if p.sinks else ("dq", "dk", "dv")
    results += gradients if task.gradients else ()

    def message(number: int, inputs: str, outputs: str) -> CaseMessage:
        return CaseMessage(
            kind="case",
            case=number,
            problem=fields_of(p),
            sharding=case.sharding,
            world_size=case.world_size,
            positions=tuple(tuple(rows.tolist()) for rows in queries),
            key_positions=tuple(tuple(rows.tolist()) for rows in keys),
            gradients=task.gradients,
            cotangent=case.cotangent,
            device=task.device,
            inputs=inputs,
            outputs=outputs,
        )

    def read(said: Result, data: bytes) -> tuple[RankResult, ...]:
        if unknown := [name for name in said.changed if name not in tensors]:
            raise Breach(f"says that it changed {cut(repr(unknown[0]))}: its inputs are {', '.join(tensors)}")
        found = _checked(data, {name: _expected(name, p, swap) for name in results}, swap)
        whole = {name: _swapped(tensor.values, swap and name in HEADED) for name, tensor in found.items()}
        ranks = []
        for rows, key_rows in zip(queries, keys, strict=True):
            part = {
                name: _part(name, values, key_rows if name in ("dk", "dv") else rows) for name, values in whole.items()
            }
            ranks.append(
                RankResult(
                    out=part["out"],
                    lse=part.get("lse"),
                    dq=part.get("dq"),
                    dk=part.get("dk"),
                    dv=part.get("dv"),
                    lse_dtype=found["lse"].dtype if "lse" in found else "",
                    changed=said.changed,
                    left={},
                    seconds=(said.seconds or 0.0) / case.world_size,
                    dsinks=part.get("dsinks"),
                )
            )
        return tuple(ranks)

    largest = HEADER + 8 * sum(math.prod(shape_of(name, p)) for name in SHAPED)
    return Question(message, encode(tensors, {}), largest, read)


def fields_of(p: Problem) -> dict[str, object]:
    """Return a problem as JSON values, with a value for every field: those that follow from others are given too."""
    return {
        "batch": p.batch,
        "query_length": p.nq,
        "key_length": p.nk,
        "heads": p.heads,
        "key_heads": p.hk,
        "head_dim": p.head_dim,
        "value_dim": p.dv,
        "dtype": p.dtype,
        "causal": p.causal,
        "scale": p.scale_value,
        "window": p.window,
        "documents": p.documents,
        "key_lengths": p.key_lengths,
        "softcap": p.softcap,
        "dilation": None if p.dilation is None else p.dilation.to_json(),
        "sinks": p.sinks,
    }


def shape_of(name: str, p: Problem) -> Shape:
    """Return the shape of a global result in the canonical layout."""
    shapes = {
        "out": (p.batch, p.nq, p.heads, p.dv),
        "lse": (p.batch, p.heads, p.nq),
        "dq": (p.batch, p.nq, p.heads, p.head_dim),
        "dk": (p.batch, p.nk, p.hk, p.head_dim),
        "dv": (p.batch, p.nk, p.hk, p.dv),
        "dsinks": (p.heads,),
    }
    return shapes[name]


def _expected(name: str, p: Problem, swap: bool) -> tuple[Shape, tuple[DtypeName, ...]]:
    """Return the shape of a global result as the worker writes it, and the dtypes that it may have."""
    shape = shape_of(name, p)
    if name == "lse":
        return shape, ("float64",) if p.dtype == "float64" else ("float32", "float64")
    if name == "dsinks":
        return shape, ("float32",)
    return (shape[0], shape[2], shape[1], shape[3]) if swap else shape, (p.dtype,)


def _checked(data: bytes, expected: dict[str, tuple[Shape, tuple[DtypeName, ...]]], swap: bool) -> dict[str, Tensor]:
    """Return the expected tensors of a file of results.

    Raises:
        ContractError: the file is no safetensors file, or a tensor is missing, or of another shape or dtype.
    """
    try:
        tensors, _ = decode(data)
    except NotSafetensors as error:
        raise ContractError(f"wrote a file of results that cannot be read: {error}", rule="file") from None
    for name, (shape, dtypes) in expected.items():
        if name not in tensors:
            raise ContractError(f"wrote no {name}", rule="missing", tensor=name)
        values, dtype = tensors[name]
        if values.shape != shape:
            layout = "bhsd" if swap else "bshd"
            hint = f", in layout {layout}" if name in HEADED else ""
            raise ContractError(
                f"returned {name} of shape {values.shape}: {shape} is expected{hint}", rule="shape", tensor=name
            )
        if dtype not in dtypes:
            raise ContractError(
                f"returned {name} in {dtype}: {' or '.join(dtypes)} is expected", rule="dtype", tensor=name
            )
    return {name: tensors[name] for name in expected}


def _swapped(values: Array, swap: bool) -> Array:
    """Return a tensor with the axes of tokens and heads swapped, if they are to be."""
    return values.swapaxes(1, 2) if swap else values


def _part(name: str, values: Array, rows: Positions) -> Array:
    """Return the rows of a global result that a rank holds."""
    if name == "dsinks":  # the whole gradient, as that of a rank
        return np.ascontiguousarray(values)
    return np.ascontiguousarray(values[:, :, rows] if name == "lse" else values[:, rows])
