"""`envserver serve`: rollouts of environments for trainers, durable until acknowledged.

`run-api` is the same server without an environment of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog
from envserver_records.errors import ConfigError
from fastapi import FastAPI
from rich.console import Console

from ..api.app import create_api
from ..config import MixSettings
from ..rollouts.group import RolloutContext
from ..rollouts.mixing import Share
from ..running.bootstrap import Front, front
from ..running.hosting import Hosted, Members, hosted, loaded_parts
from ..running.mix import Member, Several
from ..running.stopping import run_until_stopped
from ..running.tally import counted
from ..store import Store
from .command_line import FREQUENT, CommandSpec, read_run_spec
from .logs import configure_logs
from .loop import run_loop
from .mixing import read_mix

SUMMARY = """Runs rollouts of an environment, or of several, and offers the groups to trainers.
SIGTERM or Ctrl-C once finishes the open groups and stops; twice stops at once."""


POLL_SECONDS = 0.2

_log = structlog.get_logger("envserver.serve")


COMMAND = CommandSpec(
    "serve",
    SUMMARY,
    MixSettings,
    usage="--env NAME[=WEIGHT,NAME=WEIGHT]",
    frequent=(
        *FREQUENT,
        "server.port",
        "server.host",
        "server.tokens_file",
        "store",
        "rollouts.max_staleness",
    ),
)


def run(argv: list[str]) -> int:
    """The command.

    Raises:
        EnvserverError: it cannot be run.
    """
    members = read_mix(COMMAND, argv)
    if members is None:
        line = read_run_spec(COMMAND, argv)
        if line is None:
            return 0
        environment = line.make_environment()
        members = [Member(line, environment, Share(environment.name))]
    settings = members[0].spec.settings
    configure_logs(settings.log_level, settings.log_format)
    return run_loop(serve(members, Console(stderr=True)))


async def serve(members: Members, console: Console) -> int:
    """Serves until stopped, or until as many groups as wanted are made and delivered.

    Returns:
        The exit status: 1 when groups had to be cancelled at the end, else 0.

    Raises:
        ConfigError, StoreError, EngineError: see the parts.
    """
    settings = members[0].spec.settings
    _check_alike(members)
    expected = ["engine", *loaded_parts(members)]
    async with (
        front(settings.server, settings.telemetry, settings.store, expected) as door,
        hosted(members, door) as host,
    ):
        await door.open(_api(members, door, host))
        try:
            _announce(console, door.url, host.parts[0])
            ending = await run_until_stopped(
                _run_then_wait(host.schedulers, door.store, console.print),
                host.schedulers,
                console.print,
                on_stop=door.health.drain,
                drain_seconds=settings.server.drain_seconds,
            )
        finally:
            await door.close()
        waiting = await _waiting(door.store)
    if host.auditor.fraction:
        console.print(host.auditor.summary(), highlight=False, soft_wrap=True)
    # The address of a database may hold a password: it is not repeated.
    console.print(f"{counted(waiting, 'group')} kept in the store for trainers.", highlight=False)
    if ending == "overdue":
        _say_overdue(console, settings.server.drain_seconds, host.schedulers.cut_off())
    return int(ending == "overdue")


def _api(members: Members, door: Front, host: Hosted) -> FastAPI:
    settings, config = members[0].spec.settings, members[0].environment.config
    return create_api(
        door.store,
        settings=settings.server,
        status=host.status,
        on_policy_version=host.publish,
        gate=host.room.endpoint.gate,
        metrics=door.metrics,
        health=door.health,
        include_messages=config.include_messages,
        score_range=config.score_range,
        retention=settings.retention,
        runners=host.elsewhere,
        orders=host.orders,
    )


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


def _announce(console: Console, url: str, parts: RolloutContext) -> None:
    console.print(
        f"Trainers: {url}\n"
        f"Model endpoint for other environments: {parts.proxy_url}/r/{parts.proxy.open_guest()}/v1",
        highlight=False,
        soft_wrap=True,
    )


def _say_overdue(console: Console, seconds: float, cut_off: dict[str, int]) -> None:
    _log.warning("drain_overdue", groups=cut_off, drain_seconds=seconds)
    console.print(
        f"Stopped after {seconds:g} s: {counted(sum(cut_off.values()), 'group')} cancelled, "
        "to be made anew by the next start here.",
        highlight=False,
        soft_wrap=True,
    )


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
