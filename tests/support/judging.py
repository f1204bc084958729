"""A judge's engine whose answers a test scripts: over HTTP, in the test's own process."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

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

    def answer(self, path: str, body: Json | None) -> tuple[int, Json]:
        if path.endswith("/models"):
            return 200, {"data": [{"id": MODEL}]}
        if body is None:
            return 200, {}
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

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(*engine.answer(self.path, None))

        def do_POST(self) -> None:
            engine.keys.add(self.headers.get("authorization", ""))
            length = int(self.headers["content-length"])
            self._reply(*engine.answer(self.path, json.loads(self.rfile.read(length))))

        def _reply(self, status: int, told: Json) -> None:
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    engine.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
