"""What a server knows of an environment on another machine: what is kept, and how it is now."""

from __future__ import annotations

from typing import Any

import msgspec
from envserver_records.records import Split

from ...remote.messages import Heartbeat
from ...rollouts.stream import stream_prefix


class RegisteredRunner(msgspec.Struct, kw_only=True):
    """What is kept of a registration.

    Args:
        key_hash, instance_hash: SHA-256, in hex.
        asked_seed, seed: as it was set there, and as it was given.
        gone: it said goodbye.
    """

    id: str
    name: str
    key_hash: str
    instance_hash: str
    env: str
    split: Split
    asked_seed: int
    seed: int
    group_size: int
    weight: float
    minimum_share: float
    scoring: dict[str, Any]
    version: str
    host: str
    registered_at: float
    gone: bool = False

    @property
    def prefix(self) -> str:
        """With which the ids of its groups begin."""
        return stream_prefix(self.env, self.split, self.seed)


class RunnerStatus:
    """How one of them is, since this server or its session began."""

    def __init__(self) -> None:
        self.beat = Heartbeat()
        self.room = 0
        self.open = 0
        self.counted: int | None = None
        self.drain = False
        self.stored = 0

    @property
    def held(self) -> int:
        """Groups that it has open, or may open without asking again."""
        return max(self.room, self.open)
