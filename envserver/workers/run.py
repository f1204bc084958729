"""The `run` argument of `rollout`: the Rollout protocol of one attempt, over HTTP to the proxy."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import CancelledError, Future
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from contextvars import Context
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar
from urllib.parse import quote, urlsplit

import msgspec
import orjson
from envserver_records import http_errors
from envserver_records.errors import (
    EngineGarbage,
    EngineUnavailable,
    EnvserverError,
    LimitReached,
    RewardError,
    SandboxLost,
    SandboxUnavailable,
    ServiceError,
)
from envserver_records.sandboxes import SandboxSpec
from envserver_records.tasks import Message, PublicTask
from envserver_records.timings import MOST_TIMINGS

from ..actions import MAX_STEPS, batch, encode
from ..environment import NO_REWARDS, Isolation
from ..models.http_client import HttpError, HttpPool, header, origin_of
from ..rollout_interface import HarnessSpec, Reply
from ..sandbox.requests import AskedProgramSandbox, Open, Opened, Start
from ..sandbox_interface import BlockingSandbox, RunningProgram, Sandbox
from ..tools.calling import LoopEnd, Tool, ToolResult
from ..tools.loop import chat_with_tools, open_tools
from ..tools.mcp_server import serve_tools
from ..tools.sources import Tools
from .output import PrintedLines

if TYPE_CHECKING:
    import openai


# Workers import no general client: that took a third of the start of their parent.


class RequestFailed(Exception):
    """The server cannot be reached, or closed the connection before its answer. `errno`: of the
    system's error, if there was one."""

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class Answer(NamedTuple):
    status: int
    content: bytes


_JSON = {"content-type": "application/json"}


class HttpClient:
    """A context manager; belongs to the event loop that runs when it is made."""

    def __init__(self) -> None:
        self._pool = HttpPool(_addresses, _new_socket)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pool.close()

    async def request(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float,
    ) -> Answer:
        """Sends a request to a quoted URL and returns the whole answer, of whatever status. A body
        is JSON unless `headers` say otherwise."""
        scheme, _, rest = url.partition("://")
        place, _, path = rest.partition("/")
        sent = {**({} if body is None else _JSON), **(headers or {})}
        lines = b"".join(header(name, value) for name, value in sent.items())
        try:
            async with asyncio.timeout(seconds):
                response = await self._pool.send(
                    origin_of(f"{scheme}://{place}"), method, f"/{path}", lines, body
                )
                try:
                    parts = []
                    while part := await response.read():
                        parts.append(part)
                finally:
                    response.release()
        except HttpError as error:
            raise RequestFailed(f"{place}: {error}", _errno(error)) from error
        return Answer(response.status, b"".join(parts))


def _errno(error: HttpError) -> int | None:
    cause = error.__cause__
    return cause.errno if isinstance(cause, OSError) else None


async def _addresses(host: str, port: int) -> list[Any]:
    """Returns the entries of getaddrinfo; for an address in numbers without starting threads."""
    with suppress(OSError):
        numeric = socket.AI_NUMERICHOST
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=numeric)
    loop = asyncio.get_running_loop()
    return list(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))


def _new_socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*address[:3])
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


# Each method is one request. A cancelled request hangs up, and the server ends what it started.

T = TypeVar("T")

Post = Callable[[str, bytes], Awaitable[bytes]]
"""Posts a body to a path below the attempt's `sandbox/`; returns the body of a good answer."""


class RemoteSandbox(AskedProgramSandbox):
    """A sandbox of the attempt, and the async context manager that opens it. One that is never
    left ends with the attempt.

    It is a class because Python would finish a forgotten generator at some later time.
    """

    id = isolation = ""

    def __init__(self, post: Post, spec: SandboxSpec | None) -> None:
        self._post = post
        self._spec = spec
        self._closed = False

    async def __aenter__(self) -> Self:
        opened = await self._answer("open", Open(self._spec), Opened)
        self.id, self.isolation = opened.id, opened.isolation
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def ask(self, action: str, body: Any, kind: type[T]) -> T:
        return await self._answer(f"{self.id}/{action}", body, kind)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        # The server closes at the end of the attempt what could not be closed here.
        with suppress(EnvserverError):
            await self._post(f"{self.id}/close", b"")

    async def _answer(self, path: str, body: Any, kind: type[T]) -> T:
        answer = await self._post(path, msgspec.msgpack.encode(body))
        try:
            return msgspec.msgpack.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            words = f"The server's answer about a sandbox is not valid: {error}"
            raise SandboxLost(words) from error


# Neither waits for the server. Steps are sent a moment after they are logged, those of that moment
# together, one request at a time: what is lost when the worker is killed is that moment.

MAX_WAITING_LOG_LINES = 1000
TELL_SECONDS = 5.0
GATHER_SECONDS = 0.1
"""Maximum delay between a step and the request that sends it."""
_BATCH_BYTES = 1 << 20
_TRIES = 3


class _Queue:
    """Events that wait to be sent by `send`, in a task of its own; what is over `most` is dropped
    and counted."""

    def __init__(self, most: int, send: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.waiting: deque[bytes] = deque()
        self.dropped = 0
        self.sent = 0
        """Counts towards `most`."""
        self._most = most
        self._send = send
        self._sending: asyncio.Task[None] | None = None

    def add(self, event: bytes) -> None:
        if self.sent + len(self.waiting) >= self._most:
            self.dropped += 1
            return
        self.waiting.append(event)
        if self._sending is None or self._sending.done():
            # Not one of the agent's own tasks, which end with it.
            loop = asyncio.get_running_loop()
            self._sending = loop.create_task(self._send(), context=Context())

    async def finish(self) -> None:
        if self._sending is not None:
            await self._sending


class EventUploader:
    """Sends the events of one attempt; its methods are called on the loop."""

    def __init__(self, rollout_id: str, url: str, http: HttpClient) -> None:
        self._rollout_id = rollout_id
        self._url = url
        self._http = http
        self._lines = _Queue(MAX_WAITING_LOG_LINES, self._send_lines)
        self._steps = _Queue(MAX_STEPS, self._send_steps)
        self._hurry = asyncio.Event()
        self.line = self._lines.add
        """Sends a log line (JSON)."""
        self.step = self._steps.add
        """Sends a step (see `actions.encode`)."""

    async def finish(self) -> None:
        self._hurry.set()
        await self._steps.finish()
        if self._steps.dropped:
            await self._post("actions", batch(self._steps.sent, [], self._steps.dropped))
        await self._lines.finish()
        if self._lines.dropped:
            facts = {"lines": self._lines.dropped}
            await self._send_line(orjson.dumps({"event": "log_lines_dropped", "facts": facts}))

    async def _send_lines(self) -> None:
        while self._lines.waiting:
            await self._send_line(self._lines.waiting.popleft())

    async def _send_line(self, line: bytes) -> None:
        if not await self._post("log", line):  # stderr still reaches the server's log
            sys.stderr.write(f"{self._rollout_id}: {line.decode(errors='replace')}\n")

    async def _send_steps(self) -> None:
        steps = self._steps
        while steps.waiting:
            if not self._hurry.is_set():
                await _either(self._hurry, GATHER_SECONDS)
            batched = self._next_steps()
            body = batch(steps.sent, batched, steps.dropped)
            steps.sent += len(batched)
            for _ in range(_TRIES):  # the server takes each step once
                if await self._post("actions", body):
                    break

    def _next_steps(self) -> list[bytes]:
        waiting = self._steps.waiting
        steps: list[bytes] = []
        size = 0
        while waiting and (not steps or size + len(waiting[0]) <= _BATCH_BYTES):
            steps.append(waiting.popleft())
            size += len(steps[-1])
        return steps

    async def _post(self, path: str, body: bytes) -> bool:
        try:
            answer = await self._http.request(
                "POST", f"{self._url}/{path}", body, seconds=TELL_SECONDS
            )
        except (RequestFailed, TimeoutError):
            return False
        return answer.status < 400


async def _either(event: asyncio.Event, seconds: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


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
    """The Rollout of one attempt; `environment.Rollout` documents each member. `url`: of the
    attempt, with its key."""

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
            self._client = openai.AsyncOpenAI(**self._client_options, http_client=transport)
        return self._client

    @property
    def blocking_client(self) -> openai.OpenAI:
        if self._blocking_client is None:
            import openai

            transport = openai.DefaultHttpxClient(verify=self._is_tls, trust_env=False)
            self._blocking_client = openai.OpenAI(**self._client_options, http_client=transport)
        return self._blocking_client

    @property
    def _client_options(self) -> dict[str, Any]:
        return {
            "base_url": self.base_url,
            "api_key": self.api_key,
            "max_retries": CLIENT_RETRIES,
            "timeout": self.seconds_left,
        }

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
        headers = {"authorization": f"Bearer {self.api_key}"}
        if agent is not None:
            headers[AGENT_HEADER] = agent
        url, data = f"{self.base_url}/chat/completions", orjson.dumps(body)
        answer = await self._post(url, data, headers, http_errors.MODEL, EngineUnavailable)
        return reply_of(answer)

    def chat_blocking(self, messages: list[Message], **options: Any) -> Reply:
        return self._wait(self.chat(messages, **options))

    async def loop(
        self, messages: list[Message], *, tools: Tools | None = None, **options: Any
    ) -> LoopEnd:
        return await chat_with_tools(
            self, messages, self.tools if tools is None else tools, **options
        )

    def loop_blocking(self, messages: list[Message], **options: Any) -> LoopEnd:
        return self._wait(self.loop(messages, **options))

    def tool_called(self, name: str, began: float, seconds: float) -> None:
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
        return RemoteSandbox(self._ask_sandbox, spec)

    @contextmanager
    def open_sandbox_blocking(self, spec: SandboxSpec | None = None) -> Iterator[BlockingSandbox]:
        sandbox = RemoteSandbox(self._ask_sandbox, spec)
        self._wait(sandbox.__aenter__())
        try:
            yield BlockingSandbox(sandbox, self._wait)
        finally:
            with suppress(EnvserverError):  # the attempt is over: the server closes it
                self._wait(sandbox.close())

    @asynccontextmanager
    async def open_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        spec: SandboxSpec | None = None,
    ) -> AsyncIterator[RunningProgram]:
        async with RemoteSandbox(self._ask_sandbox, spec) as sandbox:
            await sandbox.ask("start", Start(argv=list(argv), env=dict(env or {})), type(None))
            yield sandbox

    @property
    def tools_url(self) -> str:
        return f"{self._url}/tools"

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        if self._ended:
            raise _is_over()
        url, body = f"{self.tools_url}/{quote(name)}", orjson.dumps(arguments)
        content = await self._post(url, body, {}, http_errors.SERVICE, ServiceError)
        try:
            return orjson.loads(content)
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
        for future in list(self._asked_from_threads):
            future.cancel()

    async def finish(self) -> None:
        await self._uploader.finish()
        if self._client is not None:
            await self._client.close()
        if self._blocking_client is not None:
            self._blocking_client.close()

    @property
    def _is_tls(self) -> bool:
        return self._url.startswith("https:")

    async def _ask_sandbox(self, path: str, body: bytes) -> bytes:
        if self._ended and not path.endswith("/close"):
            raise _is_over()
        return await self._post(
            f"{self._url}/sandbox/{path}",
            body,
            {"content-type": "application/msgpack"},
            http_errors.SANDBOX,
            SandboxUnavailable,
            more_seconds=CLOSE_SECONDS,
        )

    async def _post(
        self,
        url: str,
        body: bytes,
        headers: Mapping[str, str],
        errors: http_errors.ErrorReader,
        unreachable: type[EnvserverError],
        *,
        more_seconds: float = 0.0,
    ) -> bytes:
        """Returns a good answer of the server; waits until `more_seconds` after the deadline."""
        seconds = max(self.seconds_left + more_seconds, 0.001)
        try:
            answer = await self._http.request("POST", url, body, headers=headers, seconds=seconds)
        except TimeoutError:
            raise _is_over() from None
        except RequestFailed as error:
            raise unreachable(f"{errors.endpoint} cannot be reached: {error}") from error
        if answer.status != 200:
            raise errors.read(*answer)
        return answer.content

    def _wait(self, request: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        self._asked_from_threads.add(future)
        try:
            return future.result()
        except CancelledError:
            raise _is_over() from None
        finally:
            self._asked_from_threads.discard(future)


def reply_of(answer: bytes) -> Reply:
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
