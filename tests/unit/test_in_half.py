"""What is computed in a 16-bit dtype is told by the size of its errors, where no digits tell how it was written."""

from dataclasses import replace

import pytest
import torch
from mechanisms import case_of, seen

from ringverify.diagnosis.in_half import DELTA, in_half
from ringverify.diagnosis.where import wrong_tensors
from ringverify.faults import arithmetic
from ringverify.faults.place import Partial
from ringverify.faults.ring import EVERYTHING, STEPS, ring_of
from ringverify.implementation import Implementation

CASES = [
    case_of(size=size, query_length=6 * size, head_dim=8, dtype="bfloat16", seed=size, causal=causal)
    for size, causal in ((2, False), (3, True))
]


def narrow(x):
    """In bfloat16."""
    return x.to(torch.bfloat16)


def merged(first, second):
    """Weights, products and sums of a merge are all of the dtype of the inputs."""
    lse = torch.logaddexp(first.lse, second.lse)
    shift = torch.where(lse == -torch.inf, 0.0, lse)
    a, b = (narrow((one.lse - shift).exp())[..., None] * narrow(one.out) for one in (first, second))
    total = narrow((first.lse - shift).exp()) + narrow((second.lse - shift).exp())
    return Partial((a + b).to(first.out.dtype), torch.where(lse == -torch.inf, lse, shift + total.to(lse.dtype).log()))


def summed(s, m, v):
    """Weighted values are added key by key, in the dtype of the inputs."""
    found = arithmetic.partial(s, m, v)
    w = arithmetic.probabilities(s, m, torch.where(found.lse == -torch.inf, 0.0, found.lse))
    total = narrow(torch.zeros_like(found.out))
    for key in range(v.size(2)):
        total = total + narrow(w[..., key, None]) * narrow(v[:, :, None, key])
    return found._replace(out=total.to(found.out.dtype))


def in_dk(ds, q, scale, attended):
    """Its products are added query by query, in the dtype of the inputs."""
    total = narrow(torch.zeros(*ds.shape[:2], ds.size(3), q.size(3)))
    for query in range(q.size(2)):
        total = total + narrow(ds[:, :, query, :, None]) * narrow(q[:, :, query, None])
    return (total * scale).to(q.dtype)


TOLD = {
    "partial results of ranks are sent or merged in the dtype of the inputs": (replace(STEPS, merge=merged), False),
    "weighted values are summed in the dtype of the inputs": (replace(STEPS, partial=summed), False),
    "dk is computed in the dtype of the inputs": (replace(STEPS, dk=in_dk), True),
}


def told(steps, *, gradients):
    """What is said of a ring of these steps in all cases, and what is wrong of them."""
    scenes, _ = seen(Implementation(ring_of(steps), "half", EVERYTHING), CASES, gradients=gradients)
    found = [one for one in in_half(scenes) if all(one.explains(scene) is not None for scene in scenes)]
    return [one.sentence() for one in found], [wrong_tensors(scene) for scene in scenes]


@pytest.mark.parametrize("words", TOLD)
def test_what_is_computed_in_16_bits_is_told(words):
    """In rows where it shows, and right in others."""
    steps, gradients = TOLD[words]
    said, wrong = told(steps, gradients=gradients)
    assert all(wrong)
    assert said[0].startswith(words)


@pytest.mark.parametrize(
    "steps",
    [
        replace(STEPS, merge=lambda a, b: Partial((a.out + b.out) / 2, torch.logaddexp(a.lse, b.lse))),
        replace(
            STEPS,
            partial=lambda s, m, v: arithmetic.partial(s, m, v)._replace(out=1.1 * arithmetic.partial(s, m, v).out),
        ),
        replace(STEPS, partial=lambda s, m, v: (p := arithmetic.partial(s, m, v))._replace(lse=p.lse + 0.01)),
    ],
)
def test_what_is_wrong_by_more_or_elsewhere_is_not(steps):
    """A plain average; a factor that shows in rows of one key too; an lse that is off on a single rank."""
    said, wrong = told(steps, gradients=False)
    assert all(wrong)
    assert said == []


def in_delta(dout, out, dlse):
    """Out times its cotangent is added up in the dtype of the inputs."""
    return (narrow(dout) * narrow(out)).sum(dim=-1).to(dout.dtype) - dlse


def test_delta_in_16_bits_is_told_by_one_number_a_row():
    """The same number explains dq and dk; what is rounded pair by pair has none, and a wrong dv another reason."""
    short = [replace(case, values="normal").replace(query_length=2, world_size=1) for case in CASES]
    scenes, _ = seen(
        Implementation(ring_of(replace(STEPS, delta=in_delta)), "delta", EVERYTHING), [*CASES, *short], gradients=True
    )
    assert any(wrong_tensors(scene) for scene in scenes)
    assert all(DELTA.explains(scene) is not None for scene in scenes if wrong_tensors(scene))
    for steps in (
        replace(STEPS, dk=in_dk),
        replace(STEPS, ds=lambda p, dp, delta: 1.02 * arithmetic.ds(p, dp, delta)),
        replace(STEPS, delta=lambda dout, out, dlse: 1.2 * (dout * out).sum(dim=-1) - dlse),
    ):
        others, _ = seen(Implementation(ring_of(steps), "others", EVERYTHING), CASES, gradients=True)
        assert all(wrong_tensors(scene) for scene in others)
        assert not all(DELTA.explains(scene) is not None for scene in others)
