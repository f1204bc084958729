"""Tasks of a server as the prompts of a TRL data set, and back.

TRL's rollout function gets the `prompt` column alone, so what names the task stands in it:
`environment/split:task_id`. The model never sees it: the environment's agent says what it sees.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

from envserver_records import InputError, Split

from envserver_clients.http import SyncEnvClient

_NAMED: Final = re.compile(rf"([^/:\s]+)/({'|'.join(get_args(Split))}):(.+)", re.DOTALL)


@dataclass(frozen=True)
class TaskName:
    """A task of a server."""

    environment: str
    split: Split
    task_id: str

    def prompt(self) -> str:
        """It as a prompt."""
        return f"{self.environment}/{self.split}:{self.task_id}"


def task_of(prompt: Any) -> TaskName:
    """The task that a prompt names: a text, or messages of which the last one is it.

    Raises:
        InputError: it names none.
    """
    text = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    named = _NAMED.fullmatch(text) if isinstance(text, str) else None
    if named is None:
        raise InputError(
            f"The prompt {str(text)[:100]!r} names no task.",
            hint="Make the data set with task_prompts: environment/split:task_id.",
            place="prompt",
        )
    return TaskName(named[1], cast(Split, named[2]), named[3])


def task_prompts(
    server_url: str,
    environment: str,
    *,
    split: Split = "train",
    limit: int = 1000,
    token: str | None = None,
) -> list[dict[str, str]]:
    """The first tasks of a split as rows of a data set: `Dataset.from_list(task_prompts(...))`.

    Raises:
        NotFoundError: the server has no such environment.
    """
    with SyncEnvClient(server_url, run=None, token=token) as client:
        tasks = client.tasks(environment, split=split, limit=limit)
    return [{"prompt": TaskName(environment, split, task.task_id).prompt()} for task in tasks]
