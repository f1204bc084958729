"""Records how an environment's hook changed or refused a model call (`Environment.on_request`)."""

from __future__ import annotations

from typing import Literal

import msgspec


class HookEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One change or refusal.

    Args:
        at: the hook: of the request, or of the answer.
        reason: as the environment gave it.
        changed: names of what was changed (messages, tools, prompt, answer); empty: it refused.
        agent: name of the calling agent, None if there is only one.
        call: index of the call, None if none was made.
    """

    at: Literal["request", "answer"]
    reason: str
    changed: list[str] = []
    agent: str | None = None
    call: int | None = None
