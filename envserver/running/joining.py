"""The work of `envserver join`: makes groups of an environment for a remote server.

The server says how many groups may be open, which policy the engine serves and when its weights
change. A group counts as delivered when the server has it on disk; a restarted runner continues its
own stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import ssl
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from urllib.parse import urlsplit

import structlog
from envserver_records.errors import ConfigError
from envserver_records.http_errors import server_urls
from envserver_records.records import Group
from envserver_records.waiting import cancel_and_wait

from ..environment import Environment
from ..models.replicas import Registration as KnownEngine
from ..rollouts.agents import check_sampling
from ..rollouts.events import Event, RolloutFailed, RolloutScored
from ..rollouts.group import RolloutContext
from ..rollouts.scheduler import Scheduler
from ..rollouts.stream import GroupRequest, group_requests
from ..runners.dealing import Made, Take
from ..runners.link import (
    DealtLink,
    Identity,
    Link,
    RemoteSink,
    RunnerGate,
    default_name,
    held_identity,
    missing_requests,
)
from ..runners.messages import Heartbeat, Registration, ToldEngine, Welcome
from ..settings.runs import CurriculumConfig
from ..settings.server import is_loopback
from ..tools.watching import watched_loop
from ..version import __version__
from .context import SharedEngine, rollout_context, shared_engine
from .metrics import Tally, all_of, warn_of_dropped
from .mix import MOST_ESTIMATES, Book, RunSpec, has_curriculum
from .run_settings import JoinSettings
from .stopping import Ending, Stop, run_until_stopped

_log = structlog.get_logger("envserver.join")

Spec = RunSpec[JoinSettings]


class Runner:
    def __init__(self, welcome: Welcome, link: Link, scheduler: Scheduler, tally: Tally) -> None:
        self.seed, self.stored, self.tally = welcome.seed, welcome.stored, tally
        self._link = link
        self._scheduler = scheduler

    async def run(self, stop: Stop, *, drain_seconds: float) -> Ending:
        return await run_until_stopped(
            self._work(), self._scheduler, stop, drain_seconds=drain_seconds
        )

    async def _work(self) -> None:
        living = asyncio.create_task(self._link.live())
        making = asyncio.create_task(self._scheduler.run())
        try:
            done, _ = await asyncio.wait({living, making}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            await cancel_and_wait(living, making)


def identity(spec: Spec) -> contextlib.AbstractContextManager[Identity]:
    """Holds the runner's name and secret."""
    settings = spec.settings
    default = default_name(spec.environment_class.name)
    if given := settings.instance.get_secret_value():
        return contextlib.nullcontext(Identity(settings.name or default, given))
    return held_identity(settings.joined_folder, name=settings.name, default=default)


@contextlib.asynccontextmanager
async def joined(spec: Spec, identity: Identity) -> AsyncIterator[Runner]:
    """Registers at the server, waiting until it can be reached."""
    settings, gate = spec.settings, RunnerGate()
    link = Link(
        settings.url,
        _registration(spec, identity),
        gate=gate,
        token=settings.token.get_secret_value(),
        tls=tls_of(settings),
        on_engines=_not_yet if _hears_engines(settings) else None,
    )
    async with link.open() as welcome:
        environment = _with_seed(spec, welcome.seed).make_environment()
        check_sampling(environment, spec.settings.sampling)
        tally, rules = Tally(), settings.curriculum
        book = (
            await _book(environment, rules, link, welcome, lambda: context.staleness.version)
            if has_curriculum(rules)
            else None
        )
        async with (
            watched_loop(settings.telemetry.slow_callback_seconds),
            shared_engine(settings, need_engine=False, need_exact=True, gate=gate) as shared,
            rollout_context(
                settings,
                environment,
                spec.reference,
                observer=all_of(
                    tally,
                    None if book is None else book.observe,
                    warn_of_dropped(tally, _log),
                ),
                need_engine=False,
                need_exact=True,
                drop_zero_variance=environment.config.ensure_scores_are_not_same is not False,
                for_training=True,
                shared=shared,
            ) as context,
        ):
            scheduler = _scheduler(context, link, welcome.stored, book)
            _connect(link, context, scheduler, tally)
            _follow_engines(link, shared)
            yield Runner(welcome, link, scheduler, tally)


def tls_of(settings: JoinSettings) -> ssl.SSLContext | None:
    for url in server_urls(settings.url):
        parts = urlsplit(url)
        is_plain = parts.scheme == "http" and not is_loopback(parts.hostname or "")
        if settings.token.get_secret_value() and is_plain:
            _log.warning("token_unencrypted", url=url)
    if settings.ca_certs is None and settings.certfile is None:
        return None
    try:
        context = ssl.create_default_context(cafile=settings.ca_certs)
        if settings.certfile is not None:
            context.load_cert_chain(settings.certfile)
    except OSError as error:
        raise ConfigError(f"--ca_certs or --certfile cannot be read: {error}.") from error
    return context


def _registration(spec: Spec, identity: Identity) -> Registration:
    settings, config = spec.settings, spec.settings.env
    return Registration(
        name=identity.name,
        instance=identity.instance,
        env=spec.environment_class.name,
        split=config.split,
        seed=config.seed,
        group_size=config.group_size,
        weight=settings.weight,
        minimum_share=settings.minimum_share,
        scoring={
            "max_token_length": config.max_token_length,
            "ensure_scores_are_not_same": config.ensure_scores_are_not_same is not False,
            "min_group_size": settings.rollouts.min_group_size,
        },
        version=__version__,
        host=identity.name.partition("@")[2],
    )


def _with_seed(spec: Spec, seed: int) -> Spec:
    """So that no two runners make the same groups."""
    config = spec.settings.env.model_copy(update={"seed": seed})
    return dataclasses.replace(spec, settings=spec.settings.model_copy(update={"env": config}))


async def _book(
    environment: Environment,
    rules: CurriculumConfig,
    link: Link,
    welcome: Welcome,
    version: Callable[[], int],
) -> Book:
    book = Book(
        environment,
        rules,
        known=_known(link),
        # Start time as counter base: a start never reuses an earlier start's numbers, because it
        # draws less than once a second.
        counts=(welcome.stored - welcome.again, int(time.time())),
        version=version,
    )
    config = environment.config
    book.learn(await link.estimates(environment.name, config.split, MOST_ESTIMATES))
    return book


def _known(link: Link) -> Callable[[list[str]], set[str]]:
    """The result is called in the thread that reads tasks."""
    loop = asyncio.get_running_loop()
    return lambda ids: asyncio.run_coroutine_threadsafe(link.known(ids), loop).result()


def _scheduler(parts: RolloutContext, link: Link, stored: int, book: Book | None) -> Scheduler:
    environment = parts.environment
    steps = environment.config.total_steps
    own = group_requests(environment, repeat=True)
    return Scheduler(
        parts,
        missing_requests(own, _known(link), stored)
        if book is None
        else book.curriculum.requests(own),
        RemoteSink(link),
        wanted=None if steps is None else max(0, steps - stored),
        stop_on_failures=False,
        counted=link.count_dropped,
    )


def _connect(link: Link, parts: RolloutContext, scheduler: Scheduler, tally: Tally) -> None:
    most = most_groups(parts)

    def facts() -> Heartbeat:
        ended = tally.groups + tally.drops.total()
        return Heartbeat(
            open=scheduler.open_groups,
            capacity=0 if scheduler.drained else most,
            begun=ended + scheduler.open_groups,
            delivered=tally.groups,
            dropped=dict(tally.drops),
            failures=dict(tally.failures),
            engine={
                "model": parts.model,
                "waiting": calls_waiting(parts),
                **parts.proxy.engine_described(),
            },
        )

    link.facts, link.open_groups = facts, lambda: scheduler.open_groups
    link.publish, link.drain = parts.publish_version, scheduler.drain


def _hears_engines(settings: JoinSettings) -> bool:
    wanted = settings.engines.from_server
    return not settings.openai.base_urls if wanted is None else wanted


def _not_yet(engines: Sequence[ToldEngine]) -> None: ...


def _follow_engines(link: Link, shared: SharedEngine) -> None:
    fleet = shared.fleet
    if link.on_engines is None or fleet is None:
        return
    link.on_engines = lambda engines: fleet.sync(
        "server", [KnownEngine(**engine.model_dump()) for engine in engines]
    )
    link.engines_in_doubt = lambda: fleet.doubts
    fleet.changed = link.hurry  # calls wait for the version of an engine that was away


def most_groups(parts: RolloutContext) -> int:
    size: int = parts.environment.config.group_size
    return max(1, parts.rollouts.max_concurrent // size) + 1


def calls_waiting(parts: RolloutContext) -> int:
    return sum(replica.waiting for replica in parts.engine.replicas())


class DealtRunner:
    def __init__(
        self, name: str, link: DealtLink, context: RolloutContext, events: _Events
    ) -> None:
        self.name = name
        self.delivered = 0
        self._link = link
        self._context = context
        self._events = events
        self._held: dict[str, asyncio.Task[None]] = {}
        self._draining = False
        self._error: BaseException | None = None

    @property
    def open_groups(self) -> int:
        return len(self._held)

    def drain(self) -> None:
        self._draining = True
        self._link.hurry()

    async def run(self, stop: Stop, *, drain_seconds: float) -> Ending:
        return await run_until_stopped(self._run(), self, stop, drain_seconds=drain_seconds)

    async def _run(self) -> None:
        most = most_groups(self._context)
        try:
            while self._held or not self._draining:
                free = 0 if self._draining else max(0, most - len(self._held))
                wanted = Take(self.name, free, list(self._held), calls_waiting(self._context))
                dealt = await self._link.take(wanted)
                if self._error is not None:
                    raise self._error
                if dealt is None:
                    continue
                for group_id in dealt.cancelled:
                    if group_id in self._held:
                        self._held[group_id].cancel()
                for request in dealt.requests:
                    self._begin(request)
                self._draining = self._draining or dealt.drain
        finally:
            await cancel_and_wait(*self._held.values())

    def _begin(self, request: GroupRequest) -> None:
        if request.group_id in self._held:
            return
        task = asyncio.create_task(self._make(request), name=request.group_id)
        self._held[request.group_id] = task
        task.add_done_callback(lambda ended: self._end(request.group_id, ended))

    def _end(self, group_id: str, task: asyncio.Task[None]) -> None:
        del self._held[group_id]
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
        self._events.pop(group_id, None)
        self._link.hurry()

    async def _make(self, request: GroupRequest) -> None:
        made = await self._context.make(request)
        events = self._events.get(request.group_id, [])
        await self._link.send(
            Made(
                group_id=request.group_id,
                group=made if isinstance(made, Group) else None,
                drop=None if isinstance(made, Group) else made,
                scored=[event for event in events if isinstance(event, RolloutScored)],
                failed=[event for event in events if isinstance(event, RolloutFailed)],
            )
        )
        self.delivered += isinstance(made, Group)


_Events = defaultdict[str, list[RolloutScored | RolloutFailed]]
"""The events of rollouts, by group, until it is sent."""


@contextlib.asynccontextmanager
async def dealt_runner(spec: Spec) -> AsyncIterator[DealtRunner]:
    settings = spec.settings
    events: _Events = defaultdict(list)

    def observe(event: Event) -> None:
        if isinstance(event, (RolloutScored, RolloutFailed)):
            events[event.group_id].append(event)

    token = settings.token.get_secret_value()
    with identity(spec) as held:
        async with DealtLink(settings.url, token=token, tls=tls_of(settings)) as link:
            rules = await link.rules()
            async with rollout_context(
                settings,
                spec.make_environment(),
                spec.reference,
                observer=observe,
                drop_zero_variance=rules.drop_zero_variance,
                for_training=rules.for_training,
            ) as context:
                yield DealtRunner(held.name, link, context, events)
