"""Several hundred small programs, run in the simulated world and over gloo: both say the same of each.

Where they do not, the simulated world has a name for it: a departure, where gloo ends the process, hangs or hands out
numbers that nobody sent, and the simulated world says what is wrong; or a finding, "works here, gloo refuses it".
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch._dynamo  # noqa: F401 - functional collectives import it on first use, and threads of ranks share modules
from small_program_list import PROGRAMS, mixed
from small_programs import Program, Refused, attempt_program, run_program

from ringverify.worlds.processes.gloo import GlooWorld
from ringverify.worlds.refusals import GLOO_LACKS_ALL_TO_ALL
from ringverify.worlds.simulated import SimulatedWorld
from ringverify.worlds.world import Run, World

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

DEPARTURES = (
    "gloo silently moves the wrong elements",
    "collective mismatch",
    "ranks bring tensors of different sizes or dtypes",
    " receives into ",
    " has [",
    "is not in group",
)
"""What the simulated world says where gloo says nothing: `docs/worlds.md` lists them."""

BATCHES = 8
MIXED = 96
PLENTY, SHORT = 30.0, 1.0
EVERYTHING = (*PROGRAMS, *map(mixed, range(MIXED)))


@pytest.fixture(scope="module")
def gloo() -> Iterator[GlooWorld]:
    """Warm processes for all programs of this file."""
    world = GlooWorld()
    yield world
    world.close()


def run(world: World, program: Program, *, attempts: bool, deadline: float = PLENTY) -> Run:
    """A program's run, in which a rank that raises ends, or (`attempts`) returns what it raised."""
    what = attempt_program if attempts else run_program
    return world.run(what, program, world_size=program.size, seed=0, deadline=deadline)


def outcome(run: Run) -> Any:
    """What came of a run, without what differs from world to world: who was first, and the words."""
    match run.failure:
        case None:
            return run.results
        case failure if failure.kind in ("deadlock", "deadline"):
            return "waits"
        case failure:
            return failure.kind, failure.exception


def refuses(run: Run) -> bool:
    """Whether a rank raises or waits for ever."""
    return run.failure is not None or any(isinstance(one, Refused) for one in run.results)


def departure(run: Run) -> str | None:
    """The departure from gloo of which a simulated run tells."""
    said = [one.message for one in run.results if isinstance(one, Refused)]
    if run.failure is not None:
        said.append(run.failure.message)
    return next((phrase for phrase in DEPARTURES for text in said if phrase in text), None)


def simulated(program: Program) -> tuple[Run, bool]:
    """The program's run, and whether ranks were to return what they raise: not where others then wait for them."""
    found = run(SimulatedWorld(), program, attempts=True)
    if found.failure is None:
        return found, True
    return run(SimulatedWorld(), program, attempts=False), False


def disagreement(program: Program, gloo: GlooWorld) -> str | None:
    """What the two worlds say of a program, if that is not the same and the simulated world has no name for it."""
    here, attempts = simulated(program)
    if departure(here) is not None:
        return None
    hangs = outcome(here) == "waits" or bool(here.findings)
    there = run(gloo, program, attempts=attempts, deadline=SHORT if hangs else PLENTY)
    if refuses(there) if here.findings else outcome(there) == outcome(here):
        return None
    told = [world.results if world.failure is None else world.failure.message for world in (here, there)]
    return f"{program.name}: simulated {told[0]} {here.findings}, gloo {told[1]}"


@pytest.mark.parametrize("batch", [0, *(pytest.param(batch, marks=pytest.mark.nightly) for batch in range(1, BATCHES))])
def test_both_worlds_say_the_same_of_small_programs(gloo: GlooWorld, batch: int) -> None:
    """The same numbers; or each rank raises the same; or ranks wait. Where there is a finding, gloo refuses."""
    found = [disagreement(program, gloo) for program in EVERYTHING[batch::BATCHES]]
    assert not [one for one in found if one is not None], "\n".join(filter(None, found))


@pytest.mark.parametrize("phrase", DEPARTURES)
@pytest.mark.by_day(2)
def test_gloo_does_not_say_what_the_simulated_world_says_of_a_departure(gloo: GlooWorld, phrase: str) -> None:
    """It works with other numbers, waits, or ends the process: of two programs for each departure."""
    for program in [one for one in PROGRAMS if departure(simulated(one)[0]) == phrase][:2]:
        here, attempts = simulated(program)
        assert outcome(run(gloo, program, attempts=attempts, deadline=SHORT)) != outcome(here), program.name


def test_several_hundred_programs_are_no_departures() -> None:
    """What is held above holds of most of them, and each departure and each finding is the case in some program."""
    runs = [simulated(program)[0] for program in EVERYTHING]
    named = [departure(one) for one in runs]
    assert named.count(None) > 500
    assert set(named) == {None, *DEPARTURES}
    assert len({name for one in runs for name, _ in one.findings}) == 3 + GLOO_LACKS_ALL_TO_ALL


def test_a_disagreement_is_seen(gloo: GlooWorld) -> None:
    """The comparison can fail: a rank's results are those of another program."""
    program = next(one for one in PROGRAMS if one.name == "all_reduce of float32")
    other = next(one for one in PROGRAMS if one.name == "all_reduce(MAX) of float32")
    here, there = run(SimulatedWorld(), program, attempts=True), run(gloo, other, attempts=True)
    assert outcome(here) != outcome(there)
    assert outcome(here) == outcome(run(gloo, program, attempts=True))
