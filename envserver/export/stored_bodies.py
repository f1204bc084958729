"""Converts a group's body, as stores and servers hold it, to the line that `process` writes."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from envserver_records.errors import InputError
from envserver_records.records import Group, unpack

from .jsonl import group_line


def line_of(body: bytes, format: str, env: str, group_id: str, place: str) -> dict[str, Any]:
    """Returns the JSON of a group.

    Args:
        format: "group" (ours) or "atropos" (posted by another program).

    Raises:
        InputError: it cannot be read.
    """
    try:
        if format == "group":
            group = unpack(body, Group)
            data = group_line(
                group, include_messages=True, score_range="unit", include_actions=True
            )
            return dict(orjson.loads(data))
        if format == "atropos":
            return {**orjson.loads(body), "env_id": env, "group_id": group_id}
    except (msgspec.DecodeError, ValueError, TypeError) as error:
        raise InputError(f"{place} cannot be read: {error}.", place=place) from error
    raise InputError(f"{place} has the unknown format {format!r}.", place=place)
