"""Terms of gradients that lack a factor, sinks' gradients, and a workspace that is not cleared are told by name."""

from dataclasses import replace

import pytest
import torch
from mechanisms import case_of as on_three
from mechanisms import explaining, library, seen
from test_reading_results import case_of, named

from ringverify.diagnosis.rearranging import REARRANGED
from ringverify.diagnosis.standing import Standing
from ringverify.faults import arithmetic
from ringverify.faults.place import Block
from ringverify.faults.ring import EVERYTHING, PLAIN, STEPS, multiplicity, ring_of, sinks_backward
from ringverify.implementation import Implementation

pytestmark = pytest.mark.timeout(60)
NO_LSE = replace(EVERYTHING, lse_gradient=False)
WITH_SINKS = replace(EVERYTHING, sinks=True)


def dk_without_slope(steps, here, hop, owner, rows, block):
    """dk of scores without a softcap's derivative."""
    flat = replace(steps, gradients=STEPS.gradients, cap_slope=lambda s, softcap: torch.ones_like(s))
    dq, part = STEPS.gradients(steps, here, hop, owner, rows, block)
    return dq, Block(STEPS.gradients(flat, here, hop, owner, rows, block)[1].k, part.v)


def uncleared(written):
    """A workspace that is added whole, in which some rows are written, by those that a query attends."""
    left = {}

    def gradients(steps, here, hop, owner, rows, block):
        dq, part = STEPS.gradients(steps, here, hop, owner, rows, block)
        attended = (multiplicity(steps, here, hop, owner) > 0).any(0).any(0).any(0)
        wrote = written(attended)[None, :, None, None]
        room = left[here.rank] if hop else [x.new_zeros(x.size(0), 20, *x.shape[2:]) for x in part]
        held = [torch.where(wrote, x, old[:, : x.size(1)]) for x, old in zip(part, room, strict=True)]
        left[here.rank] = [torch.cat([x, old[:, x.size(1) :]], dim=1) for x, old in zip(held, room, strict=True)]
        return dq, Block(*held)

    return replace(STEPS, gradients=gradients)


def by_halves(attended):
    """Both halves of the rows, each if one of them is attended."""
    early = attended.size(0) - attended.size(0) // 2
    return torch.cat([half.any().expand(half.size(0)) for half in (attended[:early], attended[early:])])


WRITTEN = {
    "rows": lambda attended: attended,
    "pieces": by_halves,
    "blocks": lambda attended: attended.any().expand(attended.size(0)),
}


def test_a_default_scale_in_one_gradient_is_told():
    """It shows where another scale was asked for."""
    steps = replace(STEPS, dq=lambda ds, k, scale, attended: arithmetic.dq(ds, k, k.size(-1) ** -0.5, attended))
    told = "what is added to dq has the default scale, head_dim ** -0.5, and not that which was asked for"
    assert named(steps, case_of(scale=0.3), gradients=True, capabilities=NO_LSE) == told


@pytest.mark.nightly
def test_a_derivative_that_is_missing_in_one_gradient_is_told():
    """dq has the softcap's, dk has not."""
    steps = replace(STEPS, gradients=dk_without_slope)
    told = "the derivative of the softcap in ds of dk is missing"
    assert named(steps, case_of(softcap=2.0), gradients=True, capabilities=NO_LSE) == told


@pytest.mark.parametrize("what", WRITTEN)
@pytest.mark.by_day(1)
def test_a_workspace_that_is_not_cleared_is_told(what):
    """Its rows, halves or blocks get once more what an earlier block left."""
    case = case_of(causal=True, query_length=16, window=(2, 0))
    contiguous = replace(NO_LSE, sharding=("contiguous",))
    assert named(uncleared(WRITTEN[what]), case, gradients=True, capabilities=contiguous) == (
        f"the workspace of dk and dv is not cleared between blocks: {what} of a block that no query of the rank "
        "attends get once more what an earlier block left there"
    )


def in_turn(found, size):
    """Heads of ranks one after the other, as if they were dealt in turn."""
    return found if len(found) % size else found.reshape(size, -1).T.ravel()


SINKS = {
    "lacks the cotangent of lse": lambda steps, here, saved, dout, dlse: sinks_backward(
        steps, here, saved, dout, 0 * dlse
    ),
    "has the other sign": lambda *given: -sinks_backward(*given),
    "is multiplied by the number of ranks": lambda steps, here, *given: (
        here.size * sinks_backward(steps, here, *given)
    ),
    "lies in the order (head of the rank, rank)": lambda steps, here, *given: in_turn(
        sinks_backward(steps, here, *given), here.size
    ),
    "is 0 on each rank for the heads of others, not summed over ranks: heads are dealt out in blocks": (
        lambda steps, here, *given: torch.where(
            torch.arange(here.problem.heads) * here.size // here.problem.heads == here.rank,
            sinks_backward(steps, here, *given),
            0.0,
        )
    ),
    "has the other sign, and is that of the head before": lambda *given: -sinks_backward(*given).roll(1),
}  # fmt: skip


@pytest.mark.parametrize("words", SINKS)
def test_a_gradient_of_sinks_that_alone_is_wrong_is_told(words):
    """Terms, queries, batch elements and heads may be others, two of them at once."""
    steps, case = replace(STEPS, sinks_backward=SINKS[words]), case_of(sinks=True, heads=8).replace(cotangent="both")
    assert named(steps, case, gradients=True, capabilities=WITH_SINKS) == f"the gradient of sinks {words}"


def test_a_gradient_of_sinks_that_nothing_gives_has_no_cause():
    """Nor has one that is right."""
    strange = replace(STEPS, sinks_backward=lambda *given: sinks_backward(*given) + 0.3)
    for steps in (strange, STEPS):
        assert named(steps, case_of(sinks=True), gradients=True, capabilities=WITH_SINKS) is None


def test_a_gradient_of_sinks_beside_which_others_are_wrong_has_no_cause_of_its_own():
    """Though in the smallest case they are right."""
    case = case_of(sinks=True, heads=8).replace(cotangent="both")
    steps = replace(STEPS, sinks_backward=SINKS["lacks the cotangent of lse"])
    assert (
        named(steps, case, gradients=True, capabilities=WITH_SINKS)
        == "the gradient of sinks lacks the cotangent of lse"
    )
    beside = replace(
        steps, returned_gradients=lambda here, dq, dk, dv: (dq * (1 + (here.problem.nq != case.problem.nq)), dk, dv)
    )
    assert named(beside, case, gradients=True, capabilities=WITH_SINKS) is None


PLACES = {
    "k and v are taken from another place: heads, one place on": lambda q, k, v: (q, k.roll(1, 2), v.roll(1, 2)),
    "q are taken from another place: batch elements, backwards": lambda q, k, v: (q.flip(0), k, v),
    "v are taken from another place: the rows of each shard, backwards": lambda q, k, v: (q, k, v.flip(1)),
}  # fmt: skip


@pytest.mark.parametrize("words", PLACES)
@pytest.mark.parametrize("gradients", [False, True])
def test_inputs_from_other_places_are_told(words, gradients):
    """Rows, heads and batch elements, with their gradients put back."""

    def attend(q, k, v, call):
        return PLAIN.function(*PLACES[words](q, k, v), call)

    cases = on_three(batch=3, heads=3), on_three(batch=3, heads=3, query_length=9, causal=True, seed=2)
    scenes, _ = seen(Implementation(attend, "moved", EVERYTHING), cases, gradients=gradients)
    assert words in explaining(REARRANGED, scenes)


def test_results_that_come_back_to_other_places_are_told():
    """dk and dv alone, which are right elsewhere."""

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dx):
            return dx.flip(2)

    def attend(q, k, v, call):
        return PLAIN.function(q, Turned.apply(k), Turned.apply(v), call)

    cases = on_three(heads=3), on_three(heads=3, query_length=9, causal=True, seed=2)
    scenes, _ = seen(Implementation(attend, "turned", EVERYTHING), cases, gradients=True)
    assert explaining(REARRANGED, scenes) == ["dk and dv that are right come back in another place: heads, backwards"]


def by_the_last_tile(steps, here, hop, owner, rows, block):
    """What each tile of 3 queries and 3 keys adds to dq is written, not added, in the order of hops."""
    m, part = multiplicity(steps, here, hop, owner), STEPS.gradients(steps, here, hop, owner, rows, block)[1]
    before = here.notes.get("dq so far", torch.zeros_like(rows[0]))
    after = before.clone()
    for i in range(0, m.size(2), 3):
        for j in range(0, m.size(3), 3):
            only = torch.zeros_like(m)
            only[:, :, i : i + 3, j : j + 3] = m[:, :, i : i + 3, j : j + 3]
            of_tile = replace(steps, pattern=lambda *place, only=only: only)
            if only.any():
                dq, _ = STEPS.gradients(of_tile, here, hop, owner, rows, block)
                after[:, :, i : i + 3] = dq[:, :, i : i + 3]
    here.notes["dq so far"] = after
    return after - before, part


TOLD = {
    "dq of a tile of 3 queries is that of the last tile of 3 keys that it attends: nothing is added up": (
        replace(STEPS, gradients=by_the_last_tile),
        {"query_length": 14, "causal": True},
    ),
    "derivative of the softcap is 1 - s² of the capped score, which is not divided by the softcap": (
        replace(STEPS, cap_slope=lambda s, softcap: 1 - s * s),
        {"softcap": 30.0},
    ),
}


@pytest.mark.parametrize("told", TOLD)
def test_rows_and_tiles_of_gradients_that_take_the_place_of_others_are_told(told):
    """In several cases, whatever the number of ranks."""
    steps, shape = TOLD[told]
    cases = [on_three(size=size, **{"query_length": 12} | shape) for size in (2, 3)]
    scenes, _ = seen(Implementation(ring_of(steps), "terms", NO_LSE), cases, gradients=True)
    assert told in explaining(library(told), scenes)


def test_a_slope_that_makes_rounding_errors_larger_may_be_the_cause_where_scores_are_far_apart():
    """There what comes back is no number that the fault alone tells."""
    told = list(TOLD)[-1]
    implementation = Implementation(ring_of(TOLD[told][0]), "steep", NO_LSE)
    plain = {"softcap": 30.0, "scale": 0.7, "query_length": 15, "heads": 6, "key_heads": 3, "head_dim": 5}
    cases = [on_three(causal=True, values="large_scores", seed=seed, **plain) for seed in (1, 2, 3)]
    scenes, _ = seen(implementation, cases, gradients=True)
    (cause,) = library(told)
    assert None in [cause.explains(scene) for scene in scenes]
    assert all(Standing(cause, 0.0).stands(scene) for scene in scenes)
