"""Tasks and results: what workers, environments and scorers exchange. No arrays, so no numpy."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from .scores import TurnReward

Split = Literal["train", "validation", "test"]

Message = dict[str, Any]
"""A chat message in OpenAI's format."""


def text_of(message: Message) -> str:
    """Returns the text of a message, whatever the form of its content."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "\n".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""


class PublicTask(msgspec.Struct, frozen=True):
    """The part of a task that a worker gets; `public` is what a rollout needs."""

    id: str
    public: dict[str, Any]

    def __post_init__(self) -> None:
        if isinstance(self.id, str) and not self.id.isprintable():
            # UTF-8 cannot hold half of a surrogate pair, and PostgreSQL no NUL character.
            told = self.id.encode(errors="backslashreplace").decode().replace("\0", "\\x00")
            msgspec.structs.force_setattr(self, "id", told)


class Task(PublicTask, frozen=True):
    """A task to solve.

    Args:
        id: unique and stable within its environment and split; any text.
        public: JSON-like; sent to the worker (the model sees only what the agent sends it).
        hidden: JSON-like (answers, tests); never leaves the server and the scorer.
    """

    hidden: dict[str, Any] = msgspec.field(default_factory=dict)

    def without_hidden(self) -> PublicTask:
        """Returns the part that may leave the server process."""
        return PublicTask(self.id, self.public)


class Result(msgspec.Struct, kw_only=True):
    """A finished rollout, as the scorer sees it.

    Args:
        output: the return value of the environment's `rollout` (JSON-like).
        messages: the last conversation that the agent sent, with the model's last answer.
        finish_reason: the last call's ("length": cut off), None without a call.
        truncated: the model was cut off: by the length of its last call, by the limits "tokens",
            "time" or "context", or by "crash". After "turns" and "record" its last answer is
            complete.
        limit: the limit that ended the rollout: "turns", "tokens", "time", "context", "record" (its
            requests hold too much memory), "crash" (code of the model ended its agent's process) or
            None.
        turns: number of model calls.
        completion_tokens: number of tokens sampled in all calls.
        metrics: numbers that the agent logged with `run.log_metric`.
        flags: labels from services (`Caller.flag`), and how `output` was cut or cleaned.
        actions: steps that the agent logged with `run.log_action`, each {"step", "tool", "input",
            "output", "ts"} with `step` from 1 and `ts` in seconds. For readers: rewards must not
            depend on them.
        turn_rewards: those that the rollout gave with `run.reward`.
        calls: for each agent ("": without a name) the indices of the calls that it received an
            answer to, turn by turn.
        completion_ids: the ids of all trained tokens, in order, for an environment with
            `scores_token_ids`; None: they are unknown, or it does not ask for them.

    Turns, tokens, messages and ends are those of the trained agents, if there are any.
    """

    output: Any = None
    messages: list[Message] = msgspec.field(default_factory=list)
    finish_reason: str | None = None
    truncated: bool = False
    limit: str | None = None
    turns: int = 0
    completion_tokens: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    flags: list[str] = msgspec.field(default_factory=list)
    actions: list[dict[str, Any]] = msgspec.field(default_factory=list)
    turn_rewards: list[TurnReward] = msgspec.field(default_factory=list)
    calls: dict[str, list[int]] = msgspec.field(default_factory=dict)
    completion_ids: list[int] | None = None
