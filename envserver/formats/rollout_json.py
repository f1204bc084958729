"""One rollout, and all rollouts of a group, as the JSON that pages show, without arrays of tokens.

Nothing in them is a setting of the environment; pictures in messages are links (`images/K` below
the rollout's address), so that a rollout's size is that of its text."""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

import msgspec
import orjson
from envserver_records.errors import NotFoundError, fault_of
from envserver_records.records import Group, Message, Sequence, Trajectory, Usage
from envserver_records.timings import FailedAttempt, timing_as_json

MOST_BYTES: Final = 8 << 20
"""Size of the JSON of all rollouts of a group; the texts of further ones are left out."""
_LONGEST_PART: Final = 1 << 18
"""Characters of a part of a message that is neither text nor a picture (sound, for example)."""
_MAGIC: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
PICTURES: Final = ("image/png", "image/jpeg", "image/gif", "image/webp")
_TEXTS: Final[dict[str, Any]] = {
    "messages": [], "others": [], "tools": [], "actions": [], "output": None,
    "service_calls": [], "logs": [], "hooks": [], "egress": [],
}  # fmt: skip


def link_of(group_id: str) -> str:
    """Returns the address of a group's rollouts, below that of the server."""
    return f"v1/groups/{quote(group_id, safe='')}/rollouts"


def shown_group(group: Group) -> dict[str, Any]:
    """Returns what is known of a group but its rollouts and the environment's settings."""
    facts = msgspec.structs.replace(group, trajectories=[], env_config={})
    shown: dict[str, Any] = msgspec.to_builtins(facts, enc_hook=str)
    del shown["trajectories"], shown["env_config"]
    shown["missing"] = {
        number: [_failed(attempt) for attempt in attempts]
        for number, attempts in group.missing.items()
    }
    return shown


def shown_rollout(rollout: Trajectory, link: str) -> dict[str, Any]:
    links = (f"{link}/images/{number}" for number in itertools.count())
    plain = msgspec.structs.replace(rollout, sequences=[], calls=[], timings=[], printed=[])
    shown: dict[str, Any] = msgspec.to_builtins(plain, enc_hook=str)
    del shown["calls"], shown["printed"]
    shown["messages"] = [_with_links(message, links) for message in shown["messages"]]
    for other in shown["others"]:
        other["messages"] = [_with_links(message, links) for message in other["messages"]]
    shown["sequences"] = [_row(sequence) for sequence in rollout.sequences]
    shown["timings"] = [timing_as_json(timing) for timing in rollout.timings]
    shown["attempts"] = [_failed(attempt) for attempt in rollout.attempts]
    shown["logs"] = [
        {"time": line.time, "stream": line.stream, "text": line.text} for line in rollout.printed
    ]
    shown["use"] = _use(rollout.usage)
    return shown


def rollouts_as_json(group: Group, row: dict[str, Any], link: str) -> bytes:
    """Returns all rollouts of a group as JSON, `MOST_BYTES` of texts at most."""
    parts = []
    left = MOST_BYTES
    for number, rollout in enumerate(group.trajectories):
        shown = shown_rollout(rollout, f"{link}/{number}")
        encoded = as_json(shown)
        if len(encoded) > left:
            encoded = as_json({**shown, **_TEXTS, "cut": True})
        left -= len(encoded)
        parts.append(encoded)
    head = as_json({**row, **shown_group(group), "task": group.public})
    return b'{"group":%b,"rollouts":[%b]}' % (head, b",".join(parts))


def as_json(value: Any) -> bytes:
    """Encodes `value`; older groups hold values that orjson refuses."""
    try:
        return orjson.dumps(value, default=str)
    except TypeError:
        return msgspec.json.encode(value, enc_hook=str)


def picture_of(rollout: Trajectory, number: int) -> tuple[str, bytes]:
    """Returns the media type and the bytes of a picture in the messages of a rollout."""
    messages = itertools.chain(rollout.messages, *(other.messages for other in rollout.others))
    data = next(itertools.islice(map(_data_of, _pictures(messages)), number, None), None)
    kind = _kind_of(data) if data is not None else None
    if data is None or kind is None:
        raise NotFoundError(f"The rollout has no picture {number} that can be shown.")
    return kind, data


def _pictures(messages: Iterator[Message]) -> Iterator[str]:
    for message in messages:
        for part in _parts(message):
            if (url := _picture_url(part)) is not None:
                yield url


def _parts(message: Message) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _picture_url(part: Any) -> str | None:
    image = part.get("image_url") if isinstance(part, dict) else None
    url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) and url[:5].lower() == "data:" else None


def _with_links(message: Message, links: Iterator[str]) -> Message:
    parts = _parts(message)
    if not parts:
        return message
    return {**message, "content": [_linked(part, links) for part in parts]}


def _linked(part: Any, links: Iterator[str]) -> Any:
    if _picture_url(part) is not None:
        image = part["image_url"]
        url = next(links)
        return {**part, "image_url": {**image, "url": url} if isinstance(image, dict) else url}
    if isinstance(part, dict) and part.get("type") != "text" and len(as_json(part)) > _LONGEST_PART:
        return {"type": part.get("type"), "left_out_bytes": len(as_json(part))}
    return part


def _data_of(url: str) -> bytes:
    head, _, data = url.partition(",")
    try:
        return base64.b64decode(data) if head.lower().endswith(";base64") else b""
    except (binascii.Error, ValueError):
        return b""


def _kind_of(data: bytes) -> str | None:
    """Returns the media type that the bytes themselves show."""
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _MAGIC.items() if data.startswith(magic)), None)


def _failed(attempt: FailedAttempt) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(attempt, messages=[]))
    return {**shown, "fault": fault_of(attempt.kind, attempt.blame)}


def _row(row: Sequence) -> dict[str, Any]:
    return {
        "length": row.tokens.size,
        "trained": int(row.mask.sum()),
        "agent": row.agent,
        "flags": row.flags,
        "path": row.path,
        "follows": row.follows,
        "share": row.share,
        "sampling": msgspec.to_builtins(row.sampling),
    }


def _use(usage: Usage) -> dict[str, Any]:
    sandbox = usage.sandbox
    return {
        "ended_by": usage.ended_by,
        "worker_cpu_seconds": usage.worker_cpu_seconds,
        "worker_memory_mb": usage.worker_peak_memory_mb,
        "programs": sandbox.executions if sandbox else 0,
        "sandbox_cpu_seconds": sandbox.cpu_seconds if sandbox else None,
        "sandbox_memory_mb": sandbox.peak_memory_mb if sandbox else None,
        "killed_by": dict(sandbox.killed) if sandbox else {},
    }
