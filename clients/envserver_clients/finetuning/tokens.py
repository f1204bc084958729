"""Encodes a conversation with any chat template: token ids, and which of them to train.

What always holds: the tokens before a trained token are exactly those that an engine would have
when it samples that turn: the template's rendering of the messages so far with its generation
prompt. So every turn of the assistant is rendered twice, as prompt and as prompt with answer. Turns
whose prompt continues the turn before token by token share one row; others (with templates that
drop earlier thoughts) begin a new one. Templates need no marks. Trained are only the answer's
tokens up to the one that ends the turn.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from envserver_records import InputError
from jinja2 import TemplateError

from .conversation import Conversation, Message, Plain, Tokens

Span = tuple[int, int]

NOT_TRAINED = -100
"""The label of context tokens."""


@dataclass(frozen=True)
class Encoded:
    """One training row.

    Args:
        ids: T token ids.
        trained: T flags: whether the loss counts the token.
        calls: the trained turns that call tools: first token, and the one after the last.
    """

    ids: list[int]
    trained: list[bool]
    calls: tuple[Span, ...] = ()

    @property
    def labels(self) -> list[int]:
        """The trained ids, `NOT_TRAINED` elsewhere."""
        return [
            token if kept else NOT_TRAINED
            for token, kept in zip(self.ids, self.trained, strict=True)
        ]

    def cut(self, length: int) -> Encoded:
        """Returns the first `length` tokens."""
        calls = tuple(span for span in self.calls if span[1] <= length)
        return Encoded(self.ids[:length], self.trained[:length], calls)

    def turns(self) -> list[Span]:
        """Returns the trained turns: first token, and the one after the last."""
        edges = zip([False, *self.trained], [*self.trained, False], strict=True)
        places = [place for place, (before, now) in enumerate(edges) if before != now]
        return list(zip(places[::2], places[1::2], strict=True))


class Encoder:
    """Renders with the chat template of a tokenizer.

    Args:
        tokenizer: the model's tokenizer, from transformers.
        ends: ids of tokens that end a turn, in addition to the tokenizer's.
        last_only: train only the last turn of the assistant.
    """

    def __init__(
        self, tokenizer: Any, *, ends: frozenset[int] = frozenset(), last_only: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        own = tokenizer.eos_token_id
        self._ends = ends if own is None else ends | {own}
        self._last_only = last_only
        self.rendered_otherwise = 0
        """Turns whose prompt the template renders differently once they are answered."""

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._tokenizer.chat_template)

    def is_rendered(self, prompt: str) -> bool:
        """Returns whether a text is already rendered: it has special tokens, or no template."""
        special = self._tokenizer.all_special_tokens
        return not self.has_template or any(token in prompt for token in special)

    def conversation(self, conversation: Conversation, place: str) -> list[Encoded]:
        """Encodes a conversation; returns its rows in order, none if there is nothing to train.
        Raises InputError: the model has no chat template, or the template rejects the messages.
        """
        messages = conversation.messages
        turns = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and number >= conversation.given
        ]
        rows: list[Encoded] = []
        for number in turns[-1:] if self._last_only else turns:
            turn = self._turn(messages, number, conversation, place)
            if messages[number].get("tool_calls"):
                turn = replace(turn, calls=tuple(turn.turns()))
            if rows and (joined := _joined(rows[-1], turn)):
                rows[-1] = joined
            else:
                rows.append(turn)
        return rows

    def plain(self, text: Plain) -> Encoded:
        """Encodes plain text: adds the tokenizer's begin token if the text does not have it, and an
        end token."""
        start = self._beginning(text.prompt)
        prompt = start + self._ids(text.prompt)
        both = start + self._ids(text.prompt + text.completion)
        full = both if both[: len(prompt)] == prompt else prompt + self._ids(text.completion)
        return self._answered(prompt, full)

    def exact(self, tokens: Tokens, place: str) -> Encoded:
        """Takes recorded tokens as they are. Raises InputError: they are another model's."""
        if max(tokens.ids, default=0) >= len(self._tokenizer):
            raise InputError(
                f"{place}: token {max(tokens.ids)} is not in the model's vocabulary.",
                hint="Recorded tokens fit only models with the tokenizer that made them.",
            )
        row = Encoded(tokens.ids, tokens.sampled)
        if not self._last_only or not any(row.trained):
            return row
        start, end = row.turns()[-1]
        return Encoded(row.ids, _mask(start, end, len(row.ids)))

    def _turn(
        self, messages: list[Message], number: int, conversation: Conversation, place: str
    ) -> Encoded:
        before = self._render(messages[:number], conversation, place, generation=True)
        after = self._render(messages[: number + 1], conversation, place, generation=False)
        if after.startswith(before):
            prompt, full = self._ids(before), self._ids(after)
            if full[: len(prompt)] != prompt:
                # A token across the boundary: an engine would have the prompt's own tokens.
                full = prompt + self._ids(after[len(before) :])
            return self._answered(prompt, full)
        self.rendered_otherwise += 1
        full = self._ids(after)
        return self._answered(full[: _common(self._ids(before), full)], full)

    def _render(
        self, messages: list[Message], conversation: Conversation, place: str, *, generation: bool
    ) -> str:
        if not self.has_template:
            raise InputError(
                f"{place}: the row is a conversation, but the model has no chat template.",
                hint="Use a chat model, or rows with prompt and completion and --prompts plain.",
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=generation,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise InputError(f"{place}: the chat template rejects it: {error}") from error
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _beginning(self, text: str) -> list[int]:
        token, number = self._tokenizer.bos_token, self._tokenizer.bos_token_id
        if number is None or text.startswith(token):
            return []
        habit = self._tokenizer("a")["input_ids"][:1]
        return [number] if habit == [number] else []

    def _answered(self, prompt: list[int], full: list[int]) -> Encoded:
        """Encodes `full`, which begins with `prompt`; trains the rest, to the end of the turn."""
        last = max(
            (place for place in range(len(prompt), len(full)) if full[place] in self._ends),
            default=None,
        )
        if last is None:
            if self._tokenizer.eos_token_id is None:
                return Encoded(full, _mask(len(prompt), len(full), len(full)))
            full = [*full, self._tokenizer.eos_token_id]
            last = len(full) - 1
        return Encoded(full, _mask(len(prompt), last + 1, len(full)))


def _mask(start: int, end: int, length: int) -> list[bool]:
    return [start <= place < end for place in range(length)]


def _joined(row: Encoded, turn: Encoded) -> Encoded | None:
    """Joins both into one row if the turn's prompt begins with all sampled tokens of the row."""
    sampled = len(row.ids) - row.trained[::-1].index(True)
    if turn.ids[:sampled] != row.ids[:sampled] or any(turn.trained[:sampled]):
        return None
    trained = row.trained[:sampled] + turn.trained[sampled:]
    return Encoded(turn.ids, trained, row.calls + turn.calls)


def _common(first: list[int], second: list[int]) -> int:
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
