"""The package `yunchang` (PyPI, 0.6.4): rings, Ulysses, and both at once, on flash-attn or on torch's own attention.

flash-attn is the CPU stand-in `ringverify.peers.flash_attn_interface`; of torch's backends, math is torch's, and flash,
which torch has for GPUs only, is `ringverify.peers.torch_flash_kernel`. The package's code runs as it is.

What is declared is what the README and the test scripts of the package say:

- rings "basic", "zigzag" and "strip", as `RING_IMPL_DICT` calls them, and the layouts of `EXTRACT_FUNC_DICT`: "we need
  reorder the input tokens or input tensors for load balance ring attention", which is "for causal=True";
- `UlyssesAttention` over a group, and `LongContextAttention` after `set_seq_parallel_pg`, here with `sp_ulysses_degree`
  2, as in the scripts: the whole world, an even number of ranks. "The parallelism degree in Ulysses cannot exceed the
  number of heads", and has to divide those of the keys: `key_heads_multiple`;
- with flash-attn: bfloat16 and float16, `probabilities="input"` (as flash-attn rounds), gradients, grouped heads ("MAQ
  and GQA can only use the no packed version"), scale, softcap and deterministic, which are arguments that it passes on;
  for the rings also the log-sum-exp that `return_attn_probs=True` returns, not differentiable;
- with torch: the README's way to run without flash-attn, `attn_type=AttnType.TORCH_…`, and `ring_pytorch_attn_func`;
  "the backward pass is not supported", so `gradients=False`. The flash backend takes 16-bit dtypes, math any;
- equal shards: the scripts assert `seqlen % world_size == 0`;
- no window: `window_size` is passed to the kernel of every block as it is, and the package that this one "is built on"
  says that a window is not supported;
- rings in worlds of two and more: on one rank their backward sends to itself, which nccl does and gloo refuses.

Not adapted, because they need a GPU: `AttnType.TORCH_EFFICIENT`, `TORCH_CUDNN`, `AsyncLongContextAttention`, and the
kernels of other libraries.

Importing this module imports the package.

Raises:
    Inconclusive: the package is missing, is of another version, does not import, or was imported before.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, Literal

import torch

from ringverify.errors import Inconclusive
from ringverify.implementation import AttentionCall, Implementation, implementation
from ringverify.merge_contract import merge
from ringverify.peers import flash_attn_interface
from ringverify.peers.flash_attn_interface import for_kernels, standing_in
from ringverify.peers.package import imported
from ringverify.peers.torch_flash_kernel import register

NAME = "peer:yunchang"
PACKAGE = "yunchang"
VERSION = "0.6.4"

Tensor = torch.Tensor
Ring = Literal["basic", "zigzag", "strip", "basic_pytorch"]

_imported = functools.partial(imported, peer=NAME, package=PACKAGE, version=VERSION)
with standing_in():  # the package itself stays: it imports more of itself when it is called
    _yunchang: Any = _imported("yunchang")
    _rings: dict[Ring, Any] = _imported("yunchang.hybrid.utils").RING_IMPL_DICT
    _kernels: Any = _imported("yunchang.kernels")
    _update: Any = _imported("yunchang.ring.utils").update_out_and_lse
if getattr(_kernels.attention, "_flash_attn_forward", None) is not flash_attn_interface._flash_attn_forward:
    raise Inconclusive(f"{NAME}: this process imported {PACKAGE} before, without the stand-in for flash-attn")

ULYSSES_DEGREE = 2
EVEN = (4, 6, 8)
"""World sizes of rings and Ulysses at once: Ulysses over two ranks, and two or more such pairs."""
RINGS = (2, 3, 4, 5, 6, 7, 8)
"""World sizes of the rings."""
LAYOUT = {"basic": "contiguous", "zigzag": "zigzag", "strip": "striped", "basic_pytorch": "contiguous"}
"""Sharding of each ring; zigzag and strip, which balance the load, are for a causal mask."""

_with_flash_attn = functools.partial(
    implementation,
    dtypes=("bfloat16", "float16"),
    probabilities="input",
    gqa=True,
    scale=True,
    softcap=True,
    deterministic=True,
)


def _causal(ring: Ring) -> str:
    return "always" if ring in ("zigzag", "strip") else "both"


def _arguments(call: AttentionCall) -> dict[str, Any]:
    return {
        "softmax_scale": call.scale,
        "causal": call.causal,
        "softcap": call.softcap or 0.0,
        "deterministic": True,
    }


def _ring(name: str, ring: Ring) -> Implementation:
    @_with_flash_attn(
        name=f"{NAME}-{name}", sharding=LAYOUT[ring], causal=_causal(ring), lse=True, subgroups=True, world_sizes=RINGS
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """This rank's output and log-sum-exp; q, k and v are this rank's shards."""
        dim = q.shape[-1]
        q, k, v = for_kernels(q, k, v)
        out, lse, _ = _rings[ring](q, k, v, **_arguments(call), return_attn_probs=True, group=call.group)
        return out[..., :dim], lse

    return attend


def _ring_on_torch(name: str, ring: Ring, backend: str, dtypes: tuple[str, ...]) -> Implementation:
    @implementation(
        name=f"{NAME}-{name}",
        sharding=LAYOUT[ring],
        causal=_causal(ring),
        dtypes=dtypes,
        probabilities="input",
        gradients=False,
        scale=True,
        subgroups=True,
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """This rank's output; q, k and v are this rank's shards."""
        register()
        out: Tensor = _rings[ring](
            q,
            k,
            v,
            softmax_scale=call.scale,
            causal=call.causal,
            group=call.group,
            attn_type=_kernels.AttnType[backend],
        )
        return out

    return attend


def _ulysses(name: str) -> Implementation:
    @_with_flash_attn(
        name=f"{NAME}-{name}",
        sharding="contiguous",
        causal="both",
        subgroups=True,
        heads_multiple="world_size",
        key_heads_multiple="world_size",
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """This rank's output; q, k and v are this rank's shards."""
        dim = q.shape[-1]
        q, k, v = for_kernels(q, k, v)
        module = _yunchang.UlyssesAttention(call.group, attn_type=_kernels.AttnType.FA)
        out: Tensor = module(q, k, v, **_arguments(call))
        return out[..., :dim]

    return attend


def _ulysses_on_torch(name: str) -> Implementation:
    @implementation(
        name=f"{NAME}-{name}",
        sharding="contiguous",
        causal="both",
        dtypes=("bfloat16", "float16"),
        probabilities="input",
        gradients=False,
        scale=True,
        subgroups=True,
        heads_multiple="world_size",
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """This rank's output; q, k and v are this rank's shards."""
        register()
        module = _yunchang.UlyssesAttention(call.group, attn_type=_kernels.AttnType.TORCH_FLASH)
        out: Tensor = module(q, k, v, softmax_scale=call.scale, causal=call.causal)
        return out

    return attend


def usp_zigzag(seq_len: int, world_size: int) -> list[Tensor]:
    """Positions of each rank, as `zigzag_extract_local` cuts them: zigzag over rings, then in order over Ulysses."""
    pieces = torch.arange(seq_len).chunk(2 * (world_size // ULYSSES_DEGREE))
    of_rings = [torch.cat([one, other]) for one, other in zip(pieces, reversed(pieces), strict=True)]
    return [piece for ring in of_rings[: len(pieces) // 2] for piece in ring.chunk(ULYSSES_DEGREE)]


def usp_striped(seq_len: int, world_size: int) -> list[Tensor]:
    """Positions of each rank, as `stripe_extract_local` cuts them: striped over rings, then in order over Ulysses."""
    rings = world_size // ULYSSES_DEGREE
    return list(torch.arange(seq_len).reshape(-1, rings).T.flatten().chunk(world_size))


def _hybrid(name: str, ring: Ring, sharding: Any, *, pack_qkv: bool = False) -> Implementation:
    modules: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @_with_flash_attn(
        name=f"{NAME}-{name}",
        sharding=sharding,
        causal=_causal(ring),
        gqa=not pack_qkv,
        world_sizes=EVEN,
        heads_multiple=ULYSSES_DEGREE,
        key_heads_multiple=ULYSSES_DEGREE,
    )
    def attend(q: Tensor, k: Tensor, v: Tensor, call: AttentionCall) -> Tensor:
        """This rank's output; q, k and v are this rank's shards."""
        dim = q.shape[-1]
        q, k, v = for_kernels(q, k, v)
        if call.group not in modules:  # as a training job does, which makes its groups once
            # The groups are global to the process, and read when the module is made; no simulated rank runs in between.
            ring_degree = call.world_size // ULYSSES_DEGREE
            _yunchang.set_seq_parallel_pg(ULYSSES_DEGREE, ring_degree, call.rank, call.world_size)
            modules[call.group] = _yunchang.LongContextAttention(
                ring_impl_type=ring, use_pack_qkv=pack_qkv, attn_type=_kernels.AttnType.FA
            )
        out: Tensor = modules[call.group](q, k, v, **_arguments(call))
        return out[..., :dim]

    return attend


ring = _ring("ring", "basic")
zigzag = _ring("zigzag", "zigzag")
stripe = _ring("stripe", "strip")
ulysses = _ulysses("ulysses")
hybrid = _hybrid("hybrid", "basic", "contiguous")
hybrid_zigzag = _hybrid("hybrid-zigzag", "zigzag", usp_zigzag)
hybrid_stripe = _hybrid("hybrid-stripe", "strip", usp_striped)
hybrid_packed = _hybrid("hybrid-packed", "basic", "contiguous", pack_qkv=True)
torch_math = _ring_on_torch("torch-math", "basic", "TORCH_MATH", ("float32",))
torch_math_zigzag = _ring_on_torch("torch-math-zigzag", "zigzag", "TORCH_MATH", ("float32",))
torch_math_stripe = _ring_on_torch("torch-math-stripe", "strip", "TORCH_MATH", ("float32",))
torch_flash = _ring_on_torch("torch-flash", "basic", "TORCH_FLASH", ("bfloat16", "float16"))
torch_flash_zigzag = _ring_on_torch("torch-flash-zigzag", "zigzag", "TORCH_FLASH", ("bfloat16", "float16"))
torch_flash_stripe = _ring_on_torch("torch-flash-stripe", "strip", "TORCH_FLASH", ("bfloat16", "float16"))
torch_ring = _ring_on_torch("torch-ring", "basic_pytorch", "TORCH_FLASH", ("bfloat16", "float16"))
torch_ulysses = _ulysses_on_torch("torch-ulysses")


@merge(name="merge:yunchang", dtypes=("float32", "bfloat16", "float16"), empty=None)
def merged(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """The step of its rings, from the first block to the result. Nothing is said of empty partials."""
    out, lse = _update(*_update(None, None, out_a, lse_a), out_b, lse_b)
    return out.to(out_a.dtype), lse.squeeze(-1).transpose(1, 2)
