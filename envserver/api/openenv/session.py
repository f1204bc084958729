"""One client's session: its current episode, and OpenEnv's operations on it.

In: resets and actions. Out: observations. What always holds: one operation at a time; a reset ends
the episode before; what a client sends wrongly leaves the episode as it is.
"""

from __future__ import annotations

import itertools
from typing import Any, Final, Literal

import orjson
import structlog
from envserver_records.errors import ConflictError, EnvserverError, InputError
from envserver_records.records import Message, Split, text_of
from pydantic import BaseModel, ConfigDict, Field, model_validator

from ...models.played import Asked
from ...rollouts.episodes import Episode, Episodes
from ...rollouts.episodes import Outcome as Ended


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


_MCP_FIELDS: Final = {"tool_name", "result", "error", "tools"}
"""Fields that only answers to `call_tool` and `list_tools` have."""

_log = structlog.get_logger(__name__)


class Session:
    """A session with the environment `name`; `close` frees everything."""

    def __init__(self, episodes: Episodes, name: str) -> None:
        self._episodes = episodes
        self._name = name
        self._episode: Episode | None = None
        self._asked: Asked | None = None
        self._episode_id: str | None = None
        self._steps = 0
        self._call_numbers = itertools.count(1)

    async def reset(self, wanted: Reset) -> Answer:
        """Begins an episode and returns its first request to the model."""
        await self.close()
        self._episode = await self._episodes.begin(
            self._name,
            task_id=wanted.task_id,
            seed=wanted.seed,
            split=wanted.split,
            agent=wanted.agent,
        )
        self._episode_id = wanted.episode_id or self._episode.id
        self._steps = 0
        return await self._next(self._episode)

    async def step(self, action: Action) -> Answer:
        """Takes the model's turn and returns the next request, or the end with the reward."""
        if action.type == "list_tools":
            return await self._list_tools()
        episode, asked = self._current()
        episode.answer(self._message(action))
        self._steps += 1
        answer = await self._next(episode, seen=len(asked.messages))
        if action.type == "call_tool":
            text = answer.observation["text"]
            answer.observation |= {"tool_name": action.tool_name, "result": text, "error": None}
        return answer

    def state(self) -> State:
        """Describes the episode."""
        episode = self._episode
        if episode is None:
            return State()
        return State(
            episode_id=self._episode_id,
            step_count=self._steps,
            task_id=episode.task_id,
            done=self._asked is None,
        )

    async def close(self) -> None:
        """Ends the episode, if there is one."""
        episode, self._episode, self._asked = self._episode, None, None
        if episode is not None:
            await episode.close()

    def _current(self) -> tuple[Episode, Asked]:
        if self._episode is None:
            raise ConflictError("There is no episode yet: reset begins one.")
        if self._asked is None:
            raise ConflictError("The episode is over: reset begins another.")
        return self._episode, self._asked

    async def _list_tools(self) -> Answer:
        if self._episode is None:
            await self.reset(Reset())
        tools = [_as_mcp(tool) for tool in (self._asked.tools if self._asked else [])]
        return self._answer(Observation(tools=tools), done=self._asked is None)

    async def _next(self, episode: Episode, *, seen: int = 0) -> Answer:
        self._asked = None
        found = await episode.next()
        if isinstance(found, Ended):
            ended = Observation(
                outcome=Outcome(
                    rewards=found.rewards,
                    turn_rewards=[
                        {"agent": one.agent, "call": one.call, "value": one.value}
                        for one in found.turns
                    ],
                    components=found.components,
                    limit=found.limit,
                )
            )
            return self._answer(ended, reward=found.reward, done=True)
        self._asked = found
        observation = Observation(
            messages=found.messages,
            text=_newest(found.messages, seen),
            available_tools=found.tools,
            agent=found.agent,
        )
        return self._answer(observation)

    def _answer(
        self, observation: Observation, *, reward: float | None = None, done: bool = False
    ) -> Answer:
        episode = self._episode
        return Answer(
            observation=observation.model_dump(exclude=_MCP_FIELDS - observation.model_fields_set),
            reward=reward,
            done=done,
            metadata={
                "episode_id": self._episode_id,
                "task_id": None if episode is None else episode.task_id,
            },
        )

    def _message(self, action: Action) -> Message:
        calls = []
        for call in action.calls():
            arguments = call.arguments
            if not isinstance(arguments, str):
                try:
                    arguments = orjson.dumps(arguments).decode()
                except TypeError as error:
                    raise InputError(f"The arguments of {call.name[:80]!r}: {error}.") from None
            calls.append(
                {
                    "id": call.id or f"call_{next(self._call_numbers)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": arguments},
                }
            )
        return {"role": "assistant", "content": action.message, "tool_calls": calls}


def failure_text(error: EnvserverError) -> str:
    """Returns what a client is told of an episode that failed, and logs the rest: what a scorer
    raised may name the hidden answer."""
    _log.warning("episode_failed", kind=error.kind, error=str(error))
    return f"The episode failed through no fault of the model: {error.kind}."


def _newest(messages: list[Message], seen: int) -> str:
    """Returns the text of the messages after the last turn, or of all at the beginning.

    Args:
        seen: number of messages of the request before.
    """
    if seen and len(messages) > seen:
        messages = [one for one in messages[seen:] if one.get("role") != "assistant"]
    return "\n\n".join(filter(None, map(text_of, messages)))


def _as_mcp(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InputError("This environment offers a tool that is no function.")
    return {
        "name": function.get("name", ""),
        "description": function.get("description") or "",
        "input_schema": function.get("parameters") or {},
    }
