"""Recorded conversations as rows, for `envserver score --env tau`.

A row's `task` names `domain` and `task_id` of tau2-bench; these fields of its vectors are optional:
`evaluation_type`, `nl_verdicts`, `max_steps`, `max_errors`, `validate_communication`,
`agent_may_stop`. The row's `messages` are the whole conversation, in tau2-bench's own form or in
OpenAI's (calls with "function", results with "tool_call_id"). They are replayed: the tools' results
are computed, and whether and why the conversation ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from envserver import InputError

from .domains.world import Domain
from .episodes import GREETING, Episode, EpisodeRules
from .evaluation import EvaluationType
from .tasks import TauMessage, TauTask, message_of_row


class RecordedTask(BaseModel):
    """The task of a conversation, and its rules."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    domain: str
    task_id: str = Field(validation_alias=AliasChoices("task_id", "id"))
    evaluation_type: EvaluationType = "all"
    nl_verdicts: list[bool] | None = None
    max_steps: int = Field(default=100, ge=1)
    max_errors: int = Field(default=10, ge=1)
    validate_communication: bool = False
    agent_may_stop: bool = False

    @property
    def rules(self) -> EpisodeRules:
        return EpisodeRules(
            max_steps=self.max_steps,
            max_errors=self.max_errors,
            validate=self.validate_communication,
            agent_may_stop=self.agent_may_stop,
        )


def read_recorded_task(row: Mapping[str, Any]) -> RecordedTask:
    """The task of a row."""
    try:
        return RecordedTask.model_validate(row)
    except ValidationError as error:
        raise InputError(
            f"The task names no task of tau2-bench: {str(error)[:300]}",
            hint='It is {"domain": "retail", "task_id": "0", ...}.',
        ) from error


def replayed(
    domain: Domain, task: TauTask, rules: EpisodeRules, messages: Sequence[Mapping[str, Any]]
) -> Episode:
    """Replays the conversation of `messages`."""
    episode = Episode(domain, task, rules)
    remaining = [message_of_row(message, number) for number, message in enumerate(messages)]
    remaining = [message for message in remaining if message["role"] != "system"]
    del remaining[: _known(episode, remaining)]
    expected: list[TauMessage] = []
    for number, message in enumerate(remaining):
        place = f"message {len(messages) - len(remaining) + number}"
        if message["role"] == "tool":
            if not expected:
                raise InputError(f"{place}: a result without a call.")
            _check_result(place, message, expected.pop(0))
            continue
        if episode.speaker != message["role"]:
            turn = f"it is the {episode.speaker}'s turn" if episode.speaker else "it is over"
            raise InputError(f"{place}: {message['role']} speaks, but {turn}.")
        expected = episode.say(message["content"], message.get("tool_calls") or ())
    return episode


def _known(episode: Episode, messages: Sequence[TauMessage]) -> int:
    """Returns how many of `messages` precede the start: history, or a greeting.

    A greeting in other words replaces the standard one."""
    begun = episode.messages
    if len(begun) == 1 and begun[0]["content"] == GREETING:
        greeted = bool(messages) and messages[0]["role"] == "assistant"
        if greeted and not messages[0].get("tool_calls"):
            begun[0] = messages[0]
            return 1
        return 0
    same = len(messages) >= len(begun) and all(map(_is_same, begun, messages))
    return len(begun) if same else 0


def _is_same(message: TauMessage, recorded: TauMessage) -> bool:
    """Is it the recorded message? Content that was not kept does not count."""
    content = recorded["content"]
    return (
        message["role"] == recorded["role"]
        and message.get("tool_calls") == recorded.get("tool_calls")
        and (content is None or content == message["content"])
    )


def _check_result(place: str, recorded: Mapping[str, Any], result: TauMessage) -> None:
    content = recorded.get("content")
    if content is None and "content_sha256" in recorded:
        digest = hashlib.sha256(result["content"].encode()).hexdigest()
        same = recorded["content_sha256"] == digest
    else:
        same = content is None or content == result["content"]
    if not same:
        raise InputError(f"{place}: the call returns {result['content'][:300]!r}.")
