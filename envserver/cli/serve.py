"""`envserver serve`: an environment's rollouts for trainers over HTTP, durable until acknowledged.

`run-api` is the same server without an environment of its own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog
from rich.console import Console

from ..api.app import create_api
from ..api.server import serve_api
from ..config import Settings
from ..environment import Environment
from ..rollouts.auditor import Auditor
from ..rollouts.events import Event, GroupDelivered, GroupDropped
from ..rollouts.group import Machinery
from ..rollouts.scheduler import Scheduler
from ..rollouts.stream import id_prefix, tickets
from ..store import Store, open_store
from ..store.sink import StoreSink
from ..tokens.flags import chosen
from .command_line import read_command_line
from .logs import configure_logs
from .loop import run_loop
from .metrics import ServeMetrics
from .progress import Tally, counted
from .runtime import machinery, run_until_stopped

SUMMARY = """Runs rollouts of one environment and offers the groups to trainers over HTTP.
SIGTERM or Ctrl-C once finishes the open groups and stops; twice stops at once."""

ALIASES = {"host": "server.host", "port": "server.port"}

POLL_SECONDS = 0.2

_log = structlog.get_logger("envserver.serve")


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        EnvserverError: it cannot be run.
    """
    line = read_command_line("serve", SUMMARY, argv, settings_class=Settings, aliases=ALIASES)
    if line is None:
        return 0
    configure_logs(line.settings.log_level)
    environment = line.make_environment()
    return run_loop(serve(line.reference, environment, line.settings, Console(stderr=True)))


async def serve(
    reference: str, environment: Environment, settings: Settings, console: Console
) -> int:
    """Serves until stopped, or until `env.total_steps` groups are made and delivered.

    Raises:
        ConfigError, StoreError, EngineError: see the parts.
    """
    actions = chosen(settings.tokens.train, settings.tokens.mask, settings.tokens.drop)
    tally = Tally()

    def observe(event: Event) -> None:
        tally(event)
        if isinstance(event, GroupDelivered):
            for trajectory in event.group.trajectories:
                auditor.offer(trajectory)
        elif isinstance(event, GroupDropped) and event.failed:
            _log.warning(
                "group_dropped",
                group_id=event.group_id,
                reason=event.reason,
                message=event.message,
                latest_failure=tally.latest_failure,
            )

    async with (
        open_store(settings.store) as store,
        machinery(
            settings,
            environment,
            reference,
            observer=observe,
            need_engine=False,
            actions=actions,
            need_exact=True,
            drop_zero_variance=environment.config.ensure_scores_are_not_same is not False,
        ) as parts,
        Auditor(
            parts.engine,
            settings.tokens.audit_fraction,
            settings.tokens.audit_tolerance,
            version=lambda: parts.proxy.policy_version,
            gate=parts.proxy.gate,
        ) as auditor,
    ):
        config = environment.config
        sink = StoreSink(
            store,
            group_size=config.group_size,
            most_groups=settings.rollouts.max_queued_groups,
            most_batches=settings.rollouts.max_batches_offpolicy,
        )
        made = await store.count_with_prefix(id_prefix(environment))
        scheduler = Scheduler(
            parts,
            tickets(environment, repeat=True),
            sink,
            wanted=None if config.total_steps is None else max(0, config.total_steps - made),
            stop_on_failures=False,
        )
        api = create_api(
            store,
            settings=settings.server,
            status=lambda: _status(parts, scheduler, tally) | {"audit": auditor.report()},
            on_policy_version=parts.proxy.publish_version,
            gate=parts.proxy.gate,
            metrics=ServeMetrics(tally, parts.proxy),
            include_messages=config.include_messages,
            score_range=config.score_range,
        )
        server = await serve_api(api, settings.server.host, settings.server.port)
        try:
            _announce(console, settings.server.host, server.port, parts)
            work = _run_then_wait(scheduler, store)
            await run_until_stopped(work, scheduler, console.print)
        finally:
            await server.close()
        waiting = await _waiting(store)
    if auditor.fraction:
        console.print(auditor.summary(), highlight=False, soft_wrap=True)
    # The address of a database may hold a password: it is not repeated.
    console.print(f"{counted(waiting, 'group')} kept in the store for trainers.", highlight=False)
    return 0


def _announce(console: Console, host: str, port: int, parts: Machinery) -> None:
    console.print(
        f"Trainers: http://{host}:{port}\n"
        f"Model endpoint for other environments: {parts.proxy_url}/r/{parts.proxy.open_guest()}/v1",
        highlight=False,
        soft_wrap=True,
    )


def _status(parts: Machinery, scheduler: Scheduler, tally: Tally) -> dict[str, Any]:
    """What `/v1/status` says of the environment beside what the store says."""
    return {
        "environment": parts.environment.name,
        "model": parts.model,
        "engine": parts.proxy.engine_described(),
        "policy_version": parts.proxy.policy_version,
        "open_groups": scheduler.open_groups,
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
    }


async def _run_then_wait(scheduler: Scheduler, store: Store) -> None:
    """Runs the scheduler; after its last group waits until trainers have all of them."""
    await scheduler.run()
    while not scheduler.drained:
        if not await _waiting(store):
            return
        await asyncio.sleep(POLL_SECONDS)


async def _waiting(store: Store) -> int:
    """Groups that no trainer has acknowledged."""
    counts = await store.counts()
    return counts["queued"] + counts["buffered"] + counts["leased"]
