"""I: memory layout of inputs and partial results."""

from __future__ import annotations

from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.communication import _as_dense
from ringverify.faults.fault import Faults
from ringverify.faults.place import Here, Partial
from ringverify.faults.ring import STEPS, Steps

FAULTS = Faults()


def _strides_ignored(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    return STEPS.forward(steps, here, _as_dense(q), k, v)


I1a = FAULTS.add(
    "I1a",
    "strides of q ignored",
    story="The kernel reads q as if it were dense. Needs a transposed or strided view.",
    source="vllm#21996; flash-attention#2670, #2388, e7786a79; attorch#14",
    ring=replace(STEPS, forward=_strides_ignored),
)


def _offset_ignored(steps: Steps, here: Here, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Partial:
    from_start = [x.detach().as_strided(x.shape, x.stride(), 0) if x.numel() else x for x in (q, k, v)]
    return STEPS.forward(steps, here, *from_start)


I1b = FAULTS.add(
    "I1b",
    "storage offset taken for 0",
    story="Inputs are read from the start of their storage. Needs a view that does not start there.",
    source="huggingface/diffusers 518ffdf361",
    ring=replace(STEPS, forward=_offset_ignored),
)


def _cotangent_as_dense(
    steps: Steps, here: Here, saved: tuple[torch.Tensor, ...], dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return STEPS.backward(steps, here, saved, _as_dense(dout), dlse)


I1c = FAULTS.add(
    "I1c",
    "strides of the cotangent ignored",
    story="As I1a, for dout in backward.",
    source="flash-attention#2388",
    ring=replace(STEPS, backward=_cotangent_as_dense),
)


def _first_head(x: torch.Tensor) -> torch.Tensor:
    b, s, h, _ = x.shape
    lies = b * s * h > 1 and x.is_contiguous()
    return x if lies or not x.numel() else x[:, :, :1].expand(x.shape)


I1d = FAULTS.add(
    "I1d",
    "all heads read head 0",
    story="A hard-coded stride between heads is right for dense inputs only.",
    source="vllm#21996",
    ring=replace(STEPS, outgoing=lambda k, v: STEPS.outgoing(_first_head(k), _first_head(v))),
)


def _lse_as_dense(
    steps: Steps, here: Here, saved: tuple[torch.Tensor, ...], dout: torch.Tensor, dlse: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return STEPS.backward(steps, here, saved, dout, _as_dense(dlse))


I1e = FAULTS.add(
    "I1e",
    "strides of the cotangent of lse ignored",
    story="As I1c, for dlse. Needs a gradient through lse whose cotangent is a view.",
    source="vllm#21996",
    ring=replace(STEPS, backward=_lse_as_dense),
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
)


def _turned(here: Here, whole: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = STEPS.returned(here, whole)
    return out, lse.transpose(1, 2).contiguous() if lse.size(1) == lse.size(2) else lse


I2b = FAULTS.add(
    "I2b",
    "lse returned as (tokens, heads)",
    story="Has the right shape where tokens on a rank equal heads.",
    source="vllm#57012",
    ring=replace(STEPS, returned=_turned),
)


def _not_written(here: Here, whole: Partial) -> tuple[torch.Tensor, torch.Tensor]:
    seen = (whole.lse != -torch.inf)[..., None]
    return STEPS.returned(here, whole._replace(out=torch.where(seen, whole.out, torch.empty_like(whole.out))))


I3a = FAULTS.add(
    "I3a",
    "rows without keys are not written",
    story="out of a padded row is whatever was in memory. Often zero, until it is not.",
    source="TransformerEngine db44fc2b9, eb7653dd3",
    kind="state",
    ring=replace(STEPS, returned=_not_written),
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
