"""The registry of runners, which answers their requests, and its routes under /v1/environments.

POST   /v1/environments                   registers; returns an id, the session key, the seed
POST   /v1/environments/{id}/heartbeat    reports status; answered on news or after a timeout
POST   /v1/environments/{id}/groups       posts finished groups; durable on 200
POST   /v1/environments/{id}/known        asks which groups the server already has
POST   /v1/environments/{id}/scored       reports groups that were scored and dropped
DELETE /v1/environments/{id}              deregisters
POST   /v1/environments/{id}/drain        tells the runner to finish and leave (for operators)
GET    /v1/environments                   lists all runners (for operators)

The session key is sent in the header `x-environment-key`. Two names never have the same stream; a
group is acknowledged only when it is on disk."""

from __future__ import annotations

import asyncio
import base64
import copy
import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Final
from weakref import WeakValueDictionary

import msgspec
import structlog
from envserver_records.errors import ConflictError, InputError, NotFoundError, UsageError
from fastapi import APIRouter, Query
from pydantic import BaseModel, StringConstraints
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from ..http.answers import json_answer, route
from ..http.requests import key_of, read_body
from ..http.transfer import Endpoint
from ..rollouts.estimates import Scored
from ..rollouts.stream import again_prefix, stream_prefix
from ..store import Store
from ..store.demand import Demand
from ..store.groups import EncodedPut
from ..telemetry.measures import Reading
from .messages import (
    ENGINES,
    GROUP_LIST_MSGPACK,
    GROUP_MSGPACK,
    KEY_HEADER,
    NEXT_SECONDS,
    Accepted,
    GroupIds,
    Heartbeat,
    News,
    Refused,
    Registration,
    ScoredGroup,
    ScoredGroups,
    Welcome,
)
from .news import RunnerNews, SharedCapacity
from .runner import SILENT_POLLS, RegisteredRunner, Runner, RunnerTable
from .validation import read_post

log = structlog.get_logger(__name__)

_CHANGES: Final = attrgetter("open", "capacity", "begun", "quiet")
"""The fields of a heartbeat whose change may matter to other runners."""


class WrongKey(UsageError):
    """The key is not that of the session: another process has registered under the name."""

    kind, status = "wrong_key", 401


class RunnerRegistry:
    """The runners of an app; call `load` first.

    Args:
        silent_after_seconds: a runner without a heartbeat for this long does not count.
        stretches: see `SharedCapacity`.
    """

    def __init__(
        self,
        store: Store,
        demand: Demand,
        *,
        silent_after_seconds: float = 30.0,
        stretches: bool = True,
    ) -> None:
        self.tell: Callable[[str, str, Counter[str], Counter[str]], None] = lambda *facts: None
        """Called with an environment, its runner's name, and how many attempts failed and groups
        were dropped there since the last heartbeat, by kind and reason."""
        self._store = store
        self.table = RunnerTable(store, silent_after_seconds)
        self.news = RunnerNews(store, self.table, SharedCapacity(demand, stretches=stretches))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One for each name that registers or leaves now; many register at a time."""

    async def load(self) -> None:
        await self.table.load()

    # Requests of runners

    async def register(
        self,
        wanted: Registration,
        understands: Sequence[str] = (),
        request_key: str | None = None,
    ) -> Welcome:
        """Starts a new session for this name, with its own stream of groups. Requests of one
        instance with the same `request_key` share a session."""
        if any(local.share.name == wanted.name for local in self.news.local):
            raise ConflictError(f"The name {wanted.name!r} is that of the server's own.")
        key = _session_key(wanted.instance, request_key)
        async with self._lock(wanted.name):
            before = self.table.named(wanted.name)
            if before is not None:
                self._check_may_take(before, wanted)
            async with self._stream(wanted, before) as (seed, is_new):
                registered = RegisteredRunner(
                    id=before.id if before is not None else secrets.token_hex(8),
                    key_hash=_hash(key),
                    instance_hash=_hash(wanted.instance),
                    asked_seed=wanted.seed,
                    seed=seed,
                    registered_at=time.time(),
                    understands=tuple(understands),
                    **wanted.model_dump(exclude={"instance", "seed"}),
                )
                runner = Runner(registered)
                await self.table.save(runner)
            count, prefix = self._store.count_with_prefix, registered.prefix
            runner.stored = 0 if is_new else await count(prefix)
            again = 0 if is_new else await count(again_prefix(prefix))
            self.table.heartbeats.hear(runner.id)
            self.news.end_waits(runner.id)  # of the session before
        about = {"name": runner.name, "env": runner.env, "seed": seed, "host": registered.host}
        log.info("environment_registered", **about)
        self.news.wake()
        return Welcome(
            id=runner.id,
            key=key,
            seed=seed,
            stored=runner.stored,
            again=again,
            silent_after_seconds=self.table.heartbeats.silent_after_seconds,
        )

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _check_may_take(self, before: Runner, wanted: Registration) -> None:
        same = hmac.compare_digest(before.registered.instance_hash, _hash(wanted.instance))
        if not same and self.table.is_present(before):
            raise ConflictError(
                f"The name {wanted.name!r} is used by an environment at "
                f"{before.registered.host or '?'}.",
                hint="Choose another with --name, or wait until the other has left or has been "
                f"silent for {self.table.heartbeats.silent_after_seconds:g} s.",
            )

    @asynccontextmanager
    async def _stream(
        self, wanted: Registration, before: Runner | None
    ) -> AsyncIterator[tuple[int, bool]]:
        """Holds the stream for a runner until its registration is stored; gives its seed, and
        whether it is unused."""
        known = None if before is None else before.registered
        stream = (wanted.env, wanted.split, wanted.seed)
        if known is not None and stream == (known.env, known.split, known.asked_seed):
            yield known.seed, False
            return
        streams = self.table.streams
        seed = await streams.choose(wanted, [local.prefix for local in self.news.local])
        try:
            yield seed, True
        finally:
            streams.give_back(stream_prefix(wanted.env, wanted.split, seed))

    async def heartbeat(
        self, env_id: str, key: str, beat: Heartbeat, receive: Receive | None = None
    ) -> News:
        """Answers as soon as there is something new for the runner, or after its `wait_seconds`.
        `receive`: of the request, to notice that its client has disconnected; None: do not wait."""
        runner = self.authenticate(env_id, key)
        self._hear(runner, beat)
        seconds = min(beat.wait_seconds, self.table.silent_after(runner) / SILENT_POLLS)
        if receive is None or seconds <= 0 or self.news.is_new(runner, beat):
            return self.news.for_runner(runner)
        news = await self.news.wait(runner, beat, seconds, receive)
        return news or self.news.for_runner(self.authenticate(env_id, key))

    def _hear(self, runner: Runner, beat: Heartbeat) -> None:
        was_silent = not self.table.is_present(runner)
        self.table.heartbeats.hear(runner.id)
        before = runner.beat
        self.tell(runner.env, runner.name, *runner.failed_since(beat))
        runner.beat, runner.open = beat, beat.open
        self.news.count_begun(runner, beat.begun)
        # Most heartbeats of many runners equal the one before: nothing else need be done.
        if was_silent or _CHANGES(before) != _CHANGES(beat):
            self.news.wake()

    async def accept(
        self,
        env_id: str,
        key: str,
        body: bytes,
        most_bytes: int,
        still_open: int | None = None,
        begun: int | None = None,
        *,
        is_list: bool = True,
    ) -> News:
        """Stores a group, or several in one transaction; on disk on return, and repeating is
        allowed. Of several, the result names those that are refused.

        Args:
            body: a packed group, or a list of them (`is_list`).
            most_bytes: maximum size of the groups when decompressed.
            still_open: groups the runner has open besides these; None: so many fewer than before.
            begun: groups the runner has begun since it registered.
        """
        runner = self._heard(env_id, key)
        read = await read_post(body, runner.registered, most_bytes, is_list=is_list)
        if not is_list and isinstance(read[0], InputError):
            raise read[0]
        puts = [put for put in read if isinstance(put, EncodedPut)]
        new = sum(await self._store.put_encoded(puts))
        if runner.stored is not None:
            runner.stored += new
        runner.open = max(0, runner.open - new) if still_open is None else still_open
        if begun is not None:
            self.news.count_begun(runner, begun)
        self.news.wake()
        news = self.news.for_runner(runner)
        if not is_list:
            return news
        refused = [
            Refused(index=index, place=error.detail.get("place", ""), message=error.message)
            for index, error in enumerate(read)
            if isinstance(error, InputError)
        ]
        return Accepted(**vars(news), refused=refused)

    def _heard(self, env_id: str, key: str) -> Runner:
        runner = self.authenticate(env_id, key)
        self.table.heartbeats.hear(runner.id)
        return runner

    async def known_groups(self, env_id: str, key: str, group_ids: list[str]) -> set[str]:
        """Returns which of these groups were ever stored, delivered or not."""
        self._heard(env_id, key)
        return await self._store.existing(group_ids)

    async def count_dropped(self, env_id: str, key: str, groups: Sequence[ScoredGroup]) -> None:
        """Counts scored, dropped groups in the estimates of their tasks; repeating is allowed."""
        stream = self._heard(env_id, key).registered
        news = []
        for number, group in enumerate(groups):
            if not group.group_id.startswith(stream.prefix) or group.rewards > group.attempts:
                raise InputError("No group of this stream.", place=f"groups[{number}]")
            news.append(Scored(env=stream.env, split=stream.split, **group.model_dump()))
        await self._store.count_dropped(news)

    async def goodbye(self, env_id: str, key: str) -> None:
        async with self._lock(self.authenticate(env_id, key).name):
            runner = copy.copy(self.authenticate(env_id, key))
            left = {"gone": True, "left_at": time.time()}
            runner.registered = msgspec.structs.replace(runner.registered, **left)
            await self.table.save(runner)
            runner.beat = runner.beat.model_copy(update={"open": 0, "capacity": 0})
            runner.room = runner.open = 0
        log.info("environment_left", name=runner.name)
        self.news.wake()

    def authenticate(self, env_id: str, key: str) -> Runner:
        runner = self.table.known.get(env_id)
        if runner is None:
            raise NotFoundError("No such environment is registered.", hint="Register it again.")
        if not hmac.compare_digest(runner.registered.key_hash, _hash(key)):
            raise WrongKey(
                "The key is not that of this environment's session.",
                hint="Another process may have registered under its name.",
            )
        return runner

    def drain(self, env_id: str) -> None:
        runner = self.table.known.get(env_id)
        if runner is None:
            raise NotFoundError("No such environment is registered.")
        runner.drain = True
        self.news.wake()


def _session_key(instance: str, request_key: str | None) -> str:
    """Returns the same key for a repeated request; the instance's secret keeps it secret."""
    if request_key is None:
        return secrets.token_urlsafe(24)
    digest = hmac.digest(instance.encode(), request_key.encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


async def runner_numbers(environments: RunnerRegistry) -> Reading:
    """Returns the numbers of all runners by environment: their names would be unbounded labels."""
    how_many: Counter[tuple[str, str]] = Counter()
    is_open: Counter[str] = Counter()
    capacity: Counter[str] = Counter()
    table, news = environments.table, environments.news
    for runner in table.known.values():
        how_many[runner.env, table.presence(runner)] += 1
        is_open[runner.env] += runner.open
        capacity[runner.env] += runner.capacity if table.is_present(runner) else 0
    return {
        "joined_environments": how_many,
        "joined_open_groups": is_open,
        "joined_capacity_groups": capacity,
        "joined_wanted_groups": {env: news.shared.wanted(env) for env in is_open},
    }


Addition = Annotated[str, StringConstraints(max_length=64)]
_MOST: Final = 2**31 - 1
_PLACE: Final = "/v1/environments"
_GROUP_BODY: Final = {
    "requestBody": {"required": True, "content": {GROUP_MSGPACK: {}, GROUP_LIST_MSGPACK: {}}}
}


class EnvironmentsAnswer(BaseModel):
    environments: list[dict[str, Any]]


class KnownAnswer(BaseModel):
    known: list[str]


class WrongMediaType(UsageError):
    kind, status = "wrong_media_type", 415


def runner_routes(environments: RunnerRegistry, most_bytes: int) -> APIRouter:
    router = APIRouter(tags=["environments"])

    @router.post(
        _PLACE, **route(Welcome, 409, status=201, body=Registration, what="The registration.")
    )
    async def register(
        request: Request,
        understands: Annotated[list[Addition] | None, Query(max_length=16)] = None,
    ) -> Response:
        """Registers a runner, or starts a new session for its name (201). If another process has
        the name and is still present: 409. `understands` names additions to the protocol that the
        runner knows: "next_seconds", how long its next heartbeats should wait; "engines", the
        server's engines. With an `Idempotency-Key`, repeating the request returns the same session
        key, so that a late copy ends no session."""
        wanted = await read_body(request, Registration)
        return _json(await environments.register(wanted, understands or (), key_of(request)), 201)

    @router.get(_PLACE, **route(EnvironmentsAnswer, what="All registrations."))
    async def show() -> Response:
        """Lists the registered runners and their status."""
        return _json({"environments": await environments.table.snapshot()})

    @router.post(
        _PLACE + "/{env_id}/heartbeat",
        **route(News, 404, body=Heartbeat, what="The runner's settings."),
    )
    async def heartbeat(env_id: str, request: Request) -> Response:
        """Reports a runner's status. Answers at once if there is news for it (a new policy
        version, a pause, a drain, or more capacity when it has used up its own); otherwise after
        `wait_seconds`."""
        return await _heard(environments, request)

    @router.post(
        _PLACE + "/{env_id}/groups",
        openapi_extra=_GROUP_BODY,
        **route(Accepted, 404, 409, 415, takes_body=True, what="Groups stored and groups refused."),
    )
    async def accept(
        env_id: str,
        request: Request,
        still_open: Annotated[int | None, Query(alias="open", ge=0, le=_MOST)] = None,
        begun: Annotated[int | None, Query(ge=0, le=_MOST)] = None,
    ) -> Response:
        """Stores one group, or several in one transaction; posting a group twice is allowed. A
        malformed single group is refused with 422 and the place of the error; among several, the
        response names the refused groups and the others are stored. `open` and `begun` are as in a
        heartbeat, not counting the posted groups."""
        return await _accepted(environments, most_bytes, request, still_open, begun)

    @router.post(
        _PLACE + "/{env_id}/known",
        **route(KnownAnswer, 404, body=GroupIds, what="The groups that are stored."),
    )
    async def known(env_id: str, request: Request) -> Response:
        """Returns which of these groups were ever stored here, delivered or not."""
        wanted = await read_body(request, GroupIds)
        found = await environments.known_groups(env_id, _key(request), wanted.group_ids)
        return _json({"known": sorted(found)})

    @router.post(
        _PLACE + "/{env_id}/scored",
        **route(None, 404, status=204, body=ScoredGroups, what="The counts were added."),
    )
    async def scored(env_id: str, request: Request) -> Response:
        """Reports groups that were scored and dropped for their rewards or their age: they count
        in the estimates of their tasks. Repeating is allowed."""
        environments.authenticate(env_id, _key(request))
        scored = await read_body(request, ScoredGroups)
        await environments.count_dropped(env_id, _key(request), scored.groups)
        return Response(status_code=204)

    @router.delete(
        _PLACE + "/{env_id}",
        **route(None, 404, 422, status=204, what="The registration was removed."),
    )
    async def goodbye(env_id: str, request: Request) -> Response:
        """Deregisters a runner until it registers again. Repeating is allowed."""
        await environments.goodbye(env_id, _key(request))
        return Response(status_code=204)

    @router.post(
        _PLACE + "/{env_id}/drain",
        **route(None, 404, 422, status=204, what="The runner was notified."),
    )
    async def drain(env_id: str) -> Response:
        """Tells a runner to begin no more groups and to leave once its open groups are posted."""
        environments.drain(env_id)
        return Response(status_code=204)

    return router


def runner_posts(environments: RunnerRegistry, most_bytes: int) -> dict[str, Endpoint]:
    """Returns, by path, endpoints for posts of groups that bypass FastAPI, for speed."""

    async def post(request: Request) -> Response:
        counts = map(request.query_params.get, ("open", "begun"))
        still_open, begun = (None if text is None else int(text) for text in counts)
        return await _accepted(environments, most_bytes, request, still_open, begun)

    return {_PLACE + "/{env_id}/groups": post}


def runner_beats(environments: RunnerRegistry) -> dict[str, Endpoint]:
    """Returns, by path, an endpoint for heartbeats that bypasses FastAPI, for speed."""
    return {_PLACE + "/{env_id}/heartbeat": partial(_heard, environments)}


async def _heard(environments: RunnerRegistry, request: Request) -> Response:
    session = request.path_params["env_id"], _key(request)
    environments.authenticate(*session)
    beat = await read_body(request, Heartbeat)
    return _json(await environments.heartbeat(*session, beat, request.receive))


async def _accepted(
    environments: RunnerRegistry,
    most_bytes: int,
    request: Request,
    still_open: int | None,
    begun: int | None,
) -> Response:
    session = request.path_params["env_id"], _key(request)
    environments.authenticate(*session)
    body = await request.body()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip()
    if media_type not in (GROUP_MSGPACK, GROUP_LIST_MSGPACK):
        raise WrongMediaType(f"Groups must be {GROUP_MSGPACK} or {GROUP_LIST_MSGPACK}.")
    is_list = media_type == GROUP_LIST_MSGPACK
    return _json(
        await environments.accept(*session, body, most_bytes, still_open, begun, is_list=is_list)
    )


def _key(request: Request) -> str:
    return request.headers.get(KEY_HEADER, "")


def _json(value: BaseModel | dict[str, Any], status: int = 200) -> Response:
    facts = value.model_dump() if isinstance(value, BaseModel) else value
    for addition in (NEXT_SECONDS, ENGINES):
        if facts.get(addition, 0) is None:
            del facts[addition]  # runners of older versions refuse it
    return json_answer(facts, status)
