"""HTTP clients for trainers: lease, train, acknowledge. One for asyncio, one for everybody else.

    with SyncEnvClient("http://127.0.0.1:8000", run="my-run", batch_size=16) as client:
        for batch in client.batches():
            loss = train(batch.rows)                # numpy: tokens, mask, logprobs, reward
            save_checkpoint()
            client.ack(batch)                       # only now the batch is done with
            client.publish_policy_version(step)

What is not acknowledged in time is delivered again, so a trainer that dies loses nothing. A request
that fails on its way, or that the server cannot answer just now, is repeated with growing pauses.

    EnvserverError
    ├── ServerUnreachable    no answer after all tries
    ├── NotFoundError        no such run or lease
    ├── ConflictError        the lease expired and its groups went elsewhere; a version went down
    ├── InputError           the server refused what was sent, or sent what cannot be read
    └── StoreError           the server's store failed
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self
from urllib.parse import quote

import httpx
from anyio.from_thread import start_blocking_portal

from envserver import ConflictError, EnvserverError, InputError, NotFoundError, StoreError

from .records import Batch, ClientGroup, GroupSummary, decode_batch, decode_group, decode_page

MSGPACK: Final = "application/vnd.envserver.groups+msgpack"
GROUP_MSGPACK: Final = "application/vnd.envserver.group+msgpack"

InFlight = Literal["drain", "keep", "abort"]

_LONGEST_WAIT_SECONDS: Final = 60.0
_PASSING: Final = frozenset({502, 503, 504})


class ServerUnreachable(EnvserverError):
    """No answer, however often it was asked for."""

    kind = "server_unreachable"


@dataclass(frozen=True)
class Retries:
    """How often and how patiently a request is repeated.

    Args:
        tries: requests at most, the first one included.
        first_pause_seconds: before the second; doubles from then on, with jitter.
        longest_pause_seconds: no pause is longer.
    """

    tries: int = 6
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 10.0

    def pause_seconds(self, tried: int) -> float:
        """The pause after `tried` requests."""
        pause = self.first_pause_seconds * 2.0 ** min(tried - 1, 32)
        return min(pause, self.longest_pause_seconds) * random.uniform(0.5, 1.0)


@dataclass(frozen=True)
class _Call:
    """A request before it is sent."""

    method: str
    path: str
    json: dict[str, Any] | None = None
    accept: str = "application/json"
    extra_seconds: float = 0.0


class _Run:
    """What both clients send and how both read the answers; no input or output."""

    def __init__(self, run: str, batch_size: int, retries: Retries) -> None:
        self.name = run
        self.batch_size = batch_size
        self.retries = retries
        self._path = f"/v1/runs/{quote(run, safe='')}"

    def register(self, settings: dict[str, Any] | None) -> _Call:
        body: dict[str, Any] = {"name": self.name, "batch_size": self.batch_size}
        return _Call("POST", "/v1/runs", body | ({"settings": settings} if settings else {}))

    def lease(self, *, whole: bool, wait_seconds: float, seconds: float | None) -> _Call:
        body: dict[str, Any] = {
            "max_groups": self.batch_size,
            "min_groups": self.batch_size if whole else 1,
            "wait_seconds": wait_seconds,
        }
        if seconds is not None:
            body["seconds"] = seconds
        return _Call("POST", f"{self._path}/lease", body, MSGPACK, wait_seconds)

    def on_lease(self, what: str, batch: Batch, **more: float) -> _Call:
        return _Call("POST", f"{self._path}/{what}", {"lease_id": batch.lease_id, **more})

    @staticmethod
    def groups(after: int, limit: int) -> _Call:
        return _Call("GET", f"/v1/groups?after={after}&limit={limit}")

    @staticmethod
    def group(group_id: str) -> _Call:
        return _Call("GET", f"/v1/groups/{quote(group_id, safe='')}", accept=GROUP_MSGPACK)

    @staticmethod
    def policy_version(version: int) -> _Call:
        return _Call("POST", "/v1/policy-version", {"version": version})

    @staticmethod
    def pause(in_flight: InFlight, timeout_seconds: float) -> _Call:
        body = {"in_flight": in_flight, "timeout_seconds": timeout_seconds}
        return _Call("POST", "/v1/policy/pause", body, extra_seconds=timeout_seconds)

    @staticmethod
    def resume(version: int | None) -> _Call:
        return _Call("POST", "/v1/policy/resume", {} if version is None else {"version": version})

    def again(self, tried: int, problem: httpx.TransportError | httpx.Response) -> float | None:
        """Seconds to wait before asking again; None when the answer stands.

        Raises:
            ServerUnreachable: it was asked often enough.
        """
        if isinstance(problem, httpx.Response) and problem.status_code not in _PASSING:
            return None
        if tried < self.retries.tries:
            return self.retries.pause_seconds(tried)
        if isinstance(problem, httpx.Response):
            return None
        raise ServerUnreachable(
            f"No answer after {tried} tries: {problem or type(problem).__name__}."
        ) from problem


def _checked(answer: httpx.Response) -> httpx.Response:
    """The answer, or the error that it says."""
    if answer.is_success:
        return answer
    try:
        problem = answer.json()
        message = str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        problem, message = {}, answer.text[:500]
    raise _error(answer.status_code)(message, hint=str(problem.get("hint", "")))


def _error(status: int) -> type[EnvserverError]:
    known: dict[int, type[EnvserverError]] = {404: NotFoundError, 409: ConflictError}
    if status in known:
        return known[status]
    return InputError if status < 500 else StoreError if status in (503, 507) else EnvserverError


def _batch(answer: httpx.Response) -> Batch | None:
    return None if answer.status_code == 204 else decode_batch(answer.content)


def _timeout(seconds: float, call: _Call) -> httpx.Timeout:
    return httpx.Timeout(seconds, read=seconds + call.extra_seconds)


class EnvClient:
    """The asyncio client; an async context manager that registers its run.

    Args:
        url: of the server.
        run: name of this trainer's run; the same name resumes it.
        batch_size: groups per batch.
        timeout_seconds: for one request, beyond the waiting it asks for.
        retries: see `Retries`.
        transport: for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        batch_size: int = 8,
        settings: dict[str, Any] | None = None,
        timeout_seconds: float = 60.0,
        retries: Retries = Retries(),
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._run = _Run(run, batch_size, retries)
        self._settings = settings
        self._timeout_seconds = timeout_seconds
        self._http = httpx.AsyncClient(base_url=url, transport=transport)

    async def __aenter__(self) -> Self:
        try:
            await self.register()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections; leases stay as they are."""
        await self._http.aclose()

    async def register(self) -> dict[str, Any]:
        """Creates or resumes the run; what the server knows of it."""
        answer: dict[str, Any] = (await self._send(self._run.register(self._settings))).json()
        return answer

    async def lease(
        self, *, whole: bool = True, wait_seconds: float = 0.0, seconds: float | None = None
    ) -> Batch | None:
        """The oldest groups, or None when too few came within `wait_seconds` (at most 60).

        Args:
            whole: only a full batch of `batch_size` groups will do.
            seconds: how long the lease lasts; unset: as the server is set.
        """
        call = self._run.lease(whole=whole, wait_seconds=wait_seconds, seconds=seconds)
        return _batch(await self._send(call))

    async def batches(
        self,
        *,
        whole: bool = True,
        seconds: float | None = None,
        idle_seconds: float | None = None,
    ) -> AsyncIterator[Batch]:
        """Batches as they come, without end.

        Args:
            whole, seconds: as for `lease`.
            idle_seconds: end when no batch came for this long.
        """
        while True:
            idle_until = None if idle_seconds is None else time.monotonic() + idle_seconds
            batch = None
            while batch is None:
                wait = _wait_seconds(idle_until)
                batch = await self.lease(whole=whole, wait_seconds=wait, seconds=seconds)
                if batch is None and idle_until is not None and time.monotonic() >= idle_until:
                    return
            yield batch

    async def ack(self, batch: Batch) -> None:
        """The batch is trained on and the checkpoint saved; it is never delivered again."""
        await self._send(self._run.on_lease("ack", batch))

    async def nack(self, batch: Batch) -> None:
        """Gives the batch back; it is delivered again, first."""
        await self._send(self._run.on_lease("nack", batch))

    async def extend(self, batch: Batch, seconds: float) -> float:
        """Lets the lease end `seconds` from now; when that is."""
        answer = await self._send(self._run.on_lease("extend", batch, seconds=seconds))
        return float(answer.json()["expires_at"])

    async def list_groups(self, *, after: int = 0, limit: int = 100) -> list[GroupSummary]:
        """What is known of up to `limit` (at most 1024) groups behind number `after`, oldest first.

        Nothing is leased; the next page begins after the `seq` of the last of them.
        """
        return decode_page((await self._send(self._run.groups(after, limit))).content)

    async def get_group(self, group_id: str) -> ClientGroup:
        """One group with its rows, whatever its state; it is neither leased nor consumed."""
        return decode_group((await self._send(self._run.group(group_id))).content)

    async def publish_policy_version(self, version: int) -> None:
        """The engine samples with the weights of `version` from now on."""
        await self._send(self._run.policy_version(version))

    async def pause_calls(
        self, in_flight: InFlight = "drain", *, timeout_seconds: float = 60.0
    ) -> bool:
        """Lets no new model call reach the engine, for a weight update.

        Args:
            in_flight: what becomes of the calls that are there: drain (they end first), keep (they
                go on over the update, and are marked), abort (they are asked again afterwards).
            timeout_seconds: how long to wait for them.

        Returns:
            Whether none is left there (always with keep). It is paused in any case.
        """
        answer = await self._send(self._run.pause(in_flight, timeout_seconds))
        return bool(answer.json()["idle"])

    async def resume_calls(self, version: int | None = None) -> None:
        """Lets model calls go on, sampled with the weights of `version` (None: as before)."""
        await self._send(self._run.resume(version))

    async def status(self) -> dict[str, Any]:
        """How things stand at the server."""
        answer: dict[str, Any] = (await self._send(_Call("GET", "/v1/status"))).json()
        return answer

    async def _send(self, call: _Call) -> httpx.Response:
        tried = 0
        while True:
            tried += 1
            try:
                answer = await self._http.request(
                    call.method,
                    call.path,
                    json=call.json,
                    headers={"accept": call.accept},
                    timeout=_timeout(self._timeout_seconds, call),
                )
            except httpx.TransportError as error:
                pause = self._run.again(tried, error)
            else:
                pause = self._run.again(tried, answer)
                if pause is None:
                    return _checked(answer)
            await asyncio.sleep(pause or 0.0)


class SyncEnvClient:
    """The same client without asyncio, also inside notebooks: an `EnvClient` in a thread of its
    own.

    A context manager that registers its run; arguments and methods as those of `EnvClient`.
    """

    def __init__(
        self,
        url: str,
        *,
        run: str,
        batch_size: int = 8,
        settings: dict[str, Any] | None = None,
        timeout_seconds: float = 60.0,
        retries: Retries = Retries(),
    ) -> None:
        self._client = EnvClient(
            url,
            run=run,
            batch_size=batch_size,
            settings=settings,
            timeout_seconds=timeout_seconds,
            retries=retries,
        )
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal())
            stack.enter_context(self._portal.wrap_async_context_manager(self._client))
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def lease(
        self, *, whole: bool = True, wait_seconds: float = 0.0, seconds: float | None = None
    ) -> Batch | None:
        """As `EnvClient.lease`."""
        lease = partial(self._client.lease, whole=whole, wait_seconds=wait_seconds, seconds=seconds)
        return self._portal.call(lease)

    def batches(
        self,
        *,
        whole: bool = True,
        seconds: float | None = None,
        idle_seconds: float | None = None,
    ) -> Iterator[Batch]:
        """As `EnvClient.batches`."""
        batches = self._client.batches(whole=whole, seconds=seconds, idle_seconds=idle_seconds)
        while True:
            try:
                yield self._portal.call(batches.__anext__)
            except StopAsyncIteration:
                return

    def ack(self, batch: Batch) -> None:
        """As `EnvClient.ack`."""
        self._portal.call(self._client.ack, batch)

    def nack(self, batch: Batch) -> None:
        """As `EnvClient.nack`."""
        self._portal.call(self._client.nack, batch)

    def extend(self, batch: Batch, seconds: float) -> float:
        """As `EnvClient.extend`."""
        return self._portal.call(self._client.extend, batch, seconds)

    def list_groups(self, *, after: int = 0, limit: int = 100) -> list[GroupSummary]:
        """As `EnvClient.list_groups`."""
        return self._portal.call(partial(self._client.list_groups, after=after, limit=limit))

    def get_group(self, group_id: str) -> ClientGroup:
        """As `EnvClient.get_group`."""
        return self._portal.call(self._client.get_group, group_id)

    def publish_policy_version(self, version: int) -> None:
        """As `EnvClient.publish_policy_version`."""
        self._portal.call(self._client.publish_policy_version, version)

    def pause_calls(self, in_flight: InFlight = "drain", *, timeout_seconds: float = 60.0) -> bool:
        """As `EnvClient.pause_calls`."""
        pause = partial(self._client.pause_calls, in_flight, timeout_seconds=timeout_seconds)
        return self._portal.call(pause)

    def resume_calls(self, version: int | None = None) -> None:
        """As `EnvClient.resume_calls`."""
        self._portal.call(self._client.resume_calls, version)

    def status(self) -> dict[str, Any]:
        """How things stand at the server."""
        return self._portal.call(self._client.status)


def _wait_seconds(idle_until: float | None) -> float:
    """How long one lease request may wait at the server."""
    if idle_until is None:
        return _LONGEST_WAIT_SECONDS
    return min(_LONGEST_WAIT_SECONDS, max(0.0, idle_until - time.monotonic()))
