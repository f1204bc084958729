"""World states at the start of a task and after a conversation.

`start` makes the world in which a task begins; `replay_messages` replays the calls of a
conversation, as tau2-bench's evaluation does: only calls that change data run again, and their
results must equal the recorded ones.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from envserver import InputError

from .domains.world import CallResult, Domain, World
from .tasks import TauMessage, TauTask


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
    """Makes the calls of `messages` that change data, in their order."""
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
) -> Iterator[tuple[Mapping[str, Any], TauMessage]]:
    """Each call of a conversation with the message that holds its result."""
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
    """Is it the recorded one? Where only a digest of that was kept, the digest decides."""
    content = recorded.get("content")
    if content is None and "content_sha256" in recorded:
        digest = hashlib.sha256(result.content.encode()).hexdigest()
        return digest == str(recorded["content_sha256"])
    return bool(_parsed(result.content) == _parsed(content))


def _parsed(content: Any) -> Any:
    try:
        return json.loads(content)
    except (TypeError, ValueError):
        return content
