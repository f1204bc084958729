"""A connection to the proxy's socket that may turn out to ask for another host.

In: the first bytes of a connection. Out: it stays a connection of the model proxy, or is handed to
the egress proxy (`proxy/egress.py`), with its bounds and its bookkeeping. Used only where the
environment lists hosts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ..proxy.attempts import ProxyAttempt
from ..proxy.egress import Egress
from ..proxy.egress_heads import MOST_HEAD_BYTES, asks_a_proxy
from .proxy_server import AgentHttp


class EgressHttp(AgentHttp):
    """See AgentHttp.

    Args:
        egress: what answers requests for other hosts.
    """

    def __init__(self, *args: Any, egress: Egress, **more: Any) -> None:
        super().__init__(*args, **more)
        self._egress = egress
        self._first: bytes | None = b""
        """First bytes of a connection, until they tell its kind; None: it is the model proxy's."""

    def data_received(self, data: bytes) -> None:
        if self._first is None:
            super().data_received(data)
            return
        self._first += data
        is_egress = asks_a_proxy(self._first)
        if is_egress is None:
            return
        first, self._first = self._first, None
        if is_egress:
            self._hand_over(first)
        else:
            super().data_received(first)

    def _hand_over(self, first: bytes) -> None:
        self._stop_timer()
        self._unset_keepalive_if_required()
        reader = asyncio.StreamReader(limit=MOST_HEAD_BYTES, loop=self.loop)
        stream = _Stream(reader, self.connection_lost)
        writer = asyncio.StreamWriter(self.transport, stream, reader, self.loop)
        self.transport.set_protocol(stream)
        stream.connection_made(self.transport)
        reader.feed_data(first)
        self._serving = self.loop.create_task(
            self._egress.serve(reader, writer, self._listener.proxy.attempt_of, self._own)
        )
        stream.on_end = self._serving.cancel

    def _own(self, attempt: ProxyAttempt) -> None:
        """Counts the connection as the attempt's."""
        self._owner = attempt.in_flight
        self._listener.claim(self, attempt.in_flight)


class _Stream(asyncio.StreamReaderProtocol):
    """A stream on a transport that had another protocol, which hears of its end."""

    def __init__(
        self, reader: asyncio.StreamReader, lost: Callable[[Exception | None], None]
    ) -> None:
        super().__init__(reader)
        self._lost = lost
        self.on_end: Callable[[], object] = lambda: None

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost(exc)
        self.on_end()
