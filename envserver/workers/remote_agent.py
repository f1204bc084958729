"""Asks a remote agent to run an attempt (`--agent.url`).

    POST URL  {"task", "instruction", "base_url", "api_key", "model", "seconds", "archive", "files"}
    200       {"output": its last words, "files": those that it changed}

The archive is a tar file of the workspace, files are by path; all are in base64. What it changed is
written into a fresh sandbox of the environment, from which the environment reads the output.
"""

from __future__ import annotations

import base64
import binascii
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import urlsplit

import msgspec
from envserver_records.errors import AgentError, LimitReached
from envserver_records.sandboxes import SandboxSpec

from ..rollout_interface import HarnessSpec, HarnessTask
from .run import AttemptRun

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
    """Returns the rollout's output.

    Args:
        sandbox: the environment's sandbox, for its files; None: it has none.
    """
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
    """Stands for the workspace where the environment has no sandbox."""

    def __getattr__(self, name: str) -> Any:
        raise AgentError("This environment has no sandbox to read the agent's files in.")


_NO_WORKSPACE: Any = _NoWorkspace()
