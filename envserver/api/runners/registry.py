"""The registry of runners.

Durable: who registered, with which stream, under which key (hashed); a restarted server knows all
of them. Not durable: their status, which the next heartbeat reports. What holds: two names never
have the same stream; only a runner with recent heartbeats counts (for minimum shares, capacity and
pauses during weight updates); a group is acknowledged only when it is on disk.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import structlog
from envserver_records.errors import (
    ConflictError,
    InputError,
    NotFoundError,
    StoreFull,
    UsageError,
)

from ...proxy.gate import InFlight
from ...remote.messages import (
    Accepted,
    Heartbeat,
    News,
    Pause,
    Refused,
    Registration,
    ScoredGroup,
    Welcome,
)
from ...rollouts.estimates import Scored
from ...rollouts.mixing import Share
from ...rollouts.stream import again_prefix, stream_prefix
from ...store import GroupStore
from ...store.demand import Demand
from ...store.groups import EncodedPut
from ..heartbeats import Heartbeats
from .posted_groups import read_batch_async, read_group_async
from .runner import RegisteredRunner, RunnerStatus
from .sharing import LocalEnvironment, Participant, SharedCapacity
from .validation import Stream

log = structlog.get_logger(__name__)

KEY: Final = "environments"
_MOST_ENVIRONMENTS: Final = 1024
_LOOK_SECONDS: Final = 0.25
"""Seconds between checks, during a heartbeat, whether trainers have made room."""


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
        self._store = store
        self._shared = SharedCapacity(demand, stretches=stretches)
        self._heartbeats = Heartbeats(silent_after_seconds)
        self._local: list[LocalEnvironment] = []
        self._known: dict[str, RegisteredRunner] = {}
        self._now: dict[str, RunnerStatus] = {}
        self._version = -1
        self._pause: Pause | None = None
        self._lock = asyncio.Lock()
        self._change = asyncio.Event()
        self._local_begun: dict[str, int] = {}

    async def load(self) -> None:
        """Loads the stored registrations."""
        stored = await self._store.get_value(KEY)
        for one in msgspec.convert(stored or [], list[RegisteredRunner]):
            self._known[one.id] = one

    # Requests of runners

    async def register(self, wanted: Registration) -> Welcome:
        """Starts a new session for this name, with its own stream of groups.

        Raises:
            ConflictError: another process has the name and is still present.
            StoreFull: too many runners have registered.
        """
        async with self._lock:
            if any(one.share.name == wanted.name for one in self._local):
                raise ConflictError(f"The name {wanted.name!r} is that of the server's own.")
            before = next((one for one in self._known.values() if one.name == wanted.name), None)
            if before is not None:
                self._check_may_take(before, wanted)
            elif len(self._known) >= _MOST_ENVIRONMENTS:
                raise StoreFull(f"No more than {_MOST_ENVIRONMENTS} environments can register.")
            key = secrets.token_urlsafe(24)
            one = RegisteredRunner(
                id=before.id if before is not None else secrets.token_hex(8),
                name=wanted.name,
                key_hash=_hash(key),
                instance_hash=_hash(wanted.instance),
                env=wanted.env,
                split=wanted.split,
                asked_seed=wanted.seed,
                seed=await self._seed_for(wanted, before),
                group_size=wanted.group_size,
                weight=wanted.weight,
                minimum_share=wanted.minimum_share,
                scoring=wanted.scoring,
                version=wanted.version,
                host=wanted.host,
                registered_at=time.time(),
            )
            await self._save(self._known | {one.id: one})
            self._now[one.id] = RunnerStatus()
            self._heartbeats.hear(one.id)
        log.info("environment_registered", name=one.name, env=one.env, seed=one.seed, host=one.host)
        self.wake()
        return Welcome(
            id=one.id,
            key=key,
            seed=one.seed,
            stored=await self._store.count_with_prefix(one.prefix),
            again=await self._store.count_with_prefix(again_prefix(one.prefix)),
            silent_after_seconds=self._heartbeats.silent_after_seconds,
        )

    def _check_may_take(self, before: RegisteredRunner, wanted: Registration) -> None:
        same = hmac.compare_digest(before.instance_hash, _hash(wanted.instance))
        if not same and self._is_present(before):
            raise ConflictError(
                f"The name {wanted.name!r} is used by an environment at {before.host or '?'}.",
                hint="Choose another with --name, or wait until the other has left or has been "
                f"silent for {self._heartbeats.silent_after_seconds:g} s.",
            )

    async def _seed_for(self, wanted: Registration, before: RegisteredRunner | None) -> int:
        """Returns the requested seed, or the next one whose stream nobody else has used."""
        asked = (wanted.env, wanted.split, wanted.seed)
        if before is not None and asked == (before.env, before.split, before.asked_seed):
            return before.seed
        taken = {one.prefix for one in self._known.values()}
        taken |= {one.prefix for one in self._local}
        seed = wanted.seed
        while True:
            prefix = stream_prefix(wanted.env, wanted.split, seed)
            if prefix not in taken and not await self._store.count_with_prefix(prefix):
                return seed
            seed += 1

    async def heartbeat(
        self, env_id: str, key: str, beat: Heartbeat, is_gone: Callable[[], Awaitable[bool]]
    ) -> News:
        """Answers as soon as there is something new for the runner, or after its `wait_seconds`.

        Raises:
            NotFoundError: the runner is not registered.
            WrongKey: another process has its name now.
        """
        one = self.authenticate(env_id, key)
        now = self._now_of(one)
        self._heartbeats.hear(one.id)
        now.beat, now.open = beat, beat.open
        self._count_begun(one, beat.begun)
        self.wake()
        end = time.monotonic() + min(beat.wait_seconds, self._heartbeats.silent_after_seconds / 3)
        while True:
            news = self._news(one)
            left = end - time.monotonic()
            if left <= 0 or _is_new(news, beat) or await is_gone():
                now.room = news.room
                return news
            await self._changed(min(left, _LOOK_SECONDS))
            self.authenticate(env_id, key)

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

        Raises:
            NotFoundError, WrongKey: as for `heartbeat`.
            InputError: the group is refused; `place` says where it is wrong.
            StoreError: the group could not be stored.
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

        Raises:
            InputError, TooLargeError: `post` is not a list of groups, or too large; nothing is
            stored.
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
        self._heartbeats.hear(one.id)
        return one, Stream(env=one.env, split=one.split, seed=one.seed, prefix=one.prefix)

    async def _keep(
        self,
        one: RegisteredRunner,
        puts: Sequence[EncodedPut],
        still_open: int | None,
        begun: int | None,
    ) -> News:
        new = sum(await self._store.put_encoded(puts))
        now = self._now_of(one)
        now.stored += new
        now.open = max(0, now.open - new) if still_open is None else still_open
        if begun is not None:
            self._count_begun(one, begun)
        news = self._news(one)
        now.room = news.room
        self.wake()
        return news

    async def known_groups(self, env_id: str, key: str, group_ids: list[str]) -> set[str]:
        """Returns which of these groups were ever stored, delivered or not."""
        one = self.authenticate(env_id, key)
        self._heartbeats.hear(one.id)
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
        one = self.authenticate(env_id, key)
        async with self._lock:
            await self._save(self._known | {one.id: msgspec.structs.replace(one, gone=True)})
            now = self._now_of(one)
            now.beat = now.beat.model_copy(update={"open": 0, "capacity": 0})
            now.room = now.open = 0
        log.info("environment_left", name=one.name)
        self.wake()

    def authenticate(self, env_id: str, key: str) -> RegisteredRunner:
        """Returns the runner with this id.

        Raises:
            NotFoundError: it is not registered.
            WrongKey: the key is not that of its session.
        """
        one = self._known.get(env_id)
        if one is None:
            raise NotFoundError("No such environment is registered.", hint="Register it again.")
        if not hmac.compare_digest(one.key_hash, _hash(key)):
            raise WrongKey(
                "The key is not that of this environment's session.",
                hint="Another process may have registered under its name.",
            )
        return one

    # Actions of the server

    def drain(self, env_id: str) -> None:
        """Tells the runner to finish its open groups and leave."""
        if env_id not in self._known:
            raise NotFoundError("No such environment is registered.")
        self._now_of(self._known[env_id]).drain = True
        self.wake()

    async def pause(self, in_flight: InFlight, timeout_seconds: float) -> bool:
        """Stops the runners' model calls until `resume`.

        Returns:
            Whether all present runners confirmed the pause (with "keep": that they start no new
            call). Silent runners stop by themselves.
        """
        self._pause = pause = Pause(id=secrets.token_hex(8), in_flight=in_flight)
        self.wake()
        end = time.monotonic() + timeout_seconds
        while not all(now.beat.quiet == pause.id for _, now in self._present()):
            left = end - time.monotonic()
            if left <= 0 or self._pause is not pause:
                return False
            await self._changed(min(left, _LOOK_SECONDS))
        return True

    def resume(self) -> None:
        """Lets the runners' model calls continue."""
        self._pause = None
        self.wake()

    def publish(self, version: int) -> None:
        """Announces the policy version that the engine serves from now on."""
        self._version = version
        self.wake()

    def wake(self) -> None:
        """Wakes waiting heartbeats after a change."""
        self._change.set()
        self._change = asyncio.Event()

    def minimums(self) -> dict[str, float]:
        """Returns the minimum shares of the runners that count, by environment name."""
        found: dict[str, float] = {}
        for one, now in self._present():
            if one.minimum_share and now.beat.capacity:
                found[one.env] = min(1.0, found.get(one.env, 0.0) + one.minimum_share)
        return found

    def share_with(self, local: LocalEnvironment) -> None:
        """Adds an environment of this process to those that share capacity."""
        self._local.append(local)

    async def wait_for_local_capacity(self, local: LocalEnvironment) -> None:
        """Waits until `local` may begin a group, given the shares of the runners."""
        while self._present():
            asking = local.holder()
            if self._allowance(asking) > asking.held:
                return
            await self._changed(_LOOK_SECONDS)

    def snapshot(self) -> list[dict[str, Any]]:
        """Lists the registered runners and their status, for display."""
        return [self._shown(one) for one in self._known.values()]

    def _shown(self, one: RegisteredRunner) -> dict[str, Any]:
        now = self._now_of(one)
        beat = now.beat.model_dump(exclude={"seen", "wait_seconds", "quiet"})
        return {
            "id": one.id,
            "name": one.name,
            "env": one.env,
            "split": one.split,
            "seed": one.seed,
            "group_size": one.group_size,
            "weight": one.weight,
            "minimum_share": one.minimum_share,
            "version": one.version,
            "host": one.host,
            "registered_at": one.registered_at,
            "gone": one.gone,
            "silent": not one.gone and self._heartbeats.is_silent(one.id),
            "silent_seconds": round(self._heartbeats.silent_seconds(one.id), 1),
            "room": now.room,
            "stored": now.stored,
            **beat,
            "open": now.open,
        }

    # Which runners count, and their capacity

    def _is_present(self, one: RegisteredRunner) -> bool:
        return not one.gone and not self._heartbeats.is_silent(one.id)

    def _present(self) -> list[tuple[RegisteredRunner, RunnerStatus]]:
        return [(one, self._now_of(one)) for one in self._known.values() if self._is_present(one)]

    def _now_of(self, one: RegisteredRunner) -> RunnerStatus:
        now = self._now.get(one.id)
        if now is None:
            now = self._now[one.id] = RunnerStatus()
        return now

    def _news(self, one: RegisteredRunner) -> News:
        now = self._now_of(one)
        return News(
            policy_version=self._version,
            pause=self._pause,
            room=self._allowance(_participant(one, now, now.open)),
            drain=now.drain,
        )

    def _allowance(self, asking: Participant) -> int:
        """Returns how many groups `asking` may have open. A silent runner counts for none; when it
        returns with its open groups, the limit is exceeded for a moment.
        """
        present = self._present()
        self._shared.report_to_demand(_sums((one.env, now.open) for one, now in present))
        for local in self._local:
            begun, before = local.begun(), self._local_begun.get(local.share.name, 0)
            self._local_begun[local.share.name] = max(begun, before)
            self._shared.count_begun(local.share.name, begun - before)
        everyone = [_participant(one, now, now.held) for one, now in present]
        everyone += [local.holder() for local in self._local]
        name = asking.share.name
        return self._shared.room(asking, [one for one in everyone if one.share.name != name])

    def _count_begun(self, one: RegisteredRunner, begun: int) -> None:
        """Counts groups begun since the last report; the first report only sets the base."""
        now = self._now_of(one)
        before = begun if now.counted is None else now.counted
        self._shared.count_begun(one.name, begun - before)
        now.counted = max(before, begun)

    async def _changed(self, seconds: float) -> None:
        change = self._change
        try:
            async with asyncio.timeout(seconds):
                await change.wait()
        except TimeoutError:
            return

    async def _save(self, known: Mapping[str, RegisteredRunner]) -> None:
        await self._store.set_value(KEY, msgspec.to_builtins(list(known.values())))
        self._known = dict(known)


def _participant(one: RegisteredRunner, now: RunnerStatus, held: int) -> Participant:
    return Participant(
        share=Share(one.name, one.weight, one.minimum_share),
        env=one.env,
        held=held,
        capacity=now.beat.capacity,
        unused=max(0, held - now.open),
    )


def _sums(counts: Iterable[tuple[str, int]]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for name, count in counts:
        sums[name] += count
    return sums


def _is_new(news: News, beat: Heartbeat) -> bool:
    seen = beat.seen
    if seen is None or news.model_copy(update={"room": seen.room}) != seen:
        return True
    return news.room > seen.room and beat.open >= seen.room


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
