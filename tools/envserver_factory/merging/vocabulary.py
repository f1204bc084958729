"""Compares tokenizers: do they give the same ids to the same text?

In: two models' folders. Out: the first few differences of each kind, as text. Weights can be added
row by row only where row i belongs to the same token in all models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from envserver_records.errors import InputError

from .card import digest_of

FAST: Final = "tokenizer.json"
_OTHERS: Final = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt")
_TEMPLATE: Final = "chat_template.jinja"
_SHOWN: Final = 4


def differences(base: Path, other: Path) -> list[str]:
    """Returns the differences of two tokenizers; none where a folder has no tokenizer.
    Raises InputError: a tokenizer cannot be read.
    """
    if (base / FAST).is_file() and (other / FAST).is_file():
        if _same_bytes(base / FAST, other / FAST):
            return []
        return _of_fast(_read(base / FAST), _read(other / FAST))
    return [
        f"{name} is another file"
        for name in _OTHERS
        if (base / name).is_file()
        and (other / name).is_file()
        and not _same_bytes(base / name, other / name)
    ]


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (FAST, *_OTHERS))


def same_template(base: Path, other: Path) -> bool:
    """Returns whether both render conversations alike; True where one has no template file."""
    ours, theirs = base / _TEMPLATE, other / _TEMPLATE
    return not (ours.is_file() and theirs.is_file()) or _same_bytes(ours, theirs)


def _of_fast(base: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    found = _of_ids(_vocabulary(base), _vocabulary(other), "token")
    found += _of_ids(_added(base), _added(other), "added token")
    merges = [_merges(one) for one in (base, other)]
    if merges[0] != merges[1]:
        found.append(f"its merges differ ({len(merges[0])} and {len(merges[1])} of them)")
    for part in ("normalizer", "pre_tokenizer"):
        if base.get(part) != other.get(part):
            found.append(f"its {part} differs")
    return found


def _of_ids(base: Mapping[str, Any], other: Mapping[str, Any], what: str) -> list[str]:
    missing = "has none"
    words = [
        f"{what} {name!r}: {base.get(name, missing)} in the base, {other.get(name, missing)} here"
        for name in [*base, *(name for name in other if name not in base)]
        if base.get(name) != other.get(name)
    ]
    more = len(words) - _SHOWN
    return [*words[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: [piece, score], the id is the place
        return {str(one[0]): number for number, one in enumerate(vocabulary)}
    return dict(vocabulary)


def _added(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    return {str(one.get("content")): one.get("id") for one in tokenizer.get("added_tokens") or ()}


def _merges(tokenizer: Mapping[str, Any]) -> list[str]:
    """Returns the merges in one form: older files have `a b`, newer ones `[a, b]`."""
    merges = (tokenizer.get("model") or {}).get("merges") or []
    return [one if isinstance(one, str) else " ".join(one) for one in merges]


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
        raise ValueError("it is not an object")
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read: {error}.") from error


def _same_bytes(one: Path, other: Path) -> bool:
    return one.stat().st_size == other.stat().st_size and digest_of(one) == digest_of(other)
