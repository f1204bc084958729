"""A follower's connections to the leader.

What holds: a request is sent once. When no connection can be made it has not been sent (`NoLeader`,
503); when the connection breaks later it may have taken effect (`LeaderGone`, 502), and only its
client, who knows whether repeating it is safe, may send it again.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import aiohttp
from envserver_records.errors import ConfigError, EnvserverError
from starlette.types import Message, Scope
from yarl import URL

from ...settings.server import ServerConfig
from ...store.leadership import Leadership
from ...store.lock import Leader
from .facts import PASSED, NoLeader, is_passed, origin_of

if TYPE_CHECKING:
    from ...store.leadership import Leadership


CONNECT_SECONDS: Final = 2.0
_IDLE_SECONDS: Final = 4.0
"""Below the five seconds after which uvicorn closes an idle connection."""
_CHUNK_BYTES: Final = 256 * 1024
_OF_THE_HOP: Final = frozenset(
    b"connection keep-alive proxy-connection te trailer transfer-encoding upgrade expect".split()
)
"""Headers about one connection, which are not passed on."""
_MADE_BY_AIOHTTP: Final = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")


class LeaderGone(EnvserverError):
    kind, status = "leader_gone", 502


def no_leader() -> NoLeader:
    """Returns the answer while nobody leads, or the leader cannot be reached."""
    return NoLeader(
        "No server leads at this moment.",
        hint="Another one takes over within seconds: send the request again.",
        retry_after_seconds=1,
    )


class LeaderLink:
    """Sends requests to the leader; use with `async with`."""

    def __init__(self, leadership: Leadership, settings: ServerConfig) -> None:
        self._leadership = leadership
        self._settings = settings
        self._session: aiohttp.ClientSession | None = None
        self._open: dict[asyncio.Timeout, str] = {}

    async def __aenter__(self) -> LeaderLink:
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_IDLE_SECONDS, ssl=_tls(self._settings)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=_MADE_BY_AIOHTTP,
            read_bufsize=_CHUNK_BYTES,
        )
        # aiohttp repeats a GET whose connection broke. Here GET may change something, and the
        # leader may have had it: `GET /batch` hands groups out.
        self._session._retry_connection = False
        self._leadership.changed = self._leave_others
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._session is not None
        await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    def leader_for(self, scope: Scope) -> Leader:
        """Returns the leader that a request goes to.
        Raises NoLeader: none is known, or the request comes from another follower.
        """
        leader = self._leadership.leader
        if leader is None or is_passed(scope):
            raise no_leader()
        return leader

    @asynccontextmanager
    async def bound(self, leader: Leader) -> AsyncIterator[asyncio.Timeout]:
        """Ends the body with TimeoutError when another server leads (a leader that is stopped
        keeps its connections, and answers nothing), or after `end`."""
        async with asyncio.timeout(None) as limit:
            self._open[limit] = leader.owner
            try:
                yield limit
            finally:
                del self._open[limit]

    def _leave_others(self, owner: str) -> None:
        for limit, of in self._open.items():
            if of != owner:
                end(limit)

    @asynccontextmanager
    async def sent(
        self, leader: Leader, scope: Scope, body: AsyncIterator[bytes] | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Sends a request; yields the answer's head."""
        try:
            async with self.session.request(
                scope["method"],
                url_of(leader, scope),
                headers=headers_of(leader, scope),
                data=body,
                allow_redirects=False,
            ) as response:
                yield response
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError):
            raise no_leader() from None
        except (aiohttp.ClientError, OSError) as error:
            raise gone(error) from None

    async def probe(self) -> str:
        """Returns "" if the leader answers, else why not."""
        leader = self._leadership.leader
        if leader is None:
            return "no server leads"
        url = URL(leader.url) / "healthz"
        timeout = aiohttp.ClientTimeout(total=CONNECT_SECONDS)
        try:
            async with self.session.get(url, timeout=timeout) as response:
                return "" if response.status == 200 else f"{leader.url} answers {response.status}"
        except (aiohttp.ClientError, OSError):
            return f"{leader.url} does not answer"


def end(limit: asyncio.Timeout, seconds: float = 0.0) -> None:
    """Lets `limit` end its body `seconds` from now."""
    if not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time() + seconds)


def gone(error: Exception) -> LeaderGone:
    """Returns the error for a connection that broke after the request was sent."""
    return LeaderGone(
        f"The leading server broke off ({type(error).__name__}); the request may have been done.",
        hint="Send it again: what was done counts once.",
    )


def url_of(leader: Leader, scope: Scope) -> URL:
    """Returns the address of a request at the leader, with its path and query as they were sent."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    return URL(f"{leader.url}{path}{'?' if query else ''}{query}", encoded=True)


def headers_of(leader: Leader, scope: Scope) -> list[tuple[str, str]]:
    """Returns a request's headers for the leader, with who sent it."""
    named = {
        part.strip().lower()
        for name, value in scope["headers"]
        if name == b"connection"
        for part in value.split(b",")
    }
    kept = [
        (name, value)
        for name, value in scope["headers"]
        if name not in _OF_THE_HOP and name not in named
    ]
    kept.append((PASSED, origin_of(scope, leader.owner)))
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in kept]


def answer_headers(response: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    """Returns an answer's headers for the client; the follower's server adds the date."""
    return [
        (name.lower(), value)
        for name, value in response.raw_headers
        if name.lower() not in _OF_THE_HOP and name.lower() != b"date"
    ]


def is_disconnect(message: Message) -> bool:
    """Returns whether the client is gone."""
    return message["type"] in ("http.disconnect", "websocket.disconnect")


def _tls(settings: ServerConfig) -> ssl.SSLContext:
    """Returns what a follower checks the leader's certificate by, and shows it."""
    try:
        context = ssl.create_default_context(cafile=settings.advertise_ca_certs)
        if settings.ssl_cert_reqs != "none" and settings.ssl_certfile is not None:
            password = settings.ssl_keyfile_password
            context.load_cert_chain(
                settings.ssl_certfile,
                settings.ssl_keyfile,
                password.get_secret_value() if password is not None else None,
            )
    except OSError as error:
        raise ConfigError(f"A certificate for the leader cannot be used: {error}.") from None
    return context
