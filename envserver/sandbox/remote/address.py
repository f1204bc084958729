"""Where sandboxes are made: by this machine's supervisor, on others, or by a user-supplied
class."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from envserver_records.errors import ConfigError

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True)
class RemoteAddress:
    """Sandbox machines.

    Args:
        urls: their URLs.
        token: access token; never shown.
        ca_certs, certfile: files for TLS; see `SandboxConfig`.
    """

    urls: tuple[str, ...]
    token: str = field(default="", repr=False)
    ca_certs: str = ""
    certfile: str = ""

    @functools.cache  # noqa: B019 - a process has few addresses
    def tls(self) -> ssl.SSLContext | None:
        """Returns the TLS settings; None: those of this machine.
        Raises ConfigError: a file cannot be read.
        """
        if not self.ca_certs and not self.certfile:
            return None
        import ssl

        try:
            context = ssl.create_default_context(cafile=self.ca_certs or None)
            if self.certfile:
                context.load_cert_chain(self.certfile)
        except OSError as error:
            raise ConfigError(
                f"--sandbox.remote_ca_certs or --sandbox.remote_certfile cannot be read: {error}."
            ) from error
        return context


@dataclass(frozen=True)
class ForeignAddress:
    """A user-supplied class; `reference`: package.module:Class, or /path/to/file.py:Class."""

    reference: str


SandboxAddress = str | RemoteAddress | ForeignAddress
"""A path: the socket of a supervisor on this machine."""
