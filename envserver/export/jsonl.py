"""Groups as JSONL, one a line, with the keys of Atropos's files and ours under "envserver".

A line is on disk before its group counts as delivered. A last line without its newline is what a
killed writer leaves: it is cut off when the file is opened to go on, and its group is made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import numpy as np
import orjson
import structlog
from envserver_records.errors import ConfigError, Failure, InputError, StoreError, StoreFull
from envserver_records.records import Group, SandboxUsage, Split, Tokens, Trajectory

from ..api.atropos.convert import group_to_atropos
from ..rollouts.estimates import Scored, scored
from ..rollouts.events import Event, GroupDropped, RolloutFailed
from ..rollouts.kept_calls import kept_calls

log = structlog.get_logger()

SCHEMA_VERSION = 1
_BEGINNING = b'{"tokens"'

ScoreRange = Literal["unit", "pm1"]


def group_line(
    group: Group,
    *,
    include_messages: bool,
    score_range: ScoreRange,
    include_actions: bool = False,
) -> bytes:
    """`group` as one line of JSON, with its newline.

    Keys: those of an Atropos scored data group (row i of each list is one training sequence), and
    `envserver`: where the group comes from and what is known of each rollout (`rows`: its rows).
    Calls that were kept (`tokens.keep_calls`) stand there, too, and what replaying them needs.
    """
    line: dict[str, Any] = group_to_atropos(
        group, include_messages=include_messages, score_range=score_range
    )
    line["envserver"] = {
        "schema_version": SCHEMA_VERSION,
        "group_id": group.group_id,
        "index": group.index,
        "env": group.env,
        "task_id": group.task_id,
        "split": group.split,
        "seed": group.seed,
        "model": group.model,
        "policy_version": group.policy_version,
        "rendering": group.rendering,
        "services": group.services,
        "created_at": group.created_at,
        "rollouts": _rollouts(group.trajectories, include_actions),
        "failures": [_failure(failure) for failure in group.failures],
        "asked": group.asked,
        "lost": group.lost,
    }
    if group.env_config:
        line["envserver"]["env_config"] = group.env_config
    return orjson.dumps(
        line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY, default=str
    )


def _rollouts(trajectories: list[Trajectory], include_actions: bool) -> list[dict[str, Any]]:
    facts, row = [], 0
    for trajectory in trajectories:
        rows = max(1, len(trajectory.sequences))
        facts.append(
            {
                "rollout_id": trajectory.rollout_id,
                "attempt": trajectory.attempt,
                "rows": list(range(row, row + rows)),
                "reward": trajectory.score.reward,
                "components": trajectory.score.components,
                "metrics": trajectory.score.metrics,
                "agent_metrics": trajectory.metrics,
                "output": trajectory.output,
                "finish_reason": trajectory.finish_reason,
                "truncated": trajectory.truncated,
                "limit": trajectory.limit,
                "turns": trajectory.turns,
                "tools": trajectory.tools,
                "flags": trajectory.flags,
                "versions": [_spans(row.versions) for row in trajectory.sequences],
                "agents": [row.agent for row in trajectory.sequences],
                "row_flags": [row.flags for row in trajectory.sequences],
                "others": [msgspec.structs.asdict(other) for other in trajectory.others],
                "usage": {
                    "seconds": trajectory.usage.seconds,
                    "model_seconds": trajectory.usage.model_seconds,
                    "prompt_tokens": trajectory.usage.prompt_tokens,
                    "completion_tokens": trajectory.usage.completion_tokens,
                    "ended_by": trajectory.usage.ended_by,
                    "worker_cpu_seconds": trajectory.usage.worker_cpu_seconds,
                    "worker_peak_memory_mb": trajectory.usage.worker_peak_memory_mb,
                    "sandbox": _sandbox(trajectory.usage.sandbox),
                },
            }
        )
        if include_actions:
            facts[-1]["actions"] = trajectory.actions
        if trajectory.calls:
            facts[-1] |= kept_calls(trajectory)
        row += rows
    return facts


def _sandbox(usage: SandboxUsage | None) -> dict[str, Any] | None:
    return None if usage is None else msgspec.structs.asdict(usage)


def _spans(versions: Tokens) -> list[list[int]]:
    """Runs of equal values as [value, start, end)."""
    ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    starts = [0, *ends[:-1]]
    return [[int(versions[start]), start, end] for start, end in zip(starts, ends, strict=True)]


def _failure(failure: Failure) -> dict[str, Any]:
    return {
        "kind": failure.kind,
        "blame": failure.blame,
        "outcome": failure.outcome,
        "message": failure.message,
        "hint": failure.hint,
        "detail": failure.detail,
    }


class JsonlSink:
    """A JSONL file as the place where groups go. Use `open_sink`."""

    def __init__(
        self,
        path: Path,
        file: IO[bytes],
        written: _Written,
        *,
        include_messages: bool,
        include_actions: bool,
        score_range: ScoreRange,
    ) -> None:
        self.path = path
        self.already = len(written.group_ids)
        self._file = file
        self._done = written.group_ids
        self._at_first = frozenset(written.group_ids)
        self._models = written.models
        self._include_messages = include_messages
        self._include_actions = include_actions
        self._score_range = score_range
        self._lock = asyncio.Lock()

    def already_of(self, prefix: str) -> int:
        """Groups that were in the file when it was opened and whose ids begin with `prefix`."""
        return sum(group_id.startswith(prefix) for group_id in self._at_first)

    def expect(self, model: str) -> None:
        """Makes sure that no two models are mixed in one file.

        Raises:
            ConfigError: the file holds groups of another one.
        """
        if others := self._models - {model}:
            raise ConfigError(
                f"{self.path} holds groups of the model {', '.join(sorted(others))}; "
                f"this run's is {model}.",
                hint="Name another file, or --overwrite this one.",
            )

    async def put(self, group: Group) -> None:
        """Appends `group` and syncs it to disk.

        Raises:
            StoreFull: the disk is full; the file is as it was before.
            StoreError: it cannot be written for another reason.
        """
        line = await asyncio.to_thread(
            group_line,
            group,
            include_messages=self._include_messages,
            include_actions=self._include_actions,
            score_range=self._score_range,
        )
        async with self._lock:
            if group.group_id in self._done:
                return
            await asyncio.to_thread(append_durably, self._file, line)
            self._done.add(group.group_id)

    async def known(self, group_ids: list[str]) -> set[str]:
        """Those that stand in the file."""
        return self._done.intersection(group_ids)

    async def wait_for_room(self) -> None:
        """A file always has room."""


def append_durably(file: IO[bytes], data: bytes) -> None:
    """Appends all of `data` to an unbuffered `file` and syncs it, or nothing.

    Raises:
        StoreFull, StoreError
    """
    start = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fdatasync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):  # the original failure is the one to tell
            file.truncate(start)
        kind = StoreFull if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else StoreError
        raise kind(
            f"{file.name} cannot be written: {error.strerror}.",
            hint="Nothing of this group was kept. Free space and run again with --resume.",
        ) from error


@contextlib.asynccontextmanager
async def open_sink(
    path: Path,
    *,
    env: str,
    split: str,
    seed: int,
    resume: bool,
    overwrite: bool,
    include_messages: bool,
    score_range: ScoreRange,
    include_actions: bool = False,
    beside: Sequence[Mapping[str, Any]] = (),
    tell: Callable[[Scored], None] | None = None,
) -> AsyncIterator[JsonlSink]:
    """The file at `path`, new or to be gone on with.

    Args:
        beside: `env`, `split` and `seed` of others whose groups go there, too.
        tell: told what each group says of its task that is there already, and, as far as the file
            of the failures has them, each that was scored and dropped.

    Raises:
        ConfigError: it exists and neither `resume` nor `overwrite` is given, or it holds the groups
            of another environment, split or seed, or another process writes it.
        InputError: a line of it is no group of ours.
        StoreError: it cannot be opened.
    """
    with await asyncio.to_thread(_open_appending, path) as file:
        _lock(file, path)
        if file.seek(0, os.SEEK_END) and not (resume or overwrite):
            raise ConfigError(
                f"{path} exists.", hint="Go on with it by --resume, replace it by --overwrite."
            )
        if overwrite:
            file.truncate(0)
        expected = [{"env": env, "split": split, "seed": seed}, *map(dict, beside)]
        written = await asyncio.to_thread(_read, path, expected, tell)
        if tell is not None and resume:
            await asyncio.to_thread(_read_dropped, failures_path(path), tell)
        cut_torn_line(file)
        yield JsonlSink(
            path,
            file,
            written,
            include_messages=include_messages,
            include_actions=include_actions,
            score_range=score_range,
        )


def _open_appending(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+b", 0)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}.") from error


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"Another process is writing {path}.") from error


def cut_torn_line(file: IO[bytes]) -> int:
    """Removes what stands behind the last newline; returns how many bytes that was."""
    size = file.seek(0, os.SEEK_END)
    end = size
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            end = start + at + 1
            break
        end = start
    if end < size:
        file.truncate(end)
        os.fsync(file.fileno())
    return size - end


class _Facts(msgspec.Struct):
    group_id: str
    env: str
    split: str
    seed: int
    model: str
    task_id: str = ""
    policy_version: int = -1


class _Rollout(msgspec.Struct):
    reward: float | None = None


class _ScoredFacts(_Facts):
    rollouts: list[_Rollout] = []


class _Line(msgspec.Struct):
    """Of a line only what resuming needs; the decoder skips the rest without building it."""

    envserver: _Facts


class _ScoredLine(msgspec.Struct):
    envserver: _ScoredFacts


class _Dropped(msgspec.Struct):
    """Of a line of a failures file only what a curriculum needs."""

    scored: Scored | None = None


class _Written(msgspec.Struct):
    """What a file holds: the ids of its groups, and the models that made them."""

    group_ids: set[str]
    models: set[str]


def _read(
    path: Path, expected: list[dict[str, Any]], tell: Callable[[Scored], None] | None
) -> _Written:
    decoder: msgspec.json.Decoder[_Line | _ScoredLine] = msgspec.json.Decoder(
        _Line if tell is None else _ScoredLine
    )
    written = _Written(set(), set())
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                _check_torn(line, path, number)
                break
            try:
                facts = decoder.decode(line).envserver
            except msgspec.DecodeError as error:
                raise _not_ours(path, number, str(error)) from error
            found = {key: getattr(facts, key) for key in expected[0]}
            if found not in expected:
                wanted = " and ".join(map(str, expected))
                raise ConfigError(
                    f"{path}, line {number} is of another run: {found}; this one is {wanted}.",
                    hint="Resume with the settings of that run, or name another file.",
                )
            written.group_ids.add(facts.group_id)
            written.models.add(facts.model)
            if tell is not None and (news := _news(facts)) is not None:
                tell(news)
    return written


def _news(facts: _Facts) -> Scored | None:
    rollouts = facts.rollouts if isinstance(facts, _ScoredFacts) else []
    rewards = [one.reward for one in rollouts if one.reward is not None]
    split = msgspec.convert(facts.split, Split)
    return scored(facts.group_id, facts.env, split, facts.task_id, rewards, facts.policy_version)


def _read_dropped(path: Path, tell: Callable[[Scored], None]) -> None:
    """The file is a report: what cannot be read of it is passed over."""
    decoder = msgspec.json.Decoder(_Dropped)
    with contextlib.suppress(OSError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                if (news := decoder.decode(line).scored) is not None:
                    tell(news)


def _check_torn(line: bytes, path: Path, number: int) -> None:
    """A line without its end is cut off, so it must be certain that we began it."""
    if line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
        raise _not_ours(path, number, "it has no end and does not begin like a group")


def _not_ours(path: Path, number: int, reason: str) -> InputError:
    return InputError(
        f"{path}, line {number} was not written by `envserver process`: {reason}.",
        hint="Name another file, or --overwrite this one.",
        place=f"line {number}",
    )


def failures_path(output: Path) -> Path:
    """Where the failures of the groups of `output` are told."""
    return output.with_name(output.stem + ".failures.jsonl")


class FailuresFile:
    """`<output>.failures.jsonl`: one line per failed attempt and per group not delivered.

    Made when the first line comes. It is a report: its lines are not synced, and a disk too full
    for them does not end the run.
    """

    def __init__(self, output: Path, *, resume: bool) -> None:
        self.path = failures_path(output)
        self.lines = 0
        if not resume:
            self.path.unlink(missing_ok=True)

    def write(self, event: Event) -> None:
        """Appends `event` if it tells of a failure or a dropped group."""
        if isinstance(event, RolloutFailed):
            self._append({"event": "rollout_failed", **_facts(event), **_failure(event.failure)})
        elif isinstance(event, GroupDropped):
            self._append({"event": "group_dropped", **_facts(event)} | _scored(event))

    def _append(self, line: dict[str, Any]) -> None:
        line.pop("failure", None)
        try:
            with self.path.open("ab") as file:
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE, default=str))
        except OSError as error:
            log.warning("failures_file.not_written", path=str(self.path), error=str(error))
        else:
            self.lines += 1


def _scored(event: GroupDropped) -> dict[str, Any]:
    return {"scored": None if event.scored is None else msgspec.structs.asdict(event.scored)}


def _facts(event: RolloutFailed | GroupDropped) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}
