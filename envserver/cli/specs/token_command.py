"""The settings of `envserver token create`, `envserver token list`, `envserver token revoke`."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator

from ...config import Section
from ...server_config import Role
from ..command_line import CommandSpec

_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def _lifetime(text: str) -> str:
    parse_lifetime(text)
    return text


def parse_lifetime(text: str) -> timedelta:
    """Parses a lifetime such as `90m`, `12h`, `30d` or `8w`; raises ValueError."""
    found = re.fullmatch(r"(\d{1,5})([mhdw])", text)
    if found is None or int(found[1]) == 0:
        raise ValueError("must be a number and m, h, d or w, such as 30d")
    return timedelta(**{_UNITS[found[2]]: int(found[1])})


class TokenSettings(Section):
    """Settings that all `token` commands share."""

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


LIST = CommandSpec("token list", "Shows the access tokens; never their text.", TokenSettings)


REVOKE = CommandSpec(
    "token revoke",
    "Revokes the token with this name or id: it is refused from now on.",
    GoneToken,
    usage="NAME",
    arguments=("token",),
)
