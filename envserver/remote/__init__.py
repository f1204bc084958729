"""Environments on other machines: their protocol with the server, and the runner's side of it.

messages   the messages of the protocol
identity   the runner's name and secret, kept across restarts
link       the session with the server: register, heartbeat, reconnect
gate       pauses the runner's model calls while the server cannot be reached
sink       sends finished groups to the server
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .messages import GROUP_LIST_MSGPACK, Heartbeat, Registration

__all__ = ["GROUP_LIST_MSGPACK", "Heartbeat", "Registration"]

__getattr__ = lazy_names(
    __name__,
    {"GROUP_LIST_MSGPACK": "messages", "Heartbeat": "messages", "Registration": "messages"},
)
