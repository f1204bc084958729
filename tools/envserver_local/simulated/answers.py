"""Computes the answer to a request body: all that the simulated engine does except waiting.

Invariants: the same seed and the same requests in the same order give the same answers;
`/v1/chat/completions`, `/v1/completions` and `/generate` give the same tokens for the same prompt
and the same `seed`; a token's logprob is the same wherever it is reported.

Fields are where vLLM 0.32 puts them: `prompt_token_ids` at the top of a chat answer and of its
first chunk, but inside the choice in completions; `token_ids` always in the choice. The end-of-turn
token is among the ids and logprobs and has no text.
"""

from __future__ import annotations

import hashlib
import random
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice, zip_longest
from typing import Any, Literal

import msgspec

from envserver.settings.config import SimConfig

from .policy import Speaker, Wish, generator
from .tokenizer import (
    Body,
    ChatBody,
    CompletionBody,
    Conversation,
    DetokenizeBody,
    GenerateBody,
    Prompt,
    SimTokenizer,
    TokenizeBody,
    call_spans,
    check_chat,
    check_sampling,
    checked_tools,
    conversation_of_text,
    parsed,
    plain_messages,
    read,
    refusal,
)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that end an answer early; `max_tokens` is at least 1, and no stop string empty.

    `keep_stop`: the text keeps the stop string or the stop token.
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
    """The answer `sampled` after `prompt`, up to what ends it first.

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
    """The ids up to a stop token or the limit, how they end, and the stop token."""
    for place, index in enumerate(ids[: ending.max_tokens] if ending.stop_token_ids else ()):
        if index in ending.stop_token_ids and index != im_end:
            return ids[: place + 1], "stop", index
    ids = ids[: ending.max_tokens]
    return ids, "stop" if ids[-1] == im_end else "length", None


def first_stop(text: str, stops: list[str]) -> tuple[int, int, str] | None:
    """Start, end and text of the stop string completed first; ties: the first listed."""
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
    """The answer to a chat request; `choice`: how tools may be used (see `check_chat`)."""

    tokenizer: SimTokenizer
    body: ChatBody
    choice: str
    sampled: Sampled
    created: int

    def whole(self) -> Json:
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
        """The answer token by token, one token of each choice in turn."""
        head = self._head("chat.completion.chunk")
        for index in range(len(self.sampled.completions)):
            delta = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": self.sampled.prompt.ids}
            yield {**head, "choices": [first], **(ids if self.body.return_token_ids else {})}
        for choices in zip_longest(*map(self._steps, range(len(self.sampled.completions)))):
            yield from ({**head, "choices": [choice]} for choice in choices if choice is not None)
        yield from _usage_chunk(self.body, head, [self.sampled])

    def _head(self, kind: str) -> Json:
        return _head(f"chatcmpl-{self.sampled.completions[0].key}", kind, self.created)

    def _parsed(self, completion: Completion) -> tuple[str | None, list[Json]]:
        """Content and calls; without tools in the request nothing is parsed as a call."""
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
        choices = [self._choice(prompt, completion) for prompt, completion in self._pairs()]
        for index, choice in enumerate(choices):
            choice["index"] = index
        return {**self._head(), "choices": choices, "usage": usage(self.sampled)}

    def chunks(self) -> Iterator[Json]:
        head = self._head()
        steps = [self._steps(index, *pair) for index, pair in enumerate(self._pairs())]
        for choices in zip_longest(*steps):
            yield from ({**head, "choices": [choice]} for choice in choices if choice is not None)
        yield from _usage_chunk(self.body, head, self.sampled)

    def _pairs(self) -> list[tuple[Prompt, Completion]]:
        return [(one.prompt, completion) for one in self.sampled for completion in one.completions]

    def _head(self) -> Json:
        key = self.sampled[0].completions[0].key
        return _head(f"cmpl-{key}", "text_completion", self.created)

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
        """Each position of `logprobs` is a list of one `{id: logprob}`."""
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


def _head(name: str, kind: str, created: int) -> Json:
    head = {"id": name, "object": kind, "created": created}
    return {**head, "model": MODEL, "system_fingerprint": FINGERPRINT}


def _usage_chunk(body: Body, head: Json, sampled: list[Sampled]) -> Iterator[Json]:
    if body.stream_options and body.stream_options.include_usage:
        yield {**head, "choices": [], "usage": usage(sampled)}


def usage(sampled: list[Sampled]) -> Json:
    asked = sum(len(one.prompt.ids) for one in sampled)
    said = sum(len(completion.ids) for one in sampled for completion in one.completions)
    return {"prompt_tokens": asked, "total_tokens": asked + said, "completion_tokens": said}


def _ranked(
    tokenizer: SimTokenizer, prompt: Prompt, completion: Completion, top: int
) -> list[list[tuple[int, float]]]:
    """For each token its id and logprob, then likely others: `top` in all, at least one."""
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
    """What each token adds to the message; the tags around calls add nothing."""
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
    """Logprobs by token text; of tokens with the same text the more likely one counts."""
    named: Json = {}
    for index, value in row:
        named.setdefault(_name(tokenizer, index, as_ids), value)
    return named


def _digest(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()


Fault = Literal["error", "disconnect"]

_REMEMBERED_PROMPTS = 16_384


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that is ready, and how to deliver it.

    `answer` returns itself whole; streaming endpoints also in chunks. `fault`: simulated during
    delivery. `tokens`: length of the longest choice: the steps a model would have needed.
    """

    answer: ChatAnswer | CompletionAnswer | GenerateAnswer | Fixed
    fault: Fault | None = None
    tokens: int = 0
    stream: bool = False

    def chunks(self) -> Iterator[Json | None]:
        """A last None means that the connection breaks."""
        if not isinstance(self.answer, ChatAnswer | CompletionAnswer):
            raise refusal("This endpoint does not stream.", param="stream")
        if self.fault != "disconnect":
            return self.answer.chunks()
        return chain(islice(self.answer.chunks(), 1 + self.tokens // 2), [None])


class Fixed(msgspec.Struct, frozen=True):
    """An answer that needs no sampling."""

    body: Json

    def whole(self) -> Json:
        return self.body


class Planner:
    """Answers requests with `plan`; its only state is how often each prompt was requested."""

    def __init__(self, config: SimConfig, speaker: Speaker, tokenizer: SimTokenizer) -> None:
        self._config = config
        self._speaker = speaker
        self._tokenizer = tokenizer
        self._asked: OrderedDict[tuple[str, int, int], int] = OrderedDict()

    def plan(self, path: str, body: Any, rollout_id: str = "") -> Plan:
        """The answer to a POST at once, without waiting. The `detail` of an EngineRefused holds
        `status` and `param`.
        """
        if not isinstance(body, dict):
            raise refusal("The body must be a JSON object.")
        match path:
            case "/v1/chat/completions":
                return self._chat(read(body, ChatBody), rollout_id)
            case "/v1/completions":
                return self._complete(read(body, CompletionBody), rollout_id)
            case "/generate":
                return self._generate(read(body, GenerateBody), rollout_id)
            case "/tokenize":
                return Plan(answer=Fixed(self._tokenize(read(body, TokenizeBody))))
            case "/detokenize":
                return Plan(answer=Fixed(self._detokenize(read(body, DetokenizeBody))))
        raise refusal(f"There is no {path}.", status=404)

    def _chat(self, body: ChatBody, rollout_id: str) -> Plan:
        tools = checked_tools(body.tools)
        choice = check_chat(body, {tool["function"]["name"] for tool in tools})
        conversation = Conversation(plain_messages(body.messages), tools)
        prompt = self._prompt(self._tokenizer.render(conversation.messages, tools))
        limit = body.max_completion_tokens or body.max_tokens
        wish = Wish(
            rollout_id=rollout_id,
            choice=choice,
            parallel=body.parallel_tool_calls is not False,
            response_format=body.response_format,
        )
        sampled, fault = self._sample(prompt, conversation, body, wish, limit)
        answer = ChatAnswer(
            tokenizer=self._tokenizer,
            body=body,
            choice=choice,
            sampled=sampled,
            created=int(time.time()),
        )
        return _plan(answer, body, [sampled], fault)

    def _complete(self, body: CompletionBody, rollout_id: str) -> Plan:
        check_sampling(body)
        pairs = [self._continued(prompt, body, rollout_id) for prompt in self._prompts(body.prompt)]
        sampled = [pair[0] for pair in pairs]
        answer = CompletionAnswer(
            tokenizer=self._tokenizer, body=body, sampled=sampled, created=int(time.time())
        )
        return _plan(answer, body, sampled, next((fault for _, fault in pairs if fault), None))

    def _generate(self, body: GenerateBody, rollout_id: str) -> Plan:
        check_sampling(body)
        if body.stream:
            raise refusal("This endpoint does not stream.", param="stream")
        wanted = body.prompt
        if isinstance(wanted, dict):
            wanted = wanted.get("prompt_token_ids", wanted.get("prompt"))
        prompts = self._prompts(wanted)
        if len(prompts) != 1:
            raise refusal("There must be one prompt.", param="prompt")
        sampled, fault = self._continued(prompts[0], body, rollout_id)
        answer = GenerateAnswer(tokenizer=self._tokenizer, body=body, sampled=sampled)
        return _plan(answer, body, [sampled], fault)

    def _continued(
        self, prompt: Prompt, body: CompletionBody, rollout_id: str
    ) -> tuple[Sampled, Fault | None]:
        conversation = conversation_of_text(prompt.text)
        choice = "auto" if conversation.tools else "none"
        wish = Wish(rollout_id=rollout_id, choice=choice)
        limit = 16 if body.max_tokens is None else body.max_tokens
        return self._sample(prompt, conversation, body, wish, limit)

    def _sample(
        self,
        prompt: Prompt,
        conversation: Conversation,
        body: Body,
        wish: Wish,
        limit: int | None,
    ) -> tuple[Sampled, Fault | None]:
        if body.model not in (None, MODEL):
            raise refusal(f"The model {body.model!r} does not exist.", param="model", status=404)
        context = self._config.context_tokens
        asked = self._count(wish.rollout_id, prompt)
        place = f"{wish.rollout_id}|{len(prompt.ids)}|{prompt.fold}"
        chance = generator(self._config.seed, "faults", f"{place}|{asked}")
        fault = self._fault(chance)
        ending = Ending(
            max_tokens=min(limit or context, context - len(prompt.ids)),
            stops=body.stops(),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            keep_stop=bool(body.include_stop_str_in_output),
        )
        completions = []
        for number in range(body.n or 1):
            key = f"{place}|{_nonce(body, asked)}|{number}"
            fate = f"{wish.rollout_id}|{number}" if wish.rollout_id else key
            said = self._speaker.say(conversation, wish, fate=fate, key=key)
            ids = self._tokenizer.encode(said.text)
            if said.endless:
                ids = ids * (1 + ending.max_tokens // len(ids))
            ids.append(self._tokenizer.im_end)
            if chance.random() < self._config.truncate_rate:
                ids = ids[: chance.randint(1, max(1, len(ids) - 1))]
            name = hashlib.blake2b(f"{key}|{asked}".encode(), digest_size=12).hexdigest()
            completions.append(completed(self._tokenizer, prompt, ids, ending, name))
        return Sampled(prompt, completions), fault

    def _fault(self, chance: random.Random) -> Fault | None:
        failed = chance.random() < self._config.error_rate
        broken = chance.random() < self._config.disconnect_rate
        return "error" if failed else "disconnect" if broken else None

    def _count(self, rollout_id: str, prompt: Prompt) -> int:
        """How often this was requested before, so that repeated requests differ."""
        asked = (rollout_id, len(prompt.ids), prompt.fold)
        count = self._asked.pop(asked, 0)
        self._asked[asked] = count + 1
        if len(self._asked) > _REMEMBERED_PROMPTS:
            self._asked.popitem(last=False)
        return count

    def _prompts(self, prompt: Any) -> list[Prompt]:
        """A request's prompt is a text, ids, or a list of either."""
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return [self._one_prompt(one) for one in (prompt if several else [prompt])]

    def _one_prompt(self, prompt: Any) -> Prompt:
        if isinstance(prompt, str) and prompt:
            return self._prompt(prompt)
        if not isinstance(prompt, list) or not prompt:
            raise refusal("The prompt must be a text or token ids, and not empty.", param="prompt")
        self._check_ids(prompt, "prompt")
        return self._checked(self._tokenizer.prompt_of_ids(prompt))

    def _check_ids(self, ids: list[Any], param: str) -> None:
        size = self._tokenizer.size
        if not all(type(index) is int and 0 <= index < size for index in ids):
            raise refusal(f"A token id is not in [0, {size}).", param=param)

    def _prompt(self, text: str) -> Prompt:
        try:
            return self._checked(self._tokenizer.prompt(text))
        except UnicodeEncodeError as error:
            raise refusal(f"The text is not Unicode: {error.reason}.", param="messages") from error

    def _checked(self, prompt: Prompt) -> Prompt:
        context = self._config.context_tokens
        if len(prompt.ids) >= context:
            raise refusal(
                f"This model's maximum context length is {context} tokens. However, your "
                f"request has {len(prompt.ids)} input tokens.",
                param="prompt",
            )
        return prompt

    def _tokenize(self, body: TokenizeBody) -> Json:
        if (body.prompt is None) == (body.messages is None):
            raise refusal("Give either `prompt` or `messages`.", param="prompt")
        text = body.prompt or ""
        if body.messages is not None:
            text = self._tokenizer.render(
                plain_messages(body.messages),
                checked_tools(body.tools),
                add_generation_prompt=body.add_generation_prompt,
            )
        try:
            ids = self._tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise refusal(f"The text is not Unicode: {error.reason}.", param="prompt") from error
        strings = [self._tokenizer.strings[index] for index in ids]
        return {
            "count": len(ids),
            "max_model_len": self._config.context_tokens,
            "tokens": ids,
            "token_strs": strings if body.return_token_strs else None,
        }

    def _detokenize(self, body: DetokenizeBody) -> Json:
        self._check_ids(body.tokens, "tokens")
        return {"prompt": self._tokenizer.decode(body.tokens, special=True)}


def _plan(
    answer: ChatAnswer | CompletionAnswer | GenerateAnswer,
    body: Body,
    sampled: list[Sampled],
    fault: Fault | None,
) -> Plan:
    tokens = max(len(completion.ids) for one in sampled for completion in one.completions)
    return Plan(answer=answer, fault=fault, tokens=tokens, stream=bool(body.stream))


def _nonce(body: Body, asked: int) -> str:
    """A key that distinguishes the samples of one prompt."""
    if body.seed is not None:
        return f"seed {body.seed}"
    return "greedy" if body.temperature == 0 else f"sample {asked}"
