"""Puts the parts together: engine, proxy, workers, scorers, as `process` and `serve` need them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal

from ..api.server import serve_api
from ..config import Settings
from ..environment import Environment
from ..errors import ConfigError
from ..proxy.server import Proxy
from ..registry import absolute
from ..rollouts.events import Observer
from ..rollouts.group import Machinery
from ..rollouts.scheduler import Scheduler
from ..rollouts.scoring import ScorerPool
from ..tokens.flags import Actions
from ..workers.local import LocalPool
from .engines import look_at, make_engine, make_source
from .progress import counted


@contextlib.asynccontextmanager
async def machinery(
    settings: Settings,
    environment: Environment,
    env_reference: str,
    *,
    observer: Observer,
    need_engine: bool,
    actions: Actions,
    need_exact: bool,
    drop_zero_variance: bool,
) -> AsyncIterator[Machinery]:
    """Everything that running rollouts needs, started; all of it is ended on the way out.

    Args:
        actions: what is done about each flag of a call or a trajectory.
        need_engine: whether the engine must answer now, or may come later (its name must then be
            set).

    Raises:
        EngineError: the engine does not answer, or refuses us.
        ConfigError: RL needs exact tokens and the engine does not give any.
    """
    if environment.isolation == "sandboxed":
        raise ConfigError(
            f"Environment {environment.name!r} needs a sandbox, and there is none yet.",
            hint="Its agents run code that a model wrote; nothing weaker will do.",
        )
    reference = absolute(env_reference)
    engine, demonstrator = make_engine(settings)
    _check_exact(engine.exact, need_exact)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(engine)
        source = make_source(settings, engine)
        if await look_at(engine, must_answer=need_engine):
            _check_exact((await source.ready()).exact, need_exact)
        model = await engine.model_name()
        proxy = Proxy(engine, source=source)
        server = await serve_api(proxy.asgi(), "127.0.0.1", 0)
        stack.push_async_callback(server.close)
        scorer = ScorerPool(
            reference,
            environment.config.model_dump(mode="json"),
            settings.rollouts.scorer_processes,
        )
        scorer_is_up = await stack.enter_async_context(_coming_up(scorer))
        pool = await stack.enter_async_context(LocalPool(settings.workers, [reference]))
        await scorer_is_up
        yield Machinery(
            environment=environment,
            isolation=environment.isolation,
            env_reference=reference,
            engine=engine,
            proxy=proxy,
            proxy_url=f"http://127.0.0.1:{server.port}",
            pool=pool,
            scorer=scorer,
            model=model,
            sampling=settings.sampling,
            rollouts=settings.rollouts,
            actions=actions,
            keep_calls=settings.tokens.keep_calls,
            need_exact=need_exact,
            drop_zero_variance=drop_zero_variance,
            observer=observer,
            slots=asyncio.Semaphore(_slots(settings, environment.isolation)),
            demonstrator=demonstrator,
        )


def _check_exact(exact: bool, needed: bool) -> None:
    if needed and not exact:
        raise ConfigError(
            "This engine gives no token ids, so its rollouts are not fit for RL.",
            hint="Use `process` for text data, or an engine such as vLLM; "
            "`envserver models probe` says what is missing.",
        )


@contextlib.asynccontextmanager
async def _coming_up(scorer: ScorerPool) -> AsyncIterator[asyncio.Task[ScorerPool]]:
    """Starts `scorer` beside whatever the caller does; to be awaited before it is used."""
    starting = asyncio.create_task(scorer.__aenter__())
    try:
        yield starting
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        if not starting.cancelled() and starting.exception() is None:
            await scorer.__aexit__(None, None, None)


def _slots(settings: Settings, isolation: Literal["pooled", "dedicated"]) -> int:
    """Rollouts in flight: a rollout that waits for a worker would use up its own time."""
    workers = settings.workers
    room = (
        workers.dedicated
        if isolation == "dedicated"
        else workers.processes * workers.rollouts_per_process
    )
    return min(settings.rollouts.max_concurrent, room)


async def run_until_stopped(
    work: Coroutine[Any, Any, None], scheduler: Scheduler, say: Callable[[str], object]
) -> bool:
    """Awaits `work`, which runs `scheduler`; whether a signal stopped it before its end.

    The first SIGINT or SIGTERM lets the open groups end, the second ends everything at once.
    """
    loop = asyncio.get_running_loop()
    running = asyncio.ensure_future(work)
    stopped = False

    def on_signal() -> None:
        nonlocal stopped
        if stopped:
            running.cancel()
            return
        stopped = True
        say(f"Finishing {counted(scheduler.open_groups, 'open group')}; again stops at once.")
        scheduler.drain()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        await running
    except asyncio.CancelledError:
        if not stopped:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return stopped
