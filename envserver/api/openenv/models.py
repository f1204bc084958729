"""What OpenEnv's clients send and get. Unknown fields of a reset are ignored, as its servers do."""

from __future__ import annotations

from typing import Any, Literal

from envserver_records.records import Split
from pydantic import BaseModel, ConfigDict, Field, model_validator


class Reset(BaseModel):
    """Begins an episode: `reset(task_id=..., seed=..., split=..., agent=...)`."""

    task_id: str | None = None
    """A task of the environment; unset: by the seed, else the next one."""
    seed: int | None = Field(default=None, ge=0)
    """The same seed begins the same task."""
    split: Split | None = None
    """Split of the task; unset: the one that the server serves."""
    agent: str | None = None
    """The only agent to be played; unset: all that are trained."""
    episode_id: str | None = Field(default=None, max_length=255)
    """The client's name for the episode."""


class ToolCall(BaseModel):
    """One call of a tool."""

    model_config = ConfigDict(extra="forbid")

    name: str
    arguments: dict[str, Any] | str = {}
    """An object, or its JSON as the model wrote it."""
    id: str | None = None


class Action(BaseModel):
    """The model's turn: text, tool calls, or both."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["message", "call_tool", "list_tools"] = "message"
    """call_tool: one call, in `tool_name` and `arguments`. list_tools is no turn."""
    message: str = ""
    """The text of the answer."""
    tool_calls: list[ToolCall] = []
    tool_name: str = ""
    arguments: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    """Ignored."""

    @model_validator(mode="after")
    def _is_whole(self) -> Action:
        if self.type == "call_tool" and not self.tool_name:
            raise ValueError("call_tool needs a tool_name")
        return self

    def calls(self) -> list[ToolCall]:
        """Returns its tool calls, in whatever form they came."""
        if self.type == "call_tool":
            return [ToolCall(name=self.tool_name, arguments=self.arguments)]
        return self.tool_calls


class Outcome(BaseModel):
    """The end of an episode."""

    rewards: dict[str, float]
    """By agent, if the environment declares agents."""
    turn_rewards: list[dict[str, Any]]
    """Rewards of single turns, which the reward includes."""
    components: dict[str, float]
    limit: str | None
    """The limit that ended the episode, such as "turns"."""


class Observation(BaseModel):
    """What the model is asked next, or the end."""

    messages: list[dict[str, Any]] = []
    """The whole conversation, in OpenAI's format; empty at the end."""
    text: str = ""
    """The text of the messages since the last turn."""
    available_tools: list[dict[str, Any]] = []
    """The tools that the model may call, in OpenAI's format."""
    agent: str | None = None
    """Whose turn it is, if the environment declares agents."""
    outcome: Outcome | None = None
    tool_name: str | None = None
    """After call_tool: the tool; `result` and `error`: what it returned."""
    result: Any = None
    error: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    """After list_tools: name, description and input_schema of each tool."""


class State(BaseModel):
    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None
    done: bool = False


class Answer(BaseModel):
    """The answer to a reset or a step."""

    observation: dict[str, Any]
    reward: float | None = None
    """At the end of the episode, its whole reward; null before."""
    done: bool = False
    metadata: dict[str, Any] | None = None


class Step(Reset):
    """A step over HTTP: an episode of one turn, so it names its task as a reset does."""

    action: Action
