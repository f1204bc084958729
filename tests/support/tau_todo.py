"""A to-do list of our own in tau2-bench's format (its domain `mock`)."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def todo_list(folder: Path, tasks: Sequence[dict[str, Any]]) -> Path:
    """Writes the domain with `tasks`; returns the folder for `--env.tau2_data`."""
    place = folder / "domains" / "mock"
    place.mkdir(parents=True)
    contents: dict[str, Any] = {
        "db": {
            "tasks": {"t1": {"task_id": "t1", "title": "First", "status": "pending"}},
            "users": {"u": {"user_id": "u", "name": "Uma", "tasks": ["t1"]}},
        },
        "tasks": tasks,
        "split_tasks": {"base": [task.get("id") for task in tasks]},
    }
    for name, content in contents.items():
        (place / f"{name}.json").write_text(json.dumps(content))
    (place / "policy.md").write_text("Tasks are finished when their owner says so.")
    return folder
