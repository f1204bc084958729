"""A model's tokenizer by the `tokenizers` library, without transformers.

It encodes what an engine puts before the model for a rendered chat: special tokens in the text are
recognised, none is added.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from envserver_records.errors import ConfigError
from envserver_records.records import Tokens
from tokenizers import AddedToken, Tokenizer

from .prepare import Refused

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"

# One text at a time is encoded, which the library's threads make slower: waking them takes as long.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BEFORE = ("x", "x.", "é\n", "12", "}")
_AFTER = ("", "x", "\nx", " x", "\n\n1")


class Vocabulary:
    """Text <-> ids. `variables`: what a template may name: `bos_token`, `eos_token`, ..."""

    def __init__(
        self, tokenizer: Tokenizer, variables: Mapping[str, str], digest: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.variables = dict(variables)
        self.digest = digest
        self._added: dict[int, AddedToken] = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in self._added.items() if token.special)
        self._ids = {token.content: id for id, token in self._added.items()}
        self.stands_alone = lru_cache(maxsize=256)(self._stands_alone)

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        path = folder / TOKENIZER
        if not path.is_file():
            raise ConfigError(
                f"There is no {TOKENIZER} in {folder}.",
                hint="Name the folder of a model with a tokenizer of the `tokenizers` library.",
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} cannot be read: {error}.") from error
        config = read_json(folder / CONFIG)
        named = _named_tokens({**config, **read_json(folder / SPECIAL_TOKENS)})
        _add_missing(tokenizer, config, named)
        return cls(tokenizer, named, _digest([path, folder / CONFIG, folder / SPECIAL_TOKENS]))

    @cached_property
    def size(self) -> int:
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        try:
            # A batch takes a fifth less than `encode`, and lets other threads run.
            [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
            return encoding.ids
        except (UnicodeEncodeError, TypeError):
            raise Refused("not_unicode") from None

    def tokens(self, text: str) -> Tokens:
        return np.asarray(self.encode(text), np.int32)

    def decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def special_id(self, text: str) -> int | None:
        return self._ids.get(text)

    def is_special(self, id: int) -> bool:
        """Returns whether `id` steers the conversation instead of being part of the text."""
        return id in self.special_ids

    def added_text(self, id: int) -> str | None:
        """Returns the added token `id` as text; None for an ordinary token."""
        token = self._added.get(id)
        return None if token is None else token.content

    def find_added(self, text: str) -> re.Match[str] | None:
        return self._any_added.search(text)

    @cached_property
    def _any_added(self) -> re.Pattern[str]:
        longest_first = sorted(self._ids, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def _stands_alone(self, id: int) -> bool:
        """Returns whether text may be encoded in two, the second beginning with added token `id`.

        Tried, not derived: normalizers, tokens that swallow the spaces around them and prefixes
        before a text's beginning all show in the ids.
        """
        text = self.added_text(id)
        if text is None:
            return False
        for after in _AFTER:
            tail = self.encode(text + after)
            if tail[:1] != [id]:
                return False
            if any(self.encode(b + text + after) != self.encode(b) + tail for b in _BEFORE):
                return False
        return True


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in `path`, {} without such a file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    return value


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Returns `bos_token` and its like; a token is a string or an object with its `content`."""
    named = {}
    for name, value in config.items():
        if isinstance(value, dict):
            value = value.get("content")
        if name.endswith("_token") and isinstance(value, str):
            named[name] = value
    return named


def _add_missing(tokenizer: Tokenizer, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Adds all tokens that the configuration calls added, as transformers does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    tokens = [_added_token(listed[id]) for id in sorted(listed, key=int)]
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    more = [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    tokens += [_added_token(token) for token in more]
    for token in tokens:
        if token.content and token.content not in known:
            known.add(token.content)
            (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])


def _added_token(value: Any) -> AddedToken:
    if isinstance(value, dict):
        flags = ("single_word", "lstrip", "rstrip", "normalized")
        chosen = {flag: bool(value[flag]) for flag in flags if flag in value}
        return AddedToken(value["content"], special=value.get("special", True), **chosen)
    return AddedToken(str(value), special=True, normalized=False)


def _digest(paths: list[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in paths:
        body = path.read_bytes() if path.is_file() else b""
        digest.update(len(body).to_bytes(8, "little") + body)
    return digest.hexdigest()
