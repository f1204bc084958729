"""Shows conversations on a terminal: a heading for each message, its text, its calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from envserver_records.records import Message, Trajectory, text_of

from .console import Console

_STYLES = {"assistant": "bold green", "user": "bold cyan", "tool": "bold yellow"}


def show_messages(console: Console, messages: Iterable[Message]) -> None:
    """Prints messages in full."""
    for message in messages:
        role = str(message.get("role", "?"))
        console.print(f"[{role}]", style=_STYLES.get(role, "bold"), markup=False)
        for line in _lines(message):
            console.print(line, markup=False, highlight=False, soft_wrap=True)


def show_rollout(console: Console, trajectory: Trajectory) -> None:
    """Prints all conversations of a rollout, and its reward."""
    console.rule(f"{trajectory.rollout_id}, task {trajectory.task_id}", characters="-")
    show_messages(console, trajectory.messages)
    for other in trajectory.others:
        console.print(f"Agent {other.agent}:", style="bold", markup=False)
        show_messages(console, other.messages)
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
