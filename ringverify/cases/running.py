"""One case on one implementation in a world: what every rank returned, or why the run ended."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import time
from collections import deque
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ringref.sharding import Positions, key_positions, query_positions
from ringverify.cases.case import Case
from ringverify.cases.inputs import DTYPE, Inputs, lay_out, make_inputs
from ringverify.implementation import AttentionCall, Capabilities, Implementation
from ringverify.targets import load
from ringverify.worlds.hazards import only_group
from ringverify.worlds.memory import measured
from ringverify.worlds.world import Conditions, Failure, Run, World

Array = NDArray[np.float64]


class ContractError(Exception):
    """What a rank returned is not what the plug-in contract asks for; the message says what and what was expected."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What a rank is told. With a target in place of the function it can be sent to another process."""

    implementation: Implementation | str
    case: Case
    gradients: bool
    device: str
    inputs: Inputs | None = None


@dataclasses.dataclass(frozen=True)
class RankResult:
    """What one rank returned, as exact float64 copies in the canonical layout.

    Attributes:
        out: `(B, n_local, Hq, Dv)`.
        lse: `(B, Hq, n_local)`, or `None` if the implementation declares none.
        dq: `(B, n_local, Hq, D)`, or `None` without gradients.
        dk: `(B, m_local, Hk, D)`, or `None`.
        dv: `(B, m_local, Hk, Dv)`, or `None`.
        lse_dtype: name of the dtype in which lse came back.
        changed: names of inputs whose buffers the implementation changed.
        seconds: processor time of this rank inside the implementation, forward and backward.
    """

    out: Array
    lse: Array | None
    dq: Array | None
    dk: Array | None
    dv: Array | None
    lse_dtype: str
    changed: tuple[str, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Observation:
    """What was seen of one case.

    Attributes:
        ranks: what each rank of the ring returned; empty after a failure.
        failure: why the run ended without results, if it did.
        watched: what a simulated world saw of a watched run: hazards, traffic, memory, messages left over.
    """

    ranks: tuple[RankResult, ...]
    failure: Failure | None
    watched: Run | None = None

    @property
    def digest(self) -> str:
        """SHA-256 of every bit that came back on every rank, or of how the run failed."""
        digest = hashlib.sha256()
        if self.failure is not None:
            said = self.failure.message if self.failure.kind == "raised" else ""  # others tell of times and places
            digest.update(f"{self.failure.kind} {self.failure.rank} {said}".encode(errors="replace"))
        for rank in self.ranks:
            for tensor in (rank.out, rank.lse, rank.dq, rank.dk, rank.dv):
                digest.update(b"-" if tensor is None else np.ascontiguousarray(tensor).tobytes())
        return digest.hexdigest()


@dataclasses.dataclass
class Runner:
    """Runs cases of one implementation in one world, and keeps count.

    Attributes:
        implementation: what is run.
        world: where.
        target: how another process finds the implementation; needed by worlds of processes.
        device: device of the tensors.
        most_ranks: how many ranks the world can have; `None` is any number.
        deadline: seconds that one run may take.
        hangs: whether a run is known to pass its deadline however long it is given.
        runs: how many runs there were.
        seconds_inside: processor time spent inside the implementation, all ranks and runs together.
        history: the latest cases that were run.
    """

    implementation: Implementation
    world: World
    target: str | None = None
    device: str = "cpu"
    most_ranks: int | None = None
    deadline: float = 30.0
    hangs: bool = False
    runs: int = 0
    seconds_inside: float = 0.0
    history: deque[Case] = dataclasses.field(default_factory=lambda: deque(maxlen=50))

    @property
    def capabilities(self) -> Capabilities:
        """What the implementation declares."""
        return self.implementation.capabilities

    def run(
        self, case: Case, *, gradients: bool, watch: bool | Literal["memory"] = False, inputs: Inputs | None = None
    ) -> Observation:
        """Run one case, with or without a backward pass, watched (in a simulated world) or not.

        Args:
            case: what to run.
            gradients: whether to take gradients too.
            watch: whether to have a simulated world report hazards and traffic, or these and memory.
            inputs: other inputs than the case's own.

        Raises:
            WorldUnavailable: the world could not be set up; nothing was learned.
        """
        make_inputs(case)  # drawn once here, not once a rank
        if gradients and self.target is None:
            _import_for_gradients()
        task = Task(self.implementation if self.target is None else self.target, case, gradients, self.device, inputs)
        run = self.world.run(
            run_rank,
            task,
            world_size=case.ranks,
            seed=case.schedule,
            deadline=self.deadline,
            conditions=Conditions(case.transport, case.delayed),
            watch=watch,
        )
        self.runs += 1
        self.history.append(case)
        if run.failure is not None:
            return Observation((), _told_briefly(run.failure), run)
        ring = tuple(run.results[rank] for rank in case.ring_ranks)
        self.seconds_inside += sum(rank.seconds for rank in ring)
        return Observation(ring, None, run)


@functools.cache
def _import_for_gradients() -> None:
    """Let torch import here what it first needs in a backward pass.

    Ranks that are threads share the modules of this process, and a deadline that ends one of them in the middle of an
    import would leave half a module behind for every run to come.
    """
    one = torch.ones(1, requires_grad=True)
    torch.autograd.grad(one * 1, one, torch.ones(1))


def _told_briefly(failure: Failure) -> Failure:
    """A breach of the contract is told as such, not as an exception of ours."""
    prefix = f"rank {failure.rank} raised {ContractError.__name__}: "
    if not failure.message.startswith(prefix):
        return failure
    told = f"rank {failure.rank} {failure.message[len(prefix) :]}"
    return dataclasses.replace(failure, message=told, detail="")  # the traceback is of this module


@functools.lru_cache(maxsize=64)
def shards(case: Case, capabilities: Capabilities) -> tuple[list[Positions], list[Positions]]:
    """Query and key positions of every rank."""
    sharding = capabilities.sharding_named(case.sharding)
    p, size = case.problem, case.world_size
    return query_positions(sharding, p.nq, size), key_positions(sharding, p.nk, size)


def run_rank(task: Task) -> RankResult | None:
    """The program of one rank: its part in the ring, or, outside a ring that is a sub-group, in an unrelated one.

    Raises:
        ContractError: the implementation returned something other than the contract asks for, or disturbed the ranks
            outside its group.
    """
    case = task.case
    if case.group == "world":
        assert dist.group.WORLD is not None
        return _run_in_ring(task, dist.group.WORLD, dist.get_rank())
    ring, rank = case.ring_ranks, dist.get_rank()
    outside = tuple(other for other in range(case.ranks) if other not in ring)
    groups = [dist.new_group(list(ranks)) for ranks in (ring, outside)]
    if rank in ring:
        result = _run_in_ring(task, groups[0], ring.index(rank))
    else:
        result = None
        _run_outside(groups[1], outside, task.device)
    dist.destroy_process_group(groups[0 if rank in ring else 1])
    return result


def _run_outside(group: dist.ProcessGroup, ranks: tuple[int, ...], device: str) -> None:
    """Three times round a ring of the ranks outside, and a reduction: busy, and noticing what is not for them.

    Raises:
        ContractError: something else arrived than what these ranks sent to one another.
    """
    place, size = ranks.index(dist.get_rank()), len(ranks)
    block = torch.full((3,), float(place), device=device)
    for hop in range(3 * size):
        arriving = torch.empty_like(block)
        sends = dist.P2POp(dist.isend, block, ranks[(place + 1) % size], group)
        receives = dist.P2POp(dist.irecv, arriving, ranks[(place - 1) % size], group)
        if size > 1:
            for work in dist.batch_isend_irecv([sends, receives]):
                work.wait()
            block = arriving
            if not bool((block == (place - hop - 1) % size).all()):
                raise ContractError("is outside the ring's group, and received what was not sent to it")
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=group)
    if float(total) != size:
        raise ContractError("is outside the ring's group, and something of it got into a reduction there")


def _run_in_ring(task: Task, group: dist.ProcessGroup, rank: int) -> RankResult:
    """Make this rank's shards, call the implementation, take gradients, copy the results."""
    implementation = load(task.implementation) if isinstance(task.implementation, str) else task.implementation
    case, capabilities = task.case, implementation.capabilities
    problem, dtype = case.problem, DTYPE[case.problem.dtype]
    queries, keys = (positions[rank] for positions in shards(case, capabilities))
    inputs = make_inputs(case) if task.inputs is None else task.inputs
    swap = capabilities.tensor_layout == "bhsd"

    def local(values: Array, rows: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        piece = values[:, rows].swapaxes(1, 2) if swap else values[:, rows]
        return lay_out(piece, dtype, case.memory, task.device)

    q, q_buffer = local(inputs.q, queries)
    k, k_buffer = local(inputs.k, keys)
    v, v_buffer = local(inputs.v, keys)
    dout, dout_buffer = local(inputs.dout, queries)
    lse_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    dlse, dlse_buffer = lay_out(inputs.dlse[:, :, queries], lse_dtype, case.memory, task.device)
    buffers = {"q": q_buffer, "k": k_buffer, "v": v_buffer, "dout": dout_buffer, "dlse": dlse_buffer}
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    if task.gradients:
        for leaf in (q, k, v):
            leaf.requires_grad_()
    positions, key_pos = (torch.from_numpy(rows.copy()).to(task.device) for rows in (queries, keys))
    call = AttentionCall(
        group=group,
        rank=rank,
        world_size=case.world_size,
        problem=problem,
        sharding=capabilities.sharding_named(case.sharding),
        positions=positions,
        key_positions=key_pos,
    )

    started = time.thread_time()
    with only_group(group), measured():
        returned = implementation(q, k, v, call)
    out, lse = _unpack(returned, capabilities)
    shape = (problem.batch, len(queries), problem.heads, problem.dv)
    _check_tensor("out", out, (shape[0], shape[2], shape[1], shape[3]) if swap else shape, (dtype,), task.device)
    if lse is not None:
        wide = (lse_dtype,) if lse_dtype is torch.float64 else (torch.float32, torch.float64)
        _check_tensor("lse", lse, (problem.batch, problem.heads, len(queries)), wide, task.device)
    gradients: tuple[torch.Tensor | None, ...] = (None, None, None)
    if task.gradients:
        results, cotangents = [], []
        if case.cotangent != "lse":
            results, cotangents = [out], [dout]
        if case.cotangent != "out" and lse is not None:
            results.append(lse)
            cotangents.append(dlse.to(lse.dtype))
        with only_group(group), measured():
            gradients = _gradients(results, (q, k, v), cotangents)
    seconds = time.thread_time() - started

    changed = tuple(name for name, buffer in buffers.items() if not _same_bits(buffer, before[name]))
    dq, dk, dv = (_copy(gradient, swap) for gradient in gradients)
    copied = _copy(out, swap)
    assert copied is not None
    lse_name = "" if lse is None else str(lse.dtype).removeprefix("torch.")
    return RankResult(copied, _copy(lse, False), dq, dk, dv, lse_name, changed, seconds)


def _unpack(returned: Any, capabilities: Capabilities) -> tuple[Any, Any]:
    if not capabilities.lse:
        return returned, None
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise ContractError(f"returned {_kind(returned)}: with lse=True declared, (out, lse) is expected")
    return returned[0], returned[1]


def _check_tensor(name: str, tensor: Any, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: str) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ContractError(f"returned {_kind(tensor)} for {name}: a tensor is expected")
    if tuple(tensor.shape) != shape:
        raise ContractError(f"returned {name} of shape {tuple(tensor.shape)}: {shape} is expected")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ContractError(f"returned {name} in {str(tensor.dtype).removeprefix('torch.')}: {wanted} is expected")
    if tensor.device.type != torch.device(device).type:
        raise ContractError(f"returned {name} on device {tensor.device}: {device} is expected")


def _kind(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _gradients(
    results: list[torch.Tensor], leaves: tuple[torch.Tensor, ...], cotangents: list[torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Gradients by autograd; an input that the results do not depend on has gradient zero."""
    attached = [(r, c) for r, c in zip(results, cotangents, strict=True) if r.requires_grad]
    if len(attached) < len(results) and any(leaf.numel() for leaf in leaves):
        raise ContractError(
            "returned a result that is not attached to q, k and v by autograd: make it differentiable, or declare "
            "gradients=False"
        )
    if not attached:
        return tuple(torch.zeros_like(leaf) for leaf in leaves)
    found = torch.autograd.grad([r for r, _ in attached], leaves, [c for _, c in attached], allow_unused=True)
    return tuple(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(found, leaves, strict=True))


def _copy(tensor: torch.Tensor | None, swap: bool) -> Array | None:
    if tensor is None:
        return None
    exact = tensor.detach().to(device="cpu", dtype=torch.float64)
    copied: Array = np.array((exact.transpose(1, 2) if swap else exact).numpy())
    return copied


def _same_bits(now: torch.Tensor, before: torch.Tensor) -> bool:
    same = (now == before) | (now.isnan() & before.isnan())
    return bool(same.all())
