"""Parts of responses, with each field where vLLM 0.32 puts it; tool calls in what a model wrote."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from envserver_records.errors import EngineRefused
from envserver_records.records import Message

from envserver.models.parsers import FORMATS, Tools, detect_format

from .bodies import ChatBody
from .rows import Ranked, Row
from .text import Text


class CallReader:
    """Reads tool calls from text.

    Attributes:
        known: whether the model writes calls in a known format; if not, all of its answer is text,
            as from an engine without a parser.
    """

    def __init__(self, text: Text) -> None:
        def written(messages: list[Message], tools: Tools) -> str | None:
            try:
                return text.prompt_text(messages, tools, {"add_generation_prompt": False})
            except EngineRefused:
                return None

        self._format = detect_format(written)
        self.known = self._format is not None

    def free(self, body: ChatBody) -> bool:
        """Returns whether the model may call a tool, in a format that can be parsed."""
        return self.known and bool(body.tools) and body.tool_choice in (None, "auto")

    def read(self, text: str, body: ChatBody) -> tuple[str | None, list[dict[str, Any]]]:
        """Returns the content and the calls of a text. Malformed calls are returned as text."""
        if self._format is None:
            return text, []
        found = FORMATS[self._format](text, body.tools or [])
        if found is None:
            return text, []
        calls = found.calls[:1] if body.parallel_tool_calls is False else found.calls
        content = found.content if found.content.strip() else None
        return content, [call.message() for call in calls]


Json = dict[str, Any]


def head(prefix: str, kind: str, model: str) -> Json:
    """Returns the first fields of every response."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
    }


def usage(prompts: Sequence[Sequence[int]], rows: Sequence[Row]) -> Json:
    """Counts the tokens of all prompts and all answers."""
    asked, said = sum(map(len, prompts)), sum(len(row.ids) for row in rows)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


def ranked(row: Row, start: int, end: int) -> list[Ranked]:
    """Returns for each token its id and logprob, then the requested number of most likely ones."""
    if not row.sampling.top_logprobs:
        return [[pair] for pair in zip(row.ids[start:end], row.logprobs[start:end], strict=True)]
    found = []
    for place in range(start, end):
        token = row.ids[place]
        others = [pair for pair in row.tops[place] if pair[0] != token]
        found.append([(token, row.logprobs[place]), *others])
    return found


def chat_logprobs(text: Text, row: Row, start: int, end: int, *, as_ids: bool) -> Json:
    """Returns logprobs in the format of chat completions, the most likely first."""

    def entry(index: int, logprob: float) -> Json:
        name = text.name(index)
        return {
            "token": f"token_id:{index}" if as_ids else name,
            "logprob": logprob,
            "bytes": list(name.encode()),
        }

    content = []
    for place in range(start, end):
        tops = row.tops[place] if row.sampling.top_logprobs else []
        content.append(
            {
                **entry(row.ids[place], row.logprobs[place]),
                "top_logprobs": [entry(*pair) for pair in tops],
            }
        )
    return {"content": content}


def token_logprobs(row: Row, start: int, end: int) -> Json:
    """Returns logprobs in the format of responses with ids only: sampled token, then most likely
    ones."""

    def entry(index: int, logprob: float) -> Json:
        return {"token_id": index, "logprob": logprob, "rank": None}

    return {
        "content": [
            {**entry(*tokens[0]), "top_logprobs": [entry(*pair) for pair in tokens]}
            for tokens in ranked(row, start, end)
        ]
    }


def completion_logprobs(text: Text, row: Row, start: int, end: int, *, as_ids: bool) -> Json:
    """Returns logprobs in the format of completions."""
    name = _named(text, as_ids)
    return _columns(
        [name(index) for index in row.ids[start:end]],
        list(row.logprobs[start:end]),
        [{name(index): value for index, value in one} for one in ranked(row, start, end)],
    )


def echoed_logprobs(text: Text, row: Row, *, as_ids: bool) -> Json:
    """Returns logprobs of prompt and answer in the same format; the first token has none."""
    name = _named(text, as_ids)
    own = completion_logprobs(text, row, 0, len(row.ids), as_ids=as_ids)
    scored = row.scored or []
    return _columns(
        [name(index) for index in row.prompt] + own["tokens"],
        [None, *(one[0][1] for one in scored), *own["token_logprobs"]],
        [
            None,
            *({name(index): value for index, value in one} for one in scored),
            *own["top_logprobs"],
        ],
    )


def prompt_logprobs(text: Text, row: Row) -> list[Json | None] | None:
    """Returns logprobs of the prompt's tokens by id, None for the first; None if not requested."""
    if row.scored is None:
        return None
    found: list[Json | None] = [None]
    for one in row.scored:
        ranks = {index: rank for rank, (index, _) in enumerate(sorted(one, key=_falling), start=1)}
        found.append(
            {
                str(index): {
                    "logprob": value,
                    "rank": ranks[index],
                    "decoded_token": text.name(index),
                }
                for index, value in one
            }
        )
    return found


def _falling(pair: tuple[int, float]) -> float:
    return -pair[1]


def _named(text: Text, as_ids: bool) -> Any:
    return (lambda index: f"token_id:{index}") if as_ids else text.name


def _columns(tokens: list[str], logprobs: list[Any], tops: list[Any]) -> Json:
    offsets, end = [], 0
    for token in tokens:
        offsets.append(end)
        end += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": logprobs,
        "tokens": tokens,
        "top_logprobs": tops,
    }
