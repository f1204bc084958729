"""The session of a runner with its server: registers, sends heartbeats, posts groups.

A request that the server cannot answer is retried with growing delays until it succeeds, so no
finished group is lost while this process lives. If the server no longer knows the runner, it
registers again under its name, which a file keeps across restarts."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import random
import re
import secrets
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TypeVar

import httpx
import msgspec
import orjson
import structlog
from envserver_records.errors import ConfigError, ConflictError, EnvserverError, InputError
from envserver_records.http_errors import Urls
from envserver_records.records import Group, Split, pack, unpack
from envserver_records.servers import AsyncServersClient
from envserver_records.waiting import Backoff, cancel_and_wait
from pydantic import BaseModel, TypeAdapter, ValidationError

from ..proxy.gate import Aborted, Gate
from ..rollouts.estimates import Estimate, Scored
from ..rollouts.stream import GroupRequest
from .dealing import WORK, Dealt, Made, Rules, Take
from .messages import (
    ENGINES,
    GROUP_LIST_MSGPACK,
    KEY_HEADER,
    MOST_BYTES,
    MOST_GROUPS,
    NEXT_SECONDS,
    Accepted,
    GroupIds,
    Heartbeat,
    News,
    Pause,
    Refused,
    Registration,
    ScoredGroup,
    ScoredGroups,
    ToldEngine,
    Welcome,
    compressed,
    encode_batch,
)

Send = Callable[[Sequence[bytes]], Awaitable[Sequence[InputError | None]]]
"""Returns for each body why it is refused; None if it is on disk."""


class _Waiting(NamedTuple):
    body: bytes
    done: asyncio.Future[None]


class GroupPoster:
    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def put(self, body: bytes) -> None:
        """Waits until the request that contains `body` was answered."""
        waiting = _Waiting(body, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="posts")
        await waiting.done

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        for waiting in self._waiting:
            waiting.done.cancel()

    async def _run(self) -> None:
        while batch := self._next():
            try:
                outcomes = await self._outcomes([waiting.body for waiting in batch])
            except asyncio.CancelledError:
                for waiting in batch:
                    waiting.done.cancel()
                raise
            except Exception as error:  # noqa: BLE001 (the caller of post gets it)
                outcomes = [error] * len(batch)
            for waiting, outcome in zip(batch, outcomes, strict=True):
                _answer(waiting.done, outcome)

    def _next(self) -> list[_Waiting]:
        self._waiting = [waiting for waiting in self._waiting if not waiting.done.done()]
        size = count = 0
        for waiting in self._waiting[:MOST_GROUPS]:
            size += len(waiting.body)
            if count and size > MOST_BYTES:
                break
            count += 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _outcomes(self, bodies: Sequence[bytes]) -> list[Exception | None]:
        try:
            return list(await self._send(bodies))
        except InputError as error:
            if len(bodies) == 1:
                return [error]
        # The whole request was refused, perhaps for its size; try each group alone.
        return [outcome for body in bodies for outcome in await self._outcomes([body])]


def _answer(done: asyncio.Future[None], outcome: Exception | None) -> None:
    if done.done():  # the caller was cancelled
        return
    if outcome is None:
        done.set_result(None)
    else:
        done.set_exception(outcome)


class RunnerGate(Gate):
    """A gate that stays closed until `hear` is first called, and whenever the server is silent.

    Without contact to the server, a runner cannot know which policy version its engine serves. So
    its calls wait, and tokens sampled in the meantime are discarded and sampled again: no token is
    labelled with a wrong version. `longest_silence_seconds`: time after the last response during
    which calls still pass."""

    def __init__(self) -> None:
        super().__init__()
        self.longest_silence_seconds = 0.0
        self._heard_at = float("-inf")
        self._heard = asyncio.Event()

    @property
    def is_fresh(self) -> bool:
        return time.monotonic() - self._heard_at <= self.longest_silence_seconds

    def hear(self, asked_at: float) -> None:
        """Records a response to a request sent at `asked_at` (`time.monotonic()`)."""
        self._heard_at = max(self._heard_at, asked_at)
        self._heard.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        while not self.is_fresh:
            self._heard.clear()
            await self._heard.wait()
        async with super().passing():
            yield
        if not self.is_fresh:
            raise Aborted


_log = structlog.get_logger("envserver.remote")

T = TypeVar("T")

_PLACE: Final = "/v1/environments"
_POLL_SECONDS: Final = 5.0
_SILENT_POLLS: Final = 1.5
"""Half of after how many polls the server takes a runner for silent (runner.py)."""
_SHORTEST_BEAT_SECONDS: Final = 0.01
_GOODBYE_SECONDS: Final = 5.0
_REQUEST_SECONDS: Final = 60.0
_QUIET_SECONDS: Final = 20.0
"""Joiners are many: none of them should often ask whether a server is alive."""
_BACKOFF: Final = Backoff(first_seconds=0.4, max_seconds=3.0, jitter=(0.5, 1.0))
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504, 507})
_HOLD_SECONDS: Final = 3600.0
_KNOWN: Final = TypeAdapter(dict[str, list[str]])
_SAME_VERSION: Final = "Do both run the same version of envserver?"


class Unreachable(EnvserverError):
    """The server did not answer, or answered with a temporary error."""

    kind = "server_unreachable"


class SessionLost(EnvserverError):
    kind = "session_lost"


class ServerSession:
    """Requests to the server, each repeated until it is answered.

    Args:
        url: URL of the server, or of several equal ones.
        tls: how to verify the server's certificate; None: the system's defaults.
    """

    def __init__(self, url: Urls, *, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        self._http = AsyncServersClient(
            url,
            timeout=_REQUEST_SECONDS,
            headers={"authorization": f"Bearer {token}"} if token else {},
            verify=tls or True,
        )
        self._http.quiet_seconds = _QUIET_SECONDS
        self._urgent = asyncio.Event()
        self._reachable = True

    def hurry(self) -> None:
        """Ends the running long poll: what it was to say has changed."""
        self._urgent.set()

    async def _poll(self, ask: Callable[[], Awaitable[T]]) -> T | None:
        """Returns the answer to a long poll; None: `hurry` was called first."""
        self._urgent.clear()
        polling = asyncio.create_task(self._patiently(ask))
        urgent = asyncio.create_task(self._urgent.wait())
        try:
            await asyncio.wait({polling, urgent}, return_when=asyncio.FIRST_COMPLETED)
            return polling.result() if polling.done() else None
        finally:
            await cancel_and_wait(polling, urgent)

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        tried = 0
        while True:
            try:
                answer = await ask()
            except Unreachable as error:
                tried += 1
                if self._reachable:
                    self._reachable = False
                    _log.warning("server_unreachable", reason=error.message)
                await asyncio.sleep(_BACKOFF.seconds(tried, random.random()))
            else:
                if not self._reachable:
                    self._reachable = True
                    _log.info("server_reached_again")
                return answer

    async def _request(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            answer = await self._http.request(method, path, **more)
        except httpx.TransportError as error:
            raise Unreachable(str(error) or type(error).__name__) from error
        if not answer.is_success:
            raise _problem(answer)
        return answer


class DealtLink(ServerSession):
    """The session of a runner that is dealt its groups, see `dealing`."""

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def rules(self) -> Rules:
        return _read(Rules, await self._patiently(lambda: self._request("GET", WORK)))

    async def take(self, wanted: Take) -> Dealt | None:
        """Waits until there is something for the runner; None: `hurry` was called first."""
        body = pack(wanted)
        answer = await self._poll(lambda: self._request("POST", f"{WORK}/take", content=body))
        return None if answer is None else _read(Dealt, answer)

    async def send(self, made: Made) -> None:
        """Sends a group; returns when the run has it."""
        body = await asyncio.to_thread(pack, made)
        await self._patiently(lambda: self._request("POST", f"{WORK}/made", content=body))


class Link(ServerSession):
    """A runner's session. `open` it and run `live` in the background.

    Args:
        gate: pauses model calls; opened and closed as the server says.
        publish: called with each new policy version.
        on_engines: called with the server's engines when they have changed; None: they are not
            asked for.

    Attributes:
        facts: returns the runner's status; `seen`, `quiet` and `wait_seconds` are filled in here.
        open_groups: returns the number of groups in progress or waiting to be posted.
        drain: called when no more groups should be begun.
        engines_in_doubt: whether to ask for the server's engines again.
    """

    def __init__(
        self,
        url: Urls,
        registration: Registration,
        *,
        gate: RunnerGate,
        token: str = "",
        tls: ssl.SSLContext | None = None,
        publish: Callable[[int], None] = lambda version: None,
        on_engines: Callable[[Sequence[ToldEngine]], None] | None = None,
    ) -> None:
        super().__init__(url, token=token, tls=tls)
        self.facts: Callable[[], Heartbeat] = Heartbeat
        self.open_groups: Callable[[], int] = lambda: 0
        self.publish = publish
        self.drain: Callable[[], None] = lambda: None
        self.on_engines = on_engines
        self.engines_in_doubt: Callable[[], bool] = lambda: False
        self._registration = registration
        self._gate = gate
        self._posts = GroupPoster(self._post)
        self._session: Welcome | None = None
        self._registering: asyncio.Task[None] | None = None
        self._news = News()
        self._poll_seconds = _POLL_SECONDS
        self._said = Heartbeat()
        self._quiet = ""
        self._holding: asyncio.Task[None] | None = None
        self._more = asyncio.Event()
        # A late copy of a registration gets the session that goes on.
        self._registering_key = {"idempotency-key": secrets.token_urlsafe(24)}

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Welcome]:
        """Registers; deregisters on exit if the server can be reached."""
        async with self._http:
            try:
                yield await self._patiently(self._register)
            finally:
                await self._posts.close()
                for task in (self._holding, self._registering):
                    if task is not None:
                        task.cancel()
                await self._say_goodbye()

    async def live(self) -> None:
        while True:
            answer = await self._poll(self._beat)
            if answer is not None:
                asked_at, news = answer
                self._take(news)
                # Only now: calls that waited for the gate belong to the version just received.
                self._gate.hear(asked_at)
            await asyncio.sleep(_SHORTEST_BEAT_SECONDS)

    async def wait_for_capacity(self) -> None:
        while self.open_groups() >= self._news.room or self._news.drain:
            if self._said.open < self._news.room:
                self.hurry()  # the server believes that there is free capacity
            self._more.clear()
            await self._more.wait()

    async def post(self, body: bytes) -> None:
        """Posts a packed group, with `messages.compressed` or not; returns when the server has it
        on disk. Groups posted while a request is running share the next request."""
        await self._posts.put(body)

    async def _post(self, bodies: Sequence[bytes]) -> list[InputError | None]:
        content = encode_batch(bodies)

        async def send() -> httpx.Response:
            now = self.facts()
            return await self._send(
                "POST",
                "/groups",
                content=content,
                headers={"content-type": GROUP_LIST_MSGPACK},
                params={"open": max(0, now.open - len(bodies)), "begun": now.begun},
            )

        accepted = _read(Accepted, await self._patiently(send))
        self._set_room(accepted.room)
        refused = {refusal.index: refusal for refusal in accepted.refused}
        return [_refusal(refused.get(index)) for index in range(len(bodies))]

    async def known(self, group_ids: list[str]) -> set[str]:
        body = GroupIds(group_ids=group_ids).model_dump()
        answer = await self._patiently(lambda: self._send("POST", "/known", json=body))
        return set(_KNOWN.validate_json(answer.content)["known"])

    async def count_dropped(self, scored: Scored) -> None:
        """Reports a group that was scored and dropped; returns when the server has counted it."""
        facts = msgspec.structs.asdict(scored)
        group = ScoredGroup(**{name: facts[name] for name in ScoredGroup.model_fields})
        body = ScoredGroups(groups=[group]).model_dump()
        await self._patiently(lambda: self._send("POST", "/scored", json=body))

    async def estimates(self, env: str, split: Split, most: int) -> dict[str, Estimate]:
        """Returns up to `most` of the server's estimates, by task."""
        found: dict[str, Estimate] = {}
        query: dict[str, str | int] = {"environment": env, "split": split, "limit": 1024}
        query["after"] = 0
        while query["after"] is not None and len(found) < most:
            ask = partial(self._request, "GET", "/v1/tasks/estimates", params=dict(query))
            page = orjson.loads((await self._patiently(ask)).content)
            for row in page["estimates"]:
                attempts, weight = row["attempts"], row["weight"]
                solved = weight * (row["mean_reward"] or 0.0)
                found[row["task_id"]] = Estimate(attempts, weight, solved, row["policy_version"])
            query["after"] = page["next"]
        return found

    async def _say_goodbye(self) -> None:
        if self._session is None:
            return
        try:
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await self._send("DELETE", "")
        except (EnvserverError, TimeoutError) as error:
            _log.warning("leaving_not_reported", reason=str(error) or type(error).__name__)

    # News

    def _take(self, news: News) -> None:
        before, self._news = self._news, news
        if news.policy_version > before.policy_version:
            self.publish(news.policy_version)
        if news.engines is None:
            self._news = news.model_copy(update={"engines": before.engines})
        elif self.on_engines is not None:
            self.on_engines(news.engines.engines)
        if news.pause != before.pause:
            self._set_pause(news.pause)
        if news.next_seconds is not None:
            self._wait_for_news(news.next_seconds)
        if news.drain:
            self.drain()
        self._set_room(news.room)

    def _wait_for_news(self, seconds: float) -> None:
        """Lets heartbeats wait this long, and calls pass for so long without an answer."""
        assert self._session is not None
        self._poll_seconds = seconds
        silence = max(self._session.silent_after_seconds / 2, _SILENT_POLLS * seconds)
        self._gate.longest_silence_seconds = silence

    def _set_room(self, room: int) -> None:
        self._news = self._news.model_copy(update={"room": room})
        self._more.set()

    def _set_pause(self, pause: Pause | None) -> None:
        self._quiet = ""
        if self._holding is not None:
            self._holding.cancel()
            self._holding = None
        if pause is None:
            self._gate.resume()
        else:
            self._holding = asyncio.create_task(self._hold(pause))

    async def _hold(self, pause: Pause) -> None:
        while not await self._gate.pause(pause.in_flight, _HOLD_SECONDS):
            pass
        self._quiet = pause.id
        self.hurry()

    async def _beat(self) -> tuple[float, News]:
        # Do not wait for news in the first heartbeat: model calls wait for its response.
        wait_seconds = self._poll_seconds if self._gate.is_fresh else 0.0
        self._said = self.facts().model_copy(
            update={"seen": self._news, "quiet": self._quiet, "wait_seconds": wait_seconds}
        )
        asked_at = time.monotonic()
        said = self._said.model_dump(exclude={"seen": {"next_seconds", "engines"}})
        if self._news.engines is not None and not self.engines_in_doubt():
            said["seen"]["engines"] = {"id": self._news.engines.id}
        answer = await self._send("POST", "/heartbeat", json=said)
        return asked_at, _read(News, answer)

    # Requests to the server

    async def _patiently(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            session = self._session
            try:
                return await super()._patiently(ask)
            except SessionLost:
                await self._register_again(session)

    async def _register_again(self, lost: Welcome | None) -> None:
        """Registers again, unless that has already happened. Not cancelled halfway, because the
        server may already have issued a new session key."""
        if self._session is not lost:
            return
        if self._registering is None or self._registering.done():
            self._registering = asyncio.create_task(self._new_session(lost))
        await asyncio.shield(self._registering)

    async def _new_session(self, lost: Welcome | None) -> None:
        _log.warning("registering_again", name=self._registration.name)
        welcome = await self._patiently(self._register)
        if lost is not None and welcome.seed != lost.seed:
            raise ConflictError(
                f"The server gave the stream with seed {lost.seed} to another environment.",
                hint="Start this one again: it gets another.",
            )

    async def _register(self) -> Welcome:
        answer = await self._request(
            "POST",
            _PLACE,
            params={"understands": [NEXT_SECONDS, *([ENGINES] if self.on_engines else [])]},
            json=self._registration.model_dump(),
            headers=self._registering_key,
        )
        welcome = _read(Welcome, answer)
        self._session = welcome
        self._poll_seconds = _POLL_SECONDS
        self._gate.longest_silence_seconds = welcome.silent_after_seconds / 2
        return welcome

    async def _send(self, method: str, path: str, **more: Any) -> httpx.Response:
        session = self._session
        if session is None:
            raise SessionLost("Nothing was registered yet.")
        headers = {**more.pop("headers", {}), KEY_HEADER: session.key}
        try:
            return await self._request(
                method, f"{_PLACE}/{session.id}{path}", headers=headers, **more
            )
        except ConflictError:
            if self._session is not session:  # the request belonged to the previous session
                raise SessionLost("Another session has begun.") from None
            raise


def _problem(answer: httpx.Response) -> EnvserverError:
    try:
        said = answer.json()
        kind, message = str(said["type"]).rpartition(":")[2], str(said["detail"])
        hint = str(said.get("hint", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        kind, message, hint = "", f"HTTP {answer.status_code}: {answer.text[:200]}", ""
    if answer.status_code in _PASSING or answer.status_code > 507:  # of a gateway
        return Unreachable(message)
    if answer.status_code == 404 and kind == "not_found":
        return SessionLost(message)
    if kind == "wrong_key":
        return ConflictError("Another process has registered under this name.", hint=hint)
    if answer.status_code in (401, 403):
        return ConfigError(message, hint=hint or "Set the server's access token: --token.")
    if answer.status_code == 409:
        return ConflictError(message, hint=hint)
    if answer.status_code == 415:
        return ConfigError(message, hint=_SAME_VERSION)
    if answer.status_code == 404:
        return ConfigError(message, hint="Is this the address of an envserver that has /v1?")
    return InputError(f"The server refuses it: {message}", hint=hint)


def _refusal(refused: Refused | None) -> InputError | None:
    if refused is None:
        return None
    return InputError(f"The server refuses it: {refused.message}", place=refused.place)


def _read(kind: type[T], answer: httpx.Response) -> T:
    try:
        if issubclass(kind, BaseModel):
            return kind.model_validate_json(answer.content)
        return unpack(answer.content, kind)
    except ValidationError as error:  # its text holds the answer, and so the key
        fields = ", ".join(".".join(map(str, field["loc"])) for field in error.errors())
        message = f"The server's answer is not a {kind.__name__}: {fields or 'not JSON'}."
        raise ConfigError(message, hint=_SAME_VERSION) from None
    except msgspec.DecodeError as error:
        message = f"The server's answer is not a {kind.__name__}: {error}."
        raise ConfigError(message, hint=_SAME_VERSION) from error


_ASKED_AT_ONCE = 1024


def missing_requests(
    requests: Iterator[GroupRequest], known: Callable[[list[str]], set[str]], stored: int
) -> Iterator[GroupRequest]:
    """Yields the requests whose groups the server does not have, in order. Until all `stored`
    groups of the stream have been found, requests are read ahead and looked up by `known` (may
    block) in batches."""
    while stored > 0:
        ahead = list(itertools.islice(requests, min(_ASKED_AT_ONCE, stored)))
        if not ahead:
            return
        found = known([request.group_id for request in ahead])
        stored -= len(found)
        yield from (request for request in ahead if request.group_id not in found)
    yield from requests


class RemoteSink:
    """Sends groups to the server; for a stream made by `missing_requests`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def put(self, group: Group) -> None:
        await self._link.post(await asyncio.to_thread(lambda: compressed(pack(group))))

    async def known(self, group_ids: list[str]) -> set[str]:
        """Returns an empty set: `missing_requests` skipped all groups that the server has."""
        return set()

    async def wait_for_capacity(self) -> None:
        await self._link.wait_for_capacity()


_MOST_NAMES = 256


class Identity(msgspec.Struct, frozen=True):
    """The name and the secret `instance`, known only to this runner and the server."""

    name: str
    instance: str


def default_name(environment: str) -> str:
    """Returns a name such as `math@host`."""
    return f"{environment}@{re.sub(r'[^A-Za-z0-9._-]', '-', socket.gethostname())[:64]}"


@contextlib.contextmanager
def held_identity(folder: Path, *, name: str | None, default: str) -> Iterator[Identity]:
    """Holds the identity of this process while the context is open. `name`: chosen by the user;
    None: `default`, with -2, -3, ... appended if another process has that name."""
    names = [name] if name else [default, *(f"{default}-{n}" for n in range(2, _MOST_NAMES))]
    for candidate in names:
        file = _opened(folder / f"{candidate}.json")
        try:
            if _locks(file):
                yield Identity(candidate, _instance(file))
                return
        finally:
            os.close(file)
    raise ConfigError(
        f"Another process in {folder} is {names[0]!r} now.",
        hint="Give this one another with --name.",
    )


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened: {error.strerror}.", hint="Choose a folder: --joined_folder."
        ) from error


def _locks(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _instance(file: int) -> str:
    """Returns the secret in the file; writes a new one if it is missing or incomplete."""
    with contextlib.suppress(msgspec.DecodeError):
        found = msgspec.json.decode(os.pread(file, 4096, 0), type=dict[str, str])
        if len(found.get("instance", "")) >= 16:
            return found["instance"]
    instance = secrets.token_urlsafe(24)
    os.ftruncate(file, 0)
    os.pwrite(file, msgspec.json.encode({"instance": instance}), 0)
    os.fsync(file)
    return instance
