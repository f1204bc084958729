"""An engine that takes weights, with a number in the place of weights, and that fails as told.

A version's files hold its number; the logprob of every token is -0.1 times the number of what
samples. It keeps a list of what it was asked, in order.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from envserver_clients.weights import PromptCheck

BASE = 0
"""The number of the weights that it is started with."""
FILES = ("config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors")


def saver(number: int) -> Callable[[Path], None]:
    """Writes the weights `number`, or an adapter."""

    def save(folder: Path) -> None:
        for name in FILES:
            (folder / name).write_text(str(number))

    return save


def check(number: int) -> PromptCheck:
    """What an engine with the weights `number` computes."""
    return PromptCheck([1, 2, 3], [4, 5, 6], [-0.1 * number] * 3, 1e-3)


class ScriptedEngine:
    """
    Args:
        steps: what it was asked that changes something.
        refuse: status by path: what it answers instead.
        on: called by path, before the answer.
        stubborn: it says that it took weights, and keeps the old ones.
        busy: adapters that calls need, as /metrics tells.
    """

    def __init__(self) -> None:
        self.url = ""
        self.steps: list[str] = []
        self.refuse: dict[str, int] = {}
        self.on: dict[str, Callable[[], None]] = {}
        self.stubborn = False
        self.busy = ""
        self.start_again()

    def start_again(self) -> None:
        """As after a crash: the weights are those that it was started with."""
        self.weights, self.name, self.paused = BASE, "default", False
        self.adapters: dict[str, int] = {}

    def answer(self, path: str, query: str, body: Any) -> tuple[int, Any]:
        """Status and what is told."""
        if hook := self.on.get(path):
            hook()
        if path in self.refuse:
            return self.refuse[path], {"error": {"message": f"no {path}"}}
        act = {
            "/health": dict,
            "/weight_info": lambda: {"weight_version": self.name},
            "/v1/models": lambda: {"data": [{"id": one} for one in ("base", *self.adapters)]},
            "/metrics": lambda: (
                f'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{self.busy}",'
                f'waiting_lora_adapters=""}} 2.0\n'
            ),
            "/v1/completions": lambda: self._score(body),
        }
        if path in act:
            return 200, act[path]()
        return self._change(path, query, body)

    def _change(self, path: str, query: str, body: Any) -> tuple[int, Any]:
        step = path.rpartition("/")[2]
        if path == "/collective_rpc" and body["method"].endswith("can_reload"):
            return 200, {"results": ["True"]}
        if path == "/pause":
            self.paused, step = True, f"pause {query.removeprefix('mode=')}"
        elif path == "/resume":
            self.paused = False
        elif path == "/collective_rpc":
            step = "reload"
            assert self.paused
            if not self.stubborn:
                self.weights = _number(body["kwargs"]["weights_path"], "model.safetensors")
        elif path == "/update_weight_version":
            self.name = body["new_version"]
            step = f"name {self.name}"
        elif path == "/v1/load_lora_adapter":
            name = body["lora_name"]
            self.adapters[name] = _number(body["lora_path"], "adapter_model.safetensors")
            step = f"load {name}"
        elif path == "/v1/unload_lora_adapter":
            del self.adapters[body["lora_name"]]
            step = f"unload {body['lora_name']}"
        elif path != "/reset_prefix_cache":
            return 404, {"detail": "Not Found"}
        self.steps.append(step)
        return 200, {"success": True}

    def _score(self, body: Any) -> Any:
        assert not self.paused
        number = self.adapters.get(body["model"], self.weights)
        scored = [{str(token): {"logprob": -0.1 * number}} for token in body["prompt"]]
        return {"choices": [{"prompt_logprobs": [None, *scored[1:]]}]}


def _number(folder: str, file: str) -> int:
    return int((Path(folder) / file).read_text())


@contextlib.contextmanager
def scripted_engine() -> Iterator[ScriptedEngine]:
    """One that listens."""
    engine = ScriptedEngine()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(None)

        def do_POST(self) -> None:
            size = int(self.headers.get("content-length", 0))
            self._answer(json.loads(self.rfile.read(size) or b"null"))

        def _answer(self, body: Any) -> None:
            where = urlsplit(self.path)
            status, told = engine.answer(where.path, where.query, body)
            is_text = isinstance(told, str)
            payload = told.encode() if is_text else json.dumps(told).encode()
            self.send_response(status)
            self.send_header("content-type", "text/plain" if is_text else "application/json")
            self.send_header("content-length", str(len(payload)))
            self.end_headers()
            with contextlib.suppress(BrokenPipeError):  # whoever asked has given up
                self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    engine.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
