"""Faults of value dimensions and packed sequences (K in the reports)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ringref.problem import Problem
from ringverify.faults import pattern
from ringverify.faults.fault import Faults
from ringverify.faults.place import Here
from ringverify.faults.ring import STEPS, Steps, returning

FAULTS = Faults()


def _split_by_rows(here: Here, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Pack dk and dv along the last axis, `(..., D + E)`, and split as if all of dk came first."""
    packed = torch.cat([dk, dv], dim=-1).reshape(-1)
    return dq, packed[: dk.numel()].view_as(dk), packed[dk.numel() :].view_as(dv)


K1a = FAULTS.add(
    "K1a",
    "packed dk | dv split on the wrong axis",
    story="`dkv[:n]` for `dkv[:, :n]`: as many elements, of the wrong rows. Any block of two rows.",
    source="TransformerEngine#1896",
    ring=replace(STEPS, returned_gradients=_split_by_rows),
    cause="packed dk | dv is split by rows instead of columns",
)


def _split_as_equal(here: Here, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Look for dv in the packed buffer where it would begin if rows of dk were as long as rows of dv."""
    packed = torch.cat([dk.reshape(-1), dv.reshape(-1)])
    rows = dk.numel() // here.problem.head_dim
    found = packed[rows * here.problem.dv :][: dv.numel()]
    missing = dv.numel() - found.numel()
    return dq, dk, torch.nn.functional.pad(found, (0, missing)).view_as(dv)


K1b = FAULTS.add(
    "K1b",
    "value_dim taken for head_dim in a packed gradient",
    story="dv begins where it would if both had one width. Right unless value_dim differs from head_dim.",
    source="TransformerEngine#1896",
    ring=replace(STEPS, returned_gradients=_split_as_equal),
    cause="packed dk | dv is split as if value_dim were head_dim",
)


K1c = FAULTS.add(
    "K1c",
    "out shaped from the values",
    story="The heads of v in place of those of q. Needs grouped queries and another value_dim.",
    source="TransformerEngine#2868",
    kind="failure",
    ring=returning(
        lambda here, out, lse: (out[:, :, : here.problem.hk] if here.problem.dv != here.problem.head_dim else out, lse)
    ),
)


def documents_of(change: Callable[[Problem, tuple[int, ...]], tuple[int, ...]]) -> Steps:
    """Mask with other offsets of documents."""

    def documents(problem: Problem, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return pattern.documents(problem.replace(documents=change(problem, problem.documents or ())), i, j)

    return replace(STEPS, documents=documents)


K2a = FAULTS.add(
    "K2a",
    "cu_seqlens taken to start at 0",
    story="What lies before the first document is its part. Needs a first offset above 0.",
    source="TransformerEngine b4db9eb7e",
    ring=documents_of(lambda problem, offsets: (0, *offsets[1:])),
    cause="the first document is taken to start at 0",
    masks=True,
)
K2b = FAULTS.add(
    "K2b",
    "the last document taken to end with the sequence",
    story="What lies after the last document is its part. Needs padding at the end.",
    source="TransformerEngine#1396",
    ring=documents_of(lambda problem, offsets: (*offsets[:-1], problem.nk)),
    cause="the last document is taken to end with the sequence",
    masks=True,
)
