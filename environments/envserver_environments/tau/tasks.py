"""A task in tau2-bench's format (src/tau2/data_model/tasks.py), its messages and its worlds. Fields
that only upstream's tooling reads are not kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from envserver_records.tasks import Json
from pydantic import BaseModel, ConfigDict, ValidationError

from envserver import InputError

from .domains.toolkit import Requestor
from .domains.world import CallResult, Domain, World

RewardType = Literal["DB", "ENV_ASSERTION", "NL_ASSERTION", "ACTION", "COMMUNICATE"]

TauMessage = dict[str, Any]
"""`{"role": "assistant" | "user", "content", "tool_calls": [{"id", "name", "arguments",
"requestor"}]}` or `{"role": "tool", "id", "requestor", "content", "error"}`."""


class FunctionCall(BaseModel):
    env_type: Requestor
    func_name: str
    arguments: dict[str, Any]


class Assertion(FunctionCall):
    assert_value: bool = True
    message: str | None = None


class Action(BaseModel):
    """`compare_args`: arguments that count; None: those that a call has."""

    action_id: str = ""
    requestor: Requestor = "assistant"
    name: str
    arguments: dict[str, Any]
    info: str | None = None
    compare_args: list[str] | None = None


class Criteria(BaseModel):
    """The expected results; only those in `reward_basis` make the reward."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    actions: list[Action] | None = None
    env_assertions: list[Assertion] | None = None
    communicate_info: list[str] | None = None
    nl_assertions: list[str] | None = None
    reward_basis: list[RewardType] = ["DB", "COMMUNICATE"]


class InitialData(BaseModel):
    agent_data: dict[str, Any] | None = None
    user_data: dict[str, Any] | None = None


class InitialState(BaseModel):
    initialization_data: InitialData | None = None
    initialization_actions: list[FunctionCall] | None = None
    message_history: list[TauMessage] | None = None


class TauTask(BaseModel):
    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: str
    user_scenario: dict[str, Any] = {}
    ticket: str | None = None
    initial_state: InitialState | None = None
    evaluation_criteria: Criteria | None = None
    user_tools: list[str] | None = None

    @property
    def criteria(self) -> Criteria:
        return self.evaluation_criteria or Criteria()

    @property
    def history(self) -> list[TauMessage]:
        messages = self.initial_state.message_history if self.initial_state else None
        return [message_of_row(message, number) for number, message in enumerate(messages or [])]


def read_task(row: Json) -> TauTask:
    try:
        return TauTask.model_validate(row)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise InputError(
            f"This is not a task of tau2-bench: {where}: {fault['msg']}.",
            hint="See the README of tau.",
        ) from error


def message_of_row(message: Json, number: int) -> TauMessage:
    """A message of either shape in tau2-bench's."""
    role = message.get("role")
    if role not in ("assistant", "user", "tool", "system"):
        raise InputError(f"message {number}: the role {role!r} is unknown.")
    content = _text(message.get("content"))
    if role == "tool":
        known: Json = {
            k: message[k] for k in ("content_sha256", "error", "requestor") if k in message
        }
        return {
            "requestor": "assistant",
            "error": False,
            **known,
            "role": "tool",
            "id": str(message.get("id") or message.get("tool_call_id") or ""),
            "content": content,
        }
    said: TauMessage = {"role": role, "content": content}
    if message.get("tool_calls"):
        said["tool_calls"] = [_call(call, number, role) for call in message["tool_calls"]]
    return said


def _call(call: Any, number: int, role: str) -> dict[str, Any]:
    try:
        function = call.get("function", call)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = _parsed(arguments)
        name = str(function["name"])
        return {
            "id": str(call.get("id") or ""), "name": name, "arguments": arguments, "requestor": role
        }  # fmt: skip
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"message {number}: a call has no name or no arguments.") from error


def _parsed(arguments: str) -> Any:
    """Parses a model's arguments; text that is not JSON stays text (an error of the call)."""
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def _text(content: Any) -> str | None:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else None


def has_text(message: Json) -> bool:
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())


class ReplayMismatch(Exception):
    """A recorded conversation cannot have happened so: a result differs, or is missing."""


def start(domain: Domain, task: TauTask) -> World:
    """The world in which `task` starts, after its message history."""
    world = set_up(domain, task)
    try:
        replay_messages(world, task.history)
    except ReplayMismatch as error:
        raise InputError(f"Task {task.id!r}: its message history: {error}") from error
    return world


def set_up(domain: Domain, task: TauTask) -> World:
    """The world of `task` before its message history."""
    world = domain.world()
    initial = task.initial_state
    if initial is None:
        return world
    try:
        if initial.initialization_data is not None:
            data = initial.initialization_data
            world.merge_data(data.agent_data, data.user_data)
        for call in initial.initialization_actions or []:
            world.run_function(call.env_type, call.func_name, call.arguments)
    except Exception as error:
        raise InputError(f"Task {task.id!r} cannot be set up: {error}") from error
    return world


def replay_messages(world: World, messages: Sequence[TauMessage]) -> None:
    """Repeats the calls that change data; their results must equal the recorded ones."""
    for call, recorded in calls_with_results(messages):
        tool = world.tool(call["name"])
        if tool is None or not tool.mutates:
            continue
        result = world.call(call["requestor"], call["name"], call["arguments"])
        if not _same_result(result, recorded):
            raise ReplayMismatch(
                f"{call['name']}({call['arguments']}) returned {result.content[:300]!r}, "
                f"not {str(recorded.get('content'))[:300]!r}"
            )
    world.sync()


def calls_with_results(
    messages: Sequence[TauMessage],
) -> Iterator[tuple[Json, TauMessage]]:
    remaining = iter(messages)
    for message in remaining:
        if message["role"] == "tool":
            raise ReplayMismatch("there is a result without a call")
        for call in message.get("tool_calls") or ():
            result = next(remaining, None)
            if result is None or result["role"] != "tool":
                raise ReplayMismatch(f"the result of {call['name']} is missing")
            if result["id"] != call["id"]:
                raise ReplayMismatch(f"{call['id']!r} is answered by {result['id']!r}")
            yield call, result


def _same_result(result: CallResult, recorded: TauMessage) -> bool:
    same = same_digest(result.content, recorded)
    if same is None:
        same = bool(_parsed_result(result.content) == _parsed_result(recorded.get("content")))
    return same


def same_digest(content: str, recorded: Json) -> bool | None:
    """Is it the recorded one, of which only a digest was kept? None: all of it was."""
    if recorded.get("content") is not None or "content_sha256" not in recorded:
        return None
    return hashlib.sha256(content.encode()).hexdigest() == str(recorded["content_sha256"])


def _parsed_result(content: Any) -> Any:
    try:
        return json.loads(content)
    except (TypeError, ValueError):
        return content
