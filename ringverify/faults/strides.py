"""Faults of the memory layout of inputs and partial results (I in the reports)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.fault import Faults
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps, returning, whole

FAULTS = Faults()
Read = Callable[[Here, torch.Tensor], torch.Tensor]
"""What is read in place of an input."""


def as_dense(here: Here, x: torch.Tensor) -> torch.Tensor:
    """What lies in memory from the tensor's first element on, as far as the memory goes, in the order of its axes."""
    swapped = here.layout == "bhsd" and x.ndim == 4
    x = (x.transpose(1, 2) if swapped else x).detach()
    dense = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size() - x.storage_offset(),), (1,))
    read = memory[: dense.numel()]
    dense.view(-1)[: len(read)] = read
    dense.view(-1)[len(read) :] = 0
    return dense.transpose(1, 2) if swapped else dense


def from_start(here: Here, x: torch.Tensor) -> torch.Tensor:
    """Read with the right strides, but from the start of the storage."""
    return x.detach().as_strided(x.shape, x.stride(), 0) if x.numel() else x


def first_head(here: Here, x: torch.Tensor) -> torch.Tensor:
    """Read head 0 for every head, where the tensor is not dense."""
    b, s, h, _ = x.shape
    lies = b * s * h > 1 and x.is_contiguous()
    return x if lies or not x.numel() else x[:, :, :1].expand(x.shape)


def given(names: str, read: Read) -> Steps:
    """Read the inputs or cotangents of these names in another way."""
    chosen = names.split()
    return replace(STEPS, given=lambda here, name, x: read(here, x) if name in chosen else x)


I1a = FAULTS.add(
    "I1a",
    "strides of q ignored",
    story="The kernel reads q as if it were dense. Needs a transposed or strided view.",
    source="vllm#21996; flash-attention#2670, #2388, e7786a79; attorch#14",
    ring=given("q", as_dense),
    cause="strides of q ignored: its elements are read as they lie in memory",
)
I1b = FAULTS.add(
    "I1b",
    "storage offset taken for 0",
    story="Inputs are read from the start of their storage. Needs a view that does not start there.",
    source="huggingface/diffusers 518ffdf361",
    ring=given("q k v", from_start),
    when="forward",
    cause="storage offset taken for 0: q, k and v are read from the start of their memory",
    also=("always",),
)
I1c = FAULTS.add(
    "I1c",
    "strides of the cotangent ignored",
    story="As I1a, for dout in backward.",
    source="flash-attention#2388",
    ring=given("dout", as_dense),
    cause="strides of the cotangent of out ignored: elements are read as they lie in memory",
)
I1d = FAULTS.add(
    "I1d",
    "all heads read head 0",
    story="A hard-coded stride between heads is right for dense inputs only.",
    source="vllm#21996",
    ring=given("k v", first_head),
    cause="all heads of k and v read head 0, where their memory is not dense",
)
I1e = FAULTS.add(
    "I1e",
    "strides of the cotangent of lse ignored",
    story="As I1c, for dlse. Needs a gradient through lse whose cotangent is a view.",
    source="vllm#21996",
    ring=given("dlse", as_dense),
    cause="strides of the cotangent of lse ignored: elements are read as they lie in memory",
)


def _by_tokens(first: Partial, second: Partial) -> Partial:
    whole = arithmetic.merge(first, second)
    if first.lse.size(1) != first.lse.size(2):
        return whole
    turned = arithmetic.merge(*(part._replace(lse=part.lse.transpose(1, 2)) for part in (first, second)))
    return Partial(turned.out, whole.lse)


I2a = FAULTS.add(
    "I2a",
    "lse (tokens, heads) merged as (heads, tokens)",
    story="The weights of the merge are transposed; an error unless tokens equal heads, and silent then.",
    source="vllm-xpu-kernels#479; long-context-attention#128, #129; zhuzilin/ring-flash-attention#46",
    ring=replace(STEPS, merge=_by_tokens),
    cause="the merge's weights are transposed: lse (tokens, heads) taken for (heads, tokens)",
)


I2b = FAULTS.add(
    "I2b",
    "lse returned as (tokens, heads)",
    story="Has the right shape where tokens on a rank equal heads.",
    source="vllm#57012",
    ring=returning(
        lambda here, out, lse: (out, lse.transpose(1, 2).contiguous() if lse.size(1) == lse.size(2) else lse)
    ),
    cause="lse is returned as (tokens, heads)",
)


def _not_written(here: Here, found: Partial) -> Partial:
    seen = (found.lse != -torch.inf)[..., None]
    return found._replace(out=torch.where(seen, found.out, torch.empty_like(found.out)))


I3a = FAULTS.add(
    "I3a",
    "rows without keys are not written",
    story="out of a padded row is whatever was in memory. Often zero, until it is not.",
    source="TransformerEngine db44fc2b9, eb7653dd3",
    kind="state",
    ring=whole(_not_written),
)


def _not_written_back(here: Here, x: torch.Tensor) -> torch.Tensor:
    written = STEPS.narrow(here, x)
    padded = (written == 0).all(dim=-1, keepdim=True)
    return torch.where(padded, torch.empty_like(written), written)


I3b = FAULTS.add(
    "I3b",
    "dq of rows without keys is not written",
    story="As I3a, in backward.",
    source="TransformerEngine eb7653dd3",
    kind="state",
    ring=replace(STEPS, narrow=_not_written_back),
)
