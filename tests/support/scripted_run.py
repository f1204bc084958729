"""A `run` for agents under test: its models say what a test lays before them, and all is kept."""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from itertools import pairwise
from typing import Any

from envserver_records.tasks import Json

from envserver import (
    Caller,
    Environment,
    LimitReached,
    Message,
    Reply,
    Result,
    Sandboxes,
    SandboxSpec,
    Score,
    Task,
)
from envserver.rollouts.rewards import delivered_score, rules_of_rewards
from envserver.workers.run import AttemptRun


class ScriptedRun:
    """Where nothing more is to be said, the turns are used up (or the last words are repeated).

    Args:
        turns: what the model says, or each agent by its name. The key `finish` of a message is the
            reason why it ended.
    """

    rollout_id, model, seconds_left = "a-rollout", "m", 600.0
    loop = AttemptRun.loop

    def __init__(
        self,
        turns: Iterable[Message] | Mapping[Any, Iterable[Message]] = (),
        *,
        max_turns: int = 50,
        repeats: bool = False,
        rooms: Sandboxes | None = None,
    ) -> None:
        by_agent = turns if isinstance(turns, Mapping) else {None: turns}
        self.left = {agent: deque(messages) for agent, messages in by_agent.items()}
        self.max_turns, self.repeats, self.rooms = max_turns, repeats, rooms
        self.asked: list[tuple[Any, list[Message]]] = []
        self.fields: dict[Any, Json] = {}
        """Of each agent the last request's other fields."""
        self.actions: list[tuple[str, Any, Any]] = []
        self.metrics: dict[str, float] = {}
        self.rewards: list[float] = []
        self.services: Mapping[str, Any] = {}
        self.caller: Caller | None = None
        self.spec: Any = None

    async def chat(self, messages: list[Message], *, agent: Any = None, **fields: Any) -> Reply:
        self.asked.append((agent, [dict(message) for message in messages]))
        self.fields[agent] = fields
        said = self.left.get(agent)
        if not said:
            raise LimitReached("All turns are used up.", limit="turns")
        message = said.popleft()
        if self.repeats and not said and message.get("tool_calls"):
            said.append(says(message["content"]))
        reason = message.get("finish", "tool_calls" if message.get("tool_calls") else "stop")
        message = {name: value for name, value in message.items() if name != "finish"}
        return Reply(message["content"], message.get("tool_calls") or [], reason, message)

    async def call_tool(self, name: str, arguments: Json) -> Any:
        return await self.services[name](arguments, self.caller)

    def open_sandbox(self, spec: SandboxSpec | None = None) -> AbstractAsyncContextManager[Any]:
        assert self.rooms is not None
        return self.rooms.open(spec or self.spec)

    def log_action(
        self, tool: str, input: Any = None, output: Any = None, *, error: str = ""
    ) -> None:
        json.dumps([input, output])
        self.actions.append((tool, input, output))

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name] = value

    def reward(self, value: float) -> None:
        self.rewards.append(value)

    @property
    def steps(self) -> list[str]:
        return [tool for tool, _, _ in self.actions]

    @property
    def sent(self) -> dict[Any, list[list[Message]]]:
        """All requests of each agent."""
        found = defaultdict(list)
        for agent, messages in self.asked:
            found[agent].append(messages)
        return found

    def told(self, agent: Any = None, role: str = "tool") -> list[str]:
        """What was said to an agent by `role` until its last request."""
        return [one["content"] for one in self.sent[agent][-1] if one["role"] == role]

    def assert_histories_only_grow(self) -> None:
        """Each request of an agent begins with its request before: one training sequence."""
        for requests in self.sent.values():
            for before, after in pairwise(requests):
                assert after[: len(before)] == before


def says(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calls(*made: tuple[str, Any], text: str = "", **more: Any) -> Message:
    """A message that calls tools; arguments are objects, or texts as a model writes them."""
    told = [
        {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": name, "arguments": text_of(given)},
        }
        for number, (name, given) in enumerate(made)
    ]
    return says(text, tool_calls=told, **more)


def text_of(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def call(name: str, content: str = "", **arguments: Any) -> Message:
    return calls((name, arguments), text=content)


async def played(environment: Environment, task: Task, run: ScriptedRun) -> Any:
    """The output of a rollout, as it travels."""
    run.spec = environment.sandbox
    async with AsyncExitStack() as stack:
        run.services = await stack.enter_async_context(environment.services())
        state = getattr(run.services, "state", None)
        run.caller = Caller("r", "g", task, lambda word: None, state and state(task))
        output = await environment.rollout(task.without_hidden(), run)  # type: ignore[arg-type]
    return json.loads(json.dumps(output))


async def scored(environment: Environment, task: Task, output: Any) -> Score:
    """The score as it is delivered: `reward` is its single number."""
    score = environment.score(task, output if isinstance(output, Result) else Result(output=output))
    score = score if isinstance(score, Score) else await score
    return delivered_score(score, rules_of_rewards(environment))
