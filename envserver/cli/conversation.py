"""Shows conversations on a terminal: a heading for each message, its text, its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from envserver_records.records import Group, Message, Trajectory, text_of

from .console import Console

_STYLES = {"assistant": "bold green", "user": "bold cyan", "tool": "bold yellow"}
_FIRST_MESSAGES: Final = 3
_LAST_MESSAGES: Final = 5
_LINES: Final = 4
_CHARACTERS: Final = 300
"""Lines, and characters, of the beginning and of the end of a shortened text."""


def show_messages(console: Console, messages: Iterable[Message]) -> None:
    """Prints messages in full."""
    for message in messages:
        _show_heading(console, message)
        for line in _lines(message):
            console.say(line)


def show_rollout(console: Console, trajectory: Trajectory) -> None:
    """Prints all conversations of a rollout, and its reward."""
    console.rule(f"{trajectory.rollout_id}, task {trajectory.task_id}", characters="-")
    show_messages(console, trajectory.messages)
    for other in trajectory.others:
        console.print(f"Agent {other.agent}:", style="bold", markup=False)
        show_messages(console, other.messages)
    _show_reward(console, trajectory)


def show_sample(console: Console, group: Group) -> None:
    """Prints the best and the worst rollout of a group (one, if all rewards are equal), both with
    long texts and long conversations shortened; of two rollouts both."""
    for rollout, place in _sample(group.trajectories):
        console.rule(f"{rollout.rollout_id}, task {group.task_id}{place}", characters="-")
        _show_shortened(console, rollout.messages)
        for other in rollout.others:
            console.print(f"Agent {other.agent}:", style="bold", markup=False)
            _show_shortened(console, other.messages)
        _show_reward(console, rollout)


def _sample(rollouts: list[Trajectory]) -> list[tuple[Trajectory, str]]:
    """Returns the rollouts to show, and what each is of its group."""
    rated = [one for one in rollouts if one.score.reward is not None]
    if len(rollouts) <= 2 or not rated:
        return [(one, "") for one in rollouts[:2]]
    best, worst = (choose(rated, key=_reward) for choose in (max, min))
    if _reward(best) == _reward(worst):
        return [(best, f": all {len(rated)} have this reward")]
    return [(best, f": best of {len(rated)}"), (worst, f": worst of {len(rated)}")]


def _reward(rollout: Trajectory) -> float:
    return rollout.score.reward or 0.0


def _show_shortened(console: Console, messages: list[Message]) -> None:
    left_out = len(messages) - _FIRST_MESSAGES - _LAST_MESSAGES
    for number, message in enumerate(messages):
        if left_out > 1 and _FIRST_MESSAGES <= number < _FIRST_MESSAGES + left_out:
            if number == _FIRST_MESSAGES:
                console.print(f"... {left_out} messages ...", style="dim", markup=False)
            continue
        _show_heading(console, message)
        for line in _lines(message):
            console.print(_shortened(line), markup=False, highlight=False)


def _shortened(text: str) -> str:
    """Returns a text without its middle, if it is long."""
    lines = text.splitlines()
    if len(lines) > 2 * _LINES + 1:
        left_out = len(lines) - 2 * _LINES
        text = "\n".join([*lines[:_LINES], f"... {left_out} lines ...", *lines[-_LINES:]])
    if len(text) > 2 * _CHARACTERS + 100:
        left_out = len(text) - 2 * _CHARACTERS
        middle = f" ... {left_out} characters ... "
        text = text[:_CHARACTERS] + middle + text[-_CHARACTERS:]
    return text


def _show_heading(console: Console, message: Message) -> None:
    role = str(message.get("role", "?"))
    console.print(f"[{role}]", style=_STYLES.get(role, "bold"), markup=False)


def _show_reward(console: Console, trajectory: Trajectory) -> None:
    score, limit = trajectory.score, trajectory.limit
    reward = "none" if score.reward is None else f"{score.reward:g}"
    parts = "".join(f", {name} {value:g}" for name, value in sorted(score.components.items()))
    ended = f"; ended by its limit: {limit}" if limit is not None else ""
    console.print(f"Reward: {reward}{parts}{ended}", markup=False, highlight=False)


def _lines(message: Message) -> Iterator[str]:
    text = text_of(message)
    if text:
        yield text
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield f"-> {function.get('name')}({function.get('arguments')})"
