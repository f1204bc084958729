"""/v1/chat/completions and /v1/completions: samples rows for a conversation, or for texts or ids.

A stream of a chat sends text as it is sampled, unless it may contain calls: then the text is parsed
once at the end, while ids and logprobs are still sent token by token.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from envserver_records.errors import EngineRefused

from . import answers
from .answers import CallReader
from .bodies import ChatBody, CompletionBody
from .bodies import check as check_body
from .row_requests import Asking, check
from .rows import Row
from .text import Growing

Json = dict[str, Any]


class Chat:
    """Answers chat requests."""

    def __init__(self, asking: Asking, calls: CallReader) -> None:
        self._asking = asking
        self._text = asking.text
        self._calls = calls

    def prompt_ids(self, body: ChatBody) -> list[int]:
        """Returns the ids of the rendered conversation.
        Raises EngineRefused: the template does not accept it.
        """
        return self._text.encode(
            self._text.prompt_text(body.messages, body.tools, msgspec.structs.asdict(body))
        )

    def rows(self, body: ChatBody) -> list[Row]:
        """Returns one row for each requested choice.
        Raises EngineRefused: the request cannot be answered.
        """
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
        """Returns the complete answer."""
        rows = self.rows(body)
        await self._asking.whole(rows)
        prompt = rows[0].prompt
        return {
            **answers.head("chatcmpl", "chat.completion", body.model or self._asking.model),
            "choices": [self._choice(body, index, row) for index, row in enumerate(rows)],
            "usage": answers.usage([prompt], rows),
            "prompt_logprobs": answers.prompt_logprobs(self._text, rows[0]),
            "prompt_token_ids": prompt if body.return_token_ids else None,
        }

    async def chunks(self, body: ChatBody, rows: Sequence[Row]) -> AsyncIterator[Json]:
        """Yields the answer in chunks."""
        head = answers.head("chatcmpl", "chat.completion.chunk", body.model or self._asking.model)
        for index in range(len(rows)):
            role = {"role": "assistant", "content": ""}
            first = {"index": index, "delta": role, "logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": rows[0].prompt} if body.return_token_ids else {}
            yield {**head, "choices": [first], **ids}
        streams = [_Stream(self, body, index, row) for index, row in enumerate(rows)]
        async with self._asking.running(rows) as wait:
            while any(stream.open for stream in streams):
                await wait()
                check(rows)
                for stream in streams:
                    choice = stream.next()
                    if choice is not None:
                        yield {**head, "choices": [choice]}
        if body.stream_options and body.stream_options.include_usage:
            yield {**head, "choices": [], "usage": answers.usage([rows[0].prompt], rows)}

    def message(self, body: ChatBody, text: str) -> Json:
        """Returns the assistant's message for a text."""
        message: Json = {"role": "assistant", "content": text}
        if self._calls.free(body):
            content, calls = self._calls.read(text, body)
            message["content"] = content
            if calls:
                message["tool_calls"] = calls
        return message

    def facts(self, body: ChatBody, row: Row, start: int, end: int) -> Json:
        """Returns ids, logprobs and other facts about tokens `start` to `end` of a choice."""
        facts: Json = {"logprobs": None}
        if body.logprobs:
            as_ids = bool(body.return_tokens_as_token_ids)
            facts["logprobs"] = answers.chat_logprobs(self._text, row, start, end, as_ids=as_ids)
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

    def whole_delta(self, body: ChatBody, row: Row) -> Json:
        """Returns a whole message as one delta, for answers that may contain calls."""
        message = self.message(body, self._text.answer(row))
        delta: Json = {"content": message["content"]} if message["content"] else {}
        if message.get("tool_calls"):
            delta["tool_calls"] = [
                {"index": place, **call} for place, call in enumerate(message["tool_calls"])
            ]
        return delta


class _Stream:
    def __init__(self, chat: Chat, body: ChatBody, index: int, row: Row) -> None:
        self.open = True
        self._chat = chat
        self._body = body
        self._index = index
        self._row = row
        self._told = 0
        self._growing = None if chat._calls.free(body) else Growing(chat._text, row)

    def next(self) -> Json | None:
        """Returns the next chunk's choice; None if there is nothing new."""
        row = self._row
        finish, count = row.finish, len(row.logprobs)
        if not self.open or (count == self._told and finish is None):
            return None
        if self._growing is not None:
            text = self._growing.more()
            delta = {"content": text} if text else {}
        else:
            delta = {} if finish is None else self._chat.whole_delta(self._body, row)
        choice: Json = {"index": self._index, "delta": delta, "finish_reason": None}
        choice |= self._chat.facts(self._body, row, self._told, count)
        self._told = count
        if finish is not None:
            self.open = False
            choice["finish_reason"] = "tool_calls" if delta.get("tool_calls") else finish
            choice["stop_reason"] = row.stop_reason
        return choice


class Completions:
    """Answers requests for completions."""

    def __init__(self, asking: Asking) -> None:
        self._asking = asking
        self._text = asking.text

    def rows(self, body: CompletionBody) -> list[Row]:
        """Returns the rows of all prompts, in order, `n` for each.
        Raises EngineRefused: the request cannot be answered.
        """
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
        """Returns the complete answer."""
        rows = self.rows(body)
        await self._asking.whole(rows)
        return {
            **answers.head("cmpl", "text_completion", body.model or self._asking.model),
            "choices": [self._choice(body, index, row) for index, row in enumerate(rows)],
            "usage": self._usage(body, rows),
        }

    async def chunks(self, body: CompletionBody, rows: Sequence[Row]) -> AsyncIterator[Json]:
        """Yields the answer in chunks."""
        head = answers.head("cmpl", "text_completion", body.model or self._asking.model)
        growing = [Growing(self._text, row) for row in rows]
        told = [0] * len(rows)
        left = set(range(len(rows)))
        async with self._asking.running(rows) as wait:
            while left:
                await wait()
                check(rows)
                for index in sorted(left):
                    row = rows[index]
                    finish, count = row.finish, len(row.logprobs)
                    if count == told[index] and finish is None:
                        continue
                    choice = {
                        "index": index,
                        "text": growing[index].more(),
                        **self._facts(body, row, told[index], count),
                        "finish_reason": finish,
                        "stop_reason": row.stop_reason,
                    }
                    if body.return_token_ids:
                        choice["prompt_token_ids"] = row.prompt if told[index] == 0 else None
                    told[index] = count
                    if finish is not None:
                        left.discard(index)
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
                facts["logprobs"] = answers.echoed_logprobs(self._text, row, as_ids=as_ids)
        return {
            "index": index,
            "text": text,
            **facts,
            "finish_reason": row.finish,
            "stop_reason": row.stop_reason,
            "prompt_logprobs": answers.prompt_logprobs(self._text, row),
            "prompt_token_ids": row.prompt if body.return_token_ids else None,
        }

    def _facts(self, body: CompletionBody, row: Row, start: int, end: int) -> Json:
        facts: Json = {"logprobs": None}
        if body.logprobs is not None and body.logprobs is not False:
            as_ids = bool(body.return_tokens_as_token_ids)
            facts["logprobs"] = answers.completion_logprobs(
                self._text, row, start, end, as_ids=as_ids
            )
        facts["token_ids"] = row.ids[start:end] if body.return_token_ids else None
        return facts

    def _usage(self, body: CompletionBody, rows: Sequence[Row]) -> Json:
        return answers.usage([row.prompt for row in rows[:: body.n or 1]], rows)


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
