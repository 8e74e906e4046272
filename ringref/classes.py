"""The oracle in linear time, for queries and keys drawn from codebooks: every row of a million positions.

If every key is one of m vectors, keys of a class have the same score with a query, and a row of softmax is a sum over
classes. A class is then like one key: its multiplicity the number of its keys that the query attends, its value the
mean of theirs. Turned round, queries of a class are to a key like one query, whose cotangent is the sum of theirs,
weighted by `exp(−lse)`. Values and cotangents are any numbers, and the formulas those of `ringref.attention`:

    lse_i = log Σ_c N_i[c] exp(S[a_i, c])                           N_i[c] attended keys of class c, V_i[c] their mean
    out_i = Σ_c p_i[c] V_i[c]                                       p_i[c] = N_i[c] exp(S[a_i, c] − lse_i)
    dq_i  = scale Σ_c p_i[c] (dout_i · V_i[c] + t_i) K[c]           t_i = dlse_i − dout_i · out_i
    dv_j  = Σ_a exp(S[a, c_j]) G_j[a]                               G_j[a] = Σ_i exp(−lse_i) dout_i, i of class a
    dk_j  = scale Σ_a exp(S[a, c_j]) (G_j[a] · v_j + T_j[a]) Q[a]   T_j[a] = Σ_i exp(−lse_i) t_i

Queries are taken in runs whose intervals of keys (`ringref.intervals`) differ little. Blocks of keys that a whole run
attends count by class, summed in a tree; what is left at both ends of the intervals is computed densely, key by key.
So the time is O(n (b + m) d) for blocks of b, and nothing is subtracted that was added: no digit cancels.

Shape letters: B batch, N queries, M keys, H query heads, K key heads, D head_dim, E value_dim, C classes.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray

from ringref.intervals import Part, parts
from ringref.problem import Problem

Float = NDArray[np.float64]
Array = NDArray[np.int64]

BLOCK = 256
"""Keys, or queries, that are summed by class at a time, and the length of a run."""


class Coded(NamedTuple):
    """Queries or keys that are drawn from a codebook for each head.

    Attributes:
        codebook: the vectors of each head, `(heads, C, D)` float64.
        classes: which of them stands at each position, `(B, length, heads)` int64.
    """

    codebook: Float64[np.ndarray, "heads C D"]
    classes: Int64[np.ndarray, "B length heads"]

    def vectors(self) -> Float64[np.ndarray, "B length heads D"]:
        """Return the tensor as others are given it."""
        vectors: Float = self.codebook[np.arange(self.codebook.shape[0]), self.classes]
        return vectors


@dataclasses.dataclass(frozen=True, eq=False)
class ClassAnswer:
    """The answer to a problem on coded inputs; gradients are `None` where no cotangent was given."""

    out: Float64[np.ndarray, "B N H E"]
    lse: Float64[np.ndarray, "B H N"]
    dq: Float64[np.ndarray, "B N H D"] | None = None
    dk: Float64[np.ndarray, "B M K D"] | None = None
    dv: Float64[np.ndarray, "B M K E"] | None = None


def class_attention(
    problem: Problem,
    queries: Coded,
    keys: Coded,
    v: Float64[np.ndarray, "B M K E"],
    dout: Float64[np.ndarray, "B N H E"] | None = None,
    dlse: Float64[np.ndarray, "B H N"] | None = None,
    *,
    block: int = BLOCK,
) -> ClassAnswer:
    """Compute what `ringref.attention.attention` does of `queries.vectors()` and `keys.vectors()`, in linear time.

    Args:
        problem: what to compute; its dtype is ignored, the oracle is always float64.
        queries: of the query heads.
        keys: of the key heads.
        v: values, finite; those of keys that no query attends are not read.
        dout: cotangent of out; without it the answer has no gradients.
        dlse: cotangent of lse, by default zero; its values for empty rows are ignored.
        block: positions that are summed at a time; the answer depends on it by rounding only.

    Raises:
        ValueError: an array has another shape than the problem says, a class is not in its codebook, or dlse comes
            without dout.
    """
    _check(problem, queries, keys, v, dout, dlse)
    if dout is None and dlse is not None:
        raise ValueError("dlse without dout: give a dout of zeros for the gradient of lse alone")
    out = np.zeros((problem.batch, problem.nq, problem.heads, problem.dv))
    lse = np.full((problem.batch, problem.heads, problem.nq), -np.inf)
    answer = ClassAnswer(out, lse)
    if dout is not None:
        shapes = ((*out.shape[:3], problem.head_dim), (*v.shape[:3], problem.head_dim), v.shape)
        answer = ClassAnswer(out, lse, *(np.zeros(shape) for shape in shapes))
    for b, h in itertools.product(range(problem.batch), range(problem.heads)):
        kh = h // problem.group_size
        known = _class_pairs(problem, queries.codebook[h], keys.codebook[kh])
        some = [
            _PartOfHead(part, known, queries.classes[b, part.queries, h], keys.classes[b, part.keys, kh], block)
            for part in parts(problem, b, h)
        ]
        for one in some:
            one.merge_into(out[b, :, h], lse[b, h], one.read(v[b, one.part.keys, kh]))
        if dout is None:
            continue
        assert answer.dq is not None
        assert answer.dk is not None
        assert answer.dv is not None
        # An empty row contributes nothing, whatever its cotangents are.
        empty = lse[b, h] == -np.inf
        cotangent = np.where(empty[:, None], 0.0, dout[b, :, h])
        towards = -(cotangent * out[b, :, h]).sum(axis=-1)
        if dlse is not None:
            towards += np.where(empty, 0.0, dlse[b, h])
        for one in some:
            rows = _MergedQueries(*(x[one.part.queries] for x in (lse[b, h], cotangent, towards)))
            values = one.read(v[b, one.part.keys, kh])
            answer.dq[b, one.part.queries, h] += one.dq(rows, values)
            dk, dv = one.dk_and_dv(rows, values)
            answer.dk[b, one.part.keys, kh] += dk
            answer.dv[b, one.part.keys, kh] += dv
    return answer


class _ClassPairs(NamedTuple):
    """What one head has of every query class and every key class.

    Attributes:
        scores: `(Cq, Ck)`, after softcap.
        slopes: derivative of a score by `q·k`, `(Cq, Ck)`.
        q: codebook of the queries `(Cq, D)`.
        k: codebook of the keys `(Ck, D)`.
    """

    scores: Float
    slopes: Float
    q: Float
    k: Float


def _class_pairs(problem: Problem, q: Float, k: Float) -> _ClassPairs:
    scores = q @ k.T * problem.scale_value
    slopes = np.full_like(scores, problem.scale_value)
    if problem.softcap is not None:
        slopes /= np.cosh(scores / problem.softcap) ** 2
        scores = problem.softcap * np.tanh(scores / problem.softcap)
    return _ClassPairs(scores, slopes, q, k)


class _MergedQueries(NamedTuple):
    """Queries of a part, merged over all keys: lse `(x,)`, dout `(x, E)`, and `dlse − dout·out` as `(x,)`."""

    lse: Float
    dout: Float
    towards: Float


class _PartOfHead:
    """One part of one head: its queries and keys by class, `(x,)` and `(y,)`."""

    def __init__(self, part: Part, known: _ClassPairs, queries: Array, keys: Array, block: int) -> None:
        self.part, self._known, self._queries, self._keys, self._block = part, known, queries, keys, block

    def read(self, v: Float) -> Float:
        """Return `v (y, E)` with 0 for keys that no query attends, which may hold anything."""
        return np.where((self._first_query < self._last_query)[:, None], v, 0.0)

    def merge_into(self, out: Float, lse: Float, v: Float) -> None:
        """Merge its attention into `out (N, E)` and `lse (N,)` of the head; `v (y, E)`."""
        for run, members in self._by_query(v):
            scores = self._known.scores[self._queries[run][:, None], members.classes] + members.log_weights
            top = scores.max(axis=-1, initial=-np.inf)
            weights = np.exp(scores - np.where(top == -np.inf, 0.0, top)[:, None])
            total = weights.sum(axis=-1)
            some = total > 0
            rows = self.part.queries[run][some]
            partial_lse = top[some] + np.log(total[some])
            merged = np.logaddexp(lse[rows], partial_lse)
            partial = weights[some] @ members.payload[:, :-1] / total[some, None]
            out[rows] = (
                np.exp(lse[rows] - merged)[:, None] * out[rows] + np.exp(partial_lse - merged)[:, None] * partial
            )
            lse[rows] = merged

    def dq(self, rows: _MergedQueries, v: Float) -> Float:
        """What it adds to dq of its queries, `(x, D)`; `v (y, E)`."""
        dq = np.zeros((len(self._queries), self._known.q.shape[1]))
        for run, members in self._by_query(v):
            pairs = self._queries[run][:, None], members.classes
            p = _exp(self._known.scores[pairs] + members.log_weights, rows.lse[run, None])
            ds = p * (rows.dout[run] @ members.payload[:, :-1].T + rows.towards[run, None]) * self._known.slopes[pairs]
            dq[run] = ds @ self._known.k[members.classes]
        return dq

    def dk_and_dv(self, rows: _MergedQueries, v: Float) -> tuple[Float, Float]:
        """What it adds to dk and dv of its keys, `(y, D)` and `(y, E)`; `v (y, E)`."""
        dk, dv = np.zeros((len(self._keys), self._known.k.shape[1])), np.zeros_like(v)
        for run, members in self._by_key(rows):
            pairs = members.classes, self._keys[run][:, None]
            p = _exp(self._known.scores[pairs] + members.log_weights, 0.0)
            dout, towards = members.payload[:, :-1], members.payload[:, -1]
            dv[run] = p @ dout
            dk[run] = p * (v[run] @ dout.T + towards) * self._known.slopes[pairs] @ self._known.q[members.classes]
        return dk, dv

    def _by_query(self, v: Float) -> Iterator[tuple[slice, _Members]]:
        """Runs of queries, and the keys that each attends: weight 1, payload the value and 1."""
        payload = np.concatenate([v, np.ones((len(v), 1))], axis=-1)
        sums = _ClassSums(self._keys, np.zeros(len(v)), payload, self._known.scores.shape[1], self._block)
        for run, members in _runs(self.part.first, self.part.last, sums):
            counts = members.payload[:, -1:]  # of keys that are one by one this is 1
            log_counts = np.log(counts[:, 0], where=counts[:, 0] > 0, out=np.full(len(counts), -np.inf))
            means = members.payload / np.where(counts == 0, 1.0, counts)
            yield run, _Members(members.classes, members.log_weights + log_counts, means)

    def _by_key(self, rows: _MergedQueries) -> Iterator[tuple[slice, _Members]]:
        """Runs of keys, and the queries that attend each: weight exp(−lse), payload dout and `towards`."""
        weights = np.where(rows.lse == -np.inf, -np.inf, -rows.lse)
        payload = np.concatenate([rows.dout, rows.towards[:, None]], axis=-1)
        sums = _ClassSums(self._queries, weights, payload, self._known.scores.shape[0], self._block)
        return _runs(self._first_query, self._last_query, sums)

    @property
    def _first_query(self) -> Array:
        """By key, the number of the first query that attends it: intervals never fall, so these do not either."""
        return np.searchsorted(self.part.last, np.arange(len(self._keys)), side="right")

    @property
    def _last_query(self) -> Array:
        """By key, one more than the number of the last query that attends it."""
        return np.searchsorted(self.part.first, np.arange(len(self._keys)), side="right")


class _Members(NamedTuple):
    """What a run attends: classes of whole blocks, each like one member, and members one by one.

    Attributes:
        classes: `(z,)`.
        log_weights: added to the scores: `(z,)`, or `(run, z)` with −inf where a member is not attended.
        payload: `(z, F)`, to be summed with the weights.
    """

    classes: Array
    log_weights: Float
    payload: Float


class _ByClass(NamedTuple):
    """Members by class: `exp(top) · payload` is their sum, weighted; top `(C,)` is −inf where there is none."""

    top: Float
    payload: Float


class _ClassSums:
    """Sums by class over any whole blocks of members, by a tree over the blocks.

    Args:
        classes: of the members, `(y,)`.
        log_weights: of the members, `(y,)`.
        payload: `(y, F)`, finite.
        count: number of classes.
        block: members of a block.
    """

    def __init__(self, classes: Array, log_weights: Float, payload: Float, count: int, block: int) -> None:
        self.classes, self.log_weights, self.payload, self.block = classes, log_weights, payload, block
        self._count = count
        level = [self._of(slice(start, start + block)) for start in range(0, len(classes) - block + 1, block)]
        self._levels = [level]
        while len(level) > 1:
            level = [_added(level[i], level[i + 1]) for i in range(0, len(level) - 1, 2)]
            self._levels.append(level)

    def _of(self, members: slice) -> _ByClass:
        classes, weights = self.classes[members], self.log_weights[members]
        top = np.full(self._count, -np.inf)
        np.maximum.at(top, classes, weights)
        one_hot = np.zeros((self._count, len(classes)))
        one_hot[classes, np.arange(len(classes))] = _exp(weights, top[classes])
        return _ByClass(top, one_hot @ self.payload[members])

    def over(self, first: int, last: int) -> _ByClass:
        """Return the sums over blocks `first` to `last - 1`, of which there is at least one."""
        pieces = []
        for level in self._levels:
            if first >= last:
                break
            if first % 2:
                pieces.append(level[first])
            if last % 2:
                pieces.append(level[last - 1])
            first, last = (first + 1) // 2, last // 2
        total = pieces[0]
        for piece in pieces[1:]:
            total = _added(total, piece)
        return total


def _added(a: _ByClass, b: _ByClass) -> _ByClass:
    top = np.maximum(a.top, b.top)
    return _ByClass(top, _exp(a.top, top)[:, None] * a.payload + _exp(b.top, top)[:, None] * b.payload)


def _runs(first: Array, last: Array, sums: _ClassSums) -> Iterator[tuple[slice, _Members]]:
    """Yield runs of rows whose intervals `first[x]` to `last[x] - 1` differ little, and what each run attends."""
    block, start = sums.block, 0
    while start < len(first):
        stop = min(
            start + block,
            int(np.searchsorted(first, first[start] + block, side="right")),
            int(np.searchsorted(last, last[start] + block, side="right")),
        )
        run = slice(start, stop)
        begins, ends = first[run, None], last[run, None]
        least, most = int(begins[0, 0]), int(ends[-1, 0])
        begin, end = -(-int(begins[-1, 0]) // block), int(ends[0, 0]) // block
        if begin < end:
            whole = sums.over(begin, end)
            near = np.concatenate([np.arange(least, begin * block), np.arange(end * block, most)])
        else:
            whole = _ByClass(np.zeros(0), np.zeros((0, sums.payload.shape[1])))
            near = np.arange(least, most)
        attended: Bool[np.ndarray, "run z"] = (begins <= near) & (near < ends)
        one_by_one = np.where(attended, sums.log_weights[near], -np.inf)
        yield (
            run,
            _Members(
                np.concatenate([np.arange(len(whole.top)), sums.classes[near]]),
                np.concatenate([np.broadcast_to(whole.top, (stop - start, len(whole.top))), one_by_one], axis=-1),
                np.concatenate([whole.payload, sums.payload[near]]),
            ),
        )
        start = stop


def _exp(x: Float, less: Float | float) -> Float:
    """`exp(x − less)`, 0 where x is −inf, whatever `less` is."""
    return np.where(x == -np.inf, 0.0, np.exp(np.where(x == -np.inf, 0.0, x) - np.where(x == -np.inf, 0.0, less)))


def _check(problem: Problem, queries: Coded, keys: Coded, v: Float, dout: Float | None, dlse: Float | None) -> None:
    p = problem
    for name, coded, length, heads in (("queries", queries, p.nq, p.heads), ("keys", keys, p.nk, p.hk)):
        if coded.classes.shape != (p.batch, length, heads):
            raise ValueError(
                f"classes of {name} have shape {coded.classes.shape}: the problem says {(p.batch, length, heads)}"
            )
        if coded.codebook.shape[::2] != (heads, p.head_dim):
            raise ValueError(
                f"the codebook of {name} has shape {coded.codebook.shape}: the problem says {heads} heads of "
                f"{p.head_dim} dimensions"
            )
        count = coded.codebook.shape[1]
        if coded.classes.size and not 0 <= coded.classes.min() <= coded.classes.max() < count:
            raise ValueError(
                f"classes of {name} go from {coded.classes.min()} to {coded.classes.max()}: there are {count}"
            )
    shapes = (("v", v, (p.batch, p.nk, p.hk, p.dv)), ("dout", dout, (p.batch, p.nq, p.heads, p.dv)))
    for name, x, shape in (*shapes, ("dlse", dlse, (p.batch, p.heads, p.nq))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}: the problem says {shape}")
