"""One rank's part: build the model, run it on this rank's tokens, and see which outputs move when one token changes.

Shape letters: B sequences of a batch, N tokens of the whole sequence, n tokens of this rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn

from ringverify.errors import Inconclusive, UsageError
from ringverify.reach.counting import Counting
from ringverify.reach.declared import load_model
from ringverify.reach.first_nan import FirstNaN, Origin
from ringverify.worlds.exceptions import one_line, trace_of
from ringverify.worlds.limits import limit_of
from ringverify.worlds.raising import Charge
from ringverify.worlds.stacks import whose_file
from ringverify.worlds.torch_private import TorchDispatchMode, schema_of
from ringverify.worlds.watch.watcher import watcher
from ringverify.worlds.whose import ours, theirs
from ringverify.worlds.world import WorldUnavailable

Array = NDArray[np.float64]
Precision = Literal["float32", "float64"]

BATCH = 2
"""Sequences of the batch whose outputs, loss and gradients are compared."""

IGNORED = -100
"""The label that torch's cross entropy ignores."""


OF_GPUS = re.compile(r"\b(cuda|gpus?|triton|nvidia|rocm)\b", re.IGNORECASE)
"""Words that an exception has where it is about a GPU."""

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclasses.dataclass(frozen=True)
class ReachTask:
    """The argument of a rank's program.

    Attributes:
        target: names the function that builds the model.
        length: N.
        ranks: how many ranks are compared with one; a single process needs their shards too.
        seed: decides weights, tokens and labels.
        precision: dtype of the model.
        rows: sequences of a batch of probes; 0 where it is to be found out whether sequences are independent.
    """

    target: str
    length: int
    ranks: int
    seed: int = 0
    precision: Precision = "float32"
    rows: int = 0


@dataclasses.dataclass(frozen=True)
class Computed:
    """What one rank computed.

    Attributes:
        positions: those of its tokens, `(n)`.
        out: its outputs, `(B, n, …)`.
        repeats: a second forward gave the same bits.
        draws: a forward drew random numbers.
        loss: what the model returned as its loss, if it takes labels.
        gradients: by name of the parameter; `None` for a model without parameters.
        weights: a checksum of its parameters.
        sent: bytes that it sent in the forward and in the backward.
        sent_by: bytes that each of its modules sent in the forward, by class and then by name; without torch's own.
    """

    positions: NDArray[np.int64]
    out: Array
    repeats: bool
    draws: bool
    loss: float | None
    gradients: dict[str, Array] | None
    weights: str
    sent: tuple[int, int]
    sent_by: dict[str, dict[str, int]]


@dataclasses.dataclass(frozen=True)
class ComputedAlone:
    """What one process computed.

    Attributes:
        precision: dtype of the model's parameters, float32 for 16-bit ones.
        plain: computed in it.
        exact: the same in float64, if the model can be converted.
        shards: positions of each of `ReachTask.ranks` ranks.
        shard_losses: the loss of each shard of `ReachTask.ranks`, if the model takes labels; and the same without the
            first label of each shard.
    """

    precision: Precision
    plain: Computed
    exact: Computed | None
    shards: tuple[NDArray[np.int64], ...]
    shard_losses: tuple[tuple[float, ...], tuple[float, ...]] | None


@dataclasses.dataclass(frozen=True)
class Probed:
    """Which of one rank's outputs moved.

    Attributes:
        positions: those of its tokens, `(n)`.
        moved: by how much output i moved at most when token j was changed, `(n, N)`; 0 only if no bit changed.
        size: the largest output.
        independent: a sequence of a batch does not depend on the others.
    """

    positions: NDArray[np.int64]
    moved: NDArray[np.float64]
    size: float
    independent: bool


# -- programs ----------------------------------------------------------------------------------------------------------


def describe_model(target: str) -> dict[str, Any]:
    """Return what the builder of a model declares, by name, or why there is none."""
    try:
        declaration = load_model(target).declaration
    except UsageError as error:
        return {"wrong": str(error)}
    except Inconclusive as error:
        return {"inconclusive": str(error)}
    fields = {field.name: getattr(declaration, field.name) for field in dataclasses.fields(declaration)}
    if not isinstance(declaration.sharding, str):  # a function stays where it was defined
        fields["sharding"] = getattr(declaration.sharding, "__qualname__", "a function")
    return fields


def compute(task: ReachTask) -> Computed:
    """Run the model on this rank's tokens, forward and backward."""
    with ours():
        return _RankModel(task).computed()


def compute_alone(task: ReachTask) -> ComputedAlone:
    """Run the model in one process, in its own dtype and in float64."""
    with ours():
        subject = _RankModel(task)
        plain, losses = subject.computed(), subject.shard_losses()
        return ComputedAlone(subject.precision, plain, subject.exact(), tuple(subject.shards), losses)


def probe(task: ReachTask) -> Probed:
    """Change one token after the other, one in each sequence of a batch, and compare this rank's outputs bit by bit."""
    with ours(), torch.no_grad():
        return _RankModel(task).probed()


def recount(task: ReachTask) -> list[tuple[str, Array]]:
    """Run the model in one process with positions that count from each shard's first token, one line at a time.

    Returns:
        For each line of the model that counts over the whole sequence, the line and the outputs; last those of all
        lines together, where there are several.
    """
    with ours(), torch.no_grad():
        return _RankModel(task).recounted()


def first_nan(task: ReachTask) -> list[tuple[Origin, str]]:
    """Run the model, and return where this rank's numbers become NaN, and what inputs are like there, in that order."""
    with ours():
        subject = _RankModel(task)
        with FirstNaN() as found:
            subject.forward(subject.tokens, subject.labels)
        return list(found.origins.items())


# -- the rank ----------------------------------------------------------------------------------------------------------


class _RankModel:
    """The model of this rank, and its tokens."""

    def __init__(self, task: ReachTask) -> None:
        self.task = task
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        subject = load_model(task.target)
        self.declared = declared = subject.declaration
        with theirs():
            shards = declared.shards(task.length, self.size)
            self.shards = declared.shards(task.length, task.ranks)
        everything = declared.whole or self.size == 1  # in the order of the sequence
        self.own = torch.arange(task.length) if everything else torch.from_numpy(np.array(shards[self.rank]))
        torch.manual_seed(task.seed)
        with self._explained():
            self.model = subject(dist.group.WORLD)
        if not callable(self.model):
            raise Charge(
                f"builds a {type(self.model).__name__}: expected a callable, tokens in and outputs out", rule="type"
            )
        self.module = self.model if isinstance(self.model, nn.Module) else None
        self._convert()
        with theirs():
            self.takes = inspect.signature(self.module.forward if self.module is not None else self.model).parameters
        self._refuse_training()
        self.tokens, self.labels = self._batch()

    def _convert(self) -> None:
        parameters = [] if self.module is None else list(self.module.parameters())
        elsewhere = next((p.device for p in parameters if p.device.type != "cpu"), None)
        if elsewhere is not None:
            raise Charge(f"has parameters on {elsewhere}: build the model on the CPU for reach", rule="gpu")
        digest = hashlib.sha256()
        for p in parameters:
            digest.update(p.detach().double().numpy().tobytes())
        self.weights = digest.hexdigest()
        if self.module is None:
            return
        if self.task.precision == "float64":
            self.module.double()
        elif any(p.dtype in (torch.bfloat16, torch.float16) for p in parameters):
            self.module.float()

    @property
    def precision(self) -> Precision:
        """The dtype of the model's parameters."""
        parameters = [] if self.module is None else list(self.module.parameters())
        return "float64" if any(p.dtype == torch.float64 for p in parameters) else "float32"

    def _refuse_training(self) -> None:
        for name, part in () if self.module is None else self.module.named_modules():
            if isinstance(part, BATCH_NORMS) and (part.training or part.running_mean is None):
                off = "return model.eval() from the builder" if part.training else "give it track_running_stats=True"
                raise Charge(
                    f"mixes tokens and sequences by statistics of the batch ({name}, {type(part).__name__}): {off}, or "
                    "normalise each token by itself",
                    rule="statistics",
                )
            if part.training and isinstance(part, DROPOUTS) and part.p > 0:
                raise Charge(
                    f"has dropout on ({name}, p={part.p}): return model.eval() from the builder, or set p to 0",
                    rule="dropout",
                )

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens `(B, N)` or `(B, N, features)`, and labels `(B, N)`, the same on every rank."""
        draw = torch.Generator().manual_seed(self.task.seed)
        shape = (BATCH, self.task.length)
        if self.declared.features is not None:
            if self.declared.loss is not None:
                raise Charge("cannot be given labels: declare vocabulary, or leave loss out", rule="type")
            dtype = torch.float64 if self.task.precision == "float64" else torch.float32
            return torch.randn(*shape, self.declared.features, generator=draw).to(dtype), None
        vocabulary = self._vocabulary()
        tokens = torch.randint(1, vocabulary, shape, generator=draw)
        if self.declared.loss is None:
            return tokens, None
        if "labels" not in self.takes:
            raise Charge("takes no labels: leave loss out, or add the parameter labels", rule="type")
        labels = torch.randint(1, vocabulary, shape, generator=draw)
        chances = torch.linspace(0.1, 0.9, self.task.length)  # later shards have more labels
        ignored = torch.rand(shape, generator=draw) > chances
        for shard in self.shards:
            ignored[:, shard[-1:]] = False  # no shard is without any
        return tokens, labels.masked_fill(ignored, IGNORED)

    def _vocabulary(self) -> int:
        if self.declared.vocabulary is not None:
            return self.declared.vocabulary
        parts = () if self.module is None else self.module.modules()
        found = next((part.num_embeddings for part in parts if isinstance(part, nn.Embedding)), None)
        if found is None:
            raise Charge(
                "builds a model without nn.Embedding: declare what tokens are, by @ringverify.model(vocabulary=…) or "
                "(features=…)",
                rule="vocabulary",
            )
        return found

    # -- calling the model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        """Run the model on this rank's part of a batch; return its outputs and its loss, if it takes labels."""
        own = tokens[:, self.own]
        given: dict[str, Any] = {"positions": self.own, "position_ids": self.own[None].expand(len(own), -1)}
        if self.declared.documents is not None:
            given["cu_seqlens"] = torch.tensor(self.declared.documents, dtype=torch.int32)
        if labels is not None:
            given["labels"] = labels[:, self.own]
        with self._explained():
            result = self.model(own, **{name: value for name, value in given.items() if name in self.takes})
            outputs, loss = _read(result)
        if not isinstance(outputs, torch.Tensor) or outputs.shape[:2] != own.shape[:2]:
            what = f"shape {tuple(outputs.shape)}" if isinstance(outputs, torch.Tensor) else type(outputs).__name__
            raise Charge(
                f"returns outputs of {what} for tokens of {tuple(own.shape)}: expected a tensor with one row per "
                "token, (batch, tokens, …)",
                rule="per_token",
            )
        if not outputs.is_floating_point():
            raise Charge(f"returns outputs of {outputs.dtype}: expected floating-point numbers", rule="per_token")
        if labels is None:
            return outputs, None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise Charge("returns no loss: expected (outputs, loss), or an object with logits and loss", rule="type")
        return outputs, loss

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Context of the user's code: says where it raises, and tells apart what needs a GPU."""
        try:
            with theirs():
                yield
        except (Charge, WorldUnavailable):
            raise
        except Exception as error:
            if limit_of(error) is not None:
                raise
            frames = traceback.extract_tb(trace_of(error))
            if not torch.cuda.is_available() and any(frame.filename == torch.cuda.__file__ for frame in frames):
                raise Charge(
                    "needs a GPU, and none is here: build the model on the CPU for reach", rule="gpu"
                ) from error
            place = [frame for frame in frames if whose_file(frame.filename) == "user"][-1]
            told, at = one_line(error), f"{place.filename}:{place.lineno}"
            # A hint beside the line, and no more: words decide nothing.
            of_gpus = OF_GPUS.search(told) or any("triton" in Path(frame.filename).parts for frame in frames)
            hint = "; no GPU is here: if the model needs one, build it for the CPU for reach"
            hint = hint if of_gpus and not torch.cuda.is_available() else ""
            raise Charge(f"raises {told} (at {at}){hint}", rule="raised") from error

    def computed(self) -> Computed:
        """Outputs, loss, gradients and what was sent."""
        with _sent() as sent:
            state = torch.get_rng_state()
            with self._by_module(sent) as sent_by:
                outputs, loss = self.forward(self.tokens, self.labels)
            draws = not torch.equal(state, torch.get_rng_state())
            forward = sent()
            gradients = self._gradients(outputs, loss)
            backward = sent() - forward
        # With gradients again: without, torch may choose other kernels.
        again = self.forward(self.tokens, self.labels)[0].detach()
        return Computed(
            self.own.numpy(),
            _numbers(outputs),
            torch.equal(outputs.isnan(), again.isnan()) and torch.equal(outputs.nan_to_num(), again.nan_to_num()),
            draws,
            None if loss is None else float(loss.detach()),
            gradients,
            self.weights,
            (forward, backward),
            sent_by,
        )

    @contextmanager
    def _by_module(self, sent: Callable[[], int]) -> Iterator[dict[str, dict[str, int]]]:
        """Context in which the bytes that each module sends are added up, those of its own modules included."""
        found: dict[str, dict[str, int]] = {}
        began: list[int] = []
        hooks: list[Any] = []

        def after(of: dict[str, int], name: str) -> None:
            of[name] = of.get(name, 0) + sent() - began.pop()

        for name, module in () if self.module is None else self.module.named_modules():
            if type(module).__module__.startswith("torch."):  # what a model is made of, which says nothing of its use
                continue
            of = found.setdefault(type(module).__name__, {})
            hooks.append(module.register_forward_pre_hook(lambda *_: began.append(sent())))
            hooks.append(module.register_forward_hook(lambda *_, of=of, name=name: after(of, name)))
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _gradients(self, outputs: torch.Tensor, loss: Any) -> dict[str, Array] | None:
        """Gradients of the loss, or of the outputs times fixed random numbers for a model that has none."""
        parameters = {} if self.module is None else dict(self.module.named_parameters())
        if loss is None:
            draw = torch.Generator().manual_seed(self.task.seed + 1)
            weights = torch.randn(BATCH, self.task.length, *outputs.shape[2:], generator=draw)[:, self.own]
            loss = (outputs * weights.to(outputs.dtype)).sum()
        if not parameters or not loss.requires_grad:
            return None
        for parameter in parameters.values():
            parameter.grad = None
        with self._explained():
            loss.backward()
        zero = {name: np.zeros(tuple(p.shape)) for name, p in parameters.items() if p.requires_grad and p.grad is None}
        return zero | {name: _numbers(p.grad) for name, p in parameters.items() if p.grad is not None}

    def exact(self) -> Computed | None:
        """The same in float64, `None` where the model cannot do that."""
        if self.module is None:
            return None
        self.module.double()
        if self.tokens.is_floating_point():
            self.tokens = self.tokens.double()
        try:
            return self.computed()
        except Exception:  # whatever a model does that was not written for float64
            return None

    def shard_losses(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """The loss over the labels of each shard alone, and without each shard's first label."""
        if self.labels is None:
            return None
        found: tuple[list[float], list[float]] = ([], [])
        with torch.no_grad():
            for shard in self.shards:
                for kept, losses in zip((shard, shard[1:]), found, strict=True):
                    only = torch.full_like(self.labels, IGNORED)
                    only[:, kept] = self.labels[:, kept]
                    losses.append(float(self.forward(self.tokens, only)[1]))
        return tuple(found[0]), tuple(found[1])

    # -- probes

    def probed(self) -> Probed:
        """Which outputs move when a token is changed."""
        n, rows = self.task.length, self.task.rows or min(self.declared.batch, self.task.length)
        base = self.tokens[:1].expand(rows, *self.tokens.shape[1:])
        before = self._outputs(base)
        independent = self.task.rows > 0 or rows == 1 or self._independent(base, before)
        if not independent:
            rows, base, before = 1, base[:1], self._outputs(base[:1])
        moved = np.zeros((len(self.own), n))
        for first in range(0, n, rows):
            changed = base.clone()
            probes = range(first, min(first + rows, n))
            for row, token in enumerate(probes):
                changed[row, token] = self._another(base[row, token])
            after = self._outputs(changed)
            for row, token in enumerate(probes):
                a, b = before[row].flatten(1), after[row].flatten(1)
                other = (a != b) & ~(a.isnan() & b.isnan())
                by = torch.where(other, (a - b).abs().double().nan_to_num(torch.inf, torch.inf), 0.0)
                moved[:, token] = by.amax(1).numpy()
        return Probed(
            self.own.numpy(), moved, float(before.abs().nan_to_num().max()) if before.numel() else 0.0, independent
        )

    def _outputs(self, tokens: torch.Tensor) -> torch.Tensor:
        labels = None if self.labels is None else self.labels[:1].expand(len(tokens), -1)
        return self.forward(tokens, labels)[0].detach()

    def _independent(self, base: torch.Tensor, before: torch.Tensor) -> bool:
        changed = base.clone()
        changed[0] = self._another(base[0])
        return torch.equal(self._outputs(changed)[1:], before[1:])

    def _another(self, token: torch.Tensor) -> torch.Tensor:
        """Another token, or other tokens, each from the vocabulary without its first one, which may be padding."""
        if token.is_floating_point():
            return -2 * token
        return token % (self._vocabulary() - 1) + 1

    def recounted(self) -> list[tuple[str, Array]]:
        """See `recount`."""
        local = torch.empty(self.task.length, dtype=torch.int64)
        for shard in self.shards:
            local[torch.from_numpy(np.array(shard))] = torch.arange(len(shard))
        with Counting(local, None) as all_lines:
            self.forward(self.tokens, self.labels)
        found = []
        sites = [{site} for site in all_lines.seen]
        for chosen in [*sites, *([set(all_lines.seen)] if len(sites) > 1 else [])]:
            with Counting(local, chosen):
                outputs = self.forward(self.tokens, self.labels)[0]
            found.append((" and ".join(sorted(site.short for site in chosen)), _numbers(outputs)))
        return found


def _read(result: Any) -> tuple[Any, Any]:
    """Read outputs and loss from what a model returned: a tensor, a tuple that begins with it, or named values."""
    if isinstance(result, torch.Tensor):
        return result, None
    names: Callable[[str], Any] = (
        result.get if isinstance(result, Mapping) else lambda name: getattr(result, name, None)
    )
    named = next(
        (found for name in ("logits", "last_hidden_state", "sample") if (found := names(name)) is not None), None
    )
    if named is not None:
        return named, names("loss")
    if isinstance(result, (tuple, list)) and result:
        return result[0], result[1] if len(result) > 1 else None
    return result, None


def _numbers(tensor: Any) -> Array:
    numbers: Array = tensor.detach().double().numpy()
    return numbers


@contextmanager
def _sent() -> Iterator[Callable[[], int]]:
    """Context in which the function that it yields says how many bytes this rank has sent so far."""
    watching = watcher()
    if watching is not None:
        yield watching.sent
        return
    with _SentBytes() as mode:
        yield lambda: mode.bytes


class _SentBytes(TorchDispatchMode):
    """Counts the bytes that operations of `torch.distributed` are given, where no world watches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch leaves its hooks untyped
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = schema_of(func)
        if schema is not None and schema.name.split("::")[0] in ("c10d", "_c10d_functional"):
            self.bytes += _bytes(args)
        return func(*args, **(kwargs or {}))


def _bytes(value: Any) -> int:
    """Bytes of all tensors in nested sequences."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_bytes, value)) if isinstance(value, (tuple, list)) else 0
