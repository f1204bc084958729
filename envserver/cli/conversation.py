"""Shows conversations on a terminal: a heading for each message, its text, its calls."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from envserver_records.records import Group, Message, Trajectory, text_of

from .console import Console
from .loop import meanwhile

if TYPE_CHECKING:
    from ..running.asking import PersonRequest

_STYLES = {"assistant": "bold green", "user": "bold cyan", "tool": "bold yellow"}
_FIRST_MESSAGES: Final = 3
_LAST_MESSAGES: Final = 5
_LINES: Final = 4
_CHARACTERS: Final = 300
"""Lines, and characters, of the beginning and of the end of a shortened text."""


def show_messages(
    console: Console, messages: Sequence[Message], *, shortened: bool = False
) -> None:
    left_out = len(messages) - _FIRST_MESSAGES - _LAST_MESSAGES if shortened else 0
    for number, message in enumerate(messages):
        if left_out > 1 and _FIRST_MESSAGES <= number < _FIRST_MESSAGES + left_out:
            if number == _FIRST_MESSAGES:
                console.print(f"... {left_out} messages ...", style="dim", markup=False)
            continue
        role = str(message.get("role", "?"))
        console.print(f"[{role}]", style=_STYLES.get(role, "bold"), markup=False)
        for line in _lines(message):
            if shortened:
                console.print(_shortened(line), markup=False, highlight=False)
            else:
                console.say(line)


def show_rollout(
    console: Console, trajectory: Trajectory, place: str = "", *, shortened: bool = False
) -> None:
    console.rule(f"{trajectory.rollout_id}, task {trajectory.task_id}{place}", characters="-")
    show_messages(console, trajectory.messages, shortened=shortened)
    for other in trajectory.others:
        console.print(f"Agent {other.agent}:", style="bold", markup=False)
        show_messages(console, other.messages, shortened=shortened)
    score, limit = trajectory.score, trajectory.limit
    reward = "none" if score.reward is None else f"{score.reward:g}"
    parts = "".join(f", {name} {value:g}" for name, value in sorted(score.components.items()))
    ended = f"; ended by its limit: {limit}" if limit is not None else ""
    console.print(f"Reward: {reward}{parts}{ended}", markup=False, highlight=False)


def show_sample(console: Console, group: Group) -> None:
    """Prints the best and the worst rollout of a group (one, if all rewards are equal; of two
    both), with long texts and conversations shortened."""
    for rollout, place in _sample(group.trajectories):
        show_rollout(console, rollout, place, shortened=True)


def _sample(rollouts: list[Trajectory]) -> list[tuple[Trajectory, str]]:
    rated = [rollout for rollout in rollouts if rollout.score.reward is not None]
    if len(rollouts) <= 2 or not rated:
        return [(rollout, "") for rollout in rollouts[:2]]
    best, worst = (choose(rated, key=_reward) for choose in (max, min))
    if _reward(best) == _reward(worst):
        return [(best, f": all {len(rated)} have this reward")]
    return [(best, f": best of {len(rated)}"), (worst, f": worst of {len(rated)}")]


def _reward(rollout: Trajectory) -> float:
    return rollout.score.reward or 0.0


def _shortened(text: str) -> str:
    lines = text.splitlines()
    if len(lines) > 2 * _LINES + 1:
        left_out = len(lines) - 2 * _LINES
        text = "\n".join([*lines[:_LINES], f"... {left_out} lines ...", *lines[-_LINES:]])
    if len(text) > 2 * _CHARACTERS + 100:
        left_out = len(text) - 2 * _CHARACTERS
        middle = f" ... {left_out} characters ... "
        text = text[:_CHARACTERS] + middle + text[-_CHARACTERS:]
    return text


def _lines(message: Message) -> Iterator[str]:
    text = text_of(message)
    if text:
        yield text
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        yield f"-> {function.get('name')}({function.get('arguments')})"


FIRST_GROUPS: Final = 3
"""Groups that are all shown; of later ones, one each `SECONDS_BETWEEN`."""
SECONDS_BETWEEN: Final = 10.0
_LOOK_SECONDS: Final = 0.5


class Samples:
    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._shown = 0
        self._shown_at = -math.inf
        self._printing = asyncio.Lock()

    async def __call__(self, group: Group) -> None:
        now = self._clock()
        if self._shown >= FIRST_GROUPS and now < self._shown_at + SECONDS_BETWEEN:
            return
        self._shown += 1
        self._shown_at = now
        async with self._printing:  # groups may be done at the same time
            await asyncio.to_thread(show_sample, self._console, group)


@asynccontextmanager
async def sampled(console: Console, latest: Callable[[], Group | None]) -> AsyncIterator[None]:
    samples = Samples(console)

    async def look() -> None:
        seen: Group | None = None
        while True:
            group = latest()
            if group is not None and group is not seen:
                seen = group
                await samples(group)
            await asyncio.sleep(_LOOK_SECONDS)

    async with meanwhile("samples", look()):
        yield


_HELP = (
    "You are the model. Type an answer; an empty line sends it. A line that begins with ! calls a "
    'tool: !search {"query": "..."}. Ctrl-D leaves.'
)


class Person:
    """Shows each request and reads its answer; `read` raises EOFError at the end."""

    def __init__(self, console: Console, read: Callable[[str], str] = input) -> None:
        self._console = console
        self._read = read
        self._shown: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def answer(self, request: PersonRequest) -> Message | None:
        """Returns None at the end of the input. Blocks."""
        if not self._shown:
            self._say(_HELP)
        agent = request.line.partition("/")[2]
        if agent:
            self._say(f"Agent {agent}:")
        show_messages(self._console, request.messages[self._shown.get(request.line, 0) :])
        # The answer itself is the next message; the person has typed it, and need not see it.
        self._shown[request.line] = len(request.messages) + 1
        for tool in request.tools:
            self._say(f"  !{_signature(tool['function'])}")
        try:
            return self._typed(request.tools)
        except EOFError:
            return None

    def _typed(self, tools: Sequence[dict[str, Any]]) -> Message:
        lines: list[str] = []
        calls: list[dict[str, Any]] = []
        while True:
            line = self._read("> ")
            if not line.strip():
                break
            if not line.startswith("!"):
                lines.append(line)
            elif complaint := self._called(line, tools, calls):
                self._say(f"{complaint} Type it again.")
        return {"role": "assistant", "content": "\n".join(lines), "tool_calls": calls}

    def _called(
        self, line: str, tools: Sequence[dict[str, Any]], calls: list[dict[str, Any]]
    ) -> str:
        name, _, text = line[1:].strip().partition(" ")
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
        if name not in schemas:
            return f"There is no tool {name!r}: {', '.join(schemas) or 'no tools are offered'}."
        try:
            arguments = json.loads(text or "{}")
        except ValueError as error:
            return f"The arguments are not JSON: {error}."
        if wrong := _invalid(arguments, schemas[name] or {}):
            return f"{name} rejects these arguments: {wrong}."
        function = {"name": name, "arguments": json.dumps(arguments)}
        calls.append(
            {"id": f"call_{next(self._numbers)}", "type": "function", "function": function}
        )
        return ""

    def _say(self, text: str) -> None:
        self._console.say(text, style="dim")


def _signature(function: dict[str, Any]) -> str:
    schema = function.get("parameters") or {}
    required = schema.get("required") or ()
    names = ", ".join(
        f"{name}{'' if name in required else '?'}" for name in schema.get("properties") or {}
    )
    return f"{function['name']} {{{names}}}  {function.get('description') or ''}".rstrip()


def _invalid(arguments: Any, schema: dict[str, Any]) -> str:
    """ "" if the schema allows the arguments."""
    from jsonschema import Draft202012Validator

    if not isinstance(arguments, dict):
        return "the arguments must be a JSON object"
    error = next(iter(Draft202012Validator(schema).iter_errors(arguments)), None)
    return "" if error is None else error.message
