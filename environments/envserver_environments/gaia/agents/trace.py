"""An agent's steps as data for the trajectory."""

from __future__ import annotations

import json
from typing import Any

from envserver import Rollout

from ..interpreter.process import shortened

THOUGHT_CHARACTERS = 4000
CODE_CHARACTERS = 8000
OBSERVATION_CHARACTERS = 4000


class Trace:
    """The steps of a run: kept here, and sent to the server at once."""

    def __init__(self, run: Rollout) -> None:
        self.steps: list[dict[str, Any]] = []
        self._run = run

    def add(self, step: dict[str, Any]) -> None:
        """Adds a step, in the form of `step_data`."""
        self.steps.append(step)
        thought = step["thought"]
        match step["action"]:
            case None | []:
                self._run.log_action("plan" if step["step"] == 0 else "say", {}, thought)
                return
            case str() as code:
                tool, given = "python", {"code": code}
            case [call]:
                tool, given = str(call["name"]).strip() or "call", call["arguments"]
            case calls:
                tool, given = "several", {"calls": calls}
        if thought:
            self._run.log_action("reason", {}, thought)
        error = step["error"]
        failed = "" if error is None else f"{error['kind']}: {error['message']}"
        self._run.log_action(tool, given, step["observation"], error=failed)


def step_data(
    number: int,
    *,
    thought: str,
    action: str | list[dict[str, Any]] | None,
    observation: str,
    error: tuple[str, str] | None,
    tokens: tuple[int, int],
    seconds: float,
    final: bool = False,
) -> dict[str, Any]:
    """Returns one step as data.

    Args:
        action: code, or tool calls as name and arguments.
        error: its kind (parsing, execution, timeout, died, tool) and its first words.
        tokens: token counts of the prompt and of the turn.
    """
    return {
        "step": number,
        "thought": shortened(thought.strip(), THOUGHT_CHARACTERS),
        "action": shortened(action, CODE_CHARACTERS) if isinstance(action, str) else action,
        "observation": shortened(observation, OBSERVATION_CHARACTERS),
        "error": None if error is None else {"kind": error[0], "message": error[1][-500:]},
        "tokens": {"prompt": tokens[0], "completion": tokens[1]},
        "seconds": round(seconds, 3),
        "final": final,
    }


def call_data(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call in OpenAI's shape as its name and arguments."""
    arguments = call["function"]["arguments"]
    try:
        arguments = json.loads(arguments)
    except (TypeError, ValueError):
        arguments = str(arguments)
    return {"name": call["function"]["name"], "arguments": arguments}
