"""Reads the routed experts of an engine's answer before it is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from envserver_records.errors import EngineGarbage
from envserver_records.records import Call

from ..tokens.experts import read_experts
from .engine_answer import EngineAnswer

_BROKEN_OFF = (None, "", "abort", "error")
"""Reasons of an answer that the engine did not finish."""


MOST_BYTES = 2**28
"""Experts that the record of one rollout may hold; calls beyond have none (`experts_missing`)."""


async def read_all_experts(
    engine_answer: EngineAnswer, calls: Iterable[Call], sent_ids: Sequence[int] | None, start: int
) -> None:
    """Reads the experts of all choices, in a thread: there may be megabytes of them.

    An answer that the engine broke off may lack them.

    Args:
        calls: those recorded before.
        sent_ids: the prompt, for engines that do not echo it.
        start: position of the first token whose experts were asked for.

    Raises:
        EngineGarbage: an answer lacks them, or they do not fit its tokens.
    """
    room = MOST_BYTES - sum(call.experts.ids.nbytes for call in calls if call.experts)
    for choice in engine_answer.choices:
        text, choice.told_experts = choice.told_experts, None
        prompt = choice.prompt_ids or engine_answer.prompt_ids or sent_ids
        if prompt is None or not choice.ids:
            continue
        try:
            if not isinstance(text, str):
                raise EngineGarbage("The engine's answer has no routed experts.")
            size = len(prompt) + len(choice.ids)
            found = await asyncio.to_thread(read_experts, text, size, start)
        except EngineGarbage:
            if choice.finish_reason not in _BROKEN_OFF:
                raise
            continue
        if found.ids.nbytes <= room:
            choice.experts = found
            room -= found.ids.nbytes
