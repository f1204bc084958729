"""Serves an application over HTTP in the caller's event loop, with limits of connections.

Without access tokens, only this machine may connect. With server settings, the number of
connections is limited, heads in size, number and time, and bodies in time: a client that exceeds a
limit gets an error (431, 414, 408, 429 or 503) and is disconnected. When the certificate changes on
disk, new connections use the new one."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Self, cast

import structlog
import uvicorn
from envserver_records.errors import ConfigError, UsageError
from envserver_records.waiting import cancel_and_wait
from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..descriptors import raise_open_files
from ..settings.server import ServerConfig, is_loopback
from .answers import error_answer
from .requests import ABORT

# Uvicorn logs a traceback and ends the process when an application cannot start; here the caller
# gets the exception.


class Lifespan:
    """Starts and stops `app`. Call `stop` after each `start` that returned."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._requests: asyncio.Queue[Message] = asyncio.Queue()
        self._started = asyncio.Event()

    async def start(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}}
        self._task = asyncio.ensure_future(self._live(scope))
        self._requests.put_nowait({"type": "lifespan.startup"})
        started = asyncio.ensure_future(self._started.wait())
        try:
            await asyncio.wait({started, self._task}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await cancel_and_wait(self._task)
            raise
        finally:
            started.cancel()
        if self._task.done():
            self._task.result()

    async def stop(self) -> None:
        """Waits until the application has stopped; raises what it raised."""
        self._requests.put_nowait({"type": "lifespan.shutdown"})
        await self._task

    async def _live(self, scope: dict[str, Any]) -> None:
        await self._app(scope, self._requests.get, self._hear)

    async def _hear(self, message: Message) -> None:
        # Failures are also raised, so log only the success.
        if message["type"] == "lifespan.startup.complete":
            self._started.set()


_MOST_BYTES: Final = 64 * 1024


class JoinedWrites:
    """A transport that joins writes: what is written in one turn of the event loop goes out at its
    end, or as soon as it is 64 KB. The order of writes, and of closing, stays."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []
        self._size = 0

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size > _MOST_BYTES:
            self._flush()

    def writelines(self, parts: list[bytes]) -> None:
        self.write(b"".join(parts))

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        parts, self._parts, self._size = self._parts, [], 0
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))


class JoinedHttp(HttpToolsProtocol):
    """uvicorn's protocol with joined writes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        joined = JoinedWrites(cast(asyncio.Transport, transport), self.loop)
        super().connection_made(cast(asyncio.Transport, joined))


_MOST_PIPELINED: Final = 16
"""Requests that were sent before the one in front of them was answered; hardly any client does."""


class TooSlow(UsageError):
    kind, status = "too_slow", 408


class HeadersTooLarge(UsageError):
    kind, status = "headers_too_large", 431


class UrlTooLong(UsageError):
    kind, status = "url_too_long", 414


class TooManyConnections(UsageError):
    kind, status = "too_many_connections", 503


class TooManyPipelined(UsageError):
    kind, status = "too_many_pipelined", 429


class BoundedHttp(JoinedHttp):
    """One connection. Its phase is idle, reading headers, or reading a body. Subclasses may
    override `head_came` and `answer_to`."""

    most_discarded = 1 << 20
    """Bytes of a body that are still read after its answer; then the connection is closed."""

    def __init__(self, *args: Any, bounds: ServerConfig, **more: Any) -> None:
        super().__init__(*args, **more)
        self._bounds = bounds
        self._phase: Literal["idle", "head", "body"] = "idle"
        self._head_bytes = 0
        self._refused = False
        self._discarded = 0
        self._timer: asyncio.TimerHandle | None = None
        self._body_began = self._body_came = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            self._refuse(TooManyConnections("The server has reached its limit of connections."))
        else:
            self._timer = self.loop.call_later(self._bounds.header_seconds, self._head_too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        if self._phase != "body":
            self._head_bytes += len(data)
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._phase != "body" and self._head_bytes > self._bounds.max_header_bytes:
            self._refuse(self._headers_too_large())
        elif self._timer is None:
            # Requests that arrive whole, as most do, need no timer.
            if self._phase == "head":
                self._timer = self.loop.call_later(self._bounds.header_seconds, self._head_too_slow)
            elif self._phase == "body":
                self._watch_body()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["extensions"] = {ABORT: {"abort": self.transport.abort}}
        self._phase = "head"
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._bounds.max_url_bytes:
            self._refuse(UrlTooLong(f"The URL has more than {self._bounds.max_url_bytes} bytes."))

    def on_headers_complete(self) -> None:
        self._stop_timer()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if len(self.headers) > self._bounds.max_headers or size > self._bounds.max_header_bytes:
            self._refuse(self._headers_too_large())
        elif len(self.pipeline) >= _MOST_PIPELINED:
            self._refuse(TooManyPipelined(f"More than {_MOST_PIPELINED} requests wait."))
        else:
            self.head_came()
        if self._refused:
            return
        super().on_headers_complete()
        self._phase = "body"
        self._discarded = 0
        self._body_began = self._body_came = self.loop.time()

    def head_came(self) -> None:
        """Called when the head of a request is complete and within its limits; may `_refuse` it."""

    def answer_to(self, error: UsageError) -> bytes:
        """Returns the whole answer to a request that exceeds a limit."""
        answer = error_answer("/v1", error.status, error.message, kind=error.kind)
        return last_answer(error.status, answer.raw_headers, bytes(answer.body))

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body_came = self.loop.time()
        if self.cycle.response_complete:
            self._discarded += len(body)
            if self._discarded > self.most_discarded:
                self._refused = True
                self.transport.close()
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._refused:
            return
        self._stop_timer()
        self._phase = "idle"
        self._head_bytes = 0
        super().on_message_complete()

    def _head_too_slow(self) -> None:
        self._timer = None
        if self._phase == "idle":
            # Idle, or an earlier request is still being handled.
            if self.cycle is None:
                self.transport.close()
            return
        seconds = self._bounds.header_seconds
        self._refuse(TooSlow(f"The headers took more than {seconds:g} seconds."))

    def _watch_body(self) -> None:
        now = self.loop.time()
        if self.flow.read_paused:
            self._body_came = now  # the server paused reading, not the client
        idle = now - self._body_came
        left = min(
            self._bounds.body_idle_seconds - idle,
            self._body_began + self._bounds.body_seconds - now,
        )
        if left > 0:
            self._timer = self.loop.call_later(left, self._watch_body)
        else:
            self._timer = None
            self._refuse(TooSlow(f"The body took too long: no data for {idle:.0f} seconds."))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _headers_too_large(self) -> HeadersTooLarge:
        most = self._bounds
        return HeadersTooLarge(
            f"More than {most.max_headers} headers, or {most.max_header_bytes} bytes of them."
        )

    def _refuse(self, error: UsageError) -> None:
        if self._refused:
            return
        self._refused = True
        self._stop_timer()
        self._unset_keepalive_if_required()
        answering = self.cycle is not None and not self.cycle.response_complete
        if not (answering and (self.cycle.response_started or self.cycle.scope is not self.scope)):
            self.transport.write(self.answer_to(error))
        self.transport.close()


def last_answer(status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Returns the bytes of an answer after which the connection is closed."""
    lines = b"".join(b"%b: %b\r\n" % header for header in (*headers, (b"connection", b"close")))
    return STATUS_LINE[status] + lines + b"\r\n" + body


log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0
_REQUIRED: Final = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}

_Seen = tuple[tuple[int, int, int], ...]
"""Modification time, size and inode of each file."""


class Certificates:
    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self._in_use: _Seen = ()

    def context(self) -> ssl.SSLContext:
        """Returns a TLS context for new connections, from the current files."""
        settings = self._settings
        password = settings.ssl_keyfile_password
        # Always pass a password: without one, OpenSSL would prompt on the terminal.
        secret = password.get_secret_value() if password else " "
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            seen = self._look()
            context.load_cert_chain(_required(settings.ssl_certfile), settings.ssl_keyfile, secret)
            context.verify_mode = _REQUIRED[settings.ssl_cert_reqs]
            if settings.ssl_ca_certs is not None:
                context.load_verify_locations(settings.ssl_ca_certs)
            changed = self._look() != seen
        except (OSError, ValueError) as error:  # SSL errors can be either
            raise _unusable(getattr(error, "strerror", "") or str(error)) from None
        if changed:
            raise _unusable("it is being written")
        self._in_use = seen
        return context

    async def follow(self, use: Callable[[ssl.SSLContext], Awaitable[None]]) -> None:
        """Calls `use` with a new context each time the files change, until cancelled."""
        last_problem = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                context = await asyncio.to_thread(self._changed)
                if context is not None:
                    await use(context)
                    log.info("certificate_reloaded", certificate=str(self._settings.ssl_certfile))
                last_problem = ""
            except (ConfigError, OSError) as error:
                if str(error) != last_problem:
                    log.error("certificate_not_reloaded", error=str(error), kept="the one before")
                last_problem = str(error)

    def _changed(self) -> ssl.SSLContext | None:
        try:
            if self._look() == self._in_use:
                return None
        except OSError as error:
            raise _unusable(error.strerror or str(error)) from None
        return self.context()

    def _look(self) -> _Seen:
        settings = self._settings
        paths = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        # Follow links: mounted certificates are updated by replacing a link.
        found = [path.stat() for path in paths if path is not None]
        return tuple((stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in found)


def _required(path: Path | None) -> Path:
    if path is None:
        raise ValueError("there is no ssl_certfile")
    return path


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"The server's certificate cannot be used: {why}.",
        hint="See --server.ssl_certfile, ssl_keyfile, ssl_keyfile_password and ssl_ca_certs.",
    )


HttpFactory = Callable[..., asyncio.Protocol]

_BACKLOG: Final = 2048
_GRACE_SECONDS: Final = 2
_LARGEST_FRAME: Final = 16 * 1024 * 1024
"""Bytes of one message of a WebSocket."""


@dataclass(eq=False, repr=False)
class RunningServer:
    """A running server, made by `serve_api`. `async with` closes it."""

    _server: _Server
    _task: asyncio.Task[None]
    _lifespan: Lifespan
    host: str
    port: int
    _following: asyncio.Task[None] | None
    """Follows the certificates."""

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self._server.config.ssl else 'http'}://{host}:{self.port}"

    async def wait(self) -> None:
        """Waits until the server has stopped; raises what stopped it."""
        await asyncio.shield(self._task)

    async def also_on(
        self, listener: socket.socket, http: HttpFactory | None = None
    ) -> asyncio.AbstractServer:
        """Also serves the application on another socket, until the returned server is closed."""
        loop = asyncio.get_running_loop()
        return await loop.create_server(partial(self._server.protocol, http), sock=listener)

    async def close(self, *, at_once: bool = False) -> None:
        """Gives requests two seconds to finish, cancels the rest, and ends the app's lifespan."""
        self._server.should_exit = True
        self._server.force_exit = at_once
        try:
            if self._following is not None:
                self._following.cancel()
                with suppress(asyncio.CancelledError):
                    await self._following
            await self._task
        finally:
            await self._lifespan.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers and with replaceable certificates."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        super().__init__(config)
        self._listener = listener

    async def use(self, context: ssl.SSLContext) -> None:
        loop = asyncio.get_running_loop()
        # Keep the same kernel socket, so that no new connection is refused meanwhile.
        renewed = await loop.create_server(
            self.protocol, sock=self._listener.dup(), ssl=context, backlog=_BACKLOG
        )
        former, self.servers = self.servers, [renewed]
        self.config.ssl = context
        for server in former:
            server.close()

    def protocol(self, http: HttpFactory | None = None) -> asyncio.Protocol:
        return (http or self.config.http_protocol_class)(  # type: ignore[call-arg]  # uvicorn types the class as any Protocol
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_api(
    app: ASGIApp,
    host: str,
    port: int,
    settings: ServerConfig | None = None,
    *,
    http: HttpFactory | None = None,
    is_guarded: bool = False,
    ping_seconds: float | None = None,
) -> RunningServer:
    """Starts serving `app`; returns once it accepts requests. Raises the limit of open files.

    Args:
        host: a loopback address or "localhost"; any address with a tokens file.
        port: 0 picks a free port.
        settings: the settings that `app` was made with: connection limits, certificates, access
            tokens. None: plain HTTP without limits, for processes on this machine.
        http: makes the protocol of each connection instead.
        is_guarded: `app` itself refuses requests without a token, so any address is allowed.
        ping_seconds: time between two pings of a WebSocket, and for their answer; None: no pings.
    """
    if not is_guarded and (settings is None or settings.tokens_file is None):
        require_loopback(host)
    raise_open_files()
    certificates = None
    config = _configured(app, settings, http, ping_seconds)
    if settings is not None and settings.ssl_certfile is not None:
        certificates = Certificates(settings)
        config.ssl = certificates.context()
    listener = _listen(host, port)
    lifespan = Lifespan(app)
    try:
        await lifespan.start()
    except BaseException:
        listener.close()
        raise
    spare = listener.dup()
    server = _Server(config, spare)
    task = asyncio.create_task(server.serve([listener]), name="http-server")
    task.add_done_callback(lambda _: spare.close())
    port = listener.getsockname()[1]
    following = None
    if certificates is not None:
        following = asyncio.create_task(certificates.follow(server.use), name="certificates")
    running = RunningServer(server, task, lifespan, host, port, following)
    try:
        while not (server.started or task.done()):
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        await running.close()
        raise
    if task.done():
        listener.close()
        await running.close()
        raise ConfigError("The server did not start; its log says why.")
    return running


def _configured(
    app: ASGIApp,
    settings: ServerConfig | None,
    http: HttpFactory | None,
    ping_seconds: float | None,
) -> uvicorn.Config:
    # No server without settings reads the address or scheme of its clients.
    more: dict[str, Any] = {"http": http or JoinedHttp, "ws": "none", "proxy_headers": False}
    if settings is not None:
        more = {
            "http": partial(BoundedHttp, bounds=settings),
            "ws": _websocket,
            "ws_max_size": min(settings.max_body_bytes, _LARGEST_FRAME),
            # OpenEnv's sessions have none, but a limit of silence: a client that trains may not
            # answer a ping.
            "ws_ping_interval": ping_seconds,
            "ws_ping_timeout": ping_seconds,
        }
    config = uvicorn.Config(
        app,
        lifespan="off",
        access_log=False,
        log_config=None,
        timeout_graceful_shutdown=_GRACE_SECONDS,
        server_header=False,
        **more,
    )
    config.load()
    return config


def _websocket(*args: Any, **kwargs: Any) -> asyncio.Protocol:
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    return WebSocketsSansIOProtocol(*args, **kwargs)


def require_loopback(host: str) -> None:
    if not is_loopback(host):
        raise ConfigError(
            f"Without access tokens the server does not listen on {host or 'every address'}.",
            hint="Use 127.0.0.1, and an SSH tunnel to reach it from another machine.",
            host=host,
        )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit TCP_NODELAY; without it, a body waits 40 ms for the ACK of its headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Port {port} of {host} is not available: {error.strerror}.",
            hint="Choose another port, or 0 for any free one.",
        ) from error
    listener.setblocking(False)
    return listener
