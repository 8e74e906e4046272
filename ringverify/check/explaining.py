"""Diagnose a counterexample with wrong values, and name what a case needs in order to fail."""

from __future__ import annotations

from dataclasses import replace

from ringverify.cases.case import Case
from ringverify.cases.comparing import GRADIENTS
from ringverify.cases.inputs import Inputs
from ringverify.cases.running import Observation, Runner
from ringverify.diagnosis.diagnose import Diagnosis, diagnose
from ringverify.diagnosis.needs import Needs
from ringverify.properties.property import Property, Violation
from ringverify.worlds.world import WorldUnavailable


def takes(case: Case) -> list[str]:
    """List how a case differs from the simplest one; for a smallest failing case, this is what it takes to fail."""
    p = case.problem
    counts = {"rank": case.world_size, "query": p.nq, "key": p.nk, "batch entry": p.batch, "head": p.heads}
    if p.nq == p.nk:
        counts = {"token" if name == "query" else name: n for name, n in counts.items() if name != "key"}
    found = [f"{count} {_plural(name)}" for name, count in counts.items() if count > 1]
    found += [f"head_dim {p.head_dim}"] if p.head_dim > 1 else []
    found += [f"value_dim {p.dv}"] if p.dv != p.head_dim else []
    found += [f"{p.hk} key heads"] if p.hk != p.heads else []
    found += ["a causal mask"] if p.causal else []
    named = ("window", "documents", "key_lengths", "dilation", "softcap", "scale")
    found += [name for name in named if getattr(p, name) is not None]
    found += [f"{case.memory} inputs"] if case.memory != "contiguous" else []
    found += [f"an {case.group} group" if case.group == "offset" else f"a {case.group} group"] * (case.group != "world")
    found += ["messages held back"] if case.delayed else []
    found += ["sends that wait for their receive"] if case.transport == "rendezvous" else []
    return found


def _plural(name: str) -> str:
    return "queries" if name == "query" else "batch entries" if name == "batch entry" else f"{name}s"


def explained(
    runner: Runner,
    property: Property,
    violation: Violation,
    smallest: Case,
    first: Case,
    needs: Needs | None = None,
) -> Diagnosis | None:
    """Diagnose a case that violates a property; `None` if no value is wrong, or none in an ordinary run.

    A property may compare cases with each other: the first of them that is wrong is diagnosed, and where it is wrong is
    told of the case itself only.

    Args:
        runner: runs the implementation in its world.
        property: what must hold.
        violation: what is wrong on the smallest case.
        smallest: the case to explain.
        first: the case from which it was shrunk; the same cause has to explain it.
        needs: what the case needs in order to fail, if that was found.
    """
    if violation.finding is None:
        return None
    # If out or lse is wrong, gradients are too, in a way that does not depend on the fault alone: leave them out.
    gradients = violation.finding.tensor in GRADIENTS

    def observe(case: Case) -> Observation:
        return runner.run(case, gradients=gradients)

    def probe(case: Case, inputs: Inputs) -> Observation:
        return runner.run(case, gradients=gradients, inputs=inputs)

    def differentiate(case: Case) -> Observation:
        return runner.run(case, gradients=True)

    c = runner.capabilities
    try:
        for these in zip(property.compared(smallest, c), property.compared(first, c), strict=False):
            found = diagnose(
                observe,
                these,
                c,
                tensor=violation.finding.tensor,
                probe=probe if these[0] == smallest else None,
                differentiate=differentiate if c.gradients and not gradients else None,
                needs=needs if these[0] == smallest else None,
            )
            if found is not None:
                return found if these[0] == smallest else replace(found, where=None)
    except WorldUnavailable:
        pass
    return None
