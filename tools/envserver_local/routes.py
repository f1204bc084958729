"""Chat, completions and vLLM's token endpoints: each request becomes rows of the batch.

If the client hangs up or the server stops, the request's rows leave the batch. A stream of a chat
sends text as it is sampled, unless it may contain calls: then the text is parsed once at the end,
while ids and logprobs are still sent token by token. Rendering returns the whole request for
generating, with every setting; generating reports which version of the weights sampled which
tokens.
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from envserver_records.errors import EngineRefused
from envserver_records.tasks import Json

from . import bodies
from .bodies import CallReader, GenerateBody
from .bodies import check as check_body
from .generation import Runner
from .simulated.requests import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampled,
    TokenizeBody,
    read,
)
from .simulated.responses import (
    chat_facts,
    chat_logprobs,
    chat_starts,
    chat_whole,
    completion_facts,
    completion_whole,
    prompt_logprobs,
    usage,
    usage_chunk,
)
from .text import Growing, Row, Sampling, Text
from .weights import Adapter, Adapters


class Progress(NamedTuple):
    """The tokens `start` to `end` of choice `number` are new; `finish`: it has ended, and why.
    `first`: nothing of any choice came before."""

    number: int
    row: Row
    start: int
    end: int
    finish: str | None
    first: bool


class Asking:
    """Makes rows from requests.

    Args:
        root: the model's folder or its name on the hub.
        most_tokens: maximum number of tokens of a prompt and its answer together.
        vocabulary: number of ids of the model; it may exceed the tokenizer's, and all can be
            sampled.
        defaults: sampling settings of the model's generation config, by their API names.
    """

    def __init__(
        self,
        runner: Runner,
        text: Text,
        adapters: Adapters,
        *,
        model: str,
        root: str,
        most_tokens: int,
        vocabulary: int,
        defaults: dict[str, float],
    ) -> None:
        self.runner = runner
        self.text = text
        self.adapters = adapters
        self.model = model
        self.root = root
        self.most_tokens = most_tokens
        self.vocabulary = vocabulary
        self._defaults = defaults

    def adapter(self, name: str | None) -> Adapter | None:
        """The adapter that a model name refers to; None for the model itself."""
        if name in (None, "", self.model):
            return None
        found = self.adapters.find(str(name))
        if found is None:
            raise EngineRefused(f"The model `{name}` does not exist.", status=404, param="model")
        return found

    def check_prompt(self, ids: Sequence[int]) -> None:
        if not ids:
            raise EngineRefused("The prompt is empty.", status=400, param="prompt")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            raise EngineRefused(
                f"Token ids must be in 0 to {self.vocabulary - 1}.", status=400, param="prompt"
            )
        if len(ids) >= self.most_tokens:
            raise EngineRefused(
                f"This model's maximum context length is {self.most_tokens} tokens, and the prompt "
                f"has {len(ids)}. Send a shorter prompt.",
                status=400,
                param="prompt",
            )

    def rows(
        self,
        body: Sampled,
        prompt: list[int],
        adapter: Adapter | None,
        *,
        limit: int | None,
        top: int | None,
        scored: int | None,
        raw: bool = False,
        eager: bool | None,
    ) -> list[Row]:
        """A row for each of the answers to `prompt` that `body` asks for.

        `limit`: maximum number of tokens of an answer, None: all that the context leaves. `top`:
        number of most likely tokens to return; `scored`: the same for the prompt. `raw`: special
        tokens are returned as text.
        """
        self.check_prompt(prompt)
        room = self.most_tokens - len(prompt)
        if limit is not None and limit > room:
            raise EngineRefused(
                f"This model's maximum context length is {self.most_tokens} tokens. You asked for "
                f"{limit} behind a prompt of {len(prompt)}.",
                status=400,
                param="max_tokens",
            )
        bias = {self._id(name): value for name, value in (body.logit_bias or {}).items()}
        enders: dict[int, int | None] = {index: index for index in body.stop_token_ids or ()}
        if not body.ignore_eos:
            enders |= self.text.enders
        allowed = body.allowed_token_ids
        sampling = Sampling(
            max_tokens=room if limit is None else limit,
            temperature=self._setting(body, "temperature", 1.0),
            top_p=self._setting(body, "top_p", 1.0),
            top_k=max(0, int(self._setting(body, "top_k", 0))),
            min_p=self._setting(body, "min_p", 0.0),
            repetition_penalty=self._setting(body, "repetition_penalty", 1.0),
            presence_penalty=body.presence_penalty or 0.0,
            frequency_penalty=body.frequency_penalty or 0.0,
            logit_bias=bias,
            allowed=tuple(self._id(index) for index in allowed) if allowed else None,
            seed=body.seed,
            enders=enders,
            stops=tuple(body.stops()),
            keep_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=not raw and body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
            top_logprobs=top or 0,
            prompt_logprobs=scored,
        )
        return [
            Row(prompt, time, adapter=adapter, eager=bool(eager))
            for time in sampling.times(body.n or 1)
        ]

    @asynccontextmanager
    async def running(self, rows: Sequence[Row]) -> AsyncIterator[Callable[[], Any]]:
        """Runs rows inside the block; yields a function that waits until one has progressed."""
        if not self.runner.alive:
            raise EngineRefused("The engine has ended.", status=503)
        news = asyncio.Event()
        for row in rows:
            row.on_change = news.set
        self.runner.submit(rows)
        try:

            async def wait() -> None:
                await news.wait()
                news.clear()

            yield wait
        finally:
            if any(row.finish is None for row in rows):
                self.runner.abort(rows)

    async def progress(self, rows: Sequence[Row]) -> AsyncGenerator[Progress]:
        """Runs rows; yields what each step added to one, until all have ended. If it is closed
        earlier, the rows leave the batch."""
        sent = [0] * len(rows)
        left = set(range(len(rows)))
        async with self.running(rows) as wait:
            while left:
                await wait()
                check(rows)
                for index in sorted(left):
                    row, start = rows[index], sent[index]
                    finish, end = row.finish, len(row.logprobs)
                    if end == start and finish is None:
                        continue
                    first = not any(sent) and len(left) == len(rows)
                    sent[index] = end
                    if finish is not None:
                        left.discard(index)
                    yield Progress(index, row, start, end, finish, first)

    def _setting(self, body: Sampled, name: str, plain: float) -> float:
        value = getattr(body, name)
        if value is None:
            value = self._defaults.get(name, plain)
        return float(value)

    def _id(self, name: str | int) -> int:
        try:
            index = int(name)
        except ValueError:
            index = -1
        if not 0 <= index < self.vocabulary:
            raise EngineRefused(f"{name!r} is not an id of the vocabulary.", status=400)
        return index


def check(rows: Sequence[Row]) -> None:
    """Raises EngineRefused: a row failed."""
    for row in rows:
        if row.finish == "error":
            raise EngineRefused(f"The engine failed: {row.error}", status=500)


B = TypeVar("B", ChatBody, CompletionBody, GenerateBody)


class Endpoint(ABC, Generic[B]):
    """Answers requests of one kind, whole or in chunks."""

    def __init__(self, asking: Asking, calls: CallReader) -> None:
        self._asking = asking
        self._text = asking.text
        self._calls = calls

    @abstractmethod
    def rows(self, body: B) -> list[Row]:
        """The rows of all prompts, in order."""

    async def whole(self, body: B) -> Json:
        rows = self.rows(body)
        async with self._asking.running(rows) as wait:
            while any(row.finish is None for row in rows):
                await wait()
        check(rows)
        return self._whole(body, rows)

    async def chunks(self, body: B, rows: Sequence[Row]) -> AsyncIterator[Json]:
        head = self._head(body, stream=True)
        for chunk in self._starts(body, head, rows):
            yield chunk
        growing = [Growing(self._text, row) for row in rows]
        async with aclosing(self._asking.progress(rows)) as steps:
            async for step in steps:
                yield {**head, **self._chunk(body, step, growing[step.number])}
        n = body.sampling_params.n if isinstance(body, GenerateBody) else body.n
        for chunk in usage_chunk(body, head, rows, n or 1):
            yield chunk

    @abstractmethod
    def _head(self, body: B, *, stream: bool = False) -> Json: ...

    @abstractmethod
    def _whole(self, body: B, rows: Sequence[Row]) -> Json: ...

    def _starts(self, body: B, head: Json, rows: Sequence[Row]) -> Iterable[Json]:
        """The chunks before the first token."""
        return ()

    @abstractmethod
    def _chunk(self, body: B, step: Progress, growing: Growing) -> Json: ...


class Chat(Endpoint[ChatBody]):
    def rows(self, body: ChatBody) -> list[Row]:
        check_body(body)
        adapter = self._asking.adapter(body.model)
        fields = msgspec.structs.asdict(body)
        return self._asking.rows(
            body,
            self._text.encode(self._text.prompt_text(body.messages, body.tools, fields)),
            adapter,
            limit=body.limit,
            top=body.top_logprobs if body.logprobs else 0,
            scored=body.prompt_logprobs,
            raw=self._calls.free(body),
            eager=body.stream,
        )

    def message(self, body: ChatBody, text: str) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if self._calls.free(body):
            content, calls = self._calls.read(text, body)
            message["content"] = content
            if calls:
                message["tool_calls"] = calls
        return message

    def _head(self, body: ChatBody, *, stream: bool = False) -> Json:
        kind = "chat.completion.chunk" if stream else "chat.completion"
        return bodies.head("chatcmpl", kind, body.model or self._asking.model)

    def _whole(self, body: ChatBody, rows: Sequence[Row]) -> Json:
        messages = [self.message(body, self._text.answer(row)) for row in rows]
        ends = [
            "tool_calls" if message.get("tool_calls") else row.finish
            for message, row in zip(messages, rows, strict=True)
        ]
        return chat_whole(self._text, body, self._head(body), rows, messages, ends)

    def _starts(self, body: ChatBody, head: Json, rows: Sequence[Row]) -> Iterable[Json]:
        return chat_starts(body, head, rows)

    def _chunk(self, body: ChatBody, step: Progress, growing: Growing) -> Json:
        row, finish = step.row, step.finish
        if not self._calls.free(body):
            text = growing.more()
            delta: Json = {"content": text} if text else {}
        else:
            delta = {} if finish is None else self._whole_delta(body, row)
        choice: Json = {"index": step.number, "delta": delta, "finish_reason": None}
        choice |= chat_facts(self._text, body, row, step.start, step.end)
        if finish is not None:
            choice["finish_reason"] = "tool_calls" if delta.get("tool_calls") else finish
            choice["stop_reason"] = row.stop_reason
        return {"choices": [choice]}

    def _whole_delta(self, body: ChatBody, row: Row) -> Json:
        """A whole message as one delta, for answers that may contain calls."""
        message = self.message(body, self._text.answer(row))
        delta: Json = {"content": message["content"]} if message["content"] else {}
        if message.get("tool_calls"):
            delta["tool_calls"] = [
                {"index": place, **call} for place, call in enumerate(message["tool_calls"])
            ]
        return delta


class Completions(Endpoint[CompletionBody]):
    def rows(self, body: CompletionBody) -> list[Row]:
        check_body(body)
        adapter = self._asking.adapter(body.model)
        top, scored = int(body.logprobs or 0), body.prompt_logprobs
        if body.echo and body.logprobs is not None and scored is None:
            scored = top
        return [
            row
            for prompt in self._prompts(body)
            for row in self._asking.rows(
                *(body, prompt, adapter),
                limit=body.limit,
                top=top,
                scored=scored,
                eager=body.stream,
            )
        ]

    def _head(self, body: CompletionBody, *, stream: bool = False) -> Json:
        return bodies.head("cmpl", "text_completion", body.model or self._asking.model)

    def _whole(self, body: CompletionBody, rows: Sequence[Row]) -> Json:
        texts = [
            (self._text.decode(row.prompt, skip_special=True) if body.echo else "")
            + self._text.answer(row)
            for row in rows
        ]
        return completion_whole(self._text, body, self._head(body), rows, texts)

    def _chunk(self, body: CompletionBody, step: Progress, growing: Growing) -> Json:
        choice = {
            "index": step.number,
            "text": growing.more(),
            **completion_facts(self._text, body, step.row, step.start, step.end),
            "finish_reason": step.finish,
            "stop_reason": step.row.stop_reason,
        }
        if body.return_token_ids:
            choice["prompt_token_ids"] = step.row.prompt if step.start == 0 else None
        return {"choices": [choice]}

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        given = body.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
            given = [given]
        if not isinstance(given, list) or not given:
            raise EngineRefused("`prompt` is a text, ids, or a list of these.", status=400)
        return [self._ids(body, prompt) for prompt in given]

    def _ids(self, body: CompletionBody, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._text.encode(prompt, special=body.add_special_tokens)
        if isinstance(prompt, list) and all(map(_is_id, prompt)):
            return prompt
        raise EngineRefused(
            "`prompt` is a text, ids, or a list of these.", status=400, param="prompt"
        )


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Tokens(Endpoint[GenerateBody]):
    def __init__(self, asking: Asking, calls: CallReader, chat: Chat) -> None:
        super().__init__(asking, calls)
        self._chat = chat

    def render(self, body: ChatBody) -> Json:
        """The body for /inference/v1/generate that corresponds to a chat request."""
        row = self._chat.rows(body)[0]
        sampling = msgspec.structs.asdict(row.sampling)
        params: Json = {
            **{name: sampling.get(name, getattr(body, name)) for name in Sampled.__struct_fields__},
            "n": body.n or 1,
            "logit_bias": body.logit_bias,
            "stop": list(row.sampling.stops),
            "stop_token_ids": body.stop_token_ids or [],
            "include_stop_str_in_output": row.sampling.keep_stop,
            "ignore_eos": bool(body.ignore_eos),
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        }
        return {
            "request_id": f"chatcmpl-{uuid.uuid4().hex}",
            "token_ids": row.prompt,
            "features": None,
            "sampling_params": params,
            "model": body.model,
            "stream": False,
            "output_mode": "tokens",
        }

    def rows(self, body: GenerateBody) -> list[Row]:
        if body.output_mode not in ("tokens", "text"):
            raise EngineRefused("`output_mode` is tokens or text.", status=400, param="output_mode")
        adapter = self._asking.adapter(body.model)
        params = body.sampling_params
        return self._asking.rows(
            *(params, body.token_ids, adapter),
            limit=params.max_tokens,
            top=params.logprobs,
            scored=params.prompt_logprobs,
            eager=body.stream,
        )

    def _whole(self, body: GenerateBody, rows: Sequence[Row]) -> Json:
        choices = []
        for index, row in enumerate(rows):
            choice = {"index": index, **self._facts(body, row, 0, len(row.ids))}
            if body.output_mode == "text":
                choice["text"] = self._text.answer(row)
            choices.append(choice | self._end(row))
        return {
            **self._head(body),
            "choices": choices,
            "usage": usage(rows, len(rows)),
            "prompt_logprobs": prompt_logprobs(self._text, rows[0]),
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        }

    def _chunk(self, body: GenerateBody, step: Progress, growing: Growing) -> Json:
        """The prompt's ids are in the first chunk."""
        choice = {"index": step.number, **self._facts(body, step.row, step.start, step.end)}
        choice |= {"finish_reason": None, "stop_reason": None}
        if body.output_mode == "text":
            choice["text"] = growing.more()
        if step.finish is not None:
            choice |= self._end(step.row)
        is_first = body.return_token_ids and step.first
        return {"choices": [choice], **({"prompt_token_ids": body.token_ids} if is_first else {})}

    def derender(self, body: Any) -> Json:
        """The messages in generated ids; the token that ended an answer becomes text."""
        chat_request = body.get("chat_request")
        if chat_request is None and self._calls.known:
            raise EngineRefused(
                "chat_request is required when a tool or reasoning parser is configured.",
                status=400,
                param="chat_request",
            )
        request = read(chat_request or {"messages": []}, ChatBody)
        generated = body.get("generate_response")
        listed = generated.get("choices") if isinstance(generated, dict) else None
        if not isinstance(listed, list):
            raise EngineRefused("`generate_response` holds no choices.", status=400)
        found = [self._derendered(request, choice) for choice in listed]
        return {
            **bodies.head("chatcmpl", "chat.completion", request.model or self._asking.model),
            "choices": found,
            "prompt_token_ids": generated.get("prompt_token_ids"),
        }

    def tokenize(self, body: TokenizeBody) -> Json:
        if body.messages is not None:
            fields = msgspec.structs.asdict(body)
            text = self._text.prompt_text(body.messages, body.tools, fields)
            ids = self._text.encode(text)
        elif body.prompt is not None:
            ids = self._text.encode(body.prompt, special=body.add_special_tokens)
        else:
            raise EngineRefused("`prompt` or `messages` is missing.", status=400, param="prompt")
        names = [self._text.name(index) for index in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self._asking.most_tokens,
            "tokens": ids,
            "token_strs": names,
        }

    def detokenize(self, body: DetokenizeBody) -> Json:
        if any(not 0 <= index < self._asking.vocabulary for index in body.tokens):
            raise EngineRefused("An id is outside of the vocabulary.", status=400, param="tokens")
        return {"prompt": self._text.decode(body.tokens)}

    def _head(self, body: GenerateBody, *, stream: bool = False) -> Json:
        return {
            "request_id": body.request_id or f"generate-tokens-{uuid.uuid4().hex}",
            "model": body.model or self._asking.model,
            "output_mode": body.output_mode,
        }

    def _facts(self, body: GenerateBody, row: Row, start: int, end: int) -> Json:
        facts: Json = {"token_ids": row.ids[start:end], "logprobs": None}
        if body.sampling_params.logprobs is not None:
            facts["logprobs"] = (
                chat_logprobs(self._text, row, start, end, as_ids=False)
                if body.output_mode == "text"
                else bodies.token_logprobs(row, start, end)
            )
        return facts

    def _end(self, row: Row) -> Json:
        return {
            "finish_reason": row.finish,
            "stop_reason": row.stop_reason,
            "weight_versions": row.spans(),
        }

    def _derendered(self, request: ChatBody, choice: Any) -> Json:
        ids = choice.get("token_ids") if isinstance(choice, dict) else None
        if not isinstance(ids, list) or not ids:
            raise EngineRefused("choice has empty or null token_ids", status=400)
        skip = not self._calls.free(request) and request.skip_special_tokens is not False
        text = self._text.decode(ids, skip_special=skip)
        return {
            "index": choice.get("index", 0),
            "message": self._chat.message(request, text),
            "finish_reason": choice.get("finish_reason"),
            "stop_reason": choice.get("stop_reason"),
            "token_ids": ids,
        }
