"""Removes what looks like a secret from each log line before it is written.

Secrets should not be logged in the first place; this catches those in messages of libraries and
exceptions. A line may hold what a model wrote: no pattern looks at a character often.
"""

from __future__ import annotations

import re
from typing import Final

STRUCK: Final = "[redacted]"

_SECRETS: Final = re.compile(
    r"""
    (?P<path>/r/)[A-Za-z0-9_-]{16,}                                  # the key of an attempt
    |(?P<scheme>\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{6,}         # a header
    |(?P<user>://)[^\s/@"':]*+:[^\s/@"']++(?=@)                      # a URL with a password
    |(?P<named>(?:api[_-]?key|\bauthorization|password|passwd|secret|access_token
        |auth_token|\btoken|(?:secret|access|private|environment)[_-](?:access[_-])?key
        |\b(?:set-)?cookie|[?&]key)\b\\?["']?\s*[:=]\s*\\?["']?)
        (?!(?:bearer|basic)\b)[^\s"',;&}\\]{6,}                      # name and value
    |\b(?:sk|pk|rk|hf|ghp|gho|ghs|evs|github_pat|glpat|xoxb|xoxp|nvapi|tvly)[-_][A-Za-z0-9_-]{12,}
    |\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[A-Za-z0-9_-]{30,}
    # a JSON web token
    |(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{4,}+
    """,
    re.IGNORECASE | re.VERBOSE,
)

_HINTS: Final = (
    "/r/", "bearer", "basic", "://", "key", "authorization", "passw", "secret", "token", "eyj",
    "cookie", "akia", "asia", "aiza",
    "sk-", "pk-", "rk-", "sk_", "pk_", "rk_", "hf_", "hf-", "evs_", "gh",
    "glpat", "xox", "nvapi", "tvly",
)  # fmt: skip
"""Every secret contains one of these, in lower case: a quick check, since most lines hold none."""


def redacted(text: str) -> str:
    """Returns `text` without anything that looks like a key, a token or a password."""
    low = text.lower()
    return _SECRETS.sub(_strike, text) if any(hint in low for hint in _HINTS) else text


def _strike(found: re.Match[str]) -> str:
    kept = found.lastgroup and found.group(found.lastgroup)
    return f"{kept or ''}{STRUCK}"
