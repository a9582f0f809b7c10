"""Arrays of token ids and handles on the wire: unsigned 32-bit integers, little-endian, in `bytes` fields.

One copy, where a repeated field costs a Python object per element.
"""

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["ITEM_BYTES", "native", "pack", "pack_array", "unpack", "view"]

_U32 = np.dtype("<u4")
ITEM_BYTES = _U32.itemsize
_SWAPPED = not _U32.isnative
assert array("I").itemsize == ITEM_BYTES


def pack(values: Iterable[int]) -> bytes:
    """Pack numbers into bytes.

    Raises:
        OverflowError: a number below 0 or of more than 32 bits.
    """
    packed = array("I", values)
    if _SWAPPED:
        packed.byteswap()
    return packed.tobytes()


def unpack(data: bytes) -> "array[int]":
    """Unpack the numbers.

    Raises:
        ValueError: not a multiple of four bytes.
    """
    if len(data) % ITEM_BYTES:
        raise ValueError(f"array of {len(data)} bytes; expected a multiple of {ITEM_BYTES}")
    values = array("I")
    values.frombytes(data)
    if _SWAPPED:
        values.byteswap()
    return values


def native(data: bytes) -> bytes:
    """Return the bytes of an `array("I")` on this machine; no copy if its order is the wire's.

    Raises:
        ValueError: not a multiple of four bytes.
    """
    return unpack(data).tobytes() if _SWAPPED or len(data) % ITEM_BYTES else data


def pack_array(values: NDArray[np.uint32]) -> bytes:
    """Pack a NumPy array into bytes."""
    return values.astype(_U32, copy=False).tobytes()


def view(data: bytes) -> NDArray[np.uint32]:
    """Return the numbers as a read-only NumPy array over the same memory.

    Raises:
        ValueError: not a multiple of four bytes.
    """
    return np.frombuffer(data, _U32)
