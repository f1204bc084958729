"""The seam between a trainer and its engines, and what every way of it shares."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from envserver_records import ConflictError, EngineError

from envserver_clients.http import SyncEnvClient

from .check import PromptCheck
from .engines import EngineControl, Timeouts, controls
from .folders import Folders, Save

log = logging.getLogger(__name__)

TIMEOUTS: Final = Timeouts()
WATCH_SECONDS: Final = 5.0


@dataclass(frozen=True)
class Published:
    """What was done.

    Args:
        version: that the engines serve now.
        model: the name to ask them for; None: the model's own, as ever.
        folder: where the weights are, until some versions later.
        engines: which have them.
        difference: the greatest of a token's logprob from the trainer's; None: nothing was checked.
        seconds: by phase, in their order.
    """

    version: int
    model: str | None
    folder: Path
    engines: tuple[str, ...]
    difference: float | None
    seconds: dict[str, float]


class WeightPush(Protocol):
    """Gives weights to engines."""

    def publish(self, version: int, save: Save, check: PromptCheck | None = None) -> Published:
        """The engines sample with new weights, and the server knows that they are `version`.

        The same version again is fine: it is saved and given anew.

        Args:
            version: not below that of the server.
            save: writes safetensors into the folder that it is given, as `save_pretrained` does.
            check: what the engines must compute with them.

        Raises:
            WeightsNotSaved, InputError: `save` failed, or wrote something else.
            ConflictError: the server is at a higher version.
            EngineError: an engine failed (see `envserver_clients.weights.errors`): the version is
            not
                published, on none of them.
        """

    def restore(self) -> list[str]:
        """Gives the published weights anew to engines that lost them, being started again.

        Returns:
            Their urls. One that does not answer is left for the next time.

        Raises:
            EngineError: one took them and computes something else.
        """


class PushBase:
    """What both ways share: engines, folders, the server, one thing at a time.

    Args:
        engine_url: of the engine, or of each of several replicas.
        folder: where versions are written; engines read them there.
        server: is told of versions, and holds the agents' calls where that is needed.
        keep: so many of the last versions stay on the disk.
        engine_folder: `folder` as the engines see it, where that is elsewhere (in a container).
        timeouts: see `Timeouts`.
        api_key: of the engines.
    """

    def __init__(
        self,
        engine_url: str | Sequence[str],
        folder: Path,
        *,
        server: SyncEnvClient | None = None,
        keep: int = 2,
        engine_folder: Path | None = None,
        timeouts: Timeouts = TIMEOUTS,
        api_key: str = "",
    ) -> None:
        self._engines = controls(engine_url, timeouts, api_key)
        self._folders = Folders(folder)
        self._folder = folder.absolute()
        self._server = server
        self._keep = max(1, keep)
        self._engine_folder = engine_folder or self._folder
        self._timeouts = timeouts
        self._lock = threading.RLock()

    def close(self) -> None:
        """Ends the connections to the engines."""
        for engine in self._engines:
            engine.close()

    def restore(self) -> list[str]:
        """See `WeightPush`."""
        raise NotImplementedError

    @contextmanager
    def watched(self, every_seconds: float = WATCH_SECONDS) -> Iterator[None]:
        """While it lasts, `restore` is called again and again in a thread, so that an engine which
        is started again in the middle of a step does not wait for the next one."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(every_seconds):
                try:
                    self.restore()
                except EngineError as error:
                    log.warning("%s", error)

        thread = threading.Thread(target=watch, name="weights-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _seen(self, folder: Path) -> Path:
        """`folder` as the engines see it."""
        return self._engine_folder / folder.relative_to(self._folder)

    def _server_takes(self, version: int) -> None:
        if self._server is None:
            return
        current = int(self._server.status()["policy_version"])
        if version < current:
            raise ConflictError(
                f"The server is at version {current}, which is above {version}: nothing was done.",
                hint="Versions never go down: publish earlier weights under a higher number.",
                current=current,
            )

    def _quietly(self, what: str, step: Callable[[EngineControl], None]) -> None:
        """`step` at every engine; one where it fails is told of in the log only."""
        for engine in self._engines:
            try:
                step(engine)
            except EngineError as error:
                log.warning("%s: could not %s: %s", engine.url, what, error)


class Phases:
    """The seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The block within counts as `name`."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - begun, 4)
