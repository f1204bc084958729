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
    """Yields the address of a server; that of an image's container, which ends with the block.

    Raises:
        ConfigError: there is no Docker, or the container does not become healthy.
    """
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
    words = ("run", "--detach", "--rm", "--publish", f"127.0.0.1::{_PORT}", image)
    container = (await _output(program, *words)).strip()
    try:
        place = (await _output(program, "port", container, _PORT)).split()[0]
        url = f"http://{place}"
        await _healthy(url)
        yield url
    finally:
        await _output(program, "rm", "--force", container)


async def _output(*words: str) -> str:
    """
    Raises:
        ConfigError: the program fails.
    """
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    if process.returncode != 0:
        raise ConfigError(f"{' '.join(words[:2])} failed: {err.decode(errors='replace')[-500:]}")
    return out.decode()


async def _healthy(url: str) -> None:
    """Waits until the server answers.

    Raises:
        ConfigError: it does not within two minutes.
    """
    try:
        async with asyncio.timeout(_START_SECONDS), aiohttp.ClientSession() as http:
            while True:
                try:
                    async with http.get(f"{url}/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)
    except TimeoutError as error:
        raise ConfigError(
            f"The container's server did not answer in {_START_SECONDS:g} s."
        ) from error
