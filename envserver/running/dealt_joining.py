"""The work of a runner whose groups a run deals one by one: `join` for `process` and `evaluate`.

In: requests for groups. Out: the groups, each sent when it is made, or why there is none. What
holds: which groups are made is the run's decision alone; this runner has no stream of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from envserver_records.cancelling import cancel_and_wait
from envserver_records.records import Group

from ..remote.dealing import Dealt, Made
from ..remote.dealt import DealtLink, dealt_link
from ..rollouts.events import Event, RolloutFailed, RolloutScored
from ..rollouts.group import RolloutContext
from ..rollouts.stream import GroupRequest
from .context import rollout_context
from .joining import Spec, calls_waiting, identity, tls_of
from .stopping import Ending, Stop, run_until_stopped


class DealtRunner:
    """A runner that makes what it is dealt; made by `dealt_runner`.

    Attributes:
        name: of this runner.
        delivered: number of groups that it made.
    """

    def __init__(
        self, name: str, link: DealtLink, context: RolloutContext, events: _Events
    ) -> None:
        self.name = name
        self.delivered = 0
        self._link = link
        self._context = context
        self._events = events
        self._held: dict[str, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._draining = False
        self._error: BaseException | None = None
        size = context.environment.config.group_size
        self._most = max(1, context.rollouts.max_concurrent // size) + 1

    @property
    def open_groups(self) -> int:
        """Number of groups that are being made or sent."""
        return len(self._held)

    def drain(self) -> None:
        """Takes nothing further."""
        self._draining = True
        self._ended.set()

    async def run(self, stop: Stop, *, drain_seconds: float) -> Ending:
        """Makes groups until stopped or dismissed.
        Raises ConfigError: the server refuses this runner, or tasks cannot be prepared.
        """
        return await run_until_stopped(self._run(), self, stop, drain_seconds=drain_seconds)

    async def _run(self) -> None:
        try:
            while not (self._draining and not self._held):
                dealt = await self._take()
                if self._error is not None:
                    raise self._error
                for group_id in dealt.cancelled:
                    if group_id in self._held:
                        self._held[group_id].cancel()
                for request in dealt.requests:
                    self._begin(request)
                self._draining = self._draining or dealt.drain
        finally:
            tasks = list(self._held.values())
            await cancel_and_wait(*tasks)

    async def _take(self) -> Dealt:
        """Asks for requests, and asks anew when a group has ended meanwhile."""
        while True:
            self._ended.clear()
            waiting = calls_waiting(self._context)
            free = 0 if self._draining else max(0, self._most - len(self._held))
            asking = asyncio.create_task(self._link.take(free, list(self._held), waiting))
            ended = asyncio.create_task(self._ended.wait())
            try:
                await asyncio.wait({asking, ended}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
                if self._error is not None or (self._draining and not self._held):
                    return Dealt()
            finally:
                await cancel_and_wait(asking, ended)

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
        self._events.forget(group_id)
        self._ended.set()

    async def _make(self, request: GroupRequest) -> None:
        made = await self._context.make(request)
        scored, failed = self._events.of(request.group_id)
        await self._link.send(
            Made(
                group_id=request.group_id,
                group=made if isinstance(made, Group) else None,
                drop=None if isinstance(made, Group) else made,
                scored=scored,
                failed=failed,
            )
        )
        self.delivered += isinstance(made, Group)


class _Events:
    """Keeps the events of rollouts until their group is sent."""

    def __init__(self) -> None:
        self._scored: dict[str, list[RolloutScored]] = {}
        self._failed: dict[str, list[RolloutFailed]] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, RolloutScored):
            self._scored.setdefault(event.group_id, []).append(event)
        elif isinstance(event, RolloutFailed):
            self._failed.setdefault(event.group_id, []).append(event)

    def of(self, group_id: str) -> tuple[list[RolloutScored], list[RolloutFailed]]:
        """Returns those of a group."""
        return self._scored.get(group_id, []), self._failed.get(group_id, [])

    def forget(self, group_id: str) -> None:
        """Drops those of a group."""
        self._scored.pop(group_id, None)
        self._failed.pop(group_id, None)


@contextlib.asynccontextmanager
async def dealt_runner(spec: Spec) -> AsyncIterator[DealtRunner]:
    """Reaches the server, and starts what the environment needs.

    Raises:
        ConfigError: the server refuses the runner.
        EngineError: see `rollout_context`.
    """
    settings, events = spec.settings, _Events()
    token = settings.token.get_secret_value()
    with identity(spec) as held:
        async with dealt_link(settings.url, held.name, token=token, tls=tls_of(settings)) as link:
            rules = await link.rules()
            async with rollout_context(
                settings,
                spec.make_environment(),
                spec.reference,
                observer=events,
                drop_zero_variance=rules.drop_zero_variance,
                for_training=rules.for_training,
            ) as context:
                yield DealtRunner(held.name, link, context, events)
