"""What is decided of a call's prompt before the engine is asked."""

from __future__ import annotations

from typing import Any

import msgspec
from envserver_records.records import Edge


class PromptPlan(msgspec.Struct, kw_only=True):
    """How the prompt of a call comes to be.

    Args:
        ids: the whole prompt; None: the engine renders it.
        text: of the whole prompt as the template renders it here, None where that is not known.
        parent: index of the call that is continued, None for none.
        edge, refusal: see Call.
        flags: of the calls that come out of it.
        added: the text behind the completion of the call that is continued.
        key: names the whole request, see `chain`; empty: nothing can be continued from the call.
        kwargs: what the request gives to the chat template.
    """

    ids: list[int] | None = None
    text: str | None = None
    parent: int | None = None
    edge: Edge = "root"
    refusal: str | None = None
    flags: list[str] = []
    added: str | None = None
    key: bytes = b""
    kwargs: dict[str, Any] = {}

    def as_root(self, refusal: str) -> PromptPlan:
        """The same prompt rendered by the engine, because of `refusal`."""
        return PromptPlan(
            text=self.text,
            refusal=refusal,
            flags=[flag for flag in self.flags if flag != "think_kept"] + ["suffix_refused"],
            key=self.key,
            kwargs=self.kwargs,
        )
