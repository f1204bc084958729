"""Environments on other machines: how they and the server speak, and the joiner's half of it.

messages   what travels
identity   who a joiner is, also after a restart
link       the session with the server: register, heartbeat, reconnect
gate       before the joiner's engine: nothing is sampled while the server is not heard of
sink       the server as the place where finished groups go
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .batch import GROUP_LIST_MSGPACK
    from .messages import Heartbeat, Registration

__all__ = ["GROUP_LIST_MSGPACK", "Heartbeat", "Registration"]

__getattr__ = lazy_names(
    __name__, {"GROUP_LIST_MSGPACK": "batch", "Heartbeat": "messages", "Registration": "messages"}
)
