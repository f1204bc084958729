"""Logins of the page: a cookie that reads, made from an access token that may do more.

In: an access token, once. Out: the signed cookie `ID.END.SIGNATURE`: the token's id, the second at
which it ends, and an HMAC of both and of the token's hash under a key of this server. What holds: a
cookie counts only as `reader`, only for GET of routes under /v1 that readers read, and only for
pages of this server's own origin, as browsers tell in `Sec-Fetch-Site`. It ends with its token.
Nothing is kept of a login, so it survives a restart, and nothing grows.

Cookies ignore ports: the name has eight characters made of the key, so that two servers of one
host do not log each other's readers out. Under HTTPS it has the prefix `__Host-`: no other host
of the domain can set it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from envserver_records.errors import ConfigError
from starlette.types import Scope

from .rules import READABLE, Rule
from .tokens import AccessTokens, Token

log = structlog.get_logger(__name__)

SESSION_SECONDS: Final = 12 * 3600
_KEY_BYTES: Final = 32
_MOST_COOKIES: Final = 8
"""Cookies of our name that are looked at: pages of other ports can add some."""
_LONGEST_HEADER: Final = 16 * 1024
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


class Sessions:
    """Makes and checks the cookies of logins.

    Args:
        key: signs cookies; see `session_key`.
        now: returns the current time in seconds since 1970.
    """

    def __init__(
        self, tokens: AccessTokens, key: bytes, *, now: Callable[[], float] = time.time
    ) -> None:
        self._tokens = tokens
        self._key = key
        self._now = now
        self._name = f"envserver_{self._signed('name')[:8]}"

    def cookie(self, token: Token, scope: Scope) -> str:
        """Returns the value of `Set-Cookie` for a login with `token`."""
        end = f"{token.id}.{int(self._now()) + SESSION_SECONDS}"
        return self._header(f"{end}.{self._signature(end, token)}", SESSION_SECONDS, scope)

    def no_cookie(self, scope: Scope) -> str:
        """Returns the value of `Set-Cookie` that ends a login."""
        return self._header("", 0, scope)

    def reader(self, scope: Scope) -> Token | None:
        """Returns the token of the login that the page's request comes with, as a reader's.

        None if there is none, it has ended, or the request is not one of this server's own page.
        """
        if not is_own_page(scope):
            return None
        for value in self._values(scope):
            token = self._token_of(value)
            if token is not None:
                return token.model_copy(update={"role": "reader"})
        return None

    def _token_of(self, value: str) -> Token | None:
        end, _, signature = value.rpartition(".")
        token_id, _, second = end.partition(".")
        token = self._tokens.by_id(token_id)
        if token is None or not may_read(token):
            return None
        is_ours = hmac.compare_digest(
            signature.encode("latin-1", "replace"), self._signature(end, token).encode()
        )
        # Only what is signed is a number of ours.
        return token if is_ours and int(second) > self._now() else None

    def _values(self, scope: Scope) -> list[str]:
        """Returns the values of the request's cookies of our name."""
        name = self._full_name(scope)
        found = []
        for header, value in scope["headers"]:
            if header != b"cookie" or len(value) > _LONGEST_HEADER:
                continue
            for part in value.decode("latin-1").split(";"):
                key, _, content = part.strip().partition("=")
                if key == name:
                    found.append(content.strip())
        return found[:_MOST_COOKIES]

    def _header(self, value: str, seconds: int, scope: Scope) -> str:
        parts = [f"{self._full_name(scope)}={value}", "Path=/", f"Max-Age={seconds}"]
        parts += ["HttpOnly", "SameSite=Strict"]
        return "; ".join([*parts, "Secure"] if _is_https(scope) else parts)

    def _full_name(self, scope: Scope) -> str:
        return f"__Host-{self._name}" if _is_https(scope) else self._name

    def _signature(self, end: str, token: Token) -> str:
        return self._signed("\0".join(("session", end, token.sha256)))

    def _signed(self, text: str) -> str:
        return hmac.new(self._key, text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def may_read(token: Token) -> bool:
    """Returns whether this token may do what a reader may: a login never adds rights."""
    return token.role in READABLE


def is_page_read(scope: Scope, rule: Rule | None) -> bool:
    """Returns whether a login may count for this request: it reads a route of ours."""
    path: str = scope["path"]
    return (
        scope["type"] == "http"
        and scope["method"] in ("GET", "HEAD")
        and (path.startswith("/v1/") or path == "/openapi.json")
        and not (rule is not None and rule.is_change)
    )


def is_own_page(scope: Scope) -> bool:
    """Returns whether a browser sent the request for a page of this very origin.

    Browsers tell so only over HTTPS and to this machine.
    """
    sites = [value for name, value in scope["headers"] if name == b"sec-fetch-site"]
    return sites == [b"same-origin"]


def _is_https(scope: Scope) -> bool:
    """Returns whether the browser uses HTTPS; a trusted proxy in between says so."""
    return bool(scope.get("scheme") == "https")


def session_key(tokens_file: Path) -> bytes:
    """Reads the key of logins, which lies beside the tokens file; makes it at the first start.

    Where no file can be made (a mounted secret), the key is a new one, and logins end with the
    server.
    Raises ConfigError: the file is open to other users, or is not a key.
    """
    path = tokens_file.with_name(f"{tokens_file.name}.session-key")
    try:
        return _read_key(path)
    except FileNotFoundError:
        key = secrets.token_bytes(_KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"The key of logins {path} cannot be read: {error.strerror}.") from None
    try:
        return _made_key(path, key)
    except OSError as error:
        log.info("logins_end_with_this_server", path=str(path), reason=error.strerror)
        return key


def _made_key(path: Path, key: bytes) -> bytes:
    """Writes `key` to `path`, or returns the one that another server wrote meanwhile."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(key.hex() + "\n")
        try:
            os.link(draft, path)
        except FileExistsError:
            return _read_key(path)
    finally:
        draft.unlink(missing_ok=True)
    return key


def _read_key(path: Path) -> bytes:
    with path.open("rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        text = file.read(1000)
    if mode & _OTHERS:
        raise ConfigError(
            f"The key of logins {path} is open to other users.", hint=f"chmod 600 {path}"
        )
    try:
        key = bytes.fromhex(text.decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(
            f"The key of logins {path} is damaged.",
            hint="Remove it: a new one is made, and everybody logs in again.",
        )
    return key
