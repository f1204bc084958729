"""`--to messages`: conversations for supervised training, one row a rollout, the best first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .formats import Options, Row
from .stored import StoredGroup, StoredRollout


class Messages:
    """Rows {"messages", "reward", "env", "task_id"}, with "tools" where there were any.

    A rollout without a conversation, or without a message of the model, has no row.
    """

    name = "messages"
    suffix = ".jsonl"

    def __init__(self, options: Options) -> None:
        del options

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        for rollout in sorted(kept, key=lambda one: -(one.reward or 0.0)):
            if not is_conversation(rollout):
                continue
            row = {
                "messages": rollout.messages,
                "reward": rollout.reward,
                "env": rollout.env,
                "task_id": rollout.task_id,
            }
            yield {**row, "tools": rollout.tools} if rollout.tools else row


def is_conversation(rollout: StoredRollout) -> bool:
    """Returns whether it has an assistant message."""
    return any(message.get("role") == "assistant" for message in rollout.messages)
