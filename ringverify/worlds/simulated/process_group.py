"""The process group of a rank that is a thread: torch's methods, translated into operations of the exchange.

It accepts what torch's gloo backend accepts and refuses what that refuses (`ringverify.worlds.refusals`). What gloo
refuses although the documentation of `torch.distributed` promises it and NCCL does it works here, and is noted as a
finding of the run: the stacked form of `all_gather_into_tensor` and `reduce_scatter_tensor`, 8-bit floating point, and
with torch 2.11 `all_to_all` of lists. It departs from gloo in these points:

1. A message that is shorter than the buffer of its receive is an error. Gloo fills the front of the buffer, silently.
2. Every collective waits for all ranks of the group. With gloo, the root of a broadcast may go ahead.
3. Timeouts are ignored: time does not pass in a deadlock, which is reported at once.
4. `reduce` leaves the tensors of the other ranks alone. Gloo leaves partial sums in them.
5. Where gloo moves the wrong elements of a strided tensor (`all_reduce`, `reduce` and `broadcast` of a tensor with gaps
   or of tensors that lie in different orders; `scatter` and `reduce_scatter` of lists; the output of
   `all_to_all_single`), there is an error.
6. Ranks that disagree about a collective, its root or its tensors, and a peer that is not in the group, are errors that
   say so. Gloo hangs, ends the process or hands out other numbers.

Torch calls these methods from Python by either the old or the new name of an operation, and from C++ (functional
collectives) by one of them; each has both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringverify.worlds import refusals
from ringverify.worlds.simulated import collectives
from ringverify.worlds.simulated.exchange import Exchange
from ringverify.worlds.simulated.operations import Combine, Pieces, shown, snapshot, write
from ringverify.worlds.simulated.work import SimulatedWork

Tensors = list[torch.Tensor]


# Untyped: the stubs of its methods differ between versions of torch, and none is how torch itself calls them.
_ProcessGroup: Any = dist.ProcessGroup


class SimulatedGroup(_ProcessGroup):  # type: ignore[misc] # a base without a type, see above
    """One rank's handle of a simulated process group."""

    supports_splitting = False
    supports_coalescing = False

    def __init__(self, exchange: Exchange, name: str, ranks: tuple[int, ...], rank: int, description: str) -> None:
        place = ranks.index(rank)
        super().__init__(place, len(ranks))
        self._exchange = exchange
        self._mailbox = exchange.mailbox(name, ranks)
        self._place = place
        self._rank = rank
        self._size = len(ranks)
        self._description = description

    def belongs_to(self, exchange: Exchange, rank: int) -> bool:
        """Whether this is the handle of a given rank in the run of a given exchange."""
        return self._exchange is exchange and self._rank == rank

    def meet(self) -> None:
        """Wait until every rank of this group, which is being made, has asked for it."""
        self._exchange.meet(self._mailbox, self._place)

    # -- what it is ----------------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:  # torch's name
        """Return the backend that this group imitates."""
        return "gloo"

    def name(self) -> str:
        """Return the backend that this group imitates."""
        return "gloo"

    @property
    def group_name(self) -> Any:
        """The name by which functional collectives find it."""
        return self._mailbox.name

    @property
    def group_desc(self) -> str:
        """The description that it was given when it was made."""
        return self._description

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _get_backend_name(self) -> str:
        return "gloo"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def __repr__(self) -> str:
        return f"SimulatedGroup(ranks={list(self._mailbox.ranks)}, rank={self._place})"

    # -- messages ------------------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> SimulatedWork:
        """Send to a group rank."""
        tensor = _single_contiguous(tensors)
        refusals.check_tag(tag, sends=True)
        if dst == self._place:
            raise refusals.message_to_itself(self._global(dst), sends=True)
        message = self._exchange.send(self._mailbox, self._place, dst, tag, tensor)
        return SimulatedWork(self._exchange, message, [])

    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> SimulatedWork:
        """Receive from a group rank."""
        return self._receive(tensors, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> SimulatedWork:
        """Receive from whoever sends first."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> SimulatedWork:
        tensor = _single_contiguous(tensors)
        refusals.check_tag(tag, sends=False)
        if source == self._place:
            raise refusals.message_to_itself(self._global(source), sends=False)
        receive = self._exchange.receive(self._mailbox, self._place, source, tag, tensor)
        return SimulatedWork(self._exchange, receive, [tensor])

    # -- collectives ---------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Reduce in place, on every rank."""
        operator, reduce = collectives.reduction(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        self._check("all_reduce", tensors)
        name = _as_it_lies(f"all_reduce({operator})", tensors)
        return self._join(name, tensors, tensors, collectives.all_reduce(reduce), opts)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> SimulatedWork:
        """Reduce several tensors in place, on every rank."""
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Reduce in place, on the root."""
        operator, reduce = collectives.reduction(opts.reduceOp)
        root = opts.rootRank
        self._check("reduce", tensors, root)
        outputs = tensors if self._place == root else []
        name = _as_it_lies(f"reduce({operator}, to {self._global(root)})", tensors)
        return self._join(name, tensors, outputs, collectives.reduce_to(root, reduce), opts)

    def broadcast(self, tensors: Tensors, opts: Any) -> SimulatedWork:
        """Overwrite with the root's tensors."""
        root = opts.rootRank
        self._check("broadcast", tensors, root)
        name = _as_it_lies(f"broadcast(from {self._global(root)})", tensors)
        if self._place == root:
            return self._join(name, tensors, [], collectives.broadcast_from(root), opts)
        return self._join(name, tensors, tensors, collectives.broadcast_from(root), opts, copy=False)

    def allgather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """Collect each input of every rank in a list.

        Raises:
            RuntimeError: a list does not have one tensor per rank, or a tensor is not of its input's shape and dtype.
        """
        if len(output_lists) != len(inputs):
            raise RuntimeError(f"all_gather: {len(inputs)} tensors to gather into {len(output_lists)} lists")
        self._check("all_gather", inputs)
        for outputs, tensor in zip(output_lists, inputs, strict=True):
            self._one_each("all_gather", "output", outputs)
            _refuse_other_forms("all_gather", outputs, tensor)
        flat = [output for outputs in output_lists for output in outputs]
        return self._join("all_gather", inputs, flat, collectives.all_gather, opts)

    def allgather_coalesced(self, output_lists: list[Tensors], inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """Collect each of several inputs in a list a rank: `output_lists[rank][input]`."""
        self._one_each("all_gather_coalesced", "output list", output_lists)
        return self.allgather([list(column) for column in zip(*output_lists, strict=True)], inputs, opts)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> SimulatedWork:
        """Collect the tensor of every rank in one, concatenated or stacked."""
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """Do as `all_gather_single` for several tensors."""
        size = self._size
        self._check("all_gather_into_tensor", inputs)
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() != tensor.numel() * size or output.dtype != tensor.dtype:
                raise RuntimeError(
                    f"all_gather_into_tensor: the output is {shown(output)}, but the input is {shown(tensor)} on each "
                    f"of {size} ranks"
                )
            if output.shape != (*(size * n for n in tensor.shape[:1]), *tensor.shape[1:]):
                self._note(
                    refusals.STACKED, f"all_gather_into_tensor of {list(tensor.shape)} into {list(output.shape)}"
                )

        def write_all(pieces: Pieces) -> None:
            for at, output in enumerate(outputs):
                write(output, torch.cat([piece.view(-1) for piece in pieces[at * size : (at + 1) * size]]))

        return self._join("all_gather_into_tensor", inputs, outputs, collectives.all_gather, opts, write_all)

    def gather(self, output_lists: list[Tensors], inputs: Tensors, opts: Any) -> SimulatedWork:
        """Collect the tensor of every rank in a list, on the root."""
        root = opts.rootRank
        self._check("gather", inputs, root)
        if any(tensor.is_complex() for tensor in inputs):
            raise RuntimeError(f"Invalid scalar type: gather of {shown(inputs[0])}, which neither gloo nor NCCL moves")
        outputs = output_lists[0] if self._place == root else []
        if self._place == root:
            self._one_each("gather", "gather_list", outputs)
            _refuse_other_forms("gather", outputs, inputs[0])
        name = f"gather(to {self._global(root)})"
        return self._join(name, inputs, outputs, collectives.gather_to(root), opts)

    def scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> SimulatedWork:
        """Give each rank one tensor of the root's list."""
        root = opts.rootRank
        self._check("scatter", outputs, root)
        inputs = input_lists[0] if self._place == root else []
        if self._place == root:
            self._one_each("scatter", "scatter_list", inputs)
            _refuse_other_forms("scatter", inputs, outputs[0], "entry", "output")
        _refuse_strided("scatter", [*outputs, *inputs])
        name = f"scatter(from {self._global(root)})"
        return self._join(name, inputs, outputs, collectives.scatter_from(root), opts)

    def reduce_scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any = None) -> SimulatedWork:
        """Reduce the i-th tensors of all lists onto rank i."""
        for output, inputs in zip(outputs, input_lists, strict=False):
            self._one_each("reduce_scatter", "input_list", inputs)
            _refuse_other_forms("reduce_scatter", inputs, output, "entry", "output")
            _refuse_strided("reduce_scatter", inputs)
        _refuse_strided("reduce_scatter", outputs)
        return self._reduce_scatter(outputs, input_lists, opts)

    def _reduce_scatter(self, outputs: Tensors, input_lists: list[Tensors], opts: Any) -> SimulatedWork:
        operator, reduce = collectives.reduction(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        self._check("reduce_scatter", outputs)
        flat = [tensor for inputs in input_lists for tensor in inputs]
        return self._join(f"reduce_scatter({operator})", flat, outputs, collectives.reduce_scatter(reduce), opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> SimulatedWork:
        """Reduce the i-th part of one tensor onto rank i."""
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """Do as `reduce_scatter_single` for several tensors."""
        for output, tensor in zip(outputs, inputs, strict=True):
            if tensor.numel() != output.numel() * self._size or output.dtype != tensor.dtype:
                raise RuntimeError(
                    f"reduce_scatter_tensor: the input is {shown(tensor)}, but the output is {shown(output)} on each "
                    f"of {self._size} ranks"
                )
            if tensor.shape[:1] != tuple(self._size * n for n in output.shape[:1]):
                self._note(
                    refusals.SCATTERED_FLAT, f"reduce_scatter_tensor of {list(tensor.shape)} into {list(output.shape)}"
                )
        lists = [
            list(tensor.reshape(self._size, *output.shape)) for output, tensor in zip(outputs, inputs, strict=True)
        ]
        return self._reduce_scatter(outputs, lists, opts)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """Send the i-th tensor to rank i.

        Raises:
            NotImplementedError: there are no tensors, by which torch finds the backend.
        """
        if not inputs and not outputs:
            raise NotImplementedError("all_to_all: there are no tensors")
        self._check("all_to_all", inputs)
        self._one_each("all_to_all", "input_tensor_list", inputs)
        self._one_each("all_to_all", "output_tensor_list", outputs)
        if refusals.GLOO_LACKS_ALL_TO_ALL:
            self._note(refusals.LISTS_ALL_TO_ALL, f"all_to_all of {shown(inputs[0])} and others")
        return self._join("all_to_all", inputs, outputs, collectives.all_to_all, opts)

    def all_to_all_single(
        self, output: torch.Tensor, tensor: torch.Tensor, output_sizes: list[int], sizes: list[int], opts: Any = None
    ) -> SimulatedWork:
        """Send the i-th part of one tensor, cut along its first dimension, to rank i.

        Raises:
            ValueError: the input is not contiguous.
            RuntimeError: the output is not contiguous, or the sizes do not add up.
        """
        if not tensor.is_contiguous():
            raise ValueError("Tensors must be contiguous")
        _refuse_strided("all_to_all_single", [output])
        self._check("all_to_all_single", [tensor])
        outputs, inputs = self._cut("output", output, output_sizes), self._cut("input", tensor, sizes)
        return self._join("all_to_all_single", inputs, outputs, collectives.all_to_all, opts, result=[output])

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Wait for all ranks."""
        return self._join("barrier", [], [], collectives.nothing, opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks. If some do not come, the report of the deadlock names them."""
        self._join("monitored_barrier", [], [], collectives.nothing, None).wait()

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # -- inside --------------------------------------------------------------------------------------------------------

    def _join(
        self,
        name: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        combine: Combine,
        opts: Any,
        write_all: Callable[[Pieces], None] | None = None,
        *,
        copy: bool = True,
        result: Tensors | None = None,
    ) -> SimulatedWork:
        def write_each(pieces: Pieces) -> None:
            for output, piece in zip(outputs, pieces, strict=False):  # the root of a broadcast keeps what it has
                if output.nbytes != piece.nbytes:
                    rank = self._mailbox.ranks[self._place]
                    raise RuntimeError(f"{name}: rank {rank} has {shown(output)} for what it receives, {shown(piece)}")
                write(output, piece)

        pieces = [snapshot(tensor) for tensor in inputs] if copy else [tensor.detach() for tensor in inputs]
        operation = self._exchange.join(
            self._mailbox,
            self._place,
            name,
            pieces,
            combine,
            write_all or write_each,
            (inputs, outputs),
            blocking=not getattr(opts, "asyncOp", True),
        )
        return SimulatedWork(self._exchange, operation, result if result is not None else list(outputs))

    def _global(self, place: int) -> int:
        return self._mailbox.ranks[place]

    def _check(self, operation: str, tensors: Sequence[torch.Tensor], root: int | None = None) -> None:
        """Refuse what gloo refuses of a collective, whatever the other ranks do."""
        if root is not None:
            refusals.check_root(operation, root, self._size)
        finding = refusals.check_dtypes(operation, tensors, reduces="reduce" in operation)
        if finding is not None:
            self._note(finding, f"{operation} of {shown(tensors[0])}")

    def _note(self, name: str, example: str) -> None:
        """Record a finding: something that works here and over NCCL, and that gloo refuses."""
        self._exchange.findings.setdefault(name, example)

    def _one_each(self, operation: str, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self._size:
            raise RuntimeError(f"{operation}: {what} has {len(tensors)} entries for a group of {self._size} ranks")

    def _cut(self, what: str, tensor: torch.Tensor, sizes: list[int]) -> Tensors:
        length = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if length % self._size:
                raise RuntimeError(
                    f"all_to_all_single: the {what}, {shown(tensor)}, cannot be cut in {self._size} equal parts"
                )
            sizes = [length // self._size] * self._size
        self._one_each("all_to_all_single", f"{what}_split_sizes", sizes)
        if sum(sizes) != length:
            raise RuntimeError(f"all_to_all_single: {what}_split_sizes {list(sizes)} do not add up to {shown(tensor)}")
        return list(torch.split(tensor, list(sizes)))


def _single_contiguous(tensors: Tensors) -> torch.Tensor:
    (tensor,) = tensors
    if not tensor.is_contiguous():
        strides = list(tensor.stride())
        raise RuntimeError(
            f"input tensor has to be contiguous: {shown(tensor)} with strides {strides}: pass .contiguous()"
        )
    return tensor


def _refuse_other_forms(
    operation: str, tensors: Sequence[torch.Tensor], tensor: torch.Tensor, each: str = "output", other: str = "input"
) -> None:
    for one in tensors:
        if one.shape != tensor.shape or one.dtype != tensor.dtype:
            raise RuntimeError(f"{operation}: an {each} is {shown(one)}, but the {other} is {shown(tensor)}")


SCRAMBLED = "gloo silently moves the wrong elements of such a tensor, and NCCL refuses it: pass .contiguous()"


def _refuse_strided(operation: str, tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise RuntimeError(f"{operation} of {shown(tensor)} with strides {list(tensor.stride())}: {SCRAMBLED}")


def _as_it_lies(operation: str, tensors: Sequence[torch.Tensor]) -> str:
    """Return the operation's name, followed by the strides of tensors that are not contiguous.

    Gloo reduces and broadcasts memory, not elements. That is right for a tensor without gaps that has the same strides
    on every rank. So the strides become part of the name, on which ranks have to agree.

    Raises:
        RuntimeError: a tensor has gaps or overlaps.
    """
    for tensor in tensors:
        if not tensor.is_contiguous():
            if not _has_no_gaps(tensor):
                _refuse_strided(operation, [tensor])
            operation += f" of strides {list(tensor.stride())}"
    return operation


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
