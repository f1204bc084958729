"""Starts the container of an OpenEnv server for the time of a run: `docker://IMAGE`."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from envserver import ConfigError

_SCHEME = "docker://"
_PORT = "8000"
_START_SECONDS = 120.0


@asynccontextmanager
async def started(address: str) -> AsyncIterator[str]:
    """Yields the address of a server; that of an image's container, which ends with the block."""
    if not address.startswith(_SCHEME):
        yield address
        return
    program = shutil.which("docker") or shutil.which("podman")
    if program is None:
        raise ConfigError(
            f"openenv:{address} needs Docker or Podman, and neither is here.",
            hint="Start the server elsewhere: --env openenv:http://host:8000.",
        )
    image = address.removeprefix(_SCHEME)
    words = ("run", "--detach", "--publish", f"127.0.0.1::{_PORT}", image)
    container = (await _output(program, *words)).strip()
    try:
        url = await _healthy(program, container)
        yield url
    finally:
        await _output(program, "rm", "--force", "--volumes", container)


async def _healthy(program: str, container: str) -> str:
    """Waits until the container's server answers; returns its address."""
    try:
        async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as http:
            while True:
                place = await _place(program, container)
                try:
                    async with http.get(f"http://{place}/health") as answer:
                        if answer.status == 200:
                            return f"http://{place}"
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)
    except TimeoutError as error:
        raise ConfigError(
            f"The container's server did not answer in {_START_SECONDS:g} s."
        ) from error


async def _place(program: str, container: str) -> str:
    """Returns host:port of the container's server."""
    code, out, err = await _run(program, "port", container, _PORT)
    await _check_runs(program, container)
    if code != 0:
        raise ConfigError(f"{program} port failed: {err[-500:]}")
    return out.split()[0]


async def _check_runs(program: str, container: str) -> None:
    words = ("inspect", "--format", "{{.State.Running}}", container)
    if (await _output(program, *words)).strip() == "true":
        return
    _, out, err = await _run(program, "logs", "--tail", "20", container)
    said = (err or out)[-500:].strip()
    raise ConfigError(f"The container of the OpenEnv server has ended: {said}")


async def _output(*words: str) -> str:
    code, out, err = await _run(*words)
    if code != 0:
        raise ConfigError(f"{' '.join(words[:2])} failed: {err[-500:]}")
    return out


async def _run(*words: str) -> tuple[int | None, str, str]:
    """Returns a program's exit status, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(errors="replace"), err.decode(errors="replace")
