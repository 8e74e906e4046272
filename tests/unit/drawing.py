"""Small problems and inputs for them, for the tests of `ringref`."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import strategies as st

from ringref.problem import Dilation, Problem


@dataclasses.dataclass(frozen=True, eq=False)
class Inputs:
    """float64 arrays: q (B, Nq, Hq, D), k (B, Nk, Hk, D), v (B, Nk, Hk, Dv), dout like out, dlse (B, Hq, Nq)."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray
    dlse: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        """In the order in which every verb takes them."""
        return self.q, self.k, self.v, self.dout, self.dlse


def normal_inputs(problem: Problem, *, seed: int = 0, size: float = 1.0) -> Inputs:
    """Normal values; `size` multiplies the queries, and so the scores."""
    rng = np.random.default_rng(seed)
    query, key = (problem.batch, problem.nq, problem.heads), (problem.batch, problem.nk, problem.hk)
    return Inputs(
        q=rng.standard_normal((*query, problem.head_dim)) * size,
        k=rng.standard_normal((*key, problem.head_dim)),
        v=rng.standard_normal((*key, problem.dv)),
        dout=rng.standard_normal((*query, problem.dv)),
        dlse=rng.standard_normal((problem.batch, problem.heads, problem.nq)),
    )


def dilations(heads: int) -> st.SearchStrategy[Dilation]:
    """Branches of all kinds: rates above their segment, more branches than heads, the same branch twice."""
    branches = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4)), min_size=1, max_size=heads + 1).map(tuple)
    modes = st.sampled_from([("split", "cyclic"), ("shared", "cyclic"), ("shared", "block")])
    return st.builds(lambda b, mode: Dilation(b, heads=mode[0], head_offset=mode[1]), branches, modes)


@st.composite
def problems(draw: st.DrawFn, max_length: int = 7) -> Problem:
    """Any problem that DESIGN section 3 defines, every constraint and every combination of them, zero lengths too."""
    kind = draw(st.sampled_from(["plain", "documents", "dilation"]))
    query_length = draw(st.integers(0, max_length))
    key_length = draw(st.integers(0, max_length)) if kind == "plain" else query_length
    batch = draw(st.integers(1, 2))
    key_heads = draw(st.integers(1, 2))
    heads = key_heads * draw(st.integers(1, 3))
    side = st.none() | st.integers(0, 4)
    documents = None
    if kind == "documents":
        cuts = st.lists(st.integers(0, query_length), min_size=1, max_size=5)
        documents = tuple(sorted(draw(cuts)))
    return Problem(
        batch=batch,
        query_length=query_length,
        key_length=key_length,
        heads=heads,
        key_heads=key_heads,
        head_dim=draw(st.integers(1, 4)),
        value_dim=draw(st.none() | st.integers(1, 4)),
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(side, side)),
        documents=documents,
        key_lengths=draw(st.none() | st.tuples(*[st.integers(0, key_length)] * batch)),
        dilation=draw(dilations(heads)) if kind == "dilation" else None,
        scale=draw(st.none() | st.floats(-2, 2)),
        softcap=draw(st.none() | st.floats(0.5, 30)),
    )


seeds = st.integers(0, 2**32 - 1)
sizes = st.sampled_from([0.0, 1.0, 30.0])
