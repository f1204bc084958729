"""The prompt plan of a call."""

from __future__ import annotations

from typing import Any

import msgspec
from envserver_records.records import Edge, Tokens


class PromptPlan(msgspec.Struct, kw_only=True):
    """How the prompt of a call is made.

    Args:
        ids: the whole prompt, with one token for each image; None: the engine renders it.
        tokens: `ids` as an array, so that nobody converts them again.
        text: the whole prompt as our template renders it; None if unknown.
        parent: index of the continued call, or None.
        edge, refusal: see Call.
        flags: flags of the resulting calls.
        added: the text after the completion of the continued call.
        key: hash of the whole request, see `chain`; empty: the call cannot be continued.
        kwargs: the request's variables for the chat template.
        images: SHA-256 of each image of the request, in order.
    """

    ids: list[int] | None = None
    tokens: Tokens | None = None
    text: str | None = None
    parent: int | None = None
    edge: Edge = "root"
    refusal: str | None = None
    flags: list[str] = []
    added: str | None = None
    key: bytes = b""
    kwargs: dict[str, Any] = {}
    images: list[str] = []

    def as_root(self, refusal: str) -> PromptPlan:
        """Returns the same prompt, rendered by the engine because of `refusal`."""
        return PromptPlan(
            text=self.text,
            refusal=refusal,
            flags=[flag for flag in self.flags if flag != "think_kept"] + ["suffix_refused"],
            key=self.key,
            kwargs=self.kwargs,
            images=self.images,
        )
