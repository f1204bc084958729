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
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from envserver_records.errors import EngineRefused

from . import bodies
from .bodies import CallReader, ChatBody, CompletionBody, GenerateBody, Sampled, TokenizeBody
from .bodies import check as check_body
from .generation import Runner
from .simulated.tokenizer import DetokenizeBody, read
from .text import Growing, Row, Sampling, Text
from .weights import Adapter, Adapters


class Progress(NamedTuple):
    """The tokens `start` to `end` of choice `number` are new; `finish`: it has ended, and why."""

    number: int
    row: Row
    start: int
    end: int
    finish: str | None


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

    def sampling(
        self, body: Sampled, prompt: Sequence[int], *, limit: int | None, top: int, raw: bool
    ) -> Sampling:
        """The sampling settings of `body` for `prompt`.

        `limit`: maximum number of tokens of the answer, None: all that the context leaves. `top`:
        number of most likely tokens to return. `raw`: special tokens are returned as text.
        """
        room = self.most_tokens - len(prompt)
        if limit is not None and limit > room:
            raise EngineRefused(
                f"This model's maximum context length is {self.most_tokens} tokens. You asked for "
                f"{limit} behind a prompt of {len(prompt)}.",
                status=400,
                param="max_tokens",
            )
        bias = {self._id(name): value for name, value in (body.logit_bias or {}).items()}
        enders: dict[int, int | None] = dict.fromkeys(body.stop_token_ids or ())
        enders = {index: index for index in enders}
        if not body.ignore_eos:
            enders |= self.text.enders
        allowed = body.allowed_token_ids
        return Sampling(
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
            top_logprobs=top,
            prompt_logprobs=body.prompt_logprobs,
        )

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

    async def whole(self, rows: Sequence[Row]) -> None:
        async with self.running(rows) as wait:
            while any(row.finish is None for row in rows):
                await wait()
        check(rows)

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
                    sent[index] = end
                    if finish is not None:
                        left.discard(index)
                    yield Progress(index, row, start, end, finish)

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


Json = dict[str, Any]


class Chat:
    def __init__(self, asking: Asking, calls: CallReader) -> None:
        self._asking = asking
        self._text = asking.text
        self._calls = calls

    def prompt_ids(self, body: ChatBody) -> list[int]:
        return self._text.encode(
            self._text.prompt_text(body.messages, body.tools, msgspec.structs.asdict(body))
        )

    def rows(self, body: ChatBody) -> list[Row]:
        check_body(body)
        adapter = self._asking.adapter(body.model)
        prompt = self.prompt_ids(body)
        self._asking.check_prompt(prompt)
        sampling = self._asking.sampling(
            body,
            prompt,
            limit=body.limit,
            top=(body.top_logprobs or 0) if body.logprobs else 0,
            raw=self._calls.free(body),
        )
        eager = bool(body.stream)
        return [
            Row(prompt, one, adapter=adapter, eager=eager) for one in sampling.times(body.n or 1)
        ]

    async def whole(self, body: ChatBody) -> Json:
        rows = self.rows(body)
        await self._asking.whole(rows)
        prompt = rows[0].prompt
        return {
            **bodies.head("chatcmpl", "chat.completion", body.model or self._asking.model),
            "choices": [self._choice(body, index, row) for index, row in enumerate(rows)],
            "usage": bodies.usage([prompt], rows),
            "prompt_logprobs": bodies.prompt_logprobs(self._text, rows[0]),
            "prompt_token_ids": prompt if body.return_token_ids else None,
        }

    async def chunks(self, body: ChatBody, rows: Sequence[Row]) -> AsyncIterator[Json]:
        head = bodies.head("chatcmpl", "chat.completion.chunk", body.model or self._asking.model)
        for index in range(len(rows)):
            role = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": rows[0].prompt} if body.return_token_ids else {}
            yield {**head, "choices": [first], **ids}
        may_call = self._calls.free(body)
        growing = [None if may_call else Growing(self._text, row) for row in rows]
        async with aclosing(self._asking.progress(rows)) as steps:
            async for step in steps:
                yield {**head, "choices": [self._delta(body, step, growing[step.number])]}
        if body.stream_options and body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": bodies.usage([rows[0].prompt], rows)}

    def message(self, body: ChatBody, text: str) -> Json:
        message: Json = {"role": "assistant", "content": text}
        if self._calls.free(body):
            content, calls = self._calls.read(text, body)
            message["content"] = content
            if calls:
                message["tool_calls"] = calls
        return message

    def facts(self, body: ChatBody, row: Row, start: int, end: int) -> Json:
        """Ids, logprobs and other facts about tokens `start` to `end` of a choice."""
        facts: Json = {"logprobs": None}
        if body.logprobs:
            as_ids = bool(body.return_tokens_as_token_ids)
            facts["logprobs"] = bodies.chat_logprobs(self._text, row, start, end, as_ids=as_ids)
        if body.return_token_ids:
            facts["token_ids"] = row.ids[start:end]
        return facts

    def _choice(self, body: ChatBody, index: int, row: Row) -> Json:
        message = self.message(body, self._text.answer(row))
        return {
            "index": index,
            "message": message,
            **self.facts(body, row, 0, len(row.ids)),
            "finish_reason": "tool_calls" if message.get("tool_calls") else row.finish,
            "stop_reason": row.stop_reason,
        }

    def _delta(self, body: ChatBody, step: Progress, growing: Growing | None) -> Json:
        row, finish = step.row, step.finish
        if growing is not None:
            text = growing.more()
            delta = {"content": text} if text else {}
        else:
            delta = {} if finish is None else self._whole_delta(body, row)
        choice: Json = {"index": step.number, "delta": delta, "finish_reason": None}
        choice |= self.facts(body, row, step.start, step.end)
        if finish is not None:
            choice["finish_reason"] = "tool_calls" if delta.get("tool_calls") else finish
            choice["stop_reason"] = row.stop_reason
        return choice

    def _whole_delta(self, body: ChatBody, row: Row) -> Json:
        """A whole message as one delta, for answers that may contain calls."""
        message = self.message(body, self._text.answer(row))
        delta: Json = {"content": message["content"]} if message["content"] else {}
        if message.get("tool_calls"):
            delta["tool_calls"] = [
                {"index": place, **call} for place, call in enumerate(message["tool_calls"])
            ]
        return delta


class Completions:
    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._text = asking.text

    def rows(self, body: CompletionBody) -> list[Row]:
        """The rows of all prompts, in order, `n` for each."""
        check_body(body)
        adapter = self._asking.adapter(body.model)
        rows = []
        for prompt in self._prompts(body):
            self._asking.check_prompt(prompt)
            top = int(body.logprobs) if body.logprobs else 0
            sampling = self._asking.sampling(body, prompt, limit=body.limit, top=top, raw=False)
            if body.echo and body.logprobs is not None and sampling.prompt_logprobs is None:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=top)
            for one in sampling.times(body.n or 1):
                rows.append(Row(prompt, one, adapter=adapter, eager=bool(body.stream)))
        return rows

    async def whole(self, body: CompletionBody) -> Json:
        rows = self.rows(body)
        await self._asking.whole(rows)
        return {
            **bodies.head("cmpl", "text_completion", body.model or self._asking.model),
            "choices": [self._choice(body, index, row) for index, row in enumerate(rows)],
            "usage": self._usage(body, rows),
        }

    async def chunks(self, body: CompletionBody, rows: Sequence[Row]) -> AsyncIterator[Json]:
        head = bodies.head("cmpl", "text_completion", body.model or self._asking.model)
        growing = [Growing(self._text, row) for row in rows]
        async with aclosing(self._asking.progress(rows)) as steps:
            async for index, row, start, end, finish in steps:
                choice = {
                    "index": index,
                    "text": growing[index].more(),
                    **self._facts(body, row, start, end),
                    "finish_reason": finish,
                    "stop_reason": row.stop_reason,
                }
                if body.return_token_ids:
                    choice["prompt_token_ids"] = row.prompt if start == 0 else None
                yield {**head, "choices": [choice]}
        if body.stream_options and body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": self._usage(body, rows)}

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        given = body.prompt
        if isinstance(given, str) or (isinstance(given, list) and given and _is_id(given[0])):
            given = [given]
        if not isinstance(given, list) or not given:
            raise EngineRefused("`prompt` is a text, ids, or a list of these.", status=400)
        return [self._ids(body, one) for one in given]

    def _ids(self, body: CompletionBody, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            return self._text.encode(prompt, special=body.add_special_tokens)
        if isinstance(prompt, list) and all(map(_is_id, prompt)):
            return prompt
        raise EngineRefused(
            "`prompt` is a text, ids, or a list of these.", status=400, param="prompt"
        )

    def _choice(self, body: CompletionBody, index: int, row: Row) -> Json:
        text = self._text.answer(row)
        facts = self._facts(body, row, 0, len(row.ids))
        if body.echo:
            text = self._text.decode(row.prompt, skip_special=True) + text
            if facts["logprobs"] is not None:
                as_ids = bool(body.return_tokens_as_token_ids)
                facts["logprobs"] = bodies.echoed_logprobs(self._text, row, as_ids=as_ids)
        return {
            "index": index,
            "text": text,
            **facts,
            "finish_reason": row.finish,
            "stop_reason": row.stop_reason,
            "prompt_logprobs": bodies.prompt_logprobs(self._text, row),
            "prompt_token_ids": row.prompt if body.return_token_ids else None,
        }

    def _facts(self, body: CompletionBody, row: Row, start: int, end: int) -> Json:
        facts: Json = {"logprobs": None}
        if body.logprobs is not None and body.logprobs is not False:
            as_ids = bool(body.return_tokens_as_token_ids)
            facts["logprobs"] = bodies.completion_logprobs(
                self._text, row, start, end, as_ids=as_ids
            )
        facts["token_ids"] = row.ids[start:end] if body.return_token_ids else None
        return facts

    def _usage(self, body: CompletionBody, rows: Sequence[Row]) -> Json:
        return bodies.usage([row.prompt for row in rows[:: body.n or 1]], rows)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Tokens:
    def __init__(self, asking: Asking, chat: Chat, calls: CallReader) -> None:
        self._asking = asking
        self._text = asking.text
        self._chat = chat
        self._calls = calls

    def render(self, body: ChatBody) -> Json:
        """The body for /inference/v1/generate that corresponds to a chat request."""
        row = self._chat.rows(body)[0]
        asked = row.sampling
        params: Json = {
            "n": body.n or 1,
            "seed": body.seed,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "min_p": asked.min_p,
            "repetition_penalty": asked.repetition_penalty,
            "presence_penalty": asked.presence_penalty,
            "frequency_penalty": asked.frequency_penalty,
            "logit_bias": body.logit_bias,
            "allowed_token_ids": body.allowed_token_ids,
            "stop": list(asked.stops),
            "stop_token_ids": body.stop_token_ids or [],
            "include_stop_str_in_output": asked.keep_stop,
            "ignore_eos": bool(body.ignore_eos),
            "min_tokens": asked.min_tokens,
            "skip_special_tokens": asked.skip_special_tokens,
            "max_tokens": asked.max_tokens,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "prompt_logprobs": body.prompt_logprobs,
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
        self._asking.check_prompt(body.token_ids)
        params = body.sampling_params
        sampling = self._asking.sampling(
            params, body.token_ids, limit=params.max_tokens, top=params.logprobs or 0, raw=False
        )
        eager = bool(body.stream)
        return [
            Row(body.token_ids, one, adapter=adapter, eager=eager)
            for one in sampling.times(params.n or 1)
        ]

    async def whole(self, body: GenerateBody) -> Json:
        rows = self.rows(body)
        await self._asking.whole(rows)
        found = []
        for index, row in enumerate(rows):
            choice = {"index": index, **self._facts(body, row, 0, len(row.ids))}
            if body.output_mode == "text":
                choice["text"] = self._text.answer(row)
            found.append(choice | self._end(row))
        return {
            **self._head(body),
            "choices": found,
            "usage": bodies.usage([body.token_ids], rows),
            "prompt_logprobs": bodies.prompt_logprobs(self._text, rows[0]),
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        }

    async def chunks(self, body: GenerateBody, rows: Sequence[Row]) -> AsyncIterator[Json]:
        """The prompt's ids are in the first chunk."""
        head = self._head(body)
        growing = [Growing(self._text, row) for row in rows]
        prompt = {"prompt_token_ids": body.token_ids} if body.return_token_ids else {}
        async with aclosing(self._asking.progress(rows)) as steps:
            async for index, row, start, end, finish in steps:
                choice = {"index": index, **self._facts(body, row, start, end)}
                choice |= {"finish_reason": None, "stop_reason": None}
                if body.output_mode == "text":
                    choice["text"] = growing[index].more()
                if finish is not None:
                    choice |= self._end(row)
                yield {**head, "choices": [choice], **prompt}
                prompt = {}
        if body.stream_options and body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": bodies.usage([body.token_ids], rows)}

    def derender(self, body: Any) -> Json:
        """The messages in generated ids; the token that ended an answer becomes text."""
        asked = body.get("chat_request")
        if asked is None and self._calls.known:
            raise EngineRefused(
                "chat_request is required when a tool or reasoning parser is configured.",
                status=400,
                param="chat_request",
            )
        request = read(asked or {"messages": []}, ChatBody)
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

    def _head(self, body: GenerateBody) -> Json:
        return {
            "request_id": body.request_id or f"generate-tokens-{uuid.uuid4().hex}",
            "model": body.model or self._asking.model,
            "output_mode": body.output_mode,
        }

    def _facts(self, body: GenerateBody, row: Row, start: int, end: int) -> Json:
        facts: Json = {"token_ids": row.ids[start:end], "logprobs": None}
        if body.sampling_params.logprobs is not None:
            facts["logprobs"] = (
                bodies.chat_logprobs(self._text, row, start, end, as_ids=False)
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
