"""HTTP clients for several equal servers: what one cannot answer, the next one is asked.

Invariants: with one URL these are httpx's clients; with several, a request goes to each server at
most once, beginning with the one that answered last, and the caller's retries begin another round.
So each request must be harmless when repeated: by id, by key or by sequence number. Proxies come
from HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY (names, addresses, CIDR blocks); loopback,
private addresses and names of the own network are asked directly.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from typing import Any, Final, Generic, TypeVar
from urllib.request import (  # type: ignore[attr-defined]
    getproxies_environment,
    proxy_bypass_environment,
)

import httpx
import msgspec

from .errors import ConfigError
from .http_errors import TRUST_HINT, Urls, server_urls
from .waiting import cancel_and_wait

log = logging.getLogger(__name__)

Transport = TypeVar("Transport", httpx.HTTPTransport, httpx.AsyncHTTPTransport)

_OWN_NETWORKS: Final = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
    *("100.64.0.0/10", "0.0.0.0/32", "::/127", "fc00::/7", "fe80::/10"),
)
_OWN_NAMES: Final = (".localhost", ".local", ".internal")
_OF_GATEWAYS: Final = frozenset({403, 407, 502, 503, 504})


def proxy_of(url: httpx.URL | str) -> str | None:
    """Returns the address of the proxy for a request; None: there is none."""
    url = httpx.URL(url)
    named = getproxies_environment()
    kind = url.scheme if named.get(url.scheme) else "all"
    proxy = named.get(kind)
    if not proxy or _is_direct(url, named):
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    variable = f"{kind.upper()}_PROXY"
    try:
        chosen = httpx.Proxy(proxy)
    except (ValueError, httpx.InvalidURL):
        hint = "Write http://host:port, or socks5://host:port."
        raise ConfigError(f"{variable} is not the address of a proxy.", hint=hint) from None
    if chosen.url.scheme.startswith("socks") and find_spec("socksio") is None:
        raise ConfigError(
            f"The proxy {shown_url(proxy)} ({variable}) needs the package socksio.",
            hint="pip install 'httpx[socks]', or put the server's name into NO_PROXY.",
        )
    return proxy


def _is_direct(url: httpx.URL, named: dict[str, str]) -> bool:
    port = url.port or (443 if url.scheme == "https" else 80)
    if proxy_bypass_environment(f"{url.host}:{port}", named):
        return True
    try:
        address = ip_address(url.host)
    except ValueError:
        name = url.host.rstrip(".")
        return "." not in name or name.endswith(_OWN_NAMES)
    address = getattr(address, "ipv4_mapped", None) or address
    for block in (*_OWN_NETWORKS, *named.get("no", "").split(",")):
        try:
            if address in ip_network(block.strip(), strict=False):
                return True
        except ValueError:  # a name
            continue
    return False


class _Transports(Generic[Transport]):
    """Makes a transport for each proxy when it is first needed."""

    def __init__(self, kind: type[Transport], options: dict[str, Any]) -> None:
        self._kind: type[Transport] = kind
        self._options = options
        self.made: dict[str | None, Transport] = {}

    def by(self, proxy: str | None) -> Transport:
        if proxy not in self.made:
            self.made[proxy] = self._kind(proxy=proxy, **self._options)
        return self.made[proxy]


class ProxyTransport(httpx.BaseTransport):
    """Sends requests as the environment says. `options`: as for httpx.HTTPTransport."""

    def __init__(self, **options: Any) -> None:
        self._transports = _Transports(httpx.HTTPTransport, options)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        proxy = proxy_of(request.url)
        with _naming(proxy):
            answer = self._transports.by(proxy).handle_request(request)
            if proxy and _is_of_gateway(answer):
                answer.close()
                raise httpx.ProxyError(f"HTTP {answer.status_code}")
        return answer

    def close(self) -> None:
        for transport in self._transports.made.values():
            transport.close()


class AsyncProxyTransport(httpx.AsyncBaseTransport):
    def __init__(self, **options: Any) -> None:
        self._transports = _Transports(httpx.AsyncHTTPTransport, options)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        proxy = proxy_of(request.url)
        with _naming(proxy):
            answer = await self._transports.by(proxy).handle_async_request(request)
            if proxy and _is_of_gateway(answer):
                await answer.aclose()
                raise httpx.ProxyError(f"HTTP {answer.status_code}")
        return answer

    async def aclose(self) -> None:
        for transport in self._transports.made.values():
            await transport.aclose()


def _is_of_gateway(answer: httpx.Response) -> bool:
    """Whether the proxy seems to have answered: the servers send JSON."""
    is_json = "json" in answer.headers.get("content-type", "")
    return answer.status_code in _OF_GATEWAYS and not is_json


@contextmanager
def _naming(proxy: str | None) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
        if proxy is not None:
            why = f"{why} (through the proxy {shown_url(proxy)})"
        if "CERTIFICATE_VERIFY_FAILED" in why:
            why = f"{why}. {TRUST_HINT}"
        raise type(error)(why) from error


T = TypeVar("T")

_CANNOT_NOW: Final = frozenset({502, 503, 504})
"""The server can do nothing at the moment, and has done nothing."""
_CONNECT_SECONDS: Final = 5.0
_ALIVE_SECONDS: Final = 3.0


class NoServerAnswered(httpx.TransportError):
    """No server could answer; the message says for each one why."""


class ServersClient(httpx.Client):
    """An `httpx.Client` for one server, or for several equal ones.

    Args:
        urls: the servers; the first one is asked first.
        verify: how to verify certificates; True: as SSL_CERT_FILE or the system says.
        transport: unset: through the proxies of the environment.
        more: as for `httpx.Client`.
    """

    def __init__(
        self,
        urls: Urls,
        *,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.BaseTransport | None = None,
        **more: Any,
    ) -> None:
        self._servers = _Servers(server_urls(urls))
        transport = transport or ProxyTransport(verify=verify)
        super().__init__(base_url=self._servers.urls[0], transport=transport, **more)

    def send(self, request: httpx.Request, *, stream: bool = False, **how: Any) -> httpx.Response:
        attempts = self._servers.round(request, self.base_url)
        if attempts is None:
            return super().send(request, stream=stream, **how)
        for server in attempts:
            try:
                answer = super().send(request, stream=stream, **how)
            except httpx.TransportError as error:
                attempts.failed(server, error)
                continue
            if answer.status_code not in _CANNOT_NOW:
                return answer
            answer.read()
            attempts.failed(server, answer)
        raise attempts.error()


class AsyncServersClient(httpx.AsyncClient):
    """An `httpx.AsyncClient` for one server, or for several equal ones.

    Of several, a server that is silent for `quiet_seconds` is asked whether it is alive (GET
    /healthz), so that a frozen one costs seconds even where the answer may take a minute.
    """

    quiet_seconds = 3.0

    def __init__(
        self,
        urls: Urls,
        *,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
        **more: Any,
    ) -> None:
        self._servers = _Servers(server_urls(urls))
        transport = transport or AsyncProxyTransport(verify=verify)
        super().__init__(base_url=self._servers.urls[0], transport=transport, **more)

    async def send(
        self, request: httpx.Request, *, stream: bool = False, **how: Any
    ) -> httpx.Response:
        attempts = self._servers.round(request, self.base_url)
        if attempts is None:
            return await super().send(request, stream=stream, **how)
        for server in attempts:
            try:
                answer = await self._while_alive(
                    server, super().send(request, stream=stream, **how)
                )
                if answer.status_code not in _CANNOT_NOW:
                    if stream:
                        self._watch(server, answer)
                    return answer
                await answer.aread()
            except httpx.TransportError as error:
                attempts.failed(server, error)
                continue
            attempts.failed(server, answer)
        raise attempts.error()

    def _watch(self, server: httpx.URL, answer: httpx.Response) -> None:
        body = answer.stream
        assert isinstance(body, httpx.AsyncByteStream)
        answer.stream = _WatchedBody(
            body, lambda reading: self._while_alive(server, reading), self._servers, server
        )

    async def _while_alive(self, server: httpx.URL, answering: Awaitable[T]) -> T:
        task = asyncio.ensure_future(answering)
        try:
            while not (await asyncio.wait({task}, timeout=self.quiet_seconds))[0]:
                if not await self._is_alive(server) and not task.done():
                    raise httpx.ReadTimeout("It is silent and does not answer /healthz.")
            return task.result()
        finally:
            if not task.done():
                await cancel_and_wait(task)

    async def _is_alive(self, server: httpx.URL) -> bool:
        request = self.build_request("GET", server.join("healthz"), timeout=_ALIVE_SECONDS)
        try:
            await super().send(request)
        except httpx.TransportError:
            return False
        return True


@dataclass(eq=False)
class _WatchedBody(httpx.AsyncByteStream):
    """The body of an answer, such as an endless stream, read while its server is alive."""

    body: httpx.AsyncByteStream
    while_alive: Callable[[Awaitable[bytes | None]], Awaitable[bytes | None]]
    servers: _Servers
    server: httpx.URL

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async with aclosing(_parts(self.body)) as parts:
            try:
                while (part := await self.while_alive(anext(parts, None))) is not None:
                    yield part
            except httpx.TransportError:
                self.servers.leave(self.server)
                raise

    async def aclose(self) -> None:
        await self.body.aclose()


async def _parts(body: httpx.AsyncByteStream) -> Any:
    async for part in body:
        yield part


class _Servers:
    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls
        self._bases = [httpx.URL(url if url.endswith("/") else f"{url}/") for url in urls]

    def round(self, request: httpx.Request, base: httpx.URL) -> _Round | None:
        """The servers to try; None: there is one server, or the request is for another place."""
        if len(self._bases) == 1 or not str(request.url).startswith(str(base)):
            return None
        return _Round(self, list(self._bases), request, base)

    def leave(self, server: httpx.URL) -> None:
        if self._bases[0] == server:
            self._bases.append(self._bases.pop(0))


class _Round:
    def __init__(
        self, servers: _Servers, bases: Sequence[httpx.URL], request: httpx.Request, base: httpx.URL
    ) -> None:
        self._servers = servers
        self._bases = bases
        self._request = request
        self._path = request.url.raw_path.removeprefix(base.raw_path)
        self._why: list[str] = []
        timeouts = dict(request.extensions.get("timeout", {}))
        connect = timeouts.get("connect")
        timeouts["connect"] = min(connect or _CONNECT_SECONDS, _CONNECT_SECONDS)
        request.extensions = {**request.extensions, "timeout": timeouts}

    def __iter__(self) -> Iterator[httpx.URL]:
        for base in self._bases:
            self._request.url = base.copy_with(raw_path=base.raw_path + self._path)
            self._request.headers["host"] = base.netloc.decode("ascii")
            yield base

    def failed(self, server: httpx.URL, problem: Exception | httpx.Response) -> None:
        self._servers.leave(server)
        self._why.append(f"{shown_url(server)}: {_reason(problem)}")
        log.info("trying another server, because of %s", self._why[-1])

    def error(self) -> NoServerAnswered:
        return NoServerAnswered("; ".join(self._why))


def shown_url(url: httpx.URL | str) -> str:
    return str(httpx.URL(url).copy_with(username=None, password=None)).rstrip("/")


def _reason(problem: Exception | httpx.Response) -> str:
    if isinstance(problem, Exception):
        return str(problem) or type(problem).__name__
    try:
        detail = msgspec.json.decode(problem.content)["detail"]
    except (msgspec.DecodeError, KeyError, TypeError):
        detail = problem.text[:200]
    return f"HTTP {problem.status_code}: {detail}"
