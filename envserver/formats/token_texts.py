"""Turns token ids into text, with the tokenizers on this machine.

In: the name of the model that sampled them. Out: a function from an id to its text. What holds: no
network; an id that is not text by itself (part of a character, not in the vocabulary) has none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Final

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
        return _nothing if folder is None else _texts_of(folder)
    except ConfigError:
        if tokenizer:
            raise
        return _nothing


def _simulated() -> Path:
    from ..models.sim import ASSETS

    return ASSETS


def _nothing(index: int) -> str | None:
    return None


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
