"""`envserver token WORD`: makes, lists and revokes access tokens.

A token is printed once, alone on stdout; the file keeps only its hash. A running server sees the
change at its next request.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime

from ..api.access.tokens import Token, create_token, read_tokens, revoke_token
from .console import show_rows
from .specs.token_command import (
    CREATE,
    LIST,
    REVOKE,
    parse_lifetime,
)


def run_create(argv: list[str]) -> int:
    """Makes a token; prints it alone on stdout."""
    wanted = CREATE.read(argv)
    if wanted is None:
        return 0
    lifetime = parse_lifetime(wanted.expires) if wanted.expires else None
    text, entry = create_token(wanted.tokens, wanted.name, wanted.role, lifetime)
    until = f" until {_shown(entry.expires_at)}" if entry.expires_at else ""
    print(
        f"A token for {entry.name} ({entry.role}){until}. It is shown only once; "
        f"{wanted.tokens} keeps its hash.",
        file=sys.stderr,
    )
    print(text)
    return 0


def run_list(argv: list[str]) -> int:
    """Lists the tokens."""
    settings = LIST.read(argv)
    tokens = read_tokens(settings.tokens)
    rows = [("NAME", "ROLE", "ID", "CREATED", "EXPIRES"), *map(_row, tokens)]
    show_rows(rows)
    return 0


def run_revoke(argv: list[str]) -> int:
    """Revokes a token."""
    settings = REVOKE.read(argv)
    gone = revoke_token(settings.tokens, settings.token)
    print(f"Revoked {gone.name} ({gone.role}).", file=sys.stderr)
    return 0


def _row(token: Token) -> tuple[str, ...]:
    expires = "never" if token.expires_at is None else _shown(token.expires_at)
    if token.has_expired(datetime.now(UTC)):
        expires += " (over)"
    return (token.name, token.role, token.id, _shown(token.created_at), expires)


def _shown(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M}Z"
