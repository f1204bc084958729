"""Scripted conversations: replayed, evaluated, and compared with tau2-bench's own results.

A vector (the format of tau2_reference.json) names domain, task and rules, and holds the messages of
both sides, in order, and the results under `expected`.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envserver_records.tasks import Json
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from envserver import EnvserverError, InputError
from envserver.rows.sources import every_row

from .domains.loading import tau2_domain
from .domains.world import Domain
from .episodes import GREETING, Episode, EpisodeRules
from .evaluation import Evaluation, EvaluationError, EvaluationType, evaluate, expected_world
from .tasks import TauMessage, TauTask, message_of_row, read_task, same_digest


class RecordedTask(BaseModel):
    """A row of `envserver score --env tau`. Its `messages` are the whole conversation, in
    tau2-bench's form or OpenAI's. They are replayed: tools' results and the ending are computed."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    domain: str
    task_id: str = Field(validation_alias=AliasChoices("task_id", "id"))
    evaluation_type: EvaluationType = "all"
    nl_verdicts: list[bool] | None = None
    max_steps: PositiveInt = 100
    max_errors: PositiveInt = 10
    validate_communication: bool = False
    agent_may_stop: bool = False

    @property
    def rules(self) -> EpisodeRules:
        return EpisodeRules(
            max_steps=self.max_steps,
            max_errors=self.max_errors,
            validate=self.validate_communication,
            agent_may_stop=self.agent_may_stop,
        )


def read_recorded_task(row: Json) -> RecordedTask:
    try:
        return RecordedTask.model_validate(row)
    except ValidationError as error:
        raise InputError(
            f"The task names no task of tau2-bench: {str(error)[:300]}",
            hint='It is {"domain": "retail", "task_id": "0", ...}.',
        ) from error


def replayed(
    domain: Domain, task: TauTask, rules: EpisodeRules, messages: Sequence[Json]
) -> Episode:
    episode = Episode(domain, task, rules)
    remaining = [message_of_row(message, number) for number, message in enumerate(messages)]
    remaining = [message for message in remaining if message["role"] != "system"]
    del remaining[: _known(episode, remaining)]
    expected: list[TauMessage] = []
    for number, message in enumerate(remaining):
        place = f"message {len(messages) - len(remaining) + number}"
        if message["role"] == "tool":
            if not expected:
                raise InputError(f"{place}: a result without a call.")
            _check_result(place, message, expected.pop(0))
            continue
        if episode.speaker != message["role"]:
            turn = f"it is the {episode.speaker}'s turn" if episode.speaker else "it is over"
            raise InputError(f"{place}: {message['role']} speaks, but {turn}.")
        expected = episode.say(message["content"], message.get("tool_calls") or ())
    return episode


def _known(episode: Episode, messages: Sequence[TauMessage]) -> int:
    """How many of `messages` precede the start: history, or a greeting, which may be in other
    words."""
    begun = episode.messages
    if len(begun) == 1 and begun[0]["content"] == GREETING:
        greeted = bool(messages) and messages[0]["role"] == "assistant"
        if greeted and not messages[0].get("tool_calls"):
            begun[0] = messages[0]
            return 1
        return 0
    same = len(messages) >= len(begun) and all(map(_is_same, begun, messages))
    return len(begun) if same else 0


def _is_same(message: TauMessage, recorded: TauMessage) -> bool:
    """Is it the recorded message? Content that was not kept does not count."""
    content = recorded["content"]
    return (
        message["role"] == recorded["role"]
        and message.get("tool_calls") == recorded.get("tool_calls")
        and (content is None or content == message["content"])
    )


def _check_result(place: str, recorded: Json, result: TauMessage) -> None:
    same = same_digest(result["content"], recorded)
    if same is None:
        same = recorded.get("content") in (None, result["content"])
    if not same:
        raise InputError(f"{place}: the call returns {result['content'][:300]!r}.")


@dataclass(frozen=True)
class Replay:
    episode: Episode
    evaluation: Evaluation

    def as_row(self) -> Json:
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


def replay(domain: Domain, vector: Json) -> Replay:
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
    scripts = {"assistant": deque(agent_script), "user": deque(user_script)}
    while (speaker := episode.speaker) is not None:
        if not scripts[speaker]:
            raise InputError(f"The script of the {speaker} ends before the conversation.")
        said = scripts[speaker].popleft()
        episode.say(said.get("content"), said.get("tool_calls") or ())


def differences(vector: Json, played: Replay) -> list[str]:
    """Describes where the outcome differs from `vector`; empty: it is the same."""
    return [*_outcome_differences(vector, played), *_message_differences(vector, played)]


def _outcome_differences(vector: Json, played: Replay) -> Iterator[str]:
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


def _message_differences(vector: Json, played: Replay) -> Iterator[str]:
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


def main(arguments: Sequence[str]) -> int:
    """`python -m envserver_environments.tau replay FILE --tau2-data DIR`: a line per vector.
    Returns 1 if anything differs from `expected`, 2 if the vectors or the data cannot be read."""
    parser = argparse.ArgumentParser(
        prog="python -m envserver_environments.tau replay",
        description="Plays scripted conversations of tau2-bench again and compares the outcome.",
    )
    parser.add_argument("file", type=Path, help='JSON: {"vectors": [...]} or a list; or JSONL')
    parser.add_argument(
        "--tau2-data", type=Path, help="tau2-bench's data; default: those of inspect_evals"
    )
    parser.add_argument("--only", help="replay only vectors with this text in their id")
    options = parser.parse_args(arguments)
    try:
        vectors = [v for v in every_row(options.file) if (options.only or "") in _name(v)]
        return _replay_all(vectors, options.tau2_data)
    except EnvserverError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def _replay_all(vectors: Sequence[Json], data: Path | None) -> int:
    different = compared = 0
    for vector in vectors:
        try:
            played = replay(tau2_domain(str(vector.get("domain")), data), vector)
        except (InputError, EvaluationError, KeyError) as error:
            found = [f"{type(error).__name__}: {error}"]
            _print(vector, None, found)
        else:
            found = differences(vector, played) if "expected" in vector else []
            _print(vector, played, found)
        compared += "expected" in vector
        different += bool(found)
    sys.stdout.write(
        f"{len(vectors)} vectors, {compared} with an expected outcome, {different} different\n"
    )
    return 1 if different else 0


def _print(vector: Json, played: Replay | None, found: Sequence[str]) -> None:
    verdict = "DIFFERENT" if found else "equal" if "expected" in vector else "-"
    line = f"{verdict:9} {_name(vector)}"
    if played is not None:
        components = " ".join(f"{k}={v:g}" for k, v in played.evaluation.components.items())
        line += f"  reward={played.evaluation.reward:g} {components} ({played.episode.ending})"
    sys.stdout.write("".join([line, *(f"\n    {text}" for text in found), "\n"]))


def _name(vector: Json) -> str:
    return str(vector.get("id") or f"{vector.get('domain')}/{vector.get('task_id')}")
