"""Write a failing case as one Python file for a bug report; it needs numpy, torch and the implementation only.

The file holds the inputs, multiplicities and errors allowed as literals. It starts a process for each rank over gloo,
computes dense attention in float64 by autograd, and prints the largest difference of every result on every rank. It
exits with 1 if one exceeds what is allowed.
"""

from __future__ import annotations

import base64
import dataclasses
import re
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ringref.pattern import multiplicity
from ringref.problem import Problem
from ringref.rounding import UNIT_ROUNDOFF, rows_of_rms
from ringverify import targets
from ringverify.cases.case import Case
from ringverify.cases.comparing import allowed, answer, pipeline_of
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import GradMode, Observation, shards
from ringverify.check.casefile import CaseFile
from ringverify.confirm.script_template import TEMPLATE
from ringverify.implementation import Capabilities
from ringverify.properties.incremental import INCREMENTAL
from ringverify.properties.modes import MODES, ways
from ringverify.properties.precision import PRECISION, rms_limits
from ringverify.properties.values import FORWARD, LSE

FORWARD_ONLY = (FORWARD.id, LSE.id, INCREMENTAL.id)
"""Properties that are judged without a backward pass; their scripts leave it out, since it might fail otherwise."""
READABLE = 400
"""Most elements of an array that is written out as numbers; larger arrays are compressed and base64-encoded."""


@dataclasses.dataclass(frozen=True)
class Script:
    """A failing case as a script.

    Attributes:
        text: the source of the script.
        program: the source without its title (ABOUT); scripts that would do the same have equal programs.
    """

    text: str
    program: str


def snippet(recorded: CaseFile, capabilities: Capabilities) -> Script:
    """Return the script of a case. Values from the case file are written as ASCII literals, so they cannot be code.

    Args:
        recorded: the case file.
        capabilities: what its target declares.
    """
    case = recorded.case
    p, x = case.problem, make_inputs(case)
    queries, keys = shards(case, capabilities)
    pipeline = dataclasses.replace(pipeline_of(case, capabilities, Observation((), None)), lse_dtype=p.lse_dtype)
    bound = allowed(case, pipeline)
    arrays = {name: getattr(x, name) for name in ("q", "k", "v", "dout", "dlse", *["sinks"] * p.sinks)}
    limits = {name: getattr(bound, name) for name in ("out", "lse", "dq", "dk", "dv", *["dsinks"] * p.sinks)}
    rms: dict[str, Any] = {}
    if recorded.property == PRECISION.id:
        for result, most in rms_limits(case, capabilities, pipeline).items():
            kept = rows_of_rms(getattr(answer(case), result), limits[result])
            rms[result] = _Literal(f"({most!r}, {_array(kept)})")
    about = {"target": recorded.target, "property": recorded.property, "case": case.describe()}
    about |= {"wrong": recorded.summary, "recorded by": recorded.made_with}
    values = {
        "implementation": _dict(_place(recorded.target)),
        "world": _literal(case.ranks),
        "ring": _literal(case.ring_ranks),
        "sharding": _literal(case.sharding),
        "layout": _literal(capabilities.tensor_layout),
        "returns_lse": _literal(capabilities.lse),
        "ways": _literal(_ways(recorded, capabilities)),
        "cotangent": _literal(case.cotangent),
        "sinks": _literal(capabilities.sinks),
        "dtype": _literal(p.dtype),
        "memory": _literal(case.memory),
        "problem": _dict(_fields(p)),
        "calls": _calls(case, capabilities),
        "pages": "None" if case.page_table is None else f"PageTable(**{dataclasses.asdict(case.page_table)!r})",
        "queries": _literal([rows.tolist() for rows in queries]),
        "keys": _literal([rows.tolist() for rows in keys]),
        "inputs": _dict({name: _Literal(_array(array)) for name, array in arrays.items()}),
        "multiplicity": _array(multiplicity(p)),
        "unit": _literal(UNIT_ROUNDOFF[p.dtype]),
        "rms": _dict(rms),
        "allowed": _dict({name: _Literal(_array(array)) for name, array in limits.items()}),
    }
    return Script(_filled({**values, "about": _dict(about)}), _filled({**values, "about": "None"}))


def _calls(case: Case, capabilities: Capabilities) -> str:
    """Return the source of the calls: of each its problem, the queries before it, and the positions of all ranks."""
    source = []
    for call in case.calls:
        queries, keys = ([rows.tolist() for rows in held] for held in shards(call, capabilities))
        problem = f"Fields(**{_dict(_fields(call.problem))})" if case.chunks else "PROBLEM"
        source.append(f"    ({problem}, {call.problem.diagonal if case.chunks else 0}, {queries}, {keys}),\n")
    return f"[\n{''.join(source)}]"


def _ways(recorded: CaseFile, capabilities: Capabilities) -> tuple[tuple[GradMode, str], ...]:
    """Return the calls of the script: torch's mode, and which of q, k and v require gradients."""
    every = ways(recorded.case, capabilities)
    if recorded.property == MODES.id:
        return every
    return (("enable_grad", ""),) if recorded.property in FORWARD_ONLY else every[-1:]


def _filled(values: dict[str, str]) -> str:
    """Return the template with `<<names>>` replaced by values; placeholders inside values are not replaced."""
    return re.sub(r"<<(\w+)>>", lambda found: values[found[1]], TEMPLATE)


class _Literal(str):
    """Python source to be inserted unquoted: made here from numbers, never from text of a file."""


def _literal(value: Any) -> str:
    """Return the ASCII repr of a value: whatever a text holds, it cannot end its quotes or the line."""
    return value if isinstance(value, _Literal) else ascii(value)


def _dict(values: dict[str, Any]) -> str:
    """Return the source of a dictionary, one entry a line."""
    return "{\n" + "".join(f"    {name!r}: {_literal(value)},\n" for name, value in values.items()) + "}"


def _array(array: NDArray[Any]) -> str:
    """Return an expression for an array: its numbers, or its compressed bytes if there are many."""
    if array.size <= READABLE:
        values = np.array(array).tolist()
        shaped = "" if array.size else f".reshape({array.shape})"
        return f"np.array({values!r}, dtype={str(array.dtype)!r}){shaped}"
    packed = base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes())).decode()
    return f"unpacked({packed!r}, {str(array.dtype)!r}, {array.shape})"


def _fields(p: Problem) -> dict[str, Any]:
    """Return the fields of a problem, and the properties of it that an implementation may read."""
    fields: dict[str, Any] = {field.name: getattr(p, field.name) for field in dataclasses.fields(p)}
    if p.dilation is not None:
        d = p.dilation
        arguments = f"branches={d.branches!r}, heads={d.heads!r}, head_offset={d.head_offset!r}"
        fields["dilation"] = _Literal(f"Fields({arguments})")
    fields |= {name: getattr(p, name) for name in ("nq", "nk", "hk", "dv", "group_size", "scale_value", "diagonal")}
    return fields


def _place(target: str) -> dict[str, str | None]:
    """Return where the script finds a target: its file or module, and its attribute there."""
    place, _, attribute = targets.location_of(target).rpartition(":")
    is_file = place.endswith(".py")
    return {"file": place if is_file else None, "module": None if is_file else place, "attribute": attribute}
