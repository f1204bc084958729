"""The registry of runners: answers their requests.

What holds: two names never have the same stream; a group is acknowledged only when it is on disk.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import accumulate
from operator import attrgetter
from typing import Final
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import orjson
import structlog
from envserver_records.errors import (
    ConflictError,
    InputError,
    NotFoundError,
    TooLargeError,
    UsageError,
)
from envserver_records.records import Group, Tokens, Trajectory
from envserver_records.records import Sequence as Row
from envserver_records.sampling import LEAST_LOGPROB, LOGPROB_ROUNDING
from numpy.typing import NDArray
from prometheus_client.core import Metric
from starlette.types import Receive

from ..rollouts.estimates import Scored
from ..rollouts.mixing import Share
from ..rollouts.stream import again_prefix, stream_prefix
from ..store import GroupStore, compression
from ..store.demand import Demand
from ..store.groups import EncodedPut, encode_puts
from ..store.sink import StoreSink, put_of
from ..telemetry.numbers import gauge
from .messages import (
    MOST_GROUPS,
    Accepted,
    Heartbeat,
    News,
    Refused,
    Registration,
    ScoredGroup,
    Welcome,
)
from .news import LocalEnvironment, RunnerNews, SharedCapacity
from .runner import SILENT_POLLS, RegisteredRunner, RunnerTable
from .validation import COLUMNS, Stream, check_group, check_names, decoded, wrong_reward, wrong_span

ReadGroup = EncodedPut | InputError

_LIST: Final = msgspec.msgpack.Decoder(list[bytes])
_MOST_RUNS: Final = 64
"""Maximum number of token runs of one call per row for which the quick check counts them."""
_INLINE_BYTES: Final = 64 * 1024
"""Groups smaller than this are read on the event loop, which is faster than switching threads."""
_TOGETHER_BYTES: Final = 512 * 1024
_LAST_VERSION: Final = np.iinfo(np.int32).max
_columns_of: Final = attrgetter(*COLUMNS)
_COLUMN_TYPES: Final = tuple(COLUMNS.values())


async def read_group_async(body: bytes, stream: Stream) -> EncodedPut:
    """Like `read_posted_group`; large groups are read in a thread."""
    if len(body) < _INLINE_BYTES:
        return read_posted_group(body, stream)
    return await asyncio.to_thread(read_posted_group, body, stream)


async def read_batch_async(post: bytes, stream: Stream, most_bytes: int) -> list[ReadGroup]:
    """Like `read_batch`; posts that are large, also when decompressed, are read in a thread."""
    if len(post) < _INLINE_BYTES:
        with suppress(TooLargeError):
            return read_batch(post, stream, min(most_bytes, 2 * _INLINE_BYTES))
    return await asyncio.to_thread(read_batch, post, stream, most_bytes)


def read_posted_group(body: bytes, stream: Stream) -> EncodedPut:
    """Reads the group in `body`, as packed by `records.pack`."""
    (read,) = _checked([_Body(body)], stream)
    if isinstance(read, InputError):
        raise read
    return read


def read_batch(post: bytes, stream: Stream, most_bytes: int) -> list[ReadGroup]:
    """Reads the groups of a post that holds several, in order.

    Args:
        most_bytes: maximum total size of the groups when decompressed; memory use stays below it.
    """
    try:
        parts = _LIST.decode(post)
    except msgspec.DecodeError as error:
        raise InputError(f"No list of packed groups: {error}.", place="$") from None
    if len(parts) > MOST_GROUPS:
        raise TooLargeError(f"A request has at most {MOST_GROUPS} groups.", most_groups=MOST_GROUPS)
    bodies: list[_Body | InputError] = []
    for part in parts:
        body = _inflated(part, most_bytes)
        most_bytes -= len(body.plain) if isinstance(body, _Body) else 0
        bodies.append(body)
    return _checked(bodies, stream)


class _Body(msgspec.Struct):
    """A posted group. `plain`: packed; `stored`: as written to disk, None if not made yet."""

    plain: bytes
    stored: bytes | None = None


def _inflated(part: bytes, most: int) -> _Body | InputError:
    """Decompresses one part. Raises TooLargeError if it has more than `most` bytes."""
    if not compression.is_frame(part):
        return _Body(part)
    try:
        plain = compression.inflate_frame(part, most)
    except compression.DamagedBody as error:
        return InputError(f"The group is refused: {error}.", place="$")
    return _Body(plain, part if compression.has_checksum(part) else None)


def _checked(bodies: Sequence[_Body | InputError], stream: Stream) -> list[ReadGroup]:
    read: list[ReadGroup] = []
    for part in _parts(bodies):
        found = [body if isinstance(body, InputError) else _decoded(body.plain) for body in part]
        groups = [one for one in found if isinstance(one, Group)]
        if not _are_all_right(groups, stream):
            found = [_refused(one, stream) or one for one in found]
        read += [
            one if isinstance(one, InputError) else _encoded(one, body)
            for one, body in zip(found, part, strict=True)
        ]
    return read


def _parts(bodies: Sequence[_Body | InputError]) -> Iterator[list[_Body | InputError]]:
    """Splits bodies into parts small enough for the processor's caches."""
    part: list[_Body | InputError] = []
    size = 0
    for body in bodies:
        size += len(body.plain) if isinstance(body, _Body) else 0
        if part and size > _TOGETHER_BYTES:
            yield part
            part, size = [], 0
        part.append(body)
    yield part


def _decoded(body: bytes) -> Group | InputError:
    try:
        return decoded(body)
    except InputError as error:
        return error


def _refused(one: Group | InputError, stream: Stream) -> InputError | None:
    if isinstance(one, InputError):
        return one
    try:
        check_group(one, stream)
    except InputError as error:
        return error
    return None


def _encoded(group: Group, body: _Body | InputError) -> EncodedPut:
    assert isinstance(body, _Body)
    put = put_of(group, body.plain)
    if body.stored is None:
        return encode_puts([put])[0]
    return EncodedPut(put, compression.ZSTD, body.stored)


def _are_all_right(groups: Sequence[Group], stream: Stream) -> bool:
    """Returns whether all groups look right; False means that each must be checked closely."""
    rows: list[Row] = []
    begins: list[int] = []
    try:
        for group in groups:
            check_names(group, stream)
            begins.append(len(rows))
            if not _have_whole_rows(group, rows):
                return False
        orjson.dumps([_free_words(group) for group in groups])
    except (InputError, TypeError, orjson.JSONEncodeError, RecursionError):
        return False
    return not rows or _are_trainable(rows, begins, groups)


def _have_whole_rows(group: Group, rows: list[Row]) -> bool:
    """Returns whether the group's trajectories are complete; appends their rows to `rows`."""
    trajectories = group.trajectories
    if not trajectories or len({one.rollout_id for one in trajectories}) != len(trajectories):
        return False
    for one in trajectories:
        if one.env != group.env or one.task_id != group.task_id or not one.sequences:
            return False
        if wrong_reward(one, group) is not None:
            return False
        if not all(_is_whole(row) for row in one.sequences):
            return False
        rows += one.sequences
    return True


def _is_whole(row: Row) -> bool:
    length = row.tokens.size
    if not length or not row.path:
        return False
    for column, dtype in zip(_columns_of(row), _COLUMN_TYPES, strict=True):
        if column.size != length or column.dtype != dtype:
            return False
    return not row.sampling or wrong_span(row) is None


def _free_words(group: Group) -> list[object]:
    """Returns all values of a group whose types do not already guarantee valid JSON."""
    return [
        group.generation_params,
        group.rendering,
        group.services,
        [_free_words_of(one) for one in group.trajectories],
    ]


def _free_words_of(one: Trajectory) -> list[object]:
    others = msgspec.to_builtins(one.others) if one.others else None
    return [one.messages, one.tools, one.output, one.actions, others]


def _are_trainable(rows: Sequence[Row], begins: Sequence[int], groups: Sequence[Group]) -> bool:
    """Returns whether the rows can be trained on.

    Calls of numpy are what a small group costs here: `any`, `min` and `max` are Python around a
    ufunc's `reduce`, which is called itself.

    Args:
        begins: index of the first row of each group.
    """
    lengths = [row.tokens.size for row in rows]
    starts = np.array([0, *accumulate(lengths[:-1])])
    tokens, mask, logprobs, calls, versions = map(
        np.concatenate, zip(*map(_columns_of, rows), strict=True)
    )
    most_trained = np.maximum.reduceat(mask, starts).tolist()
    if min(most_trained) != 1 or max(most_trained) != 1:
        return False
    # Comparisons with NaN are false.
    highest, lowest_logprob = np.maximum.reduce(logprobs), np.minimum.reduce(logprobs)
    if not (highest <= LOGPROB_ROUNDING and lowest_logprob >= LEAST_LOGPROB):
        return False
    trained, uncalled = mask.view(bool), calls < 0
    if np.count_nonzero(logprobs * (mask ^ 1)) or np.count_nonzero(uncalled & trained):
        return False
    if np.count_nonzero(uncalled & (versions != -1)):
        return False
    if np.minimum.reduce(versions) < -1 or np.minimum.reduce(tokens) < 0:
        return False
    sampled = np.where(trained, versions, _LAST_VERSION)
    lowest = np.minimum.reduceat(sampled, starts[list(begins)]).tolist()
    return lowest == [group.policy_version for group in groups] and _are_of_path(
        calls, starts, rows
    )


def _are_of_path(calls: Tokens, starts: NDArray[np.int64], rows: Sequence[Row]) -> bool:
    """Returns whether each call in a row is on the row's path. Works on runs of equal calls, of
    which there are few.
    """
    is_first = np.empty(len(calls), bool)
    np.not_equal(calls[1:], calls[:-1], out=is_first[1:])
    is_first[starts] = True
    firsts = np.flatnonzero(is_first)
    if len(firsts) > _MOST_RUNS * len(rows):
        return False
    of_row = (np.searchsorted(starts, firsts, "right") - 1).tolist()
    return all(
        call == -1 or call in rows[row].path
        for call, row in zip(calls[firsts].tolist(), of_row, strict=True)
    )


log = structlog.get_logger(__name__)

_CHANGES: Final = attrgetter("open", "capacity", "begun", "quiet")
"""The fields of a heartbeat whose change may matter to other runners."""


class WrongKey(UsageError):
    """The key is not that of the session: another process has registered under the name."""

    kind, status = "wrong_key", 401


class RunnerRegistry:
    """The runners of an app; call `load` first.

    Args:
        demand: what trainers want from all environments of this server.
        silent_after_seconds: a runner without a heartbeat for this long does not count.
        stretches: see `SharedCapacity`.
    """

    def __init__(
        self,
        store: GroupStore,
        demand: Demand,
        *,
        silent_after_seconds: float = 30.0,
        stretches: bool = True,
    ) -> None:
        self.tell: Callable[[str, str, Counter[str], Counter[str]], None] = lambda *told: None
        """Called with an environment, its runner's name, and how many attempts failed and groups
        were dropped there since the last heartbeat, by kind and reason."""
        self._store = store
        self.table = RunnerTable(store, silent_after_seconds)
        self.news = RunnerNews(store, self.table, SharedCapacity(demand, stretches=stretches))
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """One for each name that registers or leaves now; many register at a time."""

    async def load(self) -> None:
        """Loads the stored registrations."""
        await self.table.load()

    # Requests of runners

    async def register(
        self,
        wanted: Registration,
        understands: Sequence[str] = (),
        request_key: str | None = None,
    ) -> Welcome:
        """Starts a new session for this name, with its own stream of groups.

        Args:
            understands: additions to the protocol that the runner knows; see `remote.messages`.
            request_key: requests of one instance with the same key share a session.
        """
        if any(one.share.name == wanted.name for one in self.news.local):
            raise ConflictError(f"The name {wanted.name!r} is that of the server's own.")
        key = _session_key(wanted.instance, request_key)
        async with self._lock(wanted.name):
            before = self.table.named(wanted.name)
            if before is not None:
                self._check_may_take(before, wanted)
            async with self._stream(wanted, before) as (seed, is_new):
                one = RegisteredRunner(
                    id=before.id if before is not None else secrets.token_hex(8),
                    name=wanted.name,
                    key_hash=_hash(key),
                    instance_hash=_hash(wanted.instance),
                    env=wanted.env,
                    split=wanted.split,
                    asked_seed=wanted.seed,
                    seed=seed,
                    group_size=wanted.group_size,
                    weight=wanted.weight,
                    minimum_share=wanted.minimum_share,
                    scoring=wanted.scoring,
                    version=wanted.version,
                    host=wanted.host,
                    registered_at=time.time(),
                    understands=tuple(understands),
                )
                await self.table.save(one)
            count = self._store.count_with_prefix
            stored = 0 if is_new else await count(one.prefix)
            again = 0 if is_new else await count(again_prefix(one.prefix))
            self.table.start(one, stored)
            self.news.waiting.end(one.id)  # of the session before
        log.info("environment_registered", name=one.name, env=one.env, seed=one.seed, host=one.host)
        self.news.wake()
        return Welcome(
            id=one.id,
            key=key,
            seed=one.seed,
            stored=stored,
            again=again,
            silent_after_seconds=self.table.heartbeats.silent_after_seconds,
        )

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    def _check_may_take(self, before: RegisteredRunner, wanted: Registration) -> None:
        same = hmac.compare_digest(before.instance_hash, _hash(wanted.instance))
        if not same and self.table.is_present(before):
            raise ConflictError(
                f"The name {wanted.name!r} is used by an environment at {before.host or '?'}.",
                hint="Choose another with --name, or wait until the other has left or has been "
                f"silent for {self.table.heartbeats.silent_after_seconds:g} s.",
            )

    @asynccontextmanager
    async def _stream(
        self, wanted: Registration, before: RegisteredRunner | None
    ) -> AsyncIterator[tuple[int, bool]]:
        """Holds the stream for a runner until its registration is stored; gives its seed, and
        whether nobody has used it.
        """
        asked = (wanted.env, wanted.split, wanted.seed)
        if before is not None and asked == (before.env, before.split, before.asked_seed):
            yield before.seed, False
            return
        streams = self.table.streams
        seed = await streams.choose(wanted, [one.prefix for one in self.news.local])
        try:
            yield seed, True
        finally:
            streams.give_back(stream_prefix(wanted.env, wanted.split, seed))

    async def heartbeat(
        self, env_id: str, key: str, beat: Heartbeat, receive: Receive | None = None
    ) -> News:
        """Answers as soon as there is something new for the runner, or after its `wait_seconds`.

        Args:
            receive: of the request, to notice that its client has disconnected; None: do not wait.
        """
        one = self.authenticate(env_id, key)
        self._hear(one, beat)
        seconds = min(beat.wait_seconds, self.table.silent_after(one) / SILENT_POLLS)
        if receive is None or seconds <= 0 or self.news.is_new(one, beat):
            return self.news.for_runner(one)
        told = await self.news.waiting.wait(one.id, beat, seconds, receive)
        return told or self.news.for_runner(self.authenticate(env_id, key))

    def _hear(self, one: RegisteredRunner, beat: Heartbeat) -> None:
        was_silent = not self.table.is_present(one)
        self.table.heartbeats.hear(one.id)
        now, before = self.table.status(one), self.table.status(one).beat
        self.tell(one.env, one.name, *now.failed_since(beat))
        now.beat, now.open = beat, beat.open
        self.news.count_begun(one, beat.begun)
        # Most heartbeats of many runners say what the one before said: nobody else need look.
        if was_silent or _CHANGES(before) != _CHANGES(beat):
            self.news.wake()

    async def accept(
        self,
        env_id: str,
        key: str,
        body: bytes,
        still_open: int | None = None,
        begun: int | None = None,
    ) -> News:
        """Stores a group; it is on disk when this returns. Storing the same group twice is allowed.

        Args:
            still_open: groups the runner has open besides this one; None: one fewer than before.
            begun: groups the runner has begun since it registered.
        """
        one, stream = self._heard(env_id, key)
        put = await read_group_async(body, stream)
        return await self._keep(one, [put], still_open, begun)

    async def accept_batch(
        self,
        env_id: str,
        key: str,
        post: bytes,
        most_bytes: int,
        still_open: int | None = None,
        begun: int | None = None,
    ) -> Accepted:
        """Stores all groups in `post` in one transaction, like `accept`. The groups that are not
        refused are on disk when this returns; the result names the refused ones.

        Args:
            most_bytes: maximum total size of the groups when decompressed.
        """
        one, stream = self._heard(env_id, key)
        read = await read_batch_async(post, stream, most_bytes)
        puts = [put for put in read if isinstance(put, EncodedPut)]
        news = await self._keep(one, puts, still_open, begun)
        refused = [
            Refused(index=index, place=error.detail.get("place", ""), message=error.message)
            for index, error in enumerate(read)
            if isinstance(error, InputError)
        ]
        return Accepted(**vars(news), refused=refused)

    def _heard(self, env_id: str, key: str) -> tuple[RegisteredRunner, Stream]:
        one = self.authenticate(env_id, key)
        self.table.heartbeats.hear(one.id)
        return one, Stream(env=one.env, split=one.split, seed=one.seed, prefix=one.prefix)

    async def _keep(
        self,
        one: RegisteredRunner,
        puts: Sequence[EncodedPut],
        still_open: int | None,
        begun: int | None,
    ) -> News:
        new = sum(await self._store.put_encoded(puts))
        now = self.table.status(one)
        if now.stored is not None:
            now.stored += new
        now.open = max(0, now.open - new) if still_open is None else still_open
        if begun is not None:
            self.news.count_begun(one, begun)
        self.news.wake()
        return self.news.for_runner(one)

    async def known_groups(self, env_id: str, key: str, group_ids: list[str]) -> set[str]:
        """Returns which of these groups were ever stored, delivered or not."""
        one = self.authenticate(env_id, key)
        self.table.heartbeats.hear(one.id)
        return await self._store.existing(group_ids)

    async def count_dropped(self, env_id: str, key: str, groups: Sequence[ScoredGroup]) -> None:
        """Counts scored, dropped groups in the estimates of their tasks; repeating is allowed."""
        one, stream = self._heard(env_id, key)
        news = []
        for number, group in enumerate(groups):
            if not group.group_id.startswith(stream.prefix) or group.rewards > group.attempts:
                raise InputError("No group of this stream.", place=f"groups[{number}]")
            facts = group.model_dump()
            news.append(Scored(env=one.env, split=one.split, **facts))
        await self._store.count_dropped(news)

    async def goodbye(self, env_id: str, key: str) -> None:
        """Marks the runner as gone until it registers again; repeating is allowed."""
        async with self._lock(self.authenticate(env_id, key).name):
            one = self.authenticate(env_id, key)
            await self.table.save(msgspec.structs.replace(one, gone=True, left_at=time.time()))
            now = self.table.status(one)
            now.beat = now.beat.model_copy(update={"open": 0, "capacity": 0})
            now.room = now.open = 0
        log.info("environment_left", name=one.name)
        self.news.wake()

    def authenticate(self, env_id: str, key: str) -> RegisteredRunner:
        """Returns the runner with this id."""
        one = self.table.known.get(env_id)
        if one is None:
            raise NotFoundError("No such environment is registered.", hint="Register it again.")
        if not hmac.compare_digest(one.key_hash, _hash(key)):
            raise WrongKey(
                "The key is not that of this environment's session.",
                hint="Another process may have registered under its name.",
            )
        return one

    def drain(self, env_id: str) -> None:
        """Tells the runner to finish its open groups and leave."""
        one = self.table.known.get(env_id)
        if one is None:
            raise NotFoundError("No such environment is registered.")
        self.table.status(one).drain = True
        self.news.wake()


def _session_key(instance: str, request_key: str | None) -> str:
    """Returns the same key for a repeated request; the instance's secret keeps it secret."""
    if request_key is None:
        return secrets.token_urlsafe(24)
    digest = hmac.digest(instance.encode(), request_key.encode(), "sha256")
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


def count_runners(environments: RunnerRegistry) -> dict[str, int]:
    """Counts the runners that are present, silent and gone."""
    table = environments.table
    counted = Counter(table.presence(one) for one in table.known.values())
    return {name: counted[name] for name in ("present", "silent", "gone")}


class RunnerMetrics:
    """Metrics of all runners, labelled by environment; runner names would give unbounded labels."""

    def __init__(self, environments: RunnerRegistry) -> None:
        self._environments = environments

    async def families(self) -> Iterable[Metric]:
        """Returns the metrics; a Source of `api.metrics`."""
        how_many: Counter[tuple[str, ...]] = Counter()
        is_open: Counter[tuple[str, ...]] = Counter()
        capacity: Counter[tuple[str, ...]] = Counter()
        table, news = self._environments.table, self._environments.news
        for one in table.known.values():
            how_many[(one.env, table.presence(one))] += 1
            now = table.status(one)
            is_open[(one.env,)] += now.open
            capacity[(one.env,)] += now.beat.capacity if table.is_present(one) else 0
        wanted = {(env,): news.wanted(env) for (env,) in is_open}
        of = ("environment",)
        return [
            gauge(
                "envserver_joined_environments",
                "Environments on other machines: present, silent, gone",
                (*of, "standing"),
                how_many.items(),
            ),
            gauge("envserver_joined_open_groups", "Groups they make", of, is_open.items()),
            gauge(
                "envserver_joined_capacity_groups",
                "Groups that those present could make at a time",
                of,
                capacity.items(),
            ),
            gauge(
                "envserver_joined_wanted_groups",
                "Groups that trainers would have them make at a time; scale runners by it",
                of,
                wanted.items(),
            ),
        ]


class LocalEnvironmentSink(StoreSink):
    """A `StoreSink` whose environment shares capacity with the runners in `environments`.

    Args:
        prefix: ID prefix of its groups.
        capacity: number of groups it can have open.
    """

    def __init__(
        self,
        store: GroupStore,
        demand: Demand,
        environments: RunnerRegistry,
        *,
        share: Share,
        prefix: str,
        capacity: int,
    ) -> None:
        super().__init__(store, share.name, demand)
        self._open = self._begun = 0
        self._environments = environments
        self._local = LocalEnvironment(
            prefix=prefix,
            share=share,
            capacity=capacity,
            open_groups=lambda: self._open,
            begun=lambda: self._begun,
        )
        environments.news.share_with(self._local)

    async def wait_for_capacity(self) -> None:
        """Waits until this environment may begin another group."""
        await super().wait_for_capacity()
        await self._environments.news.wait_for_local_capacity(self._local)

    def opened(self, groups: int) -> None:
        """Counts `groups` more as open; fewer if negative."""
        self._open += groups
        self._begun += max(0, groups)
        super().opened(groups)
