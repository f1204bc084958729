"""Evaluations of a held-out split while a server trains: `--evaluate.*` of `serve`.

Each has a folder as `envserver evaluate` writes it, and an entry in the list in the store. One runs
at a time; none of its groups reaches a trainer or an estimate of a task; each records which policy
versions sampled its rollouts. An evaluation cut off by the end of the server resumes if the version
is still the same; otherwise the current version is evaluated.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
import structlog
from envserver_records.errors import ConfigError, ConflictError, EnvserverError

from ..proxy.endpoint import VERSION_PLACEHOLDER
from ..settings.config import MixSettings
from ..settings.runs import HeldOutConfig
from .context import SharedEngine
from .judging import folder_of
from .mix import Member
from .prices import pricing_of
from .run_settings import ServeSettings
from .tracking import Tracking

if TYPE_CHECKING:
    from ..store import Store

_KEY: Final = "evaluations"
_KEPT: Final = 1000
"""Maximum number of evaluations in the list; their folders stay."""
_OTHER_SPLIT: Final = "A held-out split has other tasks: set evaluate.split to test or validation."
_log = structlog.get_logger("envserver.evaluations")

State = Literal["running", "complete", "failed", "interrupted"]


class HeldOut(msgspec.Struct, kw_only=True):
    """One evaluation.

    Args:
        version: the policy version at its start; -1: none was published.
        began_at, ended_at: seconds since 1970; 0: not yet.
        results: its numbers, such as `evaluate/math/mean_reward`.
        other_versions: number of scored rollouts with tokens that another version sampled.
        sampled_by: number of rollouts by version; `several`: mixed in one rollout; `unknown`.
    """

    version: int
    folder: str
    state: State
    began_at: float
    ended_at: float = 0.0
    results: dict[str, float] = {}
    rollouts: int = 0
    other_versions: int = 0
    sampled_by: dict[str, int] = {}
    error: str = ""


class Evaluations:
    """Runs evaluations, one at a time; `run` does the work."""

    def __init__(
        self,
        members: Sequence[Member[MixSettings]],
        store: Store,
        room: SharedEngine,
        tracked: Tracking | None,
    ) -> None:
        settings = members[0].settings
        self.config = settings.evaluate if isinstance(settings, ServeSettings) else HeldOutConfig()
        self._of_training = _of_training(members, self.config)
        if self._of_training and self.config.every is not None:
            raise ConfigError(self._of_training, hint=_OTHER_SPLIT)
        self._members = members
        self._folder = self.config.out or folder_of(settings.store) / "evaluations"
        self._pricing = pricing_of(settings.prices, settings.model, settings.engine.models_file)
        self._store = store
        self._room = room
        self._tracked = tracked
        self._records: list[HeldOut] = []
        self._loaded = False
        self._off = False
        self._wanted = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self.ends: Counter[str] = Counter()
        """Evaluations since the start by how they ended; `skipped`: due while another one ran."""

    @property
    def busy(self) -> bool:
        return not self._idle.is_set()

    @property
    def latest(self) -> HeldOut | None:
        return next(
            (record for record in reversed(self._records) if record.state == "complete"), None
        )

    def listed(self) -> list[dict[str, Any]]:
        return [msgspec.to_builtins(record) for record in self._records]

    def published(self, version: int) -> None:
        if not self._loaded or not self._is_due(version):
            return
        if self.busy:
            self.ends["skipped"] += 1
            _log.warning(
                "evaluation.skipped",
                version=version,
                why="Another evaluation is running.",
                hint="Raise evaluate.every or evaluate.max_concurrent, or lower total_steps.",
            )
            return
        self._want()

    def start(self) -> None:
        if self._of_training:
            raise ConflictError(self._of_training, hint=_OTHER_SPLIT)
        if self.busy or not self._loaded:
            raise ConflictError("An evaluation is running.", hint="See GET /v1/evaluations.")
        self._want()

    async def hold(self, most_seconds: float) -> None:
        """Waits until no evaluation runs, at most `evaluate.hold_seconds` and `most_seconds`."""
        seconds = min(self.config.hold_seconds, most_seconds)
        if not self.busy or not seconds:
            return
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("evaluation.not_held", why=f"It is still running after {seconds:g} s.")

    async def run(self) -> None:
        await self._load()
        self.published(self._version)
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            try:
                await self._one(self._version)
            finally:
                self._idle.set()

    @property
    def _version(self) -> int:
        return self._room.endpoint.policy_version

    def _want(self) -> None:
        self._idle.clear()
        self._wanted.set()

    def _is_due(self, version: int) -> bool:
        before = [
            record.version for record in self._records if record.state in ("complete", "running")
        ]
        return not self._off and is_due(version, before, self.config.every)

    async def _load(self) -> None:
        stored = await self._store.get_value(_KEY)
        self._records = msgspec.convert(stored or [], list[HeldOut])
        for record in self._records:
            if record.state == "running":  # when the server ended
                record.state = "interrupted"
        self._loaded = True

    async def _save(self) -> None:
        del self._records[:-_KEPT]
        await self._store.set_value(_KEY, self.listed())

    async def _one(self, version: int) -> None:
        record, again = self._begun(version)
        await self._save()
        _log.info("evaluation.begins", version=version, folder=record.folder)
        try:
            results, sampled_by = await self._made(Path(record.folder), again=again)
            self._note(record, results, sampled_by)
        except EnvserverError as error:
            record.state, record.error = "failed", str(error)
            # A wrong setting, such as a split without tasks, stays wrong.
            self._off = isinstance(error, ConfigError)
            _log.error(
                "evaluation.failed",
                version=version,
                error=str(error),
                next="none until a restart" if self._off else "at the next version",
            )
        except Exception as error:  # noqa: BLE001 (our fault must not end all later evaluations)
            record.state, record.error = "failed", f"It failed: {error!r}."
            _log.exception("evaluation.broke", version=version)
        record.ended_at = time.time()
        self.ends[record.state] += 1
        await self._save()

    def _begun(self, version: int) -> tuple[HeldOut, bool]:
        for known in self._records:
            if known.version == version and known.state in ("interrupted", "failed"):
                known.state, known.error, known.ended_at = "running", "", 0.0
                return known, True
        folder = _free(self._folder, f"version-{version:06d}" if version >= 0 else "unpublished")
        record = HeldOut(version=version, folder=str(folder), state="running", began_at=time.time())
        self._records.append(record)
        return record, False

    async def _made(self, folder: Path, *, again: bool) -> tuple[dict[str, float], dict[str, int]]:
        # Imported here: a server that evaluates nothing starts with 35 modules less.
        from .held_out_run import evaluated

        room = self._room
        if VERSION_PLACEHOLDER in room.model:  # its calls ask for this version by name
            room = msgspec.structs.replace(room, endpoint=room.endpoint.pinned())
        return await evaluated(room, self._members, self.config, self._pricing, folder, again=again)

    def _note(self, record: HeldOut, results: dict[str, float], sampled_by: dict[str, int]) -> None:
        record.results, record.sampled_by = results, sampled_by
        record.rollouts = sum(record.sampled_by.values())
        record.other_versions = record.rollouts - record.sampled_by.get(str(record.version), 0)
        record.state = "complete"
        _log.info(
            "evaluation.complete",
            version=record.version,
            folder=record.folder,
            rollouts=record.rollouts,
            other_versions=record.other_versions,
            results=record.results,
        )
        if self._tracked is not None:
            self._tracked.summary(
                record.results
                | {
                    "evaluate/policy_version": record.version,
                    "evaluate/other_versions": record.other_versions,
                }
            )


def is_due(version: int, before: Sequence[int], every: int | None) -> bool:
    """The first version is due, and then the first at or after each multiple of `every`; None:
    none."""
    if every is None or version < 0:
        return False
    return version // every > max(before, default=-1) // every


def _free(folder: Path, name: str) -> Path:
    numbered = (name if n == 1 else f"{name}-{n}" for n in itertools.count(1))
    return next(path for name in numbered if not (path := folder / name).exists())


def _of_training(members: Sequence[Member[MixSettings]], config: HeldOutConfig) -> str:
    for member in members:
        if config.split == member.settings.env.split:
            name, split = member.share.name, config.split
            return f"--evaluate.split {split} is the split that {name!r} trains on."
    return ""
