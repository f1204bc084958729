"""The Python API for code without asyncio: notebooks, tests, scripts.

Each call runs its asynchronous twin of `python_api` on an event loop in a thread of its own, so it
works where an event loop already runs (a notebook). Ctrl-C cancels the work and waits for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from envserver_records.records import Group

from . import python_api
from .python_api import Mix
from .serving import Served

T = TypeVar("T")
P = ParamSpec("P")


def _blocking(work: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    @functools.wraps(work)
    def call(*args: P.args, **settings: P.kwargs) -> T:
        with _Loop() as loop:
            return loop.run(work(*args, **settings))

    return call


process = _blocking(python_api.process)
evaluate = _blocking(python_api.evaluate)
score = _blocking(python_api.score)
rescore = _blocking(python_api.rescore)
replay = _blocking(python_api.replay)
verify = _blocking(python_api.verify)


def groups(
    environment: Mix, *, out: Path | str | None = None, **settings: Any
) -> Generator[Group, None, None]:
    """Yields groups as they finish; see `python_api.groups`."""
    with _Loop() as loop:
        finished = python_api.groups(environment, out=out, **settings)
        try:
            while (group := loop.run(_next(finished))) is not None:
                yield group
        finally:
            loop.run(_close(finished))


async def _next(finished: AsyncGenerator[Group]) -> Group | None:
    return await anext(finished, None)


async def _close(finished: AsyncGenerator[Group]) -> None:
    await finished.aclose()


class Server:
    """A running server; see `serve`."""

    def __init__(self, loop: _Loop, server: python_api.Server) -> None:
        self.url = server.url
        """The address for trainers."""
        self.model_url = server.model_url
        """Endpoint of the model, for remote environments."""
        self._loop = loop
        self._server = server

    def wait(self) -> Served:
        """Waits until as many groups as wanted were made and acknowledged."""
        return self._loop.run(self._server.wait())

    def stop(self) -> Served:
        """Finishes the open groups (at most `server.drain_seconds`), then ends the server."""
        return self._loop.run(self._server.stop())


@contextlib.contextmanager
def serve(environment: Mix, **settings: Any) -> Iterator[Server]:
    """Serves groups to trainers while the block runs; see `python_api.serve`."""
    with _Loop() as loop:
        serving = python_api.serve(environment, **settings)
        server = loop.run(serving.__aenter__())
        try:
            yield Server(loop, server)
        finally:
            loop.run(serving.__aexit__(None, None, None))


class _Loop:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="envserver", daemon=True
        )

    def __enter__(self) -> _Loop:
        self._thread.start()
        return self

    def __exit__(self, *ignored: object) -> None:
        self.run(self._loop.shutdown_asyncgens())
        self.run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` to its end; Ctrl-C cancels it first."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except KeyboardInterrupt:
            running.cancel()
            with contextlib.suppress(BaseException):
                running.result()
            raise
