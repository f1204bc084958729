"""Which hosts agents may reach through the server, to which address a name leads, and HTTP heads.

Names are resolved here, never by an agent; an address that is not public is refused after
resolution, and the connection goes to the address that was checked.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec
from envserver_records.errors import ConfigError, UsageError
from envserver_records.timings import EgressEnd, EgressRequest

_LABEL = "[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*")
_PORTS = frozenset({80, 443})
_HIGHEST_PORT = 65535
_RESOLVERS = 4
"""Names that are resolved at the same time."""
_TRANSLATED = tuple(
    map(ipaddress.ip_network, ("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "2001::/32"))
)
"""IPv6 addresses that stand for an IPv4 address, which may be private."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class EgressRefused(UsageError):
    """A request to a host outside is refused; `detail["end"]` says why."""

    kind, status = "egress_refused", 403

    def __init__(self, message: str, end: EgressEnd, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, end=end)
        self.end: EgressEnd = end


@dataclass
class EgressUse:
    """The requests of one attempt, with the first refused ones; bytes in both directions."""

    requests: list[EgressRequest] = field(default_factory=list)
    made: int = 0
    refused: int = 0
    bytes: int = 0
    running: set[asyncio.Task[None]] = field(default_factory=set)


class _Allowed(NamedTuple):
    """`suffix`: subdomains of it; `name`: the host itself. `port`: None: 80 and 443."""

    name: str
    suffix: str
    port: int | None


class EgressRules:
    """The hosts that an environment's agents may reach.

    Args:
        hosts: "api.example.com", with ":8443" for another port than 80 and 443, or
            "*.example.com" for all names below.
        addresses_for_tests: for tests only: addresses of names, neither resolved nor checked.
    """

    def __init__(
        self, hosts: Iterable[str], *, addresses_for_tests: Mapping[str, str] | None = None
    ) -> None:
        if isinstance(hosts, str):
            raise ConfigError('egress is a list of hosts: egress = ["api.example.com"].')
        self._allowed = [_read(host) for host in hosts]
        self._addresses_for_tests = dict(addresses_for_tests or {})
        # Its own threads: slow answers must not take those that all of the server shares.
        self._resolving = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="egress-dns")

    def check(self, host: str, port: int) -> None:
        """Raises EgressRefused if the host, or the port at it, is not on the list."""
        named = [
            rule
            for rule in self._allowed
            if (host.endswith(rule.suffix) if rule.suffix else host == rule.name)
        ]
        if not named:
            raise EgressRefused(
                f"The host {host[:100]!r} is not on this environment's list.",
                "host",
                hint="Environment.egress lists the hosts that agents may reach.",
            )
        if not any(port in _PORTS if rule.port is None else port == rule.port for rule in named):
            raise EgressRefused(f"Port {port} of {host[:100]!r} may not be reached.", "port")

    async def addresses(self, host: str, port: int) -> list[str]:
        if host in self._addresses_for_tests:
            return [self._addresses_for_tests[host]]
        loop = asyncio.get_running_loop()
        try:
            ask = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await loop.run_in_executor(self._resolving, ask)
        except (OSError, UnicodeError):
            raise EgressRefused(f"There is no host {host[:100]!r}.", "unknown_host") from None
        addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
        public = [address for address in addresses if is_public(address)]
        if not public:
            raise EgressRefused(f"{host[:100]!r} does not resolve to a public address.", "address")
        return public


def is_public(address: str) -> bool:
    """Whether an address is not of this machine, its neighbours or its cloud's services."""
    try:
        known: Address = ipaddress.ip_address(address)
    except ValueError:
        return False  # with a zone, or none at all
    if isinstance(known, ipaddress.IPv6Address):
        if known.ipv4_mapped is not None:
            known = known.ipv4_mapped
        elif known.is_site_local or any(known in network for network in _TRANSLATED):
            return False
    return known.is_global and not (known.is_multicast or known.is_reserved)


def host_and_port(text: str, default: int | None) -> tuple[str, int]:
    """Reads "host:port", where only `default` may be left out; the host in lower case."""
    host, colon, port = text.partition(":")
    host = host.lower().removesuffix(".")
    if _NAME.fullmatch(host) is None:
        raise ValueError("not a host")
    if not colon:
        if default is None:
            raise ValueError("no port")
        return host, default
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= _HIGHEST_PORT):
        raise ValueError("not a port")
    return host, int(port)


def _read(entry: str) -> _Allowed:
    text = str(entry).strip()
    below = text.startswith("*.")
    try:
        host, port = host_and_port(text[2:] if below else text, 0)
    except ValueError:
        raise ConfigError(
            f"egress: {text[:100]!r} is not a host.",
            hint='Write "api.example.com", "api.example.com:8443" or "*.example.com".',
        ) from None
    return _Allowed("" if below else host, f".{host}" if below else "", port or None)


MOST_HEAD_BYTES = 32 * 1024
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_TARGET = re.compile(rb"[\x21-\x7e]+")
_STATUS = re.compile(rb"HTTP/1\.[01] ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*)?")
_OF_THE_CONNECTION = {
    *(b"connection", b"proxy-connection", b"keep-alive", b"proxy-authorization", b"te"),
    *(b"proxy-authenticate", b"trailer", b"upgrade", b"expect", b"host"),
}
_FIRST_BYTES = 24
"""Enough bytes to tell a request to a proxy from any other."""

Headers = list[tuple[bytes, bytes]]


class BadHead(Exception):
    """The head of a message cannot be passed on; the text says why."""


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a proxy.

    Args:
        key: of the attempt, from its credentials; "" without any.
        path: without its query; "" of a tunnel.
        outgoing: the head for the host; b"" of a tunnel.
    """

    method: str
    host: str
    port: int
    key: str
    path: str = ""
    body_bytes: int = 0
    outgoing: bytes = b""

    @property
    def is_tunnel(self) -> bool:
        return self.method == "CONNECT"


def asks_a_proxy(first: bytes) -> bool | None:
    """Returns whether a connection that begins so asks for another host; None: unknown yet."""
    method, space, target = first.partition(b" ")
    if not space:
        return None if len(first) < _FIRST_BYTES and _TOKEN.fullmatch(method or b"x") else False
    if method == b"CONNECT":
        return True
    scheme = target[: len(b"http://")].lower()
    if not b"http://".startswith(scheme):
        return False
    return True if scheme == b"http://" else None


def read_request(head: bytes) -> RequestHead:
    first, headers = _lines(head)
    parts = first.split(b" ")
    if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadHead("The request line is malformed.")
    method, target, _ = parts
    if _TOKEN.fullmatch(method) is None or _TARGET.fullmatch(target) is None:
        raise BadHead("The request line is malformed.")
    key = _key(headers)
    if method == b"CONNECT":
        try:
            host, port = host_and_port(target.decode(), None)
        except ValueError:
            raise BadHead("CONNECT names no host and port.") from None
        return RequestHead(method="CONNECT", host=host, port=port, key=key)
    return _plain(method, target, headers, key)


def read_answer(head: bytes) -> tuple[int, bytes]:
    """Returns the status of a host's answer, and its head for the agent: then it closes."""
    first, headers = _lines(head)
    found = _STATUS.fullmatch(first)
    if found is None:
        raise BadHead("The host's answer is not HTTP.")
    return int(found[1]), _head(first, headers)


def _plain(method: bytes, target: bytes, headers: Headers, key: str) -> RequestHead:
    try:
        url = urlsplit(target.decode())
        host, port = host_and_port(url.netloc, 80)
    except ValueError:
        raise BadHead("The address names no host.") from None
    if url.scheme.lower() != "http" or url.fragment:
        raise BadHead("Only http:// addresses are forwarded; use CONNECT for others.")
    path = url.path or "/"
    request_target = path.encode() + (b"?" + url.query.encode() if url.query else b"")
    name = host.encode() + (b":%d" % port if port != 80 else b"")
    first = b"%b %b HTTP/1.1" % (method, request_target)
    return RequestHead(
        method=method.decode(),
        host=host,
        port=port,
        key=key,
        path=path,
        body_bytes=_body_bytes(headers),
        outgoing=_head(first, headers, host=name),
    )


def _lines(head: bytes) -> tuple[bytes, Headers]:
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    headers = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or _TOKEN.fullmatch(name) is None or _VALUE.fullmatch(value) is None:
            raise BadHead("A header is malformed.")
        headers.append((name, value.strip(b" \t")))
    return first, headers


def _head(first: bytes, headers: Headers, *, host: bytes = b"") -> bytes:
    """Returns a head without the headers that concern one connection only."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    dropped = _OF_THE_CONNECTION | {name.strip().lower() for name in named.split(b",")}
    # Without its length, a body would be read as the next request.
    dropped -= {b"content-length"}
    kept = [(name, value) for name, value in headers if name.lower() not in dropped]
    if host:
        kept.insert(0, (b"Host", host))
    kept.append((b"Connection", b"close"))
    return b"\r\n".join([first, *(b"%b: %b" % header for header in kept), b"", b""])


def _body_bytes(headers: Headers) -> int:
    if any(name.lower() == b"transfer-encoding" for name, _ in headers):
        raise BadHead("A body without a known length is not forwarded: send Content-Length.")
    lengths = {value for name, value in headers if name.lower() == b"content-length"}
    if not lengths:
        return 0
    (length, *others) = lengths
    if others or not (length.isdigit() and len(length) <= 12):
        raise BadHead("Content-Length is malformed.")
    return int(length)


def _key(headers: Headers) -> str:
    """Returns the password (or else the user) of `Proxy-Authorization: Basic`."""
    for name, value in headers:
        scheme, _, secret = value.partition(b" ")
        if name.lower() == b"proxy-authorization" and scheme.lower() == b"basic":
            try:
                user, _, password = base64.b64decode(secret.strip(), validate=True).partition(b":")
                return (password or user).decode()
            except (binascii.Error, UnicodeDecodeError):
                return ""
    return ""
