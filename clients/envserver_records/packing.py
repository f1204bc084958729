"""Converts records to MessagePack and back; arrays are extension types of little-endian bytes.

numpy is imported for the first array only.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_CODES = {"i4": 1, "f4": 2, "u1": 3, "u2": 4}
"""Numbers of the MessagePack extension types for arrays."""
_DTYPES = {code: f"<{name}" for name, code in _CODES.items()}


def _encode_array(value: object) -> object:
    import numpy as np

    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        code = array.dtype.str[1:]
        if code not in _CODES or array.dtype.byteorder == ">":
            raise TypeError(
                f"arrays of {array.dtype} cannot be packed; use int32, float32, uint8 or uint16"
            )
        raw = array.data.cast("B") if array.size else b""
        return msgspec.msgpack.Ext(_CODES[code], raw)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not a record")


def _decode_array(code: int, raw: memoryview) -> Any:
    import numpy as np

    dtype = _DTYPES.get(code)
    if dtype is None:
        raise msgspec.DecodeError(f"unknown array type {code}")
    try:
        return np.frombuffer(raw, dtype)
    except ValueError as error:
        raise msgspec.DecodeError(f"an array is cut off: {error}") from error


def _decode_hook(kind: type, value: Any) -> Any:
    import numpy as np

    if getattr(kind, "__origin__", kind) is not np.ndarray:
        raise TypeError(f"no decoder for {kind}")
    if isinstance(value, np.ndarray):
        return value
    code, raw = value  # older versions packed arrays without extensions
    return _decode_array(_CODES.get(code, 0), raw)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)


def pack(record: Any) -> bytes:
    """Returns `record` (a struct of `records`, or a list of them) as MessagePack."""
    return _encoder.encode(record)


def unpack(data: bytes | memoryview, kind: type[T]) -> T:
    """Decodes the result of `pack`. Arrays are read-only views of `data`.

    Raises:
        msgspec.DecodeError: `data` is not a `kind`.
    """
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_hook, ext_hook=_decode_array)


def ready(kind: type) -> None:
    """Lets msgspec look at `kind`, and at all that is in it, now.

    It keeps what it finds with the class. Two threads that decode a class for the first time at
    once end the process (msgspec 0.22): modules of records that threads decode call this.
    """
    msgspec.msgpack.Decoder(kind)
