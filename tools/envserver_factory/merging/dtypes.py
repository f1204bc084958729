"""Numbers in safetensors files as numpy arrays, and back.

numpy has no bfloat16: its 16 bits are the upper half of a float32, so reading is a shift and
writing is rounding on integers. All numbers in files are little-endian. Names and sizes of dtypes:
the format's description in the README of huggingface/safetensors.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32] | NDArray[np.float64]

SIZES: Final = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
}
"""Bytes of one number, by the dtype's name in a file."""

FLOATS: Final = ("F64", "F32", "F16", "BF16")
"""Dtypes that can be added. All others (indices, masks, quantised weights) are only copied."""

_STORED: Final = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_NAN: Final = 0x7FC0
_EXPONENT: Final = 0x7F80


def decoded(data: bytes | bytearray | memoryview, dtype: str) -> Floats:
    """Decodes numbers of one of FLOATS: float64 for F64, float32 (exactly) for all others."""
    stored = np.frombuffer(data, dtype=_STORED[dtype])
    if dtype == "BF16":
        wide: NDArray[np.float32] = (stored.astype(np.uint32) << 16).view(np.float32)
        return wide
    return stored.astype(np.float64) if dtype == "F64" else stored.astype(np.float32)


def encoded(values: Floats, dtype: str) -> NDArray[Any]:
    """Encodes `values`, rounded to nearest, ties to even; overflow becomes infinity."""
    if dtype == "BF16":
        return _to_bfloat16(values.astype(np.float32, copy=False))
    with np.errstate(over="ignore"):
        return values.astype(_STORED[dtype])


def all_finite(stored: NDArray[Any], dtype: str) -> bool:
    """Returns whether the result of `encoded` holds neither an infinity nor a NaN."""
    if dtype == "BF16":
        return not bool(((stored & _EXPONENT) == _EXPONENT).any())
    return bool(np.isfinite(stored).all())


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    # Half of the last kept bit, less one where that bit is 0: a tie goes to the even neighbour.
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
    rounded[np.isnan(values)] = _NAN
    return rounded
