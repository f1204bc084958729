"""The proxy before an engine, over real HTTP, for official clients and agent frameworks.

It runs in a thread of its own, so that tests use their clients as people do, and keeps every
exchange as it stood on the wire.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anthropic
import msgspec
import openai
import orjson
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from envserver_local.simulated.engine import SimEngine
from envserver_local.simulated.policy import RolloutSolver
from envserver_records.records import Call, Json, Message, Sequence

from envserver import OpenAIConfig, Settings, SimConfig, TokensConfig
from envserver.models.engine import EngineRequest
from envserver.models.openai import OpenAIEngine
from envserver.proxy.asgi import AsgiApp, Receive, Scope, Send
from envserver.proxy.attempts import ProxyAttempt
from envserver.proxy.server import Proxy
from envserver.running import make_endpoint
from envserver.tokens.builder import build
from envserver.tokens.flags import Actions
from support.serving import attempt_spec, serving

if TYPE_CHECKING:  # seconds each
    from langchain_openai import ChatOpenAI
    from smolagents import OpenAIModel

OURS = {"prompt_token_ids", "token_ids", "weight_versions"}
"""Fields by which tokens are recorded; an answer holds none of them unless its request says so."""

whole_and_streamed = pytest.mark.parametrize("streamed", [False, True])

CONSTRAINED_TOO = Actions({"structured_output_masked": "train"})
"""Keeps in the rows what a run masks by default, so that all of a record can be looked at."""


class Exchange(msgspec.Struct):
    """One request and its answer, as they stood on the wire."""

    path: str
    request: Json
    status: int = 0
    content: bytes = b""

    @property
    def answers(self) -> list[Any]:
        """The JSON of the answer: one value, or that of each event of a stream."""
        if not self.request.get("stream"):
            return [orjson.loads(self.content)]
        lines = [line for line in self.content.split(b"\n") if line.startswith(b"data: {")]
        return [orjson.loads(line.removeprefix(b"data: ")) for line in lines]

    def fields(self) -> set[str]:
        """Names of all fields with a value (null and empty lists are none) in the answer."""
        return set().union(*map(_fields, self.answers))


class Seat:
    """One attempt, and what asks for it. Clients check what they get against their types."""

    def __init__(
        self, attempt: ProxyAttempt, url: str, exchanges: list[Exchange], portal: BlockingPortal
    ) -> None:
        self.attempt = attempt
        self.url = f"{url}/r/{attempt.key}"
        self.model = attempt.spec.model
        self._exchanges = exchanges
        self._portal = portal

    @property
    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(**self._address, max_retries=0, _strict_response_validation=True)

    @property
    def lenient_openai(self) -> openai.OpenAI:
        """For streamed text completions: of their chunks the client's types forbid a finish_reason
        of null, which OpenAI itself sends."""
        return openai.OpenAI(**self._address, max_retries=0)

    @property
    def anthropic(self) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            base_url=self.url,
            api_key=self.attempt.key,
            max_retries=0,
            _strict_response_validation=True,
        )

    def smolagents(self, **kwargs: Any) -> OpenAIModel:
        from smolagents import OpenAIModel

        return OpenAIModel(
            self.model,
            api_base=self._address["base_url"],
            api_key=self.attempt.key,
            client_kwargs={"max_retries": 0},
            **kwargs,
        )

    def langchain(self, **kwargs: Any) -> ChatOpenAI:
        from langchain_openai import ChatOpenAI

        return ChatOpenAI(model=self.model, **self._address, max_retries=0, **kwargs)

    @property
    def _address(self) -> dict[str, str]:
        return {"base_url": f"{self.url}/v1", "api_key": self.attempt.key}

    @property
    def calls(self) -> list[Call]:
        # As the proxy's own thread sees them, once it knows that it has sent the last byte.
        return self._portal.call(list, self.attempt.calls)

    @property
    def sequences(self) -> list[Sequence]:
        return build(self.calls, CONSTRAINED_TOO)

    @property
    def exchanges(self) -> list[Exchange]:
        """This attempt's, in order of arrival."""
        return [one for one in self._exchanges if self.attempt.key in one.path]

    @property
    def edges(self) -> list[str]:
        """How each call continues an earlier one, with the reason where it could not."""
        return [f"{c.edge} ({c.refusal})" if c.refusal else c.edge for c in self.calls]

    def assert_exact(self, sequences: int | None = None) -> None:
        """Every call is recorded token by token, and trained exactly once, in so many rows."""
        for call in self.calls:
            assert call.exact, call.flags
            assert len(call.prompt_ids)
            assert len(call.completion_ids) == len(call.logprobs) > 0
            assert "prompt_mismatch" not in call.flags
        rows, sampled = self.sequences, sum(len(call.completion_ids) for call in self.calls)
        assert sum(int(row.mask.sum()) for row in rows) == sampled
        assert sequences in (None, len(rows)), self.edges

    def assert_answers_tell_only_what_was_asked(self) -> None:
        """No answer holds a field by which we record."""
        for one in self.exchanges:
            if one.request.get("return_token_ids"):
                continue
            told = one.fields() & OURS
            assert not told, (one.path, told)
            if not _wants_logprobs(one.request):
                assert "logprobs" not in one.fields(), one.path


class ReasoningSim(SimEngine):
    """The simulated engine, which tells a thought from an answer as an engine's reasoning parser
    does: what stands before `</think>` in a whole answer."""

    async def post(self, request: EngineRequest) -> Any:
        """See Engine."""
        answer = await super().post(request)
        for choice in answer["choices"]:
            message = choice.get("message") or {}
            thought, tag, text = (message.get("content") or "").partition("</think>")
            if tag:
                message["reasoning"] = thought.removeprefix("<think>").strip()
                message["content"] = text.strip()
        return answer


@dataclass
class SdkHouse:
    """See the module. `seat` opens attempts."""

    proxy: Proxy
    url: str
    model: str
    exchanges: list[Exchange]
    solver: RolloutSolver | None
    portal: BlockingPortal
    numbers: Iterator[int] = field(default_factory=itertools.count)

    @contextmanager
    def seat(self, *turns: Message, **limits: Any) -> Iterator[Seat]:
        """A new attempt; what the agent was told is checked when it ends.

        Args:
            turns: what the simulated model says, one after the other; without any it babbles.
        """
        rollout_id = f"rollout-{next(self.numbers)}"
        if self.solver is not None:
            self.solver.assign(rollout_id, list(turns))
        spec = msgspec.structs.replace(
            attempt_spec(**limits), rollout_id=rollout_id, model=self.model
        )
        attempt = self.portal.call(self.proxy.open, spec)
        seat = Seat(attempt, self.url, self.exchanges, self.portal)
        yield seat
        self.portal.call(self.proxy.seal, seat.attempt)
        seat.assert_answers_tell_only_what_was_asked()


@contextmanager
def sim_house() -> Iterator[SdkHouse]:
    """Before the simulated engine, which says what a seat's turns say."""
    solver = RolloutSolver()
    engine = ReasoningSim(SimConfig(latency_seconds=0, solve_probability=1.0), solver)
    with _house(Settings(model="sim"), engine, "sim", solver) as house:
        yield house


@contextmanager
def vllm_house(base_url: str, model: str, **tokens: Any) -> Iterator[SdkHouse]:
    """Before a real vLLM, in the best way in which it can be asked; `tokens` are settings."""
    config = OpenAIConfig(base_url=base_url, model_name=model)
    # Its random model says nothing that a client could parse, unless it is held to a form.
    settings = Settings(openai=config, tokens=TokensConfig(constraints="all", **tokens))
    with _house(settings, OpenAIEngine(config), model, None) as house:
        yield house


@contextmanager
def _house(
    settings: Settings, engine: SimEngine | OpenAIEngine, model: str, solver: RolloutSolver | None
) -> Iterator[SdkHouse]:
    exchanges: list[Exchange] = []

    @asynccontextmanager
    async def opened() -> Any:
        async with engine:
            proxy = Proxy(engine, endpoint=make_endpoint(settings, engine))
            async with serving(_tapped(proxy.asgi(), exchanges)) as url:
                yield proxy, url

    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(opened()) as (proxy, url),
    ):
        yield SdkHouse(proxy, url, model, exchanges, solver, portal)


def _tapped(app: AsgiApp, exchanges: list[Exchange]) -> AsgiApp:
    """`app`; what is asked of it and what it answers goes to `exchanges` too."""

    async def tapped(scope: Scope, receive: Receive, send: Send) -> None:
        asked: list[bytes] = []
        exchange = Exchange(scope["path"], {})
        exchanges.append(exchange)

        async def receiving() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                asked.append(message["body"])
                if not message.get("more_body"):
                    with contextlib.suppress(orjson.JSONDecodeError):
                        exchange.request = orjson.loads(b"".join(asked))
            return message

        async def sending(message: Any) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.content += message.get("body", b"")
            await send(message)

        await app(scope, receiving, sending)

    return tapped


def _fields(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_fields, value))
    if not isinstance(value, dict):
        return set()
    named = {name for name, inner in value.items() if inner not in (None, [])}
    return named.union(*map(_fields, value.values()))


def _wants_logprobs(request: Json) -> bool:
    included = request.get("include") or []
    return request.get("logprobs") not in (None, False) or any("logprobs" in i for i in included)
