"""An engine that takes weights, with a number in the place of weights, and that fails as told.

A version's files hold its number; the logprob of every token is -0.1 times the number of what
samples. It keeps a list of what it was asked, in order.
"""

import asyncio
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from aiohttp import web
from envserver_clients.weights import PromptCheck

from support.engine_stand_in import COMPLETIONS, FakeVllm, Json, in_thread


def saver(number: int) -> Callable[[Path], None]:
    """Writes the weights `number`, or an adapter."""
    files = ("config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors")

    def save(folder: Path) -> None:
        for name in files:
            (folder / name).write_text(str(number))

    return save


def check(number: int) -> PromptCheck:
    """What an engine with the weights `number` computes."""
    return PromptCheck([1, 2, 3], [4, 5, 6], [-0.1 * number] * 3, 1e-3)


class ScriptedEngine(FakeVllm):
    """
    Args:
        steps: what it was asked that changes something.
        refuse: status by path: what it answers instead.
        on: called by path, before the answer.
        stubborn: it says that it took weights, and keeps the old ones.
        busy: adapters that calls need, as /metrics tells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []
        self.refuse: dict[str, int] = {}
        self.on: dict[str, Callable[[], None]] = {}
        self.stubborn = False
        self.busy = ""
        self.start_again()

    def start_again(self) -> None:
        """As after a crash: the weights are those that it was started with."""
        self.weights, self.name, self.paused = 0, "default", False
        self.adapters: dict[str, int] = {}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read() or b"null")
        # In a thread, which also works on when whoever asked has given up.
        query = request.query_string
        status, told = await asyncio.to_thread(self.answer, request.path, query, body)
        if isinstance(told, str):
            return web.Response(text=told, status=status)
        return web.json_response(told, status=status)

    def answer(  # type: ignore[override]
        self, path: str, query: str, body: Any
    ) -> tuple[int, Any]:
        """Status and what is told."""
        if hook := self.on.get(path):
            hook()
        if path in self.refuse:
            return self.refuse[path], {"error": {"message": f"no {path}"}}
        act: dict[str, Callable[[], Any]] = {
            "/health": dict,
            "/weight_info": lambda: {"weight_version": self.name},
            "/v1/models": lambda: {"data": [{"id": one} for one in ("base", *self.adapters)]},
            "/metrics": lambda: (
                f'vllm:lora_requests_info{{max_lora="2",running_lora_adapters="{self.busy}",'
                f'waiting_lora_adapters=""}} 2.0\n'
            ),
            COMPLETIONS: lambda: self.completions(body),
        }
        return (200, act[path]()) if path in act else self._change(path, query, body)

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

    def prompt_logprobs(self, body: Json) -> list[Json | None]:
        assert not self.paused
        number = self.adapters.get(body["model"], self.weights)
        return [None, *[{str(token): {"logprob": -0.1 * number}} for token in body["prompt"]][1:]]


def _number(folder: str, file: str) -> int:
    return int((Path(folder) / file).read_text())


def scripted_engine() -> AbstractContextManager[ScriptedEngine]:
    return in_thread(ScriptedEngine())
