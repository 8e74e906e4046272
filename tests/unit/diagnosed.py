"""Where a fault of the catalogue is wrong, on nine positions."""

import dataclasses

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.diagnosis.diagnose import diagnose
from ringverify.faults.catalogue import MUTANTS
from ringverify.worlds.simulated import SimulatedWorld


def diagnosed(mutant, *, tensor, size=3, sharding="contiguous", spoilt=lambda result: result, **problem):
    """The diagnosis of a mutant, without much of a search for its cause; `spoilt` changes what comes from probes."""
    plain = {"query_length": 9, "heads": 2, "head_dim": 3}
    case = Case(problem=Problem(**plain | problem), world_size=size, sharding=sharding, values="normal", seed=1)
    implementation = MUTANTS[mutant].implementation
    runner, gradients = Runner(implementation, SimulatedWorld()), tensor in ("dq", "dk", "dv")

    def probe(case, inputs):
        seen = runner.run(case, gradients=gradients, inputs=inputs)
        return dataclasses.replace(seen, ranks=tuple(spoilt(result) for result in seen.ranks))

    return diagnose(
        lambda case: runner.run(case, gradients=gradients),
        [case, case],
        implementation.capabilities,
        tensor=tensor,
        probe=probe,
        seconds=0.1,
    )
