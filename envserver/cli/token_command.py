"""`envserver token WORD`: makes, lists and revokes access tokens.

A token is printed once, alone on stdout; the file keeps only its hash. A server that runs notices
the change with its next request.
"""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final

from envserver_records.errors import UsageError
from pydantic import AfterValidator

from ..api.access.tokens import Role, Token, create_token, read_tokens, revoke_token
from ..config import Section
from .help import show_help
from .settings import load_settings

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_WORDS: Final = {
    "create": "make a token for one role, and print it once",
    "list": "show the tokens: names, roles, when they expire",
    "revoke": "make a token worthless, by its name or id",
}


def _lifetime(text: str) -> str:
    parse_lifetime(text)
    return text


def parse_lifetime(text: str) -> timedelta:
    """`90m`, `12h`, `30d`, `8w`; raises ValueError."""
    found = re.fullmatch(r"(\d{1,5})([mhdw])", text)
    if found is None or int(found[1]) == 0:
        raise ValueError("must be a number and m, h, d or w, such as 30d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


class TokenSettings(Section):
    """What every word has."""

    tokens: Path = Path("data/tokens.yaml")
    """The tokens file; servers have it by --server.tokens_file."""


class NewToken(TokenSettings):
    role: Role
    """trainer, environment, reader (sees, changes nothing) or admin (may do all)."""
    name: str
    """For whom it is: shown in lists and logs."""
    expires: Annotated[str, AfterValidator(_lifetime)] | None = None
    """How long it is good: 90m, 12h, 30d, 8w; unset: until it is revoked."""


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        UsageError: a word or a setting is wrong, or there is no such token.
    """
    if argv in (["--help"], ["-h"]):
        print(_help())
        return 0
    word = argv[0] if argv else ""
    if word not in _WORDS:
        words = ", ".join(f"`envserver token {one}`" for one in _WORDS)
        raise UsageError(f"What about tokens? {words}.")
    if word == "create":
        return _create(argv[1:])
    return _list(argv[1:]) if word == "list" else _revoke(argv[1:])


def _create(argv: list[str]) -> int:
    usage = "envserver token create --role ROLE --name NAME"
    if show_help(argv, usage=usage, summary="Makes an access token.", settings_class=NewToken):
        return 0
    wanted = load_settings(argv, settings_class=NewToken)
    lifetime = parse_lifetime(wanted.expires) if wanted.expires else None
    text, entry = create_token(wanted.tokens, wanted.name, wanted.role, lifetime)
    until = f" until {_shown(entry.expires_at)}" if entry.expires_at else ""
    print(
        f"A token for {entry.name} ({entry.role}){until}. It is shown this once; "
        f"{wanted.tokens} has only its hash.",
        file=sys.stderr,
    )
    print(text)
    return 0


def _list(argv: list[str]) -> int:
    summary = "Shows the access tokens; never the tokens themselves."
    if show_help(argv, usage="envserver token list", summary=summary, settings_class=TokenSettings):
        return 0
    tokens = read_tokens(load_settings(argv, settings_class=TokenSettings).tokens)
    rows = [("NAME", "ROLE", "ID", "CREATED", "EXPIRES"), *map(_row, tokens)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(map(str.ljust, row, widths)).rstrip())
    return 0


def _revoke(argv: list[str]) -> int:
    usage, summary = (
        "envserver token revoke NAME",
        "Makes the token with this name or id worthless.",
    )
    if show_help(argv, usage=usage, summary=summary, settings_class=TokenSettings):
        return 0
    if not argv or argv[0].startswith("-"):
        raise UsageError("Which token? `envserver token revoke NAME`.")
    settings = load_settings(argv[1:], settings_class=TokenSettings)
    gone = revoke_token(settings.tokens, argv[0])
    print(f"Revoked {gone.name} ({gone.role}).", file=sys.stderr)
    return 0


def _row(token: Token) -> tuple[str, ...]:
    expires = "never" if token.expires_at is None else _shown(token.expires_at)
    if token.has_expired(datetime.now(UTC)):
        expires += " (over)"
    return (token.name, token.role, token.id, _shown(token.created_at), expires)


def _shown(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M}Z"


def _help() -> str:
    lines = [f"  {word:<6}  {summary}" for word, summary in _WORDS.items()]
    return "\n".join(
        [
            "Usage: envserver token WORD [--name value ...]",
            "",
            *lines,
            "",
            "For example: envserver token create --role trainer --name cluster-7 --expires 30d",
            "Then: envserver serve --server.tokens_file data/tokens.yaml ...",
        ]
    )
