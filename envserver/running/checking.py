"""The work of `envserver check`: tasks, known results, and plays through the rollout."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from envserver_local.simulated.engine import SimEngine
from envserver_local.simulated.policy import (
    Policy,
    RolloutSolver,
    Said,
    Speaker,
    Turn,
    Wish,
    drawn_call,
    generator,
)
from envserver_local.simulated.tokenizer import Conversation
from envserver_records.errors import ConfigError, EnvserverError
from envserver_records.records import Message, Task, text_of
from envserver_records.waiting import in_order

from ..environment import Environment
from ..judges.server import JudgeServer
from ..models.catalogue import find_tokenizer
from ..rollouts.attempt import Finished
from ..rollouts.check_data import (
    ORDERS,
    EnvironmentReport,
    Placed,
    Played,
    ScoringCost,
    Wrong,
    estimated_tokens,
)
from ..rollouts.checking import Plays, RowsToCheck, check, placed, secrets_of, watched_rows
from ..rollouts.group import RolloutContext, group_scores, run_rollout
from ..rollouts.rewards import range_of
from ..rollouts.stream import first_tasks, request_for
from ..rows.environment import RowsEnvironment
from ..rows.sources import Source
from ..settings.config import RolloutsConfig, Settings, SimConfig
from ..tokens.vocabulary import Vocabulary
from ..tools.calling import blaming
from ..tools.watching import watched_loop
from .context import played_context
from .mix import RunSpec
from .run_settings import CheckSettings
from .scoring import in_sandboxes_of, open_scorers

MOST_SOLVED_BY_CHEATS = 0.25
"""Largest share of tasks that a cheat may solve: to refuse is right for some."""
_AT_A_TIME = 8
_EPSILON = 1e-9


MOST_ROWS = 100_000
OnProgress = Callable[[str, int, int], None]
"""Called with what is done ("results", "plays"), how many are done, and of how many."""


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """A way of playing.

    Args:
        speaker: makes what says the model's turns, from the demonstrations.
        cheat: solving tasks with it is a fault of the environment.
        differs: count only plays in which it says something else than the demonstration.
    """

    speaker: Callable[[RolloutSolver], Speaker]
    cheat: bool = False
    needs_demonstration: bool = False
    differs: bool = False


def _policy(**config: Any) -> Callable[[RolloutSolver], Speaker]:
    settings = SimConfig(**{"openers": False, "solve_probability": 1.0, **config})
    return lambda solver: Policy(settings, solver)


class _Says:
    def __init__(self, text: Callable[[Conversation, Wish, str], str]) -> None:
        self._text = text

    def say(self, conversation: Conversation, wish: Wish, *, fate: str, key: str) -> Said:
        return Said(self._text(conversation, wish, key))


def _called_tool(conversation: Conversation, wish: Wish, key: str) -> str:
    call = drawn_call(conversation, wish, generator(0, "spam", key))
    return Turn("", (call,)).text() if call else "I have called all tools."


def _question(conversation: Conversation, *_: object) -> str:
    users = [message for message in conversation.messages if message["role"] == "user"]
    return text_of(users[-1]) if users else ""


DEMONSTRATION = "demonstration"
SPOILED = "spoiled"
WAYS: Mapping[str, Way] = {
    DEMONSTRATION: Way(speaker=_policy(solve_probability=1.0), needs_demonstration=True),
    SPOILED: Way(speaker=_policy(solve_probability=0.0), needs_demonstration=True),
    "malformed calls": Way(speaker=_policy(malformed_call_rate=1.0), differs=True),
    "broken JSON": Way(speaker=_policy(broken_json_rate=1.0), differs=True),
    "nothing": Way(speaker=lambda _: _Says(lambda *_: ""), cheat=True),
    # Where a request forces a call, neither is possible, and the demonstration is said.
    "refusal": Way(speaker=_policy(refusal_rate=1.0), cheat=True, differs=True),
    "endless repetition": Way(speaker=_policy(repetition_rate=1.0), cheat=True, differs=True),
    "the prompt again": Way(speaker=lambda _: _Says(_question), cheat=True),
    "instructions to the judge": Way(speaker=lambda _: _Says(lambda *_: ORDERS), cheat=True),
    "tool spam": Way(speaker=lambda _: _Says(_called_tool), cheat=True),
}


class _Players:
    """Says the turns of every rollout in its way; the number of the way is in the rollout's id."""

    def __init__(self, solver: RolloutSolver) -> None:
        self._speakers = [way.speaker(solver) for way in WAYS.values()]
        self.differing: set[str] = set()

    def say(self, conversation: Conversation, wish: Wish, *, fate: str, key: str) -> Said:
        rollout_id = wish.rollout_id.partition("/")[0]
        number = int(rollout_id.split("-")[1])
        said = self._speakers[number].say(conversation, wish, fate=fate, key=key)
        if said != self._speakers[0].say(conversation, wish, fate=fate, key=key):
            self.differing.add(rollout_id)
        return said


async def _play(
    spec: RunSpec[CheckSettings],
    environment: Environment,
    tasks: Sequence[Task],
    judge: JudgeServer | None,
    progress: OnProgress,
) -> Plays:
    """Plays all tasks by demonstration, and the first `--plays` in all other ways."""
    checked = spec.settings
    settings = Settings(
        sandbox=checked.sandbox,
        workers=checked.workers,
        judge=checked.judge,
        rollouts=RolloutsConfig(scorer_processes=checked.processes),
    ).model_copy(update={"env": checked.env, "environment": checked.environment})
    solver = RolloutSolver()
    players = _Players(solver)
    sim = SimEngine(SimConfig(latency_seconds=0.0), speaker=players)
    problems: list[str] = []
    known = [task for task in tasks if _is_demonstrated(environment, task, problems)]
    plan = [
        (number, name, task)
        for number, (name, way) in enumerate(WAYS.items())
        for task in _tasks_of(name, way, tasks, known, checked.plays)
    ]
    async with (
        watched_loop(),
        played_context(
            settings,
            environment,
            spec.reference,
            sim,
            "sim",
            judge,
            demonstrator=solver,
            unconstrained=True,
        ) as context,
    ):
        plays = _Plays(context, players, problems)

        async def play(index: int) -> None:
            number, name, task = plan[index]
            await plays.play(f"check-{number}-{index:06d}-r0", name, task)

        async for index, _ in in_order(range(len(plan)), play, _AT_A_TIME):
            progress("plays", index + 1, len(plan))
        await plays.score_groups()
    return Plays(plays.judged(), problems, plays.right)


def _is_demonstrated(environment: Environment, task: Task, problems: list[str]) -> bool:
    problem = f"The demonstration of task {task.id!r} cannot be made"
    try:
        with blaming(problem, environment.demonstration):
            return bool(environment.demonstration(task))
    except EnvserverError as error:
        problems.append(str(error))
        return False


def _tasks_of(
    name: str, way: Way, tasks: Sequence[Task], known: Sequence[Task], most_wrong: int
) -> Sequence[Task]:
    of_demonstrations = way.needs_demonstration or (way.differs and not way.cheat)
    chosen = known if of_demonstrations else tasks
    return chosen if name == DEMONSTRATION else chosen[:most_wrong]


class _Plays:
    def __init__(self, context: RolloutContext, players: _Players, problems: list[str]) -> None:
        self._context = context
        self._players = players
        self._problems = problems
        self._range = range_of(context.environment)
        self.right: dict[str, Any] = {}
        """Outputs of demonstrations that solved their tasks."""
        self._groups: defaultdict[str, list[Finished]] = defaultdict(list)
        self._played = {name: Played(way=name, cheat=way.cheat) for name, way in WAYS.items()}

    async def play(self, rollout_id: str, name: str, task: Task) -> None:
        played, context = self._played[name], self._context
        request = request_for(context.environment, task, rollout_id.removesuffix("-r0"))
        try:
            finished = await run_rollout(context, request, scored=True)
        except EnvserverError as error:
            why = _placed(error)
            played.wrong.append(Wrong(task_id=task.id, reward=None, error=why, raised=True))
            return
        self._groups[task.id].append(finished)
        if WAYS[name].differs and rollout_id not in self._players.differing:
            return
        played.turns += finished.result.turns
        rows = finished.trajectory.sequences
        played.compacted += any(row.follows is not None for row in rows)
        played.seconds += finished.trajectory.usage.seconds
        if finished.result.limit is not None:
            played.limits[finished.result.limit] += 1
        if name == DEMONSTRATION:
            self._problems += _shown_secrets(finished, task)
        if self._counted(played, task, context.scorer.delivered(finished.score).reward):
            self.right[task.id] = finished.result.output

    async def score_groups(self) -> None:
        """Scores the rollouts of each task as a group; each mistake is a problem once."""
        failed: dict[str, str] = {}
        size = max(2, self._context.environment.config.group_size)
        for rollouts in self._groups.values():
            task, group = rollouts[0].attempt.spec.task, rollouts[:size]
            try:
                await group_scores(self._context, task, group if len(group) > 1 else [])
            except EnvserverError as error:
                problem = f"The group of task {task.id!r} cannot be scored: {_placed(error)}"
                failed.setdefault(_placed(error), problem)
        self._problems += failed.values()

    def _counted(self, played: Played, task: Task, reward: float | None) -> bool:
        if reward is None:
            played.wrong.append(Wrong(task_id=task.id, reward=None, error="It is not scorable."))
            return False
        played.rewards.append(reward)
        solved = reward >= self._range.solved_at - _EPSILON
        played.solved += solved
        judged = played.way == DEMONSTRATION and self._context.environment.demonstrations_solve
        if judged and not solved:
            played.wrong.append(Wrong(task_id=task.id, reward=reward))
        return judged and solved

    def judged(self) -> list[Played]:
        plays = [play for play in self._played.values() if play.rewards or play.wrong]
        right, spoiled = (self._played[name].mean for name in (DEMONSTRATION, SPOILED))
        solve = self._context.environment.demonstrations_solve
        if solve and right is not None and spoiled is not None and spoiled >= right - _EPSILON:
            self._problems.append(
                f"Spoiled demonstrations are rewarded like correct ones: {spoiled:g} and "
                f"{right:g} on average."
            )
        # Between agents there is no right answer: whatever one says, the other may lose by it.
        for play in plays if solve else ():
            if play.cheat and play.solved > MOST_SOLVED_BY_CHEATS * len(play.rewards):
                self._problems.append(
                    f"A cheat solves {play.solved} of {len(play.rewards)} tasks: {play.way}."
                )
        return plays


def _placed(error: EnvserverError) -> str:
    placed = f"{error} {error.detail.get('place', '')}".strip()
    return str(error.detail.get("bug", placed))


def _shown_secrets(finished: Finished, task: Task) -> list[str]:
    problems, seen = [], set()
    for call in finished.attempt.calls:
        if call.agent in seen or not call.trained:
            continue
        seen.add(call.agent)
        shown = " ".join(map(text_of, _before_answers(call.messages)))
        problems += [
            f"The prompt of task {task.id!r} shows hidden text: {secret[:60]!r}."
            for secret in secrets_of(task)
            if secret in shown
        ]
    return problems


def _before_answers(messages: list[Message]) -> list[Message]:
    roles = [message.get("role") for message in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else messages


async def check_environment(
    spec: RunSpec[CheckSettings], progress: OnProgress
) -> EnvironmentReport:
    settings = spec.settings
    costs: list[tuple[float, float]] = []
    async with open_scorers(
        spec,
        Path("data"),
        spent=lambda seconds, cpu_seconds: costs.append((seconds, cpu_seconds)),
    ) as opened:

        def fresh(spec: RunSpec[CheckSettings] = spec) -> Environment:
            return in_sandboxes_of(opened.environment, spec.make_environment())

        async def play(tasks: list[Task]) -> Plays:
            if not settings.plays:
                return Plays()
            try:
                return await _play(spec, fresh(), tasks, opened.judge, progress)
            except EnvserverError as error:
                return Plays(problems=[f"Its rollouts cannot be run: {error}"])

        report = await check(
            fresh,
            opened.pool,
            most_tasks=settings.tasks,
            rows=await asyncio.to_thread(_rows_to_check, spec, fresh),
            play=play,
            progress=partial(progress, "results"),
        )
    report.scoring = _cost(costs, spec.environment_class.score_cpu_seconds)
    return report


def _rows_to_check(
    spec: RunSpec[CheckSettings], make: Callable[[RunSpec[CheckSettings]], Environment]
) -> RowsToCheck:
    settings, env = spec.settings, spec.settings.env
    is_rows = issubclass(spec.environment_class, RowsEnvironment)
    most = settings.rows
    if most is None:
        most = MOST_ROWS if is_rows or getattr(env, "data_path", None) else 0
    limits = {"env.max_token_length": env.max_token_length}
    if settings.context_tokens is not None:
        limits["context_tokens"] = settings.context_tokens
    name = settings.tokenizer
    return RowsToCheck(
        most,
        evaluation=_evaluation_set(spec, make) if settings.evaluation_set else (),
        tokens=_token_counter(name) if name else estimated_tokens,
        tokenizer=name,
        limits=limits,
    )


def _token_counter(tokenizer: str) -> Callable[[str], int]:
    vocabulary = Vocabulary.load(find_tokenizer(tokenizer))
    return lambda text: len(vocabulary.encode(text.encode("utf-8", "replace").decode()))


def _evaluation_set(
    spec: RunSpec[CheckSettings], make: Callable[[RunSpec[CheckSettings]], Environment]
) -> list[Placed]:
    settings, held_out = spec.settings, spec.settings.evaluation_set
    changed: dict[str, Any] = {"split": settings.evaluation_split}
    if not issubclass(spec.environment_class, RowsEnvironment):
        if "data_path" not in spec.environment_class.Config.model_fields:
            raise ConfigError(
                f"{spec.environment_class.name!r} reads no evaluation set: it has no data_path.",
                hint="Leave out --evaluation_set.",
            )
        changed["data_path"] = Path(held_out)
    held_out_settings = settings.model_copy(update={"env": settings.env.model_copy(update=changed)})
    environment = make(dataclasses.replace(spec, settings=held_out_settings))
    if isinstance(environment, RowsEnvironment):
        environment.source = Source(held_out)  # type: ignore[misc]
    _, origins = watched_rows(environment)
    return placed(first_tasks(environment, MOST_ROWS), origins)


def _cost(costs: list[tuple[float, float]], limit: float) -> ScoringCost | None:
    if not costs:
        return None
    seconds, cpu_seconds = zip(*costs, strict=True)
    return ScoringCost(
        count=len(costs),
        seconds=median(seconds),
        cpu_seconds=median(cpu_seconds),
        most_seconds=max(seconds),
        most_cpu_seconds=max(cpu_seconds),
        limit_cpu_seconds=limit,
    )
