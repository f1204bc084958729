"""Sends all weights of a model to engines over the network, by vLLM's weight-transfer API.

Invariants: no token is sampled between the old weights and the new; an engine that fails is named,
stays paused, and gets no calls until it has the published weights; the others go on. Only when all
fail is the version not published.

    copy     the tensors, in buckets, on the CPU      walked once, whatever happens later
    reach    engines answer and are connected         none does: nothing changes
    drain    the server holds calls (drain, keep, abort)
    pause    engines stop sampling                    none does: calls continue as before
    send     bucket by bucket, with checksums         engines that fail stay paused: half loaded
    check    resume; name and logprobs are right      engines that differ are paused again
    compare  engines hold the same bytes              engines that differ are paused again
    publish  each engine's version, then the server's
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from envserver_records import EngineError, EngineUnavailable, InputError
from envserver_records.tasks import Json

from .engines import (
    CHANGING,
    EngineControl,
    PromptCheck,
    WeightsMismatch,
    attempt,
    controls,
    joined,
    root_of,
)
from .full import PAUSE_MODES, checked, weights_name
from .push import InFlight, Phases, Published, PushBase, quietly

if TYPE_CHECKING:
    from torch import Tensor


NamedTensors = Iterable[tuple[str, "Tensor"]]
Wire = Literal["gloo", "nccl"]
ALIGNMENT: Final = 16
"""Each tensor of a bucket begins at a multiple of so many bytes (as engines expect)."""
_LOOK_SECONDS: Final = 0.0005


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together.

    `payload`: uint8[N]: the tensors' bytes, each padded to a multiple of ALIGNMENT.
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    payload: Tensor
    sha256: str

    @property
    def about(self) -> Json:
        """By which an engine unpacks it."""
        return {"names": self.names, "dtype_names": self.dtype_names, "shapes": self.shapes}

    def tensors(self) -> Iterator[Tensor]:
        """Yields the tensors, which share the bucket's memory."""
        import torch

        offset = 0
        for dtype_name, shape in zip(self.dtype_names, self.shapes, strict=True):
            dtype = getattr(torch, dtype_name)
            size = torch.Size(shape).numel() * dtype.itemsize
            yield self.payload[offset : offset + size].view(dtype).view(shape)
            offset += _padded(size)


def packed(tensors: NamedTensors, most_bytes: int) -> list[Bucket]:
    """The tensors in buckets of at most `most_bytes`; a larger tensor has its own. Raises
    InputError: there is none."""
    buckets: list[Bucket] = []
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in tensors:
        more = _padded(tensor.numel() * tensor.element_size())
        if waiting and size + more > most_bytes:
            buckets.append(_bucket(waiting, size))
            waiting, size = [], 0
        waiting.append((name, tensor.detach()))
        size += more
    if not waiting:
        raise InputError("There are no weights to send.")
    return [*buckets, _bucket(waiting, size)]


def _bucket(named: list[tuple[str, Tensor]], size: int) -> Bucket:
    import torch

    payload = torch.zeros(size, dtype=torch.uint8)
    offset = 0
    for _, tensor in named:
        taken = tensor.numel() * tensor.element_size()
        if taken:
            here = payload[offset : offset + taken].view(tensor.dtype)
            here.copy_(tensor.reshape(-1))
        offset += _padded(taken)
    return Bucket(
        [name for name, _ in named],
        [str(tensor.dtype).removeprefix("torch.") for _, tensor in named],
        [list(tensor.shape) for _, tensor in named],
        payload,
        hashlib.sha256(payload.numpy()).hexdigest(),
    )


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Link(Protocol):
    """A connection to all ranks of one engine."""

    def send(self, bucket: Bucket) -> None:
        """Sends a bucket while the engine's update is open. After an EngineError the connection is
        not usable any more."""


def connect(engine: EngineControl, wire: Wire, seconds: float, address: str = "") -> Link:
    """Connects to an engine; one that was connected to another trainer leaves that.

    `seconds`: the longest wait for one bucket. `address`: this machine's, as the engine sees it.
    Default: the one that reaches the engine. Raises EngineError: it was not started for this, or
    does not answer.
    """
    here = address or _address_towards(engine.url)
    world = 1 + engine.world_size()
    return (_Gloo if wire == "gloo" else _Nccl)(engine, here, world, seconds)


class _Gloo:
    """Over TCP, from the CPU; the engine has the backend `envserver_gloo`, or is the local one."""

    def __init__(self, engine: EngineControl, address: str, world: int, seconds: float) -> None:
        from torch.distributed import ProcessGroupGloo, TCPStore

        self._engine = engine
        limit = timedelta(seconds=seconds)
        options: Any = ProcessGroupGloo._Options()
        options._timeout = limit
        options._devices = [ProcessGroupGloo.create_device(hostname=address)]
        store = TCPStore(address, 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        about = {
            "master_address": address,
            "master_port": store.port,
            "rank_offset": 1,
            "world_size": world,
            "timeout_seconds": seconds,
        }
        self._group: Any = _both(engine, about, lambda: ProcessGroupGloo(store, 0, world, options))

    def send(self, bucket: Bucket) -> None:
        about = {**bucket.about, "sha256": bucket.sha256}
        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self._engine.update_weights, about)
            work = self._group.broadcast(bucket.payload, 0)
            # An engine that refuses never receives: its answer comes before the end of the wait.
            while not work.is_completed() and not _has_failed(taken):
                time.sleep(_LOOK_SECONDS)
            taken.result()
            _finished(work.wait)


class _Nccl:
    """Between GPUs; vLLM is installed here too, and the engine has the backend `nccl`.

    Written by vLLM's API, and not tried: the project's machines have no two GPUs.
    """

    def __init__(self, engine: EngineControl, address: str, world: int, seconds: float) -> None:
        from vllm.distributed.weight_transfer.nccl_common import (  # type: ignore[import-not-found]
            trainer_init,
        )

        self._engine = engine
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        about = {"master_address": address, "master_port": port, "world_size": world}
        self._group: Any = _both(engine, {**about, "rank_offset": 1}, lambda: trainer_init(about))

    def send(self, bucket: Bucket) -> None:
        import torch

        with ThreadPoolExecutor(1) as pool:
            taken = pool.submit(self._engine.update_weights, bucket.about)
            stream = torch.cuda.current_stream()
            for tensor in bucket.tensors():
                if _has_failed(taken):
                    break
                self._group.broadcast(tensor.to("cuda"), src=0, stream=stream)
            taken.result()
            stream.synchronize()


def _both(engine: EngineControl, about: Json, join: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(engine.init_weight_transfer, about)
        # The engine's refusal comes at once, and the group's constructor would wait for it in vain.
        mine = _alone(join)
        while not mine.done() and not _has_failed(joined):
            time.sleep(_LOOK_SECONDS)
        joined.result()
        return _finished(mine.result)


def _alone(call: Any) -> Future[Any]:
    """Runs `call` in a thread; its result may be ignored."""
    pool = ThreadPoolExecutor(1)
    running = pool.submit(call)
    pool.shutdown(wait=False)
    return running


def _has_failed(running: Future[Any]) -> bool:
    return running.done() and running.exception() is not None


def _finished(wait: Any) -> Any:
    try:
        return wait()
    except EngineError:
        raise
    except RuntimeError as error:  # what torch raises for its connections
        raise EngineUnavailable(f"The connection to it broke: {error}.") from error


def _address_towards(url: str) -> str:
    parts = urlsplit(url)
    try:
        with socket.create_connection(
            (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), 10
        ) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise EngineUnavailable(f"It does not answer: {error!r}.") from error


log = logging.getLogger(__name__)

T = TypeVar("T")
BUCKET_BYTES: Final = 256 * 2**20
_FROM_SERVER: Final = "server"


@dataclass(frozen=True)
class Prepared:
    """A version that the engines must have; `seconds`: duration of the copy."""

    version: int
    check: PromptCheck | None
    buckets: list[Bucket]
    seconds: float


class Transfer(PushBase):
    """Sends weights to vLLM with `--weight-transfer-config`, or to the local engine.

    Args:
        engine_url: an engine's url, or one for each of several; "server": those of the server's
            `GET /v1/engines`, also ones that come later.
        wire: "gloo": over TCP from the CPU; "nccl": between GPUs.
        in_flight: what happens to running calls: "drain" (they end first), "keep" (they continue
            with the new weights), "abort" (they are repeated).
        address: this machine's address as engines see it. Default: the one that reaches each.
        bucket_bytes: size of a bucket: what an engine needs beside its model. A larger tensor has
            a bucket of its own.
        compare_every: versions after which the engines' parameters are compared with each other by
            checksum. They must then have the same dtype. 0: never.
        settings: those of `PushBase`.
    """

    def __init__(
        self,
        engine_url: str | Sequence[str] | Literal["server"],
        *,
        wire: Wire = "gloo",
        in_flight: InFlight = "drain",
        address: str = "",
        bucket_bytes: int = BUCKET_BYTES,
        compare_every: int = 1,
        **settings: Any,
    ) -> None:
        self._asks_server = engine_url == _FROM_SERVER
        super().__init__(() if self._asks_server else engine_url, **settings)
        self._wire: Wire = wire
        self._in_flight: InFlight = in_flight
        self._address = address
        self._bucket_bytes = bucket_bytes
        self._compare_every = compare_every
        self._links: dict[str, tuple[str, Link]] = {}
        """Connections by url, each with the name of the weights that were sent last."""
        self._given: Prepared | None = None
        self._published_version: int | None = None
        """The version that the engines certainly have; None: a transfer is not complete."""
        self._old: int | None = None
        self._count = 0

    def publish(
        self, version: int, tensors: NamedTensors, check: PromptCheck | None = None
    ) -> Published:
        """As `WeightPush.publish`, but engines that fail are left out; `failed` has them.

        `tensors`: the whole model by the names of a checkpoint; walked once, before anything else,
        so that all ranks of a sharded model can walk it together. Raises ConflictError: the server
        is at a higher version. EngineError: all engines failed; the version is not published on any
        of them.
        """
        return self.send(self.prepare(version, tensors, check))

    def prepare(
        self, version: int, tensors: NamedTensors, check: PromptCheck | None = None
    ) -> Prepared:
        """Copies the tensors for one or more tries of `send`; see `publish`."""
        with self._lock:
            self._given = None  # its memory is free before the next copy is made
            begun = time.monotonic()
            buckets = packed(tensors, self._bucket_bytes)
            return Prepared(version, check, buckets, round(time.monotonic() - begun, 4))

    def send(self, prepared: Prepared) -> Published:
        """Sends what `prepare` copied; can be repeated. See `publish`."""
        with self._lock:
            return self._publish(prepared, Phases({"copy": prepared.seconds}))

    def _to_restore(self) -> Sequence[EngineControl]:
        """Also engines that failed to take the published weights, or came later."""
        is_complete = self._given is not None and self._published_version == self._given.version
        return self._fleet() if is_complete else ()

    def _mend(self, engine: EngineControl) -> bool:
        given = self._given
        assert given is not None
        lacks = engine.weights() != weights_name(given.version)
        if lacks:
            log.warning("%s lacks version %d", engine.url, given.version)
            self._give_anew(engine, given)
        self._tell(engine.url, given.version, only_if_unknown=True)
        return lacks

    def _publish(self, given: Prepared, phases: Phases) -> Published:
        self._given = given
        version = given.version
        with phases.phase("reach"):
            self._server_takes(version)
            engines = _Survivors(self._fleet())
            engines.each("reach", self._connect)
        with phases.phase("drain"):
            self._hold_calls(self._in_flight)
        with phases.phase("pause"):
            self._pause(engines)
        self._published_version = None
        try:
            with phases.phase("send"):
                engines.each("send", EngineControl.start_weight_update)
                for bucket in given.buckets:
                    engines.each("send", partial(self._send, bucket))
                engines.each("send", lambda engine: self._finish(engine, given))
            with phases.phase("check"):
                found = engines.each("check", lambda engine: self._resumed(engine, given))
            with phases.phase("compare"):
                self._compare(engines)
        finally:
            self._set_aside(engines.failed)
        with phases.phase("publish"):
            for engine in engines.left:
                self._tell(engine.url, version)
            if self._server is not None:
                self._server.resume_calls(version)
        self._published_version = self._old = version
        self._count += 1
        differences = {engine.url: found[engine.url] for engine in engines.left}
        return self._published(version, differences, phases, failed=engines.failed)

    def _fleet(self) -> list[EngineControl]:
        """The engines; those of the server are asked for anew."""
        if self._asks_server and self._server is not None:
            known = {engine.url: engine for engine in self._engines}
            rows = [row for row in self._server.engines() if row["id"] and not row["name"]]
            named = controls([str(row["url"]) for row in rows], self._timeouts, self._api_key)
            self._engines = [known.get(engine.url, engine) for engine in named]
        return list(self._engines)

    def _connect(self, engine: EngineControl) -> None:
        """Connects to an engine, unless the connection of the last transfer is there and it still
        has what was sent by it."""
        sent, _ = self._links.get(engine.url, ("", None))
        if engine.weights() == sent:
            return
        self._links.pop(engine.url, None)
        link = connect(engine, self._wire, self._timeouts.transfer, self._address)
        self._links[engine.url] = ("", link)

    def _pause(self, engines: _Survivors) -> None:
        mode = PAUSE_MODES[self._in_flight]
        try:
            engines.each("pause", lambda engine: engine.pause(mode))
        except EngineError:
            # No weights were changed; engines of an earlier, failed transfer stay paused.
            if self._published_version is not None and self._server is not None:
                self._server.resume_calls()
            raise

    def _send(self, bucket: Bucket, engine: EngineControl) -> None:
        self._links[engine.url][1].send(bucket)

    def _finish(self, engine: EngineControl, given: Prepared) -> None:
        name = weights_name(given.version)
        engine.finish_weight_update(name)
        engine.reset_prefix_cache(of_kept_calls=self._in_flight == "keep")
        self._links[engine.url] = (name, self._links[engine.url][1])

    def _resumed(self, engine: EngineControl, given: Prepared) -> float | None:
        engine.resume()
        return checked(engine, given.version, given.check, old=self._old)

    def _compare(self, engines: _Survivors) -> None:
        """Fails engines whose parameters differ from those of most others; of two, the second."""
        if len(engines.left) < 2 or not self._compare_every or self._count % self._compare_every:
            return
        found = engines.each("compare", EngineControl.checksums)
        usual = Counter(frozenset(sums.items()) for sums in found.values()).most_common(1)[0][0]

        def differs(engine: EngineControl) -> None:
            if wrong := dict(found[engine.url].items() - usual):
                raise WeightsMismatch(
                    f"{len(wrong)} of its {len(usual)} parameters differ from other engines', such "
                    f"as {min(wrong)}.",
                    hint="It is paused. Engines of one model have the same dtype and parallelism; "
                    "else set compare_every to 0.",
                )

        engines.each("compare", differs)

    def _give_anew(self, engine: EngineControl, given: Prepared) -> None:
        try:
            self._connect(engine)
            engine.pause("abort")
            engine.start_weight_update()
            for bucket in given.buckets:
                self._send(bucket, engine)
            self._finish(engine, given)
            self._resumed(engine, given)
        except EngineError as error:
            self._set_aside({engine.url: error})
            raise
        self._tell(engine.url, given.version)

    def _set_aside(self, failed: dict[str, EngineError]) -> None:
        """Pauses engines that failed, there and at the server: their weights are unknown."""
        for url, error in failed.items():
            log.warning("%s is not used: %s", url, error)
            self._links.pop(url, None)
            for engine in self._engines:
                if engine.url == url:
                    quietly(url, "pause it", partial(engine.pause, "abort"))
                    quietly(url, "name its weights", partial(engine.name_weights, CHANGING))
            if self._server is not None:
                for row in self._rows(url):
                    quietly(url, "set it aside", partial(self._server.pause_engine, row["id"]))

    def _tell(self, url: str, version: int, *, only_if_unknown: bool = False) -> None:
        for row in self._rows(url):
            known = row["standing"] == "used" and row["weights_version"] == version
            if self._server is not None and not (only_if_unknown and known):
                quietly(
                    url,
                    "tell the server its version",
                    partial(self._server.resume_engine, row["id"], version),
                )

    def _rows(self, url: str) -> list[Json]:
        if self._server is None:
            return []
        rows = self._server.engines()
        return [row for row in rows if row["id"] and root_of(str(row["url"])) == url]


class _Survivors:
    """Engines that take part in a transfer, until they fail."""

    def __init__(self, engines: Sequence[EngineControl]) -> None:
        self.left = list(engines)
        self.failed: dict[str, EngineError] = {}

    def each(self, phase: str, step: Callable[[EngineControl], T]) -> dict[str, T]:
        """Runs `step` for those that are left; returns the results by url."""
        done, failed = attempt(self.left, step)
        self.failed |= failed
        self.left = [engine for engine in self.left if engine.url in done]
        if not self.left:
            if not self.failed:
                raise EngineError("There are no engines.", hint="GET /v1/engines lists them.")
            raise joined(self.failed, len(self.failed), phase)
        return done
