"""K: value dimensions and packed sequences."""

from __future__ import annotations

from dataclasses import replace

import torch

from ringverify.faults import pattern
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS

FAULTS = Faults()


def _split_by_rows(here: Here, block: Block) -> Block:
    """Packed along the last axis, `(…, D + E)`, and split as if all of dk came first."""
    packed = torch.cat([block.k, block.v], dim=-1).reshape(-1)
    return Block(packed[: block.k.numel()].view_as(block.k), packed[block.k.numel() :].view_as(block.v))


K1a = FAULTS.add(
    "K1a",
    "packed dk | dv split on the wrong axis",
    story="`dkv[:n]` for `dkv[:, :n]`: as many elements, of the wrong rows. Any block of two rows.",
    source="TransformerEngine#1896",
    ring=replace(STEPS, home=_split_by_rows),
)


def _split_as_equal(here: Here, block: Block) -> Block:
    """dv is looked for where it would begin if its rows were as long as those of dk, were they those of dv."""
    packed = torch.cat([block.k.reshape(-1), block.v.reshape(-1)])
    rows = block.k.numel() // here.problem.head_dim
    found = packed[rows * here.problem.dv :][: block.v.numel()]
    missing = block.v.numel() - found.numel()
    return Block(block.k, torch.nn.functional.pad(found, (0, missing)).view_as(block.v))


K1b = FAULTS.add(
    "K1b",
    "value_dim taken for head_dim in a packed gradient",
    story="dv begins where it would if both had one width. Right unless value_dim differs from head_dim.",
    source="TransformerEngine#1896",
    ring=replace(STEPS, home=_split_as_equal),
)


def _shaped_from_values(here: Here, whole: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = STEPS.returned(here, whole)
    return (out[:, :, : here.problem.hk] if here.problem.dv != here.problem.head_dim else out), lse


K1c = FAULTS.add(
    "K1c",
    "out shaped from the values",
    story="The heads of v in place of those of q. Needs grouped queries and another value_dim.",
    source="TransformerEngine#2868",
    kind="failure",
    ring=replace(STEPS, returned=_shaped_from_values),
)


K2a = FAULTS.add(
    "K2a",
    "cu_seqlens taken to start at 0",
    story="What lies before the first document is its part. Needs a first offset above 0.",
    source="TransformerEngine b4db9eb7e",
    ring=replace(
        STEPS,
        documents=lambda problem, i, j: pattern.documents(
            problem.replace(documents=(0, *(problem.documents or ())[1:])), i, j
        ),
    ),
)
K2b = FAULTS.add(
    "K2b",
    "the last document taken to end with the sequence",
    story="What lies after the last document is its part. Needs padding at the end.",
    source="TransformerEngine#1396",
    ring=replace(
        STEPS,
        documents=lambda problem, i, j: pattern.documents(
            problem.replace(documents=(*(problem.documents or ())[:-1], problem.nk)), i, j
        ),
    ),
)
