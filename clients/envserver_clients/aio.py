"""The client for asyncio; `envserver_clients.http` shows how a trainer uses it."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Self, Unpack
from urllib.parse import quote, urlencode

import httpx
from envserver_records import ConflictError, EnvserverError, NotFoundError, Split, Trajectory
from envserver_records.http_errors import Urls, authorization
from envserver_records.servers import AsyncServersClient
from envserver_records.tasks import Json
from envserver_records.waiting import cancel_and_wait
from envserver_records.wire import GROUP_MSGPACK, GROUPS_MSGPACK, LEASE_STREAM, GroupSummary

from .protocol import (
    HAS_ZSTD,
    LONGEST_WAIT_SECONDS,
    Answer,
    BatchLimits,
    Call,
    Delivery,
    EstimatePage,
    InFlight,
    LeaseStreamReader,
    Retries,
    ServerUnreachable,
    TaskEstimate,
    TaskPage,
    TaskSummary,
    batch_of,
    checked,
    decompress,
    new_key,
    object_of,
    pause_before_next,
    rollouts_in,
)
from .records import Batch, ClientGroup, decode_batch, decode_group, decode_page, decoded

log = logging.getLogger(__name__)

_PAGE: Final = 1024
_INLINE_BYTES: Final = 256 * 1024
"""Smaller answers are decompressed on the event loop, larger ones in a thread."""


class EnvClient:
    """Leases batches for one run; an async context manager that registers the run.

    Args:
        url: the server's address; several equal servers: a list, or a text with commas.
        run: name of this trainer's run; an existing run of that name continues. None: register no
            run, to order rollouts, publish versions or read groups only; `lease` is not possible.
        batch_size: groups per batch.
        delivery: "shared": each group goes to one of all shared runs; "broadcast": this run gets
            every group.
        environments: only groups of these environments; empty: of all.
        settings: JSON-like data that the server stores with the run.
        token: the server's access token. Default: the environment variable ENVSERVER_TOKEN.
        keep_leases_seconds: keep open leases this far from their end while the client is open.
            Default: leases are not extended.
        compress: accept groups compressed as the server stores them (zstd), which saves the server
            work and transfer; without effect where zstd is not installed.
        timeout_seconds: time limit of a request, in addition to the wait that it requests.
        retries: see `Retries`. Default: `Retries()`.
        transport: for tests.
    """

    def __init__(
        self,
        url: Urls,
        *,
        run: str | None,
        batch_size: int = 8,
        delivery: Delivery = "shared",
        environments: Sequence[str] = (),
        settings: Json | None = None,
        token: str | None = None,
        keep_leases_seconds: float | None = None,
        compress: bool = True,
        timeout_seconds: float = 60.0,
        retries: Retries | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._run = run
        self._path = f"/v1/runs/{quote(run or '', safe='')}"
        self._about: Json = {"name": run or "", "batch_size": batch_size}
        self._about |= {"delivery": delivery, "environments": list(environments)}
        if settings:
            self._about["settings"] = settings
        self._url = url
        self._keep_seconds = keep_leases_seconds
        self._compress = compress
        self._timeout_seconds = timeout_seconds
        self._retries = retries or Retries()
        self._held: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._http = AsyncServersClient(url, transport=transport, headers=authorization(token))

    def __repr__(self) -> str:
        return f"EnvClient({self._url!r}, run={self._about['name']!r})"

    async def __aenter__(self) -> Self:
        try:
            if self._run is not None:
                await self.register()
        except BaseException:
            await self.close()
            raise
        if self._keep_seconds is not None:
            self._start(self._keep(self._keep_seconds), "keep-leases")
        return self

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes connections and streams; leases stay open."""
        tasks = list(self._tasks)
        await cancel_and_wait(*tasks)
        await self._http.aclose()

    # The run

    async def register(self) -> Json:
        """Creates or continues the run; returns what the server knows about it. Raises
        ConflictError: a run of this name has another delivery."""
        return await self._json("POST", "/v1/runs", self._about)

    async def resume(self, checkpoint: str | None) -> Json:
        """Goes back to a checkpoint: groups acknowledged after it are delivered again in their old
        order, and open leases of the run are given back.

        `checkpoint`: name that was last passed to `ack`. None: the trainer starts from scratch, and
        everything that the run ever acknowledged is delivered again. Raises NotFoundError: the run
        has no such checkpoint.
        """
        since = {"from_start": True} if checkpoint is None else {"checkpoint": checkpoint}
        # The key makes a late copy of this request harmless.
        answer = await self._json("POST", "/v1/runs", self._about | since, headers=new_key())
        self._held.clear()
        return answer

    async def checkpoints(self) -> list[Json]:
        """Returns `name`, `acked_groups` and `created_at` of each checkpoint, oldest first."""
        found: list[Json] = (await self._json("GET", f"{self._path}/checkpoints"))["checkpoints"]
        return found

    async def close_run(self) -> None:
        """Ends the run: gives back its open leases; the server keeps no more groups for it."""
        await self._send(Call("POST", f"{self._path}/close"))
        self._held.clear()

    # Groups

    async def lease(
        self, *, whole: bool = True, wait_seconds: float = 0.0, **wanted: Unpack[BatchLimits]
    ) -> Batch | None:
        """Leases the oldest groups; None if too few arrive within `wait_seconds` (at most 60).

        Args:
            whole: lease only a full batch (of `max_groups`, or `batch_size` groups).
            wanted: see `BatchLimits`.
        """
        body = self._limits(whole, wanted) | {"wait_seconds": wait_seconds}
        path = f"{self._path}/lease"
        call = Call("POST", path, body, GROUPS_MSGPACK, wait_seconds, new_key())
        batch = batch_of(await self._send(call))
        if batch is not None:
            self._held.add(batch.lease_id)
        return batch

    def _limits(self, whole: bool, wanted: BatchLimits) -> Json:
        limits: Json = dict(wanted)
        if not {"max_groups", "max_sequences", "max_tokens"} & limits.keys():
            limits["max_groups"] = self._about["batch_size"]
        limits.setdefault("min_groups", limits.get("max_groups", 1) if whole else 1)
        if "environments" in limits:
            limits["environments"] = list(limits["environments"])
        return limits

    async def batches(
        self,
        *,
        whole: bool = True,
        idle_seconds: float | None = None,
        **wanted: Unpack[BatchLimits],
    ) -> AsyncGenerator[Batch, None]:
        """Yields batches without end; requests each one when the one before is done.

        Arguments as for `lease`. `idle_seconds`: end after this time without a batch.
        """
        while True:
            idle_until = None if idle_seconds is None else time.monotonic() + idle_seconds
            batch = None
            while batch is None:
                wait = _wait_seconds(idle_until)
                batch = await self.lease(whole=whole, wait_seconds=wait, **wanted)
                if batch is None and idle_until is not None and time.monotonic() >= idle_until:
                    return
            yield batch

    async def stream(
        self,
        *,
        window: int = 2,
        whole: bool = True,
        give_back: bool = False,
        idle_seconds: float | None = None,
        **wanted: Unpack[BatchLimits],
    ) -> AsyncGenerator[Batch, None]:
        """Yields batches that the server pushes: the next ones arrive while one is trained on.

        Broken connections are made again, without losing or repeating a batch. Closing the iterator
        gives back the batches that arrived and were not yielded.

        Args:
            window: maximum number of leased, unacknowledged batches. Their leases run while they
                wait here: see `keep_leases_seconds`.
            whole, wanted: as for `lease`.
            give_back: when the connection breaks, the server gives unacknowledged groups to others
                at once. Default: they stay leased to this stream until their leases end.
            idle_seconds: end after this time without a batch.

        Raises:
            ServerUnreachable: the connection could not be made again after all tries.
            NotFoundError, ConflictError: the run does not exist, or it is closed.
        """
        query = self._limits(whole, wanted) | {"stream": uuid.uuid4().hex, "window": window}
        query["on_hangup"] = "give_back" if give_back else "keep"
        path = f"{self._path}/stream?{urlencode(query, doseq=True)}"
        call = Call("GET", path, accept=LEASE_STREAM)
        arrived: asyncio.Queue[Batch | None] = asyncio.Queue()  # bounded by the window
        reader = self._start(self._read_stream(call, arrived), "lease-stream")
        try:
            while True:
                async with asyncio.timeout(idle_seconds):
                    batch = await arrived.get()
                if batch is None:
                    await reader  # raises the error that ended it
                    return
                yield batch
        except TimeoutError:
            return
        finally:
            reader.cancel()
            with suppress(asyncio.CancelledError, EnvserverError):
                await reader
            while not (arrived.empty() or self._http.is_closed):
                if unread := arrived.get_nowait():
                    await self._give_back(unread)

    async def _give_back(self, batch: Batch) -> None:
        try:
            await self.nack(batch, reason="unread")
        except EnvserverError as error:
            log.info("lease %s ends by itself: %s", batch.lease_id, error)

    async def _read_stream(self, call: Call, arrived: asyncio.Queue[Batch | None]) -> None:
        """Puts batches into `arrived` until cancelled or out of tries; the last item is None."""
        last, failed = "", 0
        try:
            while True:
                problem: Exception | Answer
                try:
                    async for batch in self._connected(call, last):
                        last, failed = batch.lease_id, 0
                        self._held.add(last)
                        arrived.put_nowait(batch)
                    problem = httpx.ReadError("the stream ended")
                except httpx.TransportError as error:
                    problem = error
                except _Refused as refusal:
                    problem = refusal.answer
                failed += 1
                pause = pause_before_next(self._retries, failed, problem, self._http.base_url)
                if pause is None:
                    checked(problem)
                await asyncio.sleep(pause or 0.0)
        finally:
            arrived.put_nowait(None)

    async def _connected(self, call: Call, last: str) -> AsyncIterator[Batch]:
        """Yields the batches of one connection, beginning after the lease `last`."""
        headers = {"accept": call.accept, "accept-encoding": self._encodings}
        if last:
            headers["last-event-id"] = last
        timeout = _timeout(self._timeout_seconds, call)
        async with self._http.stream(
            call.method, call.path, headers=headers, timeout=timeout
        ) as answer:
            if answer.status_code != 200:
                raise _Refused(Answer(answer.status_code, answer.headers, await answer.aread()))
            leases = LeaseStreamReader(answer.headers.get("content-encoding", ""))
            async for part in answer.aiter_raw():
                for lease in leases.feed(part):
                    if lease:
                        yield decode_batch(lease)

    async def ack(self, batch: Batch | str, *, checkpoint: str | None = None) -> None:
        """Reports that the batch was trained on, so it is never delivered again. Idempotent.

        `batch`: or its `lease_id` as stored in a checkpoint. `checkpoint`: name of the checkpoint
        that was just saved and holds what was learned from this batch and all earlier ones;
        `resume` goes back to it. Raises ConflictError: the lease expired and other runs have its
        groups.
        """
        await self._close_lease("ack", batch, checkpoint=checkpoint)

    async def nack(self, batch: Batch | str, *, reason: str | None = None) -> None:
        """Gives the batch back, to be delivered again first. The server counts `reason`s."""
        await self._close_lease("nack", batch, reason=reason)

    async def set_aside(self, batch: Batch | str, group_ids: Sequence[str], *, reason: str) -> None:
        """Takes groups that cannot be used out of the batch: they are never delivered again. Train
        on the others, and acknowledge the batch as usual."""
        await self._on_lease("nack", batch, group_ids=list(group_ids), reason=reason)

    async def _close_lease(self, what: str, batch: Batch | str, **more: Any) -> None:
        lease_id = _lease_id(batch)
        try:
            await self._on_lease(what, lease_id, **more)
        except (ConflictError, NotFoundError):
            self._held.discard(lease_id)
            raise
        self._held.discard(lease_id)

    async def _on_lease(self, what: str, batch: Batch | str, **more: Any) -> Answer:
        given = {name: value for name, value in more.items() if value is not None}
        body = {"lease_id": _lease_id(batch), **given}
        return await self._send(Call("POST", f"{self._path}/{what}", body))

    async def extend(self, batch: Batch | str, seconds: float) -> float:
        """Sets the end of the lease to `seconds` from now; returns it (the server's clock)."""
        answer = await self._on_lease("extend", batch, seconds=seconds)
        return float(object_of(answer)["expires_at"])

    async def _keep(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds / 3)
            for lease_id in list(self._held):
                try:
                    await self.extend(lease_id, seconds)
                except (ConflictError, NotFoundError) as error:
                    self._held.discard(lease_id)
                    log.warning("lease %s was lost: %s", lease_id, error)
                except EnvserverError as error:
                    log.warning("lease %s could not be extended: %s", lease_id, error)

    async def list_groups(self, *, after: int = 0, limit: int = 100) -> list[GroupSummary]:
        """Returns summaries of up to `limit` (at most 1024) groups after `after`, oldest first.

        Nothing is leased. For the next page pass the last summary's `seq`.
        """
        call = Call("GET", f"/v1/groups?after={after}&limit={limit}")
        return decode_page((await self._send(call)).content)

    async def get_group(self, group_id: str) -> ClientGroup:
        """Returns one group with its rows, in any state, without leasing or consuming it."""
        call = Call("GET", f"/v1/groups/{quote(group_id, safe='')}", accept=GROUP_MSGPACK)
        return decode_group((await self._send(call)).content)

    # Tasks

    async def tasks(
        self, environment: str, *, split: Split | None = None, after: int = 0, limit: int = 100
    ) -> list[TaskSummary]:
        """Returns up to `limit` tasks of an environment after the first `after`, without hidden
        parts.

        `split`: default: the one that the server serves. Raises NotFoundError: the server does not
        have the environment.
        """
        query = {"environment": environment, "split": split}
        return await self._pages("/v1/tasks", query, TaskPage, "a page of tasks", after, limit)

    async def task_estimates(
        self,
        *,
        environment: str | None = None,
        split: Split | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[TaskEstimate]:
        """Returns how often each task is solved; tasks that were never scored are left out.

        `after`: only tasks with a larger `number`. Default: all tasks of all environments and
        splits.
        """
        query = {"environment": environment, "split": split}
        what = "a page of estimates"
        return await self._pages("/v1/tasks/estimates", query, EstimatePage, what, after, limit)

    async def _pages(
        self,
        path: str,
        query: dict[str, str | None],
        kind: type[Any],
        what: str,
        after: int | None,
        limit: int | None,
    ) -> list[Any]:
        found: list[Any] = []
        given = {name: value for name, value in query.items() if value is not None}
        while after is not None and (limit is None or len(found) < limit):
            most = _PAGE if limit is None else min(limit - len(found), _PAGE)
            call = Call("GET", f"{path}?{urlencode(given | {'after': after, 'limit': most})}")
            page = decoded((await self._send(call)).content, kind, what)
            found += page.items
            after = page.next
        return found

    async def rollouts(
        self,
        environment: str,
        task_ids: Sequence[str],
        *,
        group_size: int = 1,
        split: Split | None = None,
        key: str | None = None,
        timeout_seconds: float = 3600.0,
    ) -> list[list[Trajectory | None]]:
        """Runs `group_size` rollouts of each task now; returns them in the order of the tasks.

        None stands for a rollout that failed after all its tries without the model's fault.

        Args:
            task_ids: at most 1024; a repeated id gets several groups.
            split: the tasks' split. Default: the one that the server serves.
            key: a repeated request with the same key and tasks returns the same rollouts, as long
                as the server keeps them. Default: a new key.
            timeout_seconds: for all rollouts together.

        Raises:
            NotFoundError: the server does not have the environment or a task.
            ServerUnreachable: the rollouts were not finished in time, or the server is gone.
        """
        if not task_ids:
            return []
        order: Json = {"environment": environment, "task_ids": list(task_ids)}
        order["group_size"] = group_size
        if split is not None:
            order["split"] = split
        headers = {"idempotency-key": key} if key else new_key()
        until = time.monotonic() + timeout_seconds
        while True:
            wait = _wait_seconds(until)
            body = order | {"wait_seconds": wait}
            call = Call("POST", "/v1/rollouts", body, GROUPS_MSGPACK, wait, headers)
            answer = await self._send(call)
            if answer.status != 202:
                return rollouts_in(answer, task_ids, group_size)
            if time.monotonic() >= until:
                raise ServerUnreachable(
                    f"The rollouts were not all finished within {timeout_seconds:g} s.",
                    hint="Allow more time; GET /v1/status shows what the server does.",
                )

    # The policy, the engine, the server

    async def publish_policy_version(self, version: int) -> None:
        """Reports that the engine now samples with the weights of `version`."""
        await self._send(Call("POST", "/v1/policy-version", {"version": version}))

    async def pause_calls(
        self, in_flight: InFlight = "drain", *, timeout_seconds: float = 60.0
    ) -> bool:
        """Stops new model calls from reaching the engine, for a weight update.

        Running calls end first ("drain"), continue across the update, and are marked ("keep"), or
        are repeated afterwards ("abort"). Returns whether no call is running any more after
        `timeout_seconds` (always True with "keep"). Paused in any case.
        """
        body = {"in_flight": in_flight, "timeout_seconds": timeout_seconds}
        answer = await self._json(
            "POST", "/v1/policy/pause", body, extra_seconds=timeout_seconds, headers=new_key()
        )
        return bool(answer["idle"])

    async def resume_calls(self, version: int | None = None) -> None:
        """Lets model calls continue with the weights of `version`. None: the version as before."""
        body = {} if version is None else {"version": version}
        await self._send(Call("POST", "/v1/policy/resume", body, headers=new_key()))

    async def register_engine(
        self, url: str, version: int | None = None, *, wait_seconds: float = 60.0
    ) -> Json:
        """Registers an engine that serves the weights of `version`; again: updates its version.

        Returns its row of GET /v1/engines: `id`, `standing`, `reason` ... Waits up to
        `wait_seconds` for the check of a new engine. Raises ConflictError: the engine differs from
        the server's others.
        """
        body: Json = {"url": url, "wait_seconds": wait_seconds}
        if version is not None:
            body["version"] = version
        answer = await self._json("POST", "/v1/engines", body, extra_seconds=wait_seconds)
        row: Json = answer["engine"]
        return row

    async def engines(self) -> list[Json]:
        """Returns the rows of GET /v1/engines: `id`, `url`, `weights_version`, `standing`, ..."""
        rows: list[Json] = (await self._json("GET", "/v1/engines"))["engines"]
        return rows

    async def pause_engine(self, engine_id: str) -> None:
        """Sends no more calls to an engine; its running calls move to another one."""
        body = {"in_flight": "abort", "timeout_seconds": 1.0}
        await self._send(Call("POST", f"/v1/engines/{quote(engine_id, safe='')}/pause", body))

    async def resume_engine(self, engine_id: str, version: int) -> None:
        """Sends calls to an engine again, which now has the weights of `version`."""
        path = f"/v1/engines/{quote(engine_id, safe='')}/resume"
        await self._send(Call("POST", path, {"version": version}))

    async def status(self) -> Json:
        """Returns GET /v1/status."""
        return await self._json("GET", "/v1/status")

    # Sending

    @property
    def _encodings(self) -> str:
        return "zstd" if self._compress and HAS_ZSTD else "identity"

    async def _json(self, method: str, path: str, json: Json | None = None, **more: Any) -> Json:
        return object_of(await self._send(Call(method, path, json, **more)))

    async def _send(self, call: Call) -> Answer:
        tried = 0
        while True:
            tried += 1
            problem: Exception | Answer
            try:
                problem = await self._ask(call)
            except httpx.TransportError as error:
                problem = error
            pause = pause_before_next(self._retries, tried, problem, self._http.base_url)
            if pause is None:
                return checked(problem)
            await asyncio.sleep(pause)

    async def _ask(self, call: Call) -> Answer:
        headers = call.headers | {"accept": call.accept}
        if call.is_packed:
            headers["accept-encoding"] = self._encodings
        request = self._http.build_request(
            call.method,
            call.path,
            json=call.json,
            headers=headers,
            timeout=_timeout(self._timeout_seconds, call),
        )
        answer = await self._http.send(request, stream=True)
        try:
            if not call.is_packed:
                return Answer(answer.status_code, answer.headers, await answer.aread())
            raw = b"".join([part async for part in answer.aiter_raw()])
        finally:
            await answer.aclose()
        encoding = answer.headers.get("content-encoding", "")
        if len(raw) < _INLINE_BYTES:
            content = decompress(raw, encoding)
        else:
            content = await asyncio.to_thread(decompress, raw, encoding)
        return Answer(answer.status_code, answer.headers, content)


class _Refused(Exception):
    """The server's answer is not a stream."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer


def _lease_id(batch: Batch | str) -> str:
    return batch if isinstance(batch, str) else batch.lease_id


def _timeout(seconds: float, call: Call) -> httpx.Timeout:
    return httpx.Timeout(seconds, read=seconds + call.extra_seconds)


def _wait_seconds(idle_until: float | None) -> float:
    if idle_until is None:
        return LONGEST_WAIT_SECONDS
    return min(LONGEST_WAIT_SECONDS, max(0.0, idle_until - time.monotonic()))
