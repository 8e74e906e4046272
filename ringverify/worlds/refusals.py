"""Checks by which the simulated world refuses the calls that gloo refuses, and names for what only gloo refuses.

They were found by running small programs over gloo (`tests/worlds/small_programs.py`, which tests that both worlds
agree) and by reading torch's ProcessGroupGloo.cpp and ProcessGroupNCCL.cpp. `docs/worlds.md` has the table.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist

from ringverify.worlds.raising import marked

MESSAGE_TO_ITSELF = "a message to itself"
"""Name of the one refusal that depends on the number of ranks, and would hide violations at other world sizes."""

MOST_TAG = 2**31 - 1

_DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
}
"""Dtypes that gloo's collectives take, complex numbers as pairs. To gloo, point-to-point messages are bytes."""

STACKED = "a gathered tensor that does not lie along the first axis"
SCATTERED_FLAT = "a scattered tensor of another first axis"
SMALL_FLOATS = "a collective in 8-bit floating point"
LISTS_ALL_TO_ALL = "all_to_all of lists of tensors"

GLOO_LACKS_ALL_TO_ALL = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
"""Whether gloo lacks `all_to_all` of lists: with torch 2.11 it has `all_to_all_single` alone, with 2.13 both."""


def message_to_itself(rank: int, *, sends: bool) -> RuntimeError:
    """Return the error to raise for a message to oneself: gloo has no connection to its own process."""
    what = "sends to itself" if sends else "receives from itself"
    return marked(
        RuntimeError(
            f"rank {rank} {what}: gloo refuses that, and NCCL takes it only inside batch_isend_irecv; copy the tensor "
            "instead, or declare world_sizes without those on which it happens"
        ),
        MESSAGE_TO_ITSELF,
    )


def check_backend(name: str) -> None:
    """Refuse a backend of a new group that torch does not know; one that it knows and was built without is accepted.

    Raises:
        AssertionError: torch's own type.
    """
    for one in name.split(","):
        backend = one.rpartition(":")[2]
        if backend not in dist.Backend.backend_type_map:
            raise AssertionError(f"Unknown backend type {backend}")


def check_tag(tag: object, *, sends: bool) -> None:
    """Refuse a tag that gloo refuses.

    Raises:
        TypeError: it is no 32-bit integer.
        RuntimeError: it is negative.
    """
    name = "send" if sends else "recv"
    if not isinstance(tag, int) or not -MOST_TAG - 1 <= tag <= MOST_TAG:
        raise TypeError(f"{name}(): incompatible function arguments: tag is {tag!r}, expected a 32-bit integer")
    if tag < 0:
        raise RuntimeError(f"Tag must be nonnegative: {name}() has tag {tag}")


def check_root(operation: str, root: int, size: int) -> None:
    """Refuse a root that is not in the group.

    Raises:
        RuntimeError: it is not.
    """
    if not 0 <= root < size:
        raise RuntimeError(f"{operation}: invalid root rank: {root}, in a group of {size} ranks")


def check_dtypes(operation: str, tensors: Iterable[torch.Tensor], *, reduces: bool) -> str | None:
    """Refuse dtypes that no backend's collectives move.

    Args:
        operation: the collective.
        tensors: what it is given.
        reduces: whether it computes with them, which a CPU does not do in 8-bit floating point.

    Returns:
        The name of a finding if only gloo refuses a dtype, else `None`.

    Raises:
        RuntimeError: gloo refuses a dtype, and so does NCCL or the CPU.
    """
    for tensor in tensors:
        if tensor.dtype in _DTYPES:
            continue
        if not reduces and tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            return SMALL_FLOATS
        shown = str(tensor.dtype).removeprefix("torch.")
        raise RuntimeError(f"Invalid scalar type: {operation} of {shown}, which gloo's collectives do not take")
    return None
