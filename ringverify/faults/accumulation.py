"""A: how partial results are accumulated and merged."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from ringverify.faults import arithmetic
from ringverify.faults.arithmetic import rounded, weight
from ringverify.faults.fault import Faults
from ringverify.faults.place import Block, Here, Partial
from ringverify.faults.ring import STEPS, Steps, whole
from ringverify.faults.tiles import forgetting, own_and_masked

FAULTS = Faults()


def _log1p(first: Partial, second: Partial) -> Partial:
    """Merge by log1p(exp(difference)), unguarded; empty partials are guarded, so that only the overflow is wrong."""
    lse = first.lse + torch.log1p(torch.exp(second.lse - first.lse))
    lse = torch.where(first.lse == -math.inf, second.lse, lse)
    shift = torch.where(lse == -math.inf, 0.0, lse)
    return Partial(weight(first.lse, shift) * first.out + weight(second.lse, shift) * second.out, lse)


A1 = FAULTS.add(
    "A1",
    "log1p overflows in the merge",
    story="l' = l + log(1 + exp(bl − l)) is inf where bl − l > 88; both weights become 0 and the row is 0, not NaN. "
    "Needs a block that dominates by 88 and is visited later than another.",
    source="zhuzilin/ring-flash-attention 9b84a6a; jzhang38/EasyContext#14",
    ring=replace(STEPS, merge=_log1p),
    cause="the merge overflows: log(1 + exp(difference)) is infinite and the row becomes 0",
    overflows=True,
)


def _unshifted(first: Partial, second: Partial) -> Partial:
    lse = torch.log(torch.exp(first.lse) + torch.exp(second.lse))
    shift = torch.where(lse == -math.inf, 0.0, lse)
    return Partial(weight(first.lse, shift) * first.out + weight(second.lse, shift) * second.out, lse)


A2a = FAULTS.add(
    "A2a",
    "log-sum-exps merged without a shift",
    story="log(exp(l) + exp(bl)) overflows past 88 and is −inf below −104. Needs large scores of one sign.",
    source="TransformerEngine#716; SHI-Labs/NATTEN#202",
    ring=replace(STEPS, merge=_unshifted),
    cause="the merge overflows: log-sum-exps are added without a shift",
    overflows=True,
)


def _plain_weights(first: Partial, second: Partial) -> Partial:
    a, b = torch.exp(first.lse)[..., None], torch.exp(second.lse)[..., None]
    total = a + b
    out = (a * first.out + b * second.out) / torch.where(total == 0, 1.0, total)
    return Partial(out, torch.logaddexp(first.lse, second.lse))


A2b = FAULTS.add(
    "A2b",
    "outputs weighted by exp(lse) without a shift",
    story="exp(l) · o over the sum of exp(l): inf / inf past 88, and 0 below −104, though lse is right.",
    source="TransformerEngine#716; SHI-Labs/NATTEN#202",
    ring=replace(STEPS, merge=_plain_weights),
    cause="the merge overflows: its weights are exp(lse), without a shift",
    overflows=True,
)


def _unguarded(first: Partial, second: Partial) -> Partial:
    top = torch.maximum(first.lse, second.lse)
    a, b = torch.exp(first.lse - top), torch.exp(second.lse - top)
    return Partial((a / (a + b))[..., None] * first.out + (b / (a + b))[..., None] * second.out, top + torch.log(a + b))


A3 = FAULTS.add(
    "A3",
    "two empty partials merge to NaN",
    story="−inf − (−inf) is NaN: a row that is masked in the first two visited blocks, or in all, is NaN.",
    source="flashinfer#4051; vllm#39148, #28181",
    ring=replace(STEPS, merge=_unguarded),
    cause="the merge of two empty parts is NaN: -inf - (-inf)",
)


def lse_of_blocks(change: Callable[[torch.Tensor], torch.Tensor], *, skipped: bool = True) -> Steps:
    """Another log-sum-exp of each block, by the right one: of blocks that are skipped whole, too, or not."""

    def changed(found: Partial) -> Partial:
        return found._replace(lse=change(found.lse))

    steps = replace(STEPS, partial=lambda s, m, v: changed(arithmetic.partial(s, m, v)))
    return replace(steps, nothing=lambda *those: changed(STEPS.nothing(*those))) if skipped else steps


def taken(value: float, other: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One value taken for another."""
    return lambda lse: torch.where(lse == value, other, lse)


A4a = FAULTS.add(
    "A4a",
    "an empty block reports lse +inf",
    story="It takes all the weight, or makes NaN of it. Needs a row that attends nothing in some block.",
    source="flash-attention#978; deepseek-ai/FlashMLA#77",
    ring=lse_of_blocks(taken(-math.inf, math.inf)),
    cause="a block without visible keys has lse +inf",
)
A4b = FAULTS.add(
    "A4b",
    "an empty block reports lse 0",
    story="As the CPU kernel of torch does: a part without keys weighs as much as a key of score 0.",
    source="aten::_scaled_dot_product_flash_attention_for_cpu (s)",
    ring=lse_of_blocks(taken(-math.inf, 0.0)),
    cause="a block without visible keys has lse 0",
)
A4c = FAULTS.add(
    "A4c",
    "a finite sentinel stands for −inf",
    story="lse of an empty row comes back as −1e8; merging hides it, the returned lse does not.",
    source="microsoft/torchscale dilated_attention.py (s)",
    ring=lse_of_blocks(taken(-math.inf, -1e8)),
    cause="a block without visible keys has lse -1e+08 instead of -inf",
    overflows=True,
)


A6 = FAULTS.add(
    "A6",
    "lse 0 taken as not computed",
    story="Zero-initialised lse is replaced by −1e8 wherever it is 0. With q = 0 and one visible key it is exactly 0.",
    source="microsoft/torchscale dilated_attention.py (s)",
    ring=lse_of_blocks(taken(0.0, -1e8)),
    cause="an lse of exactly 0 is taken for one that was not computed",
    overflows=True,
)


A8a = FAULTS.add(
    "A8a",
    "base-2 log-sum-exps merged as natural ones",
    story="The kernel's lse is in base 2, the merge takes it for natural, the end converts it. Right for one block and "
    "wherever the parts have equal mass.",
    source="vllm#28840, #47079; sglang#33064",
    ring=replace(
        lse_of_blocks(lambda lse: lse / math.log(2)),
        normalise=lambda whole: Partial(whole.out, whole.lse * math.log(2)),
    ),
    cause="base-2 log-sum-exps of blocks are merged as natural ones",
)
A8b = FAULTS.add(
    "A8b",
    "lse returned in base 2",
    story="Merge and backward are right; only a look at the returned lse shows it.",
    source="attention-gym#200 (r)",
    ring=whole(lambda here, found: found._replace(lse=found.lse / math.log(2))),
    cause="lse is in base 2",
)
A8c = FAULTS.add(
    "A8c",
    "backward takes a natural lse for base 2",
    story="P is recomputed with an lse off by the factor log 2; the forward is right.",
    source="pytorch#181645",
    ring=replace(STEPS, probabilities=lambda s, m, lse: arithmetic.probabilities(s, m, lse * math.log(2))),
    cause="the backward takes the natural lse for one in base 2",
)
A9 = FAULTS.add(
    "A9",
    "softmax of each block, outputs added",
    story="No log-sum-exp weights: about as many times too large as there are blocks. Any world of two.",
    source="DarcStar-Solutions-Tech/dilated-attention-pytorch 56bfe37",
    ring=replace(
        STEPS, merge=lambda first, second: Partial(first.out + second.out, torch.logaddexp(first.lse, second.lse))
    ),
    cause="out is the sum of the blocks' own softmaxes, without log-sum-exp weights",
)
A10 = FAULTS.add(
    "A10",
    "running sums reset on every masked tile",
    story="They should be on the first only: each masked tile of the diagonal block forgets the tiles before it. Needs "
    "two such tiles, so a shard longer than a tile.",
    source="flash-attention c85cb224",
    ring=forgetting(2, own_and_masked),
)


def _stale(steps: Steps, here: Here, hop: int, running: Partial | None, new: Partial) -> Partial:
    if bool((new.lse == -math.inf).all()) and "last" in here.notes:
        new = here.notes["last"]
    here.notes["last"] = new
    return new if running is None else Partial(*steps.merge(running, new))


A11 = FAULTS.add(
    "A11",
    "an empty split leaves the last one's result",
    story="A block in which nothing is visible does not write its accumulator; what the block before left there is "
    "merged again. Needs an empty block after one that is not.",
    source="flash-attention c701feef",
    ring=replace(STEPS, accumulate=_stale),
    cause="a block in which nothing is visible leaves the block before it to be merged again",
)


A12a = FAULTS.add(
    "A12a",
    "out kept in the input dtype between hops",
    story="Rounded once a hop: the error grows with the world. Needs half precision and peaked attention; a flat "
    "tolerance never sees it.",
    source="zhuzilin/ring-flash-attention#42, 756f085",
    kind="precision",
    ring=replace(STEPS, between=lambda here, whole: whole._replace(out=rounded(here, whole.out))),
)
A12b = FAULTS.add(
    "A12b",
    "dq kept in the input dtype between hops",
    story="As A12a, in backward.",
    source="flash-attention#2723; TransformerEngine 24c626dcf",
    kind="precision",
    ring=replace(STEPS, add_dq=lambda here, hop, total, part: rounded(here, total + part)),
)


def _narrow_travel(steps: Steps, here: Here, hop: int, owner: int, carried: Block | None, part: Block) -> Block:
    total = part if carried is None else STEPS.add_part(hop, carried, part)
    return STEPS.travel(steps, here, hop, owner, carried, Block(*(rounded(here, x) for x in total)))


A12c = FAULTS.add(
    "A12c",
    "dk and dv travel in the input dtype",
    story="Rounded at every hop on their way home.",
    source="zhuzilin/ring-flash-attention#42; TransformerEngine 24c626dcf",
    kind="precision",
    ring=replace(STEPS, travel=_narrow_travel, add_part=lambda hop, carried, part: part),
)
A12d = FAULTS.add(
    "A12d",
    "lse kept in the input dtype between hops",
    story="Weights of the merge come from a log-sum-exp of 8 or 11 bits.",
    source="zhuzilin/ring-flash-attention#42",
    kind="precision",
    ring=replace(STEPS, between=lambda here, whole: whole._replace(lse=rounded(here, whole.lse))),
)
