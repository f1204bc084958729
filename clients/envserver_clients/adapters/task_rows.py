"""Writes a server's tasks as the data set of a trainer that names them: verl, SkyRL or slime.

    python -m envserver_clients.adapters.task_rows http://127.0.0.1:8000 math train.jsonl

In: a server and the name of an environment. Out: a file of JSON lines, one row for each task. The
columns are those of all three: verl reads `extra_info`, SkyRL `env_class` and every other column,
slime `metadata`. Prompts only name the task: the environment makes the real ones.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from envserver_records import Split

from envserver_clients.sync import SyncEnvClient


def task_rows(
    client: SyncEnvClient, environment: str, split: Split | None = None, limit: int = 1000
) -> Iterator[dict[str, Any]]:
    """Yields a row for each of at most `limit` tasks; `split` None: the one the server serves."""
    for index, task in enumerate(client.tasks(environment, split=split, limit=limit)):
        named = {"task_id": task.task_id, "environment": environment}
        if split is not None:
            named["split"] = split
        yield {
            "prompt": [{"role": "user", "content": f"{environment}: {task.task_id}"}],
            "data_source": environment,
            "env_class": environment,
            "extra_info": {**named, "index": index},
            "metadata": named,
            **named,
        }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("url", help="the server's address")
    parser.add_argument("environment")
    parser.add_argument("file", type=Path, help="where the rows go: NAME.jsonl")
    parser.add_argument("--split", choices=["train", "validation", "test"])
    parser.add_argument("--limit", type=int, default=1000, help="maximum number of tasks")
    arguments = parser.parse_args(argv)
    with SyncEnvClient(arguments.url, run=None) as client:
        rows = list(task_rows(client, arguments.environment, arguments.split, arguments.limit))
    arguments.file.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
