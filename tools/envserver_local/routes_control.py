"""Routes other than sampling: health, names, metrics, pausing, weights and their version, adapters.

They are those of vLLM's development mode. Anybody who can reach this engine can change its weights,
so by default it listens on this machine only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import orjson
from envserver_records.errors import EngineRefused
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from envserver import __version__
from envserver_local.simulated.conversation import read

from . import weights
from .bodies import BucketBody, FinishBody, JoinBody, LoraBody, RpcBody, VersionBody
from .row_requests import Asking
from .rows import PauseMode
from .runner import Runner
from .weights import Receiver


class Metrics(Collector):
    """Metrics read when they are requested; nothing is counted twice."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, runner: Runner, model: str) -> None:
        self._runner = runner
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> str:
        """All metrics as text."""
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        """See prometheus_client."""
        runner, scheduler = self._runner, self._runner.scheduler
        prefixes = runner.generator.prefixes
        gauges = {
            "num_requests_running": ("Answers being sampled.", len(scheduler.running)),
            "num_requests_waiting": ("Answers in line.", len(scheduler.waiting)),
            "kv_cache_usage_perc": ("Share of the room for keys and values.", scheduler.share),
        }
        counters = {
            "num_preemptions": ("Answers put back in line.", runner.displaced),
            "prompt_tokens": ("Tokens of prompts.", runner.read_tokens),
            "generation_tokens": ("Tokens sampled.", runner.sampled_tokens),
            "prefix_cache_queries": ("Tokens looked for among old ones.", prefixes.asked),
            "prefix_cache_hits": ("Tokens found among old ones.", prefixes.found),
            "iterations": ("Steps of the batch.", runner.steps),
        }
        for name, (words, value) in gauges.items():
            gauge = GaugeMetricFamily(f"vllm:{name}", words, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (words, value) in counters.items():
            counter = CounterMetricFamily(f"vllm:{name}", words, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter


Json = dict[str, Any]


class Control:
    """Answers requests about the engine itself.

    Args:
        lora: whether adapters may be loaded.
    """

    def __init__(self, asking: Asking, *, lora: bool) -> None:
        self._asking = asking
        self._runner = asking.runner
        self._lora = lora
        self._created = int(time.time())
        self._metrics = Metrics(asking.runner, asking.model)
        self._receiver = Receiver(asking.runner.generator.model)

    def routes(self) -> list[Route]:
        """All routes."""
        gets: dict[str, Callable[[Request], Any]] = {
            "/health": self._health,
            "/ping": self._health,
            "/version": self._version,
            "/metrics": self._numbers,
            "/v1/models": self._models,
            "/is_paused": self._is_paused,
            "/weight_info": self._weight_info,
            "/get_world_size": self._world_size,
        }
        posts: dict[str, Callable[[Request], Any]] = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_requests": self._abort_requests,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/update_weight_version": self._update_weight_version,
            "/collective_rpc": self._collective_rpc,
            "/init_weight_transfer_engine": self._join_trainer,
            "/start_weight_update": self._start_update,
            "/update_weights": self._receive,
            "/finish_weight_update": self._finish_update,
            "/weight_checker": self._checksums,
            "/v1/load_lora_adapter": self._load_lora_adapter,
            "/v1/unload_lora_adapter": self._unload_lora_adapter,
        }
        return [
            *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
            *(Route(path, answer, methods=["POST"]) for path, answer in posts.items()),
        ]

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._runner.alive else 500)

    async def _version(self, request: Request) -> Response:
        return _json({"version": f"envserver-local {__version__}"})

    async def _numbers(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type=Metrics.media_type)

    async def _models(self, request: Request) -> Response:
        own = self._model(self._asking.model, None, None)
        adapters = [
            self._model(one.name, str(one.folder), self._asking.model)
            for one in self._asking.adapters.loaded
        ]
        return _json({"object": "list", "data": [own, *adapters]})

    async def _is_paused(self, request: Request) -> Response:
        return _json({"is_paused": self._runner.scheduler.paused is not None})

    async def _weight_info(self, request: Request) -> Response:
        return _json({"weight_version": self._runner.version})

    async def _pause(self, request: Request) -> Response:
        mode: Any = request.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            modes = ", ".join(get_args(PauseMode))
            raise EngineRefused(f"`mode` is one of {modes}.", status=400, param="mode")
        await self._runner.pause(mode)
        return _json({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        def resume() -> None:
            self._receiver.must_be_whole()
            self._runner.resume()

        await self._runner.run(resume)
        return _json({"status": "resumed"})

    async def _abort_requests(self, request: Request) -> Response:
        aborted = await self._runner.run(self._runner.abort_all)
        return _json({"status": "aborted", "aborted": aborted})

    async def _reset_prefix_cache(self, request: Request) -> Response:
        await self._runner.run(self._runner.generator.prefixes.clear)
        return _json({"success": True})

    async def _update_weight_version(self, request: Request) -> Response:
        version = (await _body(request, VersionBody)).new_version
        await self._runner.run(lambda: self._runner.set_version(version))
        return _json({"success": True, "new_version": version})

    async def _collective_rpc(self, request: Request) -> Response:
        body = await _body(request, RpcBody)
        folder = body.kwargs.get("weights_path")
        if body.method != "reload_weights" or not isinstance(folder, str):
            raise EngineRefused(
                "The local engine knows the method reload_weights with a `weights_path` only.",
                status=400,
                param="method",
            )

        def reload() -> None:
            generator = self._runner.generator
            weights.reload(generator.model, Path(folder))
            self._receiver.incomplete = False
            generator.prefixes.clear()

        await self._runner.run(reload)
        return _json({"results": [None]})

    async def _world_size(self, request: Request) -> Response:
        return _json({"world_size": 1})

    async def _join_trainer(self, request: Request) -> Response:
        info = (await _body(request, JoinBody)).init_info
        await self._runner.run(lambda: self._receiver.join(info))
        return _json({"message": "Weight transfer initialized"})

    async def _start_update(self, request: Request) -> Response:
        await self._runner.run(self._receiver.start)
        return _json({"message": "Weight update started"})

    async def _receive(self, request: Request) -> Response:
        info = (await _body(request, BucketBody)).update_info

        def receive() -> None:
            self._receiver.receive(info, paused=self._runner.scheduler.paused is not None)

        await self._runner.run(receive)
        return _json({"message": "Weights updated"})

    async def _finish_update(self, request: Request) -> Response:
        name = (await _body(request, FinishBody)).weight_version

        def finish() -> None:
            self._receiver.finish(named=name is not None)
            self._runner.generator.prefixes.clear()
            if name is not None:
                self._runner.set_version(name)

        await self._runner.run(finish)
        return _json({"message": "Weight update finished"})

    async def _checksums(self, request: Request) -> Response:
        return _json({"checksums": await self._runner.run(self._receiver.checksums)})

    async def _load_lora_adapter(self, request: Request) -> Response:
        body = await self._lora_body(request)
        if body.lora_name == self._asking.model or not body.lora_name or not body.lora_path:
            raise EngineRefused("`lora_name` or `lora_path` is unusable.", status=400)
        await self._runner.run(
            lambda: self._asking.adapters.load(
                body.lora_name, Path(body.lora_path), replace=body.load_inplace
            )
        )
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def _unload_lora_adapter(self, request: Request) -> Response:
        body = await self._lora_body(request)
        await self._runner.run(lambda: self._asking.adapters.unload(body.lora_name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def _lora_body(self, request: Request) -> LoraBody:
        if not self._lora:
            raise EngineRefused(
                "Adapters cannot be loaded: the engine was started without --enable-lora.",
                status=404,
            )
        body: LoraBody = await _body(request, LoraBody)
        return body

    def _model(self, name: str, root: str | None, parent: str | None) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "envserver",
            "root": root or self._asking.root,
            "parent": parent,
            "max_model_len": self._asking.most_tokens,
        }


async def _body(request: Request, kind: Any) -> Any:
    try:
        return read(orjson.loads(await request.body()), kind)
    except orjson.JSONDecodeError as error:
        raise EngineRefused(f"The body is not JSON: {error}.", status=400) from error


def _json(payload: Any) -> Response:
    return Response(orjson.dumps(payload), media_type="application/json")
