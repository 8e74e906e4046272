"""Correct implementations of what not everybody declares: learned sinks, a growing cache, balanced documents."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import torch

from ringverify.faults.arithmetic import sinks_of
from ringverify.faults.documents import BALANCED
from ringverify.faults.incremental import CACHES
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps
from ringverify.faults.sinks import SINKS
from ringverify.lab import gathered, variants_of_transport
from ringverify.lab.variant import Variants

ROWS = Variants()
Tensor = torch.Tensor


def _gate(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    none, of_keys = lse == -math.inf, torch.where(lse == -math.inf, 0.0, lse)
    gate = torch.where(none, 0.0, torch.sigmoid(of_keys - sinks))
    total = torch.where(none, sinks, torch.logaddexp(of_keys, sinks))
    return out * gate[..., None], torch.where(total == -math.inf, -math.inf, total)  # a row of nothing has no gradient


def _column(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.stack([lse, sinks.expand_as(lse)], dim=-1)
    none = (both == -math.inf).all(dim=-1, keepdim=True)
    safe = torch.where(none, 0.0, both)
    weights = torch.where(none, 0.0, safe.softmax(dim=-1))
    return out * weights[..., :1], torch.where(none[..., 0], -math.inf, safe.logsumexp(dim=-1))


def _from_the_sink(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
    if running is None and here.problem.sinks and not here.replicated:
        running = Partial(torch.zeros_like(new.out), sinks_of(here).expand_as(new.lse))
    merged: Partial = STEPS.accumulate(steps, here, hop, running, new)
    return merged


ROWS.add(
    "sink_gate",
    "The output without the sink is multiplied by sigmoid(lse - sink), and autograd differentiates that.",
    functools.partial(gathered.by_allgather, joined=_gate),
    replace(SINKS, sinks="partial"),
)
ROWS.add(
    "sink_column",
    "The sink is a column beside lse, both in one softmax, of which autograd takes the gradient.",
    functools.partial(gathered.by_allgather, joined=_column),
    replace(SINKS, sinks="partial"),
)
ROWS.add(
    "sink_first",
    "What is merged begins with the sink, before any key; where all ranks have all queries, the sink joins at the end.",
    replace(
        STEPS,
        accumulate=_from_the_sink,
        sink=lambda here, whole: STEPS.sink(here, whole) if here.replicated else whole,
    ),
    SINKS,
)

for _claims, _name, _where in ((SINKS, "sinks", "with sinks"), (CACHES, "caches", "on a growing cache"),
                               (BALANCED, "balanced", "with documents balanced over the ranks")):  # fmt: skip
    for _id in ("reversed_ring", "keys_flipped", "tree_merge"):
        _one = variants_of_transport.ROWS.variants[_id]
        ROWS.add(f"{_id}_{_name}", f"As {_id}, {_where}.", _one.implementation.function, _claims)
