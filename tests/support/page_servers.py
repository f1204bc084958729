"""Small servers for tests of the page, in a thread: the trainer API, a proxy with a path prefix."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TypeVar

import aiohttp
from aiohttp import web

from envserver.api.metrics import Metrics

from .api import Api, native_group, put_native, running_api
from .beside import beside

T = TypeVar("T")

_BY_CONNECTION = {"connection", "transfer-encoding", "keep-alive", "content-length"}


@contextlib.contextmanager
def in_a_thread(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What `make()` gives, open in a thread with an event loop of its own."""
    values: list[T] = []

    async def serve(started: threading.Event, ended: asyncio.Event) -> None:
        async with make() as value:
            values.append(value)
            started.set()
            await ended.wait()

    with beside(serve):
        yield values[0]


@contextlib.asynccontextmanager
async def small_api(folder: Path, tokens_file: Path | None = None) -> AsyncIterator[Api]:
    """The trainer API over a store with three groups."""
    server = {} if tokens_file is None else {"tokens_file": tokens_file}
    async with running_api(folder / "groups.db", server=server, metrics=Metrics()) as api:
        for number in range(3):
            await put_native(api.store, native_group(f"group-{number}"))
        yield api


@contextlib.asynccontextmanager
async def prefix_proxy(target: str, prefix: str) -> AsyncIterator[str]:
    """A reverse proxy that serves `target` at `prefix` ("/lab/one") and takes the prefix off.

    Yields the address of the page.
    """

    async def forward(request: web.Request) -> web.StreamResponse:
        path = request.raw_path.removeprefix(prefix)
        async with http.request(
            request.method,
            target + path,
            headers=request.headers,  # with the browser's Host, as a proxy should
            data=await request.read() or None,
            allow_redirects=False,
        ) as answer:
            kept = [
                (name, value)
                for name, value in answer.headers.items()
                if name.lower() not in _BY_CONNECTION
            ]
            sent = web.StreamResponse(status=answer.status)
            sent.headers.extend(kept)
            with contextlib.suppress(ConnectionError):  # the browser left
                await sent.prepare(request)
                async for chunk in answer.content.iter_any():
                    await sent.write(chunk)
                await sent.write_eof()
            return sent

    async with (
        aiohttp.ClientSession(auto_decompress=False) as http,
        site([web.route("*", prefix + "/{path:.*}", forward)]) as url,
    ):
        yield url + prefix + "/"


@contextlib.asynccontextmanager
async def site(routes: list[web.RouteDef]) -> AsyncIterator[str]:
    """A web site on a free port of this machine; yields its address."""
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
