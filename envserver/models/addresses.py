"""Which addresses may be those of engines that are registered over HTTP.

Whoever may register an engine makes the server send requests there, with prompts. So services of
the cloud (link-local addresses and the like) are never engines, this machine is one only where
nobody else can register, and only hosts that the settings allow get the engines' key. Names are
resolved again for each connection, and each address is checked then.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Collection, Sequence
from typing import Final
from urllib.parse import urlsplit

from envserver_records.errors import InputError

_SERVICES: Final = frozenset(
    map(ipaddress.ip_address, ("100.100.100.200", "168.63.129.16", "fd00:ec2::254"))
)
"""Metadata services of clouds that are not at link-local addresses."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class EngineAddresses:
    """The hosts at which engines may be registered.

    Args:
        allow: see `EnginesConfig.allow`.
        trusted: addresses of engines in the settings; their hosts are not checked at their ports.
        this_machine: whether loopback addresses may be engines that `allow` does not name.
    """

    def __init__(
        self, allow: Sequence[str], trusted: Collection[str] = (), *, this_machine: bool = True
    ) -> None:
        self._names: list[str] = []
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for host in allow:
            try:
                self._networks.append(ipaddress.ip_network(host, strict=False))
            except ValueError:
                self._names.append(host.lower())
        self._trusted = {_place(url) for url in trusted}
        self._this_machine = this_machine

    def trust(self, url: str) -> None:
        """Notes an address that the owner of this process names elsewhere than in its settings."""
        self._trusted.add(_place(url))

    def gets_key(self, url: str) -> bool:
        """Returns whether the settings name the host of `url`, so that it may have the key."""
        return not self.is_checked(*_place(url))

    async def check(self, url: str) -> None:
        """Raises InputError: there may be no engine at this address."""
        host, port = _place(url)
        if not self.is_checked(host, port):
            return
        if self._names or self._networks:
            try:
                ipaddress.ip_address(host)
            except ValueError:
                pass  # a name: its addresses may be in an allowed network
            else:
                raise _refused(host)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise InputError(f"There is no host {host[:100]!r}.", place="url") from None
        if not all(self.may_be(str(one[4][0])) for one in found):
            raise _refused(host)

    def may_be(self, address: str) -> bool:
        """Returns whether a host that the settings do not name may have this address."""
        known = _plain(address)
        if known is None:
            return False
        if self._names or self._networks:
            return any(known in network for network in self._networks)
        if known.is_loopback:
            return self._this_machine
        is_service = known.is_link_local or known in _SERVICES
        return not (is_service or known.is_multicast or known.is_unspecified or known.is_reserved)

    def is_checked(self, host: str, port: int) -> bool:
        """Returns whether addresses of `host` are checked: the settings do not name it."""
        return not ((host, port) in self._trusted or self._names_host(host))

    def _names_host(self, host: str) -> bool:
        host = host.lower().removesuffix(".")
        known = _plain(host)
        if known is not None:
            return any(known in network for network in self._networks)
        return any(
            host.endswith(name[1:]) if name.startswith("*.") else host == name
            for name in self._names
        )


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


def _plain(address: str) -> Address | None:
    """Returns an address, of IPv4 where it is mapped to IPv6; None: it is none."""
    try:
        known: Address = ipaddress.ip_address(address)
    except ValueError:
        return None
    mapped = known.ipv4_mapped if isinstance(known, ipaddress.IPv6Address) else None
    return mapped or known


def _refused(host: str) -> InputError:
    return InputError(
        f"No engine may be registered at {host[:100]!r}.",
        hint="--engines.allow lists the hosts at which engines may be registered.",
        place="url",
    )
