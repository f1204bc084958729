"""The work of `envserver rescore`: delivered groups in, the same groups with new scores out.

No model is asked. A group's task, with its hidden part, is found again by split, seed and id; its
rollouts are scored in scorer processes, and the group is appended to the output, on disk before
the next one counts. What cannot be scored by a fault of ours is never a 0: its group is not
written, is counted, and is tried again when the command goes on with its output.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson
from envserver_records.errors import (
    ConfigError,
    InputError,
    NotFoundError,
    RolloutError,
    SandboxError,
    ScorerError,
    StoreError,
)
from envserver_records.records import Result, Score, Task

from ..config import SandboxConfig
from ..export.jsonl import append_durably, cut_torn_line
from ..export.rescored import old_reward, rescored_line
from ..export.stored import StoredGroup, StoredRollout, read_groups
from ..registry import absolute
from ..rollouts.scoring import ScorerPool
from .sandboxes import sandboxes_of
from .task_finder import TaskFinder, environment_of

LEFT_OUT = {
    "other_environment": "groups of another environment",
    "not_found": "groups whose task the environment does not have",
    "no_messages": "groups without conversations (--without_messages scores them all the same)",
    "failed": "groups that could not be scored by no fault of the model",
    "unscorable": "groups of which no rollout can be scored",
}
"""Why a group is not in the output."""

_EXAMPLES = 5

Told = Callable[["Tally"], None]


@dataclass(frozen=True)
class Example:
    """A rollout whose reward changed."""

    rollout_id: str
    task_id: str
    old: float
    new: float


@dataclass
class Tally:
    """What came of it, old scores beside new ones.

    Args:
        groups, rollouts: in the output, those of before among them.
        already: groups that were there when it was gone on with.
        old, new: sums of rewards, over the `compared` rollouts that have both.
        up, down: compared rollouts whose reward rose and fell.
        unscorable: rollouts left out of their groups: the new score has no reward.
        left_out: groups that are not in the output, by reason (see LEFT_OUT).
        first: of each reason the first, in words.
        examples: the largest changes.
    """

    groups: int = 0
    rollouts: int = 0
    already: int = 0
    compared: int = 0
    old: float = 0.0
    new: float = 0.0
    up: int = 0
    down: int = 0
    unscorable: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    examples: list[Example] = field(default_factory=list)

    @property
    def changed(self) -> int:
        return self.up + self.down

    def count(self, line: dict[str, Any]) -> None:
        """A group that is in the output."""
        facts = line["envserver"]
        self.groups += 1
        for rollout in facts["rollouts"]:
            self.rollouts += 1
            old, new = old_reward(rollout), rollout["reward"]
            if old is not None:
                example = Example(rollout["rollout_id"], facts["task_id"], float(old), float(new))
                self._compare(example)

    def leave_out(self, reason: str, words: str) -> None:
        self.left_out[reason] += 1
        self.first.setdefault(reason, words)

    def _compare(self, one: Example) -> None:
        self.compared += 1
        self.old += one.old
        self.new += one.new
        if abs(one.new - one.old) < 1e-9:
            return
        self.up += one.new > one.old
        self.down += one.new < one.old
        self.examples.append(one)
        self.examples.sort(key=lambda each: -abs(each.new - each.old))
        del self.examples[_EXAMPLES:]


async def rescore(
    sources: Sequence[str],
    env_reference: str,
    env_config: dict[str, Any],
    out: Path,
    *,
    rubric: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    processes: int = 2,
    sandbox: SandboxConfig | None = None,
    without_messages: bool = False,
    on_bad: Callable[[InputError], None] | None = None,
    told: Told = lambda tally: None,
) -> Tally:
    """Scores every group of `sources` again into `out` (JSONL, the lines of `process`).

    Args:
        sources: as `read_groups` takes them.
        env_reference, env_config: the environment and its settings; a group's split and seed are
            its own.
        rubric: what scores instead of the environment (see `rollouts.rubric`).
        processes: scorers that work side by side.
        without_messages: score groups that were written without their conversations.
        on_bad: told of each line that is no group; unset: the first one ends it.
        told: called after each group.

    Raises:
        ConfigError: `out` exists, or the environment or the rubric cannot be loaded.
        InputError: a source holds what is no group.
        StoreError: `out` cannot be written.
    """
    _check_apart(sources, out)
    reference = absolute(env_reference)
    environment = environment_of(reference, env_config)
    rubric = absolute(rubric) if rubric is not None else None
    tally = Tally()
    with _output(out, resume=resume, overwrite=overwrite) as file:
        done = _already(file, out, tally)
        async with sandboxes_of(environment, sandbox or SandboxConfig()) as service:
            address = service.address if service is not None else None
            async with ScorerPool(
                reference, env_config, processes, sandbox_address=address, rubric=rubric
            ) as scorers:
                work = _Rescoring(
                    scorers=scorers,
                    tasks=_Tasks(reference, env_config, address),
                    env=environment.name,
                    by=rubric or environment.name,
                    without_messages=without_messages,
                    tally=tally,
                )
                groups = _Unseen(read_groups(sources, on_bad), done)
                async with contextlib.aclosing(work.lines(groups, 2 * processes)) as lines:
                    async for line in lines:
                        if line is not None:
                            await asyncio.to_thread(append_durably, file, _encoded(line))
                            tally.count(line)
                        told(tally)
    return tally


class _Unseen:
    """The groups whose ids are not `done`, each once, read in a thread."""

    def __init__(self, groups: Iterator[StoredGroup], done: set[str]) -> None:
        self._groups = groups
        self._done = done

    async def next(self) -> StoredGroup | None:
        return await asyncio.to_thread(self._next)

    def _next(self) -> StoredGroup | None:
        for group in self._groups:
            group_id = str(group.line["envserver"]["group_id"])
            if group_id not in self._done:
                self._done.add(group_id)
                return group
        return None


class _Tasks:
    """Tasks by split, seed and id."""

    def __init__(self, reference: str, config: dict[str, Any], address: str | None) -> None:
        self._reference, self._config, self._address = reference, config, address
        self._finders: dict[tuple[str, int], TaskFinder] = {}

    async def find(self, split: str, seed: int, task_id: str) -> Task:
        """Raises as `TaskFinder.find`."""
        finder = self._finders.get((split, seed))
        if finder is None:
            config = {**self._config, "split": split, "seed": seed}
            finder = TaskFinder(self._reference, config, self._address)
            self._finders[split, seed] = finder
        return await finder.find(task_id)


@dataclass
class _Rescoring:
    """Groups in flight: several at once, out in the order in which they came."""

    scorers: ScorerPool
    tasks: _Tasks
    env: str
    by: str
    without_messages: bool
    tally: Tally

    async def lines(self, groups: _Unseen, at_once: int) -> AsyncGenerator[dict[str, Any] | None]:
        """The line of each group with its new scores; None where it has none."""
        flying: deque[asyncio.Task[dict[str, Any] | None]] = deque()
        more = True
        try:
            while True:
                while more and len(flying) < at_once:
                    group = await groups.next()
                    more = group is not None
                    if group is not None:
                        flying.append(asyncio.create_task(self._line(group)))
                if not flying:
                    return
                line = await flying[0]
                flying.popleft()
                yield line
        finally:
            for scoring in flying:
                scoring.cancel()
            await asyncio.gather(*flying, return_exceptions=True)

    async def _line(self, group: StoredGroup) -> dict[str, Any] | None:
        facts = group.line["envserver"]
        if facts["env"] != self.env:
            words = f"{group.place}: {facts['env']!r}, not {self.env!r}"
            self.tally.leave_out("other_environment", words)
            return None
        if not self.without_messages and any(map(_lacks_messages, group.rollouts)):
            self.tally.leave_out("no_messages", group.place)
            return None
        try:
            split, seed = facts.get("split", "train"), facts.get("seed", 0)
            task = await self.tasks.find(split, seed, facts["task_id"])
        except NotFoundError as error:
            self.tally.leave_out("not_found", f"{group.place}: {error}")
            return None
        try:
            scores = await self._scores(task, [result_of(each) for each in group.rollouts])
        except RolloutError as error:
            self.tally.leave_out("failed", f"{group.place}: {error}")
            return None
        self.tally.unscorable += sum(score.reward is None for score in scores)
        line = rescored_line(group.line, scores, by=self.by, at=time.time())
        if line is None:
            self.tally.leave_out("unscorable", group.place)
        return line

    async def _scores(self, task: Task, results: list[Result]) -> list[Score]:
        """
        Raises:
            ScorerError, SandboxError: they could not be had, also when asked a second time.
        """
        scores = list(await asyncio.gather(*(self._score(task, each) for each in results)))
        return await self.scorers.score_group(task, results, scores)

    async def _score(self, task: Task, result: Result) -> Score:
        try:
            return await self.scorers.score(task, result)
        except (ScorerError, SandboxError):
            return await self.scorers.score(task, result)


def result_of(rollout: StoredRollout) -> Result:
    """What the scorer saw of `rollout`, as far as it was delivered."""
    others = [other for other in rollout.others if not other.get("trained", True)]
    untrained = sum(other.get("completion_tokens") or 0 for other in others)
    return Result(
        output=rollout.output,
        messages=rollout.messages,
        finish_reason=rollout.finish_reason,
        truncated=rollout.truncated,
        limit=rollout.limit,
        turns=rollout.turns,
        completion_tokens=max(0, (rollout.usage.get("completion_tokens") or 0) - untrained),
        metrics=rollout.agent_metrics,
        flags=rollout.flags,
        actions=rollout.actions or [],
    )


def _lacks_messages(rollout: StoredRollout) -> bool:
    return not rollout.messages and bool(rollout.turns)


def _encoded(line: dict[str, Any]) -> bytes:
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def _check_apart(sources: Sequence[str], out: Path) -> None:
    for source in sources:
        if Path(source).exists() and Path(source).resolve() == out.resolve():
            raise ConfigError(f"{out} is the source itself.", hint="Name another file.")


@contextlib.contextmanager
def _output(path: Path, *, resume: bool, overwrite: bool) -> Iterator[IO[bytes]]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", 0)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened: {error.strerror}.") from error
    with file:
        if file.seek(0, 2) and not (resume or overwrite):
            raise ConfigError(
                f"{path} exists.", hint="Go on with it by --resume, replace it by --overwrite."
            )
        if overwrite:
            file.truncate(0)
        cut_torn_line(file)
        yield file


def _already(file: IO[bytes], path: Path, tally: Tally) -> set[str]:
    """The ids of the groups that stand in `file`, which are counted.

    Raises:
        ConfigError: it holds what this command has not written.
    """
    done = set()
    file.seek(0)
    for number, data in enumerate(file, 1):
        try:
            line = orjson.loads(data)
            if "rescored" not in line["envserver"]:
                raise ConfigError(
                    f"{path}, line {number} has the scores of before.",
                    hint="Name another file for the new ones.",
                )
            done.add(str(line["envserver"]["group_id"]))
            tally.count(line)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number} was not written by `envserver rescore`.",
                hint="Name another file, or --overwrite this one.",
            ) from error
    tally.already = tally.groups
    return done
