"""A runner at the server: its stored registration and its current status."""

from __future__ import annotations

from typing import Any

import msgspec
from envserver_records.records import Split

from ...remote.messages import Heartbeat
from ...rollouts.stream import stream_prefix


class RegisteredRunner(msgspec.Struct, kw_only=True):
    """The stored registration of a runner.

    Args:
        key_hash, instance_hash: SHA-256, in hex.
        asked_seed: the seed the runner was configured with; `seed`: the one it was given.
        gone: whether it has deregistered.
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
        """ID prefix of its groups."""
        return stream_prefix(self.env, self.split, self.seed)


class RunnerStatus:
    """Current status of a runner, since the start of this server or of the runner's session."""

    def __init__(self) -> None:
        self.beat = Heartbeat()
        self.room = 0
        self.open = 0
        self.counted: int | None = None
        self.drain = False
        self.stored = 0

    @property
    def held(self) -> int:
        """Number of groups it has open, or may open without asking again."""
        return max(self.room, self.open)
