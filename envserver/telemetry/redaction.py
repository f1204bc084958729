"""Removes secrets and control characters from log lines, and bounds what one rollout writes.
Secrets should not be logged in the first place; this catches those in messages of libraries and
exceptions. A line may hold what a model wrote: no pattern looks at a character often.
"""

from __future__ import annotations

import math
import re
from typing import Final


class Bucket:
    """A token bucket, full at the start: `rate` tokens a second, `most` at once, `now` in
    seconds."""

    __slots__ = ("_at", "_level", "most", "rate")

    def __init__(self, rate: float, most: float, now: float) -> None:
        self.rate = rate
        self.most = most
        self._level = most
        self._at = now

    def wait_seconds(self, amount: float, now: float) -> float:
        """Takes nothing."""
        self._fill(now)
        return max(0.0, (amount - self._level) / self.rate)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, even if the balance becomes negative; later requests then wait."""
        self._fill(now)
        self._level -= amount

    def _fill(self, now: float) -> None:
        self._level = min(self.most, self._level + max(0.0, now - self._at) * self.rate)
        self._at = now


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
    low = text.lower()
    return _SECRETS.sub(_strike, text) if any(hint in low for hint in _HINTS) else text


def _strike(found: re.Match[str]) -> str:
    kept = found.lastgroup and found.group(found.lastgroup)
    return f"{kept or ''}{STRUCK}"


_COLOURS: Final = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, other line ends, overrides of the writing direction, lone surrogates."""


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable(text: str, keep: str = "") -> str:
    r"""Without colours, and with control characters as escapes (`\x1b`), except those in `keep`."""
    if text.isprintable():
        return text

    def escaped(found: re.Match[str]) -> str:
        character = found[0]
        return character if character in keep else character.encode("unicode_escape").decode()

    return _CONTROLS.sub(escaped, _COLOURS.sub("", text))


BURST_BYTES = 256 * 1024
BYTES_PER_SECOND = 32 * 1024
COST_OF_A_LINE = 200
"""In bytes of the budget, also of an empty line."""


class LogBudget:
    """A bucket of log bytes. `now` is the seconds of any monotonic clock."""

    def __init__(self, now: float, total_bytes: float = math.inf) -> None:
        self._bucket = Bucket(BYTES_PER_SECOND, BURST_BYTES, now)
        self._left_altogether = total_bytes

    def take(self, line_bytes: int, now: float) -> bool:
        """Returns whether a line may be written; it is then paid."""
        cost = line_bytes + COST_OF_A_LINE
        if cost > self._left_altogether or self._bucket.wait_seconds(cost, now):
            return False
        self._bucket.take(cost, now)
        self._left_altogether -= cost
        return True
