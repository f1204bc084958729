"""Episodes: rollouts whose model is an external client, one turn after the other.

An episode that is closed or fails frees all that it held. A failure that is not the client's is
raised, and never a reward.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

import msgspec
from envserver_records.errors import (
    ConfigError,
    ConflictError,
    InputError,
    NotFoundError,
    Unscorable,
    UsageError,
)
from envserver_records.records import Message, Split, Task
from envserver_records.tasks import TurnReward

from ..environment import Environment
from ..models.engine import Asked, PlayedEngine
from ..proxy.attempts import AgentRoute, AttemptSpec
from ..proxy.server import PLAYED
from .attempt import StalenessMonitor, run_attempt
from .group import RolloutContext, attempt_spec
from .ordered import TaskIndex
from .scoring import score_once

LONGEST_SECONDS: Final = 3600.0
"""Seconds that an episode may take at least, whatever the environment's `worker_timeout`."""
_SEEDED_TASKS: Final = 1000
"""A seed chooses among the first so many tasks of a split."""


class EpisodesFull(UsageError):
    """As many episodes are in progress as there may be."""

    kind, status = "episodes_full", 429


class Outcome(msgspec.Struct, frozen=True):
    """The end of an episode.

    Args:
        reward: of the main agent.
        rewards: by agent, if the environment declares agents.
        turns: rewards of single turns, which `reward` includes.
        limit: the limit that ended it; None: the agent ended by itself.
    """

    reward: float
    rewards: dict[str, float]
    turns: list[TurnReward]
    components: dict[str, float]
    limit: str | None


class _Request:
    def __init__(self, question: Asked) -> None:
        self.question = question
        self.answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()


@dataclass(eq=False, repr=False)
class Episode:
    """One rollout; made by `Episodes.begin`."""

    context: RolloutContext
    engine: PlayedEngine
    task: Task
    agent: str | None

    def __post_init__(self) -> None:
        self.id = f"episode-{uuid.uuid4().hex[:16]}"
        self.task_id = self.task.id
        self._asked: asyncio.Queue[_Request | None] = asyncio.Queue()
        """None: it is over."""
        self._latest: _Request | None = None
        self.work = asyncio.create_task(self._run(), name=self.id)
        self.work.add_done_callback(self._over)

    async def next(self) -> Asked | Outcome:
        while (request := await self._asked.get()) is not None:
            if not request.answer.done():  # else the agent no longer waits for it
                self._latest = request
                return request.question
        self._asked.put_nowait(None)
        return self.work.result()

    def answer(self, message: Message) -> None:
        request, self._latest = self._latest, None
        if request is None:
            raise ConflictError("The model was never called.")
        if not request.answer.done():
            request.answer.set_result(message)

    async def close(self) -> None:
        self.work.cancel()
        await asyncio.wait({self.work})

    async def _run(self) -> Outcome:
        context, rollout_id = self.context, f"{self.id}-r0"
        with self.engine.played_by(rollout_id, self._ask):
            async with context.slots:
                spec = attempt_spec(context, self.task, rollout_id, 1)
                unwatched = msgspec.structs.replace(
                    context, staleness=StalenessMonitor(None), keep_calls=False
                )
                finished = await run_attempt(unwatched, _played(spec, self.agent))
        score = await score_once(context.scorer, self.task, finished.result)
        score = context.scorer.delivered(score)
        reward = score.of_agent(next(iter(context.agents), None))
        if reward is None:
            raise Unscorable(score.error or "The score has no reward.")
        return Outcome(
            reward=reward,
            rewards=score.rewards,
            turns=score.turns,
            components=score.components,
            limit=finished.result.limit,
        )

    async def _ask(self, question: Asked) -> Message:
        request = _Request(question)
        self._asked.put_nowait(request)
        return await request.answer

    def _over(self, work: asyncio.Task[Outcome]) -> None:
        self._asked.put_nowait(None)
        if not work.cancelled():
            work.exception()  # retrieved here, because no caller may


class Episodes:
    """The episodes of a server, `most` at a time (each takes the place of a rollout); an async
    context manager that closes them at its end. `engine`: the one behind each part's proxy."""

    def __init__(
        self,
        parts: Sequence[RolloutContext],
        engine: PlayedEngine,
        index: Callable[[str], TaskIndex],
        most: int,
    ) -> None:
        self._parts = {part.environment.name: part for part in parts}
        self._engine = engine
        self._index = index
        self._most = most
        self._open: set[Episode] = set()
        self._beginning = 0
        """Number of episodes whose task is being read."""
        self._next: Counter[tuple[str, str]] = Counter()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(episode.close() for episode in list(self._open)))

    @property
    def names(self) -> list[str]:
        return list(self._parts) if self._most else []

    @property
    def open(self) -> int:
        return len(self._open)

    def environment(self, name: str) -> Environment:
        return self._parts[name].environment

    async def begin(
        self,
        name: str,
        *,
        task_id: str | None = None,
        seed: int | None = None,
        split: Split | None = None,
        agent: str | None = None,
    ) -> Episode:
        """Begins an episode of an environment.

        Args:
            task_id: unset: by `seed`; without both, the task after the one begun last.
            seed: the same seed begins the same task, one of the first thousand.
            split: default: the one that the server serves.
            agent: the only agent a client acts as, where there are several; default: all that are
                trained. The others are asked of their engine.
        """
        taken = len(self._open) + self._beginning
        if taken >= self._most:
            raise EpisodesFull(
                f"{taken} episodes are in progress, the maximum.",
                hint="See --server.openenv_sessions.",
                active_sessions=taken,
                max_sessions=self._most,
            )
        context = self._parts[name]
        if context.scorer.needs_token_ids:
            raise ConfigError(f"{name!r} scores token ids, which an external client does not have.")
        if agent is not None and agent not in context.agents:
            known = ", ".join(context.agents) or "none is declared"
            raise NotFoundError(f"There is no agent {agent[:80]!r} in {name!r}: {known}.")
        where = split or context.environment.config.split
        self._beginning += 1
        try:
            task = await self._chosen(name, where, task_id, seed)
        finally:
            self._beginning -= 1
        episode = Episode(context, self._engine, task, agent)
        self._open.add(episode)
        episode.work.add_done_callback(lambda _: self._open.discard(episode))
        return episode

    async def _chosen(self, name: str, split: Split, task_id: str | None, seed: int | None) -> Task:
        index = self._index(name)
        if task_id is not None:
            return (await index.find(split, [task_id]))[0]
        if seed is not None:
            found = await index.after(split, 0, _SEEDED_TASKS)
        else:
            number = self._next[name, split]
            self._next[name, split] += 1
            found = await index.after(split, number, 1)
            if not found:  # from the beginning again
                self._next[name, split] = 1
                found = await index.after(split, 0, 1)
        if not found:
            raise InputError(f"The split {split!r} of {name!r} has no tasks.")
        return found[(seed or 0) % len(found)]


def _played(spec: AttemptSpec, agent: str | None) -> AttemptSpec:

    def is_played(name: str, route: AgentRoute) -> bool:
        if agent is not None:
            return name == agent
        return route.trained or not any(other.trained for other in spec.agents.values())

    return msgspec.structs.replace(
        spec,
        endpoint=PLAYED,
        agents={
            name: msgspec.structs.replace(route, endpoint=PLAYED)
            if is_played(name, route)
            else route
            for name, route in spec.agents.items()
        },
        deadline=max(spec.deadline, time.time() + LONGEST_SECONDS),
    )
