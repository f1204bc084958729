"""The work of `envserver rescore`: delivered groups in, the same groups with new scores out.

A task, with its hidden part, is found by split, seed and id. Each group is synced to disk before
the next one counts. A group that cannot be scored because of an infrastructure failure never gets a
0: it is not written but counted, and tried again when the command resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import orjson
from envserver_records.errors import ConfigError, InputError, NotFoundError, RolloutError
from envserver_records.records import Result, Score, Task
from envserver_records.tasks import range_from_json
from envserver_records.waiting import in_order

from ..export.jsonl import OutputFile, cut_torn_line, lock, open_appending
from ..export.stored import StoredGroup, StoredRollout, read_groups
from ..formats.atropos import ScoreRange, score_in_range
from ..registry import absolute
from ..rollouts.scoring import ScorerPool, score_once
from ..tokens.builder import trained_ids
from .judging import beside_source
from .mix import RunSpec
from .run_settings import RescoreSettings
from .scoring import TaskFinder, open_scorers

Json = dict[str, Any]

_OF_ROWS = (
    *("tokens", "masks", "scores", "messages", "inference_logprobs", "ref_logprobs", "overrides"),
    *("images", "distill_token_ids", "distill_logprobs"),
)


def rescored_line(line: Json, scores: Sequence[Score], *, by: str, at: float) -> Json | None:
    """`scores`: for each rollout in order; None if no rollout is left.
    Advantages are removed: they came from the old scores."""
    facts = line["envserver"]
    score_range, bounds = _score_range(line), range_from_json(facts.get("reward_range") or {})
    kept_rows: list[int] = []
    new_scores: list[float] = []
    rollouts: list[Json] = []
    for rollout, score in zip(facts["rollouts"], scores, strict=True):
        if score.reward is None:
            continue
        rows = rollout["rows"]
        begin = len(kept_rows)
        kept_rows += rows
        new_scores += [
            score_in_range(score.of_agent(agent) or 0.0, score_range, bounds)
            for agent in _agents(rollout)
        ]
        rollouts.append(_rescored(rollout, score, list(range(begin, len(kept_rows)))))
    if not rollouts:
        return None
    missing = len(facts["rollouts"]) - len(rollouts)
    changed = {key: [line[key][row] for row in kept_rows] for key in _OF_ROWS if line.get(key)}
    lost = dict(facts.get("lost") or {})
    if missing:
        lost["unscorable"] = lost.get("unscorable", 0) + missing
    again = {"by": by, "at": at, "of": (line.get("chain") or {}).get("digest", "")}
    envserver = {**facts, "rollouts": rollouts, "lost": lost, "rescored": again}
    rest = {key: value for key, value in line.items() if key != "chain"}
    return {**rest, **changed, "scores": new_scores, "advantages": None, "envserver": envserver}


def _rescored(rollout: Json, score: Score, rows: list[int]) -> Json:
    before = {name: rollout.get(name) for name in ("reward", "components", "metrics")}
    before |= {name: rollout[name] for name in ("rewards", "turn_rewards") if rollout.get(name)}
    return {
        **rollout,
        "rows": rows,
        "reward": score.reward,
        "components": score.components,
        "metrics": score.metrics,
        "rewards": score.rewards,
        "turn_rewards": [msgspec.structs.asdict(turn) for turn in score.turns],
        "rescored_from": before,
    }


def _score_range(line: Json) -> ScoreRange:
    """Returns the range of the line's scores; "unit" if all rewards are 1, which fits both."""
    pairs = [
        ((rollout.get("rewards") or {}).get(agent or "", rollout["reward"]), line["scores"][row])
        for rollout in line["envserver"]["rollouts"]
        for row, agent in zip(rollout["rows"], _agents(rollout), strict=True)
        if rollout["reward"] is not None
    ]
    is_unit = all(abs(reward - score) < 1e-6 for reward, score in pairs)
    return "unit" if is_unit else "pm1"


def _agents(rollout: Json) -> list[str | None]:
    """Older files do not name them."""
    agents = list(rollout.get("agents") or [])
    return agents + [None] * (len(rollout["rows"]) - len(agents))


def old_reward(rollout: Mapping[str, Any]) -> float | None:
    before = rollout.get("rescored_from") or {}
    return before.get("reward")


LEFT_OUT = {
    "other_environment": "groups of another environment",
    "not_found": "groups whose task the environment does not have",
    "no_messages": "groups without conversations (--without_messages scores them all the same)",
    "failed": "groups that could not be scored, through no fault of the model",
    "unscorable": "groups without a rollout that can be scored",
}

_EXAMPLES = 5

OnProgress = Callable[["Tally"], None]


@dataclass(frozen=True)
class Example:
    rollout_id: str
    task_id: str
    old: float
    new: float


@dataclass
class Tally:
    """The result of a rescoring.

    Args:
        groups, rollouts: numbers in the output, including those of earlier runs.
        already: groups in the output when the command resumed.
        old, new: sums of rewards over the `compared` rollouts, which have both.
        up, down: compared rollouts whose reward rose or fell.
        unscorable: rollouts left out of their groups: the new score has no reward.
        left_out, first: groups that are not in the output by reason (LEFT_OUT); the first case.
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
    judge: str | None = None

    @property
    def changed(self) -> int:
        return self.up + self.down

    def count(self, line: dict[str, Any]) -> None:
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

    def _compare(self, example: Example) -> None:
        self.compared += 1
        self.old += example.old
        self.new += example.new
        if abs(example.new - example.old) < 1e-9:
            return
        self.up += example.new > example.old
        self.down += example.new < example.old
        self.examples.append(example)
        self.examples.sort(key=lambda each: -abs(each.new - each.old))
        del self.examples[_EXAMPLES:]


async def rescore(
    spec: RunSpec[RescoreSettings],
    *,
    on_bad: Callable[[InputError], None] | None = None,
    on_progress: OnProgress = lambda tally: None,
) -> Tally:
    settings, sources, out = spec.settings, spec.settings.source, spec.settings.out
    _check_apart(sources, out)
    rubric = absolute(settings.rubric) if settings.rubric is not None else None
    tally = Tally()
    opening = _output(out, tally, resume=settings.resume, overwrite=settings.overwrite)
    with opening as (output, done):
        judge_folder = beside_source(sources, out.parent)
        async with open_scorers(spec, judge_folder, rubric=rubric) as opened:
            environment = opened.environment

            @functools.cache
            def finder(split: str, seed: int) -> TaskFinder:
                return TaskFinder(environment, split=split, seed=seed)

            work = _Rescoring(
                scorers=opened.pool,
                find=finder,
                env=environment.name,
                by=rubric or environment.name,
                without_messages=settings.without_messages,
                tally=tally,
            )
            groups = _unseen(read_groups(sources, on_bad), done)
            scored = in_order(groups, work.line, 2 * settings.processes, in_thread=True)
            async with contextlib.aclosing(scored):
                async for _, line in scored:
                    if line is not None:
                        await asyncio.to_thread(
                            output.append, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
                        )
                        tally.count(line)
                    on_progress(tally)
            tally.judge = opened.judge_line()
    return tally


def _unseen(groups: Iterable[StoredGroup], done: set[str]) -> Iterator[StoredGroup]:
    for group in groups:
        group_id = str(group.line["envserver"]["group_id"])
        if group_id not in done:
            done.add(group_id)
            yield group


@dataclass
class _Rescoring:
    scorers: ScorerPool
    find: Callable[[str, int], TaskFinder]
    env: str
    by: str
    without_messages: bool
    tally: Tally

    async def line(self, group: StoredGroup) -> dict[str, Any] | None:
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
            task = await self.find(split, seed).find(facts["task_id"])
        except NotFoundError as error:
            self.tally.leave_out("not_found", f"{group.place}: {error}")
            return None
        try:
            scores = await self._scores(task, [self._result(each) for each in group.rollouts])
        except RolloutError as error:
            self.tally.leave_out("failed", f"{group.place}: {error}")
            return None
        self.tally.unscorable += sum(score.reward is None for score in scores)
        line = rescored_line(group.line, scores, by=self.by, at=time.time())
        if line is None:
            self.tally.leave_out("unscorable", group.place)
        return line

    def _result(self, rollout: StoredRollout) -> Result:
        result = result_of(rollout)
        if self.scorers.needs_token_ids:
            result.completion_ids = trained_ids(rollout.rows)
        return result

    async def _scores(self, task: Task, results: list[Result]) -> list[Score]:
        scored = (score_once(self.scorers, task, each) for each in results)
        scores = list(await asyncio.gather(*scored))
        final = await self.scorers.score_group(task, results, scores)
        return [self.scorers.delivered(score) for score in final]


def result_of(rollout: StoredRollout) -> Result:
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
        turn_rewards=rollout.logged_turn_rewards,
        calls=rollout.agent_calls,
    )


def _lacks_messages(rollout: StoredRollout) -> bool:
    return not rollout.messages and bool(rollout.turns)


def _check_apart(sources: Sequence[str], out: Path) -> None:
    for source in sources:
        if Path(source).exists() and Path(source).resolve() == out.resolve():
            raise ConfigError(f"{out} is the source itself.", hint="Name another file.")


@contextlib.contextmanager
def _output(
    path: Path, tally: Tally, *, resume: bool, overwrite: bool
) -> Iterator[tuple[OutputFile, set[str]]]:
    """Yields the file and the ids of the groups in it, counted in `tally`.
    With `overwrite`, the first new group replaces the file."""
    with open_appending(path) as file:
        lock(file, path)
        if file.seek(0, 2) and not (resume or overwrite):
            raise ConfigError(
                f"{path} exists.", hint="Continue it with --resume, or replace it with --overwrite."
            )
        done: set[str] = set()
        if not overwrite:
            cut_torn_line(file)
            done = _already(file, path, tally)
        with contextlib.closing(OutputFile(path, file, replaces=overwrite)) as output:
            yield output, done


def _already(file: IO[bytes], path: Path, tally: Tally) -> set[str]:
    done = set()
    file.seek(0)
    for number, data in enumerate(file, 1):
        try:
            line = orjson.loads(data)
            if "rescored" not in line["envserver"]:
                raise ConfigError(
                    f"{path}, line {number} has the old scores.",
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
