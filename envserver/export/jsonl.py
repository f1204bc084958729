"""Groups as JSONL, one on each line, with Atropos's keys and this server's under "envserver".

A line is on disk before its group counts as delivered. A killed writer may leave a last line
without a newline: it is removed when the file is resumed, and its group is made again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import stat
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import orjson
import structlog
from envserver_records.errors import ConfigError, InputError, StoreError
from envserver_records.files import replacing_path, write_failure
from envserver_records.records import Group, Split, Tokens, Trajectory, chained, digest_after
from envserver_records.tasks import range_as_json, range_from_json
from envserver_records.timings import compact_timing
from msgspec.structs import asdict

from ..formats.atropos import ScoreRange, expert_rows, group_to_atropos, image_data
from ..rollouts.estimates import Scored, scored
from ..rollouts.events import Event, GroupDropped, RolloutFailed
from ..rollouts.replaying import kept_calls


class OutputFile:
    """A locked file that lines are appended to; the first line may replace what another run left.

    The old content stays until then, so a run that fails before its first group loses nothing.
    """

    def __init__(self, path: Path, file: IO[bytes], *, replaces: bool) -> None:
        self._path = path.resolve()
        self._file = file
        self._replaces = replaces
        self._previous = "" if replaces else digest_after_last_line(file)
        self._opened = contextlib.ExitStack()

    def append(self, line: bytes) -> None:
        """Appends `line`, chained to the line before it (see `seals`), and syncs it to disk."""
        line = chained(line, self._previous)
        self._append(line)
        self._previous = digest_after(line)

    def _append(self, line: bytes) -> None:
        if not self._replaces:
            append_durably(self._file, line)
            return
        # The old file stays open: its lock refuses processes that opened it before the rename.
        with contextlib.ExitStack() as stack:
            try:
                with replacing_path(self._path) as partial:
                    file = stack.enter_context(open_appending(partial))
                    lock(file, self._path)
                    append_durably(file, line)
            except OSError as error:
                raise write_failure(str(self._path), error, "The old file is unchanged.") from error
            self._opened = stack.pop_all()
        self._file, self._replaces = file, False

    def close(self) -> None:
        self._opened.close()


def append_durably(file: IO[bytes], data: bytes) -> None:
    """Appends all of `data` to an unbuffered `file` and syncs it, or nothing."""
    start = file.seek(0, os.SEEK_END)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[file.write(rest) :]
        os.fdatasync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):  # the original failure is the one to tell
            file.truncate(start)
        hint = "No part of this group was written. Free space and run again with --resume."
        raise write_failure(file.name, error, hint) from error


def open_appending(path: Path) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", 0)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}.") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError(
            f"{path} is a device or a pipe: what is written to it cannot be read again.",
            hint="Name a file.",
        )
    return file


def lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ConfigError(f"Another process is writing {path}.") from error


def digest_after_last_line(file: IO[bytes]) -> str:
    """Returns the `previous` of a line that is appended to `file`, which holds whole lines."""
    end = file.seek(0, os.SEEK_END)
    start = file.seek(_line_start(file, end - 1))
    return digest_after(file.read(end - start)) if end else ""


def cut_torn_line(file: IO[bytes]) -> int:
    """Removes what follows the last newline; returns the number of bytes removed."""
    size = file.seek(0, os.SEEK_END)
    end = _line_start(file, size)
    if end < size:
        file.truncate(end)
        os.fsync(file.fileno())
    return size - end


def _line_start(file: IO[bytes], end: int) -> int:
    """Returns where the line begins that is cut off at `end`; reads backwards."""
    while end > 0:
        start = max(0, end - 65536)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


log = structlog.get_logger()

SCHEMA_VERSION = 1
_OF_GROUP = (
    *("group_id", "index", "env", "task_id", "split", "seed", "model", "policy_version"),
    *("rendering", "services", "created_at"),
)
_OF_ROLLOUT = ("output", "finish_reason", "truncated", "limit", "turns", "tools", "flags")
_OF_SCORE = ("reward", "components", "metrics", "rewards")
_IF_ANY = ("hooks", "egress", "timings", "attempts", "printed")
_BEGINNING = b'{"tokens"'


def group_line(
    group: Group,
    *,
    include_messages: bool,
    score_range: ScoreRange,
    include_actions: bool = False,
    include_experts: bool = False,
) -> bytes:
    """Returns `group` as one line of JSON with its newline: Atropos's keys, and `envserver`."""
    line: dict[str, Any] = group_to_atropos(
        group, include_messages=include_messages, score_range=score_range
    )
    line["envserver"] = {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(group, name) for name in _OF_GROUP},
        "rollouts": _rollouts(group.trajectories, include_actions, include_messages),
        "failures": [asdict(failure) for failure in group.failures],
        "asked": group.asked,
        "lost": group.lost,
        "reward_range": range_as_json(group.reward_range),
        "component_weights": group.component_weights,
    }
    if group.digest:
        line["envserver"] |= {"provenance": group.provenance, "group_digest": group.digest}
    if group.missing:
        line["envserver"]["missing"] = msgspec.to_builtins(group.missing)
    if group.public and include_messages:
        line["envserver"]["public"] = group.public
    if group.env_config:
        line["envserver"]["env_config"] = group.env_config
    if group.images:
        line["envserver"]["images"] = image_data(group)
    if include_experts and (experts := expert_rows(group)) is not None:
        line["envserver"]["experts"] = experts
    return orjson.dumps(
        line, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY, default=str
    )


def _rollouts(
    trajectories: list[Trajectory], include_actions: bool, include_messages: bool
) -> list[dict[str, Any]]:
    facts, row = [], 0
    for trajectory in trajectories:
        rows = max(1, len(trajectory.sequences))
        facts.append(
            {
                "rollout_id": trajectory.rollout_id,
                "attempt": trajectory.attempt,
                "rows": list(range(row, row + rows)),
                **{name: getattr(trajectory.score, name) for name in _OF_SCORE},
                "turn_rewards": [asdict(reward) for reward in trajectory.score.turns],
                "logged_turn_rewards": [asdict(reward) for reward in trajectory.turn_rewards],
                "agent_calls": trajectory.agent_calls,
                "agent_metrics": trajectory.metrics,
                **{name: getattr(trajectory, name) for name in _OF_ROLLOUT},
                "versions": [_spans(row.versions) for row in trajectory.sequences],
                "agents": [row.agent for row in trajectory.sequences],
                "row_flags": [row.flags for row in trajectory.sequences],
                "others": [asdict(other) for other in trajectory.others],
                "usage": msgspec.to_builtins(trajectory.usage),
                "started_at": trajectory.started_at,
            }
        )
        if include_messages and not _has_row_of_main_agent(trajectory):
            facts[-1]["messages"] = trajectory.messages
        if include_actions:
            facts[-1]["actions"] = trajectory.actions
        if any(row.follows is not None for row in trajectory.sequences):
            facts[-1]["follows"] = [row.follows for row in trajectory.sequences]
            facts[-1]["shares"] = [row.share for row in trajectory.sequences]
        for name in _IF_ANY:
            if (values := getattr(trajectory, name)) and name != "timings":
                facts[-1][name] = msgspec.to_builtins(values)
            elif values:
                facts[-1][name] = [compact_timing(timing) for timing in values]
        if trajectory.calls:
            facts[-1] |= kept_calls(trajectory)
        row += rows
    return facts


def _has_row_of_main_agent(trajectory: Trajectory) -> bool:
    others = {other.agent for other in trajectory.others}
    agents = {row.agent for row in trajectory.sequences} or {None}
    return not agents <= others


def _spans(versions: Tokens) -> list[list[int]]:
    """Returns runs of equal values as [value, start, end)."""
    ends = [*(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    starts = [0, *ends[:-1]]
    return [[int(versions[start]), start, end] for start, end in zip(starts, ends, strict=True)]


class JsonlSink:
    def __init__(
        self,
        path: Path,
        file: OutputFile,
        written: _Written,
        line_of: Callable[[Group], bytes],
    ) -> None:
        self.path = path
        self.already = len(written.group_ids)
        self._file = file
        self._done = written.group_ids
        self._at_first = frozenset(written.group_ids)
        self._models = written.models
        self._line_of = line_of
        self._lock = asyncio.Lock()

    def already_of(self, prefix: str) -> int:
        """Counts the groups with this prefix that were in the file at opening."""
        return sum(group_id.startswith(prefix) for group_id in self._at_first)

    def expect(self, model: str) -> None:
        """Makes sure that one file has groups of one model only."""
        if others := self._models - {model}:
            raise ConfigError(
                f"{self.path} holds groups of the model {', '.join(sorted(others))}; "
                f"this run's is {model}.",
                hint="Name another file, or --overwrite this one.",
            )

    async def put(self, group: Group) -> None:
        line = await asyncio.to_thread(self._line_of, group)
        async with self._lock:
            if group.group_id in self._done:
                return
            await asyncio.to_thread(self._file.append, line)
            self._done.add(group.group_id)

    async def known(self, group_ids: list[str]) -> set[str]:
        return self._done.intersection(group_ids)

    async def wait_for_capacity(self) -> None:
        """Returns at once: a file always has capacity."""


@contextlib.asynccontextmanager
async def open_sink(
    path: Path,
    identities: Sequence[dict[str, Any]],
    line_of: Callable[[Group], bytes],
    *,
    resume: bool,
    overwrite: bool,
    tell: Callable[[Scored], None] | None = None,
) -> AsyncIterator[JsonlSink]:
    """Opens a file for the groups of a run.

    Args:
        identities: the `env`, `split` and `seed` that groups of this run may have.
        tell: called with what is known of each group that is there already.
    """
    with await asyncio.to_thread(open_appending, path) as file:
        lock(file, path)
        if file.seek(0, os.SEEK_END) and not (resume or overwrite):
            raise ConfigError(
                f"{path} exists.", hint="Continue it with --resume, or replace it with --overwrite."
            )
        written = _Written(set(), set())
        if not overwrite:
            written = await asyncio.to_thread(_read, path, identities, tell)
            if tell is not None and resume:
                await asyncio.to_thread(_read_dropped, failures_path(path), tell)
            cut_torn_line(file)
        with contextlib.closing(OutputFile(path, file, replaces=overwrite)) as output:
            yield JsonlSink(path, output, written, line_of)


class _Rollout(msgspec.Struct):
    reward: float | None = None


class _Facts(msgspec.Struct):
    group_id: str
    env: str
    split: str
    seed: int
    model: str
    task_id: str = ""
    policy_version: int = -1
    rollouts: list[_Rollout] = []
    reward_range: dict[str, float | None] = {}


class _Line(msgspec.Struct):
    """The part of a line that resuming needs; the decoder skips the rest."""

    envserver: _Facts


class _Dropped(msgspec.Struct):
    """The part of a failures line that a curriculum needs."""

    scored: Scored | None = None


class _Written(msgspec.Struct):
    group_ids: set[str]
    models: set[str]


def _read(
    path: Path, expected: Sequence[dict[str, Any]], tell: Callable[[Scored], None] | None
) -> _Written:
    decoder = msgspec.json.Decoder(_Line)
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
                    f"{path}, line {number} belongs to another run: {found}; this one is {wanted}.",
                    hint="Resume with the settings of that run, or name another file.",
                )
            written.group_ids.add(facts.group_id)
            written.models.add(facts.model)
            if tell is not None and (news := _news(facts)) is not None:
                tell(news)
    return written


def _news(facts: _Facts) -> Scored | None:
    return scored(
        facts.group_id,
        facts.env,
        msgspec.convert(facts.split, Split),
        facts.task_id,
        [rollout.reward for rollout in facts.rollouts if rollout.reward is not None],
        facts.policy_version,
        reward_range=range_from_json(facts.reward_range),
    )


def _read_dropped(path: Path, tell: Callable[[Scored], None]) -> None:
    """Reads dropped groups from a failures file; unreadable lines of this report are skipped."""
    decoder = msgspec.json.Decoder(_Dropped)
    with contextlib.suppress(OSError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(msgspec.DecodeError):
                if (news := decoder.decode(line).scored) is not None:
                    tell(news)


def _check_torn(line: bytes, path: Path, number: int) -> None:
    if line[: len(_BEGINNING)] != _BEGINNING[: len(line)]:
        raise _not_ours(path, number, "it is incomplete and does not begin like a group")


def _not_ours(path: Path, number: int, reason: str) -> InputError:
    return InputError(
        f"{path}, line {number} was not written by `envserver process`: {reason}.",
        hint="Name another file, or --overwrite this one.",
        place=f"line {number}",
    )


def failures_path(output: Path) -> Path:
    return output.with_name(output.stem + ".failures.jsonl")


class FailuresFile:
    """`<output>.failures.jsonl`: one line for each failed attempt and each dropped group.

    It is a report: its lines are not synced, and a full disk does not end the run.
    """

    def __init__(self, output: Path, *, resume: bool) -> None:
        self.path = failures_path(output)
        self.lines = 0
        if not resume:
            self.path.unlink(missing_ok=True)

    def write(self, event: Event) -> None:
        if isinstance(event, RolloutFailed):
            self._append({"event": "rollout_failed", **asdict(event), **asdict(event.failure)})
        elif isinstance(event, GroupDropped):
            self._append(
                {"event": "group_dropped", **asdict(event)}
                | {"scored": None if event.scored is None else asdict(event.scored)}
            )

    def _append(self, line: dict[str, Any]) -> None:
        line.pop("failure", None)
        try:
            with self.path.open("ab") as file:
                file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE, default=str))
        except OSError as error:
            log.warning("failures_file.not_written", path=str(self.path), error=str(error))
        else:
            self.lines += 1
