"""Starts what `serve` needs for its environments: workers, scorers, schedulers, metrics."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from envserver_records.errors import Stale, Straggler

from ..http.health import Health, engine_probe
from ..models.engine import PlayedEngine
from ..rollouts.audit import Auditor
from ..rollouts.episodes import Episodes
from ..rollouts.events import Event, GroupDelivered
from ..rollouts.group import RolloutContext, running_rollouts
from ..rollouts.ordered import Orders
from ..rollouts.scheduler import Scheduler, lanes, still_wanted
from ..rollouts.stream import id_prefix
from ..rollouts.task_stream import TaskStream
from ..runners.news import LocalEnvironmentSink
from ..settings.config import MixSettings, SandboxConfig
from ..store import UNKNOWN_VERSION, Store
from ..store.demand import StoreOrderSink
from ..telemetry.measures import Reading, of_each
from ..trainers.live import EngineSource
from .api_serving import Delivery
from .bootstrap import BootstrapServer
from .context import SharedEngine, rollout_context, shared_engine
from .held_out import Evaluations
from .judging import judge_numbers
from .metrics import (
    Deliveries,
    Tally,
    all_of,
    curriculum_numbers,
    engine_numbers,
    parts_numbers,
    warn_of_dropped,
)
from .mix import Member, Several, curriculum_of_store, stream_of
from .stopping import beside
from .tracking import Tracking

if TYPE_CHECKING:
    from ..sandbox.machines import Machine


async def evaluation_numbers(evaluations: Evaluations) -> Reading:
    latest = evaluations.latest
    results = {} if latest is None else latest.results
    return {
        "evaluation": {
            (environment, measure): value
            for name, value in results.items()
            for environment, _, measure in [name.removeprefix("evaluate/").rpartition("/")]
        },
        "evaluation_policy_version": -1 if latest is None else latest.version,
        "evaluation_other_versions": 0 if latest is None else latest.other_versions,
        "evaluation_running": evaluations.busy,
        "evaluations": evaluations.ends,
    }


async def machine_numbers(machines: Sequence[Machine]) -> Reading:
    loads = {
        machine.url: machine.load
        for machine in machines
        if machine.load is not None and not machine.problem
    }
    return {
        "sandbox_machine_up": {machine.url: not machine.problem for machine in machines},
        "sandbox_machine_own": {machine.url: machine.open for machine in machines},
        **of_each(
            loads,
            sandbox_machine_places=lambda load: load.sandboxes,
            sandbox_machine_open=lambda load: load.open,
            sandbox_machine_waiting=lambda load: load.waiting,
        ),
        "sandbox_machine_events": {
            (machine.url, event): n for machine in machines for event, n in machine.counts.items()
        },
    }


def _machines(config: SandboxConfig) -> Sequence[Machine]:
    if not config.remote_urls:
        return ()
    from ..sandbox.machines import machines_at

    return machines_at(config.remote_urls)


Members = list[Member[MixSettings]]

_log = structlog.get_logger("envserver.serve")


class Hosted(msgspec.Struct, frozen=True):
    room: SharedEngine
    parts: list[RolloutContext]
    auditor: Auditor
    delivery: Delivery
    schedulers: Several
    orders: Orders
    episodes: Episodes
    evaluations: Evaluations
    tally: Tally

    @property
    def version(self) -> int:
        return self.room.endpoint.policy_version

    def publish(self, version: int) -> None:
        self.delivery.publish(version)
        for part in self.parts:
            part.publish_version(version)
        self.evaluations.published(version)

    def status(self) -> dict[str, Any]:
        tally, first = self.tally, self.parts[0]
        parts = {part.environment.name: part for part in self.parts}
        equal = tally.drops["zero_variance"]
        scored = tally.groups + equal + tally.drops["too_long"] + tally.drops["stale"]
        return {
            "environment": ",".join(parts),
            "model": first.model,
            "engine": first.proxy.engine_described(),
            "policy_version": self.version,
            "open_groups": self.schedulers.open_groups,
            "groups_delivered": tally.groups,
            "groups_dropped": dict(tally.drops),
            "rollouts_scored": tally.rollouts,
            "rollouts_lost": tally.lost,
            "failed_attempts": dict(tally.failures),
            "flags": dict(tally.flags),
            "untrained": {name: part.ceiling.report() for name, part in parts.items()},
            "latest_failure": tally.latest_failure,
            "mean_reward": tally.rewards.mean,
            "completion_tokens": tally.completion_tokens,
            "seconds": tally.seconds,
            "workers": {name: part.pool.snapshot() for name, part in parts.items()},
            **({"environments": self.schedulers.delivered()} if len(parts) > 1 else {}),
            "stale_rollouts": tally.failures[Stale.kind],
            "stale_groups": tally.drops["stale"] + self.delivery.staleness.dropped,
            "stragglers": tally.failures[Straggler.kind],
            **self.delivery.status(),
            "audit": self.auditor.report(),
            "ordered": self.orders.snapshot(),
            "teaching": {
                "scored_groups": scored,
                "delivered_groups": tally.groups,
                "equal_groups_dropped": equal,
                "scored_per_delivered": round(scored / tally.groups, 4) if tally.groups else None,
            },
            "open_episodes": self.episodes.open,
        }


@contextlib.asynccontextmanager
async def hosted(
    members: Members, server: BootstrapServer, tracked: Tracking | None = None
) -> AsyncIterator[Hosted]:
    settings = members[0].settings
    tally = Tally()
    async with contextlib.AsyncExitStack() as stack:
        room = await stack.enter_async_context(
            shared_engine(settings, need_engine=False, need_exact=True)
        )
        server.health.found("engine", engine_probe(room.engine))

        def version() -> int:
            return room.endpoint.policy_version

        auditor = Auditor(
            room.engine,
            settings.tokens.audit_fraction,
            settings.tokens.audit_tolerance,
            version=version,
            gate=room.endpoint.gate,
        )
        curricula: dict[str, TaskStream] = {}
        for member in members:
            curriculum = await curriculum_of_store(
                member.environment, member.settings.curriculum, server.store, version
            )
            if curriculum is not None:
                curricula[member.environment.name] = curriculum
        if tracked is not None:
            tracked.link(f"{server.url}/#/groups/")
        players = PlayedEngine()
        parts = []
        for member in members:
            name, config = member.environment.name, member.environment.config
            observer = all_of(
                tally.observer(name),
                server.live.failures.observer(name),
                curricula[name].observe if name in curricula else None,
                partial(_audit, auditor),
                warn_of_dropped(tally, _log),
                None if tracked is None else tracked.observer(name),
            )
            context = rollout_context(
                member.settings,
                member.environment,
                member.spec.reference,
                observer=observer,
                need_engine=False,
                need_exact=True,
                drop_zero_variance=config.ensure_scores_are_not_same is not False,
                for_training=True,
                shared=room,
                played=players,
                is_up=partial(_found, server.health, name),
            )
            parts.append(await stack.enter_async_context(context))
        await stack.enter_async_context(auditor)
        delivery = Delivery(
            server.store,
            settings.rollouts,
            settings.server,
            smallest_group=min(part.rules.least for part in parts),
        )
        orders = await stack.enter_async_context(Orders(parts, StoreOrderSink(server.store)))
        episodes = Episodes(parts, players, orders.book, settings.server.openenv_sessions)
        host = Hosted(
            room=room,
            parts=parts,
            auditor=auditor,
            delivery=delivery,
            schedulers=await _schedulers(
                members, parts, server.store, delivery, curricula, tracked
            ),
            orders=orders,
            episodes=await stack.enter_async_context(episodes),
            evaluations=Evaluations(members, server.store, room, tracked),
            tally=tally,
        )
        server.metrics.add(
            tally.read,
            Deliveries(server.store, version).read,
            partial(engine_numbers, room.engine, room.endpoint.gate, version),
            partial(parts_numbers, parts),
            partial(machine_numbers, _machines(settings.sandbox)),
            partial(curriculum_numbers, curricula),
            partial(judge_numbers, room.judge),
            partial(evaluation_numbers, host.evaluations),
        )
        server.live.engines += _engines(host)
        server.live.running = partial(running_rollouts, parts)
        await stack.enter_async_context(delivery.in_order())
        await stack.enter_async_context(beside("evaluations", host.evaluations.run()))
        yield host


def _engines(host: Hosted) -> list[EngineSource]:
    room = host.room
    found = {id(room.engine): EngineSource("", room.engine, room.model, lambda: host.version)}
    for part in host.parts:
        for agent, endpoint in part.proxy.own_endpoints.items():
            route = part.agents[agent]
            version = (lambda: host.version) if route.follows_policy else _no_version
            source = EngineSource(agent, endpoint.engine, route.model, version)
            found.setdefault(id(endpoint.engine), source)
    return list(found.values())


def _no_version() -> int:
    return UNKNOWN_VERSION


def _audit(auditor: Auditor, event: Event) -> None:
    if isinstance(event, GroupDelivered):
        for trajectory in event.group.trajectories:
            auditor.offer(trajectory)


def _found(health: Health, environment: str, part: str) -> None:
    health.found(f"{part}:{environment}")


async def _schedulers(
    members: Members,
    parts: list[RolloutContext],
    store: Store,
    delivery: Delivery,
    curricula: Mapping[str, TaskStream],
    tracked: Tracking | None,
) -> Several:
    settings = members[0].settings
    made = {
        member.share.name: await store.count_with_prefix(id_prefix(member.environment))
        for member in members
    }
    if tracked is not None:
        tracked.already = sum(made.values())
    lane = lanes(
        [member.share for member in members],
        made,
        room=settings.rollouts.max_concurrent,
        total=settings.total_groups,
    )
    schedulers = {}
    for member, machine in zip(members, parts, strict=True):
        config, name = member.environment.config, member.share.name
        sink = LocalEnvironmentSink(
            store,
            delivery.demand,
            delivery.runners.news,
            share=member.share,
            prefix=id_prefix(member.environment),
            capacity=settings.rollouts.max_concurrent // config.group_size + 1,
        )
        schedulers[name] = Scheduler(
            machine,
            stream_of(member.environment, curricula.get(name), repeat=True),
            sink,
            wanted=still_wanted(config.total_steps, made[name]),
            stop_on_failures=False,
            opened=sink.opened,
            counted=sink.dropped,
            lane=lane[name],
        )
    return Several(schedulers)
