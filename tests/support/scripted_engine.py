"""A vLLM with token endpoints that samples what a test says, and writes down what it saw."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any, Literal, NamedTuple

from envserver.models import ProbeResult
from envserver.tokens import ChatFormat
from support.engine_stand_in import END, ScaleOut

Json = dict[str, Any]
UPSTREAM = ProbeResult(mode="tokens", model="tiny", tools=True, has_parser=True)


class Sample(NamedTuple):
    """What is sampled, before what ends it: the model's own end, the limit, or a stop string if
    one was asked for. `tail` is sampled in one token with the stop string's last."""

    ids: list[int]
    end: Literal["own", "limit", "string"] = "own"
    tail: str = ""


class Scripted(ScaleOut):
    """See ScaleOut; `script` holds what is sampled next, the oldest first.

    `saw` are the ids that were to be continued, and `said` those that were sampled behind them.
    """

    def __init__(self, format: ChatFormat) -> None:
        super().__init__(format)
        self.format = format
        self.script: deque[Sample] = deque()
        self.saw: list[list[int]] = []
        self.said: list[list[int]] = []

    def message(self, body: Json, text: str) -> Json:
        """As vLLM reads it: what begins like a call and is none is text."""
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return super().message(body, text)
        return {"role": "assistant", "content": text}

    def generate(self, body: Json) -> Json:
        answer = super().generate(body)
        for choice in answer["choices"]:
            self.saw.append(list(body["token_ids"]))
            self.said.append(choice["token_ids"])
        return answer

    def sampled(self, sampling: Json, index: int = 0) -> Json:
        ids, end, tail = self.script.popleft()
        stop = (sampling.get("stop") or [None])[0] if end == "string" else None
        if stop is not None:
            ids = [*ids, *self.format.encode(stop + tail)]
        elif end != "limit":
            ids = [*ids, self.format.encode(END)[0]]
        words = [id for id in ids if not self.format.vocabulary.is_special(id)]
        text = self.format.decode(words)
        return {
            "index": index,
            "text": text if stop is None else text.partition(stop)[0],
            "token_ids": ids,
            "finish_reason": "length" if end == "limit" else "stop",
            "stop_reason": stop,
        }
