"""DeepSpeed's sequence parallelism by all-to-all (PyPI, 0.19.8): `DistributedAttention` and `UlyssesSPAttentionHF`.

Both exchange sequence against heads, call a given attention function on whole sequences of some heads, and exchange
back. The attention function is `ringverify.peers.dense`; the exchanges, forward and backward, are the package's.

What is declared, and where it says so:

- `DistributedAttention` (`deepspeed/sequence/layer.py`): any local attention, so causal or not and any scale; layouts
  with the batch first and second, `batch_dim_idx`; grouped heads, "the partition follows KV groups"; key heads that
  the ranks do not divide, but no fewer than ranks: "must be at least the sequence parallel size". Fewer are filled up
  with heads of zeros here. Its rank within the group comes from an `mpu` object, as in Megatron;
- `UlyssesSPAttentionHF` (`deepspeed/runtime/sequence_parallel/ulysses_sp.py`): what an attention function of
  transformers gets, with heads that the ranks divide, those of the keys too. Fewer key heads than ranks have to divide
  the ranks; that cannot be declared as a multiple, and is not tried. The mask is made from the `position_ids` that it
  gathers;
- equal shards: it only sends messages of equal size;
- float32: what the local attention computes in; the package converts nothing.

The state that it keeps in the process (its communication backend, groups by name) is that of one rank: hence
`processes=True`. Its shared-memory all-reduce would be compiled at first use; nothing here reduces, and it is switched
off.

Importing this module imports the package.

Raises:
    Inconclusive: the package is missing, is of another version, or does not import.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import torch

from ringverify.implementation import AttentionCall, Implementation, implementation
from ringverify.peers.dense import attention, causal_mask, with_key_heads
from ringverify.peers.package import imported

NAME = "peer:deepspeed-ulysses"
PACKAGE = "deepspeed"
VERSION = "0.19.8"
INSTALL = "pip install --no-build-isolation deepspeed==0.19.8 transformers"
"""deepspeed asks for the version of transformers, and does not import it."""

Tensor = torch.Tensor

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # unset, it looks for every accelerator, and prints what it found
_imported = functools.partial(imported, peer=NAME, package=PACKAGE, version=VERSION, install=INSTALL)
_deepspeed: Any = _imported("deepspeed")
_layer: Any = _imported("deepspeed.sequence.layer")
_groups: Any = _imported("deepspeed.utils.groups")
_hf: Any = _imported("deepspeed.runtime.sequence_parallel.ulysses_sp")
_deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

_declared = functools.partial(implementation, gqa=True, scale=True, subgroups=True, processes=True)


def _connect(call: AttentionCall) -> None:
    """Initialise DeepSpeed on the process group that exists already."""
    _deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    _groups.mpu = SimpleNamespace(get_sequence_parallel_rank=lambda: call.rank)


def _distributed(name: str, batch_axis: int) -> Implementation:
    sequence_axis = 1 - batch_axis

    @_declared(name=name)
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """This rank's output; q, k and v are this rank's shards."""
        heads = q.shape[2]
        _connect(call)

        def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.movedim((batch_axis, 2), (0, 1)) for x in (q, k, v))
            positions = torch.arange(q.shape[2])
            out = attention(q, k, v, mask=causal_mask(positions, positions) if call.causal else None, scale=call.scale)
            return out.movedim((0, 1), (batch_axis, 2))

        module = _layer.DistributedAttention(local, call.group, scatter_idx=2, gather_idx=sequence_axis)
        filled = with_key_heads((q, k, v), max(k.shape[2], call.world_size))
        out: Tensor = module(*(x.movedim(0, batch_axis) for x in filled), batch_axis)
        return out.movedim(batch_axis, 0)[:, :, :heads]

    return attend


batch_first = _distributed(NAME, 0)
sequence_first = _distributed(f"{NAME}-sequence-first", 1)


def _hf_local(
    module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, *, position_ids: Tensor, causal: bool,
    scaling: float,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention function as transformers calls it: heads before the sequence in the inputs, after it in the output."""
    del module, mask
    positions = causal_mask(position_ids, position_ids)[:, None] if causal else None
    return attention(q, k, v, mask=positions, scale=scaling).transpose(1, 2), None


@_declared(name=f"{NAME}-hf", tensor_layout="bhsd", heads_multiple="world_size", key_heads_multiple="world_size")
def hf(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
    """This rank's output; q, k and v are this rank's shards."""
    _connect(call)
    module = _hf.UlyssesSPAttentionHF(
        attn=_hf_local,
        batch_size=q.shape[0],
        attn_head_count=q.shape[1],
        attn_head_size=q.shape[3],
        kv_head_count=k.shape[1],
        num_hidden_layers=1,
        process_group=call.group,
        seq_length_is_variable=True,
    )
    positions = call.positions.expand(q.shape[0], -1).contiguous()
    layer = torch.nn.Module()
    out, _ = module(layer, q, k, v, None, position_ids=positions, causal=call.causal, scaling=call.scale)
    unfolded: Tensor = out.unflatten(2, (q.shape[1], -1)).transpose(1, 2)
    return unfolded
