"""What of the suite `scale` is asked for, and the cases that this comes to for an implementation."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from ringref.problem import Problem
from ringverify.cases.case import Case, even_multiple
from ringverify.check.options import CheckRequest, Options
from ringverify.check.planning import RunPlan
from ringverify.errors import UsageError, instead
from ringverify.implementation import Capabilities, sharding_name
from ringverify.properties.memory import MEMORY
from ringverify.properties.suites import METHODS
from ringverify.worlds.processes.torchrun import Crew

LENGTH = 131_072
"""Positions where none are asked for."""
RANKS = 2
PROPERTIES: dict[str, str] = {**METHODS, MEMORY.id: MEMORY.meaning}
"""The properties of the suite, and what must hold."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleRequest:
    """What of the suite is asked for.

    Attributes:
        problem: fields of the problem as JSON, without its length, or empty for what suits the implementation.
        length: positions.
        properties: ids of the properties to try.
        sharding: which rank holds which positions; `None` is zigzag for a causal problem, or what is declared first.
    """

    problem: dict[str, Any]
    length: int
    properties: tuple[str, ...]
    sharding: str | None = None


def wanted(request: CheckRequest, length: int | None, problem: str | None, sharding: str | None) -> ScaleRequest:
    """Read the options of the suite.

    Raises:
        UsageError: one of them is wrong, or has no meaning here.
    """
    for option in ("max_examples", "time_budget"):
        if getattr(request, option) is not None:
            name = f"--{option.replace('_', '-')}"
            raise UsageError(f"{name} is not for the suite scale, which is one long case a method; leave it out")
    names = tuple(PROPERTIES)
    for name in (*(request.only or ()), *(request.skip or ())):
        if name not in names:
            raise UsageError(f"no property {name!r} in the suite scale{instead(name, names)}")
    asked = tuple(one for one in names if one in (request.only or names) and one not in (request.skip or ()))
    if not asked:
        raise UsageError("--only and --skip leave no property of the suite scale")
    try:
        fields = json.loads(problem) if problem else {}
        one = Problem.from_json({"query_length": length or LENGTH, **fields})
    except (ValueError, TypeError) as error:
        raise UsageError(f"--problem {problem}: expected fields of a problem as a JSON object: {error}") from None
    if length is not None and fields.get("query_length", length) != length:
        raise UsageError(f"--length {length} contradicts query_length={one.nq} in --problem: leave one of them out")
    return ScaleRequest(problem=fields, length=one.nq, properties=asked, sharding=sharding)


def cases_of(plan: RunPlan, asked: ScaleRequest, options: Options, crew: Crew | None) -> list[Case]:
    """Return the cases of an implementation, one for each world size.

    Raises:
        UsageError: the sharding is not declared, or the length is shorter than what is declared can share.
    """
    c = plan.implementation.capabilities
    return [_case(c, asked, size, options.seed) for size in _sizes(c, options, crew)]


def _sizes(capabilities: Capabilities, options: Options, crew: Crew | None) -> tuple[int, ...]:
    """Return the world sizes to try: those asked for, else all processes of torchrun, else two ranks if that may be."""
    declared = capabilities.world_sizes
    if options.world_sizes is not None:
        return tuple(one for one in options.world_sizes if one in (declared or (one,))) or options.world_sizes
    if declared is None:
        return (crew.size if crew is not None else RANKS,)
    return (max(declared),) if crew is not None else (RANKS if RANKS in declared else declared[-1],)


def _case(capabilities: Capabilities, asked: ScaleRequest, size: int, seed: int) -> Case:
    """Return the case: what is not asked for is what the implementation declares."""
    c, fields = capabilities, dict(asked.problem)
    fields.setdefault("dtype", "float32" if "float32" in c.dtypes else c.dtypes[0])
    fields.setdefault("causal", c.causal != "never")
    fields.setdefault("head_dim", 64 if c.head_dims is None else c.head_dims[0])
    multiples = [one for one in (c.heads_multiple, c.key_heads_multiple) if one is not None]
    fields.setdefault("heads", math.lcm(*(size if one == "world_size" else int(one) for one in multiples)))
    names = [sharding_name(one) for one in c.shardings]
    sharding = asked.sharding or ("zigzag" if fields["causal"] and "zigzag" in names else names[0])
    if sharding not in names:
        raise UsageError(f"--sharding {sharding} is not declared: {', '.join(names)}{instead(sharding, names)}")
    length, bound = asked.length, {"documents", "key_lengths", "key_length"} & fields.keys()
    if not bound and (not c.uneven or c.length_multiple):
        step = math.lcm(even_multiple(sharding, size), size * (c.length_multiple or 1))
        if length < step:
            raise UsageError(f"--length {length}: what is declared needs a multiple of {step} on {size} ranks")
        length = length // step * step
    problem = Problem.from_json({**fields, "query_length": length})
    return Case(
        problem=problem,
        sharding=sharding,
        world_size=size,
        cotangent="both" if c.lse_gradient else "out",
        seed=seed,
    )
