"""What a rank is asked to verify at length, and what it reports."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ringverify.cases.case import Case
from ringverify.events import TensorName
from ringverify.properties.suites import Method
from ringverify.scale.checksums import GoldenSums
from ringverify.scale.comparison import Difference

Float = NDArray[np.float64]

Way = Method | Literal["checksums", "alone"]


@dataclasses.dataclass(frozen=True)
class LongTask:
    """The argument of a rank's program.

    Attributes:
        target: the implementation, as any process can load it.
        case: what is computed on which ranks, and the seed of the inputs.
        way: how it is verified; "checksums": by the sums of a golden vector; "alone": not at all.
        device: device of the tensors.
        sampled: global positions of the rows that are sampled.
        notes: folder in which each rank notes how far it has come; "" for none.
        golden: the sums of a golden vector.
        gradients: whether gradients are computed, if they are declared.
    """

    target: str
    case: Case
    way: Way
    device: str
    sampled: tuple[int, ...] = ()
    notes: str = ""
    golden: GoldenSums | None = None
    gradients: bool = True


@dataclasses.dataclass(frozen=True)
class RankReport:
    """What one rank found.

    Attributes:
        inside: seconds in the implementation, forward and backward, and of processor time of this rank's thread.
        verifying: likewise, after that.
        memory: peak bytes in the implementation and in verification, above what there was before the call: of the GPU,
            or of the process.
        rows: number of rows verified, by result.
        margins: the largest margin, by result.
        squares: as in `RankResults`.
        differences: what is wrong.
        worth: what a pass says, a sentence each.
    """

    inside: tuple[float, float]
    verifying: tuple[float, float]
    memory: tuple[int, int] | None
    rows: dict[TensorName, int]
    margins: dict[TensorName, float]
    squares: dict[TensorName, Float]
    differences: tuple[Difference, ...]
    worth: tuple[str, ...]
