"""The server's TLS certificate, its key and the CAs of its clients, reloaded when files change.

In: the paths in the settings. Out: a TLS context, and a new one whenever the files have changed
and match. What holds: files that are incomplete, missing or do not match change nothing; they are
read again until they are valid, and each reason is logged once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
from envserver_records.errors import ConfigError

from ..server_config import ServerConfig

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
    """The certificates of a server; `settings` must name a certificate."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self._in_use: _Seen = ()

    def context(self) -> ssl.SSLContext:
        """Returns a TLS context for new connections, from the current files.
        Raises ConfigError: the files cannot be used.
        """
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
        """Returns a new context if the files have changed, else None."""
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
        return tuple((one.st_mtime_ns, one.st_size, one.st_ino) for one in found)


def _required(path: Path | None) -> Path:
    if path is None:
        raise ValueError("there is no ssl_certfile")
    return path


def _unusable(why: str) -> ConfigError:
    return ConfigError(
        f"The server's certificate cannot be used: {why}.",
        hint="See --server.ssl_certfile, ssl_keyfile, ssl_keyfile_password and ssl_ca_certs.",
    )
