"""Who may do what: the roles of each route, access tokens, and logins of the page.

For a route that is not in the table, everyone but an admin gets 404; `/healthz` needs no token. The
proxy (`/r/{key}/...`) is another application: each of its paths contains its own key."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
import tomllib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import structlog
from envserver_records.errors import ConfigError, ConflictError, NotFoundError
from envserver_records.files import replace_file
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError
from starlette.routing import compile_path
from starlette.types import Scope

from ..settings.server import Quota, Role

Roles = frozenset[Role]

TRAINER: Final[Roles] = frozenset({"trainer"})
ENVIRONMENT: Final[Roles] = frozenset({"environment"})
READERS: Final[Roles] = frozenset({"reader", "trainer"})
EVERYBODY: Final[Roles] = frozenset({"reader", "trainer", "environment"})
READABLE: Final[Roles] = READERS | {"admin"}


class Rule(NamedTuple):
    """Roles that may call `method` at `path` (the route's template), in addition to admin.

    Args:
        roles: None if no token is needed.
        is_stream: whether the response is endless; a token may have only a few of those at a time.
        is_change: whether a GET changes something; all other methods do.
    """

    method: str
    path: str
    roles: Roles | None
    is_stream: bool = False
    is_change: bool = False


_ROLES: Final[dict[str, Roles | None]] = {
    "anyone": None,
    "everybody": EVERYBODY,
    "readers": READERS,
    "trainer": TRAINER,
    "environment": ENVIRONMENT,
    "admin": frozenset(),
}


def _read_rules() -> Iterator[Rule]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    for method, path, roles, *kinds in table["rules"]:
        if not {"stream", "change"}.issuperset(kinds):
            raise ValueError(f"access.toml: {method} {path}: {kinds}")
        yield Rule(method, path, _ROLES[roles], "stream" in kinds, "change" in kinds)


RULES: Final = tuple(_read_rules())


def rules_of(path: str) -> dict[str, Rule]:
    found = _EXACT.get(path)
    if found is not None:
        return found
    return next((rules for form, rules in _FORMS if form.match(path)), {})


def _by_path() -> dict[str, dict[str, Rule]]:
    found: dict[str, dict[str, Rule]] = {}
    for rule in RULES:
        found.setdefault(rule.path, {})[rule.method] = rule
    return found


_BY_PATH: Final = _by_path()
_EXACT: Final = {path: rules for path, rules in _BY_PATH.items() if "{" not in path}
_FORMS: Final[list[tuple[re.Pattern[str], dict[str, Rule]]]] = [
    (compile_path(path)[0], rules) for path, rules in _BY_PATH.items() if "{" in path
]


# A token is `evs_<id>_<secret>`: the id selects the entry, the secret has 256 random bits, and the
# file contains the SHA-256 of the whole token. A slow, salted hash (scrypt) protects passwords that
# people invent; 256 random bits cannot be guessed, and every request would pay the cost.
#
#     envserver token create --role trainer --name cluster-7
#
# A token is shown once, when it is created; the file is replaced atomically and only its owner may
# read or write it; a running server keeps its tokens if the file becomes unreadable.

PREFIX: Final = "evs_"
_ID_BYTES: Final = 5
_SECRET_BYTES: Final = 32
_TOKEN: Final = re.compile(rf"{PREFIX}(?P<id>[0-9a-f]{{10}})_[A-Za-z0-9_-]{{43}}")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_HEAD: Final = "# Written by `envserver token`. `quota` of an entry may be changed by hand.\n"
_NO_HASH: Final = hashlib.sha256(secrets.token_bytes(_SECRET_BYTES)).hexdigest()

log = structlog.get_logger(__name__)


class Token(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[0-9a-f]{10}$")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    role: Role
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    quota: Quota | None = None
    """Quota of this token; unset fields are taken from the server's `server.quota`."""

    def has_expired(self) -> bool:
        return self.expires_at is not None and self.expires_at <= datetime.now(UTC)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")

    tokens: list[Token] = []


def create_token(
    path: Path, name: str, role: Role, lifetime: timedelta | None = None
) -> tuple[str, Token]:
    """Creates a token and adds its entry to the file; returns the token and the entry."""
    now = datetime.now(UTC).replace(microsecond=0)
    with _changed(path) as tokens:
        if any(token.name == name for token in tokens):
            raise ConflictError(
                f"There is a token named {name!r}.",
                hint=f"Revoke it first: envserver token revoke {name} --tokens {path}",
            )
        taken = {token.id for token in tokens}
        while (token_id := secrets.token_hex(_ID_BYTES)) in taken:
            continue
        text = f"{PREFIX}{token_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"
        try:
            entry = Token(
                id=token_id,
                name=name,
                role=role,
                sha256=_hashed(text),
                created_at=now,
                expires_at=None if lifetime is None else now + lifetime,
            )
        except ValidationError:
            raise ConfigError(
                f"A token cannot be named {name!r}.",
                hint="Letters, digits, dots, dashes and underscores; at most 64.",
            ) from None
        tokens.append(entry)
    return text, entry


def revoke_token(path: Path, name: str) -> Token:
    with _changed(path) as tokens:
        for token in tokens:
            if name in (token.name, token.id):
                tokens.remove(token)
                return token
    raise NotFoundError(f"There is no token named {name!r}.", hint="`envserver token list`.")


def read_tokens(path: Path) -> list[Token]:
    try:
        raw = _read_private(path, "tokens file")
    except OSError as error:
        raise ConfigError(
            f"The tokens file {path} cannot be read: {error.strerror}.",
            hint=f"envserver token create --role trainer --name NAME --tokens {path}",
        ) from None
    import yaml  # a server without tokens starts without it

    try:
        found = _File.model_validate(yaml.safe_load(raw) or {})
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" in line {mark.line + 1}" if mark else ""
        raise ConfigError(f"The tokens file {path} is not YAML{place}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ConfigError(f"The tokens file {path}: {place}: {first['msg']}.") from None
    if len({token.id for token in found.tokens}) < len(found.tokens):
        raise ConfigError(f"The tokens file {path} has an id twice.")
    return found.tokens


def _read_private(path: Path, what: str) -> bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_mode & _OTHERS:
            raise ConfigError(
                f"The {what} {path} is open to other users.", hint=f"chmod 600 {path}"
            )
        return file.read()


class AccessTokens:
    """The tokens that a running server accepts; the file, which must contain one, is read again
    when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = _state_of(path)
        self._tokens = {token.id: token for token in read_tokens(path)}
        if not self._tokens:
            raise ConfigError(
                f"The tokens file {path} holds no token.",
                hint=f"envserver token create --role trainer --name NAME --tokens {path}",
            )

    def find(self, text: str) -> Token | None:
        """Returns the entry of this token; None if it is unknown, expired or revoked."""
        self._refresh()
        form = _TOKEN.fullmatch(text)
        token = self._tokens.get(form["id"]) if form else None
        # Compare in constant time, even if no entry exists.
        same = hmac.compare_digest(_hashed(text), token.sha256 if token else _NO_HASH)
        return token if token and same and not token.has_expired() else None

    def by_id(self, token_id: str) -> Token | None:
        self._refresh()
        known = self._tokens.get(token_id)
        return None if known is None or known.has_expired() else known

    def is_valid(self, token: Token) -> bool:
        """Returns whether a token found earlier is still valid."""
        known = self.by_id(token.id)
        return known is not None and known.sha256 == token.sha256

    def _refresh(self) -> None:
        seen = _state_of(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._tokens = {token.id: token for token in read_tokens(self._path)}
        except ConfigError as error:
            log.error("tokens_file_unusable", error=str(error), kept=len(self._tokens))
        else:
            log.info("tokens_file_read", tokens=len(self._tokens))


def _state_of(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode)


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@contextlib.contextmanager
def _changed(path: Path) -> Iterator[list[Token]]:
    """Yields the entries; writes them back if the block succeeds. One process at a time."""
    import yaml

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            tokens = read_tokens(path) if path.exists() else []
            yield tokens
            tree = _File(tokens=tokens).model_dump(mode="json", exclude_unset=True)
            replace_file(path, _HEAD + yaml.safe_dump(tree, sort_keys=False), mode=0o600)
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"The tokens file {path} cannot be written: {error.strerror}.") from error


# Cookies ignore ports: the name has eight characters made of the key, so that two servers of one
# host do not log each other's readers out. Under HTTPS it has the prefix `__Host-`: no other host
# of the domain can set it.

SESSION_SECONDS: Final = 12 * 3600
_KEY_BYTES: Final = 32
_MOST_COOKIES: Final = 8
"""Cookies of our name that are looked at: pages of other ports can add some."""
_LONGEST_HEADER: Final = 16 * 1024


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

        None if there is none, it has ended, or the request is not one of this server's own page."""
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
    """Returns whether a browser sent the request for a page of this very origin. Browsers tell so
    only over HTTPS and to this machine."""
    sites = [value for name, value in scope["headers"] if name == b"sec-fetch-site"]
    return sites == [b"same-origin"]


def _is_https(scope: Scope) -> bool:
    """Returns whether the browser uses HTTPS; a trusted proxy in between says so."""
    return bool(scope.get("scheme") == "https")


def session_key(tokens_file: Path) -> bytes:
    """Reads the key of logins, which lies beside the tokens file; makes it at the first start.
    Where no file can be made (a mounted secret), the key is a new one, and logins end with the
    server."""
    path = tokens_file.with_name(f"{tokens_file.name}.session-key")
    try:
        return _read_key(path)
    except FileNotFoundError:
        key = secrets.token_bytes(_KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"The login key {path} cannot be read: {error.strerror}.") from None
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
    try:
        key = bytes.fromhex(_read_private(path, "login key").decode("ascii"))
    except ValueError:
        key = b""
    if len(key) != _KEY_BYTES:
        raise ConfigError(
            f"The login key {path} is damaged.",
            hint="Delete it: a new key is made, and everyone must log in again.",
        )
    return key
