"""A task in tau2-bench's format (src/tau2/data_model/tasks.py), and its messages.

Fields that only upstream's tooling reads (annotations, issues, ...) are kept nowhere.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from envserver import InputError

from .domains.toolkit import Requestor

RewardType = Literal["DB", "ENV_ASSERTION", "NL_ASSERTION", "ACTION", "COMMUNICATE"]

TauMessage = dict[str, Any]
"""`{"role": "assistant" | "user", "content", "tool_calls": [{"id", "name", "arguments",
"requestor"}]}` or `{"role": "tool", "id", "requestor", "content", "error"}`."""


class FunctionCall(BaseModel):
    """A function of one side's toolkit and its arguments."""

    env_type: Requestor
    func_name: str
    arguments: dict[str, Any]


class Assertion(FunctionCall):
    """A function whose outcome is expected."""

    assert_value: bool = True
    message: str | None = None


class Action(BaseModel):
    """A call that solves a part of the task.

    Args:
        compare_args: arguments that count; None: those that a call has.
    """

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
    """Changes to a domain's data."""

    agent_data: dict[str, Any] | None = None
    user_data: dict[str, Any] | None = None


class InitialState(BaseModel):
    """Changes to the domain's data when the task starts."""

    initialization_data: InitialData | None = None
    initialization_actions: list[FunctionCall] | None = None
    message_history: list[TauMessage] | None = None


class TauTask(BaseModel):
    """One task."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    id: str
    user_scenario: dict[str, Any] = Field(default_factory=dict)
    ticket: str | None = None
    initial_state: InitialState | None = None
    evaluation_criteria: Criteria | None = None
    user_tools: list[str] | None = None

    @property
    def history(self) -> list[TauMessage]:
        """The messages that were exchanged before the start."""
        messages = self.initial_state.message_history if self.initial_state else None
        return [message_of_row(message, number) for number, message in enumerate(messages or [])]


def read_task(row: Mapping[str, Any]) -> TauTask:
    """A task from a row of tasks.json."""
    try:
        return TauTask.model_validate(row)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(map(str, fault["loc"]))
        raise InputError(
            f"This is not a task of tau2-bench: {where}: {fault['msg']}.",
            hint="See the README of tau.",
        ) from error


def message_of_row(message: Mapping[str, Any], number: int) -> TauMessage:
    """A message of either shape in tau2-bench's."""
    role = message.get("role")
    if role not in ("assistant", "user", "tool", "system"):
        raise InputError(f"message {number}: the role {role!r} is unknown.")
    content = _text(message.get("content"))
    if role == "tool":
        known = {k: message[k] for k in ("content_sha256", "error", "requestor") if k in message}
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


def has_text(message: Mapping[str, Any]) -> bool:
    """Does it say anything?"""
    content = message.get("content")
    return isinstance(content, str) and bool(content.strip())
