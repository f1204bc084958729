"""Access control before the application: tokens, roles, quotas, host names, pages of other origins.

Without a valid token the response is 401, with another role 403, above the quota 429. A response
never reveals whether a token exists, has expired or was revoked, nor, without a token, which routes
exist. A stream or a WebSocket ends when its token is revoked."""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import structlog
from envserver_records.errors import UsageError
from starlette.datastructures import MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..settings.server import Quota, is_loopback
from ..telemetry.redaction import Bucket
from .access import AccessTokens, Rule, Sessions, Token, is_page_read, rules_of
from .answers import answer_to, error_answer

_MEGABYTE: Final = 1_000_000
_MOST_ADDRESSES: Final = 4096
_FAILURES_AT_ONCE: Final = 20
_FAILURES_PER_SECOND: Final = 0.5


class TooManyRequests(UsageError):
    """Too many requests; `detail["retry_after_seconds"]` says when to retry."""

    kind, status = "too_many_requests", 429

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message, retry_after_seconds=math.ceil(seconds))


class Usage:
    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._requests = self._bytes = None
        now = time.monotonic()
        if quota.requests_per_second is not None:
            self._requests = Bucket(quota.requests_per_second, quota.burst, now)
        if quota.megabytes_per_minute is not None:
            a_minutes = quota.megabytes_per_minute * _MEGABYTE
            self._bytes = Bucket(a_minutes / 60, a_minutes, now)
        self.open_streams = 0

    def begin(self, *, is_stream: bool) -> None:
        now = time.monotonic()
        if self._bytes is not None and (wait := self._bytes.wait_seconds(1, now)):
            raise TooManyRequests("This access token has reached its limit of bytes.", wait)
        if self._requests is not None:
            if wait := self._requests.wait_seconds(1, now):
                raise TooManyRequests("This access token makes too many requests.", wait)
            self._requests.take(1, now)
        if is_stream:
            most = self._quota.open_streams
            if most is not None and self.open_streams >= most:
                raise TooManyRequests(f"This access token has {most} open streams already.", 1)
            self.open_streams += 1

    def moved(self, size: int) -> None:
        if self._bytes is not None and size:
            self._bytes.take(size, time.monotonic())


class Usages:
    """Usage of all access tokens, by id. `quota`: for tokens without a quota of their own."""

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._known: OrderedDict[str, tuple[Quota | None, Usage]] = OrderedDict()

    def of(self, token_id: str, own: Quota | None) -> Usage:
        """Returns the usage of this token; it restarts when the token's own quota has changed."""
        known = self._known.get(token_id)
        if known is None or known[0] != own:
            quota = self._quota
            if own is not None:
                quota = quota.model_copy(update=own.model_dump(exclude_unset=True))
            known = self._known[token_id] = (own, Usage(quota))
            if len(self._known) > _MOST_ADDRESSES:
                self._known.popitem(last=False)
        return known[1]


class Strangers:
    """Limits requests without a valid token per address: 20 at once, then one every two seconds. An
    IPv6 /64 network counts as one address."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, Bucket] = OrderedDict()

    def failed(self, address: str) -> None:
        now = self._clock()
        place = _network(address)
        bucket = self._failures.pop(place, None)
        if bucket is None:
            bucket = Bucket(_FAILURES_PER_SECOND, _FAILURES_AT_ONCE, now)
            if len(self._failures) >= _MOST_ADDRESSES:
                self._failures.popitem(last=False)
        self._failures[place] = bucket
        if wait := bucket.wait_seconds(1, now):
            words = "Too many requests without a valid token from this address."
            raise TooManyRequests(words, wait)
        bucket.take(1, now)


def _network(address: str) -> str:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if found.version == 4 or found.ipv4_mapped:
        return str(found)
    return str(ipaddress.ip_network((found, 64), strict=False))


log = structlog.get_logger(__name__)

_MOST_HOSTS: Final = 64
_POLICY_VIOLATION: Final = 1008
_HINT: Final = "Send `Authorization: Bearer TOKEN`; `envserver token create` makes tokens."


class Unauthorized(UsageError):
    kind, status = "unauthorized", 401


class Forbidden(UsageError):
    """The token has none of the needed roles, which are listed in `detail["needed_roles"]`."""

    kind, status = "forbidden", 403


class Misdirected(UsageError):
    kind, status = "misdirected", 421


class Access:
    """Lets only authorized requests through.

    Args:
        sessions: logins of the page; None: requests without a token go on to a server that knows
            them.
        quota: of tokens without one of their own.
        rules: the roles of the application's routes, by path; see `rules_of`.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: AccessTokens,
        sessions: Sessions | None,
        strangers: Strangers,
        quota: Quota,
        rules: Callable[[str], dict[str, Rule]] = rules_of,
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._sessions = sessions
        self._strangers = strangers
        self._usages = Usages(quota)
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        rules = self._rules(scope["path"])
        # A WebSocket begins with a GET; routes that answer GET may also answer HEAD.
        method = scope.get("method", "GET")
        rule = rules.get("GET" if method == "HEAD" else method)
        is_open = rule is not None and rule.roles is None
        if is_open or (self._sessions is None and not _bearer(scope)):
            await self._app(scope, receive, send)
            return
        try:
            token = self._admitted(scope, rule)
            _check_role(token, rule, known=bool(rules))
            usage = self._usages.of(token.id, token.quota)
            is_stream = rule is not None and rule.is_stream
            usage.begin(is_stream=is_stream)
        except UsageError as error:
            await _refuse(error, scope, receive, send)
            return
        passing = _Passing(self._tokens, token, usage, receive, send)
        try:
            with structlog.contextvars.bound_contextvars(client=token.name):
                await self._app(scope, passing.receive, passing.send)
        finally:
            if is_stream:
                usage.open_streams -= 1

    def _admitted(self, scope: Scope, rule: Rule | None) -> Token:
        sent = _bearer(scope)
        token = self._tokens.find(sent) if sent else None
        if not sent and self._sessions is not None and is_page_read(scope, rule):
            token = self._sessions.reader(scope)
            if token is not None and rule is None:
                raise _NotFound("Not Found")
        if token is None:
            address = (scope.get("client") or ("",))[0]
            self._strangers.failed(address)
            log.warning("access_refused", address=address, path=scope["path"][:200])
            message = "This access token is not valid." if sent else "An access token is needed."
            raise Unauthorized(message, hint=_HINT)
        return token


@dataclass(eq=False, repr=False)
class _Passing:
    """One admitted request: counts its bytes, and ends its response if the token is revoked."""

    _tokens: AccessTokens
    _token: Token
    _usage: Usage
    _receive: Receive
    _send: Send
    _revoked: bool = False

    async def receive(self) -> Message:
        if self._revoked:
            return {"type": "http.disconnect"}
        message = await self._receive()
        if message["type"] == "websocket.receive" and not self._tokens.is_valid(self._token):
            return {"type": "websocket.disconnect", "code": _POLICY_VIOLATION}
        self._usage.moved(_size(message))
        return message

    async def send(self, message: Message) -> None:
        if self._revoked:
            return
        if message.get("more_body", False) and not self._tokens.is_valid(self._token):
            self._revoked = True
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        self._usage.moved(_size(message))
        await self._send(message)


def _size(message: Message) -> int:
    return len(message.get("body") or message.get("bytes") or message.get("text") or b"")


def _check_role(token: Token, rule: Rule | None, *, known: bool) -> None:
    if token.role == "admin" or (rule is None and known):
        return  # the path does not have this method: the route answers that itself
    if rule is None:
        raise _NotFound("Not Found")
    assert rule.roles is not None
    if token.role not in rule.roles:
        needed = sorted(rule.roles | {"admin"})
        raise Forbidden(f"This needs the role {' or '.join(needed)}.", needed_roles=needed)


class _NotFound(UsageError):
    kind, status = "about:blank", 404


def _bearer(scope: Scope) -> str:
    sent = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(sent) != 1:
        return ""
    scheme, _, token = sent[0].decode("latin-1").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def _refuse(error: UsageError, scope: Scope, receive: Receive, send: Send) -> None:
    answer = answer_to(scope["path"], error)
    answer.headers["cache-control"] = "no-store"
    if isinstance(error, Unauthorized):
        answer.headers["www-authenticate"] = 'Bearer realm="envserver"'
    await answer(scope, receive, send)


class KnownNames:
    """Refuses requests whose Host header is not one of loopback's or the server's `names`.

    Prevents DNS rebinding: an attacker can make a domain resolve to this machine; a browser then
    treats a page of that domain as the same origin as this server and lets it read everything."""

    def __init__(self, app: ASGIApp, names: Sequence[str]) -> None:
        self._app = app
        self._names = {name.lower() for name in names}
        # Cached: the same few Host headers come with every request.
        self._may_be_once = lru_cache(_MOST_HOSTS)(self._may_be)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and not all(
            self._may_be_once(value.decode("latin-1"))
            for name, value in scope["headers"]
            if name == b"host"
        ):
            error = Misdirected(
                "The server does not accept this host name.",
                hint="--server.allowed_hosts NAME allows it, or access tokens do.",
            )
            await _refuse(error, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_be(self, host: str) -> bool:
        name = _without_port(host).lower()
        return name in self._names or is_loopback(name)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, _ = host.partition(":")
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return name


_EXPOSED: Final = ("Retry-After", "X-Envserver-Lease", "X-Envserver-Reason")
_FOREIGN: Final = frozenset({b"cross-site", b"same-site"})
"""A page of the same site has another origin: another port of this machine, for example."""
_TO_BROWSERS: Final = {
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "x-content-type-options": "nosniff",
}
"""Headers of answers that do not set them themselves."""


class KnownPages:
    """Refuses changes by pages of other origins."""

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        self._origins = {origin.encode("latin-1") for origin in origins}
        self._app = app
        if origins:
            self._app = CORSMiddleware(
                app,
                allow_origins=origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=_EXPOSED,
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_change(scope) and self._is_foreign(scope):
            message = (
                "A page of another origin may not change anything here;"
                " --server.allowed_origins lists those that may."
            )
            await error_answer(scope["path"], 403, message)(scope, receive, send)
            return
        if any(name == b"sec-fetch-site" for name, _ in scope.get("headers", ())):
            send = _to_browser(send)
        await self._app(scope, receive, send)

    def _is_foreign(self, scope: Scope) -> bool:
        """Returns whether a browser sent the request for a page of an unlisted origin."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        origins = [value.lower() for name, value in headers if name == b"origin"]
        if not origins:
            return any(name == b"sec-fetch-site" and site in _FOREIGN for name, site in headers)
        hosts = [value.lower() for name, value in headers if name == b"host"]
        return any(
            origin not in self._origins and origin.partition(b"://")[2] not in hosts
            for origin in origins
        )


def _to_browser(send: Send) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _TO_BROWSERS.items():
                headers.setdefault(name, value)
        await send(message)

    return sending


def _is_change(scope: Scope) -> bool:
    if scope["type"] != "http":
        return bool(scope["type"] == "websocket")
    if scope["method"] not in ("GET", "HEAD"):
        return bool(scope["method"] != "OPTIONS")
    rule = rules_of(scope["path"]).get("GET")
    return rule is not None and rule.is_change
