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

A learned sink of the head is a term `exp(sink)` more in each lse, and `dsink = Σ_i exp(sink − lse_i) t_i`.

What `ringref.rounding.LongBounds` needs to know of the sizes of these terms is summed on the way: |ds_ij| is at most
p_ij H_ij by the Cauchy-Schwarz inequality, with

    H_ij = |dout_i| |v_j| + y_i                                     y_i = |dout_i| Σ_j p_ij |v_j| + |dlse_i|

Queries are taken in runs whose intervals of keys (`ringref.intervals`) differ little. Blocks of keys that a whole run
attends count by class, summed in a tree; what is left at both ends of the intervals is computed densely, key by key.
So the time is O(n (b + m) d) for blocks of b, and nothing is subtracted that was added: no digit cancels.

Shape letters: B batch, N queries, M keys, H query heads, K key heads, D head_dim, E value_dim, C classes.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray

from ringref.intervals import Part, parts
from ringref.problem import Problem

Float = NDArray[np.float64]
Array = NDArray[np.int64]

Values = Callable[[Array], Float]
"""Returns a row of numbers for each of some positions."""
BLOCK = 128
"""Keys, or queries, that are summed by class at a time, and the length of a run."""
KEPT = 64
"""Blocks whose payloads are kept: a block stands at the ends of the intervals of several runs."""
VANISHING = float(np.sqrt(np.finfo(np.float64).tiny))
"""Total weight of a row below which some of it may have become 0, as weights are relative to the largest of a run."""


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
    """The answer to a problem on coded inputs; gradients are `None` where no cotangent was given.

    `dsinks` is by query, and summed over the batch, as in `ringref.attention.Answer`.
    """

    out: Float64[np.ndarray, "B N H E"]
    lse: Float64[np.ndarray, "B H N"]
    dq: Float64[np.ndarray, "B N H D"] | None = None
    dk: Float64[np.ndarray, "B M K D"] | None = None
    dv: Float64[np.ndarray, "B M K E"] | None = None
    dsinks: Float64[np.ndarray, "H N"] | None = None


def class_attention(
    problem: Problem,
    queries: Coded,
    keys: Coded,
    v: Float64[np.ndarray, "B M K E"],
    dout: Float64[np.ndarray, "B N H E"] | None = None,
    dlse: Float64[np.ndarray, "B H N"] | None = None,
    sinks: Float64[np.ndarray, " H"] | None = None,
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
        dlse: cotangent of lse, by default zero; its values for empty rows without a sink are ignored.
        sinks: learned sinks, where the problem has them; −inf is that of a head without one.
        block: positions that are summed at a time; the answer depends on it by rounding only.

    Raises:
        ValueError: an array has another shape than the problem says, a class is not in its codebook, dlse comes
            without dout, or sinks are given where the problem has none, or are missing.
    """
    _check(problem, queries, keys, v, dout, dlse, sinks)
    if dout is None and dlse is not None:
        raise ValueError("dlse without dout: give a dout of zeros for the gradient of lse alone")
    p = problem
    out, lse = np.zeros((p.batch, p.nq, p.heads, p.dv)), np.zeros((p.batch, p.heads, p.nq))
    dq, dk, dv = np.zeros((*out.shape[:3], p.head_dim)), np.zeros((*v.shape[:3], p.head_dim)), np.zeros(v.shape)
    dsinks = None if sinks is None else np.zeros((p.heads, p.nq))
    for b, h in itertools.product(range(p.batch), range(p.heads)):
        kh = h // p.group_size
        head = ClassHead(
            p,
            b,
            h,
            (queries.codebook[h], queries.classes[b, :, h]),
            (keys.codebook[kh], keys.classes[b, :, kh]),
            v[b, :, kh].__getitem__,
            None if dout is None else dout[b, :, h].__getitem__,
            None if dlse is None else dlse[b, h],
            sink=-np.inf if sinks is None else float(sinks[h]),
            block=block,
        )
        for piece in pieces_of(np.arange(p.nq), block):
            out[b, piece, h], lse[b, h, piece], dq[b, piece, h], _ = head.rows(piece)
        for piece in pieces_of(np.arange(p.nk), block) if dout is not None else ():
            of_keys, of_values, _ = head.gradients_of_keys(piece)
            dk[b, piece, kh] += of_keys
            dv[b, piece, kh] += of_values
        if dsinks is not None:
            dsinks[h] += head.sink_weights(np.arange(p.nq)) * head.towards
    return ClassAnswer(out, lse) if dout is None else ClassAnswer(out, lse, dq, dk, dv, dsinks)


def pieces_of(positions: Array, block: int = BLOCK) -> Iterator[Array]:
    """Yield positions, `block` of them at a time."""
    return (positions[start : start + block] for start in range(0, len(positions), block))


class ClassHead:
    """One query head of one element of a batch, piece by piece: rows of queries first, all of them, then keys.

    Nothing is kept of the length of the sequence but classes, three numbers a query, and sums by class of blocks.
    Several processes may share the rows, if each puts what the others found into `lse`, `towards` and `sizes`.

    Attributes:
        lse: of the rows that were computed, by position.
        towards: `dlse − dout·out` of these rows.
        sizes: y_i of these rows.
        scores: of each class of queries with each class of keys, after softcap.

    Args:
        problem: what to compute.
        batch: the element.
        head: the query head.
        queries: codebook `(Cq, D)` and class of each query `(N,)`.
        keys: codebook `(Ck, D)` and class of each key `(M,)`, of the key head.
        values: returns values at some positions, `(positions, E)`; called for a position several times.
        cotangents: returns cotangents of out at some positions, `(positions, E)`, likewise; `None` without gradients.
        dlse: cotangent of lse `(N,)`; `None` is zero.
        sink: learned sink of the head; −inf is none.
        block: positions that are summed at a time.
    """

    def __init__(
        self,
        problem: Problem,
        batch: int,
        head: int,
        queries: tuple[Float, Array],
        keys: tuple[Float, Array],
        values: Values,
        cotangents: Values | None = None,
        dlse: Float | None = None,
        *,
        sink: float = -np.inf,
        block: int = BLOCK,
    ) -> None:
        self._sink = sink
        (self._q, query_classes), (self._k, key_classes) = queries, keys
        self._values, self._cotangents, self._block = values, cotangents, block
        self._dlse = np.zeros(problem.nq) if dlse is None else dlse
        self._dv = problem.dv
        self.lse = np.full(problem.nq, -np.inf)
        self.towards = np.zeros(problem.nq)  # dlse − dout·out
        self.sizes = np.zeros(problem.nq)
        self.scores = self._q @ self._k.T * problem.scale_value  # of a query class with a key class, after softcap
        self._scale, self._slopes = problem.scale_value, None  # derivatives by q·k are their product
        if problem.softcap is not None:
            self._slopes = 1 / np.cosh(self.scores / problem.softcap) ** 2
            self.scores = problem.softcap * np.tanh(self.scores / problem.softcap)
        self._parts = [
            _PartOfHead(part, query_classes[part.queries], key_classes[part.keys])
            for part in parts(problem, batch, head)
        ]

    def rows(
        self, positions: Int64[np.ndarray, " n"]
    ) -> tuple[
        Float64[np.ndarray, "n E"], Float64[np.ndarray, " n"], Float64[np.ndarray, "n D"], Float64[np.ndarray, "n D"]
    ]:
        """Return out, lse and dq of the queries at ascending positions, and `Σ_j p_ij H_ij |k_j|`.

        The last two are 0 without cotangents.
        """
        count = len(positions)
        out, lse, reached = np.zeros((count, self._dv + 1)), np.full(count, self._sink), np.zeros(count, dtype=bool)
        dq, dq_size = (np.zeros((count, self._q.shape[1])) for _ in range(2))
        attended = []
        for rows, classes, members in self._attended(positions):
            weights, top = _weights(self.scores, classes, members)
            total = weights.sum(axis=-1)
            partial = weights @ members.payload[:, :-1] / np.where(total == 0, 1.0, total)[:, None]
            partial_lse = top + np.log(total, where=total > 0, out=np.full(len(total), -np.inf))
            merged = np.logaddexp(lse[rows], partial_lse)
            mine, other = _exp(lse[rows], merged)[:, None], _exp(partial_lse, merged)[:, None]
            out[rows], lse[rows] = mine * out[rows] + other * partial, merged
            reached[rows] |= total > 0
            attended.append((rows, classes, members, weights, top))
        self.lse[positions] = lse
        out, values = out[:, :-1], out[:, -1]
        if self._cotangents is None:
            return out, lse, dq, dq_size
        dout, dlse = self._read_cotangents(positions, reached), np.where(lse == -np.inf, 0.0, self._dlse[positions])
        norms = np.linalg.norm(dout, axis=-1)
        towards, sizes = dlse - (dout * out).sum(axis=-1), norms * values + np.abs(dlse)
        self.towards[positions], self.sizes[positions] = towards, sizes
        for rows, classes, members, weights, top in attended:
            weights *= _exp(top, lse[rows])[:, None]
            size = norms[rows, None] * members.payload[:, -2]
            size += sizes[rows, None]
            size *= weights
            dq_size[rows] += size @ np.abs(self._k)[members.classes]
            ds = dout[rows] @ members.payload[:, :-2].T
            ds += towards[rows, None]
            ds *= weights
            if self._slopes is not None:
                ds *= self._slopes[:, members.classes][classes]
            dq[rows] += ds @ self._k[members.classes]
        return out, lse, dq * self._scale, dq_size

    def gradients_of_keys(
        self, positions: Int64[np.ndarray, " n"]
    ) -> tuple[Float64[np.ndarray, "n D"], Float64[np.ndarray, "n E"], Float64[np.ndarray, "n D"]]:
        """Return what this head gives to dk and dv of keys at ascending positions, and `Σ_i p_ij H_ij |q_i|`.

        After `rows` of all queries.
        """
        count = len(positions)
        dk, dv, dk_size = (np.zeros((count, width)) for width in (self._k.shape[1], self._dv, self._k.shape[1]))
        for part in self._parts:
            if part.by_query is None:
                part.by_query = self._sums_of_queries(part)
            numbers, places = _found(part.keys, positions)
            for run, members in _runs(part.first_query[numbers], part.last_query[numbers], part.by_query):
                of_run, keys = numbers[run], places[run]
                classes, dout = part.key_classes[of_run], members.payload[:, :-3]
                towards, norms, sizes = members.payload[:, -3:].T
                found, kinds = np.unique(classes, return_inverse=True)
                logs = self.scores.T[found][:, members.classes] + members.log_weights
                p = np.exp(np.minimum(logs, 1.0))[kinds]  # only what is not attended has a weight above 1
                p[:, members.whole :] *= members.attended
                dv[keys] += p @ dout
                values = self._read_values(part, of_run)
                size = np.linalg.norm(values, axis=-1)[:, None] * norms
                size += sizes
                size *= p
                dk_size[keys] += size @ np.abs(self._q)[members.classes]
                dp = values @ dout.T
                dp += towards
                p *= dp
                if self._slopes is not None:
                    p *= self._slopes.T[:, members.classes][classes]
                dk[keys] += p @ self._q[members.classes]
        return dk * self._scale, dv, dk_size

    def sink_weights(self, positions: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """Return `exp(sink − lse)` of queries whose lse is known: times `towards`, what each adds to dsink."""
        return _exp(np.full(len(positions), self._sink), self.lse[positions])

    def _attended(self, positions: Array) -> Iterator[tuple[Array, Array, _Members]]:
        """Yield runs of queries, as rows among those at `positions` and their classes, and the keys that they attend.

        A key that is one by one has weight 1, a class the number of its keys; payloads are values, or their mean.
        """
        for part in self._parts:
            if part.by_key is None:
                part.by_key = self._sums_of_keys(part)
            numbers, places = _found(part.queries, positions)
            for run, members in _runs(part.first[numbers], part.last[numbers], part.by_key):
                counts = members.payload[: members.whole, -1:].copy()
                members.log_weights[: members.whole] += np.log(
                    counts[:, 0], where=counts[:, 0] > 0, out=np.full(len(counts), -np.inf)
                )
                members.payload[: members.whole] /= np.where(counts == 0, 1.0, counts)
                yield places[run], part.query_classes[numbers[run]], members

    def _sums_of_keys(self, part: _PartOfHead) -> _ClassSums:
        """Keys of a part by class: weight 1, payload the value, its norm and 1."""

        def payload(keys: Array) -> Float:
            values = self._read_values(part, keys)
            return np.column_stack([values, np.linalg.norm(values, axis=-1), np.ones(len(keys))])

        weights = np.zeros(len(part.keys))
        return _ClassSums(part.key_classes, weights, payload, self._dv + 2, len(self._k), self._block)

    def _sums_of_queries(self, part: _PartOfHead) -> _ClassSums:
        """Queries of a part by class: weight exp(−lse), payload dout, `dlse − dout·out`, and what H_ij is made of."""

        def payload(queries: Array) -> Float:
            at = part.queries[queries]
            dout = self._read_cotangents(at, part.first[queries] < part.last[queries])
            return np.column_stack([dout, self.towards[at], np.linalg.norm(dout, axis=-1), self.sizes[at]])

        lse = self.lse[part.queries]
        weights = np.where(lse == -np.inf, -np.inf, -lse)
        return _ClassSums(part.query_classes, weights, payload, self._dv + 3, len(self._q), self._block)

    def _read_values(self, part: _PartOfHead, keys: Array) -> Float:
        """Return the values of keys of a part, 0 for those that no query attends, which may hold anything."""
        attended, values = part.first_query[keys] < part.last_query[keys], self._values(part.keys[keys])
        return values if attended.all() else np.where(attended[:, None], values, 0.0)

    def _read_cotangents(self, positions: Array, reached: Bool[np.ndarray, " n"]) -> Float:
        """Return dout, 0 for rows without keys, to which it is nothing, whatever it holds."""
        assert self._cotangents is not None
        cotangents = self._cotangents(positions)
        return cotangents if reached.all() else np.where(reached[:, None], cotangents, 0.0)


class _PartOfHead:
    """One part of a head: what `Part` says, turned round too, with the classes of its queries and keys.

    Since intervals never fall, the queries that attend a key are an interval too, from `first_query` to `last_query`.
    """

    def __init__(self, part: Part, query_classes: Array, key_classes: Array) -> None:
        self.queries, self.keys, self.first, self.last = part
        self.query_classes, self.key_classes = query_classes, key_classes
        numbers = np.arange(len(part.keys))
        self.first_query = np.searchsorted(part.last, numbers, side="right")
        self.last_query = np.searchsorted(part.first, numbers, side="right")
        self.by_key: _ClassSums | None = None
        self.by_query: _ClassSums | None = None


def _found(ascending: Array, positions: Array) -> tuple[Array, Array]:
    """Return where in `ascending` those positions stand that are there, and which of the positions these are."""
    numbers = np.searchsorted(ascending, positions)
    places = np.flatnonzero(np.searchsorted(ascending, positions, side="right") > numbers)
    return numbers[places], places


class _Members(NamedTuple):
    """What a run attends: classes of whole blocks, each like one member, and then members one by one.

    Attributes:
        whole: number of classes of whole blocks, which every row of the run attends.
        classes: `(z,)`.
        log_weights: `(z,)`, added to the scores.
        payload: `(z, F)`, to be summed with the weights.
        attended: which rows attend the members one by one, `(run, z − whole)`.
    """

    whole: int
    classes: Array
    log_weights: Float
    payload: Float
    attended: Bool[np.ndarray, "run near"]


class _ByClass(NamedTuple):
    """Members by class: `exp(top) · payload` is their sum, weighted; top `(C,)` is −inf where there is none."""

    top: Float
    payload: Float


class _ClassSums:
    """Sums by class over any whole blocks of members, by a tree over the blocks, made as far as it is asked for.

    Args:
        classes: of the members, `(y,)`.
        log_weights: of the members, `(y,)`.
        payload: returns what members by number have, `(numbers, F)`, finite.
        width: F.
        count: number of classes.
        block: members of a block.
    """

    def __init__(self, classes: Array, log_weights: Float, payload: Values, width: int, count: int, block: int) -> None:
        self.classes, self.log_weights, self.block, self.width = classes, log_weights, block, width
        self._count = count
        self._sums: dict[tuple[int, int], _ByClass] = {}

        def of_block(number: int) -> Float:
            return payload(np.arange(number * block, min((number + 1) * block, len(classes))))

        self._payload = functools.lru_cache(KEPT)(of_block)

    def one_by_one(self, first: int, last: int) -> Iterator[Float]:
        """Yield the payloads of members `first` to `last - 1`, in pieces."""
        for number in range(first // self.block, -(-last // self.block)):
            start = number * self.block
            yield self._payload(number)[max(first - start, 0) : last - start]

    def _of(self, level: int, number: int) -> _ByClass:
        """Return the sums over `2 ** level` blocks, that number of them."""
        known = self._sums.get((level, number))
        if known is None:
            if level:
                known = _added(self._of(level - 1, 2 * number), self._of(level - 1, 2 * number + 1))
            else:
                known = self._of_block(number)
            self._sums[level, number] = known
        return known

    def _of_block(self, number: int) -> _ByClass:
        members = slice(number * self.block, (number + 1) * self.block)
        classes, weights = self.classes[members], self.log_weights[members]
        top = np.full(self._count, -np.inf)
        np.maximum.at(top, classes, weights)
        one_hot = np.zeros((self._count, len(classes)))
        one_hot[classes, np.arange(len(classes))] = _exp(weights, top[classes])
        return _ByClass(top, one_hot @ self._payload(number))

    def over(self, first: int, last: int) -> _ByClass:
        """Return the sums over blocks `first` to `last - 1`, of which there is at least one."""
        pieces = []
        for level in itertools.count():
            if first >= last:
                break
            if first % 2:
                pieces.append(self._of(level, first))
            if last % 2:
                pieces.append(self._of(level, last - 1))
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
        whole = _ByClass(np.zeros(0), np.zeros((0, sums.width)))
        ranges = [(least, most)]
        if begin < end:
            whole, ranges = sums.over(begin, end), [(least, begin * block), (end * block, most)]
        near = np.concatenate([np.arange(*one) for one in ranges])
        payloads = itertools.chain.from_iterable(sums.one_by_one(*one) for one in ranges)
        yield (
            run,
            _Members(
                len(whole.top),
                np.concatenate([np.arange(len(whole.top)), sums.classes[near]]),
                np.concatenate([whole.top, sums.log_weights[near]]),
                np.concatenate([whole.payload, *payloads]),
                (begins <= near) & (near < ends),
            ),
        )
        start = stop


def _weights(table: Float, classes: Array, members: _Members) -> tuple[Float, Float]:
    """Return `exp(score + log_weight − top)` of rows with what they attend, 0 elsewhere `(run, z)`, and top `(run,)`.

    Args:
        table: scores of classes of rows with classes of members.
        classes: of the rows, `(run,)`.
        members: what the run attends.
    """
    found, kinds = np.unique(classes, return_inverse=True)
    scores = table[found][:, members.classes] + members.log_weights
    tops = scores.max(axis=-1, initial=-np.inf)
    weights, top = _exp(scores, tops[:, None])[kinds], tops[kinds]
    weights[:, members.whole :] *= members.attended
    few = np.flatnonzero(weights.sum(axis=-1) < VANISHING)
    if len(few):  # rows that attend nothing, or nothing whose score is near the largest of the run
        own = scores[kinds[few]]
        own[:, members.whole :][~members.attended[few]] = -np.inf
        top[few] = own.max(axis=-1, initial=-np.inf)
        weights[few] = _exp(own, top[few, None])
    return weights, top


def _exp(x: Float, less: Float | float) -> Float:
    """`exp(x − less)`, 0 where x is −inf, whatever `less` is."""
    with np.errstate(invalid="ignore"):
        exponents: Float = x - less
    exponents[x == -np.inf] = -np.inf
    return np.exp(exponents, out=exponents)


def _check(
    problem: Problem,
    queries: Coded,
    keys: Coded,
    v: Float,
    dout: Float | None,
    dlse: Float | None,
    sinks: Float | None,
) -> None:
    p = problem
    if p.sinks != (sinks is not None):
        raise ValueError(f"sinks={p.sinks} says the problem, and {'no' if sinks is None else 'some'} are given")
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
    for name, x, shape in (*shapes, ("dlse", dlse, (p.batch, p.heads, p.nq)), ("sinks", sinks, (p.heads,))):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}: the problem says {shape}")
