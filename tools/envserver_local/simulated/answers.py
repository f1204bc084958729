"""Computes the answer to a request body: all that the simulated engine does except waiting.

Invariants: the same seed and the same requests in the same order give the same answers;
`/v1/chat/completions`, `/v1/completions` and `/generate` give the same tokens for the same prompt
and the same `seed`; a token's logprob is the same wherever it is reported.

The end-of-turn token is among the ids and logprobs and has no text.
"""

from __future__ import annotations

import hashlib
import random
import time
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat, starmap, zip_longest
from typing import Any, Literal

import msgspec
from envserver_records.tasks import Json

from envserver.settings.config import SimConfig

from .policy import Speaker, Wish, generator
from .requests import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerateBody,
    TokenizeBody,
    check_chat,
    check_sampling,
    read,
)
from .responses import (
    Answer,
    Ranked,
    chat_facts,
    chat_starts,
    chat_whole,
    completion_facts,
    completion_whole,
    ranked,
    usage_chunk,
)
from .tokenizer import (
    Conversation,
    Prompt,
    SimTokenizer,
    call_spans,
    checked_tools,
    conversation_of_text,
    parsed,
    plain_messages,
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


@dataclass(eq=False, kw_only=True)
class Completion(Answer):
    """`key`: makes ids of answers and calls."""

    text: str
    finish: str
    key: str


def completed(
    tokenizer: SimTokenizer, prompt: Prompt, sampled: list[int], ending: Ending, key: str, top: int
) -> Completion:
    """The answer `sampled` after `prompt`, up to what ends it first; `top`: see `Answer.tops`.

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
    scores, tops = _scored(tokenizer, prompt.fold, len(prompt.ids), ids, top)
    return Completion(
        prompt=prompt.ids,
        ids=ids,
        logprobs=scores,
        tops=tops,
        text=text,
        finish=finish,
        stop_reason=reason,
        key=key,
    )


def _scored(
    tokenizer: SimTokenizer, fold: int, length: int, ids: list[int], top: int
) -> tuple[list[float], list[Ranked]]:
    """The logprobs of `ids` after a prefix, and the `top` most likely tokens at each place."""
    scores = tokenizer.logits.score(fold, length, ids).tolist()
    if not top:
        return scores, []
    others = tokenizer.logits.alternatives(fold, length, ids, top - 1) if top > 1 else repeat([])
    pairs = zip(ids, scores, others, strict=False)
    return scores, [[(index, score), *rest] for index, score, rest in pairs]


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


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a chat request; `choice`: how tools may be used (see `check_chat`)."""

    tokenizer: SimTokenizer
    body: ChatBody
    choice: str
    completions: list[Completion]
    created: int

    def whole(self) -> Json:
        messages, ends = [], []
        for completion in self.completions:
            content, calls = self._parsed(completion)
            message: Json = {"role": "assistant", "content": content}
            if calls:
                message["tool_calls"] = calls
            messages.append(message)
            ends.append(self._finish(completion, calls))
        head = self._head("chat.completion")
        return chat_whole(self.tokenizer, self.body, head, self.completions, messages, ends)

    def chunks(self) -> Iterator[Json]:
        """The answer token by token, one token of each choice in turn."""
        head = self._head("chat.completion.chunk")
        yield from chat_starts(self.body, head, self.completions)
        for choices in zip_longest(*starmap(self._steps, enumerate(self.completions))):
            yield from ({**head, "choices": [choice]} for choice in choices if choice is not None)
        yield from usage_chunk(self.body, head, self.completions, len(self.completions))

    def _head(self, kind: str) -> Json:
        return _head(f"chatcmpl-{self.completions[0].key}", kind, self.created)

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

    def _steps(self, number: int, completion: Completion) -> Iterator[Json]:
        _, calls = self._parsed(completion)
        last = len(completion.ids) - 1
        for place, delta in enumerate(_deltas(self.tokenizer, completion, calls)):
            choice = {
                "index": number,
                "delta": delta,
                **chat_facts(self.tokenizer, self.body, completion, place, place + 1),
                "finish_reason": None if place < last else self._finish(completion, calls),
            }
            if place == last:
                choice["stop_reason"] = completion.stop_reason
            yield choice


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a completions request: its prompts in order, each with `n` choices."""

    tokenizer: SimTokenizer
    body: CompletionBody
    completions: list[Completion]
    created: int

    def whole(self) -> Json:
        texts = [completion.text for completion in self.completions]
        return completion_whole(self.tokenizer, self.body, self._head(), self.completions, texts)

    def chunks(self) -> Iterator[Json]:
        head = self._head()
        for choices in zip_longest(*starmap(self._steps, enumerate(self.completions))):
            yield from ({**head, "choices": [choice]} for choice in choices if choice is not None)
        yield from usage_chunk(self.body, head, self.completions, self.body.n or 1)

    def _head(self) -> Json:
        return _head(f"cmpl-{self.completions[0].key}", "text_completion", self.created)

    def _steps(self, number: int, completion: Completion) -> Iterator[Json]:
        facts = completion_facts(self.tokenizer, self.body, completion)
        logprobs = facts["logprobs"]
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
                choice["prompt_token_ids"] = completion.prompt if place == 0 else None
                choice["token_ids"] = completion.ids[here]
            yield choice


class GenerateAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request to Atropos's `/generate`; it has no chunks."""

    body: GenerateBody
    prompt: str
    completions: list[Completion]

    def whole(self) -> Json:
        """Each position of `logprobs` is a list of one `{id: logprob}`."""
        answer: Json = {
            "text": [completion.text for completion in self.completions],
            "prompt": self.prompt,
            "finish_reasons": [completion.finish for completion in self.completions],
            "prompt_token_ids": self.completions[0].prompt,
            "token_ids": [completion.ids for completion in self.completions],
        }
        if self.body.logprobs is not None and self.body.logprobs is not False:
            answer["logprobs"] = [
                [[{str(index): logprob for index, logprob in row}] for row in ranked(completion)]
                for completion in self.completions
            ]
        return answer


def _head(name: str, kind: str, created: int) -> Json:
    head = {"id": name, "object": kind, "created": created}
    return {**head, "model": MODEL, "system_fingerprint": FINGERPRINT}


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
        `status` and `param`."""
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
        wish = Wish(
            rollout_id=rollout_id,
            choice=choice,
            parallel=body.parallel_tool_calls is not False,
            response_format=body.response_format,
        )
        top = body.top_logprobs if body.logprobs else 0
        completions, fault = self._sample(prompt, conversation, body, wish, body.limit, top or 0)
        answer = ChatAnswer(
            tokenizer=self._tokenizer,
            body=body,
            choice=choice,
            completions=completions,
            created=int(time.time()),
        )
        return _plan(answer, body, fault)

    def _complete(self, body: CompletionBody, rollout_id: str) -> Plan:
        check_sampling(body)
        completions: list[Completion] = []
        faults: list[Fault | None] = []
        for prompt in self._prompts(body.prompt):
            more, fault = self._continued(prompt, body, rollout_id)
            completions += more
            faults.append(fault)
        answer = CompletionAnswer(
            tokenizer=self._tokenizer,
            body=body,
            completions=completions,
            created=int(time.time()),
        )
        return _plan(answer, body, next(filter(None, faults), None))

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
        completions, fault = self._continued(prompts[0], body, rollout_id)
        answer = GenerateAnswer(body=body, prompt=prompts[0].text, completions=completions)
        return _plan(answer, body, fault)

    def _continued(
        self, prompt: Prompt, body: CompletionBody, rollout_id: str
    ) -> tuple[list[Completion], Fault | None]:
        conversation = conversation_of_text(prompt.text)
        choice = "auto" if conversation.tools else "none"
        wish = Wish(rollout_id=rollout_id, choice=choice)
        limit = 16 if body.max_tokens is None else body.max_tokens
        return self._sample(prompt, conversation, body, wish, limit, int(body.logprobs or 0))

    def _sample(
        self,
        prompt: Prompt,
        conversation: Conversation,
        body: Body,
        wish: Wish,
        limit: int | None,
        top: int,
    ) -> tuple[list[Completion], Fault | None]:
        if body.echo:
            raise refusal("The simulated engine has no `echo`.", param="echo")
        if body.model not in (None, MODEL):
            raise refusal(f"The model {body.model!r} does not exist.", param="model", status=404)
        context = self._config.context_tokens
        times = self._count(wish.rollout_id, prompt)
        place = f"{wish.rollout_id}|{len(prompt.ids)}|{prompt.fold}"
        chance = generator(self._config.seed, "faults", f"{place}|{times}")
        fault = self._fault(chance)
        ending = Ending(
            max_tokens=min(limit or context, context - len(prompt.ids)),
            stops=body.stops(),
            stop_token_ids=frozenset(body.stop_token_ids or ()),
            keep_stop=bool(body.include_stop_str_in_output),
        )
        completions = []
        for number in range(body.n or 1):
            key = f"{place}|{_nonce(body, times)}|{number}"
            fate = f"{wish.rollout_id}|{number}" if wish.rollout_id else key
            said = self._speaker.say(conversation, wish, fate=fate, key=key)
            ids = self._tokenizer.encode(said.text)
            if said.endless:
                ids = ids * (1 + ending.max_tokens // len(ids))
            ids.append(self._tokenizer.im_end)
            if chance.random() < self._config.truncate_rate:
                ids = ids[: chance.randint(1, max(1, len(ids) - 1))]
            name = hashlib.blake2b(f"{key}|{times}".encode(), digest_size=12).hexdigest()
            completions.append(completed(self._tokenizer, prompt, ids, ending, name, top))
        if (most := body.prompt_logprobs) is not None:
            _, scored = _scored(self._tokenizer, 0, 0, prompt.ids, max(1, most))
            for completion in completions:
                completion.scored = scored[1:]
        return completions, fault

    def _fault(self, chance: random.Random) -> Fault | None:
        failed = chance.random() < self._config.error_rate
        broken = chance.random() < self._config.disconnect_rate
        return "error" if failed else "disconnect" if broken else None

    def _count(self, rollout_id: str, prompt: Prompt) -> int:
        """How often this was requested before, so that repeated requests differ."""
        key = (rollout_id, len(prompt.ids), prompt.fold)
        count = self._asked.pop(key, 0)
        self._asked[key] = count + 1
        if len(self._asked) > _REMEMBERED_PROMPTS:
            self._asked.popitem(last=False)
        return count

    def _prompts(self, prompt: Any) -> list[Prompt]:
        """A request's prompt is a text, ids, or a list of either."""
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        return [self._one_prompt(item) for item in (prompt if several else [prompt])]

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
    answer: ChatAnswer | CompletionAnswer | GenerateAnswer, body: Body, fault: Fault | None
) -> Plan:
    tokens = max(len(completion.ids) for completion in answer.completions)
    return Plan(answer=answer, fault=fault, tokens=tokens, stream=bool(body.stream))


def _nonce(body: Body, times: int) -> str:
    """A key that distinguishes the samples of one prompt."""
    if body.seed is not None:
        return f"seed {body.seed}"
    return "greedy" if body.temperature == 0 else f"sample {times}"
