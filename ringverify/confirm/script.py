"""Write a failing case as one Python file for a bug report; it needs numpy, torch and the implementation only.

The file holds the inputs, multiplicities and errors allowed as literals. It starts a process for each rank over gloo,
computes dense attention in float64 by autograd, and prints the largest difference of every result on every rank. It
exits with 1 if one exceeds what is allowed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ringref.pattern import multiplicity
from ringref.rounding import UNIT_ROUNDOFF, rows_of_rms
from ringverify.cases.case import Case
from ringverify.cases.comparing import allowed, answer, pipeline_of
from ringverify.cases.inputs import make_inputs
from ringverify.cases.running import GradMode, Observation, shards
from ringverify.check.casefile import CaseFile
from ringverify.confirm.script_template import TEMPLATE
from ringverify.confirm.source import Script, SourceText, array_source, dictionary, fields_of, literal, place_of
from ringverify.implementation import Capabilities
from ringverify.properties.incremental import INCREMENTAL
from ringverify.properties.modes import MODES, ways
from ringverify.properties.precision import PRECISION, rms_limits
from ringverify.properties.values import FORWARD, LSE

FORWARD_ONLY = (FORWARD.id, LSE.id, INCREMENTAL.id)
"""Properties that are judged without a backward pass; their scripts leave it out, since it might fail otherwise."""


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
            rms[result] = SourceText(f"({most!r}, {array_source(kept)})")
    about = {"target": recorded.target, "property": recorded.property, "case": case.describe()}
    about |= {"wrong": recorded.summary, "recorded by": recorded.made_with}
    values = {
        "implementation": dictionary(place_of(recorded.target)),
        "world": literal(case.ranks),
        "ring": literal(case.ring_ranks),
        "sharding": literal(case.sharding),
        "layout": literal(capabilities.tensor_layout),
        "returns_lse": literal(capabilities.lse),
        "ways": literal(_ways(recorded, capabilities)),
        "cotangent": literal(case.cotangent),
        "sinks": literal(capabilities.sinks),
        "dtype": literal(p.dtype),
        "memory": literal(case.memory),
        "problem": dictionary(fields_of(p)),
        "calls": _calls(case, capabilities),
        "pages": "None" if case.page_table is None else f"PageTable(**{dataclasses.asdict(case.page_table)!r})",
        "queries": literal([rows.tolist() for rows in queries]),
        "keys": literal([rows.tolist() for rows in keys]),
        "inputs": dictionary({name: SourceText(array_source(array)) for name, array in arrays.items()}),
        "multiplicity": array_source(multiplicity(p)),
        "unit": literal(UNIT_ROUNDOFF[p.dtype]),
        "rms": dictionary(rms),
        "allowed": dictionary({name: SourceText(array_source(array)) for name, array in limits.items()}),
    }
    return Script.of(TEMPLATE, values, about)


def _calls(case: Case, capabilities: Capabilities) -> str:
    """Return the source of the calls: of each its problem, the queries before it, and the positions of all ranks."""
    source = []
    for call in case.calls:
        queries, keys = ([rows.tolist() for rows in held] for held in shards(call, capabilities))
        problem = f"Fields(**{dictionary(fields_of(call.problem))})" if case.chunks else "PROBLEM"
        source.append(f"    ({problem}, {call.problem.diagonal if case.chunks else 0}, {queries}, {keys}),\n")
    return f"[\n{''.join(source)}]"


def _ways(recorded: CaseFile, capabilities: Capabilities) -> tuple[tuple[GradMode, str], ...]:
    """Return the calls of the script: torch's mode, and which of q, k and v require gradients."""
    every = ways(recorded.case, capabilities)
    if recorded.property == MODES.id:
        return every
    return (("enable_grad", ""),) if recorded.property in FORWARD_ONLY else every[-1:]
