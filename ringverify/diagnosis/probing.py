"""Find by further runs where an implementation is wrong: each key's weight in each row, each rank's part in dk and dv.

Out is linear in v: with values that are 0 except at one key, out is that key's weight. dk and dv are linear in the
cotangents: with the cotangents of one rank alone, they are what its queries add. The parts have to add up to what the
case itself returned; if they do not, the implementation is not linear, and nothing is reported.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringref.attention import attention
from ringref.rounding import margins
from ringref.sharding import Positions
from ringverify.cases.comparing import allowed_on
from ringverify.cases.inputs import Inputs
from ringverify.diagnosis import reproducing
from ringverify.diagnosis.hypothesis import comparable, relative_rounding
from ringverify.diagnosis.scene import Array, Counts, Scene
from ringverify.diagnosis.where import Mask, Probe, wrong_elements
from ringverify.events import TensorName, What, WrongPair
from ringverify.faults.ring import STEPS

SURE = 8
"""A factor is taken for a whole number if the distance between two of them is this many times its rounding error."""

PROBES = 24
"""Runs for one case, at most; the smallest failing cases need two to six."""

SECONDS = 2.0
"""Seconds after which probing gives up and reports nothing."""


class Asked:
    """Further runs of an implementation on one case; its weights are found once and kept.

    Args:
        scene: the case, and what was seen of it.
        probe: runs the implementation on the case with other inputs.
    """

    def __init__(self, scene: Scene, probe: Probe) -> None:
        self.scene = scene
        self.probe = probe

    def finite(self, tensor: TensorName) -> bool:
        """Whether inputs and a result are finite and their sums keep a digit: otherwise nothing is linear."""
        if not comparable(self.scene):
            return False
        finite = all(np.isfinite(self.scene.seen(tensor, rank)).all() for rank in range(self.scene.size))
        return finite and _finite(self.scene.inputs)

    @functools.cached_property
    def weights(self) -> tuple[list[Array], Array] | None:
        """Each rank's actual weights `(B, H, S, Nk)`, and the error allowed in all weights `(B, H, Nq, Nk)`."""
        return _weights(self.scene, self.probe) if self.finite("out") else None

    def pairs(self, tensor: TensorName) -> Sequence[WrongPair]:
        """Return the pairs of ranks between whose queries and keys a result is wrong; empty if that cannot be told."""
        if not self.finite(tensor):
            return ()
        with np.errstate(all="ignore"):
            match tensor:
                case "out":
                    return _by_weight(self)
                case "lse":
                    return _by_mass(self.scene) or _by_weight(self)
                case "dq":
                    return _in_dq(self.scene)
                case "dk" | "dv":
                    return _in_blocks(self.scene, self.probe, tensor)
                case "dsinks":  # no result of a query or a key
                    return ()


def _finite(x: Inputs) -> bool:
    return all(np.isfinite(each).all() for each in (x.q, x.k, x.v, x.dout, x.dlse))


# -- weights -----------------------------------------------------------------------------------------------------------


def _weights(scene: Scene, probe: Probe) -> tuple[list[Array], Array] | None:
    """Find `Asked.weights`; `None` if that takes too many runs or too long, or if the weights do not add up."""
    p = scene.problem
    if not p.nk or -(-p.nk // p.dv) > PROBES:
        return None
    found = [np.zeros((p.batch, p.heads, len(rows), p.nk)) for rows in scene.shards[0]]
    limits = np.zeros((p.batch, p.heads, p.nq, p.nk))
    until = time.monotonic() + SECONDS
    for start in range(0, p.nk, p.dv):
        chosen = np.arange(start, min(start + p.dv, p.nk))
        v = np.zeros_like(scene.inputs.v)
        v[:, chosen, :, chosen - start] = 1.0
        inputs = dataclasses.replace(scene.inputs, v=v)
        observation = probe(scene.case, inputs)
        if observation.failure is not None or time.monotonic() > until:
            return None
        limit = allowed_on(scene.case, inputs, scene.pipeline).out
        limits[..., chosen] = limit.swapaxes(1, 2)[..., : len(chosen)]
        for rank, result in enumerate(observation.ranks):
            found[rank][..., chosen] = result.out.swapaxes(1, 2)[..., : len(chosen)]
    return (found, limits) if _add_up(scene, found, limits) else None


def _add_up(scene: Scene, weights: list[Array], limits: Array) -> bool:
    """Whether the weights times the values give the out that was seen."""
    v = scene.inputs.v.swapaxes(1, 2).repeat(scene.problem.group_size, axis=1)
    for rank, w in enumerate(weights):
        rows = scene.shards[0][rank]
        rounding = relative_rounding(scene, "out") * np.abs(w) + limits[:, :, rows]
        limit = (rounding @ np.abs(v)).swapaxes(1, 2) + scene.limit("out", rank)
        if (margins(scene.seen("out", rank), (w @ v).swapaxes(1, 2), limit, scene.problem.dtype) > 1).any():
            return False
    return True


def _by_weight(asked: Asked) -> Sequence[WrongPair]:
    """Return the pairs of ranks with wrong weights."""
    if (probed := asked.weights) is None:
        return ()
    scene = asked.scene
    found: dict[tuple[What, int, int], set[int]] = {}
    weights, limits = probed
    inner = scene.truth.intermediates
    owner_of = np.zeros(scene.problem.nk, dtype=np.int64)
    for owner, held in enumerate(scene.shards[1]):
        owner_of[held] = owner
    for rank, w in enumerate(weights):
        for local, position in enumerate(scene.shards[0][rank]):
            for place in itertools.product(range(scene.problem.batch), range(scene.problem.heads)):
                at = (*place, position)
                for what, keys in _told(w[(*place, local)], inner.probabilities[at], inner.m[at], limits[at]):
                    for key in keys:
                        found.setdefault((what, rank, int(owner_of[key])), set()).add(key)
    return _sorted(scene, found)


def _told(w: Array, p: Array, m: Counts, limit: Array) -> Iterator[tuple[What, list[int]]]:
    """Yield what is wrong with the weights `(Nk,)` of one row, and the keys concerned."""
    wrong = ~(np.abs(w - p) <= limit)
    if not wrong.any():
        return
    forbidden = wrong & (m == 0)
    # Where forbidden keys take most of a row's weight, what is left of a key may be too little to be seen.
    seen = (m > 0) & (np.abs(w) > limit) & (p > 0)
    kept = (np.abs(w[seen]) / p[seen]).max() if seen.any() else 0.0 if forbidden.any() else 1.0
    missing = wrong & (m > 0) & (np.abs(w) <= limit) & (p * min(kept, 1.0) > 2 * limit)
    if missing.any():
        yield "missing", _numbers(missing)
    if forbidden.any():
        yield "forbidden", _numbers(forbidden)
    # Among the other keys, those whose factor differs from the rest: of a block merged twice, or weighed wrongly.
    there = (p > limit) & ~missing
    if not there.any():
        return
    factor, off = w[there] / p[there], limit[there] / p[there]
    least = int(np.argmin(np.abs(factor)))
    times = factor / factor[least]
    nearest = np.rint(times)
    slack = 2 * (off + off[least] / np.abs(factor[least])) * np.abs(nearest)
    if bool((np.abs(times - nearest) <= slack).all()) and bool((SURE * slack < 1).all()):
        if (nearest > 1).any():
            yield "repeated", [key for key, n in zip(_numbers(there), nearest, strict=True) if n > 1]
        elif not missing.any() and not forbidden.any():
            yield "scaled", _numbers(there)
    elif not missing.any() and not forbidden.any():
        yield "wrong", _numbers(wrong)


def _numbers(mask: Mask) -> list[int]:
    return [int(number) for number in np.flatnonzero(mask)]


def _sorted(scene: Scene, found: dict[tuple[What, int, int], set[int]]) -> list[WrongPair]:
    pairs = []
    for (what, rank, owner), keys in found.items():
        hop = None if scene.replicated or scene.size == 1 else (rank - owner) % scene.size
        pairs.append(WrongPair(rank, owner, hop, tuple(sorted(keys)), what))
    return sorted(pairs, key=lambda pair: (pair.rank, pair.hop or 0, pair.what))


# -- parts -------------------------------------------------------------------------------------------------------------


def _subsets(size: int) -> list[tuple[What, tuple[int, ...]]]:
    """Return sets of blocks that may be missing or counted twice, the smallest sets first."""
    most = size if size <= 4 else 1
    missing = [of for count in range(1, most + 1) for of in itertools.combinations(range(size), count)]
    alone = [] if size <= 4 else [tuple(o for o in range(size) if o != own) for own in range(size)]
    found: list[tuple[What, tuple[int, ...]]] = [("missing", of) for of in (*missing, *alone)]
    return found + [("repeated", (owner,)) for owner in range(size)]


def _explained_rows(
    scene: Scene, tensor: TensorName, with_: Callable[[int, What, tuple[int, ...]], Array]
) -> Sequence[WrongPair]:
    """Return the fewest missing or repeated blocks that explain each wrong row; empty unless all rows are explained."""
    found: dict[tuple[What, int, int], set[int]] = {}
    for rank in range(scene.size):
        wrong = wrong_elements(scene, tensor, rank)
        axes = (0, 2, 3) if wrong.ndim == 4 else (0, 1)
        left = set(np.flatnonzero(wrong.any(axis=axes)).tolist())
        for what, owners in _subsets(scene.size):
            if not left:
                break
            expected, true = with_(rank, what, owners), scene.true(tensor, rank)
            limit = np.maximum(scene.limit(tensor, rank), relative_rounding(scene, tensor) * np.abs(expected))
            agree = margins(scene.seen(tensor, rank), expected, limit, scene.problem.dtype) <= 1
            # A block that a row does not attend does not explain it, however small the error of the row is.
            other = margins(expected, true, limit, scene.problem.dtype) > 1
            for row in sorted(left & set(np.flatnonzero(agree.all(axis=axes) & other.any(axis=axes)).tolist())):
                left.discard(row)
                for owner in owners:
                    found.setdefault((what, rank, owner), set()).update(scene.shards[1][owner].tolist())
        if left:
            return ()
    return _sorted(scene, found)


def _by_mass(scene: Scene) -> Sequence[WrongPair]:
    """Return the pairs of ranks whose block lse counts twice or not at all."""
    inner = scene.truth.intermediates

    def lse_with(rank: int, what: What, owners: tuple[int, ...]) -> Array:
        rows = scene.shards[0][rank]
        share = sum(inner.probabilities[:, :, rows][..., scene.shards[1][o]].sum(axis=-1) for o in owners)
        seen: Array = inner.lse[:, :, rows] + np.log(1 - share if what == "missing" else 1 + share)
        return seen

    return _explained_rows(scene, "lse", lse_with)


def _in_dq(scene: Scene) -> Sequence[WrongPair]:
    """Return the pairs of ranks whose block dq counts twice or not at all."""
    if scene.replicated:
        return ()
    whole = reproducing.forward(scene, lambda rank: STEPS)

    def only(owner: int) -> list[Array]:
        steps = dataclasses.replace(STEPS, times_in_dq=lambda here, hop, whose: float(whose == owner))
        return [results["dq"] for results in reproducing.backward(scene, lambda rank: steps, whole)]

    parts = [only(owner) for owner in range(scene.size)]

    def dq_with(rank: int, what: What, owners: tuple[int, ...]) -> Array:
        true: Array = scene.true("dq", rank)
        change = sum(parts[owner][rank] for owner in owners)
        return true - change if what == "missing" else true + change

    return _explained_rows(scene, "dq", dq_with)


Part = tuple[Array, Array, Array]
"""Something added to dk or dv of a block: as it is, as it should be, and the error allowed."""


def parts(scene: Scene, probe: Probe, tensor: TensorName, queries: Sequence[Positions]) -> list[list[Part]] | None:
    """Find what queries at some positions add to dk or dv of every block; `None` if the parts do not add up."""
    found: list[list[Part]] = []
    totals = [np.zeros_like(scene.seen(tensor, owner)) for owner in range(scene.size)]
    limits = [np.array(scene.limit(tensor, owner)) for owner in range(scene.size)]
    until = time.monotonic() + SECONDS
    for rows in queries:
        x = cotangents_of(scene.inputs, rows)
        observation = probe(scene.case, x)
        if observation.failure is not None or time.monotonic() > until:
            return None
        exact = getattr(attention(scene.problem, x.q, x.k, x.v, x.dout, x.dlse, x.sinks), tensor)
        allowed = getattr(allowed_on(scene.case, x, scene.pipeline), tensor)
        found.append([])
        for owner in range(scene.size):
            seen, limit = getattr(observation.ranks[owner], tensor), scene.local(tensor, allowed, owner)
            totals[owner] += seen
            limits[owner] += limit + relative_rounding(scene, tensor) * np.abs(seen)
            found[-1].append((seen, scene.local(tensor, exact, owner), limit))
    for owner, total in enumerate(totals):
        if (margins(total, scene.seen(tensor, owner), limits[owner], scene.problem.dtype) > 1).any():
            return None  # not linear in the cotangents: the parts say nothing
    return found


def _in_blocks(scene: Scene, probe: Probe, tensor: TensorName) -> Sequence[WrongPair]:
    """Return the pairs of ranks where the queries of one add a wrong part to dk or dv of the other's block."""
    held = {rank: rows for rank, rows in enumerate(scene.shards[0]) if len(rows)}
    if scene.replicated or scene.size > PROBES or (told := parts(scene, probe, tensor, [*held.values()])) is None:
        return ()
    found: dict[tuple[What, int, int], set[int]] = {}
    for rank, of_rank in zip(held, told, strict=True):
        for owner, part in enumerate(of_rank):
            if (what := _kind(functools.partial(_agree, scene), *part)) is not None:
                found[what, rank, owner] = set(scene.shards[1][owner].tolist())
    return _sorted(scene, found)


def _agree(scene: Scene, seen: Array, expected: Array, limit: Array) -> bool:
    return not (margins(seen, expected, limit, scene.problem.dtype) > 1).any()


def _kind(agree: Callable[[Array, Array, Array], bool], seen: Array, true: Array, limit: Array) -> What | None:
    if agree(seen, true, limit):
        return None
    if agree(seen, np.zeros_like(true), limit):
        return "missing"
    if agree(true, np.zeros_like(true), limit):
        return "forbidden"
    return "repeated" if agree(seen, 2 * true, 2 * limit) else "wrong"


def cotangents_of(inputs: Inputs, rows: Positions) -> Inputs:
    """Return the inputs with the cotangents of all other rows set to 0."""
    dout, dlse = np.zeros_like(inputs.dout), np.zeros_like(inputs.dlse)
    dout[:, rows], dlse[:, :, rows] = inputs.dout[:, rows], inputs.dlse[:, :, rows]
    return dataclasses.replace(inputs, dout=dout, dlse=dlse)
