"""Builds the requests of both clients and reads the answers, without any input or output.

In: what a trainer asks for. Out: `Call`s to send; batches and typed errors from the answers.
"""

from __future__ import annotations

import gzip
import logging
import random
import re
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypedDict

import httpx
import msgspec
from envserver_records import (
    ConflictError,
    EnvserverError,
    Group,
    InputError,
    NotFoundError,
    StoreError,
    Trajectory,
    unpack,
)
from envserver_records.framing import FrameReader
from envserver_records.servers import shown_url
from envserver_records.tasks import Json
from envserver_records.waiting import Backoff
from envserver_records.wire import GROUP_MSGPACK, GROUPS_MSGPACK

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

log = logging.getLogger(__name__)


class ServerUnreachable(EnvserverError):
    """The server did not answer after all tries."""

    kind = "server_unreachable"


class NotAllowed(EnvserverError):
    """The access token is missing or not accepted."""

    kind = "not_allowed"


@dataclass(frozen=True)
class Retries:
    """The number of tries of a request, and the pauses between them: by default about a minute in
    all, in which a server starts again or another one takes over.

    Args:
        tries: maximum number of requests, the first one included.
        first_pause_seconds: pause before the second request; later ones double, with jitter.
        longest_pause_seconds: maximum pause.
    """

    tries: int = 40
    first_pause_seconds: float = 0.2
    longest_pause_seconds: float = 2.0

    def pause_seconds(self, tried: int) -> float:
        backoff = Backoff(self.first_pause_seconds, self.longest_pause_seconds, jitter=(0.5, 1.0))
        return backoff.seconds(tried, random.random())


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
    json: Json | None = None
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

    def __str__(self) -> str:
        return f"HTTP {self.status}"


def new_key() -> dict[str, str]:
    """A header that tells the copies of one request from other requests."""
    return {"idempotency-key": uuid.uuid4().hex}


def pause_before_next(
    retries: Retries, tried: int, problem: Exception | Answer, url: httpx.URL
) -> float | None:
    """The seconds before the next request; None: the answer is final. Raises ServerUnreachable."""
    if isinstance(problem, Answer) and problem.status not in _PASSING:
        return None
    why = str(problem) or type(problem).__name__
    if (server := shown_url(url)) not in why:  # an error of several servers names each
        why = f"{server}: {why}"
    if tried < retries.tries:
        if tried == 5:  # after some three seconds
            log.warning("%s; trying again", why)
        return max(retries.pause_seconds(tried), _server_pause_seconds(problem))
    if isinstance(problem, Answer):
        return None
    raise ServerUnreachable(f"No answer after {tried} tries: {why}.") from problem


def _server_pause_seconds(problem: Exception | Answer) -> float:
    after = problem.headers.get("retry-after", "") if isinstance(problem, Answer) else ""
    return min(float(after), LONGEST_WAIT_SECONDS) if after.isdecimal() else 0.0


def checked(answer: Answer | Exception) -> Answer:
    """Returns a successful answer, with its warning; raises the error of any other."""
    assert isinstance(answer, Answer)
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


def object_of(answer: Answer) -> Json:
    return decoded(answer.content, Json, "a JSON object")


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


_NUMBER: Final = re.compile(r"-r(\d+)$")


class TaskSummary(msgspec.Struct, frozen=True):
    """A task without its hidden part; `public` is what a rollout needs."""

    task_id: str
    public: Json


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


class TaskPage(msgspec.Struct, rename={"items": "tasks"}):
    """`next` is the `after` of the next page, None on the last one."""

    items: list[TaskSummary]
    next: int | None


class EstimatePage(msgspec.Struct, rename={"items": "estimates"}):
    items: list[TaskEstimate]
    next: int | None


def rollouts_in(
    answer: Answer, task_ids: Sequence[str], group_size: int
) -> list[list[Trajectory | None]]:
    """All rollouts in the order of the tasks."""
    batch = decode_batch(answer.content)
    try:
        groups = [unpack(packed.body, Group) for packed in batch.groups]
    except msgspec.DecodeError as error:
        raise InputError(
            f"The server's answer does not hold groups: {error}.", place="body"
        ) from error
    if [group.task_id for group in groups] != list(task_ids):
        raise InputError("The server answered with other tasks than ordered.", place="body")
    return [_by_number(group, group_size) for group in groups]


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
