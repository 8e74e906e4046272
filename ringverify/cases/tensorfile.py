"""Read and write safetensors files, byte for byte the same for the same tensors.

The format is that of https://github.com/huggingface/safetensors: eight bytes with the header's length, a JSON header
with dtype, shape and place of every tensor, then their bytes, little-endian, without holes. The safetensors library
orders and pads the header as its version does; here both are fixed: widest dtypes first, so that every tensor is
aligned to its elements, names in the order given, the header padded to a multiple of eight.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringref.problem import DtypeName

Array = NDArray[np.float64]

CODES: dict[DtypeName, str] = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
NAMES: dict[str, DtypeName] = {code: name for name, code in CODES.items()}
STORED: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
"""How numpy reads each code. It has no bfloat16, whose 16 bits, the upper half of a float32, are read as integers."""


class Tensor(NamedTuple):
    """Values, as float64, and the dtype in which they are stored without loss."""

    values: Array
    dtype: DtypeName


class _Entry(NamedTuple):
    """A tensor's entry in the header: name, dtype, shape, and its range of bytes after the header."""

    name: str
    dtype: DtypeName
    shape: tuple[int, ...]
    begin: int
    end: int

    @classmethod
    def read(cls, name: str, entry: Mapping[str, Any]) -> _Entry:
        (begin, end), shape = entry["data_offsets"], entry["shape"]
        if not all(type(number) is int for number in (begin, end, *shape)):
            raise TypeError
        return cls(name, NAMES[entry["dtype"]], tuple(shape), begin, end)


class NotSafetensors(Exception):
    """Bytes are not a whole safetensors file; the message says why, in a few words."""


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a file.

    Raises:
        ValueError: a value is not representable in its dtype.
    """
    ordered = sorted(tensors.items(), key=lambda item: -STORED[CODES[item[1].dtype]].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    pieces, place = [], 0
    for name, tensor in ordered:
        piece = _stored(name, tensor).tobytes()
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.values.shape),
            "data_offsets": [place, place + len(piece)],
        }
        pieces.append(piece)
        place += len(piece)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(pieces)


def decode(data: bytes) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file's bytes.

    Raises:
        NotSafetensors: the bytes are cut off, or are not a safetensors file.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or len(data) < 8 + length:
        raise NotSafetensors("its header is cut off")
    try:
        header = json.loads(data[8 : 8 + length])
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        entries = [_Entry.read(name, entry) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise NotSafetensors("its header is not a valid safetensors header") from None
    body = data[8 + length :]
    tensors, place = {}, 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        stored = STORED[CODES[entry.dtype]]
        length = math.prod(entry.shape) * stored.itemsize
        if entry.begin != place or entry.end - place != length or min(entry.shape, default=0) < 0:
            raise NotSafetensors(
                f"data_offsets of its tensor {entry.name} do not match dtype and shape, or leave a gap"
            )
        if entry.end > len(body):
            raise NotSafetensors(f"it is cut off within {entry.name}")
        values = _values(np.frombuffer(body[entry.begin : entry.end], stored), entry.dtype)
        try:
            tensors[entry.name] = Tensor(values.reshape(entry.shape), entry.dtype)
        except (ValueError, OverflowError):  # too many axes, or an empty tensor with an axis that is too long
            raise NotSafetensors(f"its tensor {entry.name} has an impossible shape") from None
        place = entry.end
    if place != len(body):
        raise NotSafetensors(f"{len(body) - place} bytes follow its last tensor")
    return tensors, metadata


def _stored(name: str, tensor: Tensor) -> NDArray[Any]:
    """Return the values in the dtype in which numpy writes them to the file."""
    values = np.ascontiguousarray(tensor.values)
    if tensor.dtype == "bfloat16":
        stored: NDArray[Any] = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
    else:
        stored = values.astype(STORED[CODES[tensor.dtype]])
    if not np.array_equal(_values(stored, tensor.dtype), values, equal_nan=True):
        raise ValueError(f"{name} has values that {tensor.dtype} does not represent")
    return stored


def _values(stored: NDArray[Any], dtype: DtypeName) -> Array:
    """Return values that were read from a file as float64."""
    if dtype == "bfloat16":
        stored = (stored.astype("<u4") << 16).view("<f4")
    with np.errstate(invalid="ignore"):  # numpy warns of a signalling NaN
        return stored.astype(np.float64)
