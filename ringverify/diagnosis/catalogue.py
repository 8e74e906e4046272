"""Every suspicion there is, the plainest first: of two that explain the same, the earlier is named."""

from __future__ import annotations

from ringverify.diagnosis.dilations import DILATION
from ringverify.diagnosis.gradients import FACTOR, FORMULA, HOME
from ringverify.diagnosis.kernels import KERNELS
from ringverify.diagnosis.layouts import PERMUTED, ROUNDED, STRIDES
from ringverify.diagnosis.masks import CAUSAL, DOCUMENTS, KEY_LENGTHS, SHARDS, WINDOW
from ringverify.diagnosis.merging import BLOCKS, LSE_OF_BLOCKS, MERGE
from ringverify.diagnosis.misunderstood import MISUNDERSTOOD
from ringverify.diagnosis.narrowing import NARROWED
from ringverify.diagnosis.positions import POSITIONS
from ringverify.diagnosis.returned import RETURNED
from ringverify.diagnosis.scores import CAP, HEADS, MULTIPLICITY, SCALE
from ringverify.diagnosis.suspicion import Suspicion
from ringverify.diagnosis.travelling import BLOCKS_THAT_ARRIVE, TRAVEL

_SHELVES = (
    MISUNDERSTOOD, RETURNED, HOME, SCALE, CAP, HEADS, MULTIPLICITY, CAUSAL, WINDOW, DOCUMENTS, KEY_LENGTHS, DILATION,
    POSITIONS, BLOCKS, MERGE, LSE_OF_BLOCKS, FORMULA, TRAVEL, FACTOR, BLOCKS_THAT_ARRIVE, SHARDS, STRIDES, PERMUTED,
    ROUNDED, KERNELS, NARROWED,
)  # fmt: skip

SUSPICIONS: tuple[Suspicion, ...] = tuple(
    sorted((found for shelf in _SHELVES for found in shelf), key=lambda found: (found.when != "always", found.narrow))
)
"""What holds throughout before what holds in one direction, on all blocks before on some."""
