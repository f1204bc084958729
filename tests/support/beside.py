"""A server in a thread and an event loop of its own, beside tests that block."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from anyio.from_thread import start_blocking_portal

from .waiting import PATIENCE

T = TypeVar("T")
Serve = Callable[[threading.Event, asyncio.Event], Coroutine[Any, Any, None]]


@contextlib.contextmanager
def in_a_thread(make: Callable[[], AbstractAsyncContextManager[T]]) -> Iterator[T]:
    """What `make()` gives, open in a thread with an event loop of its own."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(portal.call(make)) as value,
    ):
        yield value


@contextlib.contextmanager
def beside(serve: Serve) -> Iterator[None]:
    """Runs `serve(started, ended)`: it sets `started` when it serves, and returns after `ended`."""
    with start_blocking_portal() as portal:
        started, ended = threading.Event(), portal.call(asyncio.Event)
        portal.start_task_soon(serve, started, ended).add_done_callback(lambda _: started.set())
        started.wait(PATIENCE)
        try:
            yield
        finally:
            portal.call(ended.set)
