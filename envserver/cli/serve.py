"""`envserver serve`: rollouts of environments for trainers, durable until acknowledged.

`run-api` is the same server without an environment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import structlog
from rich.console import Console

from ..api.app import create_api
from ..api.beside import SharingSink
from ..api.doorway import Doorway
from ..api.health import Health, engine_probe, store_probe
from ..api.metrics import Metrics
from ..api.registered import RemoteEnvironments
from ..api.server import serve_api
from ..config import MixSettings, RolloutsConfig
from ..errors import ConfigError, Stale, Straggler
from ..rollouts.auditor import Auditor
from ..rollouts.events import Event, GroupDelivered, GroupDropped, Observer
from ..rollouts.group import Machinery
from ..rollouts.mixing import Share, Shares, Turns, targets
from ..rollouts.room import Bounds
from ..rollouts.scheduler import Scheduler
from ..rollouts.stream import id_prefix, tickets
from ..store import Store, open_store
from ..store.demand import Demand, Staleness
from ..telemetry.lag import LoopLag
from ..tokens.flags import chosen
from .command_line import read_command_line
from .logs import configure_logs
from .loop import run_loop
from .metrics import Deliveries, EngineNumbers, PartsNumbers, RolloutNumbers
from .mixing import Member, Several, read_mix
from .progress import Tally, counted
from .runtime import EngineRoom, engine_room, machinery, run_until_stopped

SUMMARY = """Runs rollouts of an environment, or of several, and offers the groups to trainers.
SIGTERM or Ctrl-C once finishes the open groups and stops; twice stops at once."""

ALIASES = {"host": "server.host", "port": "server.port"}

POLL_SECONDS = 0.2

Members = list[Member[MixSettings]]

_log = structlog.get_logger("envserver.serve")


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        EnvserverError: it cannot be run.
    """
    members = None
    if "--help" not in argv and "-h" not in argv:
        members = read_mix(argv, settings_class=MixSettings, aliases=ALIASES)
    if members is None:
        line = read_command_line(
            "serve", SUMMARY, argv, settings_class=MixSettings, aliases=ALIASES
        )
        if line is None:
            return 0
        environment = line.make_environment()
        members = [Member(line, environment, Share(environment.name))]
    settings = members[0].line.settings
    configure_logs(settings.log_level, settings.log_format)
    return run_loop(serve(members, Console(stderr=True)))


async def serve(members: Members, console: Console) -> int:
    """Serves until stopped, or until as many groups as wanted are made and delivered.

    Raises:
        ConfigError, StoreError, EngineError: see the parts.
    """
    settings = members[0].line.settings
    _check_alike(members)
    tally, numbers, metrics = Tally(), RolloutNumbers(), Metrics()

    def observe(environment: str) -> Observer:
        count = numbers.observer(environment)

        def told(event: Event) -> None:
            tally(event)
            count(event)
            if isinstance(event, GroupDelivered):
                for trajectory in event.group.trajectories:
                    auditor.offer(trajectory)
            elif isinstance(event, GroupDropped) and event.failed:
                _warn(event, tally)

        return told

    async with contextlib.AsyncExitStack() as stack:
        lag = await stack.enter_async_context(LoopLag(settings.telemetry.slow_callback_seconds))
        health = Health(lag)
        for part in ("store", "engine", *_loaded(members)):
            health.expect(part)
        store = await stack.enter_async_context(open_store(settings.store))
        health.found("store", store_probe(store))
        doorway = Doorway(health)
        server = await serve_api(
            doorway, settings.server.host, settings.server.port, settings.server
        )
        stack.push_async_callback(server.close)
        room = await stack.enter_async_context(
            engine_room(settings, need_engine=False, need_exact=True)
        )
        health.found("engine", engine_probe(room.engine))
        parts = await stack.enter_async_context(_machineries(members, room, observe, health))
        auditor = await stack.enter_async_context(
            Auditor(
                room.engine,
                settings.tokens.audit_fraction,
                settings.tokens.audit_tolerance,
                version=lambda: parts[0].proxy.policy_version,
                gate=room.source.gate,
            )
        )
        config = members[0].environment.config
        demand = _demand(members, store)
        staleness = Staleness(store, _most_staleness(settings.rollouts))
        elsewhere = RemoteEnvironments(
            store, demand, stretches=_most_staleness(settings.rollouts) is None
        )
        schedulers = await _schedulers(members, parts, store, demand, elsewhere)

        def publish(version: int) -> None:
            staleness.publish(version)
            for one in parts:
                one.publish_version(version)

        def version() -> int:
            return parts[0].proxy.policy_version

        metrics.watch(lag, health)
        for source in (
            numbers,
            Deliveries(store, version),
            EngineNumbers(room.engine, room.source.gate, version),
            PartsNumbers(parts),
        ):
            metrics.add(source.families)
        api = create_api(
            store,
            settings=settings.server,
            status=lambda: (
                _status(parts, schedulers, tally)
                | _flow(tally, staleness, demand)
                | {"audit": auditor.report()}
            ),
            on_policy_version=publish,
            gate=room.source.gate,
            metrics=metrics,
            health=health,
            include_messages=config.include_messages,
            score_range=config.score_range,
            retention=settings.retention,
            environments=elsewhere,
        )
        await doorway.open(api)
        lag.begin_anew()
        watching = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("health", health.watch()),
                ("stale-groups", staleness.run()),
                ("silent-runs", demand.close_silent_runs()),
            )
        ]
        try:
            _announce(console, settings.server.host, server.port, parts[0])
            ending = await run_until_stopped(
                _run_then_wait(schedulers, store, console.print),
                schedulers,
                console.print,
                on_stop=health.drain,
                drain_seconds=settings.server.drain_seconds,
            )
        finally:
            for watch in watching:
                watch.cancel()
            doorway.close()
            await server.close()
        waiting = await _waiting(store)
    if auditor.fraction:
        console.print(auditor.summary(), highlight=False, soft_wrap=True)
    # The address of a database may hold a password: it is not repeated.
    console.print(f"{counted(waiting, 'group')} kept in the store for trainers.", highlight=False)
    if ending != "overdue":
        return 0
    cut = schedulers.cut_off()
    _log.warning("drain_overdue", groups=cut, drain_seconds=settings.server.drain_seconds)
    console.print(
        f"Stopped after {settings.server.drain_seconds:g} s: "
        f"{counted(sum(cut.values()), 'group')} cancelled, to be made anew by the next start here.",
        highlight=False,
        soft_wrap=True,
    )
    return 1


@contextlib.asynccontextmanager
async def _machineries(
    members: Members, room: EngineRoom, observe: Callable[[str], Observer], health: Health
) -> AsyncIterator[list[Machinery]]:
    """What runs the rollouts of each."""
    async with contextlib.AsyncExitStack() as stack:
        parts = []
        for one in members:
            settings, config = one.line.settings, one.environment.config
            tokens = settings.tokens
            made = machinery(
                settings,
                one.environment,
                one.line.reference,
                observer=observe(one.environment.name),
                need_engine=False,
                actions=chosen(tokens.train, tokens.mask, tokens.drop),
                need_exact=True,
                drop_zero_variance=config.ensure_scores_are_not_same is not False,
                room=room,
                is_up=partial(_found, health, one.environment.name),
            )
            parts.append(await stack.enter_async_context(made))
        yield parts


def _loaded(members: Members) -> list[str]:
    """The parts that must be loaded for each environment, as health names them."""
    return [f"{part}:{one.environment.name}" for one in members for part in ("workers", "scorers")]


def _found(health: Health, environment: str, part: str) -> None:
    health.found(f"{part}:{environment}")


def _warn(event: GroupDropped, tally: Tally) -> None:
    _log.warning(
        "group_dropped",
        group_id=event.group_id,
        reason=event.reason,
        message=event.message,
        latest_failure=tally.latest_failure,
    )


def _demand(members: Members, store: Store) -> Demand:
    rollouts = members[0].line.settings.rollouts
    sizes = [
        min(one.line.settings.rollouts.min_group_size or size, size)
        for one in members
        if (size := one.environment.config.group_size)
    ]
    bounds = Bounds(
        most_groups=rollouts.max_queued_groups,
        most_batches=rollouts.max_batches_offpolicy,
        max_staleness=_most_staleness(rollouts),
    )
    return Demand(
        store,
        bounds,
        smallest_group=min(sizes),
        silent_run_seconds=rollouts.silent_run_seconds,
    )


def _most_staleness(rollouts: RolloutsConfig) -> int | None:
    """Of a group at its delivery; None: any."""
    return rollouts.max_staleness_at_delivery if rollouts.stale_groups == "drop" else None


async def _schedulers(
    members: Members,
    parts: list[Machinery],
    store: Store,
    demand: Demand,
    elsewhere: RemoteEnvironments,
) -> Several:
    """One for each; several of them take turns."""
    settings = members[0].line.settings
    made = {
        one.share.name: await store.count_with_prefix(id_prefix(one.environment)) for one in members
    }
    total = settings.total_groups
    turns = Turns(
        Shares(targets(one.share for one in members), made),
        room=settings.rollouts.max_concurrent,
        wanted=None if total is None else max(0, total - sum(made.values())),
    )
    schedulers = {}
    for one, machine in zip(members, parts, strict=True):
        config, name = one.environment.config, one.share.name
        sink = SharingSink(
            store,
            demand,
            elsewhere,
            share=one.share,
            prefix=id_prefix(one.environment),
            capacity=settings.rollouts.max_concurrent // config.group_size + 1,
        )
        steps = config.total_steps
        schedulers[name] = Scheduler(
            machine,
            tickets(one.environment, repeat=True),
            sink,
            wanted=None if steps is None else max(0, steps - made[name]),
            stop_on_failures=False,
            opened=sink.opened,
            lane=turns.lane(name) if len(members) > 1 or total is not None else None,
        )
    return Several(schedulers)


def _check_alike(members: Members) -> None:
    """
    Raises:
        ConfigError: groups of several environments would go to trainers in several forms.
    """
    configs = [one.environment.config for one in members]
    if len({(one.include_messages, one.score_range) for one in configs}) > 1:
        raise ConfigError(
            "The environments differ in include_messages or score_range.",
            hint="One server sends all groups in one form: set them under `env`.",
        )


def _announce(console: Console, host: str, port: int, parts: Machinery) -> None:
    console.print(
        f"Trainers: http://{host}:{port}\n"
        f"Model endpoint for other environments: {parts.proxy_url}/r/{parts.proxy.open_guest()}/v1",
        highlight=False,
        soft_wrap=True,
    )


def _flow(tally: Tally, staleness: Staleness, demand: Demand) -> dict[str, Any]:
    """What was too old or too late; part of the status."""
    return {
        "stale_rollouts": tally.failures[Stale.kind],
        "stale_groups": tally.drops["stale"] + staleness.dropped,
        "stragglers": tally.failures[Straggler.kind],
        "closed_silent_runs": dict(demand.closed_runs),
    }


def _status(all_parts: list[Machinery], schedulers: Several, tally: Tally) -> dict[str, Any]:
    """What `/v1/status` says of the environments beside what the store says."""
    parts = all_parts[0]
    several = {}
    if len(all_parts) > 1:
        workers = {one.environment.name: one.pool.snapshot() for one in all_parts}
        several = {"environments": schedulers.delivered(), "workers": workers}
    return {
        "environment": ",".join(one.environment.name for one in all_parts),
        "model": parts.model,
        "engine": parts.proxy.engine_described(),
        "policy_version": parts.proxy.policy_version,
        "open_groups": schedulers.open_groups,
        "groups_delivered": tally.groups,
        "groups_dropped": dict(tally.drops),
        "rollouts_scored": tally.rollouts,
        "rollouts_lost": tally.lost,
        "failed_attempts": dict(tally.failures),
        "flags": dict(tally.flags),
        "latest_failure": tally.latest_failure,
        "mean_reward": tally.rewards.mean,
        "completion_tokens": tally.completion_tokens,
        "seconds": tally.seconds,
        "workers": parts.pool.snapshot(),
        **several,
    }


async def _run_then_wait(schedulers: Several, store: Store, say: Callable[[str], object]) -> None:
    """Runs the schedulers; after the last group waits until trainers have all of them."""
    await schedulers.run(say)
    while not schedulers.drained:
        if not await _waiting(store):
            return
        await asyncio.sleep(POLL_SECONDS)


async def _waiting(store: Store) -> int:
    """Groups that no trainer has acknowledged."""
    counts = await store.counts()
    return counts["queued"] + counts["buffered"] + counts["leased"]
