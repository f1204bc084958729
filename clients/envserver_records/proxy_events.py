"""What hooks (`Environment.on_request`) did to calls, and requests of agents to hosts outside."""

from __future__ import annotations

from typing import Literal

import msgspec


class HookEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A change or refusal of a model call by an environment's hook.

    Args:
        at: the hook: of the request, or of the answer.
        reason: as the environment gave it.
        changed: names of what was changed (messages, tools, prompt, answer); empty: it refused.
        agent: name of the calling agent, None if there is only one.
        call: index of the call, None if none was made.
    """

    at: Literal["request", "answer"]
    reason: str
    changed: list[str] = []
    agent: str | None = None
    call: int | None = None


EgressEnd = Literal[
    "",
    "host",
    "port",
    "address",
    "name",
    "unknown_host",
    "unreachable",
    "requests",
    "bytes",
    "time",
    "cut",
]
"""Why it was refused or cut off; "": it was not.

host, port: not on the environment's list. address: the name leads to a private address.
name: a tunnel that does not begin with TLS for this very host.
unknown_host, unreachable: no such name, or no connection. requests, bytes, time: a bound. cut: the
rollout ended first, or a side broke the connection off.
"""


class EgressRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One request of an agent to a host outside, as the egress proxy recorded it.

    Args:
        method: "CONNECT" for a tunnel, whose contents are not seen.
        path: of plain HTTP, without its query, which may hold keys.
        status: of the host's answer; 0: none, or not seen.
        sent_bytes, received_bytes: to and from the host.
    """

    method: str
    host: str
    port: int
    path: str = ""
    status: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    end: EgressEnd = ""
