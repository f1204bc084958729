"""Findings of a check of an environment: plain data, with the numbers that people read."""

from __future__ import annotations

from collections import Counter

import msgspec

from ..rows.columns import RowCount

PLACES_SHOWN = 5


class Wrong(msgspec.Struct, frozen=True, kw_only=True):
    """A result whose reward is not as expected. `reward` None: `error` says why there is none.
    `place` is that of the task's row, if it is known."""

    task_id: str
    reward: float | None
    error: str = ""
    raised: bool = False
    place: str = ""


class Kind(msgspec.Struct, kw_only=True):
    """All results with one name and expectation.

    Args:
        name: as in KnownResult.
        count: number of scored results.
        expected_least, expected_most: bounds of the expected reward.
        least, most: lowest and highest reward given, None without any.
        wrong: results with an unexpected reward.
        raised: results for which the scorer raised, where it may.
    """

    name: str
    expected_least: float
    expected_most: float
    count: int = 0
    least: float | None = None
    most: float | None = None
    wrong: list[Wrong] = msgspec.field(default_factory=list)
    raised: int = 0


class Played(msgspec.Struct, kw_only=True):
    """All tasks played in one way through the environment's rollout.

    Args:
        way: "demonstration", "spoiled", "refusal", ... (`running.checking`).
        cheat: it must not be rewarded like a solved task.
        rewards: of the plays that were scored, in the order of the tasks.
        solved: how many of them are those of a solved task.
        wrong: plays with an unexpected reward, and those that failed.
        turns: calls to the model, all plays together.
        limits: how many plays ended at a limit, by its name.
        seconds: of the rollouts, all plays together.
    """

    way: str
    cheat: bool = False
    rewards: list[float] = msgspec.field(default_factory=list)
    solved: int = 0
    wrong: list[Wrong] = msgspec.field(default_factory=list)
    turns: int = 0
    limits: Counter[str] = msgspec.field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def mean(self) -> float | None:
        """Returns the mean reward, None without any."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else None


class ScoringCost(msgspec.Struct, kw_only=True):
    """What scoring used.

    Args:
        count: number of scores.
        seconds, cpu_seconds: of the median score.
        most_seconds, most_cpu_seconds: of the most expensive one.
        limit_cpu_seconds: what one score may use.
    """

    count: int
    seconds: float
    cpu_seconds: float
    most_seconds: float
    most_cpu_seconds: float
    limit_cpu_seconds: float


class Repeats(msgspec.Struct, kw_only=True):
    """Rows whose question an earlier row, or the evaluation set, has: the places of the first
    ones, each with the place of the other."""

    what: str
    count: int = 0
    places: list[tuple[str, str]] = msgspec.field(default_factory=list)


class Lengths(msgspec.Struct, kw_only=True):
    """Lengths of texts in tokens.

    Args:
        percentiles: by percent; 100 is the longest.
        over: each limit, by the setting's name, and the number of texts that are longer.
    """

    what: str
    percentiles: dict[int, int]
    over: dict[str, tuple[int, int]]


class DataReport(msgspec.Struct, kw_only=True):
    """The findings about the rows of data.

    Args:
        rows: number of rows whose answers, questions and lengths were looked at.
        whole: these are all rows of the split.
        counts: what became of the rows, by data set; empty where the environment does not say.
        tokenizer: counted the lengths; "": they are an estimate.
    """

    rows: int
    counts: dict[str, RowCount]
    repeats: list[Repeats]
    lengths: list[Lengths]
    tokenizer: str
    whole: bool = True


class EnvironmentReport(msgspec.Struct, kw_only=True):
    """The findings of a check.

    Args:
        tasks: number of tasks checked.
        whole: these are all tasks of the split.
        without_gold: ids of tasks for which no right result is known.
        problems: what is wrong with the tasks or the rewards, as text.
        plays: one entry per way of playing; empty if nothing was played.
        reward_range: lowest and highest reward that the environment declares, and the least of a
            solved task; None for an infinite end.
        scoring: None if nothing was scored.
        demonstrations_solve: as in Environment.
    """

    environment: str
    split: str
    tasks: int
    whole: bool
    kinds: list[Kind]
    without_gold: list[str]
    problems: list[str]
    plays: list[Played] = msgspec.field(default_factory=list)
    reward_range: tuple[float | None, float | None, float] = (0.0, 1.0, 1.0)
    scoring: ScoringCost | None = None
    demonstrations_solve: bool = True
    data: DataReport

    @property
    def ok(self) -> bool:
        wrong = any(kind.wrong for kind in self.kinds) or any(one.wrong for one in self.plays)
        return not self.problems and not wrong
