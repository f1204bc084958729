"""One attempt in a worker: runs the agent and gives the result.

A large result goes as one POST to `{url}/result`, after one to `{url}/rewards` if the rollout
rewarded turns; none is given when the server itself cancelled the attempt before its deadline.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextvars
import errno
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack
from contextvars import Context
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson
from envserver_records.cleaning import clean
from envserver_records.errors import AgentError, ConfigError, LimitReached
from envserver_records.sandboxes import SandboxSpec
from pydantic import ValidationError

from .. import registry
from ..environment import Environment, tools_of
from ..rollout_interface import HarnessSpec, HarnessTask
from ..tools.calling import TIMED
from .failures import ended_by, failure_of, output_of, sendable
from .harness import CallRecord, harness_task, play
from .messages import MAX_RESULT_BYTES
from .output import PRINTING
from .run import AttemptRun, HttpClient, Job, RequestFailed


class Instances:
    """Environments by (reference, config). `patiently`: a context in which blocking the loop is no
    sign of a hang."""

    def __init__(self, patiently: Callable[[], AbstractContextManager[None]]) -> None:
        self.patiently = patiently
        self._building: dict[bytes, asyncio.Task[Environment]] = {}

    async def get(self, reference: str, config: dict[str, Any]) -> Environment:
        """The environment after its `setup`; one that failed is built anew for the next rollout."""
        key = orjson.dumps([reference, config], option=orjson.OPT_SORT_KEYS)
        task = self._building.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception())):
            # In a context of its own: what setup starts belongs to no rollout.
            build = asyncio.create_task(self._build(reference, config), context=Context())
            task = self._building[key] = build
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Runs every `close`; one that raises is reported on stderr and hinders no other."""
        for task in self._building.values():
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if task.cancelled() or task.exception():
                continue
            try:
                await _run_hook(task.result().close)
            except (Exception, SystemExit):  # noqa: BLE001 - code of others; this process ends either way
                traceback.print_exc(file=sys.stderr)

    async def _build(self, reference: str, config: dict[str, Any]) -> Environment:
        with self.patiently():
            kind = registry.find(reference)
            try:
                settings = kind.Config.model_validate(config)
            except ValidationError as error:
                raise ConfigError(f"The config is not for {reference!r}: {error}") from error
            try:
                environment = kind(settings)
                await _run_hook(environment.setup)
            except (SystemExit, KeyboardInterrupt) as error:  # the loop would end with it
                raise ended_by(error) from error
            return environment


async def _run_hook(method: Callable[[], Any]) -> None:
    if inspect.isawaitable(waiting := method()):
        await waiting


#     POST URL  {"task", "instruction", "base_url", "api_key", "model", "seconds", "archive",
#                "files"}
#     200       {"output": its last words, "files": those that it changed}
#
# The archive is a tar file of the workspace, files are by path; all are in base64. What it changed
# is written into a fresh sandbox of the environment, from which the environment reads the output.

_ANSWER_BYTES = 64 << 20


class _Answer(msgspec.Struct):
    output: str = ""
    files: dict[str, str] = {}


async def ask_remote_agent(
    task: HarnessTask,
    task_id: str,
    spec: HarnessSpec,
    run: AttemptRun,
    sandbox: SandboxSpec | None,
) -> Any:
    archive = base64.b64encode(task.archive).decode()
    body = {
        "task": task_id,
        "instruction": task.instruction,
        "base_url": _reached_at(spec.base_url, run.base_url),
        "api_key": run.api_key,
        "model": run.model,
        "seconds": run.seconds_left,
        "archive": archive,
        "files": {path: base64.b64encode(data).decode() for path, data in task.files.items()},
    }
    answer = await _post(spec.url, body, run)
    run.log_action("agent", spec.identity(), {"ending": "finished", "output": answer.output})
    if task.output is None:
        return answer.output
    async with AsyncExitStack() as stack:
        if sandbox is None:
            return await task.output(_NO_WORKSPACE, answer.output)
        filled = msgspec.structs.replace(
            sandbox, archive=task.archive or None, files=dict(task.files)
        )
        workspace = await stack.enter_async_context(run.open_sandbox(filled))
        for path, text in answer.files.items():
            await workspace.write(path, _decoded(path, text))
        return await task.output(workspace, answer.output)


def _reached_at(end: str, base_url: str) -> str:
    """Returns `base_url` as an agent sees it at the end of a tunnel; "": there is none."""
    return f"{end.rstrip('/')}{urlsplit(base_url).path}" if end else base_url


async def _post(url: str, body: dict[str, Any], run: AttemptRun) -> _Answer:
    import aiohttp  # the agent's server may speak any HTTP; only these workers ask one

    timeout = aiohttp.ClientTimeout(total=run.seconds_left)
    data = msgspec.json.encode(body)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            http.post(url, data=data) as answer,
        ):
            content = await answer.content.read(_ANSWER_BYTES)
    except TimeoutError:
        raise LimitReached("The time of this rollout is used up.", limit="time") from None
    except aiohttp.ClientError as error:
        raise AgentError(f"The agent at {url} cannot be reached: {error}") from error
    if answer.status != 200:
        said = content[:500].decode("utf-8", "replace")
        raise AgentError(f"The agent at {url} answered with status {answer.status}: {said}")
    try:
        return msgspec.json.decode(content, type=_Answer)
    except msgspec.DecodeError as error:
        raise AgentError(f"The agent at {url} did not answer as it should: {error}.") from error


def _decoded(path: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise AgentError(f"The agent's file {path!r} is not in base64: {error}.") from error


class _NoWorkspace:
    def __getattr__(self, name: str) -> Any:
        raise AgentError("This environment has no sandbox to read the agent's files in.")


_NO_WORKSPACE: Any = _NoWorkspace()


HTTP_TRIES = 3
HTTP_SECONDS = 30.0
EXIT_OPEN_FILES = 71
"""Exit code of a worker that may open no more files, so that it reaches the server no more."""
CLOCK_TOLERANCE_SECONDS = 0.1
"""A cancel this close to the deadline counts as caused by it."""

_jobs = msgspec.json.Decoder(Job)
_JSON_ONLY = orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME


@dataclass(frozen=True)
class WorkerResources:
    """Shared by the attempts of one worker. `own_process`: whether the process is a worker; else it
    is the server's, under a debugger."""

    http: HttpClient
    instances: Instances
    threads: ThreadPoolExecutor
    own_process: bool = True


class WorkerAttempt:
    """`run` it once; `cancel` it at any time. `result`: what it gives to the server, unless it has
    `posted` it or has none."""

    def __init__(self, rollout_id: str, url: str, job: str, workshop: WorkerResources) -> None:
        self.rollout_id = rollout_id
        self.posted = False
        self.result: bytes | None = None
        self._url = url
        self._job = job
        self._workshop = workshop
        self._cancelled = False
        self._began = False
        self._agent: asyncio.Task[Any] | None = None
        self._run: AttemptRun | None = None
        self._method: Callable[..., Any] | None = None

    def cancel(self) -> None:
        """Cancels the agent; its result is still posted."""
        if self._cancelled or (self._agent is not None and self._agent.done()):
            return
        self._cancelled = True
        if self._run is not None:
            self._run.end()
        if self._agent is not None:
            self._agent.cancel()

    async def run(self) -> None:
        """Runs the attempt from start to end; writes connection failures to stderr.

        Ends the process if what runs in it has used up its descriptors: nothing else would tell the
        server that this was not a failure of its own.
        """
        try:
            job = _jobs.decode(self._job)
            shop = self._workshop
            run = self._run = AttemptRun(job, self._url, shop.http, shop.instances.patiently)
            body = await self._body(job, run)
            run.end()
            await run.finish()
            if body is not None:
                if run.rewards:
                    await self._request("POST", "rewards", orjson.dumps(run.rewards))
                await self._give(body)
        except (RequestFailed, TimeoutError, msgspec.DecodeError) as error:
            sys.stderr.write(f"{self.rollout_id}: {type(error).__name__}: {error}\n")
            if isinstance(error, RequestFailed) and error.errno == errno.EMFILE:
                sys.stderr.flush()
                os._exit(EXIT_OPEN_FILES)

    async def _give(self, result: bytes) -> None:
        if len(result) <= MAX_RESULT_BYTES:
            self.result = result
            return
        # The server takes one that is too large as a result without an output.
        await self._request("POST", "result", result, also=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
        self.posted = True

    async def _body(self, job: Job, run: AttemptRun) -> bytes | None:
        agent = self._agent = asyncio.create_task(self._output(job, run))
        if self._cancelled:
            agent.cancel()
        await asyncio.wait({agent})
        if self._cancelled:
            if job.deadline - time.time() > CLOCK_TOLERANCE_SECONDS:
                return None
            if not self._began:
                return _failure(AgentError("The environment's setup took until the deadline."))
            limit = LimitReached("The time of this rollout is used up.", limit="time")
            return _failure(limit, run)
        if agent.cancelled():
            return _failure(AgentError("The agent cancelled its own task."))
        error = agent.exception()
        if error is not None:
            return _failure(error, run, self._method)
        return _success(agent.result(), run, self._method)

    async def _output(self, job: Job, run: AttemptRun) -> Any:
        PRINTING.set(run.printed)
        TIMED.set(run.tool_called)
        environment: Environment[Any] = await self._workshop.instances.get(
            job.env_reference, job.env_config
        )
        self._began, self._method = True, environment.rollout
        run.isolation = "sandboxed" if job.harness is not None else environment.isolation
        run.tools = tools_of(environment)
        is_alone = run.isolation != "pooled" and self._workshop.own_process
        if environment.egress and is_alone:
            _lead_out(run.egress_url)
        try:
            if job.harness is not None:
                return await self._played(environment, job, job.harness, run)
            if inspect.iscoroutinefunction(environment.rollout):
                returned = await environment.rollout(job.task, run)
            else:
                returned = await self._in_thread(environment, job, run)
            return await returned if inspect.isawaitable(returned) else returned
        except (SystemExit, KeyboardInterrupt) as error:
            raise ended_by(error) from error

    async def _played(
        self, environment: Environment[Any], job: Job, spec: HarnessSpec, run: AttemptRun
    ) -> Any:
        if not spec.url:
            return await play(environment, job.task, spec, run, self._record)
        task = await harness_task(environment, job.task, run)
        return await ask_remote_agent(task, job.task.id, spec, run, environment.sandbox)

    async def _record(self) -> CallRecord:
        return msgspec.json.decode(await self._request("GET", "record"), type=CallRecord)

    async def _in_thread(self, environment: Environment[Any], job: Job, run: AttemptRun) -> Any:
        """Runs a plain `def rollout`. A cancel waits for its thread, which nothing else can end."""
        context = contextvars.copy_context()
        call = asyncio.get_running_loop().run_in_executor(
            self._workshop.threads, context.run, environment.rollout, job.task, run
        )
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait({call})
            raise

    async def _request(
        self, method: str, path: str, body: bytes | None = None, *, also: int | None = None
    ) -> bytes:
        """Asks the server, again when the connection breaks (it takes a result only once)."""
        for tries_left in reversed(range(HTTP_TRIES)):
            try:
                status, content = await self._workshop.http.request(
                    method, f"{self._url}/{path}", body, seconds=HTTP_SECONDS
                )
            except RequestFailed:
                if not tries_left:
                    raise
                continue
            if status >= HTTPStatus.BAD_REQUEST and status != also:
                raise RequestFailed(f"{method} {path} was answered with status {status}")
            return content
        raise AssertionError("unreachable: the last try returns or raises")


def _lead_out(egress_url: str) -> None:
    """Has HTTP clients of this process, which no other rollout uses, take the egress proxy."""
    for name in ("http_proxy", "https_proxy"):
        os.environ[name] = os.environ[name.upper()] = egress_url
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"


def _success(output: Any, run: AttemptRun, method: Callable[..., Any] | None) -> bytes:
    try:
        # A model may have written half a surrogate pair, or nested lists: that costs it points, but
        # it is no failure.
        value, changes = clean(output)
        result = {"output": value, "changes": sorted(changes), **_noted(run)}
        return orjson.dumps(result, option=_JSON_ONLY)
    except TypeError as error:
        what = f"rollout() returned what JSON cannot hold ({type(output).__name__}): {error}."
        return _failure(AgentError(what, bug="yes"), None, method)


def _failure(
    error: BaseException,
    run: AttemptRun | None = None,
    method: Callable[..., Any] | None = None,
) -> bytes:
    body: dict[str, Any] = {"failure": failure_of(error, __file__, method)}
    body |= _noted(run) if run is not None else {}
    if (output := output_of(error)) is not None:
        body["output"], changes = clean(output)
        body["changes"] = sorted(changes)
    return orjson.dumps(body, default=repr)


def _noted(run: AttemptRun) -> dict[str, Any]:
    printed = [(at, stream, sendable(text)) for at, stream, text in run.printed.taken()]
    return {"metrics": run.metrics, "tools": run.tool_times, "printed": printed}
