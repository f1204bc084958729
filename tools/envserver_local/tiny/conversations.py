"""Reads expert trajectories of `envserver process` as training texts.

Pure except for reading the file. What holds: the pieces of a conversation, joined, are the text
that its chat template renders, and exactly the model's own text is marked as said.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from envserver_records.errors import InputError
from envserver_records.records import Message
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
END_OF_TURN = "<|im_end|>"


class Piece(NamedTuple):
    """A part of a conversation's text.

    Args:
        said: whether the model says it, so that it is trained on.
    """

    text: str
    said: bool


@dataclass(frozen=True)
class Conversation:
    """One rollout of an expert.

    Args:
        rollout_id: its id; the same expert makes the same conversation under the same id.
        right: whether it got the full reward.
        messages, tools: as sent to the engine.
    """

    rollout_id: str
    right: bool
    messages: list[Message]
    tools: list[dict[str, Any]]

    def pieces(self) -> list[Piece]:
        """Returns its text in parts."""
        pieces, before = [], ""
        for place, message in enumerate(self.messages):
            if message["role"] != "assistant":
                continue
            asked = _render(self.messages[:place], self.tools, add_generation_prompt=True)
            after = _render(self.messages[: place + 1], self.tools, add_generation_prompt=False)
            said, end, rest = after.removeprefix(asked).rpartition(END_OF_TURN)
            pieces += [Piece(asked.removeprefix(before), False), Piece(said + end, True)]
            before = after.removesuffix(rest)
        return pieces

    def text(self) -> str:
        """Returns its text up to the model's last word."""
        return "".join(piece.text for piece in self.pieces())


def read_conversations(path: Path) -> list[Conversation]:
    """Reads all rollouts with a reward from a file of groups, sorted by id.
    Raises InputError: a line is not a group of `envserver process`, or there is no conversation.
    """
    found: list[Conversation] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                found += _of_group(json.loads(line))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InputError(f"{path}, line {number} is not a group: {error!r}.") from error
    if not found:
        raise InputError(f"{path} holds no conversation.")
    return sorted(found, key=lambda one: one.rollout_id)


def texts(conversations: Iterable[Conversation]) -> list[str]:
    """Returns the distinct texts of conversations, in order."""
    return sorted({conversation.text() for conversation in conversations})


def _of_group(group: dict[str, Any]) -> Iterator[Conversation]:
    for rollout in group["envserver"]["rollouts"]:
        messages = group["messages"][rollout["rows"][0]]
        if rollout["reward"] is not None and messages:
            yield Conversation(
                rollout["rollout_id"], rollout["reward"] == 1.0, messages, rollout["tools"]
            )


def _render(
    messages: list[Message], tools: list[dict[str, Any]], *, add_generation_prompt: bool
) -> str:
    return _TEMPLATE.render(
        messages=messages, tools=tools or None, add_generation_prompt=add_generation_prompt
    )


def _compiled() -> jinja2.Template:
    """Returns the template compiled as transformers and engines compile it."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


_TEMPLATE = _compiled()
