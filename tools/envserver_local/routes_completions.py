"""/v1/completions: continues texts or ids, without rendering or parsing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from envserver_records.errors import EngineRefused

from . import answers
from .bodies import CompletionBody
from .bodies import check as check_body
from .row_requests import Asking, check
from .rows import Row
from .text import Growing

Json = dict[str, Any]


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
