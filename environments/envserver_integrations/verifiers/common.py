"""What both generations share: settings, the process that loads a package, how an end is judged."""

from __future__ import annotations

import asyncio
import math
import signal
import ssl
import threading
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from pydantic import Field

from envserver import Environment, Score


class OwnLoop:
    """An event loop in a thread, for packages of verifiers that block the loop they run on: a
    worker whose own loop is blocked for a second counts as hung."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Returns what `coroutine` returns. If cancelled, cancels it and waits for its end."""
        here = asyncio.get_running_loop()
        loop = self._started()
        outcome = here.create_future()
        tasks: list[asyncio.Task[Any]] = []

        def start() -> None:
            tasks.append(loop.create_task(coroutine))
            tasks[0].add_done_callback(lambda task: here.call_soon_threadsafe(_copy, task, outcome))

        loop.call_soon_threadsafe(start)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            await asyncio.wait({outcome})
            raise

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        return self._loop


def _copy(task: asyncio.Task[Any], outcome: asyncio.Future[Any]) -> None:
    if task.cancelled():
        outcome.cancel()
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


TLS_CONTEXT = ssl.create_default_context()
"""Shared by all clients: making one takes as long as a short rollout."""
LIMIT_CODES = ("limit_reached", "context_length_exceeded")
"""Codes of the proxy's errors that say that the model used up a limit."""
UNSCORED = "unscored"


class VerifiersConfig(Environment.Config):
    """Settings of an environment of verifiers."""

    args: dict[str, Any] = {}
    """Arguments of its `load_environment`, or settings of its task set, as JSON:
    '{"num_examples": 100}'."""
    reward_range: list[float] | None = Field(default=None, min_length=2, max_length=2)
    """Lowest and highest reward; unset: any, since verifiers does not say."""
    solved_at: float | None = None
    """The least reward of a solved task; unset: the sum of the weights, for functions up to 1."""
    limit_reward: float = 0.0
    """Reward of a rollout that a limit ended before the environment could score it."""


class VerifiersEnvironment(Environment):
    """A package of verifiers as an environment. Subclasses name it."""

    reward_range = (-math.inf, math.inf)
    solved_at = 1.0
    # Its reward functions read whole answers.
    exact_demonstrations = True
    # An answer alone may lack the format that a reward function wants.
    demonstrations_solve = False
    preload = ()

    Config = VerifiersConfig
    package = ""
    """The name that verifiers knows it by."""

    def __init__(self, config: Environment.Config | None = None) -> None:
        super().__init__(config)
        self.loop = OwnLoop()
        own = self.config
        if own.reward_range is not None:
            self.reward_range = (own.reward_range[0], own.reward_range[1])  # type: ignore[misc]
        if own.solved_at is not None:
            self.solved_at = own.solved_at  # type: ignore[misc]

    def weighted(self, weights: Iterable[float]) -> None:
        """Sets what a solved task has, by the weights of the reward functions."""
        most = math.fsum(weight for weight in weights if weight > 0)
        if self.config.solved_at is None and most > 0:
            self.solved_at = most  # type: ignore[misc]

    def unscored(self) -> Score:
        """Returns the score of a rollout that a limit ended too early to be scored."""
        return Score(reward=self.config.limit_reward, metrics={UNSCORED: 1.0})


@contextmanager
def kept_signals() -> Iterator[None]:
    """Keeps the handlers that verifiers replaces with its own, which only the main thread may
    do."""
    if threading.current_thread() is not threading.main_thread():
        with mock.patch.object(signal, "signal"):
            yield
        return
    kept = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)


def numbers(values: Mapping[str, Any] | None) -> dict[str, float]:
    found = {}
    for name, value in (values or {}).items():
        if isinstance(value, bool | int | float) and math.isfinite(value):
            found[name] = float(value)
    return found


def names_limit(text: str) -> bool:
    return any(code in text for code in LIMIT_CODES)
