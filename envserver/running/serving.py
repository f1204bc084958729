"""The work of `envserver serve`: makes groups and keeps them until trainers acknowledge them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog
from envserver_records.errors import ConfigError
from envserver_records.records import Group
from envserver_records.sampling import LogprobsKind
from fastapi import FastAPI

from ..api.app import create_api
from ..environment import Environment
from ..rollouts.agents import check_sampling, temperatures
from ..settings.config import MixSettings, SamplingConfig
from ..telemetry.alarm_facts import AlarmFacts
from ..telemetry.alarms import AlarmBook
from ..telemetry.history import Name, numbers_of
from ..trainers.status import AlarmWatch
from .bootstrap import BootstrapServer, bootstrap_server
from .hosting import Hosted, Members, hosted
from .judging import judge_line
from .mix import Several
from .stopping import Ending, Stop, Stoppable, run_until_stopped
from .tracking import tracking

POLL_SECONDS = 0.2

_log = structlog.get_logger("envserver.serve")


@dataclass(frozen=True)
class Served:
    """How a server ended.

    Args:
        ending: "done": all wanted groups were made and acknowledged; "stopped"; "overdue": stopped,
            and open groups were cancelled after `server.drain_seconds`.
        waiting: groups in the store that no trainer has acknowledged.
        cut_off: cancelled groups of each environment; the next start makes them again.
    """

    ending: Ending
    waiting: int
    cut_off: dict[str, int]
    audit: str
    judge: str


class ServingBase:
    """A server that makes groups until it is stopped."""

    def __init__(self, settings: MixSettings, server: BootstrapServer, alarms: AlarmBook) -> None:
        self.url = server.url
        self.model_url = self.runner_url = ""
        self._settings = settings
        self._server = server
        self._alarms = alarms

    async def numbers(self) -> dict[Name, float]:
        return numbers_of(await self._server.metrics.families())

    def latest_group(self) -> Group | None:
        return None

    def alarms(self) -> list[str]:
        return [alarm.text for alarm in self._alarms.active]

    async def _stopped(
        self, work: Coroutine[Any, Any, None], scheduler: Stoppable, stop: Stop
    ) -> Ending:
        return await run_until_stopped(
            work,
            scheduler,
            stop,
            on_stop=self._server.health.drain,
            drain_seconds=self._settings.server.drain_seconds,
        )

    async def _waiting(self) -> int:
        counts = await self._server.store.counts()
        return counts["queued"] + counts["buffered"] + counts["leased"]


class Serving(ServingBase):
    def __init__(
        self, settings: MixSettings, server: BootstrapServer, host: Hosted, alarms: AlarmBook
    ) -> None:
        super().__init__(settings, server, alarms)
        context = host.parts[0]
        self.model_url = f"{context.proxy_url}/r/{context.proxy.open_unrecorded()}/v1"
        """Endpoint of the model, with recording, for remote environments."""
        self._host = host

    def latest_group(self) -> Group | None:
        return self._host.tally.latest_group

    async def run(self, stop: Stop, say: Callable[[str], object]) -> Served:
        """Makes groups until asked to stop, or until all wanted groups are made and delivered."""
        schedulers = self._host.schedulers
        try:
            ending = await self._stopped(self._run_then_wait(say), schedulers, stop)
        finally:
            await self._server.close()
        cut_off = schedulers.cut_off()
        if ending == "overdue":
            seconds = self._settings.server.drain_seconds
            _log.warning("drain_overdue", groups=cut_off, drain_seconds=seconds)
        auditor = self._host.auditor
        audit = auditor.summary() if auditor.fraction else ""
        engine = self._host.room.judge
        judge = judge_line(engine) if engine is not None else ""
        return Served(ending, await self._waiting(), cut_off, audit, judge)

    async def _run_then_wait(self, say: Callable[[str], object]) -> None:
        schedulers: Several = self._host.schedulers
        evaluations = self._host.evaluations
        await schedulers.run(say)
        while not schedulers.drained and (evaluations.busy or await self._waiting()):
            await asyncio.sleep(POLL_SECONDS)


@contextlib.asynccontextmanager
async def serving(members: Members) -> AsyncIterator[Serving]:
    settings = members[0].spec.settings
    check_alike(members)
    names = [member.share.name for member in members]
    loaded = (f"{part}:{name}" for name in names for part in ("workers", "scorers"))
    async with (
        bootstrap_server(
            settings.server,
            settings.telemetry,
            settings.store,
            ["engine", *loaded],
            shared=settings.store_shared,
        ) as opened,
        tracking(
            settings.track, settings.tracking, settings, command="serve", environments=names
        ) as tracked,
        hosted(members, opened, tracked) as host,
    ):
        watch = AlarmWatch(settings.alarms, partial(_alarm_facts, opened, host, settings.store))
        await opened.open(_api(members, opened, host, watch))
        for member in members:
            kind = host.room.endpoint.logprobs_kind
            warn_of_raw_logprobs(member.environment, settings.sampling, kind)
        yield Serving(settings, opened, host, watch.book)


def _alarm_facts(server: BootstrapServer, host: Hosted, store: str) -> AlarmFacts:
    ranges = {part.environment.name: part.scorer.rules.range for part in host.parts}
    audit = host.auditor.report()
    described = [part.proxy.engine_described() for part in host.parts]
    return msgspec.structs.replace(
        server.alarm_facts(host.delivery.demand, store),
        reward_ranges={name: (bounds.low, bounds.high) for name, bounds in ranges.items()},
        last_words=dict(host.tally.last_words),
        differs_at=next((facts["differs_at"] for facts in described if "differs_at" in facts), ""),
        audited=audit["rows"],
        differing=audit["rows_over_tolerance"],
    )


def _api(members: Members, server: BootstrapServer, host: Hosted, alarms: AlarmWatch) -> FastAPI:
    settings, config = members[0].spec.settings, members[0].environment.config
    return create_api(
        server.store,
        settings=settings.server,
        status=lambda: host.status() | server.facts(),
        on_policy_version=host.publish,
        gate=host.room.endpoint.gate,
        metrics=server.metrics,
        health=server.health,
        include_messages=config.include_messages,
        score_range=config.score_range,
        longest_row=max(member.environment.config.max_token_length for member in members),
        retention=settings.retention,
        runners=host.delivery.runners,
        orders=host.orders,
        episodes=host.episodes,
        alarms=alarms,
        live=server.live,
        fleet=host.room.fleet,
        evaluations=host.evaluations,
    )


def warn_of_raw_logprobs(
    environment: Environment, sampling: SamplingConfig, kind: LogprobsKind
) -> None:
    if kind != "raw":
        return
    for setting, temperature in temperatures(environment, sampling).items():
        if temperature != 1:
            _log.warning(
                "raw_logprobs",
                setting=setting,
                temperature=temperature,
                why="The engine's logprobs are from before the temperature, so trainers refuse "
                "these rows; envserver_clients.grpo learns from those of its own version only.",
                hint="Start the engine with --logprobs-mode processed_logprobs, or set the "
                "temperature to 1.",
            )


def check_alike(members: Members) -> None:
    configs = [member.environment.config for member in members]
    if len({(config.include_messages, config.score_range) for config in configs}) > 1:
        raise ConfigError(
            "The environments differ in include_messages or score_range.",
            hint="One server sends all groups in one form: set them under `env`.",
        )
    for member in members:
        check_sampling(member.environment, members[0].spec.settings.sampling)
