"""Small programs of `torch.distributed` calls, as data: a tuple of steps a rank, run alike in every world."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional


@dataclasses.dataclass(frozen=True)
class Form:
    """A tensor without its values.

    Attributes:
        shape: its shape.
        dtype: its dtype, without "torch.".
        layout: "plain"; "transposed": without gaps, in another order; "gaps": a slice of the last axis; "expanded": one
            element.
    """

    shape: tuple[int, ...] = (4,)
    dtype: str = "float32"
    layout: str = "plain"


PLAIN = Form()


@dataclasses.dataclass(frozen=True)
class Step:
    """One call of one rank.

    Attributes:
        call: which.
        form: the tensor that it is given: sent, received into, reduced, or one entry of its list.
        other: the tensor on the other side of a collective, if it is not of the same form.
        peer: group rank of a message's other end; `None` receives from anyone.
        tag: of a message.
        root: group rank.
        operator: name of the reduction.
        count: entries of a list, if not one a rank.
        splits: sizes of the input's and of the output's parts.
        by_group_rank: names its peer or root by group rank, rather than by global rank.
    """

    call: str
    form: Form = PLAIN
    other: Form | None = None
    peer: int | None = 0
    tag: int = 0
    root: int = 0
    operator: str = "SUM"
    count: int | None = None
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    by_group_rank: bool = False

    def but(self, **changes: Any) -> Step:
        """The same with something else."""
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Program:
    """What each rank does.

    Attributes:
        name: what it is about.
        steps: of each rank of the world; a rank outside the group has none.
        group: global ranks of a sub-group that the calls are on, or `None` for the world.
    """

    name: str
    steps: tuple[tuple[Step, ...], ...]
    group: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        """Number of ranks of the world."""
        return len(self.steps)


# -- running -----------------------------------------------------------------------------------------------------------


def run_program(program: Program) -> list[Any]:
    """Do this rank's steps: what its calls wrote, as numbers."""
    rank = dist.get_rank()
    group = dist.group.WORLD if program.group is None else dist.new_group(list(program.group))
    if program.group is not None and rank not in program.group:
        return []
    performing = _Performing(group, dist.get_rank(group), dist.get_world_size(group))
    for number, step in enumerate(program.steps[rank]):
        performing.perform(step, number)
    return performing.written()


@dataclasses.dataclass(frozen=True)
class Refused:
    """The exception that a rank's call raised; equal to any of its type."""

    type: str
    message: str = dataclasses.field(compare=False)


def attempt_program(program: Program) -> list[Any] | Refused:
    """Do this rank's steps: what its calls wrote, or what one of them raised, which costs no process."""
    try:
        return run_program(program)
    except Exception as error:
        return Refused(type(error).__name__, str(error))


class _Performing:
    """One rank's steps, one after another."""

    def __init__(self, group: Any, place: int, size: int) -> None:
        self.group, self.place, self.size = group, place, size
        self.pending: list[Any] = []
        self.buffers: list[Any] = []

    def written(self) -> list[Any]:
        """All buffers that calls wrote, as numbers with their dtype."""
        return [_numbers(one) for one in self.buffers]

    def perform(self, step: Step, number: int) -> None:
        """One call."""
        if step.call == "wait":
            for work in self.pending:
                work.wait()
            self.pending.clear()
        elif step.call in ("isend", "irecv"):
            self.pending.append(self._message(step, number))
        elif step.call in ("send", "recv"):
            self._message(step, number)
        elif step.call in ("batched isend", "batched irecv"):
            self._batch(step, number)
        else:
            getattr(self, "_" + step.call)(step, number)

    def _message(self, step: Step, number: int) -> Any:
        call = getattr(dist, step.call)
        return call(self._side(step, number), group=self.group, tag=step.tag, **self._peer(step))

    def _side(self, step: Step, number: int) -> torch.Tensor:
        if "send" in step.call:
            return self._full(step.form, number)
        return self._kept(step.form)

    def _batch(self, step: Step, number: int) -> None:
        """A batch of one: gloo does not tell a batch from its messages."""
        call = dist.isend if "send" in step.call else dist.irecv
        op = dist.P2POp(call, self._side(step, number), group=self.group, tag=step.tag, group_peer=step.peer)
        self.pending += dist.batch_isend_irecv([op])

    def _peer(self, step: Step) -> dict[str, int]:
        if step.peer is None:
            return {}
        side = "dst" if "send" in step.call else "src"
        if step.by_group_rank:
            return {f"group_{side}": step.peer}
        return {side: self._global(step.peer)}

    def _global(self, place: int) -> int:
        return place if self.group is dist.group.WORLD else dist.get_global_rank(self.group, place)

    def _root(self, step: Step, side: str) -> dict[str, int]:
        return {f"group_{side}": step.root} if step.by_group_rank else {side: self._global(step.root)}

    def _full(self, form: Form, number: int, part: int = 0) -> torch.Tensor:
        return _tensor(form, self.place * 10 + number * 3 + part)

    def _kept(self, form: Form) -> torch.Tensor:
        buffer = _tensor(form, 99)
        self.buffers.append(buffer)
        return buffer

    def _operator(self, step: Step) -> Any:
        return getattr(dist.ReduceOp, step.operator)

    def _all_reduce(self, step: Step, number: int) -> None:
        tensor = self._full(step.form, number)
        self.buffers.append(tensor)
        dist.all_reduce(tensor, self._operator(step), group=self.group)

    def _reduce(self, step: Step, number: int) -> None:
        tensor = self._full(step.form, number)
        if self.place == step.root:
            self.buffers.append(tensor)
        dist.reduce(tensor, op=self._operator(step), group=self.group, **self._root(step, "dst"))

    def _broadcast(self, step: Step, number: int) -> None:
        tensor = self._full(step.form, number)
        self.buffers.append(tensor)
        dist.broadcast(tensor, group=self.group, **self._root(step, "src"))

    def _list(self, step: Step) -> list[torch.Tensor]:
        count = self.size if step.count is None else step.count
        return [self._kept(step.other or step.form) for _ in range(count)]

    def _full_list(self, step: Step, number: int) -> list[torch.Tensor]:
        count = self.size if step.count is None else step.count
        return [self._full(step.form, number, part) for part in range(count)]

    def _all_gather(self, step: Step, number: int) -> None:
        dist.all_gather(self._list(step), self._full(step.form, number), group=self.group)

    def _all_gather_into_tensor(self, step: Step, number: int) -> None:
        output = self._kept(step.other or times(step.form, self.size))
        dist.all_gather_into_tensor(output, self._full(step.form, number), group=self.group)

    def _gather(self, step: Step, number: int) -> None:
        outputs = self._list(step) if self.place == step.root else None
        dist.gather(self._full(step.form, number), outputs, group=self.group, **self._root(step, "dst"))

    def _scatter(self, step: Step, number: int) -> None:
        inputs = self._full_list(step, number) if self.place == step.root else None
        dist.scatter(self._kept(step.other or step.form), inputs, group=self.group, **self._root(step, "src"))

    def _reduce_scatter(self, step: Step, number: int) -> None:
        output = self._kept(step.other or step.form)
        dist.reduce_scatter(output, self._full_list(step, number), self._operator(step), group=self.group)

    def _reduce_scatter_tensor(self, step: Step, number: int) -> None:
        output = self._kept(step.other or step.form)
        tensor = self._full(times(step.form, self.size), number)
        dist.reduce_scatter_tensor(output, tensor, self._operator(step), group=self.group)

    def _all_to_all(self, step: Step, number: int) -> None:
        dist.all_to_all(self._list(step), self._full_list(step, number), group=self.group)

    def _all_to_all_single(self, step: Step, number: int) -> None:
        sizes = [None, None] if step.splits is None else [list(one) for one in step.splits]
        tensor = self._full(times(step.form, self.size), number)
        output = self._kept(step.other or times(step.form, self.size))
        dist.all_to_all_single(output, tensor, sizes[1], sizes[0], group=self.group)

    def _barrier(self, step: Step, number: int) -> None:
        dist.barrier(group=self.group)

    def _all_gather_object(self, step: Step, number: int) -> None:
        found: list[Any] = [None] * (self.size if step.count is None else step.count)
        dist.all_gather_object(found, "x" * (self.place + number), group=self.group)
        self.buffers.append(found)

    def _broadcast_object_list(self, step: Step, number: int) -> None:
        found = ["x" * (self.place + number)]
        dist.broadcast_object_list(found, group=self.group, **self._root(step, "src"))
        self.buffers.append(found)

    def _gather_object(self, step: Step, number: int) -> None:
        found: list[Any] | None = [None] * self.size if self.place == step.root else None
        dist.gather_object("x" * (self.place + number), found, group=self.group, **self._root(step, "dst"))
        self.buffers.append(found)

    def _scatter_object_list(self, step: Step, number: int) -> None:
        given = ["x" * part for part in range(self.size)] if self.place == step.root else None
        found = [None]
        dist.scatter_object_list(found, given, group=self.group, **self._root(step, "src"))
        self.buffers.append(found)

    def _functional_all_reduce(self, step: Step, number: int) -> None:
        result = functional.all_reduce(self._full(step.form, number), step.operator.lower(), self.group)
        self.buffers.append(result)

    def _functional_all_gather(self, step: Step, number: int) -> None:
        self.buffers.append(functional.all_gather_tensor(self._full(step.form, number), 0, self.group))

    def _functional_reduce_scatter(self, step: Step, number: int) -> None:
        tensor = self._full(times(step.form, self.size), number)
        self.buffers.append(functional.reduce_scatter_tensor(tensor, step.operator.lower(), 0, self.group))

    def _functional_all_to_all(self, step: Step, number: int) -> None:
        tensor = self._full(times(step.form, self.size), number)
        self.buffers.append(functional.all_to_all_single(tensor, None, None, self.group))


def _tensor(form: Form, start: int) -> torch.Tensor:
    """Small whole numbers, which every dtype holds and every order of summing adds up alike."""
    dtype = getattr(torch, form.dtype)
    shape = form.shape
    match form.layout:
        case "transposed":
            return _counted(shape[::-1], start).to(dtype).permute(*range(len(shape) - 1, -1, -1))
        case "gaps":
            return _counted((*shape[:-1], 2 * shape[-1]), start).to(dtype)[..., : shape[-1]]
        case "expanded":
            return _counted((1,), start).to(dtype).expand(shape)
    return _counted(shape, start).to(dtype)


def _counted(shape: tuple[int, ...], start: int) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return ((torch.arange(count) * 5 + start) % 3).reshape(shape)


def times(form: Form, size: int) -> Form:
    """So many of them, along the first axis."""
    return dataclasses.replace(form, shape=(form.shape[0] * size, *form.shape[1:]) if form.shape else (size,))


def _numbers(written: Any) -> Any:
    if not isinstance(written, torch.Tensor):
        return written
    if isinstance(written, functional.AsyncCollectiveTensor):
        written = written.wait()
    wide = torch.complex128 if written.is_complex() else torch.float64
    return str(written.dtype), list(written.shape), [str(one) for one in written.to(wide).flatten().tolist()]
