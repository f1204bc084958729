"""What trackers get of a run: numbers since the last write, and rows of sample rollouts. Pure.

In: the events of rollouts and groups. Out: scalars by name, and a table with TRL's columns and some
of ours. What holds: memory is constant; texts are bounded and hold nothing that looks like a
secret.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import fmean, pstdev
from typing import Final

import orjson
from envserver_records.records import Group, Message, Trajectory, text_of
from envserver_records.tracking import Row

from ..rollouts.events import Event, GroupDelivered, GroupDropped, RolloutFailed, RolloutScored
from ..telemetry.redaction import redacted

_MOST_CHARACTERS: Final = 4000
_MOST_KINDS: Final = 50


class _Sums:
    """Sums since the last write, of one environment or of all."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.sums: Counter[str] = Counter()

    def add(self, name: str, value: float) -> None:
        """Adds a value to a mean."""
        self.counts[name] += 1
        self.sums[name] += value  # type: ignore[assignment]  # a Counter of floats

    def means(self) -> dict[str, float]:
        return {name: self.sums[name] / count for name, count in self.counts.items()}


class TrackedNumbers:
    """The numbers of a run; `observe` takes its events.

    Args:
        most_groups: groups whose rollouts are kept for the table.
        link: start of the link to a group; "": there is no page.
    """

    def __init__(self, most_groups: int, link: str = "") -> None:
        self.groups = 0
        """Groups delivered."""
        self.link = link
        self._latest: deque[Group] = deque(maxlen=most_groups)
        self._since: dict[str, _Sums] = {}
        self._rollouts = 0
        self._tokens = 0
        self._totals: Counter[str] = Counter()
        self._version = -1

    def observe(self, environment: str, event: Event) -> None:
        """Counts an event."""
        of = [self._since.setdefault(name, _Sums()) for name in ("", environment)]
        if isinstance(event, RolloutScored):
            self._rollouts += 1
            self._tokens += event.completion_tokens
            values = {
                "turns": event.turns,
                "completion_tokens": event.completion_tokens,
                "rollout_seconds": event.seconds,
                "limited_share": float(event.limit is not None),
                "lost_share": 0.0,
            }
        elif isinstance(event, RolloutFailed):
            self._count(f"failures/{event.failure.kind}")
            values = {"lost_share": 1.0} if event.final else {}
        elif isinstance(event, GroupDropped):
            self._count(f"dropped/{event.reason}")
            values = {}
        else:
            values = self._delivered(environment, event)
        for sums in of:
            for name, value in values.items():
                sums.add(name, value)

    def _delivered(self, environment: str, event: GroupDelivered) -> dict[str, float]:
        group = event.group
        self.groups += 1
        self._count(f"groups/{environment}")
        self._version = max(self._version, group.policy_version)
        self._latest.append(group)
        rewards = [one.score.reward for one in group.trajectories if one.score.reward is not None]
        if not rewards:
            return {}
        deviation = pstdev(rewards)
        return {
            "reward": fmean(rewards),
            "reward_std": deviation,
            "equal_share": float(deviation == 0),
        }

    def _count(self, name: str) -> None:
        if name in self._totals or len(self._totals) < _MOST_KINDS:
            self._totals[name] += 1

    def scalars(self, seconds: float) -> dict[str, float]:
        """Returns the numbers since the last call, and the totals; begins anew.

        Args:
            seconds: since the last call.
        """
        several = len(self._since) > 2
        found: dict[str, float] = {}
        for environment, sums in self._since.items():
            if environment and not several:
                continue
            after = f"/{environment}" if environment else ""
            found |= {f"{name}{after}": value for name, value in sums.means().items()}
        if seconds > 0:
            found["tokens_per_second"] = self._tokens / seconds
            found["rollouts_per_minute"] = 60 * self._rollouts / seconds
        if self._version >= 0:
            found["policy_version"] = self._version
        self._since, self._rollouts, self._tokens = {}, 0, 0
        return found | dict(self._totals)

    def take_groups(self) -> list[Group]:
        """Returns the latest groups since the last call, oldest first."""
        groups = [*self._latest]
        self._latest.clear()
        return groups

    def rows(self, step: int, groups: list[Group]) -> list[Row]:
        """Returns the best and the worst rollout of each group."""
        return [row for group in groups for row in _rows(step, group, self.link)]


def _rows(step: int, group: Group, link: str) -> list[Row]:
    placed = [
        (one.score.reward, number, one)
        for number, one in enumerate(group.trajectories)
        if one.score.reward is not None
    ]
    if not placed:
        return []
    rewards = [reward for reward, _, _ in placed]
    chosen = {number: one for _, number, one in (max(placed, key=_first), min(placed, key=_first))}
    mean, deviation = fmean(rewards), pstdev(rewards)
    return [
        _row(step, group, number, one, _advantage(one, mean, deviation), link)
        for number, one in chosen.items()
    ]


def _first(placed: tuple[float, int, Trajectory]) -> float:
    return placed[0]


def _advantage(one: Trajectory, mean: float, deviation: float) -> float:
    """Returns TRL's advantage: the distance from the group's mean in its deviations."""
    reward = one.score.reward
    assert reward is not None
    return (reward - mean) / (deviation + 1e-4)


def _row(step: int, group: Group, number: int, one: Trajectory, advantage: float, link: str) -> Row:
    first = next(
        (at for at, message in enumerate(one.messages) if message.get("role") == "assistant"),
        len(one.messages),
    )
    return {
        "step": step,
        "prompt": _text(one.messages[:first]),
        "completion": _text(one.messages[first:]),
        "reward": one.score.reward,
        "advantage": round(advantage, 4),
        "components": orjson.dumps(_finite(one.score.components)).decode(),
        "environment": group.env,
        "task_id": group.task_id,
        "group_id": group.group_id,
        "rollout": number,
        "policy_version": group.policy_version,
        "end": one.usage.ended_by,
        "turns": one.turns,
        "link": f"{link}{group.group_id}/{number}" if link else "",
    }


def _finite(components: dict[str, float]) -> dict[str, float | None]:
    return {name: one if math.isfinite(one) else None for name, one in components.items()}


def _text(messages: list[Message]) -> str:
    """Returns a conversation as bounded text; a single message is its text alone."""
    parts = [_with_calls(message) for message in messages]
    if len(parts) > 1:
        parts = [
            f"{message.get('role')}: {text}" for message, text in zip(messages, parts, strict=True)
        ]
    text = redacted("\n\n".join(parts))
    if len(text) <= _MOST_CHARACTERS:
        return text
    half = _MOST_CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def _with_calls(message: Message) -> str:
    calls = message.get("tool_calls") or []
    shown = [
        f"[{function.get('name')}({function.get('arguments')})]"
        for function in (call.get("function") or {} for call in calls)
    ]
    return "\n".join(filter(None, [text_of(message), *shown]))
