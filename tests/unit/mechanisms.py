"""Mechanisms of attention written by hand: cases to run them on, and which hypotheses explain what is seen."""

from dataclasses import replace

import torch
import torch.distributed as dist

from ringref.problem import Problem
from ringverify.cases.case import Case
from ringverify.cases.running import Runner
from ringverify.diagnosis.gradients import adding, moving, weights
from ringverify.diagnosis.hypothesis import Hypothesis
from ringverify.diagnosis.scene import Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults.catalogue import CAUSES
from ringverify.faults.ring import STEPS, multiplicity
from ringverify.worlds.simulated import SimulatedWorld


def case_of(*, size=3, sharding="contiguous", seed=1, cotangent="out", values="normal", **problem):
    """Twelve positions on three ranks."""
    plain = {"query_length": 12, "heads": 2, "head_dim": 3}
    problem = Problem(**plain | problem)
    return Case(problem=problem, world_size=size, sharding=sharding, values=values, cotangent=cotangent, seed=seed)


def of_all_ranks(x, call):
    """The same of every rank."""
    found = [torch.empty_like(x).contiguous() for _ in range(call.world_size)]
    dist.all_gather(found, x.contiguous(), group=call.group)
    return found


def seen(implementation, cases, *, gradients):
    """What is observed of cases, and a probe for more."""
    runner = Runner(implementation, SimulatedWorld())
    scenes = [Scene(c, implementation.capabilities, runner.run(c, gradients=gradients)) for c in cases]
    return scenes, lambda case, inputs: runner.run(case, gradients=gradients, inputs=inputs)


def explaining(hypotheses, scenes):
    """The sentences of the hypotheses that explain all scenes, each of which is wrong."""
    assert all(wrong_tensors(scene) for scene in scenes)
    return [one.sentence() for one in hypotheses if all(one.explains(scene) is not None for scene in scenes)]


def library(sentence):
    """What the library knows by a sentence."""
    found = [Hypothesis(**vars(one)) for one in CAUSES if one.sentence() == sentence]
    assert found
    return found


def where(keeps):
    """Only those pairs of a block count that are kept, by the rank, the owner, and positions of queries and keys."""

    def pattern(steps, here, hop, owner):
        i, j = here.call.positions[:, None], here.shards[owner][None]
        kept = torch.as_tensor(keeps(here, owner, i, j)).expand(len(i), j.size(1))
        return multiplicity(steps, here, hop, owner) * kept

    return replace(STEPS, pattern=pattern)


def of_gradients(scenes):
    """What is fitted to the gradients of cases."""
    return [one for room in (moving, adding, weights) for one in room.hypotheses(scenes)]
