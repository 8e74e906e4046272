"""Known faults that only some blocks have, or only what some ranks add to gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ringverify.diagnosis import reproducing
from ringverify.diagnosis.rows import GROUPS, wrong_rows
from ringverify.diagnosis.scene import Array, Results, Scene
from ringverify.events import TensorName
from ringverify.faults.place import Block, Here
from ringverify.faults.ring import STEPS, Steps

Tensor = torch.Tensor
Blocks = Callable[[Here, int, int], bool]
"""Whether a block has the fault, by rank, hop and owner."""

BLOCKWISE = frozenset({
    "queries", "keys", "causal", "window", "documents", "key_lengths", "branches", "covers", "segment", "dilation",
    "pattern", "skip", "per_query_head", "per_key_head", "scale", "scores", "cap", "capped", "nothing", "partial",
    "merge", "attend", "accumulate", "times_in_dq", "times_in_part", "probabilities", "dp", "ds", "cap_slope", "dq",
    "dk", "dv", "gradients",
})  # fmt: skip
"""Steps that run once a block."""

ROUGHLY = 2.0**-6
"""Relative difference up to which a limit may fit: bfloat16 has as many digits."""

Contributions = dict[tuple[int, int], Results]
"""What each block contributes, by rank and hop."""

BLOCKS: dict[str, Blocks] = {
    "on blocks from other ranks only": lambda here, hop, owner: hop > 0,
    "on the rank's own block only": lambda here, hop, owner: hop == 0,
    "but not on the rank's own block under a causal mask": lambda here, hop, owner: hop > 0 or not here.problem.causal,
    "on the rank's own block under a causal mask only": lambda here, hop, owner: hop == 0 and here.problem.causal,
    "on the previous rank's block only (hop 1 of a ring that sends to the right)": lambda here, hop, owner: hop == 1,
    "on the next rank's block only (the last hop of a ring that sends to the right)": lambda here, hop, owner: (
        0 < hop == here.size - 1
    ),
    "from hop 2 on": lambda here, hop, owner: hop >= 2,
    "from hop 2 on, in a ring that sends to the left": lambda here, hop, owner: 0 < hop <= here.size - 2,
    "at odd hops only": lambda here, hop, owner: hop % 2 == 1,
    "at odd hops only, in a ring that sends to the left": lambda here, hop, owner: -hop % here.size % 2 == 1,
    "at even hops only": lambda here, hop, owner: hop % 2 == 0,
    "at even hops only, in a ring that sends to the left": lambda here, hop, owner: -hop % here.size % 2 == 0,
    "on the blocks of the ranks on either side only": lambda here, hop, owner: hop > 0 and hop in (1, here.size - 1),
    "on blocks at least 2 ranks away, either way round": lambda here, hop, owner: 2 <= hop <= here.size - 2,
    "on blocks of earlier ranks only": lambda here, hop, owner: owner < here.rank,
    "on blocks of later ranks only": lambda here, hop, owner: owner > here.rank,
    "on the block of rank 0 only": lambda here, hop, owner: owner == 0 < here.rank,
    "on the block of the last rank only": lambda here, hop, owner: here.rank < owner == here.size - 1,
    "on blocks with an odd number of keys only": lambda here, hop, owner: len(here.shards[owner]) % 2 == 1,
    "on blocks with an even number of keys only": lambda here, hop, owner: len(here.shards[owner]) % 2 == 0,
}
"""Which blocks a fault may be limited to, in words."""


def limited(steps: Steps, blocks: Blocks) -> Steps:
    """Restrict a fault of steps that run once a block to some blocks."""

    def chosen(now: Steps, here: Here, hop: int, owner: int) -> tuple[Steps, Steps]:
        """Return the steps of a block, and those whose loop over them is run."""
        return (steps, steps) if blocks(here, hop, owner) else (now, STEPS)

    def attend(now: Steps, here: Here, hop: int, owner: int, q: Tensor, block: Block) -> Any:
        of_block, loop = chosen(now, here, hop, owner)
        return loop.attend(of_block, here, hop, owner, q, block)

    def gradients(
        now: Steps, here: Here, hop: int, owner: int, rows: tuple[Tensor, ...], block: Block
    ) -> tuple[Tensor, Block]:
        of_block, loop = chosen(now, here, hop, owner)
        return loop.gradients(of_block, here, hop, owner, rows, block)

    def accumulate(now: Steps, here: Here, hop: int, running: Any, new: Any) -> Any:
        of_block, loop = chosen(now, here, hop, (here.rank - hop) % here.size)
        return loop.accumulate(of_block, here, hop, running, new)

    return replace(
        STEPS,
        attend=attend,
        gradients=gradients,
        accumulate=accumulate,
        times_in_dq=lambda here, hop, owner: steps.times_in_dq(here, hop, owner) if blocks(here, hop, owner) else 1,
        times_in_part=lambda here, hop, owner: (
            steps.times_in_part(here, hop, owner) if blocks(here, hop, owner) else (1, 1)
        ),
    )


AFTER_PARTS = frozenset(
    {"add_dq", "add_part", "travel", "arrive_gradients", "sum_queries", "narrow", "returned_gradients"}
)
"""Steps that come after what each block adds to gradients."""


class Limitable:
    """A fault on a case, and whether it may be there in some blocks only: cheaper than a prediction for each limit.

    What blocks contribute adds up, to gradients as it is and to out weighted by the exponentials of lse. So it is
    computed once with the fault and once without.

    Args:
        scene: the case.
        steps: the fault.
        backward: whether gradients are compared, after a right forward.
    """

    def __init__(self, scene: Scene, steps: Steps, *, backward: bool) -> None:
        self.scene, self.steps, self.backward = scene, steps, backward
        self.rank = next((rank for rank in range(scene.size) if wrong_rows(scene, rank, GROUPS[0]).any()), 0)
        self.wrong: Contributions | None = None
        with contextlib.suppress(reproducing.NoPrediction):
            self.wrong = self._of(steps)
            self.right = scene.once(("contributions", backward), lambda: self._of(STEPS))

    def _of(self, steps: Steps) -> Contributions:
        if self.backward:
            return reproducing.parts(self.scene, steps)
        found = reproducing.partials(self.scene, steps, self.rank)
        return {(self.rank, hop): {"out": out, "lse": lse} for hop, (out, lse) in enumerate(found)}

    def may_fit(self, chosen: Collection[tuple[int, int]]) -> bool:
        """Whether the fault may be that of these blocks, by rank and hop."""
        if self.wrong is None or not self.wrong.keys() >= self.right.keys() & set(chosen):
            return False  # it does not visit every block
        every = {place: (self.wrong if place in chosen else self.right)[place] for place in self.right}
        size = self.scene.size

        def added(name: TensorName, places: Iterable[tuple[int, int]]) -> Array:
            total: Array = np.sum([every[place][name] for place in places], axis=0)
            return total

        if self.backward:
            return all(
                self._near("dq", rank, added("dq", [(rank, hop) for hop in range(size)]))
                and self._near("dk", rank, added("dk", [((rank + hop) % size, hop) for hop in range(size)]))
                and self._near("dv", rank, added("dv", [((rank + hop) % size, hop) for hop in range(size)]))
                for rank in range(size)
            )
        with np.errstate(all="ignore"):
            return self._merged(every)

    def _merged(self, every: Contributions) -> bool:
        size = self.scene.size
        outs, lses = (np.stack([every[self.rank, hop][name] for hop in range(size)]) for name in ("out", "lse"))
        top = lses.max(axis=0)
        with np.errstate(all="ignore"):
            w = np.exp(lses - np.where(np.isinf(top), 0.0, top))
            total = w.sum(axis=0)
            out = (w[..., None] * outs).sum(axis=0) / np.where(total == 0, 1.0, total)[..., None]
            lse = np.where(np.isinf(top), 0.0, top) + np.log(total)
        return self._near("out", self.rank, out.swapaxes(1, 2)) and self._near("lse", self.rank, lse)

    def _near(self, name: TensorName, rank: int, predicted: Array) -> bool:
        if name not in self.scene.tensors:
            return True
        seen, limit = self.scene.seen(name, rank), self.scene.limit(name, rank)
        off, both = np.abs(seen - predicted), np.isfinite(seen) & np.isfinite(predicted)
        return bool((off <= limit + ROUGHLY * (1 + np.abs(seen)))[both].all())


Ranks = Callable[[Scene], tuple[int, ...]]

RANKS: dict[str, Ranks] = {
    "on rank 0 only": lambda scene: (0,),
    "on rank 1 only": lambda scene: (1,),
    "on the last rank only": lambda scene: (scene.size - 1,),
    "from rank 1 on": lambda scene: tuple(range(1, scene.size)),
    "from rank 2 on": lambda scene: tuple(range(2, scene.size)),
    "on even ranks only": lambda scene: tuple(range(0, scene.size, 2)),
    "on odd ranks only": lambda scene: tuple(range(1, scene.size, 2)),
}
"""Which ranks a fault of the backward may be limited to, in words: it may reach dk and dv of all others."""
