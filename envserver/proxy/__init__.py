"""The endpoint that agents talk to.

In: requests under the secret key of one attempt. Out: answers in the agent's dialect and recorded
Calls, the only source of training tokens. What always holds: a call is recorded before the last
byte of its answer is sent; an attempt never gets more turns, tokens or time than its limits;
nothing is recorded after an attempt is sealed; no answer holds the engine's key, the hidden part of
a task, or a field that only the proxy asked the engine for.

README.md draws the path of one call and lists the files in that order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import lazy_names

if TYPE_CHECKING:
    from .asgi import AsgiApp, Receive, Scope, Send
    from .attempts import AttemptSpec, Limits, ProxyAttempt
    from .dialects.messages import MessagesDialect
    from .dialects.responses import ResponsesDialect
    from .endpoint import Capabilities, EngineEndpoint
    from .gate import Gate
    from .server import Proxy

__all__ = [
    "AsgiApp",
    "AttemptSpec",
    "Capabilities",
    "EngineEndpoint",
    "Gate",
    "Limits",
    "MessagesDialect",
    "Proxy",
    "ProxyAttempt",
    "Receive",
    "ResponsesDialect",
    "Scope",
    "Send",
]

__getattr__ = lazy_names(
    __name__,
    {
        "AsgiApp": "asgi",
        "AttemptSpec": "attempts",
        "Capabilities": "endpoint",
        "EngineEndpoint": "endpoint",
        "Gate": "gate",
        "Limits": "attempts",
        "MessagesDialect": "dialects.messages",
        "Proxy": "server",
        "ProxyAttempt": "attempts",
        "Receive": "asgi",
        "ResponsesDialect": "dialects.responses",
        "Scope": "asgi",
        "Send": "asgi",
    },
)
