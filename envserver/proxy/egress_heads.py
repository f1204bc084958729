"""Heads of HTTP messages that pass through the egress proxy. Pure.

In: the bytes up to the empty line. Out: what the request asks for, and the head to send on. What
holds: one request for each connection, to one host, whose body has a known length: so nothing can
be smuggled behind it to another name at the same address.
"""

from __future__ import annotations

import base64
import binascii
import re
from urllib.parse import urlsplit

import msgspec

from .egress_rules import host_and_port

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
    """It is not the head of a message that can be passed on; the text says why."""


class RequestHead(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a proxy.

    Args:
        key: of the attempt, from its credentials; "" without any.
        path: without its query; "" of a tunnel.
        body_bytes: length of its body.
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
    """Returns whether a connection that begins with `first` asks for another host; None: unknown
    yet."""
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
    """Reads the head of a request to a proxy, up to and with its empty line.
    Raises BadHead: it cannot be passed on.
    """
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
    """Returns the status of a host's answer, and its head for the agent: the connection ends after
    it.
    Raises BadHead: it is not the head of an answer.
    """
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
    asked = path.encode() + (b"?" + url.query.encode() if url.query else b"")
    name = host.encode() + (b":%d" % port if port != 80 else b"")
    first = b"%b %b HTTP/1.1" % (method, asked)
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
    """Returns a head without what is of one connection only."""
    named = b",".join(value for name, value in headers if name.lower() == b"connection")
    dropped = _OF_THE_CONNECTION | {one.strip().lower() for one in named.split(b",")}
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
