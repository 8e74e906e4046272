"""How branches of a dilation are merged, if not each head's by its own log-sum-exps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ringref.pattern import branch_of_head
from ringref.problem import Dilation
from ringverify.cases.comparing import QKV_GRADIENTS
from ringverify.diagnosis.gradients.terms import Terms, terms_of
from ringverify.diagnosis.gradients.weights import by_branch
from ringverify.diagnosis.hypothesis import Hypothesis, agree, agree_but_for
from ringverify.diagnosis.pairs import Ints, Mask
from ringverify.diagnosis.scene import Array, Results, Scene
from ringverify.diagnosis.where import wrong_tensors
from ringverify.events import TensorName
from ringverify.faults import pattern
from ringverify.faults.ring import STEPS

AVERAGES: dict[str, Callable[[Mask], Array]] = {
    "the mean of those that cover it": lambda there: there / np.maximum(there.sum(axis=0), 1),
    "the mean of all, with 0 where one does not cover it": lambda there: there / len(there),
    "their sum": lambda there: there.astype(np.float64),
}
"""What the out of a query is instead of what log-sum-exps weigh, by which branches `(R, B, H, Nq, 1)` cover it."""


def _judge_average(weigh: Callable[[Mask], Array]) -> Callable[[Scene], float | None]:
    def judge(scene: Scene) -> float | None:
        terms = terms_of(scene)
        own, shares = _own(terms)
        if len(own) == 1:
            return None if wrong_tensors(scene) else 0.0
        each = weigh(shares > 0) * own
        ds = (each * (terms.dp - (own * terms.dp).sum(axis=-1, keepdims=True))).sum(axis=0) * _slope(terms)
        whole = {"out": (each.sum(axis=0) @ terms.v).swapaxes(1, 2)} | terms.sums(QKV_GRADIENTS, ds, each.sum(axis=0))
        found: list[Results] = [
            {n: scene.seen(n, rank) if n == "lse" else scene.local(n, whole[n], rank) for n in scene.tensors}
            for rank in range(scene.size)
        ]
        return agree(scene, found, scene.tensors, lambda: scene.allowed)

    return judge


def _own_of_heads(terms: Terms, dilation: Dilation) -> tuple[Array, Array]:
    """Return the out `(R, B, H, Nq, E)` and lse `(R, B, H, Nq)` of each branch; lse is −inf in heads of others."""
    own, shares = _own(terms)
    out = own @ terms.v
    with np.errstate(divide="ignore"):
        lse = terms.scene.truth.lse + np.log(shares[..., 0])
    if dilation.heads == "shared":
        return out, lse
    heads, count = terms.scene.problem.heads, len(dilation.branches)
    runs = np.array([branch_of_head(head, heads=heads, branches=count) for head in range(heads)])
    there = (runs == np.arange(count)[:, None])[:, None, :, None]  # (R, 1, H, 1)
    return np.where(there[..., None], out, 0.0), np.where(there, lse, -np.inf)


def _judge_first_and_new(scene: Scene) -> float | None:
    """Judge branches that are merged one by one, by the log-sum-exp of the first one and the new one."""
    dilation = scene.problem.dilation
    if dilation is None or len(dilation.branches) < 3:
        return None if wrong_tensors(scene) else 0.0
    if any(name not in ("out", "lse") for name in scene.tensors):
        return None
    outs, lses = _own_of_heads(terms_of(scene), dilation)
    out, lse = outs[0], lses[0]
    for new_out, new_lse in zip(outs[1:], lses[1:], strict=True):
        total = np.logaddexp(lses[0], new_lse)
        shift = np.where(np.isneginf(total), 0.0, total)
        out = np.exp(lse - shift)[..., None] * out + np.exp(new_lse - shift)[..., None] * new_out
        lse = total
    return agree_but_for(scene, {"out": out.swapaxes(1, 2), "lse": lse})


def _own(terms: Terms) -> tuple[Array, Array]:
    """Return the weights of keys within each branch, `(R, B, H, Nq, Nk)`, and what the branch has of all weights."""
    parts = np.stack(by_branch(terms))
    shares = parts.sum(axis=-1, keepdims=True)
    return parts / np.where(shares == 0, 1.0, shares), shares


def _slope(terms: Terms) -> Array:
    """Return the derivative of scores by products of queries and keys, `(B, H, Nq, Nk)`; 0 where a weight is 0."""
    found: Array = terms.factor / np.where(terms.p == 0, 1.0, terms.p)
    return found


ORDERS: dict[str, Callable[[Ints], Ints]] = {
    "the order of their offsets": lambda order: order,
    "the inverse of the order of their offsets": np.argsort,
}
"""In which order of heads a branch of a dilation may leave them, of that of their offsets."""

LEFT_SO: tuple[tuple[TensorName, ...], ...] = (("lse",), ("out",), ("out", "lse"))
"""What may be left so, together."""


def _judge_order(
    names: tuple[TensorName, ...], order_of: Callable[[Ints], Ints], counted: bool
) -> Callable[[Scene], float | None]:
    def judge(scene: Scene) -> float | None:
        p = scene.problem
        if p.dilation is None or p.dilation.heads == "split":
            return None if wrong_tensors(scene) else 0.0
        offsets = np.array([[offset for _, _, offset in run] for run in pattern.branches(p)]).T
        orders = [order_of(np.argsort(one, kind="stable")) for one in offsets]
        if all((one == np.arange(p.heads)).all() for one in orders):
            return None if wrong_tensors(scene) else 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            whole = _merged(terms_of(scene), names, orders, counted)
        return agree_but_for(scene, whole)

    return judge


def _merged(
    terms: Terms, names: tuple[TensorName, ...], orders: Sequence[Ints], counted: bool
) -> dict[TensorName, Array]:
    """Return all results if the out, or the lse, of each branch has its heads in another order.

    Where the lse of all branches are −inf, none counts, or each if `counted`: a large number stands for −inf then.
    """

    def moved(name: TensorName, x: Array, *, back: bool = False) -> Array:
        if name not in names:
            return x
        return np.stack([y[:, np.argsort(one) if back else one] for y, one in zip(x, orders, strict=True)])

    own, shares = _own(terms)
    each = moved("out", own @ terms.v)
    lses = moved("lse", terms.scene.truth.lse + np.log(shares[..., 0]))
    lse = np.logaddexp.reduce(lses)
    there = np.isfinite(lse)[..., None]
    weights = np.where(there, np.exp(lses - np.where(there[..., 0], lse, 0.0))[..., None], 0.0)
    if counted:
        weights = np.where(there, weights, 1.0)
    out = (weights * each).sum(axis=0)
    of_weights = (terms.dout * (each - out)).sum(axis=-1, keepdims=True) + np.where(there, terms.given_dlse, 0.0)
    dlses, douts = moved("lse", weights * of_weights, back=True), moved("out", weights * terms.dout, back=True)
    dp = douts @ terms.v.swapaxes(2, 3)
    ds = (own * (dp - (own * dp).sum(axis=-1, keepdims=True) + dlses)).sum(axis=0) * _slope(terms)
    dv = sum(terms.sums(("dv",), ds, one, dout)["dv"] for one, dout in zip(own, douts, strict=True))
    found: dict[TensorName, Array] = {"out": out.swapaxes(1, 2), "lse": lse, "dv": np.asarray(dv)}
    return found | terms.sums(("dq", "dk"), ds, terms.p)


def _ways_to_merge() -> Iterator[Hypothesis]:
    says = (
        "branches of a dilation are merged by the log-sum-exp of the first and the latest: those between are left out"
    )
    yield Hypothesis(says, STEPS, judge=_judge_first_and_new)
    for text, of in AVERAGES.items():
        says = f"branches of a dilation are merged with equal weights: out is {text}"
        yield Hypothesis(says, STEPS, judge=_judge_average(of))
    for names, (text, order) in itertools.product(LEFT_SO, ORDERS.items()):
        for counted in (False, True):
            says = f"heads of the {' and '.join(names)} of a branch of a dilation are left in {text}"
            yield Hypothesis(says, STEPS, judge=_judge_order(names, order, counted))


MERGED_BRANCHES = list(_ways_to_merge())
"""Hypotheses about a dilation of several branches, or of heads with different offsets."""
