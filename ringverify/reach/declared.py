"""What the builder of a model declares, for `ringverify reach`. Importing this module does not import torch."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal

from ringref.problem import Problem
from ringref.sharding import Positions, Sharding, key_positions
from ringverify import targets
from ringverify.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDeclaration:
    """What `ringverify reach` needs to know of a model. Everything has a default.

    Attributes:
        vocabulary: tokens are ids below it; `None`, without `features`: that of the model's first `nn.Embedding`.
        features: tokens are vectors of so many numbers instead.
        length: tokens of the whole sequence.
        ranks: how many ranks are compared with one.
        sharding: which rank holds which tokens: contiguous, zigzag, striped, or a function
            `(length, world_size) -> positions of each rank`.
        whole: every rank is given the whole batch and returns the whole outputs; the model shards inside.
        causal: whether a token's output may depend on later tokens; `None`: as it is in one process.
        window: `(left, right)` of each attention layer; needs `layers`.
        documents: cumulative document lengths (`cu_seqlens`).
        layers: attention layers, each of which reaches a window further.
        loss: the model takes `labels` and returns a loss too; that of a training step is the "mean" or the "sum" of
            what the ranks return, or what each of them returns, the "whole". `None`: it is called without labels.
        gradients: what training does with the ranks' parameter gradients: takes their "mean", as
            DistributedDataParallel does, or their "sum", or nothing, since the model's backward makes each of them
            "whole"; `None`: the mean under `loss="mean"`, else the sum.
        batch: most sequences of a batch.
        processes: ranks cannot share a process, because something is kept for the process: they run over gloo.

    Raises:
        ValueError: a value is out of range, or two contradict each other.
    """

    vocabulary: int | None = None
    features: int | None = None
    length: int = 64
    ranks: int = 4
    sharding: Sharding = "contiguous"
    whole: bool = False
    causal: bool | None = None
    window: tuple[int | None, int | None] | None = None
    documents: tuple[int, ...] | None = None
    layers: int | None = None
    loss: Literal["mean", "sum", "whole"] | None = None
    gradients: Literal["mean", "sum", "whole"] | None = None
    batch: int = 32
    processes: bool = False

    def __post_init__(self) -> None:
        if self.vocabulary is not None and self.features is not None:
            raise ValueError(
                f"vocabulary={self.vocabulary} and features={self.features}: tokens are ids or vectors, not both"
            )
        for name, least in (
            ("vocabulary", 3),
            ("features", 1),
            ("length", 1),
            ("ranks", 2),
            ("layers", 1),
            ("batch", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < least):
                raise ValueError(f"{name}={value!r}: expected a whole number of at least {least}")
        for name, known in (("loss", (None, "mean", "sum", "whole")), ("gradients", (None, "mean", "sum", "whole"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(filter(None, known))}")
        if self.window is not None and self.layers is None:
            raise ValueError(f"window={self.window}: say layers too, since each layer reaches a window further")
        if self.sharding == "replicated_query":
            raise ValueError(
                "sharding='replicated_query' is for attention alone: outputs of a model are sharded like tokens"
            )
        if isinstance(self.sharding, str):
            key_positions(self.sharding, 0, 1)  # raises for a name that is none
        self.problem(self.length)

    def problem(self, length: int) -> Problem | None:
        """Return the declared pattern of a layer, `None` where none is declared."""
        if self.causal is None and self.window is None and self.documents is None:
            return None
        return Problem(
            query_length=length, causal=bool(self.causal), window=self.window, documents=self.documents, heads=1
        )

    def shards(self, length: int, ranks: int) -> list[Positions]:
        """Return the positions of each rank."""
        return key_positions(self.sharding, length, ranks)


@dataclasses.dataclass(frozen=True)
class DeclaredModel:
    """A function that builds a model, and what it declares."""

    function: Callable[[Any], Any]
    declaration: ModelDeclaration

    def __call__(self, group: Any) -> Any:
        """Build the model of this rank."""
        return self.function(group)


def model(*bare: Any, **declared: Any) -> Callable[[Callable[[Any], Any]], DeclaredModel]:
    """Declare what `ringverify reach` needs to know of the model that a function builds; see `ModelDeclaration`.

    The function is called as `build(group)` once a rank, `torch.distributed` initialised and the seed set, and returns
    the rank's model: called with its shard of the tokens, it returns the outputs of these tokens.

    Raises:
        TypeError: there is no such declaration; or the function does not take the group alone.
        ValueError: a declaration is out of range, or two contradict each other.
    """
    known = [field.name for field in dataclasses.fields(ModelDeclaration)]
    if bare:
        raise TypeError("@model without parentheses: write @model(), or declare what the model needs")
    if unknown := sorted(set(declared) - set(known)):
        raise TypeError(f"unknown declaration {unknown[0]!r} of a model; known: {', '.join(known)}")
    declaration = ModelDeclaration(**declared)
    return lambda function: DeclaredModel(_taking_a_group(function), declaration)


def load_model(target: str) -> DeclaredModel:
    """Import the function that a target names; one that is not decorated declares nothing.

    Raises:
        UsageError: there is no such target, it cannot be imported, or it is no function of the group.
        Inconclusive: a package that it needs is not installed.
    """
    module, attribute = targets.located(target)
    if attribute is None:
        raise UsageError(f"target {target!r}: name the function that builds the model, as in {module}:build")
    found = targets.attribute_of(target)
    if isinstance(found, DeclaredModel):
        return found
    if not callable(found):
        raise UsageError(f"target {target!r} is a {type(found).__name__}: expected a function build(group)")
    try:
        return DeclaredModel(_taking_a_group(found), ModelDeclaration())
    except TypeError as error:
        raise UsageError(f"target {target!r}: {error}") from None


def _taking_a_group(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise TypeError(
            f"{getattr(function, '__qualname__', function)}{inspect.signature(function)} cannot be called as "
            f"build(group): {error}"
        ) from None
    return function
