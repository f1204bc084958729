"""Text that people read: token ids as text, and invisible characters made visible. The tokenizers
are those on this machine. An id that is not text by itself (part of a character) has none."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from envserver_records.errors import ConfigError

_SIMULATED: Final = "sim"
_BROKEN: Final = "\ufffd"


def token_texts(model: str, tokenizer: str = "") -> Callable[[int], str | None]:
    """Returns a function from the ids of `model` to their texts.

    Args:
        tokenizer: folder of the tokenizer, or a model whose tokenizer is in the cache; unset: that
            of `model` in the cache. A record may name any `model`, so it is not read as a folder.
    """
    from ..models.catalogue import tokenizer_here  # servers start without tokenizers

    name = tokenizer or model
    folders = [Path(tokenizer)] if tokenizer else []
    folder = _simulated() if name == _SIMULATED else tokenizer_here(name, *folders)
    if folder is None and tokenizer:
        raise ConfigError(
            f"There is no tokenizer {tokenizer!r} on this machine.",
            hint="Name a folder that has tokenizer.json.",
        )
    try:
        return _texts_of(folder) if folder is not None else lambda index: None
    except ConfigError:
        if tokenizer:
            raise
        return lambda index: None


def _simulated() -> Path:
    from envserver_local.simulated import ASSETS

    return ASSETS


@functools.lru_cache(maxsize=4)
def _texts_of(folder: Path) -> Callable[[int], str | None]:
    from ..tokens.vocabulary import Vocabulary

    vocabulary = Vocabulary.load(folder)

    @functools.lru_cache(maxsize=1 << 18)
    def text(index: int) -> str | None:
        if (added := vocabulary.added_text(index)) is not None:
            return added
        try:
            once, twice = vocabulary.decode([index]), vocabulary.decode([index, index])
        except OverflowError:
            return None
        # Some tokenizers drop a leading space.
        found = f" {once}" if twice == f"{once} {once}" else once
        return None if not found or _BROKEN in found else found

    return text


_UNSEEN: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
"""Invisible characters, and those that change the direction of the text around them."""


def seen(value: Any) -> Any:
    """Makes invisible characters of a template's value visible, before it is escaped."""
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return _UNSEEN.sub(_named, value)
    return value


def _named(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return f"[U+{code:04X}]"
