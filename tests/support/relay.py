"""An HTTP relay in front of a real engine that writes down what the engine itself said."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import orjson


class Echo:
    """One answer of the engine: the ids and logprobs that stand in it.

    Args:
        prompt_ids: as the engine echoed them.
        completion_ids, logprobs: as it returned them.
    """

    def __init__(self, answer: dict[str, Any]) -> None:
        choice = answer["choices"][0]
        self.prompt_ids: list[int] = answer["prompt_token_ids"]
        self.completion_ids: list[int] = choice["token_ids"]
        self.logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]


@contextlib.contextmanager
def relay(engine_url: str) -> Iterator[tuple[str, list[Echo]]]:
    """Forwards to `engine_url` (without /v1); yields the relay's address and the growing list.

    Answers that stream are put together from their chunks as they stand, without any of our code.
    """
    seen: list[Echo] = []
    client = httpx.Client(base_url=engine_url, timeout=120)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(client.get(self.path))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            answer = client.post(
                self.path, content=body, headers={"content-type": "application/json"}
            )
            if self.path.endswith("/chat/completions") and answer.status_code == 200:
                streams = answer.headers["content-type"].startswith("text/event-stream")
                seen.append(Echo(_joined(answer.text) if streams else answer.json()))
            self._answer(answer)

        def _answer(self, answer: httpx.Response) -> None:
            self.send_response(answer.status_code)
            self.send_header("Content-Type", answer.headers.get("content-type", "text/plain"))
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *words: object) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
        client.close()


def _joined(text: str) -> dict[str, Any]:
    prompt: list[int] = []
    ids: list[int] = []
    logprobs: list[dict[str, Any]] = []
    for line in text.split("\n"):
        if not line.startswith("data: {"):
            continue
        chunk = orjson.loads(line[6:])
        prompt = chunk.get("prompt_token_ids") or prompt
        for choice in chunk["choices"]:
            ids += choice.get("token_ids") or []
            logprobs += (choice.get("logprobs") or {}).get("content") or []
    return {
        "prompt_token_ids": prompt,
        "choices": [{"token_ids": ids, "logprobs": {"content": logprobs}}],
    }
