"""Decides which addresses a page reader may reach, and normalises addresses.

A model names the pages, so no address may lead into the server's own network: not by number, not by
a name, not after a redirect. Names are resolved once, checked, and the connection goes to the
checked address.
"""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

MOST_URL_CHARACTERS = 2000
_NUMBER = re.compile(r"(0x[0-9a-f]*|[0-9]+)\Z", re.I)
_UNICAST = ipaddress.ip_network("2000::/3")
"""All assigned public addresses; other ranges contain alternative forms of private addresses."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PORTS = {"http": 80, "https": 443}
_SAFE = "%/:=&?~#+!$,;'@()*[]|"


class BadAddress(ValueError):
    """The address may not be read; the message says why."""


class PrivateAddress(OSError):
    """The name resolves to an address outside of the public internet."""


def normal_url(url: str) -> str:
    """The one way in which `url` is written: no fragment, no default port, no tracking words.
    Raises BadAddress: it is not an address of a web page.
    """
    url = url.strip()
    if len(url) > MOST_URL_CHARACTERS:
        raise BadAddress("the address is too long")
    if "://" not in url:
        url = f"https://{url}"
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").rstrip(".")
        if not host.isascii():
            host = host.encode("idna").decode()
    except (ValueError, UnicodeError) as error:
        raise BadAddress(f"it is not an address: {error}") from error
    if parts.scheme not in _PORTS:
        raise BadAddress("only http and https can be read")
    if not host or any(character.isspace() for character in host):
        raise BadAddress("it names no host")
    if parts.username is not None or parts.password is not None:
        raise BadAddress("an address with a user name is not read")
    host = f"[{host}]" if ":" in host else host
    place = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
    query = parts.query
    if "utm_" in query:
        pairs = parse_qsl(query, keep_blank_values=True)
        query = urlencode([pair for pair in pairs if not pair[0].startswith("utm_")])
    path = quote(_without_dots(parts.path) or "/", safe=_SAFE)
    return urlunsplit((parts.scheme, place, path, quote(query, safe=_SAFE), ""))


def _without_dots(path: str) -> str:
    """The place that `path` leads to by its steps `.` and `..`, as clients walk them themselves."""
    steps: list[str] = []
    parts = re.sub("%2e", ".", path, flags=re.I).split("/")
    for step in parts:
        if step == ".." and len(steps) > 1:
            steps.pop()
        if step not in (".", ".."):
            steps.append(step)
    if parts[-1] in (".", ".."):
        steps.append("")
    return "/".join(steps)


def check_literal(host: str) -> None:
    """Refuses a host that is a number of a private network, or a number in disguise.
    Raises PrivateAddress: it is one.
    """
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        if _NUMBER.match(host.rstrip(".").rpartition(".")[2]):
            raise PrivateAddress(f"{host} is not a valid address") from None
        return
    if not is_public(address):
        raise PrivateAddress(f"{host} is not a public address")


def is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Returns whether it is public, even if it is embedded in another address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if inner is None and address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None or address not in _UNICAST:
            return False
    return address.is_global and not address.is_multicast
