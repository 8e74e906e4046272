"""The plug-in contract: what an implementation declares, and what it is given when it is called.

Importing this module does not import torch.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Literal, get_args

from ringref.problem import DTYPES, Dilation, DtypeName, HeadMode, Problem

if TYPE_CHECKING:
    import torch
    import torch.distributed

    from ringref.sharding import PageTable, Sharding

TensorLayout = Literal["bshd", "bhsd"]
CausalSupport = Literal["both", "always", "never"]
Multiple = int | Literal["world_size"] | None
"""What a number of heads has to be a multiple of: an integer, the world size of the group, or nothing (`None`)."""
QueryShardingOfCache = Literal["replicated", "contiguous", "zigzag", "striped"]
KeyShardingOfCache = Literal["contiguous", "zigzag", "striped", "pages"]
SHARDING_NAMES = ("contiguous", "zigzag", "striped", "replicated_query", "zigzag_documents")
LARGEST = {
    "heads_multiple": 512, "key_heads_multiple": 512, "head_dims": 4096, "value_dims": 4096, "length_multiple": 4096,
}  # fmt: skip
"""Largest shapes that may be needed: the float64 oracle of a case holds all heads, queries and keys at once."""


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """What one rank is told about an attention call, beside its tensors q, k and v.

    Attributes:
        group: the process group that is the ring.
        rank: this rank, within the group.
        world_size: the number of ranks in the group.
        problem: what all ranks compute together; lengths are global.
        sharding: the sharding in force, one of those declared; on a growing cache a `QueryKeySharding`.
        positions: global positions of this rank's queries, int64, shape `(n_local,)`, in the order of q's rows.
        key_positions: global positions of this rank's keys and values, int64, one for each row of k, in order.
        sinks: learned sinks `(Hq,)`, float32, the same on every rank, −inf in a head without one; `None` where the
            problem has none. They require gradients where q does; which ones, `Capabilities.sinks` says.
    """

    group: torch.distributed.ProcessGroup
    rank: int
    world_size: int
    problem: Problem
    sharding: Sharding
    positions: torch.Tensor
    key_positions: torch.Tensor
    sinks: torch.Tensor | None = None

    @property
    def offset(self) -> int:
        """Positions before the first query, key_length − query_length: what a growing cache held before this call."""
        return self.problem.diagonal

    @property
    def page_table(self) -> PageTable | None:
        """Which rank holds which pages of the keys, in the order of its rows; `None` if they do not lie by page."""
        from ringref.sharding import PageTable, QueryKeySharding

        keys = self.sharding.keys if isinstance(self.sharding, QueryKeySharding) else self.sharding
        return keys if isinstance(keys, PageTable) else None

    @property
    def causal(self) -> bool:
        """Whether the mask is causal, bottom-right aligned."""
        return self.problem.causal

    @property
    def scale(self) -> float:
        """The factor on q.k: `head_dim ** -0.5` where the problem names none."""
        return self.problem.scale_value

    @property
    def window(self) -> tuple[int | None, int | None] | None:
        """`(left, right)`, both inclusive, `None` on a side without a bound; `None` if there is no window."""
        return self.problem.window

    @property
    def dilation(self) -> Dilation | None:
        """The dilation, or `None`."""
        return self.problem.dilation

    @property
    def documents(self) -> tuple[int, ...] | None:
        """Cumulative document lengths over the global sequence (cu_seqlens), or `None`."""
        return self.problem.documents

    @property
    def key_lengths(self) -> tuple[int, ...] | None:
        """Number of valid keys of each batch element, or `None`."""
        return self.problem.key_lengths

    @property
    def softcap(self) -> float | None:
        """The c of `c * tanh(s / c)`, or `None`."""
        return self.problem.softcap


def _capability(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"meaning": meaning})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an implementation declares that it supports.

    This one table drives which cases are drawn, what is reported, and the documentation. An undeclared capability
    is reported as `unsupported`, never as a pass; a declared one that raises or is wrong is a `fail`.
    """

    sharding: Sharding | tuple[Sharding, ...] = _capability(
        "contiguous",
        "contiguous, zigzag, striped, replicated_query, zigzag_documents, a function, `balancer` of one that is given "
        "documents, or a tuple of these",
    )
    tensor_layout: TensorLayout = _capability("bshd", "order of the axes of q, k, v and out: bshd or bhsd")
    dtypes: tuple[DtypeName, ...] = _capability(("float32",), "float64, float32, bfloat16, float16")
    devices: tuple[str, ...] = _capability(("cpu",), "devices that it runs on")
    causal: CausalSupport = _capability("both", "both, always or never")
    gradients: bool = _capability(True, "differentiable in q, k and v")
    lse: bool = _capability(False, "returns (out, lse)")
    lse_gradient: bool = _capability(False, "differentiable through lse as well")
    gqa: bool = _capability(False, "fewer key heads than query heads")
    value_dim: bool = _capability(False, "value_dim other than head_dim")
    scale: bool = _capability(False, "honours a positive scale other than head_dim ** -0.5")
    window: bool = _capability(False, "window (left, right)")
    documents: bool = _capability(False, "packed documents (cu_seqlens)")
    key_lengths: bool = _capability(False, "key lengths by batch element")
    cross_lengths: bool = _capability(False, "query and key lengths that differ")
    softcap: bool = _capability(False, "softcap c: s becomes c * tanh(s / c)")
    sinks: bool | Literal["partial"] = _capability(
        False,
        'learned sinks; True if each rank returns their whole gradient, "partial" if that of its own queries',
    )
    incremental: bool = _capability(
        False, "chunked prefill and decoding: a sequence of calls on a cache of keys and values that grows"
    )
    query_sharding: tuple[QueryShardingOfCache, ...] = _capability(
        ("replicated",), "incremental: how the queries of a call lie: replicated, contiguous, zigzag, striped"
    )
    key_sharding: tuple[KeyShardingOfCache, ...] = _capability(
        ("contiguous",), "incremental: how the cache lies: contiguous, zigzag, striped, pages"
    )
    dilation: tuple[HeadMode, ...] = _capability((), "dilation with heads split, shared, or both")
    uneven_segments: bool = _capability(True, "segment lengths that do not divide the sequence, for a dilation")
    uneven: bool = _capability(False, "lengths that the world size (zigzag: twice it) does not divide")
    empty_shards: bool = _capability(False, "fewer positions than ranks; a rank may hold nothing")
    subgroups: bool = _capability(False, "group may be smaller than the world, offset or strided")
    accumulates: DtypeName = _capability("float32", "dtype of scores and running sums for inputs no wider than it")
    probabilities: Literal["accumulates", "input"] = _capability(
        "accumulates", '"input" if probabilities are rounded to the input dtype before they meet the values'
    )
    reduces: Literal["accumulates", "input"] = _capability(
        "accumulates",
        '"input" if dk and dv are summed over ranks in the input dtype, as by the backward of an all-gather',
    )
    memory: Literal["sharded", "streaming"] | None = _capability(None, "claims on a rank's peak memory")
    traffic: Literal["neighbours"] | None = _capability(None, "claims that only ring neighbours exchange")
    balance: float | None = _capability(
        None, "claims that under a sharding by documents no rank has more than this times the mean work, and one query"
    )
    deterministic: bool = _capability(False, "claims bit-identical results on every run, on any schedule of ranks")
    processes: bool = _capability(False, "cannot share a process with other ranks")
    world_sizes: tuple[int, ...] | None = _capability(None, "world sizes that it runs on; None is any")
    negative_scale: bool = _capability(False, "honours a negative scale too")
    heads_multiple: Multiple = _capability(None, 'needs query heads that this divides, a number or "world_size"')
    key_heads_multiple: Multiple = _capability(None, 'needs key heads that this divides, a number or "world_size"')
    head_dims: tuple[int, ...] | None = _capability(None, "needs one of these head dimensions; None is any")
    value_dims: tuple[int, ...] | None = _capability(None, "needs one of these value dimensions; None is any")
    length_multiple: int | None = _capability(None, "needs this to divide the positions that each rank holds")
    shapes: Literal["any", "compiled"] = _capability(
        "any", '"compiled" if every new shape costs seconds: few are tried'
    )
    poison_safe: bool = _capability(False, "survives NaN in keys that every query skips, not only in padding")

    def __post_init__(self) -> None:
        names = self.shardings
        if not names:
            raise ValueError("sharding=(): expected at least one")
        for sharding in names:
            if not callable(sharding) and sharding not in SHARDING_NAMES:
                raise ValueError(f"sharding={sharding!r}: expected one of {', '.join(SHARDING_NAMES)}, or a function")
        self._choice("tensor_layout", get_args(TensorLayout))
        self._choice("causal", get_args(CausalSupport))
        self._choice("accumulates", DTYPES)
        self._choice("probabilities", ("accumulates", "input"))
        self._choice("reduces", ("accumulates", "input"))
        self._choice("memory", (None, "sharded", "streaming"))
        self._choice("traffic", (None, "neighbours"))
        self._choice("shapes", ("any", "compiled"))
        if not isinstance(self.sinks, bool) and self.sinks != "partial":
            raise ValueError(f'sinks={self.sinks!r}: expected True, False or "partial"')
        self._choices("dtypes", DTYPES)
        self._choices("dilation", get_args(HeadMode), may_be_empty=True)
        self._choices("devices", None)
        self._incremental()
        for name in ("world_sizes", "head_dims", "value_dims"):
            self._numbers(name)
        self._balance()
        self._multiple("heads_multiple", "world_size")
        self._multiple("key_heads_multiple", "world_size")
        self._multiple("length_multiple")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool) and field.name != "sinks":
                raise ValueError(f"{field.name}={value!r}: expected True or False")
        if self.lse_gradient and not self.lse:
            raise ValueError("lse_gradient=True needs lse=True: only a returned lse can be differentiated")
        if self.lse_gradient and not self.gradients:
            raise ValueError("lse_gradient=True contradicts gradients=False")
        if self.negative_scale and not self.scale:
            raise ValueError("negative_scale=True needs scale=True: without it only head_dim ** -0.5 is asked for")
        if self.value_dims is not None and not self.value_dim:
            raise ValueError(
                f"value_dims={self.value_dims!r} needs value_dim=True: without it value_dim is head_dim, see head_dims"
            )
        if self.uneven and (self.length_multiple or 1) > 1:
            raise ValueError(
                f"uneven=True contradicts length_multiple={self.length_multiple}: shards that differ by one position "
                "cannot all be a multiple of it"
            )

    def _incremental(self) -> None:
        for name, allowed in (("query_sharding", QueryShardingOfCache), ("key_sharding", KeyShardingOfCache)):
            if isinstance(value := getattr(self, name), str):
                object.__setattr__(self, name, (value,))
            self._choices(name, get_args(allowed))
            if not self.incremental and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name}={value!r} needs incremental=True: it is of calls on a growing cache")
        if self.incremental and self.causal == "never":
            raise ValueError(
                'incremental=True contradicts causal="never": a row that is computed before later keys are there does '
                "not attend them"
            )

    def _balance(self) -> None:
        if self.balance is None:
            return
        from ringref.sharding import by_documents

        value = self.balance
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 1 <= value < math.inf:
            raise ValueError(
                f"balance={value!r}: expected a number of at least 1, or None: no busiest rank has less than the mean"
            )
        if not any(map(by_documents, self.shardings)):
            raise ValueError(
                f"balance={value!r} needs a sharding that depends on documents: zigzag_documents, or a "
                "ringverify.balancer"
            )

    def _choice(self, name: str, allowed: tuple[Any, ...]) -> None:
        if (value := getattr(self, name)) not in allowed:
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(str, allowed))}")

    def _numbers(self, name: str) -> None:
        """Check a field that holds positive integers or `None`, and store them sorted, each once."""
        values = getattr(self, name)
        if values is None:
            return
        if isinstance(values, str) or not isinstance(values, Collection) or not values:
            raise ValueError(f"{name}={values!r}: expected a collection of positive integers, or None for any")
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 1 for value in values):
            raise ValueError(f"{name}={values!r}: expected positive integers")
        self._affordable(name, max(values))
        object.__setattr__(self, name, tuple(sorted(set(values))))

    def _multiple(self, name: str, *words: str) -> None:
        value = getattr(self, name)
        if value is None or value in words:
            return
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            choices = ["a positive integer", *(repr(word) for word in words), "None for any"]
            raise ValueError(f"{name}={value!r}: expected {', '.join(choices[:-1])} or {choices[-1]}")
        self._affordable(name, value)

    def _affordable(self, name: str, value: int) -> None:
        if value > (most := LARGEST.get(name, value)):
            raise ValueError(f"{name}={getattr(self, name)!r}: {most} is the largest of which cases are made")

    def _choices(self, name: str, allowed: tuple[str, ...] | None, *, may_be_empty: bool = False) -> None:
        values = getattr(self, name)
        hint = ", ".join(allowed) if allowed else "names of devices"
        if isinstance(values, str) or not isinstance(values, Collection) or not (values or may_be_empty):
            raise ValueError(f"{name}={values!r}: expected a tuple of {hint}")
        for value in values:
            if not isinstance(value, str) or (allowed is not None and value not in allowed):
                raise ValueError(f"{name} contains {value!r}: expected {hint}")
        object.__setattr__(self, name, tuple(values))

    @property
    def shardings(self) -> tuple[Sharding, ...]:
        """The declared shardings, always as a tuple."""
        return self.sharding if isinstance(self.sharding, tuple) else (self.sharding,)

    def sharding_named(self, name: str) -> Sharding:
        """Return the declared sharding of that name.

        Raises:
            ValueError: no declared sharding has it.
        """
        for sharding in self.shardings:
            if sharding_name(sharding) == name:
                return sharding
        raise ValueError(f"sharding {name!r} is not declared: {', '.join(map(sharding_name, self.shardings))}")


def sharding_name(sharding: Sharding) -> str:
    """Return the name of a sharding in cases and reports; of a user's function, its qualified name."""
    return sharding if isinstance(sharding, str) else str(getattr(sharding, "__qualname__", repr(sharding)))


AttendFunction = Callable[..., Any]
FROM_FILE = re.compile(r"^_ringverify_file_[0-9a-f]+\.")
"""Prefix of the module name of a target that was loaded from a file; messages leave it out."""


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A function under test with the capabilities that it declares.

    Attributes:
        function: `attend(q, k, v, call)`, called once on each rank with that rank's shards in the declared
            `tensor_layout`; returns out, or `(out, lse)` if it declares lse.
        name: its name in reports.
        capabilities: what it declares.
    """

    function: AttendFunction
    name: str
    capabilities: Capabilities

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> Any:
        """Call the function, so that the decorated name can still be called."""
        return self.function(q, k, v, call)


def implementation(
    *bare: Any, name: str | None = None, **capabilities: Any
) -> Callable[[AttendFunction], Implementation]:
    """Declare a function as an implementation of sequence-parallel attention.

    Args:
        *bare: none; it is here to be refused where the parentheses were forgotten.
        name: its name in reports; by default the function's dotted name.
        **capabilities: the fields of `Capabilities`.

    Raises:
        TypeError: an unknown capability, or a function that cannot be called as `attend(q, k, v, call)`.
        ValueError: a capability has an impossible value.
    """
    if bare:
        raise TypeError("@implementation without parentheses: write @implementation(), or declare what it supports")
    known = [field.name for field in dataclasses.fields(Capabilities)]
    if unknown := sorted(set(capabilities) - set(known)):
        raise TypeError(f"unknown capability {unknown[0]!r}; known: {', '.join(known)}")
    declared = Capabilities(**capabilities)

    def declare(function: AttendFunction) -> Implementation:
        dotted = f"{FROM_FILE.sub('', function.__module__)}.{function.__qualname__}"
        try:
            inspect.signature(function).bind("q", "k", "v", "call")
        except TypeError as error:
            raise TypeError(
                f"{dotted}{inspect.signature(function)} cannot be called as attend(q, k, v, call): {error}"
            ) from None
        return Implementation(function, name or dotted, declared)

    return declare
