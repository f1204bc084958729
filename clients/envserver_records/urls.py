"""URLs of several equal servers, as users give them."""

from __future__ import annotations

from collections.abc import Sequence

from .errors import ConfigError

Urls = str | Sequence[str]
"""URLs of equal servers; a text separates them with commas."""


def server_urls(urls: Urls) -> tuple[str, ...]:
    """Returns the URLs without repetitions. Raises ConfigError: there is none."""
    listed = urls.split(",") if isinstance(urls, str) else urls
    found = tuple(dict.fromkeys(url for one in listed if (url := one.strip())))
    if not found:
        raise ConfigError("Which server?", hint="Give its URL, such as http://host:8000.")
    return found
