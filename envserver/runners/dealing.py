"""Deals single groups of a run to runners on other machines, for `process` and `evaluate`.

Each request is answered once, however many runners are lost: what a lost runner had is dealt again,
and what the run no longer wants is cancelled where it is made. A runner says with each `take` what
it holds, so an answer that it never got is dealt again, too. A request that the server cannot
answer now is repeated until it is answered."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Collection
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from envserver_records.packing import pack, ready, unpack
from envserver_records.records import Group

from ..rollouts.events import RolloutFailed, RolloutScored
from ..rollouts.policy import Drop
from ..rollouts.stream import GroupRequest

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_log = structlog.get_logger("envserver.remote")

MSGPACK: Final = "application/vnd.envserver.dealt+msgpack"
"""Media type of the messages below."""
WORK: Final = "/v1/work"
POLL_SECONDS: Final = 5.0
_MOST_LOSSES: Final = 3
_SILENT_AFTER_SECONDS: Final = 20.0
"""A runner that asks for nothing for so long is lost."""


class Rules(msgspec.Struct, frozen=True):
    """How a runner makes its groups, as in `rollout_context`."""

    drop_zero_variance: bool = False
    for_training: bool = False


class Take(msgspec.Struct, frozen=True):
    """Asks for requests.

    Args:
        free: how many more groups it could make at a time.
        holding: ids of the groups that it has, or has sent without an answer yet.
        waiting: how many of its calls wait for the engine.
    """

    runner: str
    free: int
    holding: list[str]
    waiting: int = 0


class Dealt(msgspec.Struct, frozen=True):
    """Answer to `Take`. `cancelled`: groups that it holds and that are no longer wanted; `drain`:
    it gets nothing further, and may leave when it holds nothing."""

    requests: list[GroupRequest] = []
    cancelled: list[str] = []
    drain: bool = False


class Made(msgspec.Struct, frozen=True, kw_only=True):
    """A group as a runner made it, or why there is none, and the events of its rollouts."""

    group_id: str
    group: Group | None = None
    drop: Drop | None = None
    scored: list[RolloutScored] = []
    failed: list[RolloutFailed] = []


for _kind in (Rules, Take, Dealt, Made):
    ready(_kind)


class _Work:
    """A request that is to be answered.

    Attributes:
        runner: who has it; "": none yet.
        is_held: that runner has said that it has it.
        losses: runners that were lost while they had it.
    """

    def __init__(self, request: GroupRequest) -> None:
        self.request = request
        self.made: asyncio.Future[Made] = asyncio.get_running_loop().create_future()
        self.runner = ""
        self.is_held = False
        self.losses = 0


class Dealer:
    """Open requests, and who has which. `runners`: returns how many there are, also those that only
    start: none gets more than its part of the open groups."""

    def __init__(
        self,
        rules: Rules,
        *,
        poll_seconds: float = POLL_SECONDS,
        runners: Callable[[], int] = lambda: 1,
    ) -> None:
        self.rules = rules
        self.runners = runners
        self._poll_seconds = poll_seconds
        self._open: dict[str, _Work] = {}
        self._taking: dict[str, tuple[Take, float]] = {}
        """The last message of each runner, and when it was last there."""
        self._draining: set[str] = set()
        self._is_closed = False
        self._change = asyncio.Event()

    @property
    def open_groups(self) -> int:
        """Number of groups that are wanted and not made yet."""
        return len(self._open)

    @property
    def engine_waits(self) -> bool:
        return any(wanted.waiting for wanted, _ in self._taking.values())

    async def make(self, request: GroupRequest) -> Made:
        work = self._open[request.group_id] = _Work(request)
        self._wake()
        try:
            return await work.made
        finally:
            del self._open[request.group_id]
            self._wake()

    async def take(self, wanted: Take) -> Dealt:
        """Answers as soon as there is something for the runner, it asks anew, or after
        `poll_seconds`."""
        name = wanted.runner
        self._taking[name] = wanted, time.monotonic()
        self._take_back(name, set(wanted.holding))
        end = time.monotonic() + self._poll_seconds
        while not (dealt := self._dealt(wanted)) and (left := end - time.monotonic()) > 0:
            if self._is_closed:
                return Dealt(drain=True)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._change.wait()
            if self._taking.get(name, (None, 0.0))[0] is not wanted:
                return Dealt()
            self._taking[name] = wanted, time.monotonic()
        return dealt or Dealt(drain=name in self._draining)

    def settle(self, made: Made) -> None:
        """Takes what a runner made; of a group that is settled or unwanted, nothing."""
        work = self._open.get(made.group_id)
        if work is not None and not work.made.done():
            work.made.set_result(made)

    def drain(self, runner: str) -> None:
        self._draining.add(runner)
        self._wake()

    def close(self) -> None:
        """Tells all runners to leave: those that wait now, the others when they ask."""
        self._is_closed = True
        self._wake()

    async def watch(self) -> None:
        """Takes back what silent runners have, until cancelled."""
        while True:
            await asyncio.sleep(_SILENT_AFTER_SECONDS / 10)
            earliest = time.monotonic() - _SILENT_AFTER_SECONDS
            for name in [name for name, (_, at) in self._taking.items() if at < earliest]:
                del self._taking[name]
                _log.warning("runner_silent", runner=name)
                self._take_back(name, (), is_silent=True)

    def _dealt(self, wanted: Take) -> Dealt | None:
        held = [group_id for group_id in wanted.holding if group_id in self._open]
        cancelled = [group_id for group_id in wanted.holding if group_id not in self._open]
        draining = wanted.runner in self._draining
        requests: list[GroupRequest] = []
        if not draining:
            fair = math.ceil(len(self._open) / max(1, len(self._taking), self.runners()))
            free = max(0, min(wanted.free, fair - len(held)))
            waiting = (
                work for work in self._open.values() if not work.runner and not work.made.done()
            )
            for work in itertools.islice(waiting, free):
                work.runner, work.is_held = wanted.runner, False
                requests.append(work.request)
        if not requests and not cancelled and not (draining and not held):
            return None
        return Dealt(requests, cancelled, draining)

    def _take_back(self, runner: str, holding: Collection[str], *, is_silent: bool = False) -> None:
        """Deals again what `runner` had and no longer holds. What it never said that it holds was
        in an answer that it did not wait for: no loss."""
        for group_id, work in self._open.items():
            if work.runner != runner or work.made.done():
                continue
            if group_id in holding:
                work.is_held = True
                continue
            work.runner = ""
            work.losses += work.is_held or is_silent
            if work.losses >= _MOST_LOSSES:
                message = f"Its runner was lost {work.losses} times while it was made."
                work.made.set_result(
                    Made(group_id=group_id, drop=Drop("incomplete", message, failed=True))
                )
        self._wake()

    def _wake(self) -> None:
        self._change.set()
        self._change = asyncio.Event()


def dealing_app(dealer: Dealer, token: str) -> Starlette:
    """Returns the server's three routes; runners send `token` with every request.

    GET  /v1/work         how groups are to be made
    POST /v1/work/take    requests for groups, when there are some; says what the runner holds
    POST /v1/work/made    a group, or why there is none"""
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect
    from starlette.responses import Response
    from starlette.routing import Route

    def only_runners(
        answer: Callable[[Request], Awaitable[object]],
    ) -> Callable[[Request], Awaitable[Response]]:
        async def answered(request: Request) -> Response:
            given = request.headers.get("authorization", "")
            if not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
                return Response("The token is not that of this run.", 401)
            try:
                return Response(pack(await answer(request)), media_type=MSGPACK)
            except msgspec.DecodeError as error:
                return Response(f"Not a message of a runner: {error}.", 422)
            except ClientDisconnect:
                return Response("The runner left before its message was whole.", 400)

        return answered

    async def rules(request: Request) -> Rules:
        return dealer.rules

    async def take(request: Request) -> Dealt:
        return await dealer.take(unpack(await request.body(), Take))

    async def made(request: Request) -> None:
        dealer.settle(unpack(await request.body(), Made))

    return Starlette(
        routes=[
            Route(WORK, only_runners(rules)),
            Route(f"{WORK}/take", only_runners(take), methods=["POST"]),
            Route(f"{WORK}/made", only_runners(made), methods=["POST"]),
        ]
    )
