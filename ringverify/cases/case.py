"""A case as data: problem, sharding, world size, how the inputs are made, and seeds."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ringref.problem import Problem
from ringref.sharding import (
    KEY_SHARDINGS,
    QUERY_SHARDINGS,
    PageTable,
    QueryKeySharding,
    Sharding,
    key_positions,
    query_positions,
)
from ringverify.implementation import Capabilities, Multiple, sharding_name

Values = Literal[
    "integers",
    "normal",
    "zero_queries",
    "unit_values",
    "dominating_key",
    "large_scores",
    "rising_blocks",
    "falling_blocks",
    "float16_limits",
    "poisoned",
    "poisoned_skips",
    "selectors",
]
"""Families of input values, simplest first; see `ringverify.cases.inputs`."""

Memory = Literal["contiguous", "transposed", "strided", "offset", "packed", "expanded"]
"""Memory layouts of the input tensors, simplest first; see `ringverify.cases.inputs.lay_out`."""

Cotangent = Literal["out", "lse", "both"]
"""Which results have a cotangent when gradients are taken."""

Group = Literal["world", "leading", "offset", "strided"]
"""Which ranks of the world are the ring: all of them, all but the last two or the first two, or every second one."""

Transport = Literal["buffered", "rendezvous"]
"""When a simulated send completes: as soon as it is posted, or once the matching receive is posted too."""

Delayed = tuple[int, ...] | Literal["some"]
"""Messages that a simulated world holds back, numbered from 0 in posting order; "some": the `schedule` seed picks."""

POISONED: tuple[Values, ...] = ("poisoned", "poisoned_skips")
"""Families in which some keys are NaN."""

VALUES: tuple[Values, ...] = get_args(Values)
MEMORY: tuple[Memory, ...] = get_args(Memory)
COTANGENTS: tuple[Cotangent, ...] = get_args(Cotangent)
GROUPS: tuple[Group, ...] = get_args(Group)
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
RANKS = 1024
"""Largest world size that a file may ask for."""

PAIRS = 2**24
"""Most attention scores, and most elements of one tensor, that a file may ask for: 128 MiB in float64."""

LARGEST = 2**63 - 1
"""The largest int64."""

SEEDS = 2**16
"""Seeds are drawn below this: enough different inputs, and few digits in a message."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Everything needed to run one example again: equal cases have bit-identical inputs and equal schedules.

    Attributes:
        problem: what all ranks compute together.
        sharding: name of one of the implementation's declared shardings.
        world_size: number of ranks in the ring.
        values: family of input values.
        memory: how the input tensors lie in memory.
        cotangent: which results have a (random) cotangent when gradients are taken; that of the others is zero.
        group: which ranks of a larger world are the ring; the others communicate in a group of their own meanwhile.
        transport: when a simulated send completes.
        delayed: messages that a simulated world holds back.
        seed: seed of the input values.
        schedule: seed of the order in which a simulated world lets its ranks run.
        chunks: numbers of queries of the calls on a growing cache that compute the problem together: first a prefill in
            chunks, then single tokens. Empty: one call. `sharding` is then "queries/keys", such as "replicated/pages".
        page_table: which rank holds which pages, where keys lie in "pages".
    """

    problem: Problem
    sharding: str = "contiguous"
    world_size: int = 1
    values: Values = "normal"
    memory: Memory = "contiguous"
    cotangent: Cotangent = "out"
    group: Group = "world"
    transport: Transport = "buffered"
    delayed: Delayed = ()
    seed: int = 0
    schedule: int = 0
    chunks: tuple[int, ...] = ()
    page_table: PageTable | None = None

    def __post_init__(self) -> None:
        named: dict[str, tuple[str, ...]] = {
            "values": VALUES,
            "memory": MEMORY,
            "cotangent": COTANGENTS,
            "group": GROUPS,
            "transport": TRANSPORTS,
        }
        for name, allowed in named.items():
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={value!r}: expected one of {', '.join(allowed)}")
        for name, minimum in (("world_size", 1), ("seed", 0), ("schedule", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise ValueError(f"{name}={value!r}: expected an integer of at least {minimum}")
        if self.delayed != "some":
            numbers = self.delayed
            if not isinstance(numbers, (tuple, list)) or any(type(n) is not int or n < 0 for n in numbers):
                raise ValueError(f'delayed={numbers!r}: expected "some", or numbers of messages from 0')
            object.__setattr__(self, "delayed", tuple(numbers))
        if not isinstance(self.sharding, str):
            raise ValueError(f"sharding={self.sharding!r}: expected the name of a sharding")
        self._check_cache()

    def _check_cache(self) -> None:
        """Refuse calls and pages that do not fit the problem or the sharding."""
        chunks, p = self.chunks, self.problem
        if not isinstance(chunks, (tuple, list)) or any(type(n) is not int or n < 1 for n in chunks):
            raise ValueError(f"chunks={chunks!r}: expected numbers of queries, each at least 1")
        object.__setattr__(self, "chunks", tuple(chunks))
        if chunks and self.apart is None:
            raise ValueError(
                f'chunks={chunks!r} with sharding={self.sharding!r}: expected one such as "replicated/pages"'
            )
        if chunks and not (sum(chunks) == p.nq == p.nk and _on_a_cache(p)):
            raise ValueError(
                f"chunks={chunks!r}: expected a causal problem of {sum(chunks)} queries and keys, without documents "
                "and dilation"
            )
        paged = self.apart is not None and self.apart[1] == "pages"
        if paged != (self.page_table is not None):
            raise ValueError(
                f"page_table={self.page_table!r} with sharding={self.sharding!r}: a page table goes with keys in pages"
            )
        if self.page_table is not None:
            self.page_table.positions(p.nk, self.world_size)

    @property
    def apart(self) -> tuple[str, str] | None:
        """Names of the sharding of queries and of that of keys, where these are two; else `None`."""
        queries, slash, keys = self.sharding.partition("/")
        return (queries, keys) if slash and queries in QUERY_SHARDINGS and keys in (*KEY_SHARDINGS, "pages") else None

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all queries."""
        return self.sharding == "replicated_query" or (self.apart is not None and self.apart[0] == "replicated")

    @property
    def calls(self) -> tuple[Case, ...]:
        """The calls that compute it, each as a case of its own; the case itself where it is one call."""
        if not self.chunks:
            return (self,)
        found, p = [], self.problem
        for end, count in zip(itertools.accumulate(self.chunks), self.chunks, strict=True):
            lengths = None if p.key_lengths is None else tuple(min(length, end) for length in p.key_lengths)
            problem = p.replace(query_length=count, key_length=end, key_lengths=lengths)
            found.append(dataclasses.replace(self, problem=problem, chunks=()))
        return tuple(found)

    def call_of(self, position: int) -> int:
        """Return the number, from 0, of the call that has the query of this position."""
        return next(place for place, end in enumerate(itertools.accumulate(self.chunks)) if position < end)

    def replace(self, **changes: Any) -> Case:
        """Return a copy with some fields changed; fields of the problem may be named directly.

        Calls and pages follow: what goes beyond them is cut off, what is new is one call, and pages dealt in turn.
        """
        own = self.__dataclass_fields__
        inner = {name: value for name, value in changes.items() if name not in own}
        outer = {name: value for name, value in changes.items() if name in own}
        if inner:
            outer["problem"] = outer.get("problem", self.problem).replace(**inner)
        if self.apart is not None or "/" in str(outer.get("sharding", "")):
            outer |= self._cache_of(outer)
        return dataclasses.replace(self, **outer)

    def _cache_of(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return calls and pages that fit a changed problem, world size or sharding."""
        names = ("problem", "world_size", "sharding", "chunks", "page_table")
        p, size, sharding, chunks, table = (changes.get(name, getattr(self, name)) for name in names)
        ends = [end for end in itertools.accumulate(chunks) if end < p.nq]
        whole = "/" in str(sharding) and p.nq == p.nk and _on_a_cache(p)
        fit = bool(chunks) and whole and p.nq > 0
        chunks = tuple(b - a for a, b in itertools.pairwise((0, *ends, p.nq))) if fit else ()
        if not str(sharding).endswith("/pages"):
            return {"chunks": chunks, "page_table": None}
        table = table or PageTable(2, ((),) * size)
        held = {page: rank % size for rank, pages in enumerate(table.pages) for page in pages}
        order = [*held, *(page for page in range(-(-p.nk // table.page_size)) if page not in held)]
        dealt = tuple(tuple(page for page in order if held.get(page, page % size) == rank) for rank in range(size))
        return {"chunks": chunks, "page_table": PageTable(table.page_size, dealt)}

    def to_json(self) -> dict[str, Any]:
        """Return the case as JSON values, with every field present but for calls and pages that there are none of."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields |= {"problem": self.problem.to_json(), "chunks": list(self.chunks)}
        fields["delayed"] = self.delayed if self.delayed == "some" else list(self.delayed)
        if self.page_table is not None:
            pages = [list(pages) for pages in self.page_table.pages]
            fields["page_table"] = {"page_size": self.page_table.page_size, "pages": pages}
        return {name: value for name, value in fields.items() if value or name not in ("chunks", "page_table")}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        """Build the case that `to_json` wrote.

        Raises:
            ValueError: a field is unknown, missing or out of range, or the case exceeds the limits of this module.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(data, Mapping):
            raise ValueError(f"expected an object with the fields {', '.join(sorted(known))}")
        for name in data:
            if name not in known:
                raise ValueError(f"unknown field {name!r}: fields are {', '.join(sorted(known))}")
        if "problem" not in data:
            raise ValueError("the field 'problem' is missing")
        table = data.get("page_table")
        if table is not None:
            if not isinstance(table, Mapping) or set(table) != {"page_size", "pages"}:
                raise ValueError(f"page_table={table!r}: expected an object with page_size and pages")
            table = PageTable(**table)
        case = cls(**{**data, "problem": Problem.from_json(data["problem"]), "page_table": table})
        look_at_size(case.problem, case.world_size)
        for name, value in (("seed", case.seed), ("schedule", case.schedule)):
            if value > LARGEST:
                raise ValueError(f"{name}={value}: at most 2**63 - 1")
        return case

    @property
    def ring_ranks(self) -> tuple[int, ...]:
        """Global ranks of the ring, in ring order."""
        match self.group:
            case "world" | "leading":
                return tuple(range(self.world_size))
            case "offset":
                return tuple(range(2, 2 + self.world_size))
            case "strided":
                return tuple(range(1, 2 * self.world_size, 2))

    @property
    def ranks(self) -> int:
        """Number of ranks in the world, including those outside the ring."""
        return self.ring_ranks[-1] + 1 + 2 * (self.group == "leading")

    @property
    def identity(self) -> str:
        """The first eight hexadecimal digits of the SHA-256 of the case; part of its file name."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:8]

    def describe(self) -> str:
        """Describe the case in one line: shapes, dtype, sharding, values, seeds, and fields that are not default."""
        return " ".join([*self.words, f"seed={self.seed}", f"schedule={self.schedule}"])

    @property
    def words(self) -> list[str]:
        """What `describe` says, but for the seeds: "2 ranks", "n=8" and so on."""
        p = self.problem
        lengths = f"n={p.nq}" if p.nq == p.nk else f"nq={p.nq} nk={p.nk}"
        heads = f"heads={p.heads}" if p.hk == p.heads else f"heads={p.heads}/{p.hk}"
        dims = f"dim={p.head_dim}" if p.dv == p.head_dim else f"dim={p.head_dim}/{p.dv}"
        words = [
            f"{self.world_size} rank{'s' if self.world_size > 1 else ''}",
            lengths,
            f"batch={p.batch}",
            heads,
            dims,
        ]
        words += [p.dtype, self.sharding]
        if p.causal:
            words.append("causal")
        for name in ("window", "documents", "key_lengths", "scale", "softcap"):
            if (value := getattr(p, name)) is not None:
                words.append(f"{name}={value}".replace(" ", ""))
        if p.dilation is not None:
            d = p.dilation
            mode = d.heads if d.heads == "split" else f"{d.heads}/{d.head_offset}"
            words.append(f"dilation={mode}" + "".join(f"({w},{r})" for w, r in d.branches))
        if p.sinks:
            words.append("sinks")
        if self.chunks:
            words.append("chunks=" + "+".join(map(str, self.chunks)))
        if self.page_table is not None:
            pages = "|".join(",".join(map(str, pages)) for pages in self.page_table.pages)
            words.append(f"pages={self.page_table.page_size}*({pages})")
        words.append(f"values={self.values}")
        if self.memory != "contiguous":
            words.append(f"memory={self.memory}")
        if self.cotangent != "out":
            words.append(f"cotangent={self.cotangent}")
        if self.group != "world":
            words.append(f"group={self.group}{list(self.ring_ranks)}".replace(" ", ""))
        if self.transport != "buffered":
            words.append(self.transport)
        if self.delayed:
            words.append("delayed=" + ("some" if self.delayed == "some" else ",".join(map(str, self.delayed))))
        return words


def look_at_size(problem: Problem, world_size: int) -> None:
    """Refuse a problem from a file that is too large to run: ranks, scores, elements, or integers past int64.

    Raises:
        ValueError: a limit of this module is exceeded.
    """
    p = problem
    if world_size > RANKS:
        raise ValueError(f"world_size={world_size}: at most {RANKS} ranks are run")
    sizes = {
        "scores": p.batch * p.heads * max(p.nq, 1) * max(p.nk, 1),
        "elements of q": p.batch * max(p.nq, 1) * p.heads * p.head_dim,
        "elements of k": p.batch * max(p.nk, 1) * p.hk * p.head_dim,
        "elements of v": p.batch * max(p.nk, 1) * p.hk * p.dv,
    }
    for what, number in sizes.items():
        if number > PAIRS:
            shapes = f"query_length={p.nq} and key_length={p.nk}, batch={p.batch}, heads={p.heads}"
            shapes += f", head_dim={p.head_dim}" if what != "scores" else ""
            raise ValueError(f"{shapes} need {number:,} {what}, and at most {PAIRS:,} are run: take smaller ones")
    for name, numbers in (("window", p.window or ()), ("dilation", sum(p.dilation.branches, ()) if p.dilation else ())):
        if any(number is not None and number > LARGEST for number in numbers):
            raise ValueError(f"{name}={list(numbers)}: at most 2**63 - 1")


@dataclasses.dataclass(frozen=True)
class Undeclared:
    """Something that a case needs and an implementation does not declare.

    Attributes:
        keyword: the capability that would have to be declared, or changed.
        needs: what the case needs, in a few words, such as "dtype bfloat16".
        text: the same as a sentence without its full stop.
    """

    keyword: str
    needs: str
    text: str

    def __str__(self) -> str:
        return self.text


def why_unsupported(case: Case, capabilities: Capabilities) -> Undeclared | None:
    """Return what a case needs that is not declared; `None` if the implementation declares all that it asks for."""
    p, c = case.problem, capabilities
    names = set(sharding_names(case, c))
    sizes = (case.world_size,) if c.world_sizes is None else c.world_sizes
    causal = (p.causal and c.causal == "never") or (not p.causal and c.causal == "always")
    heads = None if p.dilation is None else p.dilation.heads
    uneven, empty = uneven_or_empty(case)
    flags = {
        "gqa": p.hk != p.heads,
        "value_dim": p.dv != p.head_dim,
        "scale": p.scale is not None,
        "negative_scale": p.scale is not None and p.scale < 0,
        "poison_safe": case.values == "poisoned_skips",
        "window": p.window is not None,
        "documents": p.documents is not None,
        "key_lengths": p.key_lengths is not None,
        "cross_lengths": p.nq != p.nk and case.apart is None,
        "softcap": p.softcap is not None,
        "sinks": p.sinks,
        "lse_gradient": case.cotangent != "out",
        "subgroups": case.group != "world",
        "uneven": uneven,
        "empty_shards": empty,
    }
    wanted = (
        ("incremental", "incremental", case.apart is not None and not c.incremental),
        ("incremental", "a problem that a cache does not have", case.apart is not None and not _on_a_cache(p)),
        ("sharding", f"sharding {case.sharding}", case.sharding not in names),
        ("dtypes", f"dtype {p.dtype}", p.dtype not in c.dtypes),
        ("world_sizes", f"world size {case.world_size}", case.world_size not in sizes),
        ("causal", f"causal={p.causal}", causal),
        *((name, name, asked and not getattr(c, name)) for name, asked in flags.items()),
        ("dilation", f"dilation with heads={heads!r}", heads is not None and heads not in c.dilation),
    )
    for keyword, needs, lacks in wanted:
        if lacks:
            return Undeclared(keyword, needs, f"{needs} is not declared")
    return _misfit(case, c)


def _misfit(case: Case, c: Capabilities) -> Undeclared | None:
    """Return the shape that a requirement of the implementation (`heads_multiple`, `head_dims`, …) rules out."""
    p, size = case.problem, case.world_size
    for segment, _ in p.dilation.branches if p.dilation is not None and not c.uneven_segments else ():
        if p.nq % segment:
            text = f"segment length {segment} does not divide query_length={p.nq}"
            return Undeclared("uneven_segments", "uneven_segments", f"{text}, and uneven_segments=False is declared")
    for name, heads, multiple in (
        ("heads", p.heads, c.heads_multiple),
        ("key_heads", p.hk, c.key_heads_multiple),
    ):
        if heads % (by := multiple_on(multiple, size)):
            text = f"{name}={heads} is not a multiple of {by}, and {name}_multiple={multiple!r} is declared"
            return Undeclared(f"{name}_multiple", f"{name}={heads}", text)
    for name, dim, members in (("head_dim", p.head_dim, c.head_dims), ("value_dim", p.dv, c.value_dims)):
        if members is not None and dim not in members:
            return Undeclared(f"{name}s", f"{name}={dim}", f"{name}={dim} is not among the declared {name}s={members}")
    multiple = c.length_multiple or 1
    for length in sorted({length for call in case.calls for length in (call.problem.nq, call.problem.nk)}):
        if multiple > 1 and length % (size * multiple):
            text = f"length {length} is not a multiple of {size} ranks * length_multiple={multiple}"
            return Undeclared("length_multiple", f"length {length}", text)
    return None


def multiple_on(multiple: Multiple, world_size: int) -> int:
    """Return the number that must divide a head count on a world of this size; 1 if there is no such requirement."""
    return world_size if multiple == "world_size" else multiple or 1


def even_multiple(sharding: str, world_size: int) -> int:
    """Return the number that must divide a length for all shards to be equal: zigzag cuts two pieces a rank."""
    return 2 * world_size if "zigzag" in sharding.split("/") else world_size


def sharding_names(case: Case, capabilities: Capabilities) -> list[str]:
    """Return the declared shardings of the kind that a case has: of queries and keys alike, or apart as on a cache."""
    c = capabilities
    if case.apart is None:
        return [sharding_name(sharding) for sharding in c.shardings]
    return [f"{queries}/{keys}" for queries in c.query_sharding for keys in c.key_sharding]


def sharding_of(case: Case, capabilities: Capabilities) -> Sharding:
    """Return the sharding of a case: the declared one of that name, or that of the cache."""
    return capabilities.sharding_named(case.sharding) if case.apart is None else _of_cache(case)


def _of_cache(case: Case) -> QueryKeySharding:
    assert case.apart is not None
    queries, keys = case.apart
    return QueryKeySharding(queries, keys if case.page_table is None else case.page_table)  # type: ignore[arg-type]  # checked before


def _on_a_cache(p: Problem) -> bool:
    """Return whether a problem is that of a call on a cache: causal, new queries last, a single sequence."""
    return p.causal and p.nq <= p.nk and p.documents is None and p.dilation is None


def uneven_or_empty(case: Case) -> tuple[bool, bool]:
    """Return whether ranks hold different numbers of queries or of keys, and whether some rank holds none of them."""
    p, size = case.problem, case.world_size
    if case.apart is None:
        uneven = any(length % even_multiple(case.sharding, size) for length in (p.nq, p.nk))
        return uneven, min(p.nq, p.nk) < size
    held = []
    for call in case.calls:
        sharding = _of_cache(call)
        held.append({len(rows) for rows in key_positions(sharding, call.problem.nk, size)})
        held.append({len(rows) for rows in query_positions(sharding, call.problem.nq, size)})
    return any(len(counts) > 1 for counts in held), any(0 in counts for counts in held)
