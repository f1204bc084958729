"""The answers of the endpoints, field by field where vLLM 0.32 puts them.

Token ids: `prompt_token_ids` is at the top of a chat answer and of its first chunk, but inside the
choice in completions; `token_ids` is always in the choice. The end-of-turn token is among
the ids and logprobs and has no text.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import msgspec

from .conversation import ChatBody, CompletionBody, GenerateBody
from .tokenizer import Prompt, SimTokenizer, call_spans, parsed


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that end an answer early.

    Args:
        max_tokens: at least 1.
        stops: stop strings, none empty.
        stop_token_ids: ids that end the answer.
        keep_stop: whether the text keeps the stop string or the stop token.
    """

    max_tokens: int
    stops: list[str] = []
    stop_token_ids: frozenset[int] = frozenset()
    keep_stop: bool = False


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `finish` is "stop" or "length"; `stop_reason` the stop string or token id."""

    text: str
    ids: list[int]
    logprobs: list[float]
    finish: str
    stop_reason: int | str | None
    key: str


def completed(
    tokenizer: SimTokenizer, prompt: Prompt, sampled: list[int], ending: Ending, key: str
) -> Completion:
    """Returns the answer `sampled` after `prompt`, up to what ends it first.

    As in vLLM, a stop string cuts the text, but all sampled tokens stay, including the one that
    completed the stop string; the end-of-turn token and stop tokens have no text. If the ids do not
    end with the end-of-turn token, they were cut off already.
    """
    ids, finish, reason = _cut(sampled, ending, tokenizer.im_end)
    silent = reason is not None and not ending.keep_stop
    text, ends = tokenizer.offsets(ids[:-1] if silent else ids)
    stop = first_stop(text, ending.stops)
    if stop is not None:
        start, end, stop_string = stop
        ids, finish, reason = ids[: bisect_left(ends, end) + 1], "stop", stop_string
        text = text[: end if ending.keep_stop else start]
    logprobs = tokenizer.logits.score(prompt.fold, len(prompt.ids), ids).tolist()
    return Completion(
        text=text, ids=ids, logprobs=logprobs, finish=finish, stop_reason=reason, key=key
    )


def _cut(ids: list[int], ending: Ending, im_end: int) -> tuple[list[int], str, int | str | None]:
    """Returns the ids up to a stop token or the limit, how they end, and the stop token."""
    for place, index in enumerate(ids[: ending.max_tokens] if ending.stop_token_ids else ()):
        if index in ending.stop_token_ids and index != im_end:
            return ids[: place + 1], "stop", index
    ids = ids[: ending.max_tokens]
    return ids, "stop" if ids[-1] == im_end else "length", None


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Returns start, end and text of the stop string completed first; ties: the first listed."""
    found = [(text.find(stop), stop) for stop in stops]
    spans = [(start, start + len(stop), stop) for start, stop in found if start >= 0]
    return min(spans, key=lambda span: span[1], default=None)


MODEL = "sim"
FINGERPRINT = "envserver-sim"

Json = dict[str, Any]


class Sampled(msgspec.Struct, frozen=True):
    """A prompt with its `n` answers."""

    prompt: Prompt
    completions: list[Completion]


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a chat request. `choice` is how tools may be used (see requests.check_chat)."""

    tokenizer: SimTokenizer
    body: ChatBody
    choice: str
    sampled: Sampled
    created: int

    def whole(self) -> Json:
        """Returns the complete answer."""
        prompt = self.sampled.prompt
        scored = _prompt_logprobs(self.tokenizer, prompt, self.body.prompt_logprobs)
        return {
            **self._head("chat.completion"),
            "choices": [
                self._choice(index, completion)
                for index, completion in enumerate(self.sampled.completions)
            ],
            "usage": usage([self.sampled]),
            "prompt_logprobs": scored,
            "prompt_token_ids": prompt.ids if self.body.return_token_ids else None,
        }

    def chunks(self) -> Iterator[Json]:
        """Yields the answer token by token, one token of each choice in turn."""
        head = self._head("chat.completion.chunk")
        for index in range(len(self.sampled.completions)):
            delta = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": self.sampled.prompt.ids}
            yield {**head, "choices": [first], **(ids if self.body.return_token_ids else {})}
        for choices in zip_longest(*map(self._steps, range(len(self.sampled.completions)))):
            yield from ({**head, "choices": [choice]} for choice in choices if choice is not None)
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage([self.sampled])}

    def _head(self, kind: str) -> Json:
        return {
            "id": f"chatcmpl-{self.sampled.completions[0].key}",
            "object": kind,
            "created": self.created,
            "model": MODEL,
            "system_fingerprint": FINGERPRINT,
        }

    def _parsed(self, completion: Completion) -> tuple[str | None, list[Json]]:
        """Returns content and calls; without tools in the request nothing is parsed as a call."""
        if self.choice == "none":
            return completion.text, []
        content, calls = parsed(completion.text)
        return content, [
            {
                "id": f"call_{_digest(f'{completion.key}-{place}', 12)}",
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for place, (name, arguments) in enumerate(calls)
        ]

    def _finish(self, completion: Completion, calls: list[Json]) -> str:
        named = self.choice not in ("none", "auto", "required")
        return "tool_calls" if calls and not named else completion.finish

    def _choice(self, index: int, completion: Completion) -> Json:
        content, calls = self._parsed(completion)
        message: Json = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        choice = {
            "index": index,
            "message": message,
            "logprobs": {"content": self._logprobs(completion)} if self.body.logprobs else None,
            "finish_reason": self._finish(completion, calls),
            "stop_reason": completion.stop_reason,
        }
        return choice | ({"token_ids": completion.ids} if self.body.return_token_ids else {})

    def _logprobs(self, completion: Completion) -> list[Json]:
        top = self.body.top_logprobs or 0
        as_ids = bool(self.body.return_tokens_as_token_ids)

        def entry(index: int, logprob: float) -> Json:
            token = _name(self.tokenizer, index, as_ids)
            return {
                "token": token,
                "logprob": logprob,
                "bytes": list(self.tokenizer.bytes_of[index]),
            }

        rows = _ranked(self.tokenizer, self.sampled.prompt, completion, top)
        return [
            {**entry(*row[0]), "top_logprobs": [entry(*pair) for pair in row[:top]]} for row in rows
        ]

    def _steps(self, number: int) -> Iterator[Json]:
        """Yields the choices of one completion's chunks, one per token."""
        completion = self.sampled.completions[number]
        _, calls = self._parsed(completion)
        scored = self._logprobs(completion) if self.body.logprobs else None
        last = len(completion.ids) - 1
        for place, delta in enumerate(_deltas(self.tokenizer, completion, calls)):
            choice = {
                "index": number,
                "delta": delta,
                "logprobs": {"content": [scored[place]]} if scored else None,
                "finish_reason": None if place < last else self._finish(completion, calls),
            }
            if place == last:
                choice["stop_reason"] = completion.stop_reason
            if self.body.return_token_ids:
                choice["token_ids"] = [completion.ids[place]]
            yield choice


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a completions request: its prompts in order, each with `n` choices."""

    tokenizer: SimTokenizer
    body: CompletionBody
    sampled: list[Sampled]
    created: int

    def whole(self) -> Json:
        """Returns the complete answer."""
        choices = [self._choice(prompt, completion) for prompt, completion in self._pairs()]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return {**self._head(), "choices": choices, "usage": usage(self.sampled)}

    def chunks(self) -> Iterator[Json]:
        """Yields the answer token by token, one token of each choice in turn."""
        head = self._head()
        steps = [self._steps(index, *pair) for index, pair in enumerate(self._pairs())]
        for choices in zip_longest(*steps):
            yield from ({**head, "choices": [choice]} for choice in choices if choice is not None)
        if self.body.stream_options and self.body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": usage(self.sampled)}

    def _pairs(self) -> list[tuple[Prompt, Completion]]:
        return [(one.prompt, completion) for one in self.sampled for completion in one.completions]

    def _head(self) -> Json:
        return {
            "id": f"cmpl-{self.sampled[0].completions[0].key}",
            "object": "text_completion",
            "created": self.created,
            "model": MODEL,
            "system_fingerprint": FINGERPRINT,
        }

    def _choice(self, prompt: Prompt, completion: Completion) -> Json:
        scored = _prompt_logprobs(self.tokenizer, prompt, self.body.prompt_logprobs)
        return {
            "index": 0,
            "text": completion.text,
            "logprobs": self._logprobs(prompt, completion),
            "finish_reason": completion.finish,
            "stop_reason": completion.stop_reason,
            "prompt_logprobs": scored,
            "prompt_token_ids": prompt.ids if self.body.return_token_ids else None,
            "token_ids": completion.ids if self.body.return_token_ids else None,
        }

    def _logprobs(self, prompt: Prompt, completion: Completion) -> Json | None:
        if self.body.logprobs is None or self.body.logprobs is False:
            return None
        as_ids = bool(self.body.return_tokens_as_token_ids)
        rows = _ranked(self.tokenizer, prompt, completion, int(self.body.logprobs))
        tokens = [_name(self.tokenizer, index, as_ids) for index in completion.ids]
        offsets, end = [], 0
        for token in tokens:
            offsets.append(end)
            end += len(token)
        return {
            "text_offset": offsets,
            "token_logprobs": completion.logprobs,
            "tokens": tokens,
            "top_logprobs": [_by_name(self.tokenizer, row, as_ids) for row in rows],
        }

    def _steps(self, number: int, prompt: Prompt, completion: Completion) -> Iterator[Json]:
        logprobs = self._logprobs(prompt, completion)
        last = len(completion.ids) - 1
        for place, delta in enumerate(_deltas(self.tokenizer, completion, [])):
            here = slice(place, place + 1)
            choice: Json = {
                "index": number,
                "text": delta.get("content", ""),
                "logprobs": logprobs and {name: values[here] for name, values in logprobs.items()},
                "finish_reason": completion.finish if place == last else None,
                "stop_reason": completion.stop_reason if place == last else None,
            }
            if self.body.return_token_ids:
                choice["prompt_token_ids"] = prompt.ids if place == 0 else None
                choice["token_ids"] = completion.ids[here]
            yield choice


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request to Atropos's `/generate`; it has no chunks."""

    tokenizer: SimTokenizer
    body: GenerateBody
    sampled: Sampled

    def whole(self) -> Json:
        """Returns the complete answer; each position of `logprobs` is a list of one `{id:
        logprob}`."""
        completions = self.sampled.completions
        answer: Json = {
            "text": [completion.text for completion in completions],
            "prompt": self.sampled.prompt.text,
            "finish_reasons": [completion.finish for completion in completions],
            "prompt_token_ids": self.sampled.prompt.ids,
            "token_ids": [completion.ids for completion in completions],
        }
        if self.body.logprobs is not None and self.body.logprobs is not False:
            answer["logprobs"] = [
                [
                    [{str(index): logprob for index, logprob in row}]
                    for row in _ranked(
                        self.tokenizer, self.sampled.prompt, completion, int(self.body.logprobs)
                    )
                ]
                for completion in completions
            ]
        return answer


def usage(sampled: list[Sampled]) -> Json:
    """Counts the tokens of all prompts and all answers."""
    asked = sum(len(one.prompt.ids) for one in sampled)
    said = sum(len(completion.ids) for one in sampled for completion in one.completions)
    return {"prompt_tokens": asked, "total_tokens": asked + said, "completion_tokens": said}


def _ranked(
    tokenizer: SimTokenizer, prompt: Prompt, completion: Completion, top: int
) -> list[list[tuple[int, float]]]:
    """Returns for each token its id and logprob, then likely others: `top` in all, at least one."""
    sampled = list(zip(completion.ids, completion.logprobs, strict=True))
    if top < 2:
        return [[pair] for pair in sampled]
    others = tokenizer.logits.alternatives(prompt.fold, len(prompt.ids), completion.ids, top - 1)
    return [[pair, *rest] for pair, rest in zip(sampled, others, strict=True)]


def _prompt_logprobs(
    tokenizer: SimTokenizer, prompt: Prompt, top: int | None
) -> list[Json | None] | None:
    if top is None:
        return None
    scores = tokenizer.logits.score(0, 0, prompt.ids).tolist()
    others: list[list[tuple[int, float]]] = [[] for _ in prompt.ids]
    if top > 1:
        others = tokenizer.logits.alternatives(0, 0, prompt.ids, top - 1)
    rows: list[Json | None] = [
        {
            str(index): {"logprob": value, "rank": rank, "decoded_token": tokenizer.strings[index]}
            for rank, (index, value) in enumerate([(token, score), *rest], start=1)
        }
        for token, score, rest in zip(prompt.ids, scores, others, strict=True)
    ]
    return [None, *rows[1:]]


def _deltas(tokenizer: SimTokenizer, completion: Completion, calls: list[Json]) -> Iterator[Json]:
    """Yields what each token adds to the message; the tags around calls add nothing."""
    text = completion.text
    _, ends = tokenizer.offsets(completion.ids)
    spans = call_spans(text, [call["function"] for call in calls])
    content_end = spans[0].opens if spans else len(text)
    before = 0
    for place, end in enumerate(ends):
        now = len(text) if place == len(ends) - 1 else min(end, len(text))
        delta: Json = {}
        if not calls or before < content_end:
            delta["content"] = text[before : min(now, content_end)]
        pieces = []
        for number, (span, call) in enumerate(zip(spans, calls, strict=True)):
            piece: Json = {}
            if before < span.start <= now:
                name = call["function"]["name"]
                piece = {"id": call["id"], "type": "function", "function": {"name": name}}
            arguments = text[max(before, span.start) : min(now, span.end)]
            if piece or arguments:
                function = {**piece.get("function", {}), "arguments": arguments}
                pieces.append({"index": number, **piece, "function": function})
        if pieces:
            delta["tool_calls"] = pieces
        yield delta
        before = now


def _name(tokenizer: SimTokenizer, index: int, as_ids: bool) -> str:
    return f"token_id:{index}" if as_ids else tokenizer.strings[index]


def _by_name(tokenizer: SimTokenizer, row: list[tuple[int, float]], as_ids: bool) -> Json:
    """Returns logprobs by token text; of tokens with the same text the more likely one counts."""
    named: Json = {}
    for index, value in row:
        named.setdefault(_name(tokenizer, index, as_ids), value)
    return named


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
