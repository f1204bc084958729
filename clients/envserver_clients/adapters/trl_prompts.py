"""Turns a server's tasks into prompts of a TRL data set, and back.

TRL passes only the `prompt` column to the rollout function, so the prompt names the task:
`environment/split:task_id`. The model never sees it: the environment's agent writes its prompt.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

from envserver_records import InputError, Split
from envserver_records.http_errors import Urls

from envserver_clients.http import SyncEnvClient

_NAMED: Final = re.compile(rf"([^/:\s]+)/({'|'.join(get_args(Split))}):(.+)", re.DOTALL)


@dataclass(frozen=True)
class TaskName:
    environment: str
    split: Split
    task_id: str

    def prompt(self) -> str:
        return f"{self.environment}/{self.split}:{self.task_id}"


def task_of(prompt: Any) -> TaskName:
    """Parses a prompt: a text, or messages whose last one is that text. Raises InputError."""
    text = prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt
    named = _NAMED.fullmatch(text) if isinstance(text, str) else None
    if named is None:
        raise InputError(
            f"The prompt {str(text)[:100]!r} does not name a task.",
            hint="Make the data set with task_prompts: environment/split:task_id.",
            place="prompt",
        )
    return TaskName(named[1], cast(Split, named[2]), named[3])


def task_prompts(
    server_url: Urls,
    environment: str,
    *,
    split: Split = "train",
    limit: int = 1000,
    token: str | None = None,
) -> list[dict[str, str]]:
    """The first tasks of a split as rows: `Dataset.from_list(task_prompts(...))`.

    Raises NotFoundError: the server does not have the environment.
    """
    with SyncEnvClient(server_url, run=None, token=token) as client:
        tasks = client.tasks(environment, split=split, limit=limit)
    return [{"prompt": TaskName(environment, split, task.task_id).prompt()} for task in tasks]
