"""The server's certificate, its key and the authorities of its clients, as they lie on disk now.

In: the paths in the settings. Out: a TLS context, and another one whenever the files have changed
and fit together. What holds: files that are half written, do not fit each other or are gone change
nothing; they are read again until they are right, and each reason is logged once.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import structlog
from envserver_records.errors import ConfigError

from ..config import ServerConfig

log = structlog.get_logger(__name__)

LOOK_SECONDS = 5.0
_REQUIRED: Final = {
    "none": ssl.CERT_NONE,
    "optional": ssl.CERT_OPTIONAL,
    "required": ssl.CERT_REQUIRED,
}

_Seen = tuple[tuple[int, int, int], ...]
"""Of each file: when it was written, its size and its number."""


class Certificates:
    """Those of a server; `settings` name a certificate."""

    def __init__(self, settings: ServerConfig) -> None:
        self._settings = settings
        self._in_use: _Seen = ()

    def context(self) -> ssl.SSLContext:
        """For new connections, from the files as they are.

        Raises:
            ConfigError: they cannot be used.
        """
        settings = self._settings
        password = settings.ssl_keyfile_password
        # Some one where there is none: else the terminal would be asked.
        secret = password.get_secret_value() if password else " "
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            seen = self._look()
            context.load_cert_chain(_required(settings.ssl_certfile), settings.ssl_keyfile, secret)
            context.verify_mode = _REQUIRED[settings.ssl_cert_reqs]
            if settings.ssl_ca_certs is not None:
                context.load_verify_locations(settings.ssl_ca_certs)
            changed = self._look() != seen
        except (OSError, ValueError) as error:  # ssl's own are of both kinds
            raise _unusable(getattr(error, "strerror", "") or str(error)) from None
        if changed:
            raise _unusable("it is being written")
        self._in_use = seen
        return context

    async def follow(self, use: Callable[[ssl.SSLContext], Awaitable[None]]) -> None:
        """Gives `use` another context each time that the files have changed, until cancelled."""
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
        """A new context when the files are not those in use. Raises ConfigError: they cannot be."""
        try:
            if self._look() == self._in_use:
                return None
        except OSError as error:
            raise _unusable(error.strerror or str(error)) from None
        return self.context()

    def _look(self) -> _Seen:
        settings = self._settings
        paths = (settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs)
        # Links are followed: where certificates are mounted, a link is what is replaced.
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
