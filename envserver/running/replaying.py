"""The work of `envserver replay`: runs a recorded rollout again and compares it with its record.
A player answers from the record (`rollouts.replaying`) and ends the rollout at the first
difference. Programs in sandboxes run again; services answer from the record if it has that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_origin

import msgspec
import orjson
import structlog
from envserver_records.errors import InputError, NotFoundError, RolloutError
from envserver_records.records import Score, ServiceCall, Task

from ..environment import Environment
from ..export.stored import StoredGroup, StoredRollout, read_groups
from ..proxy.attempts import routing_key
from ..registry import known_names
from ..rollouts.attempt import Finished
from ..rollouts.group import RolloutContext, run_once
from ..rollouts.provenance import WHERE_ONLY
from ..rollouts.replaying import (
    Difference,
    Exchange,
    Player,
    RecordedServices,
    agents_of,
    calls_from,
    calls_in,
    recorded_calls,
    service_calls_in,
)
from ..rollouts.scoring import score_once
from ..rollouts.stream import GroupRequest
from ..settings.section import EnvironmentConfig
from ..tokens.builder import trained_ids
from ..workers.debugging import DebugPool
from .context import played_context
from .judging import beside_source, folder_of, judge_of
from .mix import RunSpec
from .run_settings import ReplaySettings
from .scoring import TaskFinder

_log = structlog.get_logger("envserver.replay")

_NAMES_SHOWN = 8
_ROUNDING = 1e-9
_CLOCKS = {"timestamp", "run_id", "ts", "started_at", "ended_at", "seconds", "elapsed_seconds"}
"""Keys whose values in results are clock times, which differ in every run."""


@dataclass(frozen=True)
class Record:
    """A rollout as it was delivered.

    Args:
        source: what it was read from, the first of several; place: its group's in there.
        facts: the value of "envserver" in the group's line.
        kept: its calls were kept (`tokens.keep_calls`), so they need not be reconstructed.
    """

    source: str
    place: str
    facts: dict[str, Any]
    sampling: dict[str, Any]
    rollout: StoredRollout
    raw: dict[str, Any]
    exchanges: list[Exchange]
    services: list[ServiceCall]
    kept: bool

    @property
    def exact(self) -> bool:
        answers = [call for exchange in self.exchanges for call in exchange.answers]
        return self.kept and all(call.exact for call in answers)


@dataclass(frozen=True)
class Fact:
    name: str
    then: Any
    now: Any

    @property
    def same(self) -> bool:
        return not self.places

    @property
    def places(self) -> list[str]:
        return list(_differing(self.then, self.now, "$"))


@dataclass
class Replayed:
    """The result of a replay.

    Args:
        played, left: recorded calls that were answered, and that the agent did not make this time.
        difference: the first difference in the agent's behaviour; None: there is none.
        failure: why there is no result.
    """

    played: int
    left: int
    difference: Difference | None = None
    failure: str = ""
    facts: list[Fact] = field(default_factory=list)

    @property
    def same(self) -> bool:
        done = not (self.difference or self.failure or self.left)
        return done and all(fact.same for fact in self.facts)


def read_record(sources: Sequence[str], rollout_id: str) -> Record:
    seen: list[str] = []
    for group in read_groups(sources):
        for rollout, raw in zip(group.rollouts, group.line["envserver"]["rollouts"], strict=True):
            if rollout.rollout_id == rollout_id:
                return _record(sources[0], group, rollout, raw)
            if len(seen) < _NAMES_SHOWN:
                seen.append(rollout.rollout_id)
    raise NotFoundError(
        f"There is no rollout {rollout_id!r} in {', '.join(sources)}.",
        hint=f"There are: {', '.join(seen)} ..." if seen else "There are no rollouts at all.",
    )


def _record(source: str, group: StoredGroup, rollout: StoredRollout, raw: dict[str, Any]) -> Record:
    facts, place = group.line["envserver"], group.place
    sampling = group.line.get("generation_params") or {}
    agents = agents_of(raw, facts)
    kept = bool(raw.get("calls"))
    try:
        if kept:
            exchanges = recorded_calls(calls_in(raw), rollout.rollout_id, agents)
        else:
            exchanges = _exchanges(rollout, agents, _none_trained(facts))
        services = service_calls_in(raw)
    except InputError as error:
        raise InputError(
            f"{place}, rollout {rollout.rollout_id}: {error.message}", hint=error.hint, place=place
        ) from error
    return Record(source, place, facts, sampling, rollout, raw, exchanges, services, kept)


def _exchanges(rollout: StoredRollout, agents: list[str], all_count: bool) -> list[Exchange]:
    others = rollout.others
    counted = [other for other in others if all_count or other.get("trained")]
    turns = rollout.turns - sum(other.get("turns") or 0 for other in counted)
    named = {other.get("agent") for other in others}
    main = next((agent for agent in agents if agent not in named), None)
    if rollout.turns and not rollout.messages:
        raise InputError(
            "Its conversation was not written.", hint="See --env.include_messages of `process`."
        )
    line = routing_key(rollout.rollout_id, main)
    exchanges = calls_from(rollout.messages, turns, line)
    for other in others:
        agent = other.get("agent")
        line = routing_key(rollout.rollout_id, agent if agent in agents else None)
        exchanges += calls_from(other.get("messages") or [], other.get("turns") or 0, line)
    return exchanges


def _none_trained(facts: dict[str, Any]) -> bool:
    agents = (facts.get("rendering") or {}).get("agents") or {}
    return bool(agents) and not any(agent.get("trained", True) for agent in agents.values())


def recorded_environment(record: Record) -> str:
    name, installed = record.rollout.env, known_names()
    for spelled in (name, name.replace("-", "_")):
        if spelled in installed:
            return spelled
    raise NotFoundError(
        f"{record.place}: no environment {name!r} is installed here.",
        hint="Name it with --env: paths in records are not followed.",
    )


def recorded_settings(record: Record, config: type[EnvironmentConfig]) -> dict[str, Any]:
    """Returns those that can name no code, file or address: numbers, switches, and text that is one
    of the choices of its field."""
    fields = config.model_fields
    taken = {
        name: value
        for name, value in _env_config(record).items()
        if name in fields and _is_plain(value, _choices(fields[name].annotation))
    }
    taken |= {"split": record.rollout.split, "seed": record.rollout.seed}
    known = {"temperature", "top_p", "max_tokens"}
    sampling = {key: value for key, value in record.sampling.items() if key in known}
    return {"env": taken, "sampling": sampling}


def _env_config(record: Record) -> dict[str, Any]:
    config = record.facts.get("env_config") if record.kept else None
    return config if isinstance(config, dict) else {}


def _choices(annotation: Any) -> Set[Any]:
    parts = get_args(annotation)
    return set(parts) if get_origin(annotation) is Literal else set().union(*map(_choices, parts))


def _is_plain(value: Any, choices: Set[Any]) -> bool:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, list):
        return all(_is_plain(part, choices) for part in value)
    return not isinstance(value, str) or value in choices


def _warn_of_settings(record: Record, environment: Environment) -> None:
    now = environment.config.model_dump(mode="json", exclude=WHERE_ONLY)
    then = _env_config(record)
    unlike = [f"env.{name}" for name in now if name in then and then[name] != now[name]]
    if unlike:
        hint = "text in a record is not used; give it on the command line"
        _log.warning("settings_differ_from_record", settings=unlike, hint=hint)


async def replay(record: Record, spec: RunSpec[ReplaySettings], *, debug: bool = False) -> Replayed:
    settings, make = spec.settings, spec.make_environment
    environment = make() if debug else await asyncio.to_thread(make)
    _warn_of_settings(record, environment)
    model = str(record.facts.get("model") or "replay")
    player = Player(record.exchanges, model=model, exact=record.exact)
    live = settings.services == "live" or (settings.services == "auto" and not record.kept)
    if not live:
        recorded = RecordedServices(record.services, player)
        environment.services = lambda: contextlib.nullcontext(recorded)  # type: ignore[method-assign]
    otherwise = folder_of(settings.store)
    async with (
        judge_of(settings.judge, beside_source([record.source], otherwise)) as judge,
        played_context(
            settings, environment, spec.reference, player, model, judge, unconstrained=True
        ) as parts,
    ):
        facts = record.facts
        finder = TaskFinder(environment, split=facts["split"], seed=facts["seed"])
        task = await finder.find(facts["task_id"])
        if debug:
            parts = msgspec.structs.replace(parts, pool=DebugPool())
        return await _played(record, parts, task, player)


async def _played(record: Record, parts: RolloutContext, task: Task, player: Player) -> Replayed:
    facts, rollout = record.facts, record.rollout
    request = GroupRequest(
        group_id=facts["group_id"],
        index=facts["index"],
        env=facts["env"],
        split=facts["split"],
        seed=facts["seed"],
        task=task,
    )
    compared: list[Fact] = []
    failure = ""
    try:
        finished = await run_once(parts, request, rollout.rollout_id, rollout.attempt)
        if player.difference is None:
            score = await _scored(parts, task, rollout, finished)
            compared = list(_facts(record, finished, score))
    except RolloutError as error:
        failure = str(error)
    return Replayed(player.played, player.left, player.difference, failure, compared)


async def _scored(
    parts: RolloutContext, task: Task, rollout: StoredRollout, finished: Finished
) -> Score:
    if parts.scorer.needs_token_ids and finished.result.completion_ids is None:
        finished.result.completion_ids = trained_ids(rollout.rows)  # the record has them
    try:
        return parts.scorer.delivered(await score_once(parts.scorer, task, finished.result))
    except RolloutError as error:
        error.message = f"It cannot be scored: {error.message}"
        raise


def _facts(record: Record, finished: Finished, score: Score) -> Iterator[Fact]:
    then, result = record.rollout, finished.result
    yield Fact("output", then.output, _plain(result.output))
    yield Fact("limit", then.limit, result.limit)
    yield Fact("turns", then.turns, result.turns)
    if record.kept:
        yield Fact("finish_reason", then.finish_reason, result.finish_reason)
        if then.messages:
            yield Fact("messages", then.messages, _plain(result.messages))
    if record.exact:
        now = [[row.tokens.tolist(), row.mask.tolist()] for row in finished.trajectory.sequences]
        rows = [[row.tokens.tolist(), [int(bit) for bit in row.mask]] for row in then.rows]
        yield Fact("training rows", rows, now)
    before = record.raw.get("rescored_from") or record.raw
    yield Fact("reward", before.get("reward"), score.reward)
    yield Fact("components", before.get("components") or {}, score.components)


def _differing(then: Any, now: Any, place: str) -> Iterator[str]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            if key not in _CLOCKS:
                yield from _differing(then.get(key), now.get(key), f"{place}.{key}")
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        for at, (a, b) in enumerate(zip(then, now, strict=True)):
            yield from _differing(a, b, f"{place}[{at}]")
    elif isinstance(then, float) and isinstance(now, float | int):
        if abs(then - now) >= _ROUNDING:
            yield place
    elif then != now:
        yield place


def _plain(value: Any) -> Any:
    return orjson.loads(orjson.dumps(value, default=str))
