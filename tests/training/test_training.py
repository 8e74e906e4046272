"""The ring in a training step, alone and inside what frameworks wrap around a model, against one process.

Models are float64 and attend by the ring on several ranks, by `scaled_dot_product_attention` in one process.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import training_programs
from training_programs import Result, Setup, alone

from ringref.rounding import scaled_bound
from ringverify.worlds.processes.gloo import GlooWorld

pytestmark = pytest.mark.timeout(90)

PLENTY = 60.0

BALANCED = ("contiguous", "zigzag", "striped")
SETUPS = [
    *((world_size, Setup(settings={"sharding": sharding})) for world_size in (2, 4) for sharding in BALANCED),
    (4, Setup(length=3)),  # a rank without tokens
    (4, Setup(settings={"method": "allgather"})),
    *((world_size, Setup("ddp", settings={"sharding": "zigzag"})) for world_size in (2, 4)),
    (4, Setup("ddp", rings=2)),
    (4, Setup("ddp", rings=4)),  # rings of one rank
    (4, Setup("ddp", length=3)),
    *((world_size, Setup("fsdp", settings={"sharding": "zigzag"})) for world_size in (2, 4)),
    (4, Setup("fsdp", rings=2)),
    (4, Setup("fsdp", length=3)),
    *((4, Setup(wrapper, reentrant=reentrant)) for wrapper in ("plain", "fsdp") for reentrant in (False, True)),
    (4, Setup("ddp", rings=2, reentrant=False)),
    *((2, Setup(compiled=backend)) for backend in ("eager", "aot_eager")),
    *((2, Setup(wrapper, compiled="aot_eager")) for wrapper in ("ddp", "fsdp")),
    (2, Setup(compiled="aot_eager", reentrant=False)),
]  # fmt: skip


def name_of(setup: object) -> str:
    """What differs from the plain step, as a test's name."""
    if not isinstance(setup, Setup):
        return f"{setup}ranks"
    words = [setup.wrapper, *setup.settings.values()]
    words += [f"{setup.rings}rings"] * (setup.rings > 1) + [f"n{setup.length}"] * (setup.length != Setup.length)
    words += [] if setup.reentrant is None else ["reentrant" if setup.reentrant else "checkpoint"]
    return "-".join([*words, *([] if setup.compiled is None else [f"compiled_{setup.compiled}"])])


@pytest.fixture(scope="module")
def world() -> Iterator[GlooWorld]:
    """Real processes, kept warm from test to test."""
    world = GlooWorld()
    yield world
    world.close()


@functools.cache
def expected(length: int, layers: int) -> tuple[Result, float]:
    """The step in one process, and how far from it rounding in float64 may lead."""
    setup = Setup(length=length, layers=layers)
    exact, coarse = alone(setup, torch.float64), alone(setup, torch.float32)
    return exact, scaled_bound(distance(coarse, exact), "float32", "float64")


def distance(actual: Result, exact: Result) -> float:
    """The largest relative difference of the loss and of any parameter's gradient, in the norm over its elements."""
    (loss, grads), (exact_loss, exact_grads) = actual, exact
    assert set(grads) == set(exact_grads)
    relative = [np.linalg.norm(grads[name] - g) / np.linalg.norm(g) for name, g in exact_grads.items()]
    return float(max(abs(loss - exact_loss) / exact_loss, *relative))


def steps(world: GlooWorld, world_size: int, setup: Setup) -> list[Result]:
    """The step on each rank."""
    run = world.run(training_programs.in_a_ring, setup, world_size=world_size, seed=0, deadline=PLENTY)
    assert run.failure is None, run.failure.detail
    return list(run.results)


@pytest.mark.parametrize(
    ("world_size", "setup"),
    [pytest.param(*one, marks=[pytest.mark.nightly] * (one[1].compiled == "aot_eager")) for one in SETUPS],
    ids=name_of,
)
def test_gradients_are_those_of_one_process(world: GlooWorld, world_size: int, setup: Setup) -> None:
    """Loss and gradients of every parameter, on every rank, to rounding."""
    exact, allowed = expected(setup.length, setup.layers)
    for result in steps(world, world_size, setup):
        assert distance(result, exact) <= allowed


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_what_inductor_compiles_around_the_ring_leaves_its_gradients_as_they_are(world: GlooWorld) -> None:
    """The ring runs as it is, between pieces of generated code."""
    run = world.run(training_programs.wave_by_inductor, None, world_size=2, seed=0, deadline=200)
    assert run.failure is None, run.failure.detail
    exact, coarse = training_programs.wave(torch.float64), training_programs.wave(torch.float32)
    for result in run.results:
        assert distance(result, exact) <= scaled_bound(distance(coarse, exact), "float32", "float64")


def test_a_step_that_is_wrong_or_coarse_is_told_from_rounding() -> None:
    """The gate can close: a factor forgotten, one parameter's share of a rank missing, float32 for float64."""
    (loss, grads), allowed = expected(Setup.length, 2)
    exact = (loss, grads)
    assert distance(exact, exact) == 0
    assert distance((loss, {name: g / 2 for name, g in grads.items()}), exact) > allowed
    for name, g in grads.items():
        assert distance((loss, grads | {name: g * (1 - 2.0**-30)}), exact) > allowed
    assert distance(alone(Setup(), torch.float32), exact) > allowed
    assert distance(alone(Setup(length=Setup.length - 1), torch.float64), exact) > allowed
