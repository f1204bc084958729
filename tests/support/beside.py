"""A server in a thread and an event loop of its own, beside tests that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from .waiting import PATIENCE

Serve = Callable[[threading.Event, asyncio.Event], Coroutine[Any, Any, None]]


@contextlib.contextmanager
def beside(serve: Serve) -> Iterator[None]:
    """Runs `serve(started, ended)`: it sets `started` when it serves, and returns after `ended`."""
    loop = asyncio.new_event_loop()
    started, ended = threading.Event(), asyncio.Event()

    def run() -> None:
        try:
            loop.run_until_complete(serve(started, ended))
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(PATIENCE)
    try:
        yield
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(PATIENCE)
