"""The `run` argument of `rollout`: the Rollout protocol, over HTTP to the proxy.

Model calls, requests to sandboxes and services, log lines and metrics go out; typed errors come
back. It belongs to one attempt: `finish` closes what it opened and sends the remaining events.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import msgspec
import orjson
from envserver_records import http_errors
from envserver_records.errors import (
    EngineGarbage,
    EngineUnavailable,
    LimitReached,
    RewardError,
    SandboxUnavailable,
    ServiceError,
)
from envserver_records.sandboxes import SandboxSpec
from envserver_records.tasks import Message, PublicTask
from envserver_records.timings import MOST_TIMINGS

from ..actions import encode
from ..environment import NO_REWARDS, Isolation
from ..rollout_interface import HarnessSpec, Reply
from ..sandbox_interface import BlockingSandbox, RunningProgram, Sandbox
from ..tools.calling import LoopEnd, Tool, ToolResult
from ..tools.loop import chat_with_tools
from ..tools.mcp_server import serve_tools
from ..tools.opening import open_tools
from ..tools.sources import Tools
from .event_uploader import EventUploader
from .http_client import Answer, HttpClient, RequestFailed
from .printing import PrintedLines
from .sandboxes import RemoteOpening, open_blocking, open_program

if TYPE_CHECKING:
    import openai

AGENT_HEADER = "x-agent"
CLOSE_SECONDS = 10.0
"""Seconds beyond the deadline to close sandboxes."""
CLIENT_RETRIES = 1
"""Retries of the OpenAI clients on broken connections; the proxy retries the engine itself."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Description of an attempt that the worker gets; `proxy.worker.job_of` makes it."""

    rollout_id: str
    attempt: int
    env_reference: str
    env_config: dict[str, Any]
    task: PublicTask
    model: str
    deadline: float
    max_turns: int
    harness: HarnessSpec | None = None


class AttemptRun:
    """The Rollout of one attempt; `environment.Rollout` documents each member.

    Args:
        url: of the attempt, with its key.
        patiently: a context in which a blocked loop does not count as a hang.
    """

    def __init__(
        self,
        job: Job,
        url: str,
        http: HttpClient,
        patiently: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.rollout_id = job.rollout_id
        self.attempt = job.attempt
        self.base_url = f"{url}/v1"
        self.api_key = url.rpartition("/")[2]
        self.model = job.model
        self.deadline = job.deadline
        self.max_turns = job.max_turns
        self.metrics: dict[str, float] = {}
        self.rewards: list[dict[str, Any]] = []
        self.tool_times: list[tuple[str, float, float]] = []
        self.printed = PrintedLines()
        self.isolation: Isolation = "pooled"
        self.tools: Tools = ()
        self._url = url
        self._http = http
        self._patiently = patiently
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._asked_from_threads: set[Future[Any]] = set()
        self._client: openai.AsyncOpenAI | None = None
        self._blocking_client: openai.OpenAI | None = None
        self._uploader = EventUploader(job.rollout_id, url, http)

    @property
    def egress_url(self) -> str:
        url = urlsplit(self._url)
        return f"{url.scheme}://envserver:{self.api_key}@{url.netloc}"

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - time.time())

    @property
    def client(self) -> openai.AsyncOpenAI:
        if self._client is None:
            with self._patiently():
                import openai
            # Its own transport, so that an agent may close it; without TLS it costs half a ms.
            transport = openai.DefaultAioHttpClient(verify=self._is_tls, trust_env=False)
            self._client = openai.AsyncOpenAI(
                base_url=self.base_url,
                api_key=self.api_key,
                max_retries=CLIENT_RETRIES,
                timeout=self.seconds_left,
                http_client=transport,
            )
        return self._client

    @property
    def blocking_client(self) -> openai.OpenAI:
        if self._blocking_client is None:
            import openai

            transport = openai.DefaultHttpxClient(verify=self._is_tls, trust_env=False)
            self._blocking_client = openai.OpenAI(
                base_url=self.base_url,
                api_key=self.api_key,
                max_retries=CLIENT_RETRIES,
                timeout=self.seconds_left,
                http_client=transport,
            )
        return self._blocking_client

    async def chat(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        agent: str | None = None,
        **sampling: Any,
    ) -> Reply:
        if sampling.get("stream"):
            raise ValueError("chat() returns whole answers; stream with run.client.")
        if self._ended:
            raise _is_over()
        body = {"model": self.model, "messages": messages, **sampling}
        if tools is not None:
            body["tools"] = tools
        return reply_of(await self._ask(orjson.dumps(body), agent))

    def chat_blocking(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        agent: str | None = None,
        **sampling: Any,
    ) -> Reply:
        reply: Reply = self._wait(self.chat(messages, tools=tools, agent=agent, **sampling))
        return reply

    async def loop(
        self, messages: list[Message], *, tools: Tools | None = None, **options: Any
    ) -> LoopEnd:
        return await chat_with_tools(
            self, messages, self.tools if tools is None else tools, **options
        )

    def loop_blocking(
        self, messages: list[Message], *, tools: Tools | None = None, **options: Any
    ) -> LoopEnd:
        end: LoopEnd = self._wait(self.loop(messages, tools=tools, **options))
        return end

    def tool_called(self, name: str, began: float, seconds: float) -> None:
        """See `tools.calling.Timed`."""
        if len(self.tool_times) < MOST_TIMINGS:
            self.tool_times.append((name, began, seconds))

    def open_tools(
        self, tools: Tools | None = None
    ) -> AbstractAsyncContextManager[Mapping[str, Tool]]:
        return open_tools(self.tools if tools is None else tools, self)

    @asynccontextmanager
    async def serve_mcp(self, tools: Tools | None = None) -> AsyncIterator[str]:
        errors = 0

        def count(result: ToolResult) -> None:
            nonlocal errors
            errors += not result.ok
            self.log_metric("tool_errors", errors)

        async with self.open_tools(tools) as box, serve_tools(box, count) as url:
            yield url

    def base_url_of(self, agent: str) -> str:
        return f"{self._url}/a/{quote(agent, safe='')}/v1"

    def open_sandbox(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Sandbox]:
        return RemoteOpening(self._ask_sandbox, spec)

    def open_sandbox_blocking(
        self, spec: SandboxSpec | None = None
    ) -> AbstractContextManager[BlockingSandbox]:
        return open_blocking(self._ask_sandbox, spec, self._wait)

    def open_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        spec: SandboxSpec | None = None,
    ) -> AbstractAsyncContextManager[RunningProgram]:
        return open_program(self._ask_sandbox, argv, env or {}, spec)

    @property
    def tools_url(self) -> str:
        return f"{self._url}/tools"

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._ended:
            raise _is_over()
        headers = {"content-type": "application/json"}
        try:
            answer = await self._post(
                f"{self.tools_url}/{quote(name)}", orjson.dumps(arguments), headers
            )
        except RequestFailed as error:
            raise ServiceError(f"The server cannot be reached: {error}") from error
        if answer.status != 200:
            raise http_errors.SERVICE.read(*answer)
        try:
            return orjson.loads(answer.content)
        except orjson.JSONDecodeError as error:
            raise ServiceError(f"The server's answer is not JSON: {error}") from error

    def call_tool_blocking(self, name: str, arguments: dict[str, Any]) -> Any:
        return self._wait(self.call_tool(name, arguments))

    def log(self, event: str, **facts: Any) -> None:
        line = orjson.dumps(
            {"event": event, "facts": facts}, default=repr, option=orjson.OPT_NON_STR_KEYS
        )
        self._loop.call_soon_threadsafe(self._uploader.line, line)

    def log_metric(self, name: str, value: float) -> None:
        number = float(value)
        if not math.isfinite(number):
            raise ValueError(f"metric {name!r} is {value}; metrics are finite numbers")
        self.metrics[name] = number

    def reward(self, value: float, *, turn: int | None = None, agent: str | None = None) -> None:
        if self.isolation == "sandboxed":
            raise RewardError(NO_REWARDS)
        number = float(value)
        if not math.isfinite(number):
            raise RewardError(f"run.reward({value}): rewards are finite numbers.")
        at = time.monotonic()
        self.rewards.append({"value": number, "at": at, "turn": turn, "agent": agent})

    def log_action(
        self, tool: str, input: Any = None, output: Any = None, *, error: str = ""
    ) -> None:
        step = encode(tool, input, output, time.time(), error)
        self._loop.call_soon_threadsafe(self._uploader.step, step)

    def end(self) -> None:
        """Ends all requests from threads; later requests raise LimitReached."""
        self._ended = True
        for asked in list(self._asked_from_threads):
            asked.cancel()

    async def finish(self) -> None:
        """Sends the remaining steps and log lines and closes what was opened."""
        await self._uploader.finish()
        if self._client is not None:
            await self._client.close()
        if self._blocking_client is not None:
            self._blocking_client.close()

    @property
    def _is_tls(self) -> bool:
        return self._url.startswith("https:")

    async def _ask(self, body: bytes, agent: str | None) -> bytes:
        headers = {"authorization": f"Bearer {self.api_key}", "content-type": "application/json"}
        if agent is not None:
            headers[AGENT_HEADER] = agent
        try:
            answer = await self._post(f"{self.base_url}/chat/completions", body, headers)
        except RequestFailed as error:
            raise EngineUnavailable(f"The model's endpoint cannot be reached: {error}") from error
        if answer.status != 200:
            raise http_errors.MODEL.read(*answer)
        return answer.content

    async def _ask_sandbox(self, path: str, body: bytes) -> bytes:
        closes = path.endswith("/close")
        if self._ended and not closes:
            raise _is_over()
        headers = {"content-type": "application/msgpack"}
        try:
            answer = await self._post(
                f"{self._url}/sandbox/{path}", body, headers, more_seconds=CLOSE_SECONDS
            )
        except RequestFailed as error:
            raise SandboxUnavailable(f"The server cannot be reached: {error}") from error
        if answer.status != 200:
            raise http_errors.SANDBOX.read(*answer)
        return answer.content

    async def _post(
        self, url: str, body: bytes, headers: Mapping[str, str], *, more_seconds: float = 0.0
    ) -> Answer:
        """Asks the server, until `more_seconds` after the deadline."""
        seconds = max(self.seconds_left + more_seconds, 0.001)
        try:
            return await self._http.request("POST", url, body, headers=headers, seconds=seconds)
        except TimeoutError:
            raise _is_over() from None

    def _wait(self, request: Coroutine[Any, Any, Any]) -> Any:
        """Runs `request` on the loop while its thread waits."""
        asked = asyncio.run_coroutine_threadsafe(request, self._loop)
        self._asked_from_threads.add(asked)
        try:
            return asked.result()
        except CancelledError:
            raise _is_over() from None
        finally:
            self._asked_from_threads.discard(asked)


def reply_of(answer: bytes) -> Reply:
    """Decodes a chat completion into a Reply."""
    try:
        completion = _completions.decode(answer)
        choice = completion.choices[0]
        content = choice.message.get("content") or ""
        tool_calls = choice.message.get("tool_calls") or []
    except (msgspec.DecodeError, IndexError) as error:
        raise EngineGarbage(
            f"The model's endpoint did not send a chat completion: {error}"
        ) from error
    return Reply(content, tool_calls, choice.finish_reason or "stop", choice.message)


class _Choice(msgspec.Struct):
    message: dict[str, Any]
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


_completions = msgspec.json.Decoder(_Completion)


def _is_over() -> LimitReached:
    return LimitReached("The time of this rollout is used up.", limit="time")
