"""Environments on other machines: their protocol with the server, and the runner's side of it.

messages   the messages of the protocol
identity   the runner's name and secret, kept across restarts
link       the session with the server: register, heartbeat, reconnect, post finished groups; pauses
           model calls while the server cannot be reached
dealing    deals single groups of `process` and `evaluate` to runners, for `--ray`
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
