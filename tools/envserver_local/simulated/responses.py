"""Responses in vLLM's form, for this engine and the one on transformers.

Fields are where vLLM 0.32 puts them: `prompt_token_ids` at the top of a chat answer and of its
first chunk, but inside the choice in completions; `token_ids` always in the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

from envserver_records.tasks import Json

Ranked = list[tuple[int, float]]
"""Ids with their logprobs, the most likely first."""


class Vocabulary(Protocol):
    def name(self, index: int, /) -> str:
        """The text of a token."""

    def spelling(self, index: int, /) -> bytes:
        """The bytes of a token."""


@dataclass(eq=False)
class Answer:
    """One answer to `prompt` (ids, at least one), complete when `finish` is set."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Ranked] = field(default_factory=list)
    """The requested number of most likely tokens for each of `ids`; empty if none were requested.
    """
    scored: list[Ranked] | None = None
    """Logprobs of each prompt token but the first: the token itself, then the most likely ones."""
    stop_reason: int | str | None = None
    """The stop string or token id."""
    finish: str | None = None
    """stop, length, abort or error."""


def usage(answers: Sequence[Answer], n: int) -> Json:
    """`n`: the number of answers to each prompt."""
    prompt = sum(len(answer.prompt) for answer in answers[::n])
    completion = sum(len(answer.ids) for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def usage_chunk(body: Any, head: Json, answers: Sequence[Answer], n: int) -> Iterator[Json]:
    """The last chunk of a stream, if it was requested."""
    if body.stream_options and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage(answers, n)}


def ranked(answer: Answer, start: int = 0, end: int | None = None) -> list[Ranked]:
    """For each token its id and logprob, then the requested number of most likely ones."""
    sampled = zip(answer.ids[start:end], answer.logprobs[start:end], strict=True)
    if not answer.tops:
        return [[pair] for pair in sampled]
    return [
        [pair, *(other for other in tops if other[0] != pair[0])]
        for pair, tops in zip(sampled, answer.tops[start:end], strict=True)
    ]


def prompt_logprobs(vocabulary: Vocabulary, answer: Answer) -> list[Json | None] | None:
    """Logprobs of the prompt's tokens by id, None for the first; None if not requested."""
    if answer.scored is None:
        return None
    found: list[Json | None] = [None]
    for tokens in answer.scored:
        by_rank = sorted(tokens, key=lambda pair: -pair[1])
        ranks = {index: rank for rank, (index, _) in enumerate(by_rank, start=1)}
        found.append(
            {
                str(index): {
                    "logprob": value,
                    "rank": ranks[index],
                    "decoded_token": vocabulary.name(index),
                }
                for index, value in tokens
            }
        )
    return found


def chat_logprobs(
    vocabulary: Vocabulary, answer: Answer, start: int, end: int | None, *, as_ids: bool
) -> Json:
    """Logprobs in the format of chat completions, the most likely first."""

    def entry(index: int, logprob: float) -> Json:
        return {
            "token": f"token_id:{index}" if as_ids else vocabulary.name(index),
            "logprob": logprob,
            "bytes": list(vocabulary.spelling(index)),
        }

    content = []
    for place in range(len(answer.ids))[start:end]:
        tops = answer.tops[place] if answer.tops else []
        sampled = entry(answer.ids[place], answer.logprobs[place])
        content.append({**sampled, "top_logprobs": [entry(*pair) for pair in tops]})
    return {"content": content}


def chat_facts(
    vocabulary: Vocabulary, body: Any, answer: Answer, start: int = 0, end: int | None = None
) -> Json:
    """Logprobs and ids of tokens `start` to `end` of a choice."""
    facts: Json = {"logprobs": None}
    if body.logprobs:
        as_ids = bool(body.return_tokens_as_token_ids)
        facts["logprobs"] = chat_logprobs(vocabulary, answer, start, end, as_ids=as_ids)
    if body.return_token_ids:
        facts["token_ids"] = answer.ids[start:end]
    return facts


def chat_whole(
    vocabulary: Vocabulary,
    body: Any,
    head: Json,
    answers: Sequence[Answer],
    messages: Sequence[Json],
    ends: Sequence[str | None],
) -> Json:
    """`messages` and `ends`: of each choice; an end is a finish reason."""
    prompt = answers[0].prompt
    return {
        **head,
        "choices": [
            {
                "index": index,
                "message": message,
                **chat_facts(vocabulary, body, answer),
                "finish_reason": finish,
                "stop_reason": answer.stop_reason,
            }
            for index, (answer, message, finish) in enumerate(
                zip(answers, messages, ends, strict=True)
            )
        ],
        "usage": usage(answers, len(answers)),
        "prompt_logprobs": prompt_logprobs(vocabulary, answers[0]),
        "prompt_token_ids": prompt if body.return_token_ids else None,
    }


def chat_starts(body: Any, head: Json, answers: Sequence[Answer]) -> Iterator[Json]:
    """The first chunk of each choice."""
    ids = {"prompt_token_ids": answers[0].prompt} if body.return_token_ids else {}
    for index in range(len(answers)):
        delta = {"role": "assistant", "content": ""}
        first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield {**head, "choices": [first], **ids}


def _columns(
    name: Callable[[int], str], tokens: Sequence[int], rows: Sequence[Ranked | None]
) -> Json:
    """Logprobs in the format of completions; `rows`: what `ranked` gives for each token."""
    names = [name(index) for index in tokens]
    return {
        "text_offset": [0, *accumulate(map(len, names))][: len(names)],
        "token_logprobs": [row and row[0][1] for row in rows],
        "tokens": names,
        "top_logprobs": [row and _by_name(name, row) for row in rows],
    }


def _by_name(name: Callable[[int], str], row: Ranked) -> dict[str, float]:
    """Logprobs by token text; of tokens with the same text the more likely one counts."""
    named: dict[str, float] = {}
    for index, value in row:
        named.setdefault(name(index), value)
    return named


def completion_facts(
    vocabulary: Vocabulary, body: Any, answer: Answer, start: int = 0, end: int | None = None
) -> Json:
    """Logprobs (with those of an echoed prompt) and ids of tokens `start` to `end` of a choice."""
    facts: Json = {"logprobs": None}
    if body.logprobs is not None and body.logprobs is not False:
        tokens: list[int] = answer.ids[start:end]
        rows: list[Ranked | None] = [*ranked(answer, start, end)]
        if body.echo:
            tokens = answer.prompt + tokens
            rows = [None, *(answer.scored or []), *rows]
        as_ids = bool(body.return_tokens_as_token_ids)
        facts["logprobs"] = _columns(
            "token_id:{}".format if as_ids else vocabulary.name, tokens, rows
        )
    facts["token_ids"] = answer.ids[start:end] if body.return_token_ids else None
    return facts


def completion_whole(
    vocabulary: Vocabulary, body: Any, head: Json, answers: Sequence[Answer], texts: Sequence[str]
) -> Json:
    return {
        **head,
        "choices": [
            {
                "index": index,
                "text": text,
                **completion_facts(vocabulary, body, answer),
                "finish_reason": answer.finish,
                "stop_reason": answer.stop_reason,
                "prompt_logprobs": prompt_logprobs(vocabulary, answer),
                "prompt_token_ids": answer.prompt if body.return_token_ids else None,
            }
            for index, (answer, text) in enumerate(zip(answers, texts, strict=True))
        ],
        "usage": usage(answers, body.n or 1),
    }
