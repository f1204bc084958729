"""The calls of a rollout as JSON, and back: what `envserver replay` plays again.

A call that continues an earlier one holds only what is new in it (see `tokens.trace`), so what is
written grows as what was said does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from envserver_records.errors import InputError, TokensError
from envserver_records.records import Call, ServiceCall, TracedCall, Trajectory
from msgspec.structs import replace

from ..tokens.trace import unpack_calls


def kept_calls(trajectory: Trajectory) -> dict[str, Any]:
    """`{"calls", "service_calls"}` of `trajectory`, plain JSON without routed experts."""
    calls = [replace(one, new=replace(one.new, experts=None)) for one in trajectory.calls]
    return {
        "calls": msgspec.to_builtins(calls, enc_hook=_as_list),
        "service_calls": msgspec.to_builtins(trajectory.service_calls),
    }


def calls_in(kept: Mapping[str, Any]) -> list[Call]:
    """The calls that `kept_calls` wrote; empty where it wrote none.
    Raises InputError: they are damaged.
    """
    try:
        traced = msgspec.convert(kept.get("calls") or [], list[TracedCall], dec_hook=_as_array)
        return unpack_calls(traced)
    except (msgspec.ValidationError, TokensError, ValueError, OverflowError) as error:
        raise InputError(f"The record of its calls is damaged: {error}") from error


def service_calls_in(kept: Mapping[str, Any]) -> list[ServiceCall]:
    """Returns the calls to services. Raises like `calls_in`."""
    try:
        return msgspec.convert(kept.get("service_calls") or [], list[ServiceCall])
    except msgspec.ValidationError as error:
        raise InputError(f"The record of its services is damaged: {error}") from error


def _as_list(value: object) -> list[Any]:
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


def _as_array(kind: type, value: Any) -> Any:
    element = np.float32 if np.dtype(np.float32) in _element(kind) else np.int32
    return np.asarray(value, dtype=element)


def _element(kind: Any) -> tuple[Any, ...]:
    """The element types that an array's annotation names: NDArray[np.float32] and its like."""
    return tuple(
        np.dtype(scalar)
        for argument in getattr(kind, "__args__", ())
        for scalar in getattr(argument, "__args__", ())
        if isinstance(scalar, type)
    )
