"""The score card of an environment in Markdown, and how its numbers are written."""

from __future__ import annotations

from collections.abc import Iterator

from ..rollouts.check_report import EnvironmentReport, Kind, Played
from ..running.check_plays import DEMONSTRATION, SPOILED
from ..running.tally import counted

_NAMES = {DEMONSTRATION: "demonstrations", SPOILED: "spoiled demonstrations"}


def card(report: EnvironmentReport) -> str:
    """Returns the card: a table for the README of the environment."""
    lines = ["| checked | found |", "|---|---|"]
    lines += [f"| {name} | {_cell(text)} |" for name, text in _rows(report)]
    if cheats := [one for one in report.plays if one.cheat]:
        lines += ["", "| the model only says | tasks solved | mean reward |", "|---|---|---|"]
        lines += [
            f"| {one.way} | {one.solved} of {len(one.rewards)} | {number(one.mean)} |"
            for one in cheats
        ]
    return "\n".join(lines) + "\n"


def _rows(report: EnvironmentReport) -> Iterator[tuple[str, str]]:
    whole = "all" if report.whole else "first"
    yield "verdict", "passes `envserver check`" if report.ok else "FAILS `envserver check`"
    yield "tasks", f"{whole} {report.tasks} of `{report.split}`"
    low, high, solved_at = report.reward_range
    ends = "no limit" if low is None else f"{low:g}", "no limit" if high is None else f"{high:g}"
    yield "rewards", f"{ends[0]} to {ends[1]}, a task is solved at {solved_at:g}"
    right = [kind for kind in report.kinds if kind.expected_least > 0]
    yield "right results", _as_expected(right)
    yield (
        "wrong, absurd and cheating results",
        _as_expected([kind for kind in report.kinds if kind not in right]),
    )
    if not report.demonstrations_solve:
        yield "a game", "demonstrations are fair play, which may lose, and a cheat may win"
    for one in report.plays:
        if not one.cheat:
            yield f"{_NAMES.get(one.way, one.way)}, played", _distribution(one)
    if report.scoring is not None:
        yield (
            "a score takes",
            (
                f"{milliseconds(report.scoring.cpu_seconds)} of CPU, at most "
                f"{milliseconds(report.scoring.most_cpu_seconds)}"
            ),
        )
    for problem in report.problems:
        yield "problem", problem


def _as_expected(kinds: list[Kind]) -> str:
    count = sum(kind.count for kind in kinds)
    wrong = sum(len(kind.wrong) for kind in kinds)
    return f"{count - wrong} of {count} as expected" if count else "none known"


def _distribution(one: Played) -> str:
    text = f"{one.solved} of {len(one.rewards) + len(one.wrong) - _judged(one)} solve their task"
    if one.rewards:
        text += f", mean reward {one.mean:.2g}, {one.turns / len(one.rewards):.1f} turns"
    return f"{text}; {ended}" if (ended := ended_by(one)) else text


def _judged(one: Played) -> int:
    """Returns how many wrong plays have a reward, and so are among the rewards."""
    return sum(wrong.reward is not None for wrong in one.wrong)


def ended_by(one: Played) -> str:
    """Returns what ended plays other than their agents, as text."""
    failed = len(one.wrong) - _judged(one)
    parts = [f"{limit} {count}" for limit, count in sorted(one.limits.items())]
    return ", ".join([*parts, *([counted(failed, "failure")] if failed else [])])


def number(value: float | None) -> str:
    """Returns a reward as text, "-" if there is none."""
    return "-" if value is None else f"{value:.4g}"


def milliseconds(seconds: float) -> str:
    """Returns a duration as text."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{seconds * 1000:.2g} ms" if seconds >= 1e-4 else "under 0.1 ms"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
