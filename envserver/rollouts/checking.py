"""Checks whether an environment's tasks are sound: results of known reward go through the real
scorer.

A scorer that fails is wrong, too, because the rollout would be lost, except for results that no
agent produces. `running.checking` runs the rollouts.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import (
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, Protocol, TypeVar

import msgspec
import orjson
from envserver_records.errors import EnvserverError
from envserver_records.records import Result, Score, Task, pack
from envserver_records.waiting import in_order

from ..environment import Environment, KnownResult, answer_text
from ..rows.columns import Origin, RowCount, RowCounts, in_file
from ..tools.calling import blaming
from .check_data import (
    MAY_RAISE,
    DataReport,
    EnvironmentReport,
    Kind,
    Placed,
    Played,
    Wrong,
    absurd_results,
    answer_of,
    estimated_tokens,
    lengths,
    repeats,
    strings_in,
)
from .rewards import RewardRules, delivered_score, range_of, rules_of_rewards
from .scorer_process import RowScore
from .scoring import SCORING_FAILURES
from .stream import digest_of, first_tasks, packed

SHORTEST_SECRET = 20
"""Characters; a hidden text this long is not in the public part by chance."""
_TOLERANCE = 1e-9
_AT_A_TIME = 32
_ROWS_AT_A_TIME = 500
_EVERY_ROW = "every row: "
_SCORED_AGAIN = 5
"""Number of right results that are scored again, to see that scores do not change."""

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[int, int], None]
"""Is called with the number of scored results and the total."""


class Scorer(Protocol):
    """Scores and lists tasks like `ScorerPool`."""

    needs_token_ids: bool

    async def score(self, task: Task, result: Result) -> Score: ...

    async def score_rows(self, tasks: list[Task]) -> list[RowScore]: ...

    async def task_digests(self, count: int) -> list[str]: ...


class Plays(msgspec.Struct, frozen=True):
    """What playing the tasks through the rollout showed. `right`: outputs of demonstrations that
    solved their tasks, by the ids of these."""

    plays: list[Played] = []
    problems: list[str] = []
    right: dict[str, Any] = {}


async def _nothing_played(tasks: list[Task]) -> Plays:
    return Plays()


class RowsToCheck(msgspec.Struct, frozen=True):
    """What to check beyond the first tasks: the `row_results` of the first `most` rows.

    Args:
        evaluation: an evaluation set, whose questions should not be among the rows.
        tokens: number of tokens of a text; `tokenizer`: what counts them, "" for an estimate.
        limits: on the tokens of a prompt and of a row, by the setting's name.
    """

    most: int = 0
    evaluation: Sequence[Placed] = ()
    tokens: Callable[[str], int] = estimated_tokens
    tokenizer: str = ""
    limits: Mapping[str, int] = {}


_NO_ROWS = RowsToCheck()


async def check(
    make_environment: Callable[[], Environment],
    scorer: Scorer,
    *,
    most_tasks: int,
    rows: RowsToCheck = _NO_ROWS,
    play: Callable[[list[Task]], Awaitable[Plays]] = _nothing_played,
    progress: Progress = lambda done, of: None,
) -> EnvironmentReport:
    """Checks the first `most_tasks` tasks of the split of an environment, of which
    `make_environment` returns a fresh instance. `play`: default: nothing is played."""
    environment = make_environment()
    counts, origins = watched_rows(environment)
    rules = rules_of_rewards(environment)
    most_rows = max(rows.most, most_tasks)
    listed = await asyncio.to_thread(first_tasks, environment, most_rows + 1)
    tasks, all_rows = listed[: most_tasks + 1], listed[:most_rows]
    again = await asyncio.to_thread(first_tasks, make_environment(), most_tasks + 1)
    problems = [*same_ids(listed), *differences(tasks, again)]
    if not problems:
        problems += differences_in_the_scorer(tasks, await scorer.task_digests(most_tasks + 1))
    whole = len(tasks) <= most_tasks
    tasks = tasks[:most_tasks]
    for task in tasks:
        problems += task_problems(task)
    kinds: dict[tuple[str, float, float], Kind] = {}
    without_gold: list[str] = []
    played = await play(tasks)
    problems += played.problems
    cases = await asyncio.to_thread(
        _cases, environment, tasks, problems, without_gold, played.right
    )
    checks_rows = environment.checks_rows and not scorer.needs_token_ids
    scored = all_rows[: rows.most] if checks_rows else []
    of, done = len(cases) + len(scored), 0
    async for _, score in in_order(cases, lambda case: _scored(scorer, *case, rules), _AT_A_TIME):
        _count(kinds, score)
        done += 1
        progress(done, of)
    problems += await _changed_scores(scorer, cases, rules)
    starts = range(0, len(scored), _ROWS_AT_A_TIME)
    parts = [scored[start : start + _ROWS_AT_A_TIME] for start in starts]
    async for part, scores in in_order(parts, lambda part: _row_scores(scorer, part), _AT_A_TIME):
        for score in scores:
            why = score.why if score.raised else f"It is not scorable: {score.why}."
            place = origins[score.task_id].place if score.task_id in origins else ""
            named = msgspec.structs.replace(score, name=f"{_EVERY_ROW}{score.name}", why=why)
            _count(kinds, named, place)
        done += len(part)
        progress(done, of)
    data = await asyncio.to_thread(_data_report, all_rows, counts.of, origins, rows)
    compacted = sum(play.compacted for play in played.plays)
    rule = f"--env.compaction_rewards {environment.config.compaction_rewards}"
    note = f"{compacted} played rollouts summarised their history: {rule} rewards their rows."
    return EnvironmentReport(
        environment=environment.name,
        split=environment.config.split,
        tasks=len(tasks),
        whole=whole,
        kinds=[*kinds.values()],
        without_gold=without_gold,
        problems=problems,
        plays=played.plays,
        reward_range=_shown_range(environment),
        demonstrations_solve=environment.demonstrations_solve,
        data=msgspec.structs.replace(data, whole=len(listed) <= most_rows),
        notes=[note] if compacted else [],
    )


def watched_rows(environment: Environment) -> tuple[RowCounts, dict[str, Origin]]:
    """Returns the counts of an environment's rows, and a dict that will hold where they are."""
    counts = getattr(environment, "rows", None)
    if not isinstance(counts, RowCounts):
        counts = RowCounts()
    counts.origins = {}
    return counts, counts.origins


def placed(tasks: Sequence[Task], origins: Mapping[str, Origin]) -> list[Placed]:
    """Returns tasks with the places of their rows, else their ids, in the order of the file."""
    found = [(origins[task.id].place if task.id in origins else task.id, task) for task in tasks]
    return sorted(found, key=lambda placed_task: in_file(placed_task[0]))


def _data_report(
    tasks: list[Task],
    counts: dict[str, RowCount],
    origins: Mapping[str, Origin],
    rows: RowsToCheck,
) -> DataReport:
    texts = {
        "prompt": ["\n".join(strings_in(task.public)) for task in tasks],
        "answer": [answer_of(task) for task in tasks],
        "solution": [origin.solution for origin in origins.values() if origin.solution],
    }
    return DataReport(
        rows=len(tasks),
        counts=counts,
        repeats=[*repeats(placed(tasks, origins), rows.evaluation)],
        lengths=[
            lengths(what, all_, rows.tokens, rows.limits) for what, all_ in texts.items() if all_
        ],
        tokenizer=rows.tokenizer,
    )


async def _row_scores(scorer: Scorer, tasks: list[Task]) -> list[RowScore]:
    try:
        return await scorer.score_rows(tasks)
    except SCORING_FAILURES as error:
        if len(tasks) > 1:
            return [score for task in tasks for score in await _row_scores(scorer, [task])]
        why = f"{_cause(error)}: {error}"
        return [RowScore(tasks[0].id, "gold", 1.0, 1.0, None, why, raised=True)]


def _shown_range(environment: Environment) -> tuple[float | None, float | None, float]:
    bounds = range_of(environment)
    low, high = (bound if math.isfinite(bound) else None for bound in (bounds.low, bounds.high))
    return low, high, bounds.solved_at


def differences(tasks: list[Task], again: list[Task]) -> Iterator[str]:
    if len(tasks) != len(again):
        yield f"Listing the tasks twice gives {len(tasks)} and then {len(again)}."
    changed = [
        task.id for task, other in zip(tasks, again, strict=False) if packed(task) != packed(other)
    ]
    if changed:
        yield f"Tasks differ when listed twice: {_named(changed)}."


def same_ids(tasks: list[Task]) -> Iterator[str]:
    count = Counter(task.id for task in tasks)
    if twice := [name for name, times in count.items() if times > 1]:
        yield f"Several tasks have the same id: {_named(twice)}."


def differences_in_the_scorer(tasks: list[Task], digests: list[str]) -> Iterator[str]:
    """The other process has its own order of sets."""
    changed = [
        task.id for task, digest in zip(tasks, digests, strict=False) if digest_of(task) != digest
    ]
    if changed or len(tasks) != len(digests):
        yield (
            f"In another process the tasks differ: {_named(changed) or len(digests)}. Sort what "
            "comes from a set, and seed every random generator by the settings."
        )


def secrets_of(task: Task) -> list[str]:
    texts = sorted({text.strip() for text in strings_in(task.hidden)}, key=len)
    return [text for text in texts if len(text) >= SHORTEST_SECRET]


def task_problems(task: Task) -> Iterator[str]:
    try:
        orjson.dumps(task.public)
        pack(task)
    except (TypeError, ValueError, RecursionError) as error:
        yield f"Task {task.id!r} cannot be sent: {error}."
    shown = list(strings_in(task.public))
    for secret in secrets_of(task):
        if any(secret in text for text in shown):
            yield f"Task {task.id!r} shows hidden text: {secret[:60]!r}."


def _cases(
    environment: Environment,
    tasks: list[Task],
    problems: list[str],
    without_gold: list[str],
    played: Mapping[str, Any],
) -> list[tuple[Task, KnownResult]]:
    """Returns every result to be scored; adds failures in making them to `problems`."""
    cases: list[tuple[Task, KnownResult]] = []
    bounds = range_of(environment)
    nothing = max(bounds.worst, 0.0)
    for task in tasks:
        try:
            problem = f"The known results of task {task.id!r} cannot be made"
            with blaming(problem, environment.known_results):
                known = list(environment.known_results(task))
        except EnvserverError as error:
            problems.append(str(error))
            continue
        right = [result.result.output for result in known if result.least > nothing]
        right += [played[task.id]] if task.id in played else []
        if not right:
            without_gold.append(task.id)
        known += (
            KnownResult(result.name, result.result, least=bounds.worst, most=nothing)
            for result in absurd_results(task.public, right)
        )
        cases += [(task, result) for result in known]
    return cases


async def _changed_scores(
    scorer: Scorer, cases: list[tuple[Task, KnownResult]], rules: RewardRules
) -> list[str]:
    nothing = max(rules.range.worst, 0.0)
    right = [case for case in cases if case[1].least > nothing][:_SCORED_AGAIN]
    problems = []
    for task, known in right:
        scores = [await _scored(scorer, task, known, rules) for _ in range(2)]
        if scores[0] != scores[1]:
            shown = " and then ".join(map(_shown, scores))
            problems.append(f"Scored twice, {known.name} of task {task.id!r} gets {shown}.")
    return problems


def _shown(score: RowScore) -> str:
    return score.why if score.reward is None else f"{score.reward:g}"


async def _scored(scorer: Scorer, task: Task, known: KnownResult, rules: RewardRules) -> RowScore:
    reward, why, raised = None, "It is not scorable.", False
    try:
        reward = delivered_score(await _score(scorer, task, known.result), rules).reward
    except SCORING_FAILURES as error:
        why, raised = f"{_cause(error)}: {error}", True
    return RowScore(task.id, known.name, known.least, known.most, reward, why, raised)


async def _score(scorer: Scorer, task: Task, result: Result) -> Score:
    if scorer.needs_token_ids:
        ids = await asyncio.to_thread(_simulated_ids, result)
        result = msgspec.structs.replace(result, completion_ids=ids)
    try:
        return await scorer.score(task, result)
    except SCORING_FAILURES:
        return await scorer.score(task, result)


def _simulated_ids(result: Result) -> list[int]:
    from envserver_local.simulated.tokenizer import shared_tokenizer

    tokenizer = shared_tokenizer()
    text = answer_text(result).encode("utf-8", "replace").decode()
    return [*tokenizer.encode(text), tokenizer.im_end]


def _cause(error: EnvserverError) -> str:
    return str(error.detail.get("cause", error.kind))


def _count(kinds: dict[tuple[str, float, float], Kind], score: RowScore, place: str = "") -> None:
    """Counts a score by the name and the expectation of its result."""
    name, least, most, reward = score.name, score.least, score.most, score.reward
    kind = kinds.setdefault(
        (name, least, most), Kind(name=name, expected_least=least, expected_most=most)
    )
    kind.count += 1
    if score.raised and name in MAY_RAISE:
        kind.raised += 1
    elif reward is None or not least - _TOLERANCE <= reward <= most + _TOLERANCE:
        error = score.why if reward is None else ""
        kind.wrong.append(
            Wrong(
                task_id=score.task_id, reward=reward, error=error, raised=score.raised, place=place
            )
        )
    if reward is not None:
        kind.least = reward if kind.least is None else min(kind.least, reward)
        kind.most = reward if kind.most is None else max(kind.most, reward)


def _named(ids: list[Any]) -> str:
    shown = ", ".join(repr(task_id) for task_id in ids[:5])
    return f"{shown} and {len(ids) - 5} more" if len(ids) > 5 else shown
