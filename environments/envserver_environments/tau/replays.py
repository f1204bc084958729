"""Scripted conversations: replayed, evaluated, and compared with the expected results.

A vector (the format of tau2_reference.json) names domain, task and rules, and holds the messages of
both sides, in order, and tau2-bench's own results under `expected`.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from envserver import InputError

from .domains.world import Domain
from .episodes import Episode
from .evaluation import Evaluation, evaluate
from .evaluation.rewards import expected_world
from .rows import read_recorded_task
from .tasks import TauMessage, read_task


@dataclass(frozen=True)
class Replay:
    """A conversation that was played, and its value."""

    episode: Episode
    evaluation: Evaluation

    def as_row(self) -> dict[str, Any]:
        """Returns the actual results in the form of a vector's `expected`."""
        world, found = self.episode.world, self.evaluation
        task = self.episode.task
        gold = found.gold
        if gold is None and task.evaluation_criteria is not None:
            gold = expected_world(world.domain, task, task.evaluation_criteria)
        return {
            "termination_reason": self.episode.ending,
            "evaluator_error": found.upstream_error,
            "reward": found.reward,
            "reward_basis": found.basis,
            "reward_breakdown": found.components or None,
            "db_match": found.db_match,
            "env_assertions": [
                {"func_name": name, "met": met} for name, met in found.env_assertions
            ],
            "action_matches": found.action_matches,
            "communicate": [{"info": info, "met": met} for info, met in found.communicate],
            "nl": found.nl,
            "final_agent_db_hash": world.agent_hash(),
            "final_user_db_hash": world.user_hash(),
            "gold_agent_db_hash": None if gold is None else gold.agent_hash(),
            "gold_user_db_hash": None if gold is None else gold.user_hash(),
        }


def replay(domain: Domain, vector: Mapping[str, Any]) -> Replay:
    """Plays the scripts of `vector` in `domain` and evaluates the conversation."""
    recorded = read_recorded_task({"domain": domain.name, **vector})
    if recorded.task_id not in domain.tasks:
        raise InputError(f"The domain {domain.name!r} has no task {recorded.task_id!r}.")
    task = read_task(domain.tasks[recorded.task_id])
    episode = Episode(domain, task, recorded.rules)
    play(episode, vector["agent_script"], vector["user_script"])
    evaluation = evaluate(
        domain,
        task,
        episode.messages,
        str(episode.ending),
        evaluation_type=recorded.evaluation_type,
        nl_verdicts=recorded.nl_verdicts,
    )
    return Replay(episode, evaluation)


def play(episode: Episode, agent_script: list[Any], user_script: list[Any]) -> None:
    """Lets both sides say what their scripts hold until the conversation ends."""
    scripts = {"assistant": deque(agent_script), "user": deque(user_script)}
    while (speaker := episode.speaker) is not None:
        if not scripts[speaker]:
            raise InputError(f"The script of the {speaker} ends before the conversation.")
        said = scripts[speaker].popleft()
        episode.say(said.get("content"), said.get("tool_calls") or ())


def differences(vector: Mapping[str, Any], played: Replay) -> list[str]:
    """Describes where the outcome differs from `vector`; empty: it is the same."""
    return [*_outcome_differences(vector, played), *_message_differences(vector, played)]


def _outcome_differences(vector: Mapping[str, Any], played: Replay) -> Iterator[str]:
    expected, row = vector["expected"], played.as_row()
    if expected.get("evaluator_error"):
        if row["evaluator_error"] is None:
            yield f"evaluator_error: expected {expected['evaluator_error']!r}, there is none"
        return
    for name, value in row.items():
        if name not in expected or expected[name] == value:
            continue
        if not expected[name] and not value and not isinstance(value, bool | float):
            continue  # empty results are null or an empty list
        if expected[name] is None and name.startswith("gold_"):
            continue  # nor are the expected data given if they were not evaluated
        yield f"{name}: expected {expected[name]!r}, is {value!r}"


def _message_differences(vector: Mapping[str, Any], played: Replay) -> Iterator[str]:
    expected, messages = vector.get("messages"), played.episode.messages
    if expected is None:
        return
    if len(expected) != len(messages):
        yield f"messages: expected {len(expected)}, are {len(messages)}"
    for number, (wanted, message) in enumerate(zip(expected, messages, strict=False)):
        for name in wanted:
            if name == "content_len" or _field(message, name) == wanted[name]:
                continue
            yield f"messages[{number}].{name}: expected {wanted[name]!r}, is {message!r}"[:600]


def _field(message: TauMessage, name: str) -> Any:
    if name == "content_sha256":
        return hashlib.sha256(str(message["content"]).encode()).hexdigest()
    return message.get(name)
