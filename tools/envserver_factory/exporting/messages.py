"""`--to messages`: conversations for supervised training, one row a rollout, the best first.
`--to dpo`: pairs of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any

from envserver_records.records import Message

from envserver.export.stored import StoredGroup, StoredRollout

from .formats import Options, Row, Writer
from .shards import Files


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


class Dpo:
    """Pairs the best rollout of a group with the worst, the second best with the second worst, and
    so on.

    Each rollout is in at most one pair. Rewards of a pair differ by at least `Options.margin`.
    `prompt + chosen` and `prompt + rejected` are the two conversations; the prompt ends before the
    model's first message.
    """

    name = "dpo"
    suffix = ".jsonl"

    def __init__(self, options: Options) -> None:
        self._margin = options.margin

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        usable = [one for one in kept if one.reward is not None and is_conversation(one)]
        ranked = sorted(usable, key=lambda one: -(one.reward or 0.0))
        for better, worse in zip(ranked, reversed(ranked), strict=True):
            difference = (better.reward or 0.0) - (worse.reward or 0.0)
            if difference <= 0 or difference < self._margin:
                return
            prompt = prompt_of(better.messages)
            if prompt and prompt == prompt_of(worse.messages):
                yield _pair(better, worse, prompt)


def prompt_of(messages: list[Message]) -> list[Message]:
    """Returns the messages before the model's first one."""
    return list(takewhile(lambda message: message.get("role") != "assistant", messages))


def _pair(better: StoredRollout, worse: StoredRollout, prompt: list[Message]) -> Row:
    pair: dict[str, Any] = {
        "prompt": prompt,
        "chosen": better.messages[len(prompt) :],
        "rejected": worse.messages[len(prompt) :],
        "env": better.env,
        "task_id": better.task_id,
        "chosen_reward": better.reward,
        "rejected_reward": worse.reward,
    }
    return {**pair, "tools": better.tools} if better.tools else pair


_OF_ROWS = (
    *("tokens", "masks", "scores", "messages", "inference_logprobs", "ref_logprobs", "overrides"),
    *("advantages", "images", "distill_token_ids", "distill_logprobs"),
)
"""Keys of a line with one entry for each row."""


class Atropos:
    """Writes lines that every reader of `process` files understands, chained as those are."""

    name = "atropos"
    suffix = ".jsonl"

    def __init__(self, options: Options) -> None:
        del options

    def writer(self) -> Writer:
        return Files(chained=True)

    def rows(self, group: StoredGroup, kept: Sequence[StoredRollout]) -> Iterator[Row]:
        if len(kept) == len(group.rollouts):
            yield group.line
        else:
            yield kept_line(group, {rollout.rollout_id for rollout in kept})


def kept_line(group: StoredGroup, rollout_ids: set[str]) -> dict[str, Any]:
    """Returns the line of `group` with these rollouts only, their rows renumbered.

    Advantages are removed: they were computed over the whole group.
    """
    line = group.line
    rows: list[int] = []
    kept_rollouts = []
    for rollout in line["envserver"]["rollouts"]:
        if rollout["rollout_id"] in rollout_ids:
            begin = len(rows)
            rows += rollout["rows"]
            kept_rollouts.append({**rollout, "rows": list(range(begin, len(rows)))})
    columns = {key: [line[key][row] for row in rows] for key in _OF_ROWS if line.get(key)}
    envserver = {**line["envserver"], "rollouts": kept_rollouts}
    return {**line, **columns, "advantages": None, "envserver": envserver}
