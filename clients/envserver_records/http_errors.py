"""Turns failed HTTP answers of the server into typed errors; reads lists of servers' URLs.

A body `{"error": {"message", "code", "limit" or "param"}}` gives the error that the server raised;
any other, one by the status.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from typing import Any, Final

import msgspec

from .errors import (
    AgentError,
    ConfigError,
    EngineError,
    EngineGarbage,
    EnvserverError,
    InputError,
    LimitReached,
    SandboxError,
    SandboxLost,
    ServiceError,
    by_kind,
)

CONTEXT_IS_FULL: Final = "context_length_exceeded"
"""OpenAI's code for a prompt that is too long for the model."""
_MAX_TEXT_BYTES: Final = 2000
_CONFLICT: Final = 409
_MAX_PAGE: Final = 8192
_MAX_WORDS: Final = 200
_PAGE: Final = re.compile(
    r"\ufeff?\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(!doctype html|html|head|body)\b",
    re.IGNORECASE | re.DOTALL,
)
_TITLE: Final = re.compile(r"<title[^>]*>\s*([^<\s][^<]*)", re.IGNORECASE)
_TAGS: Final = re.compile(r"<(script|style)\b.*?(</\1>|$)|<[^>]*(>|$)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ErrorReader:
    """The meaning of failed answers of one kind of endpoint.

    Args:
        server_error: status 500 and above, and those in `server_statuses`.
        client_error: any other status.
        unreadable: the body has another form.
        unreadable_client_error: the same, with a status of `client_error`; None: `unreadable`.
        by_code: errors that the body's `code` names, besides LimitReached.
    """

    endpoint: str
    server_error: type[EnvserverError]
    client_error: type[EnvserverError]
    unreadable: type[EnvserverError]
    unreadable_client_error: type[EnvserverError] | None = None
    by_code: Mapping[str, type[EnvserverError]] = field(default_factory=dict)
    server_statuses: frozenset[int] = frozenset()

    def read(self, status: int, body: bytes) -> EnvserverError:
        is_servers = status >= 500 or status in self.server_statuses
        problem = _problem(body)
        if problem is None:
            kind = self.unreadable
            if not is_servers and self.unreadable_client_error is not None:
                kind = self.unreadable_client_error
            text = without_page(body[:_MAX_TEXT_BYTES].decode(errors="replace"))
            return kind(f"{self.endpoint} answered HTTP {status}: {text}", status=status)
        message, code = str(problem["message"]), str(problem.get("code"))
        if code == LimitReached.kind:
            limit = problem.get("limit") or problem.get("param")
            return LimitReached(message, **({"limit": limit} if limit else {}))
        if code == CONTEXT_IS_FULL:
            return LimitReached(message, limit="context")
        if code in self.by_code:
            return self.by_code[code](message, status=status)
        return (self.server_error if is_servers else self.client_error)(message, status=status)


MODEL: Final = ErrorReader(
    endpoint="The model's endpoint",
    server_error=EngineError,
    client_error=AgentError,
    unreadable=EngineGarbage,
    unreadable_client_error=AgentError,
    by_code=by_kind(LimitReached, EngineError, ServiceError),
)

SANDBOX: Final = ErrorReader(
    endpoint="The server",
    server_error=SandboxLost,
    client_error=InputError,
    unreadable=SandboxLost,
    by_code=by_kind(SandboxError),
    server_statuses=frozenset({_CONFLICT}),
)

SERVICE: Final = ErrorReader(
    endpoint="The server",
    server_error=ServiceError,
    client_error=InputError,
    unreadable=ServiceError,
    server_statuses=frozenset({_CONFLICT}),
)


def without_page(text: str) -> str:
    """Returns the title or the first words of an HTML page, such as a gateway's; else `text`."""
    if not _PAGE.match(text):
        return text
    text = text[:_MAX_PAGE]
    title = _TITLE.search(text)
    words = " ".join(unescape(title[1] if title else _TAGS.sub(" ", text)).split())
    return words[:_MAX_WORDS] or "an HTML page"


def _problem(body: bytes) -> dict[str, Any] | None:
    try:
        problem = msgspec.json.decode(body)["error"]
    except (msgspec.DecodeError, KeyError, TypeError, RecursionError):
        return None
    return problem if isinstance(problem, dict) and "message" in problem else None


TOKEN_VARIABLE = "ENVSERVER_TOKEN"
TRUST_HINT = "Put its authority's certificate into a file, and name that file by SSL_CERT_FILE."
"""For a server whose certificate is signed by itself or by an authority of your own."""
Urls = str | Sequence[str]
"""URLs of equal servers; a text separates them with commas."""


def server_urls(urls: Urls) -> tuple[str, ...]:
    """Returns the URLs without repetitions. Raises ConfigError: there is none."""
    listed = urls.split(",") if isinstance(urls, str) else urls
    found = tuple(dict.fromkeys(url for part in listed if (url := part.strip())))
    if not found:
        raise ConfigError("Which server?", hint="Give its URL, such as http://host:8000.")
    return found


def authorization(token: str | None = None) -> dict[str, str]:
    """Returns the authorization header for `token`. Default: the environment variable's token."""
    known = os.environ.get(TOKEN_VARIABLE, "") if token is None else token
    return {"authorization": f"Bearer {known}"} if known else {}
