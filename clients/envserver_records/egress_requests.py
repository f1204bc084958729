"""One request of an agent to a host outside, as the server's egress proxy recorded it."""

from __future__ import annotations

from typing import Literal

import msgspec

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
    """One request.

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
