"""Faults of dtypes and scales (E in the reports)."""

from __future__ import annotations

from dataclasses import replace

from ringverify.faults.fault import Faults
from ringverify.faults.place import Here
from ringverify.faults.ring import STEPS

FAULTS = Faults()


def _padded(here: Here) -> float:
    problem = here.problem
    return float((-(-problem.head_dim // 8) * 8) ** -0.5) if problem.scale is None else problem.scale


E3a = FAULTS.add(
    "E3a",
    "scale from the padded head dimension",
    story="D is rounded up to a multiple of 8 before its root is taken. Needs another D and the default scale.",
    source="attorch#14; pytorch#159706",
    ring=replace(STEPS, scale=_padded),
    cause="scale is that of D rounded up to a multiple of 8",
    also=("backward", "forward"),
)
E3b = FAULTS.add(
    "E3b",
    "scale hard-coded for D = 64",
    story="1/8, whatever D is.",
    source="ipex-llm#12619 (l)",
    ring=replace(STEPS, scale=lambda here: 0.125 if here.problem.scale is None else here.problem.scale),
    cause="scale is 1/8, that of D = 64",
    also=("backward", "forward"),
)
E3c = FAULTS.add(
    "E3c",
    "the scale that was asked for is ignored",
    story="D ** −0.5 always. Needs another scale.",
    source="ipex-llm#12619 (l)",
    ring=replace(STEPS, scale=lambda here: float(here.problem.head_dim**-0.5)),
    cause="scale ignored: 1/sqrt(D) is used whatever was asked for",
    also=("backward", "forward"),
)
