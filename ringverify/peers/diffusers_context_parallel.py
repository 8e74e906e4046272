"""The context parallelism of `diffusers` (PyPI, 0.42.1): ring, Ulysses, both at once, and the two "anything" modes.

`dispatch_attention_fn` is called as the package's models call it. Ulysses runs on its `native` backend, which is
torch's `scaled_dot_product_attention`; rings need a backend that returns log-sum-exps and run on `_native_flash`, which
calls torch's flash operator, with `ringverify.peers.torch_flash_kernel` for its kernel on a CPU.

What is declared, and where it says so (`diffusers/models/attention_dispatch.py`, `_modeling_parallel.py`):

- never causal, no grouped heads: "not yet supported for templated attention";
- scale, an argument; with the flash backend lse, by its argument `return_lse`; autograd has no formula for lse;
- key lengths with Ulysses: "All-gather a local mask so its layout matches the QKV layout after all-to-all"; the ring
  takes no mask;
- two ranks or more: "Either ring_degree or ulysses_degree must be greater than 1"; `unified`, which is both at once, on
  4, 6 and 8 ranks, the ring over two;
- `-anything`: "supports arbitrary sequence lengths and head counts that are not evenly divisible", and no backward,
  "not implemented yet";
- other Ulysses modes: heads that the ranks divide (more than `unified` needs, whose Ulysses runs over half of the
  ranks). In the "anything" modes heads of zeros are appended here where the package's own padding would be as large as
  what a rank holds, which it asserts against;
- sums in float32: `convert_to_fp32`; the flash kernel rounds weights to the input dtype;
- sub-groups: `mesh`, "a custom device mesh".

`ContextParallelConfig.setup` makes groups among all processes. It is not called: its fields are set here as it sets
them, with meshes of the ring's group alone.

Importing this module imports the package, and registers the CPU kernels of torch's flash operator.

Raises:
    Inconclusive: the package is missing, is of another version, or does not import.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ringverify.errors import Inconclusive
from ringverify.implementation import AttentionCall, Implementation, implementation
from ringverify.peers import torch_flash_kernel
from ringverify.peers.dense import with_key_heads
from ringverify.peers.package import imported

NAME = "peer:diffusers"
PACKAGE = "diffusers"
VERSION = "0.42.1"

Tensor = torch.Tensor

_imported = functools.partial(imported, peer=NAME, package=PACKAGE, version=VERSION)
_dispatch: Any = _imported("diffusers.models.attention_dispatch")
_parallel: Any = _imported("diffusers.models._modeling_parallel")
torch_flash_kernel.register()

_SEVERAL = tuple(range(2, 9))
_parts: weakref.WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = weakref.WeakKeyDictionary()
"""Groups of some ranks of a ring's group, made once for each, as `enable_parallelism` does for a model."""


def _configured(call: AttentionCall, ring: int, ulysses: int, **options: bool) -> Any:
    """Return the configuration that `enable_parallelism` gives a model, for these degrees of ring and Ulysses."""
    config = _parallel.ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses, **options)
    ranks = torch.tensor(dist.get_process_group_ranks(call.group)).view(ring, ulysses)
    row, column = divmod(call.rank, ulysses)
    config._rank, config._world_size, config._device = call.rank, call.world_size, call.positions.device
    config._ring_mesh, config._ring_local_rank = _mesh(call, ranks[:, column].tolist()), row
    config._ulysses_mesh, config._ulysses_local_rank = _mesh(call, ranks[row].tolist()), column
    return _parallel.ParallelConfig(context_parallel_config=config)


def _mesh(call: AttentionCall, ranks: list[int]) -> Any:
    """Return a one-dimensional mesh of these ranks, all or some of the ring's group; `None` for a single rank."""
    if len(ranks) == call.world_size:
        group = call.group
    elif len(ranks) > 1:
        parts = _parts.setdefault(call.group, {})
        if tuple(ranks) not in parts:
            parts[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
        group = parts[tuple(ranks)]
    else:
        return None
    return DeviceMesh.from_group(group, call.positions.device.type)


def _attend(
    backend: str, degrees: Callable[[int], tuple[int, int]], name: str, *, anything: str = "", **declared: Any
) -> Implementation:
    @implementation(
        name=f"{NAME}-{name}", causal="never", scale=True, subgroups=True, probabilities="input", **declared
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Any:
        """This rank's output, with its log-sum-exp if declared; q, k and v are this rank's shards."""
        heads = q.shape[2]
        ring, ulysses = degrees(call.world_size)
        per_rank = -(-heads // ulysses)
        if anything and per_rank * ulysses - heads >= per_rank:
            q, k, v = with_key_heads((q, k, v), per_rank * ulysses)
        mask = None
        if call.key_lengths is not None:
            mask = call.key_positions < torch.tensor(call.key_lengths)[:, None]
        returned = _dispatch.dispatch_attention_fn(
            q, k, v, mask, scale=call.scale, backend=backend,
            attention_kwargs={"return_lse": True} if declared.get("lse") else None,
            parallel_config=_configured(call, ring, ulysses, **({anything: True} if anything else {})),
        )  # fmt: skip
        if not declared.get("lse"):
            return returned[:, :, :heads]
        out, lse = returned
        return out[:, :, :heads], lse[:, :, :heads].transpose(1, 2)

    return attend


_native = functools.partial(_attend, "native", lambda size: (1, size), dtypes=("float32", "bfloat16"), key_lengths=True)
_flash = functools.partial(_attend, "_native_flash", dtypes=("float32", "bfloat16", "float16"), lse=True)

ring = _flash(lambda size: (size, 1), "ring", world_sizes=_SEVERAL)
ulysses = _native("ulysses", world_sizes=_SEVERAL, heads_multiple="world_size")
unified = _flash(lambda size: (2, size // 2), "unified", world_sizes=(4, 6, 8), heads_multiple="world_size")

_ANYTHING = {
    "ring_anything": _flash(
        lambda size: (size, 1),
        "ring-anything",
        anything="ring_anything",
        world_sizes=_SEVERAL,
        gradients=False,
        uneven=True,
    ),
    "ulysses_anything": _native(
        "ulysses-anything", anything="ulysses_anything", world_sizes=_SEVERAL, gradients=False, uneven=True
    ),
}


def __getattr__(name: str) -> Implementation:
    """Return an "anything" mode where it can run: `gather_size_by_comm` exchanges lengths on torch's accelerator.

    Raises:
        Inconclusive: torch was built for an accelerator that this machine lacks.
    """
    if name not in _ANYTHING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    device = torch.accelerator.current_accelerator()
    if device is not None and not torch.accelerator.is_available():
        raise Inconclusive(
            f"{_ANYTHING[name].name} exchanges lengths on {device}, for which this torch was built and which this "
            "machine has not: install a build of torch for the CPU"
        )
    return _ANYTHING[name]
