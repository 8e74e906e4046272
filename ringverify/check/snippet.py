"""A failing case as one Python file for a bug report: numpy and torch, the implementation, and nothing of this tool.

The file holds the very inputs, the multiplicities and the error allowed, starts a process a rank over gloo, computes
dense attention in float64 by autograd, and prints the worst difference of every result on every rank. It exits with 1
where one exceeds what is allowed.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import DtypeName, Problem
from ringref.rounding import UNIT_ROUNDOFF, Pipeline, rows_of_rms
from ringverify import targets
from ringverify.cases.comparing import allowed, answer
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import shards
from ringverify.check.casefile import CaseFile
from ringverify.check.snippet_template import TEMPLATE
from ringverify.implementation import Implementation
from ringverify.properties.precision import PRECISION, rms_limits
from ringverify.properties.values import FORWARD, LSE

FORWARD_ONLY = (FORWARD.id, LSE.id)
"""Properties that are judged without a backward, in which something else may go wrong."""
READABLE = 400
"""Numbers of an array that are written out; longer arrays are packed."""


def snippet(recorded: CaseFile, target: str, implementation: Implementation) -> str:
    """The text of the file.

    Args:
        recorded: the case.
        target: what the user types to get the implementation.
        implementation: it.
    """
    case, capabilities = recorded.case, implementation.capabilities
    p, x = case.problem, make_inputs(case)
    queries, keys = shards(case, capabilities)
    lse_dtype: DtypeName = "float64" if p.dtype == "float64" else "float32"
    pipeline = Pipeline(
        dtype=p.dtype,
        accumulates=capabilities.accumulates,
        probabilities=capabilities.probabilities,
        lse_dtype=lse_dtype,
        blocks=case.world_size,
        reduces=capabilities.reduces,
    )
    bound = allowed(case, pipeline)
    arrays = {name: getattr(x, name) for name in ("q", "k", "v", "dout", "dlse")}
    limits = {name: getattr(bound, name) for name in ("out", "lse", "dq", "dk", "dv")}
    rms: dict[str, Any] = {}
    if recorded.property == PRECISION.id:
        for result, most in rms_limits(case, capabilities, pipeline).items():
            kept = rows_of_rms(getattr(answer(case), result), limits[result])
            rms[result] = _Source(f"({most!r}, {_array(kept)})")
    values = {
        "summary": recorded.summary,
        "case": case.describe(),
        "import": _import(target),
        "world": repr(case.ranks),
        "ring": repr(case.ring_ranks),
        "sharding": repr(case.sharding),
        "layout": repr(capabilities.tensor_layout),
        "returns_lse": repr(capabilities.lse),
        "gradients": repr(capabilities.gradients and recorded.property not in FORWARD_ONLY),
        "cotangent": repr(case.cotangent),
        "dtype": repr(p.dtype),
        "memory": repr(case.memory),
        "problem": _dict(_fields(p)),
        "queries": repr([rows.tolist() for rows in queries]),
        "keys": repr([rows.tolist() for rows in keys]),
        "inputs": _dict({name: _Source(_array(array)) for name, array in arrays.items()}),
        "multiplicity": _array(multiplicity(p)),
        "unit": repr(UNIT_ROUNDOFF[p.dtype]),
        "rms": _dict(rms),
        "allowed": _dict({name: _Source(_array(array)) for name, array in limits.items()}),
    }
    text = TEMPLATE
    for name, value in values.items():
        text = text.replace(f"<<{name}>>", value)
    return text


class _Source(str):
    """Text that is Python already."""

    def __repr__(self) -> str:
        return str(self)


def _dict(values: dict[str, Any]) -> str:
    """A dictionary, an entry a line."""
    return "{\n" + "".join(f"    {name!r}: {value!r},\n" for name, value in values.items()) + "}"


def _array(array: NDArray[Any]) -> str:
    """An expression for an array: its numbers, or its bytes where there are many."""
    if array.size <= READABLE:
        values = np.array(array).tolist()
        shaped = "" if array.size else f".reshape({array.shape})"
        return f"np.array({values!r}, dtype={str(array.dtype)!r}){shaped}"
    packed = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes())).decode()
    return f"unpacked({packed!r}, {str(array.dtype)!r}, {array.shape})"


def _fields(p: Problem) -> dict[str, Any]:
    """What an implementation may ask of the problem, properties included."""
    fields: dict[str, Any] = {field.name: getattr(p, field.name) for field in dataclasses.fields(p)}
    if p.dilation is not None:
        d = p.dilation
        arguments = f"branches={d.branches!r}, heads={d.heads!r}, head_offset={d.head_offset!r}"
        fields["dilation"] = _Source(f"SimpleNamespace({arguments})")
    fields |= {name: getattr(p, name) for name in ("nq", "nk", "hk", "dv", "group_size", "scale_value", "diagonal")}
    return fields


def needs_the_tool(target: str) -> bool:
    """Whether the implementation itself lives in ringverify: a built-in one, an adapter of a peer, or a mutant."""
    return target in targets.BUILT_IN or target.startswith(targets.MUTANT)


def _import(target: str) -> str:
    """Statements that make `target` the user's function."""
    location = targets.BUILT_IN.get(target, target)
    if target.startswith(targets.MUTANT):
        location = f"ringverify.mutants.catalogue:{target.removeprefix(targets.MUTANT)}"
    module, _, attribute = location.rpartition(":")
    lines = []
    if module.endswith(".py"):
        lines.append(f"sys.path.insert(0, {str(Path(module).parent)!r})")
        module = Path(module).stem
    first, *rest = attribute.split(".")
    lines += [f"from {module} import {first} as target  # noqa: E402", *[f"target = target.{name}" for name in rest]]
    return "\n".join(lines)
