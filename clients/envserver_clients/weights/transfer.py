"""Sends all weights of a model to engines over the network, by vLLM's weight-transfer API.

In: a version and the model's tensors. Out: engines that sample with it. What always holds: no token
is sampled between the old weights and the new; an engine that fails is named, stays paused, and
gets no calls until it has the published weights; the others go on. Only when all fail is the
version not published.

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

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeVar

from envserver_records import EngineError, EnvserverError

from .check import PromptCheck, WeightsMismatch
from .engines import CHANGING, EngineControl, attempt, controls, joined
from .full import PAUSE_MODES, checked, weights_name
from .links import Bucket, Link, NamedTensors, Wire, connect, packed
from .push import InFlight, Phases, Published, PushBase

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
        self._published: int | None = None
        """The version that the engines certainly have; None: a transfer is not complete."""
        self._old: int | None = None
        self._count = 0

    def publish(
        self, version: int, tensors: NamedTensors, check: PromptCheck | None = None
    ) -> Published:
        """Sends new weights to the engines and publishes them at the server as `version`.

        Args:
            version: at least the server's version.
            tensors: the whole model by the names of a checkpoint; walked once, before anything
                else, so that all ranks of a sharded model can walk it together.
            check: logprobs that the engines must reproduce.

        Returns:
            What was published; `failed` has the engines that do not have it.

        Raises:
            ConflictError: the server is at a higher version.
            EngineError: all engines failed; the version is not published on any of them.
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

    def restore(self) -> list[str]:
        """Sends the published weights to engines that lost or failed to take them, or came later.

        Returns:
            The urls of these engines. One that does not answer is tried again the next time.

        Raises:
            EngineError: an engine loaded them and computes different logprobs.
        """
        with self._lock:
            given = self._given
            if given is None or self._published != given.version:
                return []
            mended = []
            for engine in self._fleet():
                try:
                    if engine.weights() != weights_name(given.version):
                        log.warning("%s lacks version %d", engine.url, given.version)
                        self._give_anew(engine, given)
                        mended.append(engine.url)
                    self._tell(engine.url, given.version, only_if_unknown=True)
                except WeightsMismatch:
                    raise
                except EngineError as error:
                    log.info("%s will be tried again later: %s", engine.url, error)
            return mended

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
        self._published = None
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
        self._published = self._old = version
        self._count += 1
        return Published(
            version,
            None,
            None,
            tuple(engine.url for engine in engines.left),
            max((one for one in found.values() if one is not None), default=None),
            phases.seconds,
            engines.failed,
        )

    def _fleet(self) -> list[EngineControl]:
        """Returns the engines; those of the server are asked for anew."""
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
            if self._published is not None and self._server is not None:
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
                    _quietly(url, "pause it", partial(engine.pause, "abort"))
                    _quietly(url, "name its weights", partial(engine.name_weights, CHANGING))
            if self._server is not None:
                for row in self._rows(url):
                    _quietly(url, "set it aside", partial(self._server.pause_engine, row["id"]))

    def _tell(self, url: str, version: int, *, only_if_unknown: bool = False) -> None:
        """Tells the server the engine's version, if it has such an engine."""
        for row in self._rows(url):
            known = row["standing"] == "used" and row["weights_version"] == version
            if self._server is not None and not (only_if_unknown and known):
                _quietly(
                    url,
                    "tell the server its version",
                    partial(self._server.resume_engine, row["id"], version),
                )

    def _rows(self, url: str) -> list[dict[str, Any]]:
        if self._server is None:
            return []
        rows = self._server.engines()
        return [row for row in rows if row["id"] and _root(str(row["url"])) == url]


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


def _quietly(url: str, what: str, step: Callable[[], object]) -> None:
    try:
        step()
    except EnvserverError as error:
        log.warning("%s: could not %s: %s", url, what, error)


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")
