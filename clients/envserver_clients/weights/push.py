"""The interface between a trainer and its engines, and what its implementations share.

Invariants: a folder `version-17` is complete and on disk (written under another name, synced,
renamed) and never written again. Saving the version again makes `version-17.1`, because an engine
may still read the first folder and caches what it computed by its path.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from envserver_records import (
    ConflictError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    EnvserverError,
    InputError,
)
from envserver_records.files import sync_path, sync_tree

from envserver_clients.http import SyncEnvClient

from .engines import (
    EngineControl,
    PromptCheck,
    Timeouts,
    WeightsMismatch,
    WeightsNotSaved,
    controls,
    together,
)

log = logging.getLogger(__name__)

Save = Callable[[Path], None]
InFlight = Literal["drain", "keep", "abort"]
TIMEOUTS: Final = Timeouts()
WATCH_SECONDS: Final = 5.0
_NAME: Final = re.compile(r"version-(\d+)(?:\.(\d+))?")
_UNFINISHED: Final = ".unfinished-"
_FULL: Final = {errno.ENOSPC, errno.EDQUOT}
_FULL_WORDS: Final = ("No space left", "os error 28", "Disk quota exceeded")


class WeightFolders:
    """Manages the versions below `folder`, which is made when needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def save(self, version: int, save: Save, wanted: Collection[str]) -> Path:
        """Saves a version with `save`; returns its folder.

        `wanted`: patterns of files; each must match a file afterwards. Raises WeightsNotSaved: the
        disk is full, or `save` raised an error; nothing remains. InputError: `save` did not write
        the files that engines need.
        """
        unfinished = self._folder / f"{_UNFINISHED}{version}-{os.getpid()}"
        try:
            self._sweep()
            unfinished.mkdir(parents=True)
            save(unfinished)
            _must_hold(unfinished, wanted)
            sync_tree(unfinished)
            final = self._folder / self._free_name(version)
            unfinished.rename(final)
            sync_path(self._folder)
        except InputError:
            self._remove(unfinished)
            raise
        except Exception as error:  # `save` is the caller's and may raise anything
            self._remove(unfinished)
            raise _not_saved(version, self._folder, error) from error
        return final

    def versions(self) -> dict[int, list[Path]]:
        """The folders of each version, the oldest first."""
        found: dict[int, list[tuple[int, Path]]] = {}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if named := _NAME.fullmatch(path.name):
                found.setdefault(int(named[1]), []).append((int(named[2] or 0), path))
        return {version: [path for _, path in sorted(found[version])] for version in sorted(found)}

    def keep(self, versions: Collection[int]) -> None:
        """Removes all other versions; failed removals are repeated the next time."""
        for version, paths in self.versions().items():
            if version not in versions:
                for path in paths:
                    # Rename before removing, so that no partial version is visible.
                    going = path.with_name(f"{_UNFINISHED}{path.name}")
                    path.rename(going)
                    self._remove(going)

    def _free_name(self, version: int) -> str:
        taken = self.versions().get(version)
        if not taken:
            return f"version-{version}"
        last = _NAME.fullmatch(taken[-1].name)
        assert last is not None
        return f"version-{version}.{int(last[2] or 0) + 1}"

    def _sweep(self) -> None:
        for path in self._folder.glob(f"{_UNFINISHED}*"):
            self._remove(path)

    def _remove(self, folder: Path) -> None:
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("%s could not be removed: %s", folder, error)


def _must_hold(folder: Path, wanted: Collection[str]) -> None:
    missing = [pattern for pattern in wanted if not any(folder.glob(pattern))]
    if missing:
        raise InputError(
            f"The saved folder has no {' and no '.join(missing)}.",
            hint="Save a whole model (for LoRA an adapter), as save_pretrained does.",
        )


def _not_saved(version: int, folder: Path, error: Exception) -> WeightsNotSaved:
    words = str(error)
    full = getattr(error, "errno", None) in _FULL or any(part in words for part in _FULL_WORDS)
    hint = (
        "The disk is full: make room or keep fewer versions, then publish again."
        if full
        else "No engine was changed: publish it again."
    )
    return WeightsNotSaved(
        f"Version {version} could not be saved in {folder}: {type(error).__name__}: {words}.",
        hint=hint,
        folder=str(folder),
        full=full,
    )


@dataclass(frozen=True)
class Published:
    """The result of a transfer.

    Args:
        version: the version that the engines serve now.
        model: the model name to use; None: unchanged.
        folder: the folder with the weights, removed some versions later; None: without files.
        engines: urls of the engines that have them.
        difference: largest difference from the trainer's logprobs; None: not checked.
        seconds: duration by phase, in order.
        failed: errors of engines that do not have them, and are not used, by url.
    """

    version: int
    model: str | None
    folder: Path | None
    engines: tuple[str, ...]
    difference: float | None
    seconds: dict[str, float]
    failed: dict[str, EngineError] = field(default_factory=dict)


class WeightPush(Protocol):
    """Transfers weights to engines."""

    def publish(self, version: int, save: Save, check: PromptCheck | None = None) -> Published:
        """Transfers new weights to the engines and publishes them at the server as `version`.

        The same version can be published again: it is saved and transferred again.

        Args:
            version: at least the server's version.
            save: writes safetensors into the given folder, as `save_pretrained` does.
            check: logprobs that the engines must reproduce.

        Raises:
            WeightsNotSaved, InputError: `save` failed, or wrote other files.
            ConflictError: the server is at a higher version.
            EngineError: an engine failed (see `envserver_clients.weights.engines`); the version is
                not published on any of them.
        """

    def restore(self) -> list[str]:
        """Transfers the published weights again to engines that lost them in a restart; returns
        their urls. One that does not answer is tried again the next time.

        Raises EngineError: an engine loaded them and computes different logprobs.
        """


class PushBase:
    """Engines and the server; runs one operation at a time.

    Args:
        engine_url: the engine's url, or one for each of several replicas.
        server: client of the server, which learns of versions and holds the agents' calls.
        timeouts: see `Timeouts`.
        api_key: the engines' key.
    """

    def __init__(
        self,
        engine_url: str | Sequence[str],
        *,
        server: SyncEnvClient | None = None,
        timeouts: Timeouts = TIMEOUTS,
        api_key: str = "",
    ) -> None:
        self._engines = controls(engine_url, timeouts, api_key)
        self._server = server
        self._timeouts = timeouts
        self._api_key = api_key
        self._lock = threading.RLock()

    def close(self) -> None:
        for engine in self._engines:
            engine.close()

    def restore(self) -> list[str]:
        """Transfers the published weights to engines that lost or failed to take them, or came
        later; otherwise as `WeightPush.restore`."""
        with self._lock:
            mended = []
            for engine in self._to_restore():
                try:
                    if self._mend(engine):
                        mended.append(engine.url)
                except WeightsMismatch:
                    raise
                except EngineError as error:
                    passes = isinstance(error, EngineUnavailable | EngineTimeout)
                    level = logging.INFO if passes else logging.WARNING
                    log.log(level, "%s will be tried again later: %s", engine.url, error)
            return mended

    def _to_restore(self) -> Sequence[EngineControl]:
        """The engines that should have the published weights; none if no version is complete."""
        return self._engines

    def _mend(self, engine: EngineControl) -> bool:
        """Transfers the published weights to an engine that lacks them; returns whether it did."""
        raise NotImplementedError

    def _published(
        self, version: int, found: Mapping[str, float | None], phases: Phases, **more: Any
    ) -> Published:
        """`found`: the difference of each engine that has the version, by url."""
        differences = [difference for difference in found.values() if difference is not None]
        facts = {"model": None, "folder": None, **more}
        return Published(
            version=version,
            engines=tuple(found),
            difference=max(differences, default=None),
            seconds=phases.seconds,
            **facts,
        )

    @contextmanager
    def watched(self, every_seconds: float = WATCH_SECONDS) -> Iterator[None]:
        """Calls `restore` periodically in a thread, so that an engine that restarts during a step
        does not wait for the next one."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(every_seconds):
                try:
                    self.restore()
                except EnvserverError as error:
                    log.warning("%s", error)

        thread = threading.Thread(target=watch, name="weights-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _server_takes(self, version: int) -> None:
        if self._server is None:
            return
        current = int(self._server.status()["policy_version"])
        if version < current:
            raise ConflictError(
                f"The server is at version {current}, above {version}: nothing was changed.",
                hint="Versions never decrease: publish earlier weights under a higher number.",
                current=current,
            )

    def _hold_calls(self, in_flight: InFlight) -> None:
        """Calls that do not end in time are aborted."""
        if self._server is None:
            return
        seconds = self._timeouts.drain
        if not self._server.pause_calls(in_flight, timeout_seconds=seconds):
            log.warning("calls did not end within %g s: they are repeated", seconds)
            self._server.pause_calls("abort", timeout_seconds=seconds)

    def _quietly(self, what: str, step: Callable[[EngineControl], None]) -> None:
        """Runs `step` at every engine; failures are only logged."""
        for engine in self._engines:
            quietly(engine.url, what, partial(step, engine))


def quietly(url: str, what: str, step: Callable[[], object]) -> None:
    try:
        step()
    except EnvserverError as error:
        log.warning("%s: could not %s: %s", url, what, error)


class FolderPush(PushBase):
    """Sends weights as files in a folder that trainer and engines share.

    Args:
        folder: where versions are saved, and where engines read them.
        keep: number of last versions that stay on disk.
        engine_folder: `folder` as the engines see it, if different (in a container).
        settings: those of `PushBase`.
    """

    def __init__(
        self,
        engine_url: str | Sequence[str],
        folder: Path,
        *,
        keep: int = 2,
        engine_folder: Path | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(engine_url, **settings)
        self._folders = WeightFolders(folder)
        self._folder = folder.absolute()
        self._keep = max(1, keep)
        self._engine_folder = engine_folder or self._folder

    def _saved(
        self,
        version: int,
        save: Save,
        wanted: Collection[str],
        phases: Phases,
        reach: Callable[[EngineControl], None],
    ) -> Path:
        """Saves a version once the server and all engines can take it; returns its folder."""
        with phases.phase("reach"):
            self._server_takes(version)
            together(self._engines, "reach", reach)
        with phases.phase("save"):
            return self._folders.save(version, save, wanted)

    def _seen(self, folder: Path) -> Path:
        return self._engine_folder / folder.relative_to(self._folder)


class Phases:
    """Measures the seconds of each phase."""

    def __init__(self, before: Mapping[str, float] | None = None) -> None:
        self.seconds: dict[str, float] = dict(before or {})

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - begun, 4)
