"""Access tokens: a file that lists them and contains only their hashes.

A token is `evs_<id>_<secret>`: the id selects the entry, the secret has 256 random bits, and the
file contains the SHA-256 of the whole token. A slow, salted hash (scrypt) protects passwords that
people invent; 256 random bits cannot be guessed, and every request would pay the cost.

    envserver token create --role trainer --name cluster-7

What holds: a token is shown once, when it is created; the file is replaced atomically and only its
owner may read or write it; a running server keeps its tokens if the file becomes unreadable.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final

import structlog
from envserver_records.errors import ConfigError, ConflictError, NotFoundError
from envserver_records.files import replace_file
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from ...settings.server import Quota, Role

PREFIX: Final = "evs_"
_ID_BYTES: Final = 5
_SECRET_BYTES: Final = 32
_TOKEN: Final = re.compile(rf"{PREFIX}(?P<id>[0-9a-f]{{10}})_[A-Za-z0-9_-]{{43}}")
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_HEAD: Final = "# Written by `envserver token`. `quota` of an entry may be changed by hand.\n"
_NO_HASH: Final = hashlib.sha256(secrets.token_bytes(_SECRET_BYTES)).hexdigest()

log = structlog.get_logger(__name__)


class Token(BaseModel):
    """One token, as stored in the file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[0-9a-f]{10}$")
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    role: Role
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", repr=False)]
    created_at: AwareDatetime
    expires_at: AwareDatetime | None = None
    quota: Quota | None = None
    """Quota of this token; unset fields are taken from the server's `server.quota`."""

    def has_expired(self, now: datetime) -> bool:
        return self.expires_at is not None and self.expires_at <= now


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
    """Removes the token with this name or id from the file."""
    with _changed(path) as tokens:
        for token in tokens:
            if name in (token.name, token.id):
                tokens.remove(token)
                return token
    raise NotFoundError(f"There is no token named {name!r}.", hint="`envserver token list`.")


def read_tokens(path: Path) -> list[Token]:
    """Returns the entries of the file.
    Raises ConfigError: the file does not exist, others may read or write it, or it is malformed.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read()
    except OSError as error:
        raise ConfigError(
            f"The tokens file {path} cannot be read: {error.strerror}.",
            hint=f"envserver token create --role trainer --name NAME --tokens {path}",
        ) from None
    if mode & _OTHERS:
        raise ConfigError(
            f"The tokens file {path} is open to other users.", hint=f"chmod 600 {path}"
        )
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


class AccessTokens:
    """The tokens that a running server accepts; the file is read again when it changes.

    Args:
        path: the file; it must exist and contain a token.
        now: returns the current time, to check expiry.
    """

    def __init__(
        self, path: Path, *, now: Callable[[], datetime] = lambda: datetime.now(UTC)
    ) -> None:
        self._path = path
        self._now = now
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
        return token if token and same and not token.has_expired(self._now()) else None

    def by_id(self, token_id: str) -> Token | None:
        """Returns the entry with this id; None if it is unknown, expired or revoked."""
        self._refresh()
        known = self._tokens.get(token_id)
        return None if known is None or known.has_expired(self._now()) else known

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
    """Returns values that differ when the file was changed or replaced; () without a file."""
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            tokens = read_tokens(path) if path.exists() else []
            yield tokens
            _replace(path, _File(tokens=tokens))
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"The tokens file {path} cannot be written: {error.strerror}.") from error


def _replace(path: Path, content: _File) -> None:
    import yaml

    tree = content.model_dump(mode="json", exclude_unset=True)
    replace_file(path, _HEAD + yaml.safe_dump(tree, sort_keys=False), mode=0o600)
