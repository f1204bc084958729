"""URLs of several equal servers, as users give them, and the access token for them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from .errors import ConfigError

TOKEN_VARIABLE = "ENVSERVER_TOKEN"
TRUST_HINT = "Put its authority's certificate into a file, and name that file by SSL_CERT_FILE."
"""For a server whose certificate is signed by itself or by an authority of your own."""
Urls = str | Sequence[str]
"""URLs of equal servers; a text separates them with commas."""


def server_urls(urls: Urls) -> tuple[str, ...]:
    """Returns the URLs without repetitions. Raises ConfigError: there is none."""
    listed = urls.split(",") if isinstance(urls, str) else urls
    found = tuple(dict.fromkeys(url for one in listed if (url := one.strip())))
    if not found:
        raise ConfigError("Which server?", hint="Give its URL, such as http://host:8000.")
    return found


def authorization(token: str | None = None) -> dict[str, str]:
    """Returns the authorization header for `token`. Default: the environment variable's token."""
    known = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    return {"authorization": f"Bearer {known}"} if known else {}
