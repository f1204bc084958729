"""The engine over HTTP, with vLLM's paths and response formats.

Invariants: a wrong request gets an OpenAI-style error with HTTP 4xx, and a client that hangs up
frees its place in the batch. The routes that pause and change weights are those of vLLM's
development mode: any client of this engine can use them, so by default it listens on this machine
only.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import msgspec
import orjson
import torch
import uvicorn
from envserver_records.errors import (
    ConfigError,
    EngineRefused,
    EnvserverError,
    NotFoundError,
    UsageError,
)
from envserver_records.tasks import Json
from envserver_records.waiting import cancel_and_wait
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from envserver.version import __version__

from . import kv_cache, weights
from .bodies import (
    BucketBody,
    CallReader,
    FinishBody,
    GenerateBody,
    JoinBody,
    LoraBody,
    RpcBody,
    VersionBody,
    refuse_foreign,
)
from .generation import Generator, Runner
from .routes import Asking, Chat, Completions, Tokens
from .simulated.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read
from .simulated.server import (
    ProgramsOnly,
    QuietServer,
    decoded,
    error_answer,
    error_body,
    json_answer,
    listening_socket,
    missing,
    url_of,
)
from .text import PauseMode, Row, Sampling, Scheduler, Text
from .weights import Adapters, Receiver

if TYPE_CHECKING:
    from .__main__ import Options


class Metrics(Collector):
    """Metrics read when they are requested; nothing is counted twice."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, runner: Runner, model: str) -> None:
        self._runner = runner
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> str:
        return generate_latest(self._registry).decode()

    def collect(self) -> Iterator[Metric]:
        runner, scheduler = self._runner, self._runner.scheduler
        prefixes = runner.generator.prefixes
        gauges = {
            "num_requests_running": ("Answers being sampled.", len(scheduler.running)),
            "num_requests_waiting": ("Answers waiting.", len(scheduler.waiting)),
            "kv_cache_usage_perc": ("Share of the KV cache in use.", scheduler.share),
        }
        counters = {
            "num_preemptions": ("Answers put back into the queue.", runner.displaced),
            "prompt_tokens": ("Tokens of prompts.", runner.read_tokens),
            "generation_tokens": ("Tokens sampled.", runner.sampled_tokens),
            "prefix_cache_queries": ("Tokens looked up in the prefix cache.", prefixes.asked),
            "prefix_cache_hits": ("Tokens found in the prefix cache.", prefixes.found),
            "iterations": ("Steps of the batch.", runner.steps),
        }
        for kind, metrics in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, value) in metrics.items():
                metric = kind(f"vllm:{name}", text, labels=["model_name"])
                metric.add_metric([self._model], value)
                yield metric


class Control:
    def __init__(self, asking: Asking, *, lora: bool) -> None:
        self._asking = asking
        self._runner = asking.runner
        self._lora = lora
        self._created = int(time.time())
        self._metrics = Metrics(asking.runner, asking.model)
        self._receiver = Receiver(asking.runner.generator.model)

    def routes(self) -> list[Route]:
        gets: dict[str, Callable[[Request], Any]] = {
            "/health": self._health,
            "/ping": self._health,
            "/metrics": self._numbers,
            "/v1/models": self._models,
        }
        facts: dict[str, Callable[[], Json]] = {
            "/version": lambda: {"version": f"envserver-local {__version__}"},
            "/is_paused": lambda: {"is_paused": self._runner.scheduler.paused is not None},
            "/weight_info": lambda: {"weight_version": self._runner.version},
            "/get_world_size": lambda: {"world_size": 1},
        }
        steps: dict[str, tuple[type[msgspec.Struct] | None, Callable[[Any], Json | str]]] = {
            "/resume": (None, self._resume),
            "/abort_requests": (None, self._abort_requests),
            "/reset_prefix_cache": (None, self._reset_prefix_cache),
            "/update_weight_version": (VersionBody, self._update_weight_version),
            "/collective_rpc": (RpcBody, self._collective_rpc),
            "/init_weight_transfer_engine": (JoinBody, self._join_trainer),
            "/start_weight_update": (None, self._start_update),
            "/update_weights": (BucketBody, self._receive),
            "/finish_weight_update": (FinishBody, self._finish_update),
            "/weight_checker": (None, lambda _: {"checksums": self._receiver.checksums()}),
            "/v1/load_lora_adapter": (LoraBody, self._load_lora_adapter),
            "/v1/unload_lora_adapter": (LoraBody, self._unload_lora_adapter),
        }
        return [
            *(Route(path, answer, methods=["GET"]) for path, answer in gets.items()),
            *(Route(path, _fact(compute), methods=["GET"]) for path, compute in facts.items()),
            Route("/pause", self._pause, methods=["POST"]),
            *(
                Route(path, self._between_steps(*step), methods=["POST"])
                for path, step in steps.items()
            ),
        ]

    def _between_steps(
        self, kind: type[msgspec.Struct] | None, step: Callable[[Any], Json | str]
    ) -> Callable[[Request], Awaitable[Response]]:
        """A route whose work the engine's thread does between two steps of the batch."""

        async def endpoint(request: Request) -> Response:
            body = None if kind is None else read(await decoded(request), kind)
            answer = await self._runner.run(lambda: step(body))
            return PlainTextResponse(answer) if isinstance(answer, str) else json_answer(answer)

        return endpoint

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._runner.alive else 500)

    async def _numbers(self, request: Request) -> Response:
        return PlainTextResponse(self._metrics.text(), media_type=Metrics.media_type)

    async def _models(self, request: Request) -> Response:
        own = self._model(self._asking.model, None, None)
        adapters = [
            self._model(adapter.name, str(adapter.folder), self._asking.model)
            for adapter in self._asking.adapters.loaded
        ]
        return json_answer({"object": "list", "data": [own, *adapters]})

    async def _pause(self, request: Request) -> Response:
        mode: Any = request.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            modes = ", ".join(get_args(PauseMode))
            raise EngineRefused(f"`mode` is one of {modes}.", status=400, param="mode")
        await self._runner.pause(mode)
        return json_answer({"status": "paused"})

    def _resume(self, body: None) -> Json:
        self._receiver.must_be_whole()
        self._runner.resume()
        return {"status": "resumed"}

    def _abort_requests(self, body: None) -> Json:
        return {"status": "aborted", "aborted": self._runner.abort_all()}

    def _reset_prefix_cache(self, body: None) -> Json:
        self._runner.generator.prefixes.clear()
        return {"success": True}

    def _update_weight_version(self, body: VersionBody) -> Json:
        self._runner.set_version(body.new_version)
        return {"success": True, "new_version": body.new_version}

    def _collective_rpc(self, body: RpcBody) -> Json:
        folder = body.kwargs.get("weights_path")
        if body.method != "reload_weights" or not isinstance(folder, str):
            raise EngineRefused(
                "The local engine supports only the method reload_weights, with a `weights_path`.",
                status=400,
                param="method",
            )
        generator = self._runner.generator
        weights.reload(generator.model, Path(folder))
        self._receiver.incomplete = False
        generator.prefixes.clear()
        return {"results": [None]}

    def _join_trainer(self, body: JoinBody) -> Json:
        self._receiver.join(body.init_info)
        return {"message": "Weight transfer initialized"}

    def _start_update(self, body: None) -> Json:
        self._receiver.start()
        return {"message": "Weight update started"}

    def _receive(self, body: BucketBody) -> Json:
        is_paused = self._runner.scheduler.paused is not None
        self._receiver.receive(body.update_info, paused=is_paused)
        return {"message": "Weights updated"}

    def _finish_update(self, body: FinishBody) -> Json:
        self._receiver.finish(named=body.weight_version is not None)
        self._runner.generator.prefixes.clear()
        if body.weight_version is not None:
            self._runner.set_version(body.weight_version)
        return {"message": "Weight update finished"}

    def _load_lora_adapter(self, body: LoraBody) -> str:
        self._check_lora()
        if body.lora_name == self._asking.model or not body.lora_name or not body.lora_path:
            raise EngineRefused("`lora_name` or `lora_path` is unusable.", status=400)
        self._asking.adapters.load(body.lora_name, Path(body.lora_path), replace=body.load_inplace)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    def _unload_lora_adapter(self, body: LoraBody) -> str:
        self._check_lora()
        self._asking.adapters.unload(body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    def _check_lora(self) -> None:
        if not self._lora:
            raise EngineRefused(
                "Adapters cannot be loaded: the engine was started without --enable-lora.",
                status=404,
            )

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


Answering = Callable[[Request, Any], Awaitable[Response]]


def local_app(asking: Asking, *, lora: bool) -> Starlette:
    """`lora`: adapters may be loaded at run time."""
    calls = CallReader(asking.text)
    chat = Chat(asking, calls)
    completions = Completions(asking, calls)
    tokens = Tokens(asking, calls, chat)
    control = Control(asking, lora=lora)

    posts: dict[str, Answering] = {
        "/v1/chat/completions": _sampling(chat, ChatBody),
        "/v1/chat/completions/render": _computing(lambda body: tokens.render(read(body, ChatBody))),
        "/v1/chat/completions/derender": _computing(tokens.derender),
        "/v1/completions": _sampling(completions, CompletionBody),
        "/inference/v1/generate": _sampling(tokens, GenerateBody),
        "/tokenize": _computing(lambda body: tokens.tokenize(read(body, TokenizeBody))),
        "/detokenize": _computing(lambda body: tokens.detokenize(read(body, DetokenizeBody))),
    }
    return Starlette(
        routes=[
            *(Route(path, _decoding(answer), methods=["POST"]) for path, answer in posts.items()),
            *control.routes(),
        ],
        exception_handlers=dict.fromkeys((404, 405, EngineRefused, UsageError), _failed),
        middleware=[Middleware(ProgramsOnly)],
    )


def _sampling(route: Chat | Completions | Tokens, kind: type[Any]) -> Answering:
    async def answer(request: Request, body: Any) -> Response:
        wanted = read(body, kind)
        if wanted.stream:
            return _events(route.chunks(wanted, route.rows(wanted)))
        return await _whole(request, route.whole(wanted))

    return answer


def _computing(compute: Callable[[Any], Json]) -> Answering:
    async def answer(request: Request, body: Any) -> Response:
        return json_answer(compute(body))

    return answer


def _fact(compute: Callable[[], Json]) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return json_answer(compute())

    return endpoint


def _decoding(answer: Answering) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        body = await decoded(request)
        refuse_foreign(body)
        return await answer(request, body)

    return endpoint


async def _whole(request: Request, answer: Awaitable[Json]) -> Response:
    """Cancels the work if the client hangs up first."""
    answering = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_hung_up(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return json_answer(answering.result())
        return Response(status_code=499)
    finally:
        await cancel_and_wait(answering, leaving)


async def _hung_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _events(chunks: AsyncIterator[Json]) -> Response:
    async def lines() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield b"data: " + orjson.dumps(chunk) + b"\n\n"
        except EngineRefused as error:
            yield b"data: " + orjson.dumps(error_body(error)) + b"\n\n"
        yield b"data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def _failed(request: Request, error: Exception) -> Response:
    if isinstance(error, UsageError):
        error = EngineRefused(str(error), status=404 if isinstance(error, NotFoundError) else 400)
    return error_answer(error if isinstance(error, EngineRefused) else missing(request, error))


# Masks, positions, cache and attention are this engine's own code and may be wrong for an unknown
# architecture. So a few tokens sampled here are compared with a plain pass without a cache and with
# transformers' own attention.

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MOST_TOKENS = 32_768
"""Maximum context length if neither the model nor the user sets a smaller one."""


class Loaded(msgspec.Struct, frozen=True):
    """`most_tokens`: maximum number of tokens of a prompt and its answer together. `defaults`:
    sampling settings of the model's generation config."""

    model: PreTrainedModel
    text: Text
    most_tokens: int
    defaults: dict[str, float]


def load(options: Options) -> Loaded:
    device = _device(options)
    try:
        trust = options.trust_remote_code
        config = AutoConfig.from_pretrained(options.model, trust_remote_code=trust)
        tokenizer = AutoTokenizer.from_pretrained(options.model, trust_remote_code=trust)
        model = AutoModelForCausalLM.from_pretrained(
            options.model,
            config=config,
            attn_implementation=kv_cache.NAME,
            dtype=_dtype(options, config, device),
            trust_remote_code=trust,
            **_quantized(options, device),
        )
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"The model {options.model!r} cannot be loaded: {error}",
            hint="Name a folder with config.json, weights and tokenizer, or a model on the hub.",
        ) from error
    if not options.load_in_4bit:
        model.to(device)
    model.eval().requires_grad_(False)
    generation = model.generation_config or GenerationConfig()
    said = generation.to_diff_dict()
    text_config = config.get_text_config()
    longest = getattr(text_config, "max_position_embeddings", None) or _MOST_TOKENS
    return Loaded(
        model=model,
        text=Text(
            tokenizer,
            _stop_ids(tokenizer, generation, text_config),
            options.default_chat_template_kwargs,
        ),
        most_tokens=min(longest, options.max_model_len or _MOST_TOKENS),
        defaults={name: said[name] for name in _SAMPLING if said.get(name) is not None},
    )


def _device(options: Options) -> torch.device:
    if options.device != "auto":
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _dtype(options: Options, config: Any, device: torch.device) -> torch.dtype:
    if options.dtype != "auto":
        found: torch.dtype = getattr(torch, options.dtype)
        return found
    # On a CPU half precision is slower, not faster, and not exact.
    return torch.float32 if device.type == "cpu" else getattr(config, "dtype", torch.float32)


def _quantized(options: Options, device: torch.device) -> Json:
    if not options.load_in_4bit:
        return {}
    try:
        import bitsandbytes  # noqa: F401
        from transformers import BitsAndBytesConfig
    except ImportError as error:
        raise ConfigError(
            "4 bits need bitsandbytes, which is not installed.",
            hint="pip install bitsandbytes accelerate, or leave --load-in-4bit out.",
        ) from error
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    return {"quantization_config": settings, "device_map": {"": device}}


def _stop_ids(tokenizer: Any, generation: Any, config: Any) -> list[int]:
    """The tokenizer's end token first, then those in the model's configurations."""
    ids: list[int] = []
    for found in (
        tokenizer.eos_token_id,
        generation.eos_token_id,
        getattr(config, "eos_token_id", None),
    ):
        for index in found if isinstance(found, list) else [found]:
            if index is not None and index not in ids:
                ids.append(index)
    return ids


_PROMPT = 24
_SAMPLED = 4
_PLAIN = "eager"
_TOLERANCES = {torch.float32: 1e-3}
_ROUGH = 0.5
"""Tolerance of a logprob in half precision or 4 bits, where other sums differ visibly."""


def check(generator: Generator) -> float:
    """The largest difference of a logprob, for two prompts that were sampled together."""
    model = generator.model
    size = model.get_input_embeddings().num_embeddings
    rows = [
        Row([(7 + 31 * place) % size for place in range(length)], Sampling(max_tokens=_SAMPLED))
        for length in (_PROMPT, _PROMPT // 2)
    ]
    try:
        generator.join(rows)
        for _ in range(_SAMPLED):
            generator.step()
        difference = max(_difference(model, row) for row in rows)
    except (TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"The local engine cannot run a {type(model).__name__}: {error}.",
            hint=kv_cache.OTHERS,
        ) from error
    finally:
        generator.forget()
    if not difference <= _TOLERANCES.get(model.dtype, _ROUGH):
        raise ConfigError(
            f"The local engine computes {type(model).__name__} differently than transformers: a "
            f"logprob differs by {difference:.2g}.",
            hint=kv_cache.OTHERS,
        )
    return difference


def _difference(model: PreTrainedModel, row: Row) -> float:
    ids = torch.tensor([row.tokens], device=model.device)
    own = model.config._attn_implementation
    model.set_attn_implementation(_PLAIN)
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(own)
    logprobs = logits[len(row.prompt) - 1 : -1].log_softmax(dim=-1)
    expected = logprobs.gather(1, ids[0, len(row.prompt) :, None])[:, 0]
    found = torch.tensor(row.logprobs, device=model.device)
    return float((expected - found).abs().max())


FIRST_VERSION = "default"
"""Version of the weights until another one is set; the same as vLLM's."""
_SECONDS_FOR_OPEN_REQUESTS = 2
_SWITCH_SECONDS = 0.0005
"""Interpreter switch interval. Torch releases the interpreter lock at each operation; with the
default it would wait 5 ms for it whenever the event loop is busy.
"""


def run(options: Options) -> int:
    sys.setswitchinterval(_SWITCH_SECONDS)
    if options.threads:
        torch.set_num_threads(options.threads)
    try:
        asyncio.run(_serve(options, load(options)))
    except EnvserverError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


async def _serve(options: Options, loaded: Loaded) -> None:
    adapters = Adapters(loaded.model)
    generator = Generator(
        loaded.model, adapters, processed=options.logprobs_mode == "processed_logprobs"
    )
    check(generator)
    scheduler = Scheduler(options.max_batch_size, _most_places(options, loaded))
    with listening_socket(options.host, options.port) as listener:
        async with Runner(generator, scheduler, loaded.text, FIRST_VERSION) as runner:
            asking = Asking(
                runner,
                loaded.text,
                adapters,
                model=options.name,
                root=options.model,
                most_tokens=loaded.most_tokens,
                vocabulary=loaded.model.get_input_embeddings().num_embeddings,
                defaults=loaded.defaults,
            )
            server = QuietServer(
                uvicorn.Config(
                    local_app(asking, lora=options.enable_lora),
                    log_level="warning",
                    access_log=False,
                    server_header=False,
                    lifespan="off",
                    timeout_graceful_shutdown=_SECONDS_FOR_OPEN_REQUESTS,
                )
            )
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, _end, server, runner)
            sys.stdout.write(f"{url_of(options.host, listener)}\n")
            sys.stdout.flush()
            await server.serve(sockets=[listener])


def _end(server: uvicorn.Server, runner: Runner) -> None:
    """Ends open answers as they are, so that waiting clients get a response."""
    server.should_exit = True
    runner.end()


def _most_places(options: Options, loaded: Loaded) -> int:
    """The number of tokens whose keys and values fit the memory budget."""
    config = loaded.model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * heads * size * loaded.model.dtype.itemsize
    return max(loaded.most_tokens, int(options.kv_cache_gib * 2**30 / each))
