"""The judge of assertions in natural language (NL_ASSERTION): a service of the server.

In: a finished conversation. Out: `{"verdicts": [bool, ...]}`, one for each of the task's
assertions, in order. The assertions stay on the server: neither a worker nor a recorded call has
them. A judge without a valid answer after some tries is an infrastructure failure (ServiceError):
the rollout is retried, then dropped, never scored 0.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from envserver import Caller, InputError, Service, ServiceError, Task

from .agent import JUDGE
from .prompts import judge_messages
from .rows import message_of_row
from .tasks import TauMessage

TRIES = 3
"""Maximum number of requests until an answer is valid."""
_SECONDS = 120.0

Ask = Callable[[list[dict[str, str]]], Awaitable[str]]
"""Messages in, the model's text out."""


@dataclass(frozen=True)
class JudgeModel:
    """The judge's model.

    Args:
        base_url: of an OpenAI-compatible server, with or without `/v1`.
        name: of the model; None: the first that its server lists.
    """

    base_url: str
    name: str | None
    api_key: str
    temperature: float = 0.0


class _Verdict(BaseModel):
    met: bool


class _Verdicts(BaseModel):
    results: list[_Verdict]


@contextlib.asynccontextmanager
async def judge_services(
    model: JudgeModel, assertions_of: Callable[[Task], Sequence[str]]
) -> AsyncIterator[Mapping[str, Service]]:
    """Returns the service `judge`, which calls `model`.

    Args:
        assertions_of: returns the assertions of a task.
    """
    import openai

    root = model.base_url.rstrip("/").removesuffix("/v1")
    client = openai.AsyncOpenAI(
        base_url=f"{root}/v1", api_key=model.api_key or "none", timeout=_SECONDS
    )

    async def ask(messages: list[dict[str, str]]) -> str:
        try:
            completion = await client.chat.completions.create(
                model=model.name or await _first(client),
                messages=messages,  # type: ignore[arg-type]
                temperature=model.temperature,
            )
        except openai.OpenAIError as error:
            raise ServiceError(f"The judge's model failed: {type(error).__name__}.") from error
        return completion.choices[0].message.content or ""

    async def judge(arguments: dict[str, Any], caller: Caller) -> dict[str, Any]:
        said = arguments.get("messages")
        if not isinstance(said, list):
            raise InputError("There is no conversation.")
        messages = [message_of_row(message, number) for number, message in enumerate(said)]
        return {"verdicts": await verdicts(ask, assertions_of(caller.task), messages)}

    async with client:
        yield {JUDGE: judge}


async def verdicts(
    ask: Ask, assertions: Sequence[str], messages: Sequence[TauMessage]
) -> list[bool]:
    """Returns whether each assertion is met; without assertions no model is called.

    Raises:
        ServiceError: no answer was valid.
    """
    if not assertions:
        return []
    asked = judge_messages(assertions, messages)
    for _ in range(TRIES):
        found = read_verdicts(await ask(asked), len(assertions))
        if found is not None:
            return found
    raise ServiceError(f"The judge's model gave no verdicts that could be read, {TRIES} times.")


def read_verdicts(text: str, count: int) -> list[bool] | None:
    """Parses the verdicts in an answer; None if they are invalid or not `count`."""
    start, end = text.find("{"), text.rfind("}")
    try:
        read = _Verdicts.model_validate(json.loads(text[start : end + 1]), strict=True)
    except (ValueError, ValidationError, RecursionError):
        return None
    return [one.met for one in read.results] if len(read.results) == count else None


async def _first(client: Any) -> str:
    listed = await client.models.list()
    return str(listed.data[0].id)
