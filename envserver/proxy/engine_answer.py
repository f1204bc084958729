"""An engine's answer to one request: the same form for whole answers and streams."""

from __future__ import annotations

from typing import Any

import msgspec
from envserver_records.experts import RoutedExperts
from envserver_records.hook_events import HookEvent
from envserver_records.records import Message

from .answer_schema import check_answer
from .engine_client.base import EXPERTS
from .engine_client.generated import IMAGES


class SampledChoice(msgspec.Struct, kw_only=True):
    """One sampled answer; `ids` and `logprobs` are None if the engine gave none.

    Args:
        prompt_ids: of this choice alone, if a request held several prompts.
        weight_versions: vLLM's spans of `ids`, each {"version", "start", "end"}.
        told_experts: as the engine tells them; `experts`: read (`CallTask`).
        calls_dropped: whether the agent gets the first of its calls only.
        returned: the message that the agent gets instead, if it is another.
        hooked: what a hook did to it.
    """

    index: int
    message: Message
    ids: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_ids: list[Any] | None = None
    weight_versions: list[Any] | None = None
    told_experts: Any = None
    experts: RoutedExperts | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    calls_dropped: bool = False
    returned: Message | None = None
    hooked: HookEvent | None = None


class EngineAnswer(msgspec.Struct, kw_only=True):
    """The answers to one request.

    Args:
        images: offset, length and grid of each image in the prompt, if the engine says it.
        prompt_tokens, completion_tokens: the engine's own counts, the latter over all choices."""

    choices: list[SampledChoice]
    prompt_ids: list[Any] | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    model: str = ""
    images: list[Any] | None = None

    def tokens(self) -> int:
        """Returns the number of completion tokens: the engine's count, or else the number of
        ids."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return sum(len(choice.ids or choice.logprobs or ()) for choice in self.choices)


def parse_answer(answer: dict[str, Any]) -> EngineAnswer:
    """Parses a whole chat answer. Raises EngineGarbage: it is not a chat answer."""
    check_answer(answer)
    choices = []
    for choice in answer["choices"]:
        choices.append(
            SampledChoice(
                index=choice.get("index", 0),
                message=choice["message"],
                ids=list_or_none(choice.get("token_ids")),
                logprobs=logprobs_of(choice),
                prompt_ids=list_or_none(choice.get("prompt_token_ids")),
                weight_versions=list_or_none(choice.get("weight_versions")),
                told_experts=choice.pop(EXPERTS, None),
                finish_reason=choice.get("finish_reason"),
                stop_reason=choice.get("stop_reason"),
            )
        )
    return EngineAnswer(
        choices=choices,
        prompt_ids=list_or_none(answer.get("prompt_token_ids")),
        completion_tokens=usage_count(answer, "completion_tokens"),
        prompt_tokens=usage_count(answer, "prompt_tokens"),
        model=answer.get("model") or "",
        images=list_or_none(answer.pop(IMAGES, None)),
    )


def logprobs_of(choice: dict[str, Any]) -> list[Any] | None:
    """Returns the sampled tokens' logprobs of a chat or text completion choice."""
    held = choice.get("logprobs")
    if not isinstance(held, dict):
        return None
    content = held.get("content")
    if isinstance(content, list):
        return [entry.get("logprob") if isinstance(entry, dict) else None for entry in content]
    return list_or_none(held.get("token_logprobs"))


def usage_count(answer: dict[str, Any], name: str) -> int | None:
    """Returns the engine's count of `completion_tokens` or `prompt_tokens`, if it gave one."""
    usage = answer.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def list_or_none(value: Any) -> list[Any] | None:
    return value if isinstance(value, list) else None
