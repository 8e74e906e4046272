"""Ring attention inside a model that is already written: what its `scaled_dot_product_attention` calls become.

A model calls torch's function wherever it attends, under any name it has imported it by. A `TorchFunctionMode` sees
these calls, of this thread and no other, and is gone with its context, errors included; nothing is patched.

Where torch's function and the ring differ, the call is refused rather than computed otherwise than the model means:
masks made from one rank's shard, dropout, key heads that are not as many as query heads without `enable_gqa`, and
`is_causal` with unequal lengths, which torch aligns at the top left.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ringref.sharding import Sharding
from ringverify.ring.agreement import REFUSED, check_agreement
from ringverify.ring.attention import ring_attention
from ringverify.ring.group import Ring
from ringverify.ring.module import RingAttention

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

SDPA = (
    functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)
"""What a model may call; `torch._C._nn` holds the first of them."""
BACKWARD = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
"""What may compute checkpointed attention again."""
OF_THE_CALL = ("layout", "scale", "dropout_p", "return_lse")
"""Settings of `RingAttention` that are each call's own."""


def ring_sdpa(
    *,
    group: ProcessGroup | DeviceMesh | None = None,
    sharding: Sharding = "contiguous",
    length: int | None = None,
    causal: bool | None = None,
    documents: Sequence[int] | torch.Tensor | None = None,
    key_lengths: Sequence[int] | torch.Tensor | None = None,
    check_shards: bool | None = None,
    **settings: Any,
) -> contextlib.AbstractContextManager[RingSDPA]:
    """A context in which `scaled_dot_product_attention` attends to the keys of all ranks of a group.

    The model is given this rank's shard of the tokens, cut by `shard`, and the positions that `position_ids` says; what
    it returns is this rank's shard. Nothing but attention communicates. All ranks of the group call together, in the
    context; `backward` may come after it, but belongs inside if activations are checkpointed, because attention is then
    computed once more. In a thread of its own, or in another one's context, a call is what it was; of nested contexts
    the inner one counts.

    Args:
        group: the process group that is the ring, or a one-dimensional `DeviceMesh`; `None` is the default group, or
            this process alone where torch.distributed is not initialised.
        sharding: which rank holds which positions, as in `ring_attention`.
        length: positions of the sequence over all ranks, of queries and keys alike; `None` means that all ranks hold as
            many as this one, which is checked.
        causal: whether every call is causal, whatever its `is_causal` says; `None` goes by `is_causal`.
        documents: cumulative document lengths (`cu_seqlens`) of the whole sequence.
        key_lengths: number of valid keys of each batch element, of the whole sequence.
        check_shards: compare the ranks' calls before anything else is sent, and raise on all of them if they differ or
            one of them refuses its call. `None` compares every call on CPU, and the first call of the context on other
            devices, which waits for the device. The same on all ranks.
        **settings: others of `RingAttention`: window, dilation, softcap, method, transport, kernel, memory_budget,
            explain.

    Raises:
        ValueError: the settings have no meaning; raised here. Within the context, by a call that the ring cannot
            compute as torch would, or that the ranks do not make alike.
        TypeError: a setting is unknown, or each call's own.
    """
    if own := [name for name in OF_THE_CALL if name in settings]:
        raise TypeError(f"{own[0]}: each call of scaled_dot_product_attention says it; leave it out")
    attend = RingAttention(group=group, sharding=sharding, layout="bhsd", causal=bool(causal), **settings)
    constraints = {"documents": documents, "key_lengths": key_lengths}
    return _within(RingSDPA(attend, causal, length, constraints, check_shards))


@contextlib.contextmanager
def _within(mode: RingSDPA) -> Iterator[RingSDPA]:
    with mode:
        yield mode
    if not mode.calls:
        warnings.warn(
            "no scaled_dot_product_attention was called within ring_sdpa: whatever attends there does so within this "
            "rank's shard; a Hugging Face model calls it with attn_implementation='sdpa'",
            stacklevel=3,
        )


class RingSDPA(TorchFunctionMode):
    """What `ring_sdpa` does with the functions of torch that are called.

    Attributes:
        calls: how many became ring attention.
    """

    def __init__(
        self,
        attend: RingAttention,
        causal: bool | None,
        length: int | None,
        constraints: dict[str, Any],
        check_shards: bool | None,
    ) -> None:
        super().__init__()
        self.calls = 0
        self._attend, self._causal, self._length = attend, causal, length
        self._constraints, self._check_shards = constraints, check_shards

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in SDPA:
            return self._ring(*args, **(kwargs or {}))
        if func in BACKWARD:
            with self:
                return _seen_through(func)(*args, **(kwargs or {}))
        if func is functional.multi_head_attention_forward:
            raise ValueError(
                "nn.MultiheadAttention within ring_sdpa: its attention is out of sight there and would stay within "
                "this rank's shard; call scaled_dot_product_attention, or RingAttention, in its place"
            )
        return func(*args, **(kwargs or {}))

    def _ring(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """One call, with the signature of torch's."""
        ring = Ring.of(self._attend.group)
        compare = self._check_shards
        if compare is None:
            compare = query.device.type == "cpu" or not self.calls
        self.calls += 1
        causal = is_causal if self._causal is None else self._causal
        refusal = _refusal(query, key, attn_mask, causal, enable_gqa)
        if refusal is None and self._causal is None and not is_causal and ring.world_size > 1:
            refusal = _ambiguous(query, key)
        if refusal is not None:
            if compare and ring.world_size > 1:
                check_agreement(ring, {REFUSED: refusal}, query.device)
            raise ValueError(refusal)
        out = ring_attention(
            query,
            key,
            value,
            group=self._attend.group,
            query_length=self._length,
            key_length=self._length,
            **{
                **self._attend.settings,
                **self._constraints,
                "causal": causal,
                "scale": scale,
                "dropout_p": dropout_p,
                "check_shards": compare,
            },
        )
        assert isinstance(out, torch.Tensor)  # without return_lse
        return out


@functools.cache
def _seen_through(func: Any) -> Callable[..., Any]:
    """What a function of torch does that hands itself to a mode as a whole, in a form whose calls the mode sees.

    It is the same code, in which `has_torch_function` says no.
    """
    asked = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    known = {**func.__globals__, **dict.fromkeys(asked, lambda *_: False)}
    again = FunctionType(func.__code__, known, func.__name__, func.__defaults__, func.__closure__)
    again.__kwdefaults__ = func.__kwdefaults__
    return again


def _refusal(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, causal: bool, enable_gqa: bool
) -> str | None:
    """Why the ring would not compute what torch does, in one line."""
    if attn_mask is not None:
        return (
            f"attn_mask of shape {tuple(attn_mask.shape)} within ring_sdpa: a mask made from one rank's shard does not "
            "say which keys of other ranks are attended; leave it out and say causal=, documents= or key_lengths= to "
            "ring_sdpa. A Hugging Face model makes none if it is given attention_mask=torch.ones_like(input_ids)"
        )
    if query.dim() != 4 or key.dim() != 4:
        return None  # ring_attention says what is expected
    if not enable_gqa and query.size(1) != key.size(1):
        return (
            f"{query.size(1)} query heads and {key.size(1)} key heads without enable_gqa=True, which torch refuses or "
            "broadcasts; shapes are (batch, heads, sequence, head_dim)"
        )
    if causal and query.size(2) != key.size(2):
        return (
            f"is_causal with {query.size(2)} queries and {key.size(2)} keys on this rank: torch aligns the first query "
            "with the first key, the ring the last with the last; use ring_attention, whose meaning is documented"
        )
    return None


def _ambiguous(query: torch.Tensor, key: torch.Tensor) -> str | None:
    """Why a call that is not causal may be meant to be."""
    if query.dim() != 4 or not query.size(2) == key.size(2) == 1:
        return None
    return (
        "is_causal=False with one position on this rank: models leave is_causal out for one token, which they take for "
        "the last one; say causal=True or causal=False to ring_sdpa"
    )
