"""The data of a search: a passage, its sentences, and its score. Pure.

A passage is identified by its content (`key`): the same text under the same title is the same
passage, whatever its source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from envserver import InputError


@dataclass(frozen=True)
class Passage:
    """A titled piece of text.

    Args:
        sentences: in order; undivided text is one sentence.
    """

    title: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    @property
    def key(self) -> str:
        """Ten hexadecimal digits of the content's hash."""
        content = f"{self.title}\0{self.text}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(content, digest_size=5).hexdigest()

    def as_data(self) -> dict[str, Any]:
        """Returns JSON-like data that `from_data` reads."""
        return {"title": self.title, "sentences": list(self.sentences)}

    @classmethod
    def from_data(cls, data: object) -> Passage:
        """Reads a passage with `title`, and `sentences` or `text` (or `contents`).

        Without a title, the first of several lines is the title (Search-R1's corpora).
        Raises InputError: the data has another form.
        """
        if isinstance(data, str):
            data = {"contents": data}
        if not isinstance(data, dict):
            raise InputError("A passage must be an object or a text.")
        title, sentences = data.get("title"), data.get("sentences")
        if isinstance(sentences, list):
            parts = [one.strip() for one in sentences if isinstance(one, str)]
            if len(parts) != len(sentences) or not isinstance(title, str):
                raise InputError("A passage's title and its sentences must be texts.")
            return cls(title.strip(), tuple(parts))
        names = (
            *("text", "paragraph_text", "passage_text", "page_content", "contents", "content"),
            *("passage", "paragraph", "context", "body", "snippet"),
        )
        text = next((data[name] for name in names if isinstance(data.get(name), str)), None)
        if text is None:
            raise InputError("A passage must have sentences, a text or contents.")
        if not isinstance(title, str):
            title, _, text = text.partition("\n") if "\n" in text else ("", "", text)
            title = title.strip().strip('"')
        return cls(title.strip(), (text.strip(),))


@dataclass(frozen=True)
class Hit:
    """A passage and its score; higher is better."""

    passage: Passage
    score: float

    def as_data(self) -> dict[str, Any]:
        return {**self.passage.as_data(), "score": self.score}


def passages_from(data: object) -> Iterator[Passage]:
    """Reads a list of passages; raises like `Passage.from_data`."""
    if not isinstance(data, list):
        raise InputError("There must be a list of passages.")
    for one in data:
        yield Passage.from_data(one)
