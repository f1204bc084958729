"""A judge's engine whose answers a test scripts: over HTTP, in the test's own process."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from email.message import Message
from typing import Any

from .http_stand_in import standing_in

Json = dict[str, Any]

MODEL = "judge-1"


class JudgeEngine:
    """
    Args:
        say: returns the text for a request's messages.
        failing: HTTP statuses that the next requests get instead.
        asked: the bodies that were answered, in order.
        keys: the Authorization headers that came.
        most_at_once: the most requests in flight at a time.
    """

    def __init__(self, say: Callable[[list[Json]], str]) -> None:
        self.url = ""
        self.say = say
        self.failing: list[int] = []
        self.asked: list[Json] = []
        self.keys: set[str] = set()
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()

    def answer(self, path: str, headers: Message, body: bytes) -> tuple[int, bytes]:
        status, told = self._told(path, headers, json.loads(body) if body else None)
        return status, json.dumps(told).encode()

    def _told(self, path: str, headers: Message, body: Json | None) -> tuple[int, Json]:
        if path.endswith("/models"):
            return 200, {"data": [{"id": MODEL}]}
        if body is None:
            return 200, {}
        self.keys.add(headers.get("authorization", ""))
        with self._lock:
            if self.failing:
                return self.failing.pop(0), {"error": {"message": "not now"}}
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            text = self.say(body["messages"])
        finally:
            with self._lock:
                self._now -= 1
                self.asked.append(body)
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 100, "completion_tokens": 10}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return 200, {"model": MODEL, "choices": [choice], "usage": usage}


@contextlib.contextmanager
def judge_engine(say: Callable[[list[Json]], str]) -> Iterator[JudgeEngine]:
    """Serves a JudgeEngine for the block."""
    engine = JudgeEngine(say)
    with standing_in(engine.answer) as url:
        engine.url = f"{url}/v1"
        yield engine
