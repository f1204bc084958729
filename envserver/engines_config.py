"""`--engines.*`: engines that come and go while a server runs; part of the tree in `config`."""

from __future__ import annotations

import ipaddress
import re
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from .described import Section

_NAME = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9._-]{0,252}[a-z0-9_])?", re.IGNORECASE)


class EnginesConfig(Section):
    """Engines besides those of `openai.base_url`: registered by POST /v1/engines, or discovered."""

    routing: Literal["prefix", "least"] = "prefix"
    """Engine of a new rollout: by a hash of its id (prefix), or the one with the fewest calls
    (least). All calls of a rollout go to one engine, which has its prefix cached."""
    max_version_lag: int = Field(default=0, ge=0)
    """Policy versions that the weights of an engine may be behind the published one; an engine
    further behind gets no calls until it is current."""
    file: Path | None = None
    """Watched file that lists engines: an address per line, or a JSON object with `url` and
    `version`."""
    poll_seconds: float = Field(default=5.0, gt=0)
    """Seconds between two looks at `file`."""
    from_server: bool | None = None
    """Use the engines that the server calls (only `join`); unset: if `openai.base_url` is none."""
    allow: list[str] = []
    """Hosts at which engines may be registered: gpu1,*.gpu.local,10.0.0.0/8. Only they get
    `openai.api_key`. Unset: all but those of this machine (with access tokens), and addresses of
    cloud services; and none gets the key."""

    @field_validator("allow")
    @classmethod
    def _hosts(cls, value: list[str]) -> list[str]:
        for host in value:
            try:
                ipaddress.ip_network(host, strict=False)
            except ValueError:
                if _NAME.fullmatch(host) is None:
                    raise ValueError(
                        f"{host[:100]!r} is not a name, *.name, or a network such as 10.0.0.0/8"
                    ) from None
        return value
