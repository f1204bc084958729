"""vLLM's token endpoints: render, generate, derender, tokenize, detokenize.

Rendering returns the whole request for generating, with every setting; generating reports which
version of the weights sampled which tokens.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from envserver_records.errors import EngineRefused

from envserver_local.simulated.conversation import DetokenizeBody, read

from . import answers
from .answers import CallReader
from .bodies import ChatBody, GenerateBody, TokenizeBody
from .routes_completions import Chat
from .row_requests import Asking, check
from .rows import Row
from .text import Growing

Json = dict[str, Any]


class Tokens:
    """Answers requests that contain or return ids."""

    def __init__(self, asking: Asking, chat: Chat, calls: CallReader) -> None:
        self._asking = asking
        self._text = asking.text
        self._chat = chat
        self._calls = calls

    def render(self, body: ChatBody) -> Json:
        """Returns the body for /inference/v1/generate that corresponds to a chat request."""
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
        """Returns one row for each answer. Raises EngineRefused: the request cannot be answered."""
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
        """Returns the complete answer."""
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
            "usage": answers.usage([body.token_ids], rows),
            "prompt_logprobs": answers.prompt_logprobs(self._text, rows[0]),
            "prompt_token_ids": body.token_ids if body.return_token_ids else None,
        }

    async def chunks(self, body: GenerateBody, rows: Sequence[Row]) -> AsyncIterator[Json]:
        """Yields the answer in chunks; the prompt's ids are in the first one."""
        head = self._head(body)
        growing = [Growing(self._text, row) for row in rows]
        told = [0] * len(rows)
        left = set(range(len(rows)))
        prompt = {"prompt_token_ids": body.token_ids} if body.return_token_ids else {}
        async with self._asking.running(rows) as wait:
            while left:
                await wait()
                check(rows)
                for index in sorted(left):
                    row = rows[index]
                    finish, count = row.finish, len(row.logprobs)
                    if count == told[index] and finish is None:
                        continue
                    choice = {"index": index, **self._facts(body, row, told[index], count)}
                    choice |= {"finish_reason": None, "stop_reason": None}
                    if body.output_mode == "text":
                        choice["text"] = growing[index].more()
                    told[index] = count
                    if finish is not None:
                        left.discard(index)
                        choice |= self._end(row)
                    yield {**head, "choices": [choice], **prompt}
                    prompt = {}
        if body.stream_options and body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": answers.usage([body.token_ids], rows)}

    def derender(self, body: Any) -> Json:
        """Returns the messages in generated ids; the token that ended an answer becomes text.
        Raises EngineRefused: there are no ids, or the request that they answer is missing.
        """
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
            **answers.head("chatcmpl", "chat.completion", request.model or self._asking.model),
            "choices": found,
            "prompt_token_ids": generated.get("prompt_token_ids"),
        }

    def tokenize(self, body: TokenizeBody) -> Json:
        """Returns the ids of a text or of a conversation."""
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
        """Returns the text of ids."""
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
                answers.chat_logprobs(self._text, row, start, end, as_ids=False)
                if body.output_mode == "text"
                else answers.token_logprobs(row, start, end)
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
