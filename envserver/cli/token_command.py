"""`envserver token WORD`: makes, lists and revokes access tokens.
A token is printed once, alone on stdout; the file keeps only its hash. A running server sees the
change at its next request.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator

from ..settings.section import Section
from ..settings.server import Role
from . import lean_imports
from .command_line import CommandSpec, say

if TYPE_CHECKING:
    from ..http.access import Token


_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _lifetime(text: str) -> str:
    parse_lifetime(text)
    return text


def parse_lifetime(text: str) -> timedelta:
    """`90m`, `12h`, `30d` or `8w`."""
    found = re.fullmatch(r"(\d{1,5})([mhdw])", text)
    if found is None or int(found[1]) == 0:
        raise ValueError("must be a number and m, h, d or w, such as 30d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


class TokenSettings(Section):
    tokens: Path = Path("data/tokens.yaml")
    """The tokens file, which servers read with --server.tokens_file."""


class NewToken(TokenSettings):
    role: Role
    """trainer, environment, reader (read-only) or admin (everything)."""
    name: str
    """Who the token is for; shown in lists and logs."""
    expires: Annotated[str, AfterValidator(_lifetime)] | None = None
    """Lifetime: 90m, 12h, 30d, 8w; unset: valid until revoked."""


class GoneToken(TokenSettings):
    token: str
    """Name or id of the token."""


CREATE = CommandSpec(
    "token create", "Makes an access token.", NewToken, usage="--role ROLE --name NAME"
)
LIST = CommandSpec("token list", "Lists the access tokens, without their secrets.", TokenSettings)
REVOKE = CommandSpec(
    "token revoke",
    "Revokes the token with this name or id: it is refused from now on.",
    GoneToken,
    usage="NAME",
    arguments=("token",),
)


def run_create(argv: list[str]) -> int:
    with lean_imports():
        from ..http.access import create_token

    wanted = CREATE.read(argv)
    lifetime = parse_lifetime(wanted.expires) if wanted.expires else None
    text, entry = create_token(wanted.tokens, wanted.name, wanted.role, lifetime)
    until = f" until {_shown(entry.expires_at)}" if entry.expires_at else ""
    say(
        f"A token for {entry.name} ({entry.role}){until}. It is shown only once; "
        f"{wanted.tokens} keeps its hash."
    )
    print(text)
    return 0


def run_list(argv: list[str]) -> int:
    with lean_imports():
        from ..http.access import read_tokens
        from .console import show_rows

    settings = LIST.read(argv)
    tokens = read_tokens(settings.tokens)
    rows = [("NAME", "ROLE", "ID", "CREATED", "EXPIRES"), *map(_row, tokens)]
    show_rows(rows)
    return 0


def run_revoke(argv: list[str]) -> int:
    with lean_imports():
        from ..http.access import revoke_token

    settings = REVOKE.read(argv)
    gone = revoke_token(settings.tokens, settings.token)
    say(f"Revoked {gone.name} ({gone.role}).")
    return 0


def _row(token: Token) -> tuple[str, ...]:
    expires = "never" if token.expires_at is None else _shown(token.expires_at)
    if token.has_expired():
        expires += " (over)"
    return (token.name, token.role, token.id, _shown(token.created_at), expires)


def _shown(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M}Z"
