"""HTTP proxies of the environment, for all clients of httpx.

In: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, in upper or lower case, and requests. Out: the
requests, sent through the proxy or directly. What holds: loopback and private addresses, and names
of the own network, are asked directly; NO_PROXY takes names, addresses and CIDR blocks; an error
names the proxy, and SSL_CERT_FILE where a certificate is not trusted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from typing import Any, Final, Generic, TypeVar
from urllib.request import (  # type: ignore[attr-defined]
    getproxies_environment,
    proxy_bypass_environment,
)

import httpx

from .errors import ConfigError
from .urls import TRUST_HINT

T = TypeVar("T", httpx.HTTPTransport, httpx.AsyncHTTPTransport)

_OWN_NETWORKS: Final = (
    *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
    *("100.64.0.0/10", "0.0.0.0/32", "::/127", "fc00::/7", "fe80::/10"),
)
_OWN_NAMES: Final = (".localhost", ".local", ".internal")
_OF_GATEWAYS: Final = frozenset({403, 407, 502, 503, 504})


def proxy_of(url: httpx.URL | str) -> str | None:
    """Returns the address of the proxy for a request; None: there is none.

    Raises:
        ConfigError: the variable names no proxy that can be used.
    """
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
            f"The proxy {_shown(proxy)} ({variable}) needs the package socksio.",
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


class _Transports(Generic[T]):
    """Makes a transport for each proxy when it is first needed.

    Args:
        options: as for httpx.HTTPTransport.
    """

    def __init__(self, kind: type[T], options: dict[str, Any]) -> None:
        self._kind: type[T] = kind
        self._options = options
        self.made: dict[str | None, T] = {}

    def by(self, proxy: str | None) -> T:
        if proxy not in self.made:
            self.made[proxy] = self._kind(proxy=proxy, **self._options)
        return self.made[proxy]


class ProxyTransport(httpx.BaseTransport):
    """Sends requests as the environment says. `options`: as for httpx.HTTPTransport."""

    def __init__(self, **options: Any) -> None:
        self._transports = _Transports(httpx.HTTPTransport, options)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx.BaseTransport."""
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
    """`ProxyTransport` for asyncio."""

    def __init__(self, **options: Any) -> None:
        self._transports = _Transports(httpx.AsyncHTTPTransport, options)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """See httpx.AsyncBaseTransport."""
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
    """Returns whether the proxy seems to have answered: the servers send JSON."""
    is_json = "json" in answer.headers.get("content-type", "")
    return answer.status_code in _OF_GATEWAYS and not is_json


@contextmanager
def _naming(proxy: str | None) -> Iterator[None]:
    try:
        yield
    except httpx.TransportError as error:
        why = str(error) or type(error).__name__
        if proxy is not None:
            why = f"{why} (through the proxy {_shown(proxy)})"
        if "CERTIFICATE_VERIFY_FAILED" in why:
            why = f"{why}. {TRUST_HINT}"
        raise type(error)(why) from error


def _shown(proxy: str) -> str:
    """Returns the address without a user's name and password."""
    return str(httpx.URL(proxy).copy_with(username=None, password=None))
