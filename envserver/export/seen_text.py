"""Text from outside on a page: no character of it is invisible, or turns the text around it."""

from __future__ import annotations

import re
from typing import Any, Final

from markupsafe import Markup

_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Invisible characters, and those that change the direction of the text around them."""


def seen(value: Any) -> Any:
    """Makes invisible characters of a template's value visible, before it is escaped."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return _UNSEEN.sub(_named, value)
    return value


def _named(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return f"[U+{code:04X}]"
