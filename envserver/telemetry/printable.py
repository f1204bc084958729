"""Makes text harmless to a terminal and to a log: what a rollout wrote must not forge a line, move
the cursor or turn the direction of writing."""

from __future__ import annotations

import re
from typing import Final

_COLOURS: Final = re.compile(r"\x1b\[[0-9;:]*m")
_CONTROLS: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, other line ends, overrides of the writing direction, lone surrogates."""


def printable(text: str, keep: str = "") -> str:
    r"""Returns `text` without colours, and with control characters as escapes (`\x1b`).

    Args:
        keep: control characters that stay, such as line ends.
    """
    if text.isprintable():
        return text

    def escaped(found: re.Match[str]) -> str:
        character = found[0]
        return character if character in keep else character.encode("unicode_escape").decode()

    return _CONTROLS.sub(escaped, _COLOURS.sub("", text))
