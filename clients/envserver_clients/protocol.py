"""Builds the requests of both clients and reads the answers, without any input or output.

In: what a trainer asks for. Out: `Call`s to send; batches and typed errors from the answers.
"""

from __future__ import annotations

import gzip
import random
import re
import time
import uuid
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypedDict
from urllib.parse import quote, urlencode

import msgspec
from envserver_records import (
    ConflictError,
    EnvserverError,
    Group,
    InputError,
    NotFoundError,
    Split,
    StoreError,
    Trajectory,
    unpack,
)
from envserver_records.framing import FrameReader
from envserver_records.http_errors import Urls, server_urls
from envserver_records.waiting import Backoff
from envserver_records.wire import GROUP_MSGPACK, GROUPS_MSGPACK, LEASE_STREAM

from .records import Batch, decode_batch, decoded

try:  # the server compresses only what a client accepts
    from envserver_records.zstd import zstd
except ModuleNotFoundError:
    HAS_ZSTD = False
else:
    HAS_ZSTD = True

InFlight = Literal["drain", "keep", "abort"]
Delivery = Literal["shared", "broadcast"]

LONGEST_WAIT_SECONDS: Final = 60.0
_WARNING_HEADER: Final = "x-envserver-warning"
_PASSING: Final = frozenset({429, 502, 503, 504, 507})


class ServerUnreachable(EnvserverError):
    """The server did not answer after all tries."""

    kind = "server_unreachable"


class NotAllowed(EnvserverError):
    """The access token is missing or not accepted."""

    kind = "not_allowed"


@dataclass(frozen=True)
class Retries:
    """The number of tries of a request, and the pauses between them.

    Args:
        tries: maximum number of requests, the first one included.
        first_pause_seconds: pause before the second request; later ones double, with jitter.
        longest_pause_seconds: maximum pause.
    """

    tries: int = 6
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 10.0

    def pause_seconds(self, tried: int) -> float:
        backoff = Backoff(self.first_pause_seconds, self.longest_pause_seconds, jitter=(0.5, 1.0))
        return backoff.seconds(tried, random.random())


_ONE: Final = Retries()
_SEVERAL: Final = Retries(tries=40, longest_pause_seconds=2.0)
"""About a minute: another server takes over within seconds, after a database's restart too."""


def retries_for(url: Urls) -> Retries:
    """Returns the default for one server, or for several: then a try is a round of all of them."""
    return _ONE if len(server_urls(url)) == 1 else _SEVERAL


class BatchLimits(TypedDict, total=False):
    """Limits and filters of a batch; all are optional.

    A batch stays within every limit but holds at least one group. Groups that a filter excludes
    stay in the queue.
    """

    max_groups: int
    """Maximum number of groups. Default: `batch_size`, or no limit if another one is given."""
    max_sequences: int
    """Maximum number of trajectories in all groups together."""
    max_tokens: int
    """Maximum number of tokens in all groups together."""
    min_groups: int
    """Minimum number of groups; overrides `whole`."""
    environments: Sequence[str]
    """Only groups of these environments."""
    min_version: int
    """Only groups sampled with this policy version or a later one."""
    max_staleness: int
    """Maximum number of policy versions between a group and the last published one."""
    seconds: float
    """Duration of the lease. Default: the server's setting."""


@dataclass(frozen=True)
class Call:
    """A request before it is sent."""

    method: str
    path: str
    json: dict[str, Any] | None = None
    accept: str = "application/json"
    extra_seconds: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def is_packed(self) -> bool:
        return self.accept in (GROUPS_MSGPACK, GROUP_MSGPACK)


@dataclass(frozen=True)
class Answer:
    """A response, decompressed."""

    status: int
    headers: Mapping[str, str]
    content: bytes


class Calls:
    """Builds the requests of one run."""

    def __init__(
        self,
        run: str,
        *,
        batch_size: int,
        delivery: Delivery,
        environments: Sequence[str],
        settings: dict[str, Any] | None,
    ) -> None:
        self.name = run
        self.batch_size = batch_size
        self._about: dict[str, Any] = {"name": run, "batch_size": batch_size, "delivery": delivery}
        self._about["environments"] = list(environments)
        if settings:
            self._about["settings"] = settings
        self._path = f"/v1/runs/{quote(run, safe='')}"

    def register(self) -> Call:
        return Call("POST", "/v1/runs", self._about)

    def resume(self, checkpoint: str | None) -> Call:
        """Builds a request whose key makes a late copy of it harmless."""
        since = {"from_start": True} if checkpoint is None else {"checkpoint": checkpoint}
        return Call("POST", "/v1/runs", self._about | since, headers=new_key())

    def close_run(self) -> Call:
        return Call("POST", f"{self._path}/close")

    def lease(self, *, whole: bool, wait_seconds: float, wanted: BatchLimits) -> Call:
        body = self._limits(whole, wanted) | {"wait_seconds": wait_seconds}
        return Call("POST", f"{self._path}/lease", body, GROUPS_MSGPACK, wait_seconds, new_key())

    def stream(
        self, *, stream_id: str, whole: bool, window: int, give_back: bool, wanted: BatchLimits
    ) -> Call:
        query = self._limits(whole, wanted) | {"stream": stream_id, "window": window}
        query["on_hangup"] = "give_back" if give_back else "keep"
        path = f"{self._path}/stream?{urlencode(query, doseq=True)}"
        return Call("GET", path, accept=LEASE_STREAM)

    def _limits(self, whole: bool, wanted: BatchLimits) -> dict[str, Any]:
        limits: dict[str, Any] = dict(wanted)
        if not {"max_groups", "max_sequences", "max_tokens"} & limits.keys():
            limits["max_groups"] = self.batch_size
        least = limits.get("max_groups", 1) if whole else 1
        limits.setdefault("min_groups", least)
        if "environments" in limits:
            limits["environments"] = list(limits["environments"])
        return limits

    def on_lease(self, what: str, lease_id: str, **more: Any) -> Call:
        given = {name: value for name, value in more.items() if value is not None}
        return Call("POST", f"{self._path}/{what}", {"lease_id": lease_id, **given})

    def checkpoints(self) -> Call:
        return Call("GET", f"{self._path}/checkpoints")

    @staticmethod
    def groups(after: int, limit: int) -> Call:
        return Call("GET", f"/v1/groups?after={after}&limit={limit}")

    @staticmethod
    def group(group_id: str) -> Call:
        return Call("GET", f"/v1/groups/{quote(group_id, safe='')}", accept=GROUP_MSGPACK)

    @staticmethod
    def policy_version(version: int) -> Call:
        return Call("POST", "/v1/policy-version", {"version": version})

    @staticmethod
    def pause(in_flight: InFlight, timeout_seconds: float) -> Call:
        body = {"in_flight": in_flight, "timeout_seconds": timeout_seconds}
        return Call(
            "POST", "/v1/policy/pause", body, extra_seconds=timeout_seconds, headers=new_key()
        )

    @staticmethod
    def resume_calls(version: int | None) -> Call:
        body = {} if version is None else {"version": version}
        return Call("POST", "/v1/policy/resume", body, headers=new_key())

    @staticmethod
    def register_engine(url: str, version: int | None, wait_seconds: float) -> Call:
        body: dict[str, Any] = {"url": url, "wait_seconds": wait_seconds}
        if version is not None:
            body["version"] = version
        return Call("POST", "/v1/engines", body, extra_seconds=wait_seconds)

    @staticmethod
    def engines() -> Call:
        return Call("GET", "/v1/engines")

    @staticmethod
    def pause_engine(engine_id: str) -> Call:
        body = {"in_flight": "abort", "timeout_seconds": 1.0}
        return Call("POST", f"/v1/engines/{quote(engine_id, safe='')}/pause", body)

    @staticmethod
    def resume_engine(engine_id: str, version: int) -> Call:
        body = {"version": version}
        return Call("POST", f"/v1/engines/{quote(engine_id, safe='')}/resume", body)

    @staticmethod
    def status() -> Call:
        return Call("GET", "/v1/status")


def new_key() -> dict[str, str]:
    """A header that tells the copies of one request from other requests."""
    return {"idempotency-key": uuid.uuid4().hex}


def pause_before_next(retries: Retries, tried: int, problem: Exception | Answer) -> float | None:
    """The seconds before the next request; None: the answer is final. Raises ServerUnreachable."""
    if isinstance(problem, Answer) and problem.status not in _PASSING:
        return None
    if tried < retries.tries:
        return max(retries.pause_seconds(tried), _server_pause_seconds(problem))
    if isinstance(problem, Answer):
        return None
    raise ServerUnreachable(
        f"No answer after {tried} tries: {problem or type(problem).__name__}."
    ) from problem


def _server_pause_seconds(problem: Exception | Answer) -> float:
    after = problem.headers.get("retry-after", "") if isinstance(problem, Answer) else ""
    return min(float(after), LONGEST_WAIT_SECONDS) if after.isdecimal() else 0.0


def checked(answer: Answer) -> Answer:
    """Returns a successful answer, with its warning; raises the error of any other."""
    if 200 <= answer.status < 300:
        if warning := answer.headers.get(_WARNING_HEADER):
            warnings.warn(warning, stacklevel=2)
        return answer
    raise _error(answer)


def _error(answer: Answer) -> EnvserverError:
    try:
        problem = msgspec.json.decode(answer.content)
        message = str(problem["detail"])
    except (msgspec.DecodeError, KeyError, TypeError):
        problem, message = {}, answer.content[:500].decode(errors="replace")
    kind = _KINDS.get(answer.status)
    if kind is None:
        kind = InputError if answer.status < 500 else EnvserverError
    return kind(message, hint=str(problem.get("hint", "")))


_KINDS: Final[dict[int, type[EnvserverError]]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFoundError,
    409: ConflictError,
    503: StoreError,
    507: StoreError,
}


def batch_of(answer: Answer) -> Batch | None:
    return None if answer.status == 204 else decode_batch(answer.content)


def object_of(answer: Answer) -> dict[str, Any]:
    return decoded(answer.content, dict[str, Any], "a JSON object")


def decompress(content: bytes, encoding: str) -> bytes:
    """Raises InputError: the body is damaged, or compressed in another way than was asked for."""
    if encoding in ("", "identity"):
        return content
    if encoding == "zstd" and HAS_ZSTD:
        try:
            return zstd.decompress(content)
        except zstd.ZstdError as error:
            raise _damaged(error) from error
    if encoding == "gzip":
        try:
            return gzip.decompress(content)
        except (EOFError, OSError) as error:
            raise _damaged(error) from error
    raise _unknown(encoding)


class LeaseStreamReader:
    """Cuts one connection's stream of leases into their bytes; empty ones are heartbeats.

    With the content encoding zstd the whole stream is zstd frames one after the other.
    """

    def __init__(self, encoding: str) -> None:
        if encoding not in ("", "identity", *(["zstd"] if HAS_ZSTD else [])):
            raise _unknown(encoding)
        self._inflater = zstd.ZstdDecompressor() if encoding == "zstd" else None
        self._reader = FrameReader()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yields the leases that `data` completes. Raises InputError: the stream is damaged."""
        for part in self._inflated(data):
            yield from self._reader.feed(part)

    def _inflated(self, data: bytes) -> Iterator[bytes]:
        if self._inflater is None:
            yield data
            return
        while data:
            try:
                part = self._inflater.decompress(data)
            except zstd.ZstdError as error:
                raise _damaged(error) from error
            if part:
                yield part
            data = b""
            if self._inflater.eof:
                data = self._inflater.unused_data
                self._inflater = zstd.ZstdDecompressor()


def _damaged(error: Exception) -> InputError:
    return InputError(f"The server's answer is damaged: {error}.", place="body")


def _unknown(encoding: str) -> InputError:
    return InputError(f"The server's answer is compressed as {encoding}.", place="body")


_PAGE: Final = 1024
_NUMBER: Final = re.compile(r"-r(\d+)$")


class TaskSummary(msgspec.Struct, frozen=True):
    """A task without its hidden part; `public` is what a rollout needs."""

    task_id: str
    public: dict[str, Any]


class _TaskPage(msgspec.Struct):
    """`next` is the `after` of the next page, None on the last one."""

    tasks: list[TaskSummary]
    next: int | None


class TaskEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The success rate of one task.

    Args:
        number: order in which tasks were first scored.
        attempts: rollouts so far, without those of evaluations.
        mean_reward: their mean, weighted towards recent policies; None if all are out of date.
        success: probability that the next rollout solves the task, in (0, 1); 0.5 if unknown.
        weight: attempts that still count.
        policy_version: the last one that tried the task; -1 if unknown.
        scored_at: seconds of the server's clock.
    """

    number: int
    task_id: str
    environment: str
    split: str
    attempts: int
    mean_reward: float | None
    success: float
    weight: float
    policy_version: int
    scored_at: float


class _EstimatePage(msgspec.Struct):
    estimates: list[TaskEstimate]
    next: int | None


class OnDemand(ABC):
    """The methods of a client that are about tasks."""

    @abstractmethod
    async def _send(self, call: Call) -> Answer:
        """Returns the answer to `call`, repeated where that may help; raises the server's error."""

    async def tasks(
        self, environment: str, *, split: Split | None = None, after: int = 0, limit: int = 100
    ) -> list[TaskSummary]:
        """Returns the tasks of an environment in their order, without their hidden parts.

        Args:
            split: default: the one that the server serves.
            after: number of tasks to skip.
            limit: maximum number of tasks.

        Raises:
            NotFoundError: the server does not have the environment.
        """
        found: list[TaskSummary] = []
        following: int | None = after
        while following is not None and len(found) < limit:
            most = min(limit - len(found), _PAGE)
            call = _page_call("/v1/tasks", environment, split, following, most)
            page = decoded((await self._send(call)).content, _TaskPage, "a page of tasks")
            found += page.tasks
            following = page.next
        return found

    async def task_estimates(
        self,
        *,
        environment: str | None = None,
        split: Split | None = None,
        after: int = 0,
        limit: int | None = None,
    ) -> list[TaskEstimate]:
        """Returns how often each task is solved; tasks that were never scored are left out.

        Args:
            environment, split: only tasks of these. Default: all.
            after: only tasks with a larger `number`.
            limit: maximum number of tasks. Default: all.
        """
        found: list[TaskEstimate] = []
        following: int | None = after
        while following is not None and (limit is None or len(found) < limit):
            most = _PAGE if limit is None else min(limit - len(found), _PAGE)
            call = _page_call("/v1/tasks/estimates", environment, split, following, most)
            answer = await self._send(call)
            page = decoded(answer.content, _EstimatePage, "a page of estimates")
            found += page.estimates
            following = page.next
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
        key = key or uuid.uuid4().hex
        order = RolloutOrder(environment, task_ids, group_size, split, timeout_seconds, key)
        while True:
            found = rollouts_in(await self._send(order.call()), order)
            if found is not None:
                return found
            if not order.seconds_left():
                raise ServerUnreachable(
                    f"The rollouts were not all finished within {timeout_seconds:g} s.",
                    hint="Allow more time; GET /v1/status shows what the server does.",
                )


@dataclass(frozen=True)
class RolloutOrder:
    """An order of rollouts, with its time limit."""

    environment: str
    task_ids: Sequence[str]
    group_size: int
    split: Split | None
    timeout_seconds: float
    key: str
    begun_at: float = field(default_factory=time.monotonic)

    def seconds_left(self) -> float:
        return max(0.0, self.begun_at + self.timeout_seconds - time.monotonic())

    def call(self) -> Call:
        """Returns the request; repeating it continues to wait."""
        wait_seconds = min(LONGEST_WAIT_SECONDS, self.seconds_left())
        body: dict[str, Any] = {
            "environment": self.environment,
            "task_ids": list(self.task_ids),
            "group_size": self.group_size,
            "wait_seconds": wait_seconds,
        }
        if self.split is not None:
            body["split"] = self.split
        key = {"idempotency-key": self.key}
        return Call("POST", "/v1/rollouts", body, GROUPS_MSGPACK, wait_seconds, key)


def rollouts_in(answer: Answer, order: RolloutOrder) -> list[list[Trajectory | None]] | None:
    """All rollouts in the order of the tasks; None: they are not finished."""
    if answer.status == 202:
        return None
    batch = decode_batch(answer.content)
    try:
        groups = [unpack(one.body, Group) for one in batch.groups]
    except msgspec.DecodeError as error:
        raise InputError(
            f"The server's answer does not hold groups: {error}.", place="body"
        ) from error
    if [group.task_id for group in groups] != list(order.task_ids):
        raise InputError("The server answered with other tasks than the order named.", place="body")
    return [_by_number(group, order.group_size) for group in groups]


def _by_number(group: Group, size: int) -> list[Trajectory | None]:
    found: list[Trajectory | None] = [None] * size
    for trajectory in group.trajectories:
        number = _NUMBER.search(trajectory.rollout_id)
        if number is None or int(number[1]) >= size:
            raise InputError(
                f"{trajectory.rollout_id} has no number in its group.", place=group.group_id
            )
        trajectory.images = {
            span.sha256: group.images[span.sha256]
            for sequence in trajectory.sequences
            for span in sequence.images
            if span.sha256 in group.images
        }
        found[int(number[1])] = trajectory
    return found


def _page_call(
    path: str, environment: str | None, split: Split | None, after: int, limit: int
) -> Call:
    query = {"environment": environment, "split": split, "after": after, "limit": limit}
    given = {name: value for name, value in query.items() if value is not None}
    return Call("GET", f"{path}?{urlencode(given)}")
