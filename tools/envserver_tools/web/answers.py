"""Answers of web servers, limits of their size, and the error of a provider that failed.

Apart from what reads them, so that processes without network access need no HTTP client.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Raw:
    """A web server's answer.

    Args:
        url: the address after all redirects.
        error: the text for the agent instead of a page; "" if there is a page.
        lasting: the answer will be the same tomorrow.
    """

    url: str
    status: int
    content_type: str
    body: bytes
    error: str = ""
    lasting: bool = True

    @cached_property
    def digest(self) -> str:
        """The same for equal answers."""
        facts = json.dumps([self.url, self.status, self.content_type, self.error])
        return hashlib.sha256(facts.encode() + b"\0" + self.body).hexdigest()


class ProviderFailed(Exception):
    """A search provider does not answer as it should: the server's trouble, not the agent's."""


@dataclass(frozen=True)
class FetchLimits:
    """Limits of one page. `seconds` holds for all its redirects together."""

    seconds: float = 30.0
    bytes: int = 8 << 20
    redirects: int = 5
